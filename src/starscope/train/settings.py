"""What a run is asked for, in one place: given by somebody, of a preset, saved by an earlier run, or the default.

The first of these that says something counts. They are saved beside the checkpoint, so that a run goes on with
nothing but its folder; no time and no path of the output is among them:

    settings = resolve({"data": ("text/",), "steps": 200}, preset="tiny")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from starscope.checkpoint.files import is_there, read_json
from starscope.errors import InputError, InvalidContentError, UsageError
from starscope.families import USUAL
from starscope.train.checkpoints import CURRENT
from starscope.train.log import unwritable
from starscope.train.presets import SIZES, find_preset

FILE = "settings.json"
DEFAULT_PRESET = "tiny"


@dataclass(frozen=True)
class Settings:
    """Lengths are in steps, batches in samples, samples of text in tokens. None: it follows from the rest."""

    # The data.
    data: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    vocab: str = "bpe"  # bpe, chars, or a tokenizer: GGUF file, folder, tokenizer.json
    vocab_size: int | None = None
    held_out: float = 0.05
    split: str = "auto"
    fim_rate: float = 0.5
    spm_rate: float = 0.5
    # The model.
    family: str = USUAL
    start: str = ""  # the model whose weights it starts from
    context_length: int | None = 256  # None: that of the model to start from
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    norm_epsilon: float | None = None
    activation: str | None = None
    init: str = "scaled"
    # How it learns.
    steps: int = 1000
    epochs: float | None = None  # instead of steps
    batch_size: int = 16
    accumulation: int = 1
    optimizer: str = "adamw"
    lbfgs_iterations: int = 16
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    schedule: str = "cosine"
    warmup_steps: int | None = None
    decay_steps: int = 1000
    restart_growth: float = 1.1
    final_share: float = 0.1  # of the learning rate
    tolerance: float = 0.0
    past: int = 0
    delta: float = 1e-5
    max_no_improvement: int = 0
    seed: int = 0
    precision: str = "auto"
    compile: str = "auto"
    recompute: bool = False
    # An adapter beside the model to start from (adapters.py).
    rank: int = 0  # 0: the model itself is trained
    alpha: float | None = None  # None: the rank
    targets: tuple[str, ...] = ()
    # What it tells and keeps.
    to: str = "f32"
    name: str = ""
    license: str = ""
    log_every: int = 10
    evaluate_every: int = 250
    save_every: int = 250
    prompts: tuple[str, ...] = ()
    sample_tokens: int = 48

    @property
    def sizes(self) -> dict[str, Any]:
        """Those of the model, by standard names."""
        return {name: getattr(self, name) for name in SIZES}


OF_THE_START = (*(name for name in SIZES if name != "context_length"), "family", "init", "vocab", "vocab_size")
NAMES = tuple(field.name for field in fields(Settings))


def resolve(given: Mapping[str, Any], *, preset: str | None = None, saved: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a run; values that are None, or empty tuples, were not given."""
    asked = {name: value for name, value in given.items() if value is not None and value != ()}
    unknown = sorted(set(asked) - set(NAMES))
    if unknown:
        raise UsageError(f"there is no setting {unknown[0]!r}.")
    fixed = [name for name in OF_THE_START if name in asked]
    if asked.get("start") and fixed:
        raise UsageError(f"{fixed[0]} is that of the model to start from; expected none to be asked for.")
    if "epochs" in asked and "steps" in asked:
        raise UsageError("both epochs and steps were given; expected one of them.")
    if preset is None and not saved:
        preset = DEFAULT_PRESET
    base = {} if preset is None else find_preset(preset).values
    values = {**(saved or {}), **base, **asked}
    if "steps" in asked:
        values["epochs"] = None
    if "start" in asked and "context_length" not in asked:
        values["context_length"] = None  # as long as the model's
    if values.get("vocab", "bpe") != "bpe":
        if "vocab_size" in asked:
            raise UsageError(f"the size of the vocabulary {values['vocab']} is its own; expected no vocab_size.")
        values["vocab_size"] = None
    return Settings(**values)


def save_settings(folder: Path, settings: Settings) -> None:
    """Write them beside the checkpoint: the old ones are there until the new ones are."""
    path, temporary = folder / FILE, folder / f"{FILE}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(settings), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_settings(folder: Path) -> dict[str, Any]:
    """What an earlier run in the folder was asked for; InputError when there was none."""
    if not is_there(folder / FILE):
        hint = "Leave --resume out."
        if is_there(folder / CURRENT):
            hint = f"Give the options of the run again, with --checkpoint-in {folder / CURRENT}."
        raise InputError(f"{folder} holds no run to go on with: it has no {FILE}.", hint=hint)
    found = read_json(folder / FILE)
    unknown = sorted(set(found) - set(NAMES))
    if unknown:
        raise InvalidContentError(f"{folder / FILE} has the key {unknown[0]!r}, which is not a setting.")
    made = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    for name, kind in get_type_hints(Settings).items():
        if name in made and not _is_of(made[name], kind):
            raise InvalidContentError(f"{folder / FILE} has {name} {found[name]!r}; expected {KINDS[_plain(kind)]}.")
    return made


KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", tuple: "a list of texts"}


def _plain(kind: Any) -> type:
    """The type of a setting without its None and without what a tuple is of."""
    options = [one for one in get_args(kind) if one is not type(None)] if isinstance(kind, UnionType) else [kind]
    plain: type = get_origin(options[0]) or options[0]
    return plain


def _is_of(value: Any, kind: Any) -> bool:
    plain = _plain(kind)
    if value is None:
        return isinstance(kind, UnionType)
    if plain is tuple:
        return isinstance(value, tuple) and all(isinstance(part, str) for part in value)
    return type(value) is plain or (plain is float and type(value) is int)
