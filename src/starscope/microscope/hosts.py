"""The parts of a model as objects: `model.layers[3].self_attn`, with the values that each has as attributes.

Parts exist once for each model, under all their names: `model.layers[0].self_attn is model.transformer.h[0].attn`.
A value is read and assigned inside a trace; weights are there always, decoded when first asked for.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from starscope.errors import TraceError
from starscope.values import ATTENTION, BLOCK, MLP, VALUES

if TYPE_CHECKING:
    from starscope.microscope.scope import Scope


class LayerIndexError(TraceError, IndexError):
    """A block that the model does not have."""


def layer_index(given: Any, count: int) -> int:
    """The number of a block, from 0; negative ones are given from the end. LayerIndexError for what is none."""
    try:
        index = operator.index(given)
    except TypeError:
        raise LayerIndexError(
            f"layer {given!r} is not a layer number; this model has layers 0 to {count - 1}."
        ) from None
    if not -count <= index < count:
        raise LayerIndexError(f"layer {index} is out of range; this model has layers 0 to {count - 1}.")
    return index % count


def read_only(size: str) -> str:
    """What is said to somebody who assigns a size."""
    return f"{size} is read off the model's file; another size is another model."


class ValueProperty:
    """A standard value as an attribute of the part that has it."""

    def __init__(self, name: str, meaning: str = "") -> None:
        self.name = name
        self.__doc__ = meaning or VALUES[name].meaning

    def __get__(self, part: Part | None, owner: type | None = None) -> Any:
        if part is None:
            return self
        path = part.paths.get(self.name) or self._path(part)
        return part.scope.get(path)

    def __set__(self, part: Part, value: Any) -> None:
        part.scope.set(self._path(part), value)

    def _path(self, part: Part) -> str:
        path = part.paths[self.name] = f"{part.path}.{self.name}" if part.path else self.name
        return path


class PairProperty(ValueProperty):
    """What the attention module gives in the checkpoint's own code."""

    def __get__(self, part: Part | None, owner: type | None = None) -> Any:
        return self if part is None else AttentionOutput(part)

    def __set__(self, part: Part, value: Any) -> None:
        where = part.scope.shown(part.path)
        raise AttributeError(f"{where}.output is a pair; assign attention_output or attention_probabilities instead.")


class Part:
    """A module of the model."""

    scope: Scope
    path: str
    paths: dict[str, str]  # of the values that were asked for

    def __init__(self, scope: Scope, path: str) -> None:
        vars(self).update(scope=scope, path=path, paths={})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self.scope.find_child(self.path, name)
        if found is not None:
            return found
        path = self.scope.find_value(self.path, name)
        if path is not None:
            return self.scope.get(path)
        raise AttributeError(self._unknown(name))

    def __setattr__(self, name: str, value: Any) -> None:
        known = getattr(type(self), name, None)
        if isinstance(known, ValueProperty):
            object.__setattr__(self, name, value)
            return
        path = self.scope.find_value(self.path, name)
        if path is None:
            raise AttributeError(read_only(name) if isinstance(known, property) else self._unknown(name))
        self.scope.set(path, value)

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, dir(self), 1)
        where = self.scope.shown(self.path)
        return f"{where} has no {name!r}." + (f" Did you mean {near[0]!r}?" if near else "")

    def __dir__(self) -> list[str]:
        values = [name for name, one in vars(type(self)).items() if isinstance(one, (ValueProperty, property))]
        return sorted({*values, *self.scope.children(self.path)})

    def __repr__(self) -> str:
        return self.scope.print_part(self.path)

    input: Any = ValueProperty("input", "What the module is called with: `[batch seq ...]`.")
    output: Any = ValueProperty("output", "What the module gives: `[batch seq ...]`.")

    def support(self) -> dict[str, Any]:
        """The values of this part and of those in it: None where they can be read, else the reason. Nothing runs."""
        return self.scope.support_of(self.path)


