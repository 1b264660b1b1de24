"""One run from settings to finished files: data, model, training, and what the folder holds at the end.

    job = Job(resolve({"data": ("text/",), "steps": 200}), Path("out"))
    job.prepare()
    if job.train().signal is None:
        job.finish()                    # out/model.gguf, out/hf/, beside out/log.jsonl and out/report.html

`out/data` keeps the tokens, `out/checkpoint.bin` where the run is, `out/settings.json` what it was asked for.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from starscope.errors import DoesNotFitError, OutputError, OutputExistsError, StarscopeError, UsageError
from starscope.export import check_folder, write_folder, write_tokenizer
from starscope.family import find_family, make_hparams, write_config
from starscope.graph import Graph, record
from starscope.machine import free_memory
from starscope.recipes import find_recipe
from starscope.tokenizer import Tokenizer
from starscope.train.checkpoints import CURRENT, PREVIOUS, load_checkpoint
from starscope.train.estimate import MemoryEstimate, estimate
from starscope.train.log import append_line
from starscope.train.loop import PARAMETER, HeldOut, Outcome, Trainer, TrainOptions
from starscope.train.output import write_model
from starscope.train.precision import choose_precision
from starscope.train.prepare import DataOptions, Prepared, Progress, prepare
from starscope.train.presets import family_sizes
from starscope.train.report import REPORT, write_report
from starscope.train.schedules import Schedule
from starscope.train.settings import Settings, save_settings
from starscope.train.start import Start, open_start
from starscope.train.stopping import EarlyStop
from starscope.train.vocabularies import LEAST_VOCAB_SIZE
from starscope.train.watcher import Watcher

MODEL, FOLDER, DATA, TOKENIZER = "model.gguf", "hf", "data", "tokenizer"
PROBE_TOKENS = 64  # that the written model's logits are compared over
CHECKPOINT_BYTES = 12  # a parameter: itself and two moments of it
GRADIENT_BYTES = 4  # a parameter, in a checkpoint from the middle of a step
MOST_WARMUP = 100


@dataclass(frozen=True)
class Finished:
    """The files of a finished run and what they take in bytes."""

    model: Path
    folder: Path
    report: Path
    model_bytes: int
    folder_bytes: int


def nothing(*_: Any) -> None:
    """Tells nobody."""


class TrainingRun:
    """What every run in a folder does, whatever its parameters are.

    `report` gets each line of the log as it is made, `say` sentences for a person.
    """

    graph: Graph
    data: Prepared
    tokenizer: Tokenizer
    parameters: int
    trainer: Trainer

    def __init__(
        self,
        settings: Settings,
        out: Path,
        *,
        force: bool = False,
        report: Callable[[Mapping[str, Any]], None] = nothing,
        say: Callable[[str], None] = nothing,
        progress: Progress = nothing,
    ) -> None:
        self.settings, self.out, self._force = settings, out, force
        self._report, self._say, self._progress = report, say, progress

    def check_output(self, *, resume: bool) -> None:
        """Refuse, before any work, what would replace another run."""
        raise NotImplementedError

    def prepare(self, *, resume: bool = False) -> None:
        """The tokens, the model and its trainer."""
        raise NotImplementedError

    def _refuse_another_run(self, *, resume: bool) -> None:
        """Refuse settings that no run has, a folder that cannot be written, and one that holds another run."""
        check_settings(self.settings)
        check_place(self.out)
        if not resume and not self._force and (self.out / CURRENT).exists():
            raise OutputExistsError(
                f"{self.out} holds a run.", hint="Use --resume to go on with it, or --force to begin again."
            )

    def _begin(self, memory: MemoryEstimate, resume: bool, **parts: Any) -> None:
        """The trainer, at step 0 or where the checkpoint is, when there is memory for it. `parts` are the run's own."""
        if problem := memory_problem(memory):
            raise DoesNotFitError(problem, hint="Take a smaller --batch, or --grad-acc and --recompute.")
        self.trainer = Trainer(
            self.graph,
            folder=self.out,
            held_out=held_out(self.data),
            pad=self.data.pad,
            notes={"parameters": self.parameters},
            report=self._watch,
            **parts,
        )
        if resume:
            note = self.trainer.resume()
            self._say(f"going on from step {self.trainer.step}" + (f": {note}" if note else "."))
        self._say(self.trainer.why)
        self._watcher = Watcher(self.settings, self.trainer, self.tokenizer, self.data)

    def _watch(self, line: Mapping[str, Any]) -> None:
        """A line of the log was made: pass it on, and look at the model where it has just been measured."""
        self._report(line)
        for found in self._watcher(line):
            append_line(self.trainer.log_path, found)
            self._report(found)

    def train(self) -> Outcome:
        """Train to the last step, or to an interrupt; the checkpoint is saved and the report written either way."""
        if self.trainer.saved is None:  # it begins: what an earlier run left is nothing to go on from
            for path in (self.trainer.log_path, self.out / CURRENT, self.out / PREVIOUS):
                path.unlink(missing_ok=True)
        save_settings(self.out, self.settings)
        self._say(self.trainer.settle_compilation())
        try:
            outcome = self.trainer.run()
        except BaseException:
            self._watcher.close()
            with suppress(StarscopeError):  # what ended the run is what there is to say
                write_report(self.out)
            raise
        self._watcher.close()
        if self.trainer.log_path.exists():
            write_report(self.out)
        return outcome


