"""The training loop: steps, evaluation, the log, and an end that loses nothing.

A step takes `batch_size` samples in micro-batches; each micro-batch's summed loss is divided by the step's number of
targets, so accumulation changes nothing but rounding. Every so often the held-out documents are measured in bits per
byte, and a checkpoint is saved. An interrupt finishes the step, saves and says by which signal:

    trainer = Trainer(graph, batches, options, folder=Path("run"), held_out=held_out)
    trainer.resume()
    outcome = trainer.run()                         # outcome.signal is None when all steps were made
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from starscope.checkpoint.files import read_text
from starscope.engine.torch_engine import TorchEngine
from starscope.engine.weights import ArraySource, Weights
from starscope.errors import InvalidContentError, StarscopeError, UsageError
from starscope.graph import Graph
from starscope.perplexity import measure
from starscope.train.checkpoints import State, load_checkpoint, save_checkpoint
from starscope.train.data import Batches, Ids
from starscope.train.optim import Schedule, clip_gradients, initial_weights, make_adamw, set_learning_rate

IGNORED = -100  # a target that is no target
PROBE_SECONDS = 0.2
WORTHWHILE = 1.2  # bfloat16 is used when it is at least this many times faster


class NonFiniteLossError(StarscopeError):
    """The loss became infinite or undefined; the last checkpoint is from before."""

    code = "non_finite_loss"


@dataclass(frozen=True)
class TrainOptions:
    """What a run is asked for. Lengths are in steps, batch sizes in samples."""

    steps: int
    schedule: Schedule
    batch_size: int = 16
    micro_batch_size: int = 8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    precision: str = "auto"  # auto, float32 or bfloat16
    log_every: int = 10
    evaluate_every: int = 250
    save_every: int = 250

    def __post_init__(self) -> None:
        if self.batch_size % self.micro_batch_size:
            raise UsageError(f"a batch of {self.batch_size} is not whole micro-batches of {self.micro_batch_size}.")
        if self.precision not in ("auto", "float32", "bfloat16"):
            raise UsageError(f"precision is {self.precision!r}; expected auto, float32 or bfloat16.")


@dataclass(frozen=True)
class HeldOut:
    """Documents to measure with: their ids, and what they take in UTF-8 bytes altogether."""

    documents: Sequence[Ids]
    bytes: int
    end_of_text: int


@dataclass(frozen=True)
class Outcome:
    """How a run ended: after `step` steps, by `signal` when it was interrupted."""

    step: int
    signal: int | None
    bits_per_byte: float | None


def choose_precision() -> tuple[torch.dtype, str]:
    """bfloat16 where the processor has instructions for it and a short probe shows that it pays; and why."""
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return torch.float32, "float32: this processor has no bfloat16 arithmetic"
    seconds = {dtype: _probe(dtype) for dtype in (torch.float32, torch.bfloat16)}
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    chosen, name = (torch.bfloat16, "bfloat16") if ratio >= WORTHWHILE else (torch.float32, "float32")
    return chosen, f"{name}: a product in bfloat16 is {ratio:.1f} times as fast as in float32"


def _probe(dtype: torch.dtype) -> float:
    """Seconds for one matrix product, the least of as many as half the probe's time allows."""
    a, b = torch.randn(1024, 512).to(dtype), torch.randn(512, 512).to(dtype)
    a @ b
    least, end = math.inf, time.perf_counter() + PROBE_SECONDS / 2
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ b
        least = min(least, time.perf_counter() - start)
    return least


def loss_sum(engine: TorchEngine, batch: Tensor, pad: int | None) -> Tensor:
    """The summed negative log-likelihood in nats of `[n context_length+1]` ids, all but the first and padding."""
    targets = batch[:, 1:] if pad is None else batch[:, 1:].masked_fill(batch[:, 1:] == pad, IGNORED)
    logits = engine.logits(batch[:, :-1])  # [n seq vocab_size]
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def bits_per_byte(engine: TorchEngine, held_out: HeldOut, *, context_length: int, stride: int) -> float:
    """Bits per byte of the held-out documents, as `starscope perplexity` measures them."""
    first, documents = held_out.end_of_text, held_out.documents
    return measure(engine, documents, held_out.bytes, first=first, window=context_length, stride=stride).bits_per_byte


