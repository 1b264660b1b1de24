"""The options of `train`, in sections, with the names that llama.cpp's train-text-from-scratch has for them.

An option's destination is the name of a setting (`train.settings.Settings`), one that
`train.flags.translate` makes a setting of, or about this command line alone (`--out`, `--resume`, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from starscope.cli.common import PATH, check_threads
from starscope.families import USUAL

F = TypeVar("F", bound=Callable[..., Any])

DATA, MODEL, LEARNING, KEEPING = "Data", "Model", "Learning", "What it tells and keeps"
GONE = "Of train-text-from-scratch, without effect here"
IGNORED = "starscope.train.ignored"  # where a context keeps which of those were given


class Option(click.Option):
    """An option of a section."""

    def __init__(self, *args: Any, section: str, **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self.section = section


def hyphenated(name: str) -> str:
    """An option's name with hyphens between its words, where the original's users may write underscores."""
    return name.replace("_", "-")


class Command(click.Command):
    """A command whose help has its options in sections, and whose options may be spelled with underscores."""

    def __init__(self, *args: Any, **attrs: Any) -> None:
        # click asks this for the names of options, never for their values; it would for a choice, and there are none.
        super().__init__(*args, context_settings={"token_normalize_func": hyphenated}, **attrs)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each section with its options; those that belong to every verb at the end."""
        sections: dict[str, list[tuple[str, str]]] = {}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for param in sorted(options, key=lambda param: not isinstance(param, Option)):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "section", "Everywhere"), []).append(record)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows, col_max=34)


Row = tuple[str, tuple[str, ...], dict[str, Any]]


def _row(section: str, *names: str, **attrs: Any) -> Row:
    return section, names, attrs


INT: dict[str, Any] = {"type": int, "metavar": "N"}
FLOAT: dict[str, Any] = {"type": float, "metavar": "X"}

