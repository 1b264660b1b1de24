"""`train`: plain text or code in, a model out."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from starscope.cli.common import PATH, Session, everywhere, json_option
from starscope.cli.signals import Stopped
from starscope.cli.train_options import Command, ignored_flags, train_options
from starscope.cli.train_progress import training_progress
from starscope.cli.units import bytes_text, plural
from starscope.errors import OutputError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from starscope.train.job import Finished, Job, TrainingRun
    from starscope.train.loop import Outcome
    from starscope.train.settings import Settings

Run = TypeVar("Run", bound="TrainingRun")
RESUMED = "--resume continues from there"


@click.command(cls=Command)
@click.argument("more", nargs=-1, metavar="[PATH]...", type=PATH)
@train_options
@json_option
@everywhere
@click.pass_context
def train(
    ctx: click.Context,
    /,
    more: tuple[str, ...],
    out: str | None,
    preset: str | None,
    resume: bool,
    force: bool,
    dry_run: bool,
    checkpoint_in: str | None,
    checkpoint_out: str | None,
    model_out: str | None,
    only_write_model: bool,
    threads: int | None,
    **given: Any,
) -> None:
    """Train a small model from scratch on plain text or code.

    PATH, like --data, is a file or folder of text. Results are written to the --out directory: model.gguf, hf/ (the
    same model for transformers and vLLM), log.jsonl and report.html. Ctrl-C saves a checkpoint, from which --resume
    continues bit for bit. The flags of llama.cpp's train-text-from-scratch are also accepted, with - or _ between
    words.
    """
    session: Session = ctx.obj
    if out is None and not dry_run:
        raise UsageError("--out is missing; expected a folder for the model.")
    for text in ignored_flags(ctx, session.args):
        session.note(f"note: {text}")
    given["data"] = (*given["data"], *more)
    resume = resume or only_write_model or checkpoint_in is not None
    folder = Path(out or "")
    settings = read_settings(session, given, preset, folder, resume, checkpoint_in)
    need_torch()
    use_threads(threads)
    for target in filter(None, (checkpoint_out, model_out)):
        check_copy(Path(target))
    from starscope.train.job import Job

    if dry_run:
        job = None if out is None else Job(settings, folder, force=force)
        look_ahead(session, settings, job, resume=resume, checkpoint_in=checkpoint_in)
        return

    job, outcome = carry_out(
        ctx,
        partial(Job, settings, folder, force=force),
        resume=resume,
        trains=not only_write_model,
        checkpoint_in=checkpoint_in,
        checkpoint_out=checkpoint_out,
    )
    made = job.finish()
    if model_out is not None:
        copy_file(made.model, Path(model_out))
    tell_end(session, job, outcome, made)


def look_ahead(
    session: Session, settings: Settings, job: TrainingRun | None, *, resume: bool, checkpoint_in: str | None
) -> None:
    """What a run would read and take, with what it would refuse; `job` is None where no folder is named."""
    from starscope.cli.train_plan import tell_plan
    from starscope.train.checkpoints import load_checkpoint, read_checkpoint

    if job is not None:
        job.check_output(resume=resume)
    if checkpoint_in is not None:
        read_checkpoint(Path(checkpoint_in))
    elif resume and job is not None:
        load_checkpoint(job.out)
    tell_plan(session, settings, None if job is None else job.out)


def carry_out(
    ctx: click.Context,
    make: Callable[..., Run],
    *,
    resume: bool,
    trains: bool,
    checkpoint_in: str | None,
    checkpoint_out: str | None,
) -> tuple[Run, Outcome | None]:
    """Prepare and train what `make` gives, alone in its folder; how that ended, None when it was not to train.

    KeyboardInterrupt or Stopped, with the checkpoint saved, for a run that was interrupted.
    """
    from starscope.train.lock import held

    session: Session = ctx.obj
    with training_progress(session) as shown:
        job = make(report=shown.line, say=shown.say, progress=shown.prepare)
        job.check_output(resume=resume)
        ctx.with_resource(held(job.out))
        job.check_output(resume=resume)  # once more: another run may just have ended there
        if checkpoint_in is not None:
            take_checkpoint(Path(checkpoint_in), job.out)
        job.prepare(resume=resume)
        shown.begin(job.settings.steps, job.trainer.step)
        outcome = job.train() if trains else None
    if checkpoint_out is not None and outcome is not None:
        copy_checkpoint(session, job.out, checkpoint_out, outcome.step)
    if outcome is not None and outcome.signal is not None:
        session.note(f"stopped after step {outcome.step}; {RESUMED}")
        raise KeyboardInterrupt if outcome.signal == signal.SIGINT else Stopped(outcome.signal)
    return job, outcome


def translated(session: Session, given: Mapping[str, Any], usual: Settings) -> dict[str, Any]:
    """Options by the names of settings; what they mean here is told, and a seed below 0 is drawn."""
    from starscope.train.flags import translate

    asked, notes = translate(given, vars(usual))
    for note in notes:
        session.note(f"note: {note}")
    if (asked.get("seed") or 0) < 0:
        asked["seed"] = secrets.randbelow(2**31)
        session.note(f"note: the seed is {asked['seed']}.")
    return asked


def read_settings(
    session: Session, given: dict[str, Any], preset: str | None, folder: Path, resume: bool, checkpoint: str | None
) -> Settings:
    """The settings of the run: what was given, over the preset, over what the run in the folder was asked for."""
    from starscope.train import settings as of

    saved = of.read_settings(folder) if resume and (checkpoint is None or (folder / of.FILE).exists()) else None
    usual = of.resolve({}, preset=preset, saved=saved)
    asked = translated(session, given, usual)
    settings = of.resolve(asked, preset=preset, saved=saved)
    if saved is not None and settings.start != saved.get("start", ""):
        began = saved.get("start") or "scratch"
        raise UsageError(f"the run in {folder} started from {began}; expected the same --from when it is resumed.")
    if not settings.data:
        raise UsageError("--data is missing; expected files or folders of text.")
    return settings


def need_torch() -> None:
    """UnsupportedError, with what to do, where torch is not installed."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise UnsupportedError(
            "training needs torch, which is not installed.",
            hint="Install torch 2.6 or newer; a CPU build is enough.",
        )


