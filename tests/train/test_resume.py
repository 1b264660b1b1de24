"""Interrupted and resumed is uninterrupted, bit for bit: wherever it was stopped, and whatever stopped it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from starscope.errors import InvalidContentError
from starscope.train.checkpoints import CURRENT, PREVIOUS, State, load_checkpoint, read_checkpoint, save_checkpoint
from starscope.train.data import Batches
from starscope.train.loop import Trainer, differing
from support.runs import make_trainer, read_log, same_bits

STEPS = 9


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Trainer, Path]:
    """A run that nobody stopped: four micro-batches a step, more than two epochs."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = make_trainer(folder, steps=STEPS, micro_batch_size=2)
    trainer.run()
    assert trainer.step * 8 > 2 * trainer.batches.per_epoch
    return trainer, folder


@pytest.mark.parametrize("micro_batch", range(1, 4 * STEPS - 1))
def test_a_run_stopped_after_any_micro_batch_resumes_with_the_same_bits(tmp_path, whole, micro_batch):
    """Also in the middle of an accumulation, and in the second and third epoch."""
    stopped = make_trainer(tmp_path, steps=STEPS, micro_batch_size=2)
    left = micro_batch

    def stop() -> bool:
        nonlocal left
        left -= 1
        return left <= 0

    while stopped.step < STEPS:
        if stopped.train_step(stop) is None:
            break
        left -= 1  # the last micro-batch of a step is not asked about
        if left <= 0:
            break
    stopped.save()
    state = read_checkpoint(tmp_path / CURRENT)
    assert (stopped._done > 0) == any(name.startswith("gradient:") for name in state.arrays)
    resumed = make_trainer(tmp_path, steps=STEPS, micro_batch_size=2)
    assert resumed.resume() == ""
    assert (resumed.step, resumed._done) == divmod(2 * micro_batch, 8)
    resumed.run()
    assert same_bits(resumed.weights(), whole[0].weights())
    losses = read_log(tmp_path, "loss")
    assert losses == read_log(whole[1], "loss")[-len(losses) :]
    assert len(losses) == STEPS - micro_batch // 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_between_two_micro_batches_and_nothing_is_lost(tmp_path, whole, number):
    trainer = make_trainer(tmp_path, steps=STEPS, micro_batch_size=2)
    real, calls = trainer.forward.loss_sum, []

    def loss_sum(*given: object) -> torch.Tensor:
        calls.append(given)
        if len(calls) == 14:  # the second micro-batch of step 3
            os.kill(os.getpid(), number)
        return real(*given)

    trainer.forward.loss_sum = loss_sum  # type: ignore[method-assign]
    outcome = trainer.run()
    assert (outcome.step, outcome.signal, len(calls)) == (3, number, 14)
    resumed = make_trainer(tmp_path, steps=STEPS, micro_batch_size=2)
    resumed.resume()
    resumed.run()
    assert same_bits(resumed.weights(), whole[0].weights())
    assert read_log(tmp_path, "loss") == read_log(whole[1], "loss")


def test_losses_between_two_lines_of_the_log_survive(tmp_path):
    make_trainer(tmp_path / "whole", steps=10, log_every=5).run()
    for steps in (3, 10):
        part = make_trainer(tmp_path / "parts", steps=10, log_every=5)
        if steps == 10:
            part.resume()
        while part.step < steps and steps == 3:
            part._losses.append(part.train_step()[0])  # type: ignore[index]
        if steps == 3:
            part.save()
        else:
            part.run()
    assert read_log(tmp_path / "parts", "loss") == read_log(tmp_path / "whole", "loss")


def test_every_resume_goes_on_with_new_samples(tmp_path):
    """nanoGPT draws the same batches again after each resume."""
    seen: list[int] = []

    class Watched(Batches):
        def sample(self, number: int) -> np.ndarray:
            seen.append(number)
            return super().sample(number)

    for steps in (2, 4, 6):
        trainer = make_trainer(tmp_path, steps=steps)
        trainer.batches = Watched(trainer.batches.ids, context_length=32, seed=0)
        if steps > 2:
            trainer.resume()
        trainer.run()
    assert seen == list(range(6 * 8))


def test_the_second_epoch_has_its_own_order_and_every_sample_after_a_resume(tmp_path):
    """litgpt's later epochs saw only what the interrupted one had left; accelerate repeated the order."""
    trainer = make_trainer(tmp_path, steps=1)
    per_epoch = trainer.batches.per_epoch
    trainer.run()
    resumed = make_trainer(tmp_path, steps=STEPS)
    resumed.resume()
    first, second = ([resumed.batches.start(e * per_epoch + i) for i in range(per_epoch)] for e in (0, 1))
    assert len(set(second)) == per_epoch
    assert first != second


def test_a_precision_that_a_probe_chose_is_kept_on_resume(tmp_path, monkeypatch):
    monkeypatch.setattr("starscope.train.loop.choose_precision", lambda: (torch.bfloat16, "bfloat16: it is faster"))
    make_trainer(tmp_path, steps=1, precision="auto").run()
    monkeypatch.setattr("starscope.train.loop.choose_precision", lambda: (torch.float32, "float32: not faster today"))
    resumed = make_trainer(tmp_path, steps=2, precision="auto")
    resumed.resume()
    assert (resumed.dtype, resumed.why) == (torch.bfloat16, "bfloat16: as before")


def test_another_number_of_threads_is_said(tmp_path, monkeypatch):
    make_trainer(tmp_path, steps=1).run()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert "and now there are 64: last bits may differ" in make_trainer(tmp_path).resume()


