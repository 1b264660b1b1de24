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
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from starscope.engine.torch_engine import TorchEngine
from starscope.engine.weights import ArraySource, Weights
from starscope.errors import InvalidContentError, UsageError
from starscope.graph import Graph
from starscope.perplexity import Perplexity, measure
from starscope.train.checkpoints import State, load_checkpoint, save_checkpoint
from starscope.train.compiling import MODES, choose
from starscope.train.data import Batches
from starscope.train.evaluation import HeldOut as HeldOut
from starscope.train.evaluation import measure_held_out
from starscope.train.forward import Forward
from starscope.train.heap import map_large_blocks
from starscope.train.interrupts import noted_signals
from starscope.train.lbfgs import lbfgs_step
from starscope.train.log import LOG, append_line, trim_log
from starscope.train.optim import AdamW, clip_gradients, initial_weights
from starscope.train.parameters import Parameters
from starscope.train.precision import choose_precision
from starscope.train.schedules import Schedule
from starscope.train.stopping import Convergence, EarlyStop

PROGRESS, CONFIG = "progress", "options"  # in a checkpoint: where the run is; what it was asked for, to be read
PARAMETER = "parameter"  # how the names of weights begin there
OPTIMIZERS = ("adamw", "lbfgs")
COUNTS = ("steps", "batch_size", "micro_batch_size", "log_every", "evaluate_every", "save_every", "lbfgs_iterations")


class NonFiniteLossError(InvalidContentError):
    """The loss became infinite or undefined; the last checkpoint is from before."""

    code = "non_finite_loss"


@dataclass(frozen=True)
class TrainOptions:
    """What a run is asked for. Lengths are in steps, batch sizes in samples.

    A step's gradient is that of `batch_size` samples, made from `micro_batch_size` at a time. `optimizer` is `adamw` or
    `lbfgs` (then `lbfgs_iterations` on each batch, by line search: no schedule, decay or clipping). `init` is a row of
    `optim.INITS`. `recompute` saves memory (forward.py). `clip_norm` 0 clips nothing.
    """

    steps: int
    schedule: Schedule
    batch_size: int = 16
    micro_batch_size: int = 8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    precision: str = "auto"  # auto, float32 or bfloat16
    compile: str = "auto"  # auto, on or off (compiling.py)
    log_every: int = 10
    evaluate_every: int = 250
    save_every: int = 250
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    lbfgs_iterations: int = 16
    init: str = "scaled"
    recompute: bool = False
    early_stop: EarlyStop = field(default_factory=EarlyStop)

    def __post_init__(self) -> None:
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if self.batch_size % self.micro_batch_size:
            raise UsageError(f"a batch of {self.batch_size} is not whole micro-batches of {self.micro_batch_size}.")
        if self.precision not in ("auto", "float32", "bfloat16"):
            raise UsageError(f"precision is {self.precision!r}; expected auto, float32 or bfloat16.")
        if self.compile not in MODES:
            raise UsageError(f"compile is {self.compile!r}; expected {', '.join(MODES)}.")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"the optimizer is {self.optimizer!r}; expected {' or '.join(OPTIMIZERS)}.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"the betas are {self.betas[0]:g} and {self.betas[1]:g}; expected from 0 to less than 1.")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"weight_decay is {self.weight_decay:g}; expected 0 or more.")
        if not self.clip_norm >= 0:
            raise UsageError(f"clip_norm is {self.clip_norm:g}; expected 0 or more.")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"the seed is {self.seed}; expected a whole number from 0 to 2^63 - 1.")


@dataclass(frozen=True)
class Outcome:
    """How a run ended: after `step` steps, by `signal` when it was interrupted; `converged` says why it stopped early.

    What was measured last: `bits_per_byte`, and `held_out_loss` in nats a token.
    """

    step: int
    signal: int | None
    bits_per_byte: float | None
    held_out_loss: float | None = None
    converged: str = ""


