"""One forward pass under the eyes of a trace: it runs as far as somebody looks, and sees what they change.

Asking for a value runs the graph up to its producer and gives a copy. The copy is live until the first operation that
uses the value: what was changed in it by then is what the operation gets. Afterwards it belongs to whoever asked, and a
change is an error, since it would do nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from starscope.engine.passes import Pass
from starscope.errors import DoesNotFitError, OutOfOrder, Unavailable, ValueShapeError
from starscope.machine import bytes_text, free_memory
from starscope.microscope.edges import EdgeFacts, Edges
from starscope.microscope.present import Presentation
from starscope.microscope.tensors import Watch, as_array, as_value, torch_value


@dataclass(eq=False, slots=True)
class Served:
    """A value that was handed out."""

    edge: int
    facts: EdgeFacts
    value: Any  # a torch tensor or a NumPy array, as shown
    watch: Watch
    used: bool = False  # its first consumer has run
    is_assigned: bool = False
    views: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def is_changed(self) -> bool:
        return self.is_assigned or self.watch.has_changed() or self.watch.is_elsewhere(self.value)


ITEM = 4  # bytes of a float32
LARGE = 1 << 26  # bytes: a value is not kept for the body any more, once the body has let go of it


def _is_forgotten(served: Served) -> bool:
    """Whether a large value is here alone: whoever asked for it has let go of it."""
    value = served.value
    # Three: here, in `served`, and the call's own.
    return sys.getrefcount(value) <= 3 and not served.views and bool(value.nbytes > LARGE)


class Forward:
    """One step of an engine, read and changed by edges of its graph.

    `begin()` gives a pass that has not run, the same each time. `project(rows)` gives the logits of rows
    `[n hidden_size]` of what the output matrix reads. `grad`: values are nodes of an autograd graph. `holes` are blocks
    that have no keys and values of earlier steps.

    `expected` are the edges that will be read, as it seems, and none of them changed: the pass then runs to its end at
    once and keeps them, which saves stopping at each. Should it be otherwise, it begins again and stops where it must.
    """

    _watch: Callable[[Any], Watch] = staticmethod(Watch)

    def __init__(
        self,
        begin: Callable[[], Pass],
        edges: Edges,
        project: Callable[[Any], Any],
        *,
        grad: bool,
        holes: Collection[int],
        expected: Collection[int] = (),
    ) -> None:
        self.edges, self.grad = edges, grad
        self._begin, self._pass = begin, begin()
        batch = self._pass.batch
        self.view = Presentation(batch.lengths, batch.pasts)
        self.skipped: set[int] = set()
        self.ended, self.was_changed = False, False
        self._project, self._holes = project, holes
        self._done = self._pass.done  # as far as whoever reads can tell
        self._ahead = frozenset(expected)
        if self._ahead:
            self._pass.keep(self._ahead)
            self._pass.run(edges.end)
        self._served: dict[int, Served] = {}
        self._was_read: set[int] = set()
        hp, shown = edges.graph.hp, self.view
        widest = max(hp.vocab_size, 4 * hp.hidden_size + hp.intermediate_size, hp.num_heads * shown.key)
        self._has_large = 2 * ITEM * shown.batch * max(shown.seq, 1) * widest > LARGE
        self._live: list[Served] = []
        self._used: list[Served] = []
        self._kept: set[int] = set()
        self._given: set[int] = set()  # outputs of blocks that were skipped
        self._head_rows: Any = None  # what the output matrix reads, shown, of all rows
        self._last: Any = None  # logits of the last rows, at the end

    @property
    def caches(self) -> Sequence[Any]:
        return self._pass.batch.caches

    @property
    def was_read(self) -> frozenset[int]:
        """The edges that were asked for, but the logits."""
        return frozenset(self._was_read) - {self.edges.logits}

    # Reading and writing.

    def reason(self, edge: int) -> str | None:
        """Why this pass does not have a value at all, whenever it is asked for; None where it has."""
        layer = self.edges.facts[edge].layer
        return f"block {layer} was skipped" if layer in self.skipped and edge not in self._given else None

    def get(self, edge: int) -> Any:
        """A value as it is shown; the same tensor for as long as this pass goes on."""
        served = self._served.get(edge)
        return (served or self._serve(edge)).value

    def get_shaped(self, edge: int, rest: tuple[int, ...]) -> Any:
        """A value as `[batch seq *rest]`: a view of the same numbers, whose changes are the value's."""
        served = self._served.get(edge) or self._serve(edge)
        shape = (self.view.batch, self.view.seq, *rest)
        if shape not in served.views:
            is_same = shape == tuple(served.value.shape)
            with self._recording():
                served.views[shape] = served.value if is_same else served.value.reshape(shape)
        return served.views[shape]

    def set(self, edge: int, value: Any) -> None:
        """Replace a value; what was given is copied. ValueShapeError for another shape, OutOfOrder when it is late."""
        served, facts = self._served.get(edge), self.edges.facts[edge]
        if served is not None and any(value is one for one in (served.value, *served.views.values())):
            self._check_late()  # it was changed in place
            return
        if served is None:
            self._check_readable(edge)
        if facts.first_use < self._done or (served is not None and served.used):
            raise OutOfOrder(
                f"{facts.name} was assigned after what uses it had run.",
                hint="Assign it before reading values that come after it.",
            )
        shape = self._shape(edge) if served is None else tuple(served.value.shape)
        fresh = self._copy_of(value, facts.name, shape)
        if served is None and edge == self.edges.logits:
            self._serve(edge)  # the other rows are of no use, but what leads to them has to run
        elif served is None:
            self._advance(facts.made)
        if (old := self._served.get(edge)) is not None:
            self._live.remove(old)
        self._hand_out(Served(edge, facts, fresh, self._watch(fresh), is_assigned=True))

    def set_shaped(self, edge: int, rest: tuple[int, ...], value: Any) -> None:
        """Replace a value by one given as `[batch seq *rest]`."""
        shape = (self.view.batch, self.view.seq, *rest)
        served = self._served.get(edge)
        if served is None or value is not served.views.get(shape):
            check_shape(self.edges.facts[edge].name, shape, tuple(np.shape(value)), is_float=True)
            value = value.reshape(self._shape(edge))
        self.set(edge, value)

    def keep(self, edges: Collection[int]) -> None:
        """Have values readable until the pass ends, whatever has run."""
        for edge in edges:
            self._check_readable(edge)
        later = [edge for edge in edges if self.edges.facts[edge].made > self._done]
        if not self._ahead.issuperset(later):
            self._go_back()
        if not self._ahead:
            self._pass.keep(later)
        self._kept.update(later)
        for edge in edges:
            if edge not in later:
                self.get(edge)

    def skip(self, first: int, last: int, value: Any) -> None:
        """Let blocks first to last not run: each one's output is `value`, or else the first one's input."""
        names, facts = self.edges.graph.names, self.edges.facts
        begin, stop = self.edges.blocks[first][0], self.edges.blocks[last][1]
        if self._done > begin:
            raise OutOfOrder(
                f"blocks {first} to {last} were to be skipped after block {first} had begun.",
                hint="Skip them before reading a value inside or behind them.",
            )
        self._advance(begin)
        source = names[f"layers.{first}.layer_input"]
        given = self.get(source) if value is None else value
        given = self._copy_of(given, f"skip_with for block {first}", self._shape(source))
        self._sync(stop)
        self._go_back()
        self.was_changed = True
        rows = self._for_engine(given, facts[source])
        outputs = [names[f"layers.{layer}.layer_output"] for layer in range(first, last + 1)]
        self._pass.skip(stop, dict.fromkeys(outputs, rows))
        self._done = stop
        self.skipped.update(range(first, last + 1))
        self._given.update(outputs)
        for edge in outputs[:-1]:  # the last one's is still to be used
            copy = self._copy_of(given, "", tuple(given.shape))
            self._hand_out(Served(edge, facts[edge], copy, self._watch(copy), used=True))

    def finish(self) -> None:
        """Run what is left. A change that came too late is an error here, if it has not been one before."""
        self._advance(self.edges.gather)
        self._see_head()
        self._advance(self.edges.end)
        self._sync(self.edges.end + 1)
        for served in self._used:
            if served.watch.has_changed():
                self._refuse_late(served)
        self._last = self._pass.finish()
        self.ended = True

    def release(self) -> None:
        """Let go of all but the logits; once finished."""
        self._served = {edge: one for edge, one in self._served.items() if edge == self.edges.logits}
        self._live, self._used = [], []
        del self._pass

    def next_logits(self) -> Any:
        """`[batch vocab_size]` of each prompt's last token, with whatever was changed in them; once finished."""
        served = self._served.get(self.edges.logits)
        return self._last if served is None else served.value[:, -1]

    def all_logits(self) -> Any:
        """`[batch seq vocab_size]`; rows besides the last are computed when they are asked for."""
        served = self._served.get(self.edges.logits)
        if served is not None:
            return served.value
        with self._recording():
            return self._own(self._with_other_rows(self._last))

    # How it goes.

    def _serve(self, edge: int) -> Served:
        facts = self.edges.facts[edge]
        self._check_readable(edge)
        if edge == self.edges.logits:
            self._advance(self.edges.gather)
            self._see_head()
        if edge != self.edges.logits and edge not in self._ahead:
            self._go_back()
        self._advance(facts.made)
        self._check_room(edge)
        with self._recording():
            rows = self._pass.read(edge)
            shown = self._with_other_rows(rows) if edge == self.edges.logits else self.view.show(rows, facts.form)
            if isinstance(shown, np.ndarray) and self._watch is Watch:
                value, watch = Watch.new_value(np.ascontiguousarray(shown))
            else:
                value = self._own(shown)
                watch = self._watch(value)
        served = Served(edge, facts, value, watch, used=facts.first_use < self._done)
        self._hand_out(served)
        return served

    def _check_room(self, edge: int) -> None:
        """DoesNotFitError when a large value, the engine's and the one that is handed out, needs more than is free."""
        if not self._has_large:
            return
        needed = 2 * ITEM * math.prod(self._shape(edge))
        if needed > LARGE and self._watch is Watch and needed > (free := free_memory()):
            raise DoesNotFitError(
                f"{self.edges.facts[edge].name} needs {bytes_text(needed)} of memory; {bytes_text(free)} are free.",
                hint="Let go of what was read before, or take model.run_with_cache(..., rows=...).",
            )

    def _hand_out(self, served: Served) -> None:
        self._was_read.add(served.edge)
        self._served[served.edge] = served
        (self._used if served.used else self._live).append(served)

    def _advance(self, stop: int) -> None:
        """Run operations [0, stop), those that have not; what they read was changed until now goes to them first."""
        if stop <= self._done:
            return
        for layer in self._holes:
            if self._done <= self.edges.blocks[layer][0] < stop:
                raise Unavailable(
                    f"block {layer} was skipped in an earlier step: it has no keys and values of those tokens.",
                    hint="Skip it in every step.",
                )
        self._sync(stop)
        if not self._ahead:
            self._pass.run(stop)
        self._done = stop

    def _go_back(self) -> None:
        """Give up what was run ahead: from here on the pass stops where somebody looks."""
        if self._ahead:
            self._ahead = frozenset()
            self._pass = self._begin()
            self._pass.keep(self._kept)
            self._pass.run(self._done)

    def _sync(self, stop: int) -> None:
        self._check_late()
        live = self._live
        self._live = []
        for served in live:
            if served.facts.first_use >= stop:
                self._live.append(served)
                continue
            # With gradients the tensor that was handed out is the node that consumers use.
            is_changed = served.is_changed()
            self.was_changed |= is_changed
            if is_changed and tuple(served.value.shape) != (shape := self._shape(served.edge)):
                self._live = [one for one in live if not one.used]
                raise ValueShapeError(
                    f"{served.facts.name} is {list(served.value.shape)} now; expected {list(shape)}, the shape it had.",
                    hint="Change only its numbers, or change a clone.",
                )
            if served.edge == self.edges.logits:
                pass  # nothing reads them but whoever chooses a token, who gets what was handed out
            elif self.grad or is_changed:
                self._go_back()
                with self._recording():
                    self._pass.write(served.edge, self._for_engine(self._node_of(served), served.facts))
            if is_changed:
                served.is_assigned = False
                served.watch.follow(served.value)
            served.used = True
            if self._has_large and _is_forgotten(served):
                del self._served[served.edge]
            else:
                self._used.append(served)

    def _for_engine(self, value: Any, facts: EdgeFacts) -> Any:
        if not self._pass.is_torch:
            value = value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)
        if facts is self.edges.facts[self.edges.logits]:
            return value[:, -1]
        return self.view.take_back(value, facts.form)

    def _check_late(self) -> None:
        for served in self._used:
            watch = served.watch
            is_the_same = watch.counter is not None and watch.counter._version == watch.version  # in line: it is hot
            if not is_the_same and served.is_changed():
                self._refuse_late(served)

    def _refuse_late(self, served: Served) -> None:
        served.watch.follow(served.value)
        raise OutOfOrder(
            f"{served.facts.name} was changed after what uses it had run: the change did nothing.",
            hint="Change a value before reading one that comes after it, or change a clone.",
        )

    def _check_readable(self, edge: int) -> None:
        facts = self.edges.facts[edge]
        if edge in self._served or edge in self._kept:
            return
        if (reason := self.reason(edge)) is not None:
            raise Unavailable(f"{facts.name} is not available: {reason}.")
        if facts.last_use < self._done:
            raise OutOfOrder(
                f"{facts.name} was asked for after what uses it had run.",
                hint=f"Read it earlier, or say t.keep([{facts.name!r}]) before.",
            )

    # Tensors.

    def _shape(self, edge: int) -> tuple[int, ...]:
        if edge == self.edges.logits:
            return (self.view.batch, self.view.seq, self.edges.graph.hp.vocab_size)
        return self.view.shape(self.edges.facts[edge].form)

    def _own(self, shown: Any) -> Any:
        """A contiguous tensor for whoever asked, of numbers that the engine does not have."""
        if isinstance(shown, np.ndarray):
            return as_value(np.ascontiguousarray(shown))
        value = as_value(shown.contiguous())
        return _new_node(value) if self.grad else value

    def _recording(self) -> AbstractContextManager[Any]:
        """With gradients, what is done between values belongs to their graph, whatever the body has switched off."""
        return _recording() if self.grad else _NOTHING

    def _node_of(self, served: Served) -> Any:
        """What consumers use: the tensor that was handed out, by way of its other shapes, which have gradients too."""
        node = served.value
        for view in served.views.values() if self.grad else ():
            if view is not served.value:
                view.retain_grad()
                node = view.reshape(served.value.shape)
        return node

    def _copy_of(self, given: Any, name: str, shape: tuple[int, ...]) -> Any:
        """A copy of what somebody gives in the place of a value of that shape."""
        if self._pass.is_torch:
            import torch

            tensor = given if isinstance(given, torch.Tensor) else torch.from_numpy(_float_array(given, name, shape))
            check_shape(name, shape, tuple(tensor.shape), tensor.is_floating_point())
            _check_has_numbers(tensor, name)
            engine: Any = self._pass
            with self._recording() if self.grad else torch.no_grad():
                tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
                fresh = tensor.to(device=engine.device, dtype=engine.dtype).contiguous().as_subclass(torch.Tensor)
                return _new_node(as_value(fresh)) if self.grad else as_value(fresh).clone()
        return as_value(_float_array(given, name, shape))

    def _see_head(self) -> None:
        """Remember what the output matrix is about to read, of all rows: other logits than the last may be wanted."""
        if self.view.seq > 1 and self._head_rows is None:
            self._sync(self.edges.gather + 1)
            form = self.edges.facts[self.edges.head].form
            with self._recording():
                self._head_rows = self.view.show(self._pass.read(self.edges.head), form)

    def _with_other_rows(self, last: Any) -> Any:
        """Logits `[batch vocab_size]` of last rows, with those of the rows before them: `[batch seq vocab_size]`."""
        if self.view.seq == 1:
            return last[:, None]
        head = self._head_rows
        others = self._project(head[:, :-1].reshape(-1, head.shape[-1]))
        others = others.reshape(self.view.batch, self.view.seq - 1, -1)
        padding = ~self.view.is_new[:, :-1]
        if isinstance(last, np.ndarray):
            others[padding] = 0
            return np.concatenate([others, last[:, None]], axis=1)
        import torch

        with self._recording() if self.grad else torch.no_grad():
            others = others.masked_fill(torch.from_numpy(padding).to(others.device)[..., None], 0)
            return torch.cat([others, last[:, None]], dim=1)


