"""The loop learns, resumes with the same bits, and ends without losing anything."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable

import numpy as np
import pytest
import torch

from starscope.errors import UsageError
from starscope.train.data import Batches
from starscope.train.loop import (
    HeldOut,
    NonFiniteLossError,
    TrainOptions,
    bits_per_byte,
)
from starscope.train.precision import choose_precision
from starscope.train.schedules import Schedule
from support.runs import FIM, HELD_OUT, SCHEDULE, make_trainer, read_log, same_bits
from support.training import tiny_ids


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
    monkeypatch.setattr("starscope.train.precision._probe", {torch.float32: 1.0, torch.bfloat16: 0.5}.__getitem__)
    assert choose_precision() == (torch.bfloat16, "bfloat16: a product in bfloat16 is 2.0 times as fast as in float32")
    monkeypatch.setattr("starscope.train.precision._probe", {torch.float32: 1.0, torch.bfloat16: 0.9}.__getitem__)
    assert choose_precision()[0] == torch.float32
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    assert choose_precision() == (torch.float32, "float32: this processor has no bfloat16 arithmetic")


def test_options_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="not whole micro-batches of 3"):
        TrainOptions(steps=1, schedule=SCHEDULE, batch_size=8, micro_batch_size=3)
    with pytest.raises(UsageError, match="expected auto, float32 or bfloat16"):
        TrainOptions(steps=1, schedule=SCHEDULE, precision="float16")