class Job(TrainingRun):
    """A run whose parameters are a whole model's."""

    def check_output(self, *, resume: bool) -> None:
        """Refuse, before any work, what would replace another run, and a type that no file can have."""
        self._refuse_another_run(resume=resume)
        check_folder(self.out / FOLDER, force=resume or self._force)

    def prepare(self, *, resume: bool = False) -> None:
        """The tokens, the model, and a trainer: at step 0, or where the newest whole checkpoint is."""
        start = self._start(resume) if self.settings.start else None
        options = replace(data_options(self.settings, self.out), exclude=(self.out,))  # nothing that the run writes
        self.data = prepare(options, self.out / DATA, self._say, self._progress, resume=resume)
        family = find_family(self.settings.family)
        if start is None:
            hp = family_sizes(family, self.settings.sizes, self.data.vocab_size)
        else:
            hp = start.hparams  # some of which are no setting
            self.data.check_fits(hp.vocab_size)
        self.graph = record(family, hp)
        self.tokenizer = self.data.tokenizer.padded(hp.vocab_size)
        write_config(family, hp), self.tokenizer.to_files()  # what could not be written at the end is refused now
        batches = self.data.batches()
        self.settings = replace(self.settings, steps=steps_of(self.settings, batches.per_epoch))
        initial = None if start is None else start.weights
        self.parameters = count_parameters(self.graph, initial)
        self._check_disk()
        asked = train_options(self.settings)
        memory = estimate(self.graph, asked, dtype_of(asked.precision))
        self._begin(memory, resume, batches=batches, options=asked, initial=initial, facts=self.data.facts)

    def _start(self, resume: bool) -> Start:
        """The model to go on with: its sizes become settings, its tokenizer lies in the folder from then on.

        A run that is resumed has all of that, and needs the model no more.
        """
        if resume:
            state = load_checkpoint(self.out)[0]
            kinds = {name: name.partition(":") for name in state.arrays}
            weights = {name: state.arrays[key] for key, (kind, _, name) in kinds.items() if kind == PARAMETER}
            tokenizer, family = Tokenizer.from_folder(self.out / TOKENIZER), find_family(self.settings.family)
            hp = make_hparams(family, {row.name: state.facts["hparams"][row.name] for row in family.hparams})
            return Start(self.out, family, hp, tokenizer, weights, [])
        start = open_start(self.settings.start, self.settings.context_length)
        for note in start.notes:
            self._say(note)
        self.settings = start.settle(self.settings)
        write_tokenizer(self.out / TOKENIZER, start.tokenizer)
        return start

    def _check_disk(self) -> None:
        """Checkpoints and both forms of the model have to fit before a day is spent on them."""
        if problem := disk_problem(self.out, self.parameters):
            raise DoesNotFitError(problem, hint="Free some space, choose another folder or a smaller model.")

    def finish(self) -> Finished:
        """Write the model in both forms, each read again and compared with the weights that it is made of."""
        s, weights = self.settings, self.trainer.weights()
        ids = self.data.train.ids[: min(PROBE_TOKENS, self.graph.hp.context_length)]
        options = {"to": s.to, "name": s.name, "license_name": s.license, "probe": ids.tolist(), "force": True}
        size = write_model(self.out / MODEL, self.graph, weights, self.tokenizer, **options)
        family, hp = self.graph.family, self.graph.hp
        folder_size = write_folder(self.out / FOLDER, family, hp, weights, self.tokenizer, force=True, verify=True)
        return Finished(self.out / MODEL, self.out / FOLDER, self.out / REPORT, size, folder_size)


