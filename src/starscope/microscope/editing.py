"""A model under edits: in a block (`editing`) or for good, as another model (`with_edits`).

What runs is the model's engine with edits around it; weights and the engine itself stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from starscope.engine import Engine
from starscope.engine.edited import EditedEngine
from starscope.errors import UsageError
from starscope.microscope.edit_plan import EditPlan, plan_edits
from starscope.microscope.edits import Edit
from starscope.microscope.scope import Scope


class Entered(NamedTuple):
    """A block of edits of one model, with what runs the model in it."""

    block: object
    scope: Scope
    edits: list[Edit]
    engine: EditedEngine


# The blocks that have been entered and not left, of all models, the innermost last.
_EDITING: ContextVar[tuple[Entered, ...]] = ContextVar("editing", default=())


class Editable:
    """What `Model` has of edits."""

    scope: Scope

    @property
    def engine(self) -> Engine:
        """What runs the model: inside `editing`, with the edits of the block."""
        return _engine_of(self.scope, _EDITING.get())

    @contextmanager
    def editing(self, edits: Edit | Sequence[Edit]) -> Iterator[None]:
        """A block in which whatever this model runs is edited: generate, forward, traces. Blocks inside one another add
        their edits behind those that are there. UsageError for an edit that the model cannot have.
        """
        block, added = object(), _as_list(edits)
        _EDITING.set((*_EDITING.get(), Entered(block, self.scope, added, edited(self.engine, added, self.scope))))
        try:
            yield
        finally:
            _EDITING.set(_without(block, _EDITING.get()))


def _engine_of(scope: Scope, entered: Sequence[Entered]) -> Engine:
    return next((one.engine for one in reversed(entered) if one.scope is scope), scope.engine)


def _without(block: object, entered: Sequence[Entered]) -> tuple[Entered, ...]:
    """What is left without one block. Those in it may outlast it, as generators leave their blocks in any order."""
    left: list[Entered] = []
    for i, one in enumerate(entered):
        if one.block is block:
            behind = entered[i + 1 :]
            for inner in behind:
                if inner.scope is one.scope:
                    engine = edited(_engine_of(one.scope, left), inner.edits, one.scope)
                    inner = inner._replace(engine=engine)
                left.append(inner)
            return tuple(left)
        left.append(one)
    return tuple(left)


def _as_list(edits: Edit | Sequence[Edit]) -> list[Edit]:
    if isinstance(edits, Edit):
        return [edits]
    if isinstance(edits, (str, bytes, Mapping)) or not isinstance(edits, Iterable):
        raise UsageError(f"edits are {type(edits).__name__}; expected an Edit or a list of them.")
    return list(edits)


def edited(engine: Engine, edits: Edit | Sequence[Edit], scope: Scope) -> EditedEngine:
    """An engine with edits behind those that it has."""
    before: Sequence[Edit] = ()
    plan = engine.edits
    if isinstance(engine, EditedEngine) and isinstance(plan, EditPlan):
        engine, before = engine.inner, plan.edits
    return EditedEngine(engine, plan_edits(_as_list(edits), scope.names, scope.edges, before=before))