_NOTHING = nullcontext()


@contextmanager
def _recording() -> Iterator[None]:
    import torch

    with torch.inference_mode(mode=False), torch.enable_grad():
        yield


def _new_node(value: Any) -> Any:
    """A copy of a tensor that has a gradient of its own; the beginning of a graph where nothing before it has one."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        node = (value if value.requires_grad else value.detach().clone().requires_grad_()).clone()
        node.retain_grad()
    # No `as_subclass`: it gives a view, and a view loses its gradient once another view of the numbers is written to.
    node.__class__ = torch_value()
    return node


def _float_array(given: Any, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A float32 array of what somebody gives; a copy. ValueShapeError for what is no array of that shape and of floats.

    Numbers that float32 does not hold are infinite, as torch has them.
    """
    if hasattr(given, "detach"):
        check_shape(name, shape, tuple(given.shape), given.is_floating_point())
        _check_has_numbers(given, name)
        given = given if str(given.layout) == "torch.strided" else given.detach().to_dense()
    try:
        array = as_array(given)
    except (TypeError, ValueError):
        raise ValueShapeError(f"{name} was given {type(given).__name__}; expected a tensor {list(shape)}.") from None
    check_shape(name, shape, array.shape, array.dtype.kind == "f")
    with np.errstate(over="ignore"):
        return np.array(array, np.float32, order="C")


def _check_has_numbers(tensor: Any, name: str) -> None:
    if tensor.device.type == "meta":
        raise ValueShapeError(f"{name} was given a tensor without numbers, on the device meta; expected one with them.")


def check_shape(name: str, expected: tuple[int, ...], found: Sequence[int], is_float: bool) -> None:
    """ValueShapeError unless what is to replace a value has its shape and is of floating-point numbers."""
    if tuple(found) != expected:
        raise ValueShapeError(
            f"{name} was given a tensor {list(found)}; expected {list(expected)}, the shape that it has.",
            hint="Assign a tensor of that shape.",
        )
    if not is_float:
        raise ValueShapeError(f"{name} was given integers, or no real numbers; expected floating-point ones.")