ROWS: tuple[Row, ...] = (
    _row(DATA, "data", "--data", "--train-data", multiple=True, type=PATH, metavar="PATH",
         help="A file, or a folder with code and text; may be repeated, and more may follow it."),
    _row(DATA, "suffixes", "--suffix", multiple=True, metavar=".EXT",
         help="Of folders, files that end so alone; may be repeated."),
    _row(DATA, "vocab", "--vocab", "--tokenizer", "--vocab-model", metavar="KIND|PATH",
         help="bpe (made of the text), chars, or a tokenizer: GGUF file, folder, tokenizer.json. Default: bpe."),
    _row(DATA, "vocab_size", "--vocab-size", **INT, help="Tokens of a bpe vocabulary."),
    _row(DATA, "held_out", "--held-out", **FLOAT, help="Share of the text to measure with. Default: 0.05."),
    _row(DATA, "split", "--split", metavar="HOW",
         help="What is held out: documents, last (of each one), or auto. Default: auto."),
    _row(DATA, "fim_rate", "--fim-rate", **FLOAT, help="Share of the text that is rearranged to fill in the middle."),
    _row(DATA, "spm_rate", "--spm-rate", **FLOAT, help="Share of that with the suffix first. Default: 0.5."),
    _row(MODEL, "preset", "--preset", metavar="NAME",
         help="Sizes that go together: tiny, demo, nano, text, small. Default: tiny."),
    _row(MODEL, "family", "--family", metavar="NAME", help=f"Its architecture. Default: {USUAL}."),
    _row(MODEL, "start", "--from", type=PATH, metavar="MODEL",
         help="Go on with this model's weights and tokenizer: a GGUF file, a folder, demo."),
    _row(MODEL, "context_length", "-c", "--ctx", "--context-length", **INT, help="Positions."),
    _row(MODEL, "hidden_size", "--embd", "--hidden-size", **INT, help="Width."),
    _row(MODEL, "num_layers", "--layer", "--layers", "--num-layers", **INT, help="Blocks."),
    _row(MODEL, "num_heads", "--head", "--heads", "--num-heads", **INT, help="Query heads."),
    _row(MODEL, "num_kv_heads", "--kv-heads", "--num-kv-heads", **INT, help="Key heads. Default: the family's."),
    _row(MODEL, "intermediate_size", "--ff", "--intermediate-size", **INT,
         help="Width of the MLP. Default: the family's."),
    _row(MODEL, "mult", "--mult", **INT, help="Of the MLP: 8/3 of --embd, rounded up to a multiple of N."),
    _row(MODEL, "norm_epsilon", "--norm-epsilon", "--norm-rms-eps", **FLOAT,
         help="What is added under the norms' root."),
    _row(MODEL, "activation", "--activation", metavar="NAME",
         help="gelu, gelu_pytorch_tanh, silu, ...: one of the family's."),
    _row(MODEL, "init", "--init", metavar="KIND", help="Initial weights: scaled or xavier. Default: scaled."),
    _row(LEARNING, "steps", "--steps", **INT, help="Updates in all."),
    _row(LEARNING, "examples", "-n", "--examples", **INT,
         help="Batches; with --adam-iter, so many times that. Instead of --steps."),
    _row(LEARNING, "adam_iter", "--adam-iter", **INT, help="Updates; each has a batch of its own. Instead of --steps."),
    _row(LEARNING, "lbfgs_iterations", "--lbfgs-iter", **INT, help="Iterations of lbfgs on each batch. Default: 16."),
    _row(LEARNING, "epochs", "--epochs", **FLOAT, help="So many times through the data. Instead of --steps."),
    _row(LEARNING, "batch_size", "-b", "--batch", "--batch-size", **INT, help="Samples an update."),
    _row(LEARNING, "accumulation", "--grad-acc", "--accumulation", **INT,
         help="Parts in which a batch is run, for less memory. Default: 1."),
    _row(LEARNING, "optimizer", "--optimizer", metavar="NAME", help="adamw or lbfgs. Default: adamw."),
    _row(LEARNING, "use_adam", "--use-adam", is_flag=True, help="The same as --optimizer adamw."),
    _row(LEARNING, "use_lbfgs", "--use-lbfgs", is_flag=True, help="The same as --optimizer lbfgs."),
    _row(LEARNING, "learning_rate", "--learning-rate", "--lr", "--adam-alpha", **FLOAT, help="At its highest."),
    _row(LEARNING, "weight_decay", "--weight-decay", "--adam-decay", **FLOAT,
         help="Times the learning rate, of matrices alone. Default: 0.1."),
    _row(LEARNING, "beta1", "--beta1", "--adam-beta1", **FLOAT, help="Default: 0.9."),
    _row(LEARNING, "beta2", "--beta2", "--adam-beta2", **FLOAT, help="Default: 0.95."),
    _row(LEARNING, "clip_norm", "--clip-norm", "--adam-gclip", **FLOAT,
         help="The gradient's norm at most; 0: no limit. Default: 1."),
    _row(LEARNING, "schedule", "--schedule", metavar="KIND",
         help="constant, linear, cosine, cosine_restarts or wsd. Default: cosine."),
    _row(LEARNING, "enable_restart", "--enable-restart", is_flag=True, help="The same as --schedule cosine_restarts."),
    _row(LEARNING, "disable_restart", "--disable-restart", is_flag=True, help="The same as --schedule cosine."),
    _row(LEARNING, "warmup_steps", "--warmup", "--warmup-steps", **INT,
         help="Steps in which the rate rises. Default: a tenth of the decay, 100 at most."),
    _row(LEARNING, "decay_steps", "--decay-steps", "--cos-decay-steps", **INT,
         help="Where the rate is lowest; it does not follow from --steps."),
    _row(LEARNING, "restart_growth", "--restart-growth", "--cos-decay-restart", **FLOAT,
         help="So many times as long is each period of cosine_restarts. Default: 1.1."),
    _row(LEARNING, "final_share", "--final-share", "--cos-decay-alpha", "--cos-decay-min", **FLOAT,
         help="The lowest rate, as a share of the highest. Default: 0.1."),
    _row(LEARNING, "adam_min_alpha", "--adam-min-alpha", **FLOAT, help="The lowest rate itself."),
    _row(LEARNING, "tolerance", "--stop-tolerance", "--adam-epsf", **FLOAT,
         help="Stop once a step changes the loss by less than this share."),
    _row(LEARNING, "past", "--stop-past", "--opt-past", **INT,
         help="Stop once the loss is what it was N steps before ..."),
    _row(LEARNING, "delta", "--stop-delta", "--opt-delta", **FLOAT, help="... within this share. Default: 1e-5."),
    _row(LEARNING, "max_no_improvement", "--stop-no-improvement", "--opt-max-no-improvement", **INT,
         help="Stop after N steps without a lower loss."),
    _row(LEARNING, "seed", "-s", "--seed", **INT, help="Below 0: one is drawn, and told. Default: 0."),
    _row(LEARNING, "precision", "--precision", metavar="KIND",
         help="auto (a short probe decides), float32 or bfloat16. Default: auto."),
    _row(LEARNING, "compile", "--compile", metavar="WHEN",
         help="torch.compile: on, off, or auto: where it pays itself back before the end. Default: auto."),
    _row(LEARNING, "recompute", "--recompute/--no-recompute", "--use-checkpointing/--no-checkpointing", default=None,
         help="Compute activations again in the backward pass: more time, less memory."),
    _row(LEARNING, "threads", "-t", "--threads", **INT, callback=check_threads, help="Cores to use. Default: all."),
    _row(KEEPING, "out", "--out", type=PATH, metavar="DIR", help="Where everything goes."),
    _row(KEEPING, "to", "--to", metavar="TYPE",
         help="The type of model.gguf: f32, f16, q8_0, q4_k_m, ... Default: f32."),
    _row(KEEPING, "name", "--name", metavar="TEXT", help="What the model is called in the file."),
    _row(KEEPING, "license", "--license", metavar="TEXT", help="The model's license in the file."),
    _row(KEEPING, "resume", "--resume", is_flag=True,
         help="Go on with the run in DIR, with its settings where nothing else is said."),
    _row(KEEPING, "force", "--force", is_flag=True, help="Begin again where DIR holds a run."),
    _row(KEEPING, "dry_run", "--dry-run", is_flag=True,
         help="Say what data there is, how much memory and time it takes, and end."),
    _row(KEEPING, "log_every", "--log-every", "--print-info-interval", **INT,
         help="Steps from one line of the log to the next. Default: 10."),
    _row(KEEPING, "evaluate_every", "--eval-every", **INT, help="Steps from one evaluation to the next. Default: 250."),
    _row(KEEPING, "save_every", "--save-every", **INT, help="Steps from one checkpoint to the next. Default: 250."),
    _row(KEEPING, "prompts", "--prompt", multiple=True, metavar="TEXT",
         help="Continued at every evaluation; <FILL> marks a hole. May be repeated."),
    _row(KEEPING, "sample_tokens", "--sample-tokens", "--predict", **INT,
         help="Tokens of each sample; 0: no samples. Default: 48."),
    _row(KEEPING, "checkpoint_in", "--checkpoint-in", type=PATH, metavar="FILE", help="Resume from this checkpoint."),
    _row(KEEPING, "checkpoint_out", "--checkpoint-out", type=PATH, metavar="FILE",
         help="Write the last checkpoint there too; ITERATION becomes its step."),
    _row(KEEPING, "model_out", "--model-out", type=PATH, metavar="FILE", help="Write model.gguf there too."),
    _row(KEEPING, "only_write_model", "--only-write-model", is_flag=True,
         help="Train no further: write the model of the checkpoint in DIR."),
)  # fmt: skip