@contextmanager
def noted_signals() -> Iterator[Callable[[], int | None]]:
    """While inside, SIGINT and SIGTERM are noted instead of ending the program; a second one ends it as usual."""
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: noted[0] if noted else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Trainer:
    """One run in one folder. `engine.parameters` are the weights; `report` gets each line of the log as it is made."""

    def __init__(
        self,
        graph: Graph,
        batches: Batches,
        options: TrainOptions,
        *,
        folder: Path,
        held_out: HeldOut | None = None,
        pad: int | None = None,
        facts: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
        report: Callable[[Mapping[str, Any]], None] = lambda line: None,
    ) -> None:
        """`facts` describe the data and the model; a checkpoint whose facts differ is refused on resume.

        `notes` go into the log's line where a run begins.
        """
        self._notes = dict(notes or {})
        self.batches, self.options, self.folder, self.held_out = batches, options, folder, held_out
        self._pad, self._report = pad, report
        own = {"seed": options.seed, "batch_size": options.batch_size, "hparams": dict(graph.hp)}
        self._facts = {**own, **(facts or {})}
        weights = ArraySource(initial_weights(graph, options.seed))
        self.engine = TorchEngine(graph, Weights(graph.family.slots(graph.hp), weights))
        for parameter in self.engine.parameters.values():
            parameter.requires_grad_()
        self.optimizer = make_adamw(self.engine.parameters, weight_decay=options.weight_decay)
        self.step = 0
        self._last_evaluation: float | None = None
        if options.precision == "auto":
            self.dtype, self.why = choose_precision()
        else:
            self.dtype, self.why = getattr(torch, options.precision), f"{options.precision}: as asked"

    def weights(self) -> dict[str, np.ndarray]:
        """The parameters as they are now, by name."""
        return {name: p.detach().numpy().copy() for name, p in self.engine.parameters.items()}

    def train_step(self) -> tuple[float, float]:
        """One update. Returns the mean loss in nats a token and the gradient's norm before clipping."""
        options = self.options
        set_learning_rate(self.optimizer, options.schedule(self.step))
        batch = torch.from_numpy(self.batches.batch(self.step * options.batch_size, options.batch_size))
        targets = int(batch[:, 1:].numel() if self._pad is None else (batch[:, 1:] != self._pad).sum())
        total = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for start in range(0, len(batch), options.micro_batch_size):
            part = batch[start : start + options.micro_batch_size]
            with self._precision():
                loss = loss_sum(self.engine, part, self._pad) / targets
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        norm = clip_gradients(self.engine.parameters, options.clip_norm)
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise NonFiniteLossError(
                f"the loss is {total} and the gradient's norm {norm} at step {self.step} "
                f"(samples {self.step * options.batch_size} to {(self.step + 1) * options.batch_size - 1}).",
                hint=f"The last checkpoint in {self.folder} is from before; take a lower learning rate.",
            )
        self.optimizer.step()
        self.step += 1
        return total, norm

    def evaluate(self) -> float | None:
        """Bits per byte of the held-out documents, in windows that do not overlap; None when nothing is held out."""
        if self.held_out is None:
            return None
        with self._precision():
            context = self.batches.context_length
            return bits_per_byte(self.engine, self.held_out, context_length=context, stride=context)

    def run(self) -> Outcome:
        """Train to `options.steps`, or to an interrupt. Saves at the end either way."""
        options = self.options
        losses: list[float] = []
        if self.step < options.steps:
            self._log({
                "step": self.step,
                "run": {
                    "steps": options.steps,
                    "decay_steps": options.schedule.decay_steps,
                    "batch_size": options.batch_size,
                    "learning_rate": options.schedule.peak,
                    "precision": str(self.dtype).removeprefix("torch."),
                    **self._notes,
                },
            })  # fmt: skip
        started = time.perf_counter()
        with noted_signals() as noted:
            while self.step < options.steps and noted() is None:
                loss, norm = self.train_step()
                losses.append(loss)
                if self.step % options.log_every == 0 or self.step == options.steps:
                    tokens = len(losses) * options.batch_size * self.batches.context_length
                    seconds = time.perf_counter() - started
                    self._log({
                        "step": self.step,
                        "loss": round(sum(losses) / len(losses), 5),
                        "learning_rate": float(f"{options.schedule(self.step - 1):.4g}"),
                        "gradient_norm": round(norm, 4),
                        "tokens": self.step * options.batch_size * self.batches.context_length,
                        "tokens_per_second": round(tokens / seconds),
                    })  # fmt: skip
                    losses, started = [], time.perf_counter()
                if self.step % options.evaluate_every == 0 or self.step == options.steps:
                    paused = time.perf_counter()
                    self._last_evaluation = self.evaluate()
                    if self._last_evaluation is not None:
                        self._log({"step": self.step, "bits_per_byte": round(self._last_evaluation, 5)})
                    started += time.perf_counter() - paused
                if self.step % options.save_every == 0:
                    self.save()
            self.save()
            return Outcome(self.step, noted(), self._last_evaluation)

    def save(self) -> None:
        arrays = {f"parameter:{name}": array for name, array in self.weights().items()}
        for name, parameter in self.engine.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                arrays[f"{key}:{name}"] = value.detach().numpy()
        # The data position is step · batch_size: a batch is a pure function of the sample number.
        save_checkpoint(self.folder, State(self.step, arrays, self._facts))

    def resume(self) -> str:
        """Continue from the newest whole checkpoint. Returns a sentence when that was not the newest one."""
        state, note = load_checkpoint(self.folder)
        for key, expected in self._facts.items():
            found = state.facts.get(key)
            if found != json.loads(json.dumps(expected)):
                raise InvalidContentError(
                    f"the checkpoint in {self.folder} was made with {key} {found}; now it is {expected}.",
                    hint="Start a new run in another folder.",
                )
        with torch.no_grad():
            for name, parameter in self.engine.parameters.items():
                parameter.copy_(torch.from_numpy(state.arrays[f"parameter:{name}"]))
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    self.optimizer.state[parameter][key] = torch.from_numpy(state.arrays[f"{key}:{name}"].copy())
        self.step = state.step
        self._trim_log()
        return note

    def _precision(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype == torch.float32 else torch.autocast("cpu", self.dtype)

    @property
    def log_path(self) -> Path:
        return self.folder / "log.jsonl"

    def _log(self, line: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        self._report(line)

    def _trim_log(self) -> None:
        """Drop the lines of steps that are about to be made again."""
        if not self.log_path.exists():
            return
        lines = read_text(self.log_path).splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step]
        temporary = self.log_path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self.log_path)