class Module(Part):
    """A module that is one operation: a linear layer, a norm, an embedding, an activation."""

    @property
    def weight(self) -> Any:
        """Float32, `[out in]` for a linear layer; a copy of the stored one, decoded when it is quantized."""
        return self.scope.weight(self.path, "weight")

    @property
    def bias(self) -> Any:
        """Float32 `[out]`; None where there is none."""
        return self.scope.weight(self.path, "bias")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            raise AttributeError(
                f"{self.scope.shown(self.path)}.{name} is read-only; assign the module's output in a trace instead."
            )
        super().__setattr__(name, value)


class Block(Part):
    """A block. Its values are on it; those of its parts on `self_attn` and `mlp`."""


class Attention(Part):
    """The attention of a block."""

    @property
    def num_heads(self) -> int:
        return int(self.scope.hp.num_heads)

    @property
    def num_kv_heads(self) -> int:
        return int(self.scope.hp.num_kv_heads)

    @property
    def head_dim(self) -> int:
        return int(self.scope.hp.head_dim)

    @property
    def qk_head_dim(self) -> int:
        return int(self.scope.hp.qk_head_dim)

    output: Any = PairProperty("output", "(attention_output, attention_probabilities); each is read when asked for.")


class FeedForward(Part):
    """The feed-forward part of a block."""

    @property
    def intermediate_size(self) -> int:
        return int(self.scope.hp.intermediate_size)


class AttentionOutput(Sequence[Any]):
    """What the attention module of a checkpoint gives: its output, and its pattern."""

    def __init__(self, attention: Part) -> None:
        self._attention = attention

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        names = ("attention_output", "attention_probabilities")
        if isinstance(index, slice):
            read = {name: getattr(self._attention, name) for name in sorted(names[index], reverse=True)}
            return tuple(read[name] for name in names[index])
        return getattr(self._attention, names[index])

    def __iter__(self) -> Iterator[Any]:
        """The pattern is read first, since it comes first: `output, pattern = self_attn.output`."""
        return iter(self[:])


class Layers(Sequence[Block]):
    """The blocks, in order."""

    def __init__(self, scope: Scope, path: str = "layers") -> None:
        self._scope, self.path = scope, path
        self._count = int(scope.hp.num_layers)
        self._blocks: list[Block] = []

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Block: ...

    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...

    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        block = self._scope.part(f"layers.{layer_index(index, len(self))}")
        assert isinstance(block, Block)
        return block

    def __iter__(self) -> Iterator[Block]:
        if not self._blocks:
            self._blocks = [self[i] for i in range(self._count)]
        return iter(self._blocks)

    def __repr__(self) -> str:
        return self._scope.print_part(self.path)

    def support(self) -> dict[str, Any]:
        """The values of the blocks, as `model.support()` has them."""
        return self._scope.support_of(self.path)


class Prefix:
    """A path of the checkpoint's or of GGUF's that is no part itself: `model.transformer`, `model.blk`."""

    def __init__(self, scope: Scope, path: str) -> None:
        self._scope, self._path = scope, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self._scope.find(f"{self._path}.{name}")
        if found is None:
            raise AttributeError(f"{self._path} has no {name!r}.")
        return found

    def __getitem__(self, index: int) -> Any:
        return getattr(self, str(layer_index(index, int(self._scope.hp.num_layers))))

    def __repr__(self) -> str:
        return f"<{self._path}>"


HOSTS = {BLOCK: Block, ATTENTION: Attention, MLP: FeedForward}


def host_class(pattern: str, kind: str, names: set[str]) -> type[Part]:
    """The class of a part, called as the checkpoint calls it, with those of its values that the model has."""
    base = HOSTS.get(pattern, Part)
    values = {one.name: ValueProperty(one.name) for one in VALUES.values() if one.host == pattern and one.name in names}
    return type(kind, (base,), {"__doc__": base.__doc__, **values})
