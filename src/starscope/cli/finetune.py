"""`finetune`: an adapter (LoRA) trained beside a model, on plain text or code."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from starscope.cli.common import PATH, Session, everywhere, json_option
from starscope.cli.train import carry_out, check_copy, copy_file, look_ahead, need_torch, translated, use_threads
from starscope.cli.train_options import DATA, KEEPING, LEARNING, ROWS, Command, Row, ignored_flags, options_of
from starscope.cli.units import plural
from starscope.errors import UsageError

if TYPE_CHECKING:
    from starscope.train.adapters import AdapterJob, FinishedAdapter
    from starscope.train.loop import Outcome
    from starscope.train.settings import Settings

ADAPTER = "Adapter"
INT: dict[str, Any] = {"type": int, "metavar": "N"}
FLOAT: dict[str, Any] = {"type": float, "metavar": "X"}
RANKS = {  # flags of llama.cpp's finetune -> the modules that they give a rank to
    "--rank-wq": "q_proj",
    "--rank-wk": "k_proj",
    "--rank-wv": "v_proj",
    "--rank-wo": "o_proj",
    "--rank-ffn-gate": "gate_proj",
    "--rank-ffn-down": "down_proj",
    "--rank-ffn-up": "up_proj",
    "--rank-out": "lm_head",
}
OF_A_NEW_MODEL = frozenset({  # options of train that say what a model is, or write one
    "vocab", "vocab_size", "preset", "family", "start", "hidden_size", "num_layers", "num_heads", "num_kv_heads",
    "intermediate_size", "mult", "norm_epsilon", "activation", "init", "to", "license", "model_out",
    "only_write_model",
})  # fmt: skip
OWN: tuple[Row, ...] = (
    (ADAPTER, ("start", "--model-base"), {"type": PATH, "metavar": "MODEL", "help": "Same as MODEL."}),
    (ADAPTER, ("rank", "-r", "--rank", "--lora-r"), {**INT, "help": "Rank of each adapted layer. Default: 8."}),
    (ADAPTER, ("alpha", "--alpha", "--lora-alpha"),
     {**FLOAT, "help": "Scale the adapter's update by alpha / rank. Default: the rank."}),
    (ADAPTER, ("targets", "--targets", "--target"),
     {"multiple": True, "metavar": "NAME[:RANK]",
      "help": "Linear layers to adapt, by the end of their names. May be repeated or comma-separated. "
              "Default: all-linear (all but the output matrix)."}),
    *((ADAPTER, (f"rank_{module}", flag), {**INT, "help": f"Same as --targets {module}:N, added to other targets."})
      for flag, module in RANKS.items()),
    (KEEPING, ("lora_out", "--lora-out"),
     {"type": PATH, "metavar": "FILE", "help": "Also write adapter.gguf to FILE; ITERATION is replaced by the step."}),
    (KEEPING, ("merges", "--merge"),
     {"is_flag": True, "help": "Also write merged.gguf, the model with the adapter merged in."}),
    (KEEPING, ("to", "--to"), {"metavar": "TYPE", "help": "Weight format of merged.gguf. Default: the model's own."}),
    (KEEPING, ("only_write", "--only-write-lora", "--only-write-model"),
     {"is_flag": True, "help": "Do not train; write the adapter from the checkpoint in DIR."}),
)  # fmt: skip
NORMS = ("--rank-att-norm", "--rank-ffn-norm", "--rank-out-norm", "--rank-tok-embd")


def finetune_options(function: Any) -> Any:
    """Those of an adapter, and of `train` all that are about data, learning and keeping."""
    rows = [row for row in ROWS if row[1][0] not in OF_A_NEW_MODEL]
    parts = {title: [row for row in (*OWN, *rows) if row[0] == title] for title in (DATA, ADAPTER, LEARNING, KEEPING)}
    rest = [(LEARNING, *row[1:]) for row in rows if row[0] not in parts]  # the context
    return options_of([*parts[DATA], *parts[ADAPTER], *rest, *parts[LEARNING], *parts[KEEPING]])(function)


@click.command(cls=Command)
@click.argument("model", metavar="[MODEL]", required=False, type=PATH)
@click.argument("more", nargs=-1, metavar="[PATH]...", type=PATH)
@finetune_options
@click.option(
    *NORMS, "norms", type=int, hidden=True, help="Accepted for compatibility with llama.cpp's finetune; no effect."
)
@json_option
@everywhere
@click.pass_context
def finetune(
    ctx: click.Context,
    /,
    model: str | None,
    more: tuple[str, ...],
    start: str | None,
    out: str | None,
    resume: bool,
    force: bool,
    dry_run: bool,
    checkpoint_in: str | None,
    checkpoint_out: str | None,
    lora_out: str | None,
    merges: bool,
    only_write: bool,
    threads: int | None,
    norms: int | None,
    **given: Any,
) -> None:
    """Train a LoRA adapter for a model on plain text or code.

    MODEL is a GGUF file in any format, a Hugging Face folder or demo; its own weights stay frozen. PATH, like --data,
    is a file or folder of text. Results are written to the --out directory: adapter/ (for PEFT), adapter.gguf (for
    llama.cpp), log.jsonl and report.html. --lora accepts either adapter. Ctrl-C saves a checkpoint, from which
    --resume continues bit for bit. The flags of llama.cpp's finetune are also accepted, with - or _ between words.
    """
    session: Session = ctx.obj
    if out is None and not dry_run:
        raise UsageError("--out is missing; expected a folder for the adapter.")
    for text in ignored_flags(ctx, session.args):
        session.note(f"note: {text}")
    if norms is not None:
        session.note("note: norms and the token embedding get no adapter; a rank for them has no effect.")
    if start is not None and model is not None:
        more = (model, *more)
    need_torch()
    resume = resume or only_write or checkpoint_in is not None
    given |= {"start": start or model, "data": (*given["data"], *more), "targets": targets_of(given)}
    folder = Path(out or "")
    settings = read_settings(session, given, folder, resume, checkpoint_in)
    use_threads(threads)
    for target in filter(None, (checkpoint_out, lora_out)):
        check_copy(Path(target))

    from starscope.train.adapters import AdapterJob

    if dry_run:
        job = None if out is None else AdapterJob(settings, folder, force=force)
        look_ahead(session, settings, job, resume=resume, checkpoint_in=checkpoint_in)
        return

    job, outcome = carry_out(
        ctx,
        partial(AdapterJob, settings, folder, force=force),
        resume=resume,
        trains=not only_write,
        checkpoint_in=checkpoint_in,
        checkpoint_out=checkpoint_out,
    )
    made = job.finish(merge=merges)
    if lora_out is not None:
        target = lora_out.replace("ITERATION", str(job.trainer.step)).replace("LATEST", "latest")
        copy_file(made.file, Path(target))
    tell_end(session, job, outcome, made)


def targets_of(given: dict[str, Any]) -> tuple[str, ...]:
    """The targets that were asked for; ranks of single modules come behind, beside all linear layers or the others."""
    from starscope.train.new_adapter import ALL_LINEAR

    asked = [name for part in given.pop("targets") for name in part.split(",") if name]
    ranks = {module: given.pop(f"rank_{module}") for module in RANKS.values()}
    own = [f"{module}:{rank}" for module, rank in ranks.items() if rank is not None]
    return (*(asked or ([ALL_LINEAR] if own else [])), *own)


def read_settings(
    session: Session, given: Mapping[str, Any], folder: Path, resume: bool, checkpoint: str | None
) -> Settings:
    """The settings of the run: what was given, over what is usual or what the run in the folder was asked for."""
    from starscope.train import settings as of
    from starscope.train.adapters import with_defaults

    saved = of.read_settings(folder) if resume and (checkpoint is None or (folder / of.FILE).exists()) else None
    usual = of.resolve({} if saved else with_defaults({}), saved=saved)
    asked = translated(session, given, usual)
    settings = of.resolve(asked if saved else with_defaults(asked), saved=saved)
    if not settings.start:
        raise UsageError("MODEL is missing; expected the model to adapt.")
    if not settings.data:
        raise UsageError("--data is missing; expected files or folders of text.")
    if settings.rank < 1:
        raise UsageError(f"the rank is {settings.rank}; expected at least 1.")
    return settings


def tell_end(session: Session, job: AdapterJob, outcome: Outcome | None, made: FinishedAdapter) -> None:
    """The document, or what was made and how well it does, a line each."""
    from starscope.train.report import last_measured

    step, measured = job.trainer.step, outcome.bits_per_byte if outcome is not None else None
    measured = last_measured(job.trainer.log_path) if measured is None else measured
    if outcome is not None and outcome.converged:
        session.note(f"ended early: {outcome.converged}")
    if session.json:
        session.document(
            {
                "adapter": str(made.folder),
                "file": str(made.file),
                "merged": None if made.merged is None else str(made.merged),
                "report": str(made.report),
                "log": str(job.trainer.log_path),
                "steps": step,
                "parameters": job.parameters,
                "ranks": job.ranks,
                "alpha": job.alpha,
                "bits_per_byte": measured,
                "held_out_loss": None if outcome is None else outcome.held_out_loss,
                "converged": outcome.converged if outcome is not None else "",
            }
        )
    held_out = "" if measured is None else f", {measured:.3f} bits per byte on held-out text"
    session.note(f"{plural(step, 'step')}, {job.parameters:,} trained parameters{held_out}")
    session.note(f"{made.folder}: for PEFT; {made.file}: for llama.cpp; verified: both give the trained logits")
    if made.merged is not None:
        session.note(f"{made.merged}: the model with the adapter merged in")
    if made.report.exists():
        session.note(f"{made.report}: training report")
    session.note(f"try it: starscope run {job.settings.start} 'TEXT' --lora {made.file}")
