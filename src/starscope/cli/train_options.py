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

DATA, MODEL, LEARNING, KEEPING = "Data", "Model", "Training", "Output"
GONE = "Accepted for compatibility with llama.cpp, no effect"
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
        super().__init__(*args, **attrs)
        # Applied to the names of options and to choices, of which there are none here; never to other values.
        self.context_settings["token_normalize_func"] = hyphenated

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each section with its options; those that belong to every verb at the end."""
        sections: dict[str, list[tuple[str, str]]] = {}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for param in sorted(options, key=lambda param: not isinstance(param, Option)):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "section", "General"), []).append(record)
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
         help="File or folder of code or text, like PATH. May be repeated."),
    _row(DATA, "suffixes", "--suffix", multiple=True, metavar=".EXT",
         help="In folders, read only files with this suffix. May be repeated."),
    _row(DATA, "vocab", "--vocab", "--tokenizer", "--vocab-model", metavar="KIND|PATH",
         help="bpe (built from the text), chars, or an existing tokenizer: GGUF file, folder or tokenizer.json. "
              "Default: bpe."),
    _row(DATA, "vocab_size", "--vocab-size", **INT, help="Size of a bpe vocabulary, in tokens."),
    _row(DATA, "held_out", "--held-out", **FLOAT, help="Fraction of the text held out for evaluation. Default: 0.05."),
    _row(DATA, "split", "--split", metavar="HOW",
         help="What to hold out: documents, last (the end of each document) or auto. Default: auto."),
    _row(DATA, "fim_rate", "--fim-rate", **FLOAT, help="Fraction of the text to rearrange for fill-in-the-middle."),
    _row(DATA, "spm_rate", "--spm-rate", **FLOAT, help="Fraction of that to arrange suffix-first. Default: 0.5."),
    _row(MODEL, "preset", "--preset", metavar="NAME",
         help="Preset model size: tiny, demo, nano, text or small. Default: tiny."),
    _row(MODEL, "family", "--family", metavar="NAME", help=f"Model architecture. Default: {USUAL}."),
    _row(MODEL, "start", "--from", type=PATH, metavar="MODEL",
         help="Start from this model's weights and tokenizer: GGUF file, folder or demo."),
    _row(MODEL, "context_length", "-c", "--ctx", "--context-length", **INT, help="Context length in tokens."),
    _row(MODEL, "hidden_size", "--embd", "--hidden-size", **INT, help="Hidden size."),
    _row(MODEL, "num_layers", "--layer", "--layers", "--num-layers", **INT, help="Number of blocks."),
    _row(MODEL, "num_heads", "--head", "--heads", "--num-heads", **INT, help="Number of query heads."),
    _row(MODEL, "num_kv_heads", "--kv-heads", "--num-kv-heads", **INT,
         help="Number of key/value heads. Default: the family's."),
    _row(MODEL, "intermediate_size", "--ff", "--intermediate-size", **INT,
         help="Hidden size of the MLP. Default: the family's."),
    _row(MODEL, "mult", "--mult", **INT,
         help="Set the MLP's hidden size to 8/3 of --embd, rounded up to a multiple of N."),
    _row(MODEL, "norm_epsilon", "--norm-epsilon", "--norm-rms-eps", **FLOAT,
         help="Epsilon of the norms."),
    _row(MODEL, "activation", "--activation", metavar="NAME",
         help="Activation function, one of the family's: gelu, gelu_pytorch_tanh, silu, ..."),
    _row(MODEL, "init", "--init", metavar="KIND", help="Initial weights: scaled or xavier. Default: scaled."),
    _row(LEARNING, "steps", "--steps", **INT, help="Total number of updates."),
    _row(LEARNING, "examples", "-n", "--examples", **INT,
         help="Number of batches, times --adam-iter if given. Replaces --steps."),
    _row(LEARNING, "adam_iter", "--adam-iter", **INT,
         help="Number of updates, each on its own batch. Replaces --steps."),
    _row(LEARNING, "lbfgs_iterations", "--lbfgs-iter", **INT, help="L-BFGS iterations per batch. Default: 16."),
    _row(LEARNING, "epochs", "--epochs", **FLOAT, help="Number of passes over the data. Replaces --steps."),
    _row(LEARNING, "batch_size", "-b", "--batch", "--batch-size", **INT, help="Samples per update."),
    _row(LEARNING, "accumulation", "--grad-acc", "--accumulation", **INT,
         help="Split each batch into N parts to save memory. Default: 1."),
    _row(LEARNING, "optimizer", "--optimizer", metavar="NAME", help="Optimizer: adamw or lbfgs. Default: adamw."),
    _row(LEARNING, "use_adam", "--use-adam", is_flag=True, help="Same as --optimizer adamw."),
    _row(LEARNING, "use_lbfgs", "--use-lbfgs", is_flag=True, help="Same as --optimizer lbfgs."),
    _row(LEARNING, "learning_rate", "--learning-rate", "--lr", "--adam-alpha", **FLOAT, help="Peak learning rate."),
    _row(LEARNING, "weight_decay", "--weight-decay", "--adam-decay", **FLOAT,
         help="Weight decay, applied to matrices only and scaled by the learning rate. Default: 0.1."),
    _row(LEARNING, "beta1", "--beta1", "--adam-beta1", **FLOAT, help="Beta1 of adamw. Default: 0.9."),
    _row(LEARNING, "beta2", "--beta2", "--adam-beta2", **FLOAT, help="Beta2 of adamw. Default: 0.95."),
    _row(LEARNING, "clip_norm", "--clip-norm", "--adam-gclip", **FLOAT,
         help="Clip the gradient norm to this value; 0: off. Default: 1."),
    _row(LEARNING, "schedule", "--schedule", metavar="KIND",
         help="Learning rate schedule: constant, linear, cosine, cosine_restarts or wsd. Default: cosine."),
    _row(LEARNING, "enable_restart", "--enable-restart", is_flag=True, help="Same as --schedule cosine_restarts."),
    _row(LEARNING, "disable_restart", "--disable-restart", is_flag=True, help="Same as --schedule cosine."),
    _row(LEARNING, "warmup_steps", "--warmup", "--warmup-steps", **INT,
         help="Warmup steps. Default: a tenth of --decay-steps, at most 100."),
    _row(LEARNING, "decay_steps", "--decay-steps", "--cos-decay-steps", **INT,
         help="Step at which the learning rate reaches its minimum, independent of --steps."),
    _row(LEARNING, "restart_growth", "--restart-growth", "--cos-decay-restart", **FLOAT,
         help="Each period of cosine_restarts is this many times as long as the one before. Default: 1.1."),
    _row(LEARNING, "final_share", "--final-share", "--cos-decay-alpha", "--cos-decay-min", **FLOAT,
         help="Minimum learning rate, as a fraction of the peak. Default: 0.1."),
    _row(LEARNING, "adam_min_alpha", "--adam-min-alpha", **FLOAT, help="Minimum learning rate, as an absolute value."),
    _row(LEARNING, "tolerance", "--stop-tolerance", "--adam-epsf", **FLOAT,
         help="Stop when a step changes the loss by less than this fraction."),
    _row(LEARNING, "past", "--stop-past", "--opt-past", **INT,
         help="Stop when the loss equals that of N steps before, to within --stop-delta."),
    _row(LEARNING, "delta", "--stop-delta", "--opt-delta", **FLOAT,
         help="Relative tolerance of --stop-past. Default: 1e-5."),
    _row(LEARNING, "max_no_improvement", "--stop-no-improvement", "--opt-max-no-improvement", **INT,
         help="Stop after N steps without a lower loss."),
    _row(LEARNING, "seed", "-s", "--seed", **INT, help="Random seed; below 0: choose one and report it. Default: 0."),
    _row(LEARNING, "precision", "--precision", metavar="KIND",
         help="float32, bfloat16 or auto (decided by a short benchmark). Default: auto."),
    _row(LEARNING, "compile", "--compile", metavar="WHEN",
         help="Use torch.compile: on, off or auto (if it would save time overall). Default: auto."),
    _row(LEARNING, "recompute", "--recompute/--no-recompute", "--use-checkpointing/--no-checkpointing", default=None,
         help="Recompute activations in the backward pass: slower, but uses less memory."),
    _row(LEARNING, "threads", "-t", "--threads", **INT, callback=check_threads,
         help="CPU threads to use. Default: all cores."),
    _row(KEEPING, "out", "--out", type=PATH, metavar="DIR", help="Output directory."),
    _row(KEEPING, "to", "--to", metavar="TYPE",
         help="Weight format of model.gguf: f32, f16, q8_0, q4_k_m, ... Default: f32."),
    _row(KEEPING, "name", "--name", metavar="TEXT", help="Model name to store in the file."),
    _row(KEEPING, "license", "--license", metavar="TEXT", help="License to store in the file."),
    _row(KEEPING, "resume", "--resume", is_flag=True,
         help="Continue the run in DIR, with its settings unless overridden."),
    _row(KEEPING, "force", "--force", is_flag=True, help="Start over if DIR contains a run."),
    _row(KEEPING, "dry_run", "--dry-run", is_flag=True,
         help="Show the data found and the memory and time needed, and exit."),
    _row(KEEPING, "log_every", "--log-every", "--print-info-interval", **INT,
         help="Steps between lines of the log. Default: 10."),
    _row(KEEPING, "evaluate_every", "--eval-every", **INT, help="Steps between evaluations. Default: 250."),
    _row(KEEPING, "save_every", "--save-every", **INT, help="Steps between checkpoints. Default: 250."),
    _row(KEEPING, "prompts", "--prompt", multiple=True, metavar="TEXT",
         help="Prompt to complete at every evaluation; <FILL> marks text to fill in. May be repeated."),
    _row(KEEPING, "sample_tokens", "--sample-tokens", "--predict", **INT,
         help="Tokens per sample; 0: no samples. Default: 48."),
    _row(KEEPING, "checkpoint_in", "--checkpoint-in", type=PATH, metavar="FILE", help="Resume from this checkpoint."),
    _row(KEEPING, "checkpoint_out", "--checkpoint-out", type=PATH, metavar="FILE",
         help="Also write the last checkpoint to FILE; ITERATION is replaced by the step."),
    _row(KEEPING, "model_out", "--model-out", type=PATH, metavar="FILE", help="Also write model.gguf to FILE."),
    _row(KEEPING, "only_write_model", "--only-write-model", is_flag=True,
         help="Do not train; write the model from the checkpoint in DIR."),
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
            attrs |= {
                "section": GONE,
                "expose_value": False,
                "callback": _ignore,
                "help": f"{gone.reason[0].upper()}{gone.reason[1:]}.",
            }
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