def use_threads(threads: int | None) -> None:
    """Let torch use so many cores."""
    if threads is None:
        return
    import torch

    torch.set_num_threads(threads)


def take_checkpoint(source: Path, folder: Path) -> None:
    """Put the checkpoint to go on from where the run looks for it; what was there stays as the previous one."""
    from starscope.train.checkpoints import CURRENT, PREVIOUS, read_checkpoint

    target = folder / CURRENT
    read_checkpoint(source)
    if target.exists() and target.samefile(source):
        return
    if target.exists():
        target.replace(folder / PREVIOUS)
    copy_file(source, target)


def copy_checkpoint(session: Session, folder: Path, pattern: str, step: int) -> None:
    """Write the last checkpoint under another name too."""
    from starscope.train.checkpoints import CURRENT

    target = Path(pattern.replace("ITERATION", str(step)).replace("LATEST", "latest"))
    copy_file(folder / CURRENT, target)
    session.note(f"{target}: the checkpoint of step {step}")


def check_copy(target: Path) -> None:
    """OutputError, before any work, where a file of this name could not be written at the end."""
    from starscope.train.job import check_place

    if target.exists() and not target.is_file():
        raise OutputError(f"{target} is not a regular file and cannot be replaced.", hint="Choose another name.")
    check_place(target.absolute().parent)


def copy_file(source: Path, target: Path) -> None:
    """Write a file's bytes under another name, which it takes when they are all there."""
    from starscope.gguf.writer import atomic_output

    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as file, atomic_output(target, source.stat().st_size, force=True) as put:
        while piece := file.read(1 << 20):
            put(piece)


def tell_end(session: Session, job: Job, outcome: Outcome | None, made: Finished) -> None:
    """The document, or what was made and how well it does, a line each."""
    from starscope.train.report import last_measured

    step = job.trainer.step
    # A run that had nothing left to do was measured when it ended.
    measured = outcome.bits_per_byte if outcome is not None else None
    measured = last_measured(job.trainer.log_path) if measured is None else measured
    if outcome is not None and outcome.converged:
        session.note(f"ended early: {outcome.converged}")
    if session.json:
        session.document(
            {
                "model": str(made.model),
                "folder": str(made.folder),
                "report": str(made.report),
                "log": str(job.trainer.log_path),
                "steps": step,
                "parameters": job.parameters,
                "bits_per_byte": measured,
                "held_out_loss": None if outcome is None else outcome.held_out_loss,
                "converged": outcome.converged if outcome is not None else "",
            }
        )
    held_out = "" if measured is None else f", {measured:.3f} bits per byte on held-out text"
    session.note(f"{plural(step, 'step')}, {job.parameters:,} parameters{held_out}")
    session.note(f"{made.model}: {bytes_text(made.model_bytes)}, verified: it gives the checkpoint's logits")
    session.note(f"{made.folder}: the same model for transformers and vLLM")
    if made.report.exists():
        session.note(f"{made.report}: training report")
    session.note(f"try it: starscope run {made.model} 'TEXT'")