def test_names_in_a_checkpoint_are_the_models_own(tmp_path):
    """Not those of a compiled or wrapped module, which another process could not find again."""
    trainer = make_trainer(tmp_path, steps=1)
    trainer.run()
    names = set(read_checkpoint(tmp_path / CURRENT).arrays)
    kinds = ("parameter", "exp_avg", "exp_avg_sq")
    assert names == {f"{kind}:{name}" for kind in kinds for name in trainer.engine.parameters}


def test_a_checkpoint_of_an_older_version_with_a_step_for_each_weight_goes_on_with_the_same_bits(tmp_path, whole):
    part = make_trainer(tmp_path, steps=4, micro_batch_size=2)
    part.run()
    state = read_checkpoint(tmp_path / CURRENT)
    steps = {f"step:{name}": np.array(4, np.float32) for name in part.engine.parameters}
    facts = {name: fact for name, fact in state.facts.items() if name not in ("progress", "options")}
    save_checkpoint(tmp_path, State(state.step, {**state.arrays, **steps}, facts))
    resumed = make_trainer(tmp_path, steps=STEPS, micro_batch_size=2)
    assert resumed.resume() == ""
    resumed.run()
    assert same_bits(resumed.weights(), whole[0].weights())


def test_other_data_a_changed_optimizer_or_another_shape_is_refused_on_resume(tmp_path):
    make_trainer(tmp_path, steps=1, facts={"data": "a"}).run()
    for changes, said in (
        ({"seed": 1, "facts": {"data": "a"}}, "was made with seed 0; now it is 1"),
        ({"facts": {"data": "b"}}, "was made with data a; now it is b"),
        ({"facts": {"data": "a"}, "optimizer": "lbfgs"}, "was made with optimizer adamw; now it is lbfgs"),
    ):
        with pytest.raises(InvalidContentError, match=said):
            make_trainer(tmp_path, **changes).resume()
    make_trainer(tmp_path / "lbfgs", steps=1, optimizer="lbfgs", lbfgs_iterations=1).run()
    with pytest.raises(InvalidContentError, match="was made with optimizer lbfgs; now it is adamw"):
        make_trainer(tmp_path / "lbfgs").resume()


def test_of_another_shape_the_sizes_that_differ_are_named():
    found, expected = {"hidden_size": 16, "num_layers": 1, "act": "x"}, {"hidden_size": 32, "num_layers": 1, "act": "x"}
    assert differing("hparams", found, expected) == "hidden_size 16; now it is hidden_size 32"
    assert differing("seed", 1, 2) == "seed 1; now it is 2"


def test_a_run_goes_on_from_the_previous_checkpoint_when_the_last_is_cut(tmp_path):
    trainer = make_trainer(tmp_path, steps=8, save_every=4)
    trainer.run()
    path = tmp_path / CURRENT
    path.write_bytes(path.read_bytes()[:1000])
    again = make_trainer(tmp_path, steps=8, save_every=4)
    assert "The previous checkpoint is used" in again.resume()
    again.run()
    assert same_bits(again.weights(), trainer.weights())
    losses = read_log(tmp_path, "loss")
    assert losses == [*dict.fromkeys(losses)]  # no step twice


CHILD = """
    import sys
    from pathlib import Path
    import numpy as np
    from starscope.train.checkpoints import State, save_checkpoint

    step = int(sys.argv[2])
    while True:
        step += 1
        arrays = {f"a{i}": np.full(200_000, step, np.float32) for i in range(8)}
        save_checkpoint(Path(sys.argv[1]), State(step, arrays, {"of": step}))
        print(step, flush=True)
"""


def test_a_whole_checkpoint_is_there_after_a_kill_in_the_middle_of_a_save(tmp_path):
    """SIGKILL at many moments: what is loaded is whole, and no older than the last save that came to its end."""
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD))
    folder, step = tmp_path / "run", 0
    for attempt in range(8):
        child = subprocess.Popen([sys.executable, script, folder, str(step)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.005 + 0.007 * attempt)
        child.kill()
        finished = [step + 1, *map(int, child.stdout.read().split())][-1]
        child.wait()
        child.stdout.close()
        state, _ = load_checkpoint(folder)
        assert state.step >= finished
        assert all((array == state.step).all() for array in state.arrays.values())
        step = state.step
    assert {path.name for path in folder.iterdir()} <= {CURRENT, PREVIOUS, f"{CURRENT}.tmp"}


def test_a_training_run_killed_while_it_saves_resumes_with_the_same_bits(tmp_path, whole):
    trainer = make_trainer(tmp_path, steps=6, micro_batch_size=2, save_every=3)
    trainer.run()
    # What a kill leaves behind between the two renames, with half of a newer file beside it.
    (tmp_path / CURRENT).replace(tmp_path / PREVIOUS)
    (tmp_path / f"{CURRENT}.tmp").write_bytes(b"half of it")
    resumed = make_trainer(tmp_path, steps=STEPS, micro_batch_size=2)
    assert "The previous checkpoint is used" in resumed.resume()
    resumed.run()
    assert same_bits(resumed.weights(), whole[0].weights())
    assert not list(tmp_path.glob("*.tmp"))


def test_a_checkpoint_says_what_the_run_was_asked_for(tmp_path):
    trainer = make_trainer(tmp_path, steps=1)
    trainer.run()
    asked = read_checkpoint(tmp_path / CURRENT).facts["options"]
    assert asked["schedule"]["decay_steps"] == trainer.options.schedule.decay_steps
    assert json.loads(json.dumps(asked)) == asked
