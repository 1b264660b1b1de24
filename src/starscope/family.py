"""What a family of models declares, and everything that follows from it.

A family is one file of tables and one recorded forward pass. From the tables follow: reading a Hugging Face
config (every key is read, refused, or ignored for a stated reason), GGUF metadata in both directions, and the
name and shape of every tensor in three spellings:

    hp = read_config(family, config)
    for slot in family.slots(hp):
        print(slot.name, slot.gguf, slot.hf, slot.shape)
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from starscope.checkpoint.bookkeeping import BOOKKEEPING
from starscope.checkpoint.content import WORDS, cut, is_of, short, typed
from starscope.errors import CheckpointError, GGUFError, StarscopeError, UnsupportedError
from starscope.formats import KNOWN_TYPES
from starscope.gguf import format as gguf_format

if TYPE_CHECKING:
    from starscope.checkpoint import CheckpointTensor
    from starscope.gguf.reader import GGUFFile

Config = Mapping[str, Any]
Refused = Mapping[str, tuple[bool | Callable[[Any], bool], str]]  # by config key: the refused value, or a test; why
Scalar = int | float | str | bool

ARCHITECTURE_KEY, TOKENS_KEY = "general.architecture", "tokenizer.ggml.tokens"
REDUNDANT_KEYS = {  # keys that some writers add under the architecture's prefix -> what they have to say
    "vocab_size": "vocab_size",
    "attention.key_length": "qk_head_dim",
    "attention.value_length": "head_dim",
}
NEUTRAL: Mapping[str, tuple[float, ...]] = {  # keys that change the arithmetic of llama.cpp's models -> unless they say
    "expert_count": (0,),
    "attention.causal": (1,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "rope.scaling.attn_factor": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "use_parallel_residual": (0,),
}
LARGEST = {
    "num_layers": 512,
    **dict.fromkeys(
        ("hidden_size", "num_heads", "num_kv_heads", "intermediate_size", "context_length", "vocab_size"), 2**31 - 1
    ),
}
ALWAYS_REFUSED: Refused = {  # what every family's table begins with
    "quantization_config": (
        lambda value: value is not None,
        "the weights are already quantized by another library; convert the original checkpoint",
    ),
    "is_encoder_decoder": (True, "models here are only decoders"),
    "add_cross_attention": (True, "models here are only decoders"),
}
MOST_LISTED = 5  # unknown keys in a message


class HParams(Mapping[str, Any]):
    """The sizes and settings of one model, by their standard names, as attributes and as a mapping."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__["_values"] = dict(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy that is being made has no values yet
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter is called {name!r}; there are: {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("hyperparameters are read-only; use replace()")

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return "HParams(" + ", ".join(f"{k}={v!r}" for k, v in self.items()) + ")"

    def replace(self, **changes: Any) -> HParams:
        return HParams({**self._values, **changes})


@dataclass(frozen=True)
class HParam:
    """One row of a family's HPARAMS table.

    `gguf` is the key without the architecture's prefix (None: not stored); `hf` the config key, or a function of
    the config; `reads` the config keys that such a function looks at. `also` are older GGUF keys that win when
    present. `default` stands in when a file or a config lacks the key (None: required); it may be a function of the
    values of the rows before. `tensor` names one whose presence in a GGUF file is the value. `optional`: not written
    where it is the default.
    """

    name: str
    gguf: str | None
    hf: str | Callable[[Config], Any]
    kind: type = int
    reads: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    default: Any = None
    choices: Mapping[str, str] | None = None  # spelling in a config -> standard spelling
    tensor: str | None = None
    optional: bool = False

    def default_of(self, values: Mapping[str, Any]) -> Any:
        """The default, given the values of the rows before this one; None when the value has to be there."""
        return self.default(values) if callable(self.default) else self.default


@dataclass(frozen=True)
class Tensor:
    """One row of a family's TENSORS table: a weight `[out in]` (or a vector), and its bias when `bias`.

    `{i}` stands for the block. `shape` is written with hyperparameter names, `+` and `*`. `hf_rows` and `gguf_rows`
    give, for each of our rows, the row of the Hugging Face or of the GGUF tensor it is (None: the same). `tied_to`
    names the tensor that takes its place when it is absent. `always_f32`: never stored in a smaller type. `bias` and
    `when` may name a hyperparameter that says whether there is such a tensor. `made`: no checkpoint stores it, and
    training leaves it alone; its values follow from the hyperparameters. `positive`: a file with others is refused.
    """

    name: str
    gguf: str
    hf: str
    shape: str
    bias: bool | str = False
    always_f32: bool = False
    hf_rows: Callable[[HParams], np.ndarray | None] | None = None
    gguf_rows: Callable[[HParams], np.ndarray | None] | None = None
    tied_to: str | None = None
    when: str | None = None
    made: Callable[[HParams], np.ndarray] | None = None
    positive: bool = False


@dataclass(frozen=True)
class Module:
    """One row of a family's MODULES table: a part of the model that has no weights of its own, under its two names.

    `kind` is the name of its class in transformers, or a function of the hyperparameters that gives it.
    """

    name: str
    hf: str
    kind: str | Callable[[HParams], str]

    def kind_of(self, hp: HParams) -> str:
        return self.kind if isinstance(self.kind, str) else self.kind(hp)


@dataclass(frozen=True)
class Slot:
    """One tensor of one model, in its three spellings. `shape` is in torch order."""

    name: str
    gguf: str
    hf: str
    shape: tuple[int, ...]
    always_f32: bool
    hf_rows: np.ndarray | None = field(compare=False, default=None)
    gguf_rows: np.ndarray | None = field(compare=False, default=None)
    tied_to: str | None = None
    made: Callable[[], np.ndarray] | None = field(compare=False, default=None)
    positive: bool = False

    @property
    def parameters(self) -> int:
        return int(np.prod(self.shape))

    @property
    def gguf_order(self) -> np.ndarray | None:
        """For each row of the GGUF tensor, which of ours it is: the inverse of `gguf_rows`."""
        return None if self.gguf_rows is None else np.argsort(self.gguf_rows)


@dataclass(frozen=True)
class Family:
    """Everything that the package knows about one architecture; built by its file in `families/`."""

    name: str
    title: str
    gguf_architecture: str
    hf_architectures: tuple[str, ...]
    hf_model_types: tuple[str, ...]  # one for each of hf_architectures
    hparams: Sequence[HParam]
    derived: Mapping[str, Callable[[HParams], Any]]
    tensors: Sequence[Tensor]
    modules: Sequence[Module]
    record: Callable[[Any], None]
    refused: Refused
    ignored: Mapping[str, str]
    ignored_tensors: Sequence[str]
    default_pre_tokenizer: str
    size_classes: Mapping[tuple[int, int], str]
    check: Callable[[HParams], None]
    notes: str
    layouts: Mapping[str, Callable[[Mapping[str, CheckpointTensor]], Mapping[str, CheckpointTensor]]] = field(
        default_factory=dict
    )  # by the name of a Hugging Face class that stores its tensors otherwise than the table says
    # What a file's tensors say that its keys do not: the sizes, and the rows to keep of tensors that have more.
    fold: Callable[[HParams, GGUFFile], tuple[HParams, Mapping[str, np.ndarray]]] | None = None
    expand: Callable[[HParams], tuple[Mapping[str, np.ndarray], Mapping[str, int]]] | None = None
    config: Callable[[HParams], Config] | None = None  # the keys that HPARAMS' functions read, from what they gave
    usual: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None  # what follows from a new model's other sizes
    stretch: Callable[[HParams, int], HParams] | None = None  # the sizes for a context longer than the trained one
    tied_by_default: bool = True  # what a config says that does not mention it

    def slots(self, hp: HParams) -> list[Slot]:
        """Every tensor of the model, in file order: the embeddings, block after block, the head."""
        made: list[Slot] = []
        blocks = [row for row in self.tensors if "{i}" in row.name]
        before = self.tensors[: self.tensors.index(blocks[0])]
        after = self.tensors[self.tensors.index(blocks[-1]) + 1 :]
        for row in before:
            made += _slots_of_row(row, hp, None)
        for layer in range(hp.num_layers):
            for row in blocks:
                made += _slots_of_row(row, hp, layer)
        for row in after:
            made += _slots_of_row(row, hp, None)
        return made

    def size_class(self, hp: HParams) -> str | None:
        """The name by which the released model of this depth and width goes ("1B"), when there is one."""
        return self.size_classes.get((hp.num_layers, hp.hidden_size))


def _slots_of_row(row: Tensor, hp: HParams, layer: int | None) -> list[Slot]:
    if row.when and not hp[row.when]:
        return []
    shape = tuple(_evaluate(axis, hp) for axis in row.shape.split())
    hf_rows, gguf_rows = (order(hp) if order else None for order in (row.hf_rows, row.gguf_rows))
    name, gguf, hf = (text.format(i=layer) for text in (row.name, row.gguf, row.hf))
    weight = Slot(
        f"{name}.weight",
        f"{gguf}.weight",
        f"{hf}.weight",
        shape,
        row.always_f32 or len(shape) == 1,
        hf_rows,
        gguf_rows,
        tied_to=f"{row.tied_to}.weight" if row.tied_to else None,
        made=partial(row.made, hp) if row.made else None,
        positive=row.positive,
    )
    if not (hp[row.bias] if isinstance(row.bias, str) else row.bias):
        return [weight]
    return [weight, Slot(f"{name}.bias", f"{gguf}.bias", f"{hf}.bias", shape[:1], True, hf_rows, gguf_rows)]


def _evaluate(expression: str, hp: HParams) -> int:
    """The value of a sum of products of hyperparameter names and integers: `hidden_size+2*kv_size`."""
    total = 0
    for term in expression.split("+"):
        product = 1
        for factor in term.split("*"):
            product *= int(factor) if factor.isdigit() else hp[factor]
        total += product
    return total


def all_families() -> dict[str, Family]:
    """Every family in `families/`, by name. Adding a file there is all it takes to be listed."""
    package = importlib.import_module("starscope.families")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = {name: importlib.import_module(f"starscope.families.{name}") for name in names}
    for name, module in modules.items():
        if not isinstance(getattr(module, "FAMILY", None), Family):
            raise StarscopeError(f"families/{name}.py defines no FAMILY = Family(...); every file there must.")
    return {name: module.FAMILY for name, module in modules.items()}


def find_family_for_config(config: Config) -> Family:
    """The family of a Hugging Face config. UnsupportedError names what was found and what is supported.

    CheckpointError when the two keys that name it are of another type or contradict each other.
    """
    found = config.get("architectures")
    if found is not None and not (isinstance(found, list) and all(isinstance(name, str) for name in found)):
        raise CheckpointError(f"config.json: architectures is {short(found)}; expected a list of class names.")
    model_type = typed(config, "model_type", str, "config.json")
    for family in all_families().values():
        named = next((name for name in found or () if name in family.hf_architectures), None)
        if named and model_type is not None and model_type not in family.hf_model_types:
            expected = " or ".join(family.hf_model_types)
            raise CheckpointError(
                f"config.json: model_type is {short(model_type)}; expected {expected} for the architecture {named}."
            )
        # A class of another layout has to be named: its model type is others' too (gpt2).
        pairs = zip(family.hf_architectures, family.hf_model_types, strict=True)
        if named or (not found and model_type in [type_ for name, type_ in pairs if name not in family.layouts]):
            return family
    known = ", ".join(name for family in all_families().values() for name in family.hf_architectures)
    what = cut(", ".join(found)) if found else f"no architecture (model_type {short(model_type)})"
    raise UnsupportedError(f"config.json says {what}; supported: {known}.")


def find_family_for_gguf(architecture: str) -> Family:
    """The family of a GGUF file's `general.architecture`."""
    for family in all_families().values():
        if family.gguf_architecture == architecture:
            return family
    known = ", ".join(family.gguf_architecture for family in all_families().values())
    raise UnsupportedError(f"general.architecture is {short(architecture)}; supported: {known}.")


def find_family_of_file(file: GGUFFile) -> Family:
    """The family of a model's GGUF file; GGUFError when it names no architecture, UnsupportedError for one that is not
    here, and for an adapter.
    """
    if file.get("general.type") == "adapter":
        raise UnsupportedError(
            f"{file.path} is an adapter; expected a model.", hint="Give its model, and this file with --lora."
        )
    value = file.metadata.get(ARCHITECTURE_KEY)
    if value is None:
        raise GGUFError(f"{file.path} has no {ARCHITECTURE_KEY}; expected the name of one.")
    if not isinstance(value.data, str):
        raise GGUFError(f"{file.path}: {ARCHITECTURE_KEY} is {short(value)}; expected a text.")
    return find_family_for_gguf(value.data)


def find_family(name: str) -> Family:
    """The family of that name."""
    families = all_families()
    if name not in families:
        raise UnsupportedError(f"no family is called {short(name)}; there are: {', '.join(families)}.")
    return families[name]


def make_hparams(family: Family, values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> HParams:
    """Hyperparameters from the values of the HPARAMS table: derived ones added, ranges checked.

    `names` gives the keys that the values were read from, for messages.
    """
    hp = HParams(values)
    for name, most in LARGEST.items():
        if name in hp and not 0 < hp[name] <= most:
            key = (names or {}).get(name, name)
            what = "" if key == name else f" for {name}"
            raise CheckpointError(f"{key} is {short(hp[name])}; expected 1 to {most}{what}.")
    if ("head_dim" not in hp and hp.hidden_size % hp.num_heads) or hp.num_heads % hp.num_kv_heads:
        raise CheckpointError(
            f"hidden_size {hp.hidden_size}, num_heads {hp.num_heads}, num_kv_heads {hp.num_kv_heads}: "
            "expected the heads to divide the hidden size and the key heads to divide the heads."
        )
    if "norm_epsilon" in hp and not 0 < np.float32(hp.norm_epsilon) < 1:
        key = (names or {}).get("norm_epsilon", "norm_epsilon")
        raise CheckpointError(f"{key} is {hp.norm_epsilon}; expected a number between 0 and 1.")
    family.check(hp)
    for name, derive in family.derived.items():
        hp = hp.replace(**{name: derive(hp)})
    return hp


def read_config(
    family: Family, config: Config, *, vocab_size: int | None = None, allow_unknown: Sequence[str] = ()
) -> HParams:
    """Hyperparameters of a Hugging Face config.

    Every key is read, refused or ignored for a reason that the family states; any other key is an error, unless
    `allow_unknown` names it. `vocab_size` is used when the config has none.
    """
    read = {key for row in family.hparams for key in ((row.hf,) if isinstance(row.hf, str) else row.reads)}
    known = (read, BOOKKEEPING, family.ignored, family.refused, allow_unknown)
    unknown = [key for key in config if not any(key in keys for keys in known)]
    if unknown:
        listed = ", ".join(f"{cut(key)} = {short(config[key])}" for key in unknown[:MOST_LISTED])
        more = f" and {len(unknown) - MOST_LISTED} more" if len(unknown) > MOST_LISTED else ""
        raise UnsupportedError(
            f"config.json has keys that {family.name} does not know: {listed}{more}.",
            hint="If you are sure that they change nothing, allow each by name (--allow-key KEY).",
        )
    for key, (refused, reason) in family.refused.items():
        value = config.get(key)
        if isinstance(refused, bool):
            is_refused = key in config and bool(typed(config, key, bool, "config.json")) == refused
        else:
            is_refused = key in config and refused(value)
        if is_refused:
            raise UnsupportedError(f"config.json has {key} = {short(value)}: {reason}.")
    config = {**config} if vocab_size is None or "vocab_size" in config else {**config, "vocab_size": vocab_size}
    values: dict[str, Any] = {}
    names = {row.name: row.hf for row in family.hparams if isinstance(row.hf, str)}
    for row in family.hparams:
        try:
            value = config.get(row.hf) if isinstance(row.hf, str) else row.hf(config)
        except KeyError as missing:
            raise CheckpointError(
                f"config.json has no {missing.args[0]!r}; {family.name} needs it for {row.name}."
            ) from None
        where = f"config.json: {names.get(row.name, row.name)}"
        values[row.name] = _checked(row, value, values, where, CheckpointError)
    try:
        return make_hparams(family, values, names)
    except CheckpointError as error:
        raise CheckpointError(f"config.json: {error.message}", hint=error.hint) from None


def write_config(family: Family, hp: HParams) -> dict[str, Any]:
    """The Hugging Face config that `read_config` reads as `hp`. UnsupportedError for a family that writes none."""
    if family.config is None:
        raise UnsupportedError(f"{family.name} has no config.json of its own to write.")
    config: dict[str, Any] = {"architectures": [family.hf_architectures[0]], "model_type": family.hf_model_types[0]}
    for row in family.hparams:
        if isinstance(row.hf, str):
            spellings = [key for key, value in (row.choices or {}).items() if value == hp[row.name]]
            config[row.hf] = spellings[0] if spellings else hp[row.name]
    config |= family.config(hp)
    if read_config(family, config) != hp:
        raise UnsupportedError(f"config.json cannot express {family.name} with {hp}.")
    return config


def hparams_from_metadata(family: Family, file: GGUFFile) -> HParams:
    """Hyperparameters of a GGUF file. The vocabulary's size is the number of rows of the token embedding.

    GGUFError for what is missing, of another type or out of range, and for keys that contradict the rest;
    UnsupportedError for quant blocks of another version than ours.
    """
    quantized = any(KNOWN_TYPES[info.type_id].block_size > 1 for info in file.tensors.values())
    if quantized and (problem := gguf_format.blocks_problem(file.metadata.get(gguf_format.BLOCKS_KEY))):
        raise UnsupportedError(f"{file.path}: {problem}.", hint="Convert the original model again.")
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for row in family.hparams:
        if row.name == "vocab_size":
            values["vocab_size"] = _vocab_size(family, file)
            continue
        if row.tensor is not None:
            values[row.name] = row.tensor in file.tensors
            continue
        keys = [f"{family.gguf_architecture}.{key}" for key in (*row.also, row.gguf) if key]
        names[row.name] = next((key for key in keys if key in file.metadata), keys[-1])
        value = file.get(names[row.name])
        values[row.name] = _checked(row, value, values, f"{file.path}: {names[row.name]}", GGUFError)
    try:
        hp = make_hparams(family, values, names)
    except CheckpointError as error:
        raise GGUFError(f"{file.path}: {error.message}") from None
    for key, name in REDUNDANT_KEYS.items():
        value = file.metadata.get(f"{family.gguf_architecture}.{key}")
        if value is not None and (not is_of(value.data, int) or value.data != hp[name]):
            what = f"{family.gguf_architecture}.{key} is {short(value.data)}"
            raise GGUFError(f"{file.path}: {what}; expected {hp[name]}, which is what the rest of the file says.")
    for key, neutral in NEUTRAL.items():
        value = file.metadata.get(f"{family.gguf_architecture}.{key}")
        if value is not None and not (isinstance(value.data, (bool, int, float)) and value.data in neutral):
            what = f"{family.gguf_architecture}.{key} is {short(value.data)}"
            raise UnsupportedError(f"{file.path}: {what}, which {family.name} does not compute here.")
    return hp


def _vocab_size(family: Family, file: GGUFFile) -> int:
    embedding = next(row for row in family.tensors if row.name == "embed_tokens")
    info = file.tensors.get(f"{embedding.gguf}.weight")
    if info is not None:
        return info.shape[0]
    tokens = file.metadata.get(TOKENS_KEY)
    if tokens is None:
        raise GGUFError(
            f"{file.path} has neither {embedding.gguf}.weight nor {TOKENS_KEY}; "
            "one is needed for the vocabulary's size."
        )
    if tokens.element_type is None:
        raise GGUFError(f"{file.path}: {TOKENS_KEY} is {short(tokens)}; expected an array of texts.")
    return tokens.count


def metadata_from_hparams(family: Family, hp: HParams) -> dict[str, gguf_format.Value]:
    """The architecture's own GGUF keys, in the order of the table."""
    make: dict[type, Callable[[Any], gguf_format.Value]] = {
        int: gguf_format.u32,
        float: gguf_format.f32,
        str: gguf_format.string,
        bool: gguf_format.boolean,
    }
    written = (row for row in family.hparams if row.gguf and not (row.optional and hp[row.name] == row.default_of(hp)))
    return {f"{family.gguf_architecture}.{row.gguf}": make[row.kind](hp[row.name]) for row in written}


def _checked(
    row: HParam, value: Any, before: Mapping[str, Any], where: str, error: type[CheckpointError] | type[GGUFError]
) -> Scalar:
    if value is None:
        value = row.default_of(before)
        if value is None:
            raise error(f"{where} is missing; expected a value for {row.name}.")
    if not is_of(value, row.kind):
        raise error(f"{where} is {short(value)}; expected {WORDS[row.kind]} for {row.name}.")
    if row.choices is not None:
        if value not in row.choices:
            raise UnsupportedError(f"{where} is {short(value)}; supported: {', '.join(row.choices)}.")
        return row.choices[value]
    if row.kind is float and not abs(value) <= sys.float_info.max:  # NaN too, and whole numbers that no float holds
        raise error(f"{where} is {short(value)}; expected a finite number for {row.name}.")
    result: Scalar = row.kind(value)
    return result