def bits_per_byte(engine: TorchEngine, held_out: HeldOut, *, context_length: int, stride: int) -> float:
    """Bits per byte of the held-out documents, as `starscope perplexity` measures them."""
    first, documents = held_out.end_of_text, held_out.documents
    return measure(engine, documents, held_out.bytes, first=first, window=context_length, stride=stride).bits_per_byte


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
        initial: Mapping[str, np.ndarray] | None = None,
        engine: TorchEngine | None = None,
        facts: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
        report: Callable[[Mapping[str, Any]], None] = lambda line: None,
    ) -> None:
        """`facts` describe the data and the model; a checkpoint whose facts differ is refused on resume.

        `initial` are the weights to begin with (float32, by our names), else they are drawn; an `engine` has them
        already, and its `parameters` are what is trained. `notes` go into the log's
        line where a run begins.
        """
        if options.recompute or options.optimizer == "lbfgs":
            map_large_blocks()
        self._notes = dict(notes or {})
        self._still: dict[str, Tensor] = {}  # what is no parameter but is kept: frequencies of positions
        self.batches, self.options, self.folder, self.held_out = batches, options, folder, held_out
        self._pad, self._report = pad, report
        own = {"seed": options.seed, "batch_size": options.batch_size, "hparams": dict(graph.hp)}
        self._facts = {
            **own,
            **({"optimizer": options.optimizer} if options.optimizer != "adamw" else {}),
            **(facts or {}),
        }
        if engine is None:
            arrays = initial_weights(graph, options.seed, options.init) if initial is None else initial
            slots = graph.family.slots(graph.hp)
            engine = TorchEngine(graph, Weights(slots, ArraySource(arrays)))
            self._still = {slot.name: engine.parameters.pop(slot.name) for slot in slots if slot.made}
        self.engine = engine
        self.parameters = Parameters(self.engine.parameters)
        self._adamw = AdamW(self.parameters, weight_decay=options.weight_decay, betas=options.betas)
        self.step = 0
        self._done = 0  # samples of the step that is being made, whose gradients are summed up already
        self._parts: list[float] = []  # and their losses
        self._losses: list[float] = []  # of the steps since the last line of the log
        self._convergence = Convergence(options.early_stop)
        self._was_compiled: bool | None = None  # what made the checkpoint that it goes on from
        self.saved: int | None = None  # the step of the newest checkpoint of this run
        self.measured: Perplexity | None = None  # the held-out documents, when they were measured last
        if options.precision == "auto":
            self.dtype, self.why = choose_precision()
        else:
            self.dtype, self.why = getattr(torch, options.precision), f"{options.precision}: as asked"
        self.forward = Forward(self.engine, recompute=options.recompute, dtype=self.dtype)

    def weights(self) -> dict[str, np.ndarray]:
        """The parameters as they are now, and what stands still beside them, by name."""
        kept = {**self.engine.parameters, **self._still}
        return {name: p.detach().numpy().copy() for name, p in kept.items()}

    def settle_compilation(self, backend: str = "inductor") -> str:
        """Decide whether the passes are compiled, for the steps that are left; returns the decision in a sentence.

        It may take a minute, and leaves no trace in what is trained.
        """
        part = torch.from_numpy(self.batches.batch(0, self.options.micro_batch_size))
        kept: list[Tensor] = []  # the gradients, once passes change them

        def passes(loss: Callable[..., Any]) -> None:
            if not kept:
                kept.append(self.parameters.gradients.clone())
            for _ in range(self.options.batch_size // self.options.micro_batch_size):
                self.forward.loss_sum(part, self._pad, loss).backward()  # type: ignore[no-untyped-call]

        choice = choose(
            self.forward.loss,
            passes,
            mode=self.options.compile,
            device=self.parameters.values.device.type,
            left=self.options.steps - self.step,
            before=self._was_compiled,
            backend=backend,
        )
        if kept:
            self.parameters.gradients.copy_(kept[0])
        self.forward.compiled = choice.loss
        if self._was_compiled is not None and (self._was_compiled or choice.loss is not None):
            return f"{choice.why}; last bits may differ from those of a run that went through"
        return choice.why

    def train_step(self, stop: Callable[[], bool] = lambda: False) -> tuple[float, float] | None:
        """One update. Returns the mean loss in nats a token and the gradient's norm before clipping.

        When `stop` says so between two micro-batches, None: the next call, or the next process, goes on from there.
        """
        options = self.options
        batch = torch.from_numpy(self.batches.batch(self.step * options.batch_size, options.batch_size))
        if options.optimizer == "lbfgs":
            loss, norm = lbfgs_step(self.parameters, lambda: self._mean_loss(batch), options.lbfgs_iterations)
        else:
            if not self._accumulate(batch, stop):
                return None
            loss = sum(self._parts)
            norm = clip_gradients(self.parameters.gradients, options.clip_norm)
        self._check_finite(loss, norm)
        if options.optimizer == "adamw":
            self._adamw.update(options.schedule(self.step))
        self.parameters.gradients.zero_()
        self._done, self._parts = 0, []
        self.step += 1
        return loss, norm

    def _accumulate(self, batch: Tensor, stop: Callable[[], bool]) -> bool:
        """Sum up the gradients of a batch, micro-batch by micro-batch. False: stopped before the last one."""
        targets = self._targets(batch)
        while self._done < len(batch):
            part = batch[self._done : self._done + self.options.micro_batch_size]
            loss = self.forward.loss_sum(part, self._pad) / targets
            loss.backward()  # type: ignore[no-untyped-call]
            self._parts.append(loss.item())
            self._done += len(part)
            if self._done < len(batch) and stop():
                return False
        return True

    def _mean_loss(self, batch: Tensor) -> float:
        """The loss at the parameters as they are; their gradients are set to its."""
        self.parameters.gradients.zero_()
        self._done, self._parts = 0, []
        self._accumulate(batch, lambda: False)
        return sum(self._parts)

    def _targets(self, batch: Tensor) -> int:
        return int(batch[:, 1:].numel() if self._pad is None else (batch[:, 1:] != self._pad).sum())

    def _check_finite(self, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        saved = "There is no checkpoint from before"
        if self.saved is not None:
            saved = f"The checkpoint of step {self.saved} in {self.folder} is from before"
        raise NonFiniteLossError(
            f"the loss is {loss} and the gradient's norm {norm} at step {self.step} "
            f"(samples {self.step * self.options.batch_size} to {(self.step + 1) * self.options.batch_size - 1}).",
            hint=f"{saved}; take a lower learning rate.",
        )

    def evaluate(self) -> float | None:
        """Bits per byte of the held-out documents, in windows that do not overlap; None when nothing is held out."""
        if self.held_out is None:
            return None
        self.measured = measure_held_out(self.forward, self.held_out, self.batches.context_length)
        return self.measured.bits_per_byte

    def run(self) -> Outcome:
        """Train to `options.steps`, or to an interrupt. Saves at the end either way."""
        options, converged = self.options, ""
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
        started, timed = time.perf_counter(), 0  # timed: steps since then
        with noted_signals() as noted:
            while self.step < options.steps and noted() is None and not converged:
                made = self.train_step(lambda: noted() is not None)
                if made is None:
                    break
                loss, norm = made
                self._losses.append(loss)
                timed += 1
                converged = self._convergence(loss)
                is_last = self.step == options.steps or bool(converged)
                if self.step % options.log_every == 0 or is_last:
                    tokens = timed * options.batch_size * self.batches.context_length
                    seconds = time.perf_counter() - started
                    self._log({
                        "step": self.step,
                        "loss": round(sum(self._losses) / len(self._losses), 5),
                        "learning_rate": float(f"{options.schedule(self.step - 1):.4g}"),
                        "gradient_norm": round(norm, 4),
                        "tokens": self.step * options.batch_size * self.batches.context_length,
                        "tokens_per_second": round(tokens / seconds),
                    })  # fmt: skip
                    self._losses, started, timed = [], time.perf_counter(), 0
                paused = time.perf_counter()
                if self.step % options.evaluate_every == 0 or is_last:
                    measured = self.evaluate()
                    if measured is not None:
                        self._log({"step": self.step, "bits_per_byte": round(measured, 5)})
                if self.step % options.save_every == 0 and not is_last:
                    self.save()
                started += time.perf_counter() - paused
            self.save()
        if converged:
            self._log({"step": self.step, "converged": converged})
        if self.measured is None:
            return Outcome(self.step, noted(), None, None, converged)
        loss = self.measured.nats / self.measured.tokens
        return Outcome(self.step, noted(), self.measured.bits_per_byte, loss, converged)

    def save(self) -> None:
        """Write a checkpoint, from which `resume` goes on with the same bits: also from the middle of a step."""
        rows = self._rows()
        arrays = {
            f"{kind}:{name}": self.parameters.part(row, name).numpy()
            for name in self.engine.parameters
            for kind, row in rows.items()
        } | {f"{PARAMETER}:{name}": weight.numpy() for name, weight in self._still.items()}
        # The data position is step · batch_size + done: a batch is a pure function of the sample number.
        facts = {
            **self._facts,
            PROGRESS: {
                "done": self._done,
                "parts": self._parts,
                "losses": self._losses,
                "convergence": self._convergence.state,
                "precision": str(self.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "compiled": self.forward.compiled is not None,
            },
            CONFIG: asdict(self.options),
        }
        save_checkpoint(self.folder, State(self.step, arrays, facts))
        self.saved = self.step

    def resume(self) -> str:
        """Continue from the newest whole checkpoint. Returns what there is to say about it, or nothing."""
        state, note = load_checkpoint(self.folder)
        usual = {"optimizer": OPTIMIZERS[0]}
        for key, expected in {**usual, **self._facts}.items():
            found = state.facts.get(key, usual.get(key))
            if found != json.loads(json.dumps(expected)):
                raise InvalidContentError(
                    f"the checkpoint in {self.folder} was made with {differing(key, found, expected)}.",
                    hint="Give the same options, or start a new run in another folder.",
                )
        self.step = self.saved = state.step
        progress = state.facts.get(PROGRESS)
        if progress is not None:
            note = " ".join(filter(None, [note, self._restore(progress)]))
        for kind, row in self._rows().items():
            for name in self.engine.parameters:
                self.parameters.part(row, name).copy_(torch.from_numpy(state.arrays[f"{kind}:{name}"]))
        for name, weight in self._still.items():
            weight.copy_(torch.from_numpy(state.arrays[f"{PARAMETER}:{name}"]))
        self._adamw.set_updates(self.step)
        trim_log(self.log_path, self.step)
        return note

    def _rows(self) -> dict[str, Tensor]:
        """What a checkpoint holds of each weight at this point of the run."""
        rows = {PARAMETER: self.parameters.values}
        if self.step and self.options.optimizer == "adamw":
            rows |= self._adamw.moments
        if self._done:
            rows["gradient"] = self.parameters.gradients
        return rows

    def _restore(self, progress: Mapping[str, Any]) -> str:
        """Go on in the middle of things. A sentence when this process cannot give the bits that that one would have."""
        self._done, self._parts, self._losses = progress["done"], list(progress["parts"]), list(progress["losses"])
        self._convergence.restore(progress["convergence"])
        self._was_compiled = progress.get("compiled", False)
        if self.options.precision == "auto":  # a probe may find otherwise each time
            self.dtype, self.why = getattr(torch, progress["precision"]), f"{progress['precision']}: as before"
            self.forward.dtype = self.dtype
        if progress["threads"] == torch.get_num_threads():
            return ""
        return (
            f"{progress['threads']} threads made it and now there are {torch.get_num_threads()}: last bits may differ."
        )

    @property
    def log_path(self) -> Path:
        return self.folder / LOG

    def _log(self, line: Mapping[str, Any]) -> None:
        append_line(self.log_path, line)
        self._report(line)


def differing(key: str, found: Any, expected: Any) -> str:
    """What a checkpoint was made with and what it is now; of several values, those that are not the same."""
    if not isinstance(found, dict) or not isinstance(expected, dict):
        return f"{key} {found}; now it is {expected}"
    names = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
    had, has = (", ".join(f"{name} {values.get(name)}" for name in names) for values in (found, expected))
    return f"{had}; now it is {has}"
