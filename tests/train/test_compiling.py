"""Passes are compiled where that pays itself back, a run says so, and it goes on as it began."""

from __future__ import annotations

import itertools

import pytest
import torch

from starscope.errors import UsageError
from starscope.train import compiling
from starscope.train.checkpoints import CURRENT, read_checkpoint
from starscope.train.compiling import ON_A_CPU, break_even, choose, compiler_problem, foreseen, step_seconds
from support.runs import make_trainer, read_log, same_bits


def plain(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum()


def times(monkeypatch, step: float, compiled: float) -> None:
    """What a step is measured to take, as it is and then compiled."""
    found = itertools.cycle([step, compiled])
    monkeypatch.setattr(compiling, "step_seconds", lambda _run: next(found))
    monkeypatch.setattr(compiling, "compiler_problem", lambda _device: "")
    monkeypatch.setattr(torch, "compile", lambda loss, **_: loss)


def decide(mode: str, *, device: str = "cuda", left: int = 10**6, before: bool | None = None) -> tuple[bool, str]:
    ran: list[object] = []
    choice = choose(plain, ran.append, mode=mode, device=device, left=left, before=before)
    return choice.loss is not None, choice.why


def test_compiling_pays_itself_back_after_what_it_takes_over_what_a_step_saves():
    assert break_even(0.5, 0.2, 30.0) == 300
    assert break_even(1.0, 0.3, 1.0) == 4


def test_on_a_cpu_it_is_off_and_the_reason_said(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    assert decide("auto", device="cpu") == (False, ON_A_CPU)
    assert decide("off") == (False, "not compiled: as asked")
    assert foreseen("auto", "cpu") == ON_A_CPU


def test_elsewhere_a_run_that_is_long_enough_tries_and_takes_the_faster_one(monkeypatch):
    times(monkeypatch, 0.1, 0.025)
    clock = itertools.count(0, 12)
    monkeypatch.setattr("starscope.train.compiling.time.perf_counter", lambda: next(clock))
    is_compiled, why = decide("auto")
    assert is_compiled
    assert why.startswith("compiled: a step takes 25 ms compiled and 100 ms as it is; 12 s to compile, ")
    assert why.endswith(", paid back after 160 steps, and 1,000,000 are left")
    times(monkeypatch, 0.05, 0.1)
    assert decide("auto")[0] is False
    assert decide("auto")[1].endswith("never paid back")
    times(monkeypatch, 0.1, 0.05)
    assert decide("auto", left=100) == (
        False,
        "not compiled: that takes about 30 s, pays back after 1,500 steps at the earliest, and 100 are left",
    )


def test_on_compiles_and_says_when_it_is_paid_back_or_that_it_never_is(monkeypatch):
    for compiled, said in ((0.05, "paid back after"), (0.2, "never paid back")):
        times(monkeypatch, 0.1, compiled)
        is_compiled, why = decide("on", left=10, device="cpu")
        assert is_compiled
        assert said in why


def test_without_a_compiler_it_says_so_and_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling.shutil, "which", lambda _name: None)
    assert compiler_problem("cpu").startswith("not compiled: there is no C++ compiler (")
    trainer = make_trainer(tmp_path, steps=1, compile="on")
    assert trainer.settle_compilation() == compiler_problem("cpu")
    assert trainer.run().step == 1


def test_what_torchs_compiler_cannot_do_is_said_and_done_without(monkeypatch):
    times(monkeypatch, 0.1, 0.05)

    def fails(_loss: object) -> None:
        if len(calls) == 0:
            calls.append(1)
            raise RuntimeError("no such kernel\nand a page of other things")

    calls: list[int] = []
    choice = choose(plain, fails, mode="on", device="cpu", left=9, before=None)
    assert (choice.loss, choice.why) == (None, "not compiled: no such kernel")


def test_a_compiled_run_learns_the_same_resumes_with_the_same_bits_and_leaves_no_trace_of_the_trial(tmp_path):
    """With the part of torch.compile that traces; what its C++ does is torch's."""

    def made(folder: str, steps: int, mode: str, **others: object):
        trainer = make_trainer(tmp_path / folder, steps=steps, micro_batch_size=2, compile=mode, **others)
        if (tmp_path / folder / CURRENT).exists():
            assert trainer.resume() == ""
        before = trainer.parameters.gradients.clone()
        why = trainer.settle_compilation(backend="aot_eager")
        assert torch.equal(before, trainer.parameters.gradients)
        assert (trainer.forward.compiled is not None) == (mode != "off")
        trainer.run()
        return trainer, why

    whole, why = made("whole", 4, "on")
    assert why.startswith("compiled: a step takes ")
    made("parts", 2, "on")
    assert read_checkpoint(tmp_path / "parts" / CURRENT).facts["progress"]["compiled"] is True
    part, why = made("parts", 4, "auto")
    assert why == "compiled: as before; last bits may differ from those of a run that went through"
    assert same_bits(whole.weights(), part.weights())
    assert read_log(tmp_path / "parts", "loss") == read_log(tmp_path / "whole", "loss")
    made("plain", 4, "off")
    assert read_log(tmp_path / "plain", "loss") == pytest.approx(read_log(tmp_path / "whole", "loss"), rel=1e-4)
    _, why = made("parts", 5, "off")
    assert why == "not compiled: as asked; last bits may differ from those of a run that went through"


def test_a_run_that_was_not_compiled_stays_so_unless_asked(tmp_path):
    make_trainer(tmp_path, steps=1).run()
    resumed = make_trainer(tmp_path, steps=2)
    resumed.resume()
    assert resumed.settle_compilation() == "not compiled: as before"


def test_an_unknown_choice_is_refused(tmp_path):
    with pytest.raises(UsageError, match="compile is 'maybe'; expected auto, on, off"):
        make_trainer(tmp_path, compile="maybe")


def test_step_seconds_are_the_least_after_a_first_one(monkeypatch):
    times = iter([10.0, 15.0, 20.0, 22.0, 30.0, 39.0])
    monkeypatch.setattr("starscope.train.compiling.time.perf_counter", lambda: next(times))
    steps: list[int] = []
    assert step_seconds(lambda: steps.append(0)) == 2.0
    assert len(steps) == 4
