"""A step of the split engine that can stop between operations: a pass at each place, and what moves between them.

A value is handed on when the first operation that reads it elsewhere is about to run, so what is written to it by then
is what moves. Values are NumPy arrays on the host, whatever device they were made on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starscope.engine.base import Array, Batch
from starscope.engine.passes import Pass, read_rows
from starscope.engine.split.steps import as_array

if TYPE_CHECKING:
    from starscope.engine.split.engine import SplitEngine


class SplitPass:
    """A step at several places. Implements `Pass`."""

    is_torch = False

    def __init__(self, engine: SplitEngine, batch: Batch) -> None:
        self.graph, self.batch = engine.graph, batch
        self._places = engine.places
        self._passes: dict[str, Pass] = {
            place: begin_part(part, engine.part_of(batch, place)) for place, part in engine.parts.items()
        }
        self.done = next(iter(self._passes.values())).done
        self._there: set[tuple[str, int]] = set()  # (place, edge) of what was handed on

    def run(self, stop: int) -> None:
        while self.done < stop:
            place, end = self._places[self.done], self.done + 1
            while end < stop and self._places[end] == place:
                end += 1
            one = self._passes[place]
            if one.done < self.done:
                one.skip(self.done, {})
            for edge in {edge for op in self.graph.ops[self.done : end] for edge in op.inputs}:
                home = self._home(edge)
                if home not in (None, place) and (place, edge) not in self._there:
                    assert home is not None
                    one.write(edge, self._read(self._passes[home], edge, one))
                    self._there.add((place, edge))
            one.run(end)
            self.done = end

    def _home(self, edge: int) -> str | None:
        """Where a value is made; None for the graph's inputs, which are everywhere."""
        producer = self.graph.producers[edge]
        return None if producer is None else self._places[producer]

    def _read(self, one: Pass, edge: int, reader: Pass) -> Any:
        value = one.read(edge)
        return value if one.is_torch and reader.is_torch else as_array(value)

    def read(self, edge: int) -> Any:
        return as_array(self._at_home(edge).read(edge))

    def read_rows(self, edge: int, rows: Sequence[Array]) -> list[Any]:
        """See `RowReader`."""
        return [as_array(one) for one in read_rows(self._at_home(edge), edge, rows)]

    def _at_home(self, edge: int) -> Pass:
        home = self._home(edge)
        return self._passes[self._places[0] if home is None else home]

    def write(self, edge: int, value: Any) -> None:
        if self._home(edge) is None:
            for one in self._passes.values():
                one.write(edge, value)
        else:
            self._at_home(edge).write(edge, value)

    def keep(self, edges: Collection[int]) -> None:
        for edge in edges:
            self._at_home(edge).keep([edge])

    def skip(self, stop: int, values: Mapping[int, Any]) -> None:
        for edge, value in values.items():
            one = self._at_home(edge)
            one.skip(max(stop, one.done), {edge: value})
        self.done = stop

    def finish(self) -> Any:
        logits = self.read(self.graph.names["logits"])
        self.batch.advance()
        return logits


def begin_part(engine: Any, batch: Batch) -> Pass:
    """A pass of one place's engine over a batch that is laid out already."""
    from starscope.engine.base import input_values
    from starscope.engine.native_engine import NativeEngine
    from starscope.engine.native_pass import NativePass
    from starscope.engine.numpy_engine import NumpyEngine, NumpyPass

    if isinstance(engine, NativeEngine):
        return NativePass(engine, batch, *input_values(engine.graph, batch))
    if isinstance(engine, NumpyEngine):
        return NumpyPass(engine, batch)
    from starscope.engine.torch_pass import TorchPass

    return TorchPass(engine, batch, grad=False)