def check_settings(settings: Settings) -> None:
    """Refuse what no run can be made with before its text is read, which may take long."""
    if settings.to:
        find_recipe(settings.to)
    train_options(settings)
    if settings.sample_tokens < 0:
        raise UsageError(f"sample_tokens is {settings.sample_tokens}; expected 0 or more.")
    for name in ("name", "license"):
        if not is_text(getattr(settings, name)):
            raise UsageError(f"the {name} {getattr(settings, name)!r} is not valid UTF-8.")
    if not settings.start:
        family_sizes(find_family(settings.family), settings.sizes, LEAST_VOCAB_SIZE)


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: a byte of a command line that is none stands in it as half a surrogate."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def check_place(folder: Path) -> None:
    """OutputError where a folder can be neither used nor made."""
    place = existing(folder)
    if not place.is_dir():
        whole = place == folder
        raise OutputError(
            f"{place} is a file; expected {'the name of a folder' if whole else f'a folder, to make {folder} in'}."
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise OutputError(f"{folder} cannot be written: {place} allows nothing new.", hint="Choose another folder.")


def existing(path: Path) -> Path:
    """The path itself, or the folder above it that is there."""
    return next((one for one in (path, *path.absolute().parents) if os.path.lexists(one)), Path())


def steps_of(settings: Settings, per_epoch: int) -> int:
    """The updates of a run: those asked for, or as many as so many times through the data take."""
    if settings.epochs is None:
        return settings.steps
    return max(1, math.ceil(settings.epochs * per_epoch / settings.batch_size))


def count_parameters(graph: Graph, initial: Mapping[str, Any] | None) -> int:
    """What is trained: every tensor, and a tied one where the model to go on with has it."""
    slots = graph.family.slots(graph.hp)
    trained = (slot for slot in slots if not slot.made)
    return sum(slot.parameters for slot in trained if slot.tied_to is None or (initial and slot.name in initial))


def disk_bytes(parameters: int) -> int:
    """What a run's folder takes at most, without the tokens: two checkpoints and a third that is being written.

    The model in both forms takes no more than that, beside two.
    """
    return parameters * (3 * CHECKPOINT_BYTES + GRADIENT_BYTES)


def disk_problem(out: Path, parameters: int) -> str:
    """A sentence when a run's folder takes more than its disk has; what the folder has already is there."""
    wanted, free = disk_bytes(parameters), shutil.disk_usage(existing(out)).free
    mine = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if wanted <= free + mine:
        return ""
    return f"{out} needs {wanted} bytes for checkpoints and the model, and its disk has {free} free."


def dtype_of(precision: str) -> torch.dtype:
    """What a run with this precision computes products in on this machine."""
    chosen: torch.dtype = choose_precision()[0] if precision == "auto" else getattr(torch, precision)
    return chosen


def memory_problem(memory: MemoryEstimate) -> str:
    """A sentence when a run takes more memory than there is; what this process has already is there."""
    wanted, free = memory.total - memory.parts["process"], free_memory()
    if wanted <= free:
        return ""
    parts = ", ".join(f"{name} {size}" for name, size in memory.parts.items() if name != "process")
    return f"training takes {wanted} bytes of memory ({parts}), and {free} are free."


def data_options(settings: Settings, out: Path) -> DataOptions:
    """What the settings say of the data. With a model to go on with, the tokenizer is its own."""
    s = settings
    return DataOptions(
        s.data,
        suffixes=s.suffixes,
        vocab=out / TOKENIZER if s.start else s.vocab,
        vocab_size=None if s.start else s.vocab_size,
        held_out=s.held_out,
        split=s.split,
        context_length=s.sizes["context_length"],
        seed=s.seed,
        fim_rate=s.fim_rate,
        spm_rate=s.spm_rate,
    )


def train_options(settings: Settings) -> TrainOptions:
    """What the settings say of the optimisation. UsageError for what contradicts itself."""
    s = settings
    if s.accumulation < 1 or s.batch_size % s.accumulation:
        raise UsageError(
            f"a batch of {s.batch_size} samples is not {s.accumulation} equal parts; expected a divisor of it."
        )
    if s.epochs is not None and not 0 < s.epochs < math.inf:
        raise UsageError(f"epochs is {s.epochs:g}; expected a number above 0.")
    if not 0 <= s.final_share <= 1:
        raise UsageError(
            f"the lowest learning rate is {s.final_share:g} of the highest, {s.learning_rate:g}; "
            "expected a share from 0 to 1."
        )
    warmup = min(MOST_WARMUP, s.decay_steps // 10) if s.warmup_steps is None else s.warmup_steps
    schedule = Schedule(
        s.learning_rate, warmup, s.decay_steps, s.learning_rate * s.final_share, s.schedule, s.restart_growth
    )
    return TrainOptions(
        s.steps,
        schedule,
        s.batch_size,
        s.batch_size // s.accumulation,
        weight_decay=s.weight_decay,
        clip_norm=s.clip_norm,
        seed=s.seed,
        precision=s.precision,
        compile=s.compile,
        log_every=s.log_every,
        evaluate_every=s.evaluate_every,
        save_every=s.save_every,
        optimizer=s.optimizer,
        betas=(s.beta1, s.beta2),
        lbfgs_iterations=s.lbfgs_iterations,
        init=s.init,
        recompute=s.recompute,
        early_stop=EarlyStop(s.tolerance, s.past, s.delta, s.max_no_improvement),
    )


def held_out(data: Prepared) -> HeldOut | None:
    """The documents to measure with, None when nothing is held out."""
    if data.held_out is None:
        return None
    return HeldOut(list(data.held_out.split(data.end_of_text)), data.held_out.bytes, data.end_of_text)
