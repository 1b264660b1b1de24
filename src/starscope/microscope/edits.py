"""Edits: changes of a model's values as data, which the engine makes while it runs.

    Edit("layer_output", "add", layers=6, tensor=direction, factor=4.0)              # steering, at every position
    Edit("attention_head_outputs", "zero", layers=3, heads=[0, 5])                   # two heads switched off
    Edit("attention_scores", "mask", layers=range(8), positions="new", keys="0:4")   # new tokens do not look there
    with model.editing([...]): model.generate("def add(a, b):")

An edit changes its value right behind the operation that makes it. Positions are those of the text, whatever chunks,
batches and caches a run consists of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from starscope.errors import InvalidContentError, UsageError
from starscope.microscope.selections import Kept, Selection, count_of, read_selection, shown
from starscope.microscope.tensors import as_array

Tensor = npt.NDArray[np.float32]

OPS: Mapping[str, str] = {
    "add": "x + factor · tensor",
    "scale": "factor · x",
    "set": "tensor",
    "zero": "0",
    "replace": "the tensor's rows, one for each of the positions",
    "mask": "the lowest float32: only attention_scores, at `keys`",
}
WITH_TENSOR = ("add", "set", "replace")
WITH_FACTOR = ("add", "scale")
SELECTIONS = ("layers", "heads", "positions", "keys", "steps", "rows")


@dataclass(frozen=True, eq=False, repr=False)
class Edit:
    """One change of one value.

    `value` is any name of a value: a standard one of every layer (`layer_output`) with `layers` (None: all of them), or
    a full one (`layers.3.layer_output`, `blocks.3.hook_resid_post`, `blk.3.attn_qkv.output`) without. `{i}` in a name
    stands for the layer. `op` is what is done, of `OPS`:

    add, set: `tensor` broadcasts, as NumPy does, against `[width]`, for a value with heads `[heads head_dim]`, for
    scores and probabilities `[heads keys]` (1 key when `keys` is None). replace: the same behind an axis of positions,
    one row each. Heads, positions and keys of a tensor are those selected, in their order.

    Where: `heads` (of keys and values: key heads), `positions`, `keys` (of scores and probabilities), all of the text,
    from 0; negative ones count from the prompt's end, a span without a stop ends there, and "new" are those of
    generated tokens. `steps`: 0 is the prompt, k the step in which the k-th generated token is fed. `rows` of a batch.

    Raises UsageError for what cannot be meant; what depends on the model is refused when the edit meets one.
    """

    value: str
    op: str
    tensor: Any = None
    factor: float = 1.0
    _: KW_ONLY
    layers: Selection = None
    heads: Selection = None
    positions: Selection = None
    keys: Selection = None
    steps: Selection = None
    rows: Selection = None

    def __post_init__(self) -> None:
        if not isinstance(self.value, str) or not self.value:
            raise UsageError(f"an edit's value is {self.value!r}; expected the name of a value.")
        if not isinstance(self.op, str) or self.op not in OPS:
            raise UsageError(f"an edit's op is {self.op!r}; expected one of {', '.join(OPS)}.")
        for name in SELECTIONS:
            kept = read_selection(
                getattr(self, name),
                name,
                negative=name not in ("steps", "rows"),
                new=name in ("positions", "keys"),
            )
            object.__setattr__(self, name, kept)
        self._check_factor()
        if (self.tensor is not None) != (self.op in WITH_TENSOR):
            raise UsageError(
                f"{self.op} {'needs a' if self.tensor is None else 'takes no'} tensor; "
                f"the ops with one are {', '.join(WITH_TENSOR)}."
            )
        if self.tensor is not None:
            object.__setattr__(self, "tensor", _as_tensor(self.tensor))
        if self.op == "mask" and self.keys is None:
            raise UsageError("mask needs keys: the positions to hide.")
        if self.op == "replace":
            self._check_rows()

    def _check_factor(self) -> None:
        if isinstance(self.factor, bool) or not isinstance(self.factor, (int, float, np.number)):
            raise UsageError(f"an edit's factor is {self.factor!r}; expected a number.")
        if not abs(self.factor) <= float(np.finfo(np.float32).max):
            raise UsageError("an edit's factor is not a finite float32 number.")
        factor = float(np.float32(self.factor))
        if factor != 1 and self.op not in WITH_FACTOR:
            raise UsageError(f"{self.op} takes no factor; only {' and '.join(WITH_FACTOR)} do.")
        object.__setattr__(self, "factor", factor)

    def _check_rows(self) -> None:
        count = count_of(self.selection("positions"))
        if count is None:
            raise UsageError(
                "replace needs a known number of positions: one, a list, or a span whose ends count from the same side."
            )
        if self.tensor.ndim == 0 or len(self.tensor) != count:
            raise UsageError(
                f"replace was given a tensor {list(self.tensor.shape)} for {count} positions; expected a row for each."
            )

    def selection(self, name: str) -> Kept:
        """One of `SELECTIONS`, as it is kept."""
        kept: Kept = getattr(self, name)
        return kept

    def __repr__(self) -> str:
        said = {name: shown(self.selection(name)) for name in SELECTIONS if self.selection(name) is not None}
        said |= {"factor": self.factor} if self.factor != 1 else {}
        said |= {} if self.tensor is None else {"tensor": f"float32 {list(self.tensor.shape)}"}
        return f"Edit({', '.join([repr(self.value), repr(self.op), *(f'{key}={one!r}' for key, one in said.items())])})"

    def _identity(self) -> tuple[Any, ...]:
        tensor = None if self.tensor is None else (self.tensor.shape, self.tensor.tobytes())
        return (self.value, self.op, tensor, self.factor, *(getattr(self, name) for name in SELECTIONS))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edit) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def to_json(self) -> dict[str, Any]:
        """As JSON data, without what is at its default."""
        data: dict[str, Any] = {"value": self.value, "op": self.op}
        for name in SELECTIONS:
            if getattr(self, name) is not None:
                data[name] = shown(getattr(self, name))
        if self.factor != 1:
            data["factor"] = self.factor
        if self.tensor is not None:
            data["tensor"] = self.tensor.tolist()
        return data

    @classmethod
    def from_json(cls, data: Any) -> Edit:
        """The edit that JSON data describe; InvalidContentError for anything that an edit does not have."""
        if not isinstance(data, dict):
            raise InvalidContentError(f"an edit is a JSON {type(data).__name__}; expected an object.")
        known = [field.name for field in fields(cls)]
        unknown = next((key for key in data if key not in known), None)
        if unknown is not None:
            raise InvalidContentError(f"an edit has {unknown!r}; expected {', '.join(known)}.")
        for key in ("value", "op"):
            if key not in data:
                raise InvalidContentError(f"an edit has no {key}; expected one.")
        if "tensor" in data and data["tensor"] is None:
            raise InvalidContentError("an edit's tensor is null; expected numbers, or no tensor at all.")
        try:
            return cls(**data)
        except UsageError as error:
            raise InvalidContentError(error.message, hint=error.hint) from None


def _as_tensor(given: Any) -> Tensor:
    """A copy in float32 that nobody can change."""
    if isinstance(given, (str, bytes, dict)):
        raise UsageError(f"an edit's tensor is {type(given).__name__}; expected numbers.")
    try:
        array = as_array(given)
    except (TypeError, ValueError):
        raise UsageError("an edit's tensor has rows of several lengths; expected one shape.") from None
    if array.dtype.kind not in "fiu" or array.size == 0:
        raise UsageError(f"an edit's tensor is {array.dtype} {list(array.shape)}; expected numbers.")
    with np.errstate(over="ignore"):
        tensor: Tensor = np.array(array, np.float32)
    if not np.isfinite(tensor).all():
        raise UsageError("an edit's tensor has numbers that are not finite in float32; expected finite ones.")
    tensor.setflags(write=False)
    return tensor