def _ignore(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Remember an option that has no effect, for the command to say so."""
    if value not in (None, False):
        ctx.meta.setdefault(IGNORED, []).append(param.name)


def options_of(rows: Iterable[Row]) -> Callable[[F], F]:
    """Some options, in their order, and the flags of the original that are without effect."""
    from starscope.train.flags import GONE as FLAGS

    def decorate(function: F) -> F:
        for number, gone in reversed(list(enumerate(FLAGS))):
            attrs: dict[str, Any] = {"metavar": "X"} if gone.takes_value else {"is_flag": True}
            attrs |= {"section": GONE, "expose_value": False, "callback": _ignore, "help": f"{gone.reason}."}
            function = click.option(*gone.names, f"gone_{number}", cls=Option, **attrs)(function)
        for section, names, attrs in reversed(list(rows)):
            function = click.option(*names, cls=Option, section=section, **attrs)(function)
        return function

    return decorate


def train_options(function: F) -> F:
    """All of them, in the order of the table."""
    return options_of(ROWS)(function)


def ignored_flags(ctx: click.Context, args: Iterable[str]) -> list[str]:
    """A sentence for each flag of the original that was given and has no effect."""
    from starscope.train.flags import GONE as FLAGS

    asked = {arg.partition("=")[0].replace("_", "-") for arg in args}
    rows = [FLAGS[int(name.removeprefix("gone_"))] for name in ctx.meta.get(IGNORED, [])]
    return [f"{', '.join(n for n in row.names if n in asked)} has no effect: {row.reason}." for row in rows]
