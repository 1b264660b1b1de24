"""The loop learns, resumes with the same bits, and ends without losing anything."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from starscope.errors import UsageError
from starscope.machine import STOPPING
from starscope.perplexity import measure
from starscope.train.data import Batches
from starscope.train.evaluation import measure_held_out
from starscope.train.interrupts import noted_signals
from starscope.train.loop import (
    HeldOut,
    NonFiniteLossError,
    Trainer,
    TrainOptions,
    bits_per_byte,
)
from starscope.train.precision import PROBE_SECONDS, _probe, choose_precision
from starscope.train.schedules import Schedule
from starscope.train.stopping import EarlyStop
from support.runs import FIM, HELD_OUT, SCHEDULE, make_trainer, read_log, same_bits
from support.training import tiny_graph, tiny_ids


def test_a_tiny_text_is_learned_by_heart(tmp_path):
    schedule = Schedule(peak=1e-2, warmup_steps=5, decay_steps=150)
    trainer = make_trainer(tmp_path, fim_rate=0.0, steps=150, schedule=schedule)
    before = trainer.evaluate()
    outcome = trainer.run()
    losses = read_log(tmp_path, "loss")
    assert losses[0] == pytest.approx(math.log(300), rel=0.05)
    assert losses[-1] < 1.2
    assert outcome.signal is None
    assert outcome.bits_per_byte < 0.5 * before


def test_stopped_and_resumed_is_the_same_bits_as_never_stopped(tmp_path):
    whole = make_trainer(tmp_path / "whole", steps=24)
    whole.run()
    make_trainer(tmp_path / "parts", steps=9).run()  # in the middle of an epoch
    for steps in (17, 24):  # and past its end
        part = make_trainer(tmp_path / "parts", steps=steps)
        assert part.resume() == ""
        part.run()
    assert part.step == whole.step == 24
    assert whole.step * 8 > 2 * whole.batches.per_epoch
    assert same_bits(part.weights(), whole.weights())
    assert read_log(tmp_path / "parts", "loss") == read_log(tmp_path / "whole", "loss")


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_ends_the_step_saves_and_is_named(tmp_path, number):
    trainer = make_trainer(tmp_path, steps=10_000)
    step = trainer.train_step

    def interrupted(stop: Callable[[], bool]) -> tuple[float, float] | None:
        if trainer.step == 3:
            os.kill(os.getpid(), number)
        return step(lambda: False)  # this step is made to its end

    trainer.train_step = interrupted  # type: ignore[method-assign]
    before = signal.getsignal(number)
    outcome = trainer.run()
    assert (outcome.step, outcome.signal) == (4, number)
    assert signal.getsignal(number) == before
    resumed = make_trainer(tmp_path)
    resumed.resume()
    assert resumed.step == 4
    assert same_bits(resumed.weights(), trainer.weights())


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_that_is_ignored_stays_ignored(tmp_path, number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with noted_signals() as noted:
            os.kill(os.getpid(), number)
            assert noted() is None
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_run_may_be_in_any_thread(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(make_trainer(tmp_path, steps=3).run).result()
    assert (outcome.step, outcome.signal) == (3, None)


def test_accumulation_is_the_same_as_one_large_batch(tmp_path):
    def shortened(ids: np.ndarray, _epoch: int, index: int) -> np.ndarray:
        """Padded differently, so that the parts have unequal numbers of targets."""
        return np.where(np.arange(len(ids)) < len(ids) - index % 7 * 4, ids, FIM.pad)

    one, four = (make_trainer(tmp_path / str(size), micro_batch_size=size) for size in (8, 2))
    for trainer in (one, four):
        trainer.batches = Batches(tiny_ids(), context_length=32, seed=0, transform=shortened)
    counts = (one.batches.batch(0, 8) != FIM.pad).reshape(4, -1).sum(1)
    assert len(set(counts.tolist())) > 1
    for _ in range(3):
        a, b = one.train_step(), four.train_step()
        assert a == pytest.approx(b, rel=1e-4)
    for name, array in one.weights().items():
        assert np.abs(array - four.weights()[name]).max() < 2e-4


def test_a_loss_that_is_not_finite_stops_and_names_the_step(tmp_path):
    trainer = make_trainer(tmp_path, save_every=2)
    for _ in range(2):
        trainer.train_step()
    trainer.save()
    with torch.no_grad():
        trainer.engine.parameters["norm.weight"][0] = math.nan
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan .* at step 2 \(samples 16 to 23\)"):
        trainer.run()
    again = make_trainer(tmp_path)
    again.resume()
    assert all(np.isfinite(array).all() for array in again.weights().values())


def test_bits_per_byte_are_those_of_the_tokens_one_by_one(tmp_path):
    trainer = make_trainer(tmp_path)
    ids = [FIM.end_of_text, *HELD_OUT.documents[0].tolist()][:33]
    held_out = HeldOut([np.array(ids[1:])], 100, FIM.end_of_text)
    with torch.no_grad():
        logits = trainer.engine.logits(torch.tensor([ids[:-1]]))[0].double()
    nats = -torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum().item()
    found = bits_per_byte(trainer.engine, held_out, context_length=32, stride=32)
    assert found == pytest.approx(nats / math.log(2) / 100, rel=1e-5)


def test_bfloat16_is_chosen_only_where_it_pays(monkeypatch):
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr("starscope.train.precision._probe", lambda: {torch.float32: 1.0, torch.bfloat16: 0.5})
    assert choose_precision() == (torch.bfloat16, "bfloat16: a product in bfloat16 is 2.0 times as fast as in float32")
    monkeypatch.setattr("starscope.train.precision._probe", lambda: {torch.float32: 1.0, torch.bfloat16: 0.9})
    assert choose_precision()[0] == torch.float32
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    assert choose_precision() == (torch.float32, "float32: this processor has no bfloat16 arithmetic")


def test_the_probe_takes_turns_and_the_least_of_each_within_its_time(monkeypatch):
    """So that another program, which stops one product or slows down many, decides nothing."""
    now = [0.0]

    def clock() -> float:  # every fourth product is interrupted for 10 ms
        calls[0] += 1
        now[0] += 0.010 if calls[0] % 13 == 0 else 0.0005
        return now[0]

    calls = [0]
    monkeypatch.setattr("starscope.train.precision.time.perf_counter", clock)
    least = _probe()
    assert list(least.values()) == pytest.approx([0.0005, 0.0005])
    assert PROBE_SECONDS <= now[0] < PROBE_SECONDS + 0.03


def test_options_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="not whole micro-batches of 3"):
        TrainOptions(steps=1, schedule=SCHEDULE, batch_size=8, micro_batch_size=3)
    with pytest.raises(UsageError, match="expected auto, float32 or bfloat16"):
        TrainOptions(steps=1, schedule=SCHEDULE, precision="float16")


def test_the_held_out_loss_is_that_of_the_perplexity_command(tmp_path):
    """Also of documents longer than the context, whose last window is mostly context."""
    trainer = make_trainer(tmp_path)
    ids = tiny_ids(3).astype(np.int64)
    held_out = HeldOut([ids[:100], ids[7:19], ids[50:82], ids[:0]], 300, FIM.end_of_text)
    found = measure_held_out(trainer.forward, held_out, 32)
    expected = measure(trainer.engine, held_out.documents, held_out.bytes, first=FIM.end_of_text, window=32, stride=32)
    assert (found.tokens, found.bytes) == (expected.tokens, expected.bytes)
    assert found.nats == pytest.approx(expected.nats, rel=1e-6)


def test_the_end_of_a_run_says_the_held_out_loss_in_nats(tmp_path):
    trainer = make_trainer(tmp_path, steps=1)
    outcome = trainer.run()
    tokens = sum(map(len, HELD_OUT.documents))
    assert outcome.held_out_loss * tokens / math.log(2) / HELD_OUT.bytes == pytest.approx(outcome.bits_per_byte)


def test_lbfgs_lowers_the_loss_of_its_batch_faster_than_adamw_and_resumes_with_the_same_bits(tmp_path):
    options = {"optimizer": "lbfgs", "lbfgs_iterations": 8, "batch_size": 4, "fim_rate": 0.0}
    whole = make_trainer(tmp_path / "whole", steps=3, **options)
    batch = torch.from_numpy(whole.batches.batch(0, 4))
    before = whole._mean_loss(batch)
    whole.train_step()
    assert whole._mean_loss(batch) < 0.8 * before
    whole.step = 0
    fresh = make_trainer(tmp_path / "whole", steps=3, **options)
    fresh.run()
    make_trainer(tmp_path / "parts", steps=2, **options).run()
    part = make_trainer(tmp_path / "parts", steps=3, **options)
    part.resume()
    part.run()
    assert same_bits(part.weights(), fresh.weights())


def test_lbfgs_stops_at_a_loss_that_is_not_finite_and_leaves_the_weights(tmp_path):
    trainer = make_trainer(tmp_path, optimizer="lbfgs")
    with torch.no_grad():
        trainer.engine.parameters["norm.weight"][0] = math.nan
    before = trainer.weights()
    with pytest.raises(NonFiniteLossError, match="There is no checkpoint from before"):
        trainer.train_step()
    assert same_bits(trainer.weights(), before)


def test_a_run_that_has_converged_ends_early_and_says_why(tmp_path):
    outcome = make_trainer(tmp_path, steps=50, early_stop=EarlyStop(tolerance=10.0)).run()
    assert outcome.step == 2
    assert outcome.converged == "a step changed the loss by less than 10 of it"
    assert read_log(tmp_path, "converged") == [outcome.converged]
    assert outcome.bits_per_byte is not None


def test_training_goes_on_from_given_weights(tmp_path):
    first = make_trainer(tmp_path / "a", steps=1)
    first.run()
    second = Trainer(tiny_graph(), first.batches, first.options, folder=tmp_path / "b", initial=first.weights())
    assert same_bits(second.weights(), first.weights())


@pytest.mark.parametrize("name", ["batch_size", "micro_batch_size", "log_every", "evaluate_every", "save_every"])
def test_sizes_and_intervals_are_positive(name):
    with pytest.raises(UsageError, match=f"{name} is 0; expected at least 1"):
        TrainOptions(steps=1, schedule=SCHEDULE, **{name: 0})


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(UsageError, match="'sgd'; expected adamw or lbfgs"):
        TrainOptions(steps=1, schedule=SCHEDULE, optimizer="sgd")


def test_training_on_the_cpu_asks_nothing_of_cuda(tmp_path, monkeypatch):
    """nanoGPT stopped on machines without a GPU, asking the GPU whether it has bfloat16."""

    def asked(*_: object, **__: object) -> None:
        raise AssertionError

    for name in ("_lazy_init", "is_bf16_supported", "get_device_properties", "current_device"):
        monkeypatch.setattr(torch.cuda, name, asked)
    trainer = make_trainer(tmp_path, steps=1, precision="auto")
    assert trainer.run().step == 1


def test_batches_depend_on_the_sample_alone_not_on_micro_batches(tmp_path):
    one, four = (make_trainer(tmp_path / str(size), micro_batch_size=size) for size in (8, 2))
    assert (one.batches.batch(16, 8) == np.concatenate([four.batches.batch(16 + i, 2) for i in (0, 2, 4, 6)])).all()


def test_tokens_a_second_are_of_the_time_of_the_steps_alone(tmp_path, monkeypatch):
    """Not of evaluations and checkpoints, and not of the time of day."""
    now = [1e6]
    monkeypatch.setattr("starscope.train.loop.time.perf_counter", lambda: now[0])
    trainer = make_trainer(tmp_path, steps=4, evaluate_every=2, save_every=1, log_every=1)

    def step(_stop: Callable[[], bool]) -> tuple[float, float]:
        now[0] += 0.5
        trainer.step += 1
        return 1.0, 1.0

    def evaluate() -> float:
        now[0] += 100
        return 2.0

    def save() -> None:
        now[0] += 30

    trainer.train_step, trainer.evaluate, trainer.save = step, evaluate, save  # type: ignore[method-assign]
    trainer.run()
    assert read_log(tmp_path, "tokens_per_second") == [8 * 32 / 0.5] * 4
