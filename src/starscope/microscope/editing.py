"""A model under edits: in a block (`editing`) or for good, as another model (`with_edits`).

What runs is the model's engine with edits around it; weights and the engine itself stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from starscope.engine import Engine
from starscope.engine.edited import EditedEngine
from starscope.microscope.edit_plan import EditPlan, plan_edits
from starscope.microscope.edits import Edit
from starscope.microscope.scope import Scope

# The edits of the blocks that have been entered, of all models, the innermost last: whose they are, and what runs.
_EDITING: ContextVar[tuple[tuple[Scope, EditedEngine], ...]] = ContextVar("editing", default=())


class Editable:
    """What `Model` has of edits."""

    scope: Scope

    @property
    def engine(self) -> Engine:
        """What runs the model: inside `editing`, with the edits of the block."""
        return next((engine for scope, engine in reversed(_EDITING.get()) if scope is self.scope), self.scope.engine)

    @contextmanager
    def editing(self, edits: Edit | Sequence[Edit]) -> Iterator[None]:
        """A block in which whatever this model runs is edited: generate, forward, traces. Blocks inside one another add
        their edits behind those that are there. UsageError for an edit that the model cannot have.
        """
        token = _EDITING.set((*_EDITING.get(), (self.scope, edited(self.engine, edits, self.scope))))
        try:
            yield
        finally:
            _EDITING.reset(token)


def edited(engine: Engine, edits: Edit | Sequence[Edit], scope: Scope) -> EditedEngine:
    """An engine with edits behind those that it has."""
    before: Sequence[Edit] = ()
    plan = engine.edits
    if isinstance(engine, EditedEngine) and isinstance(plan, EditPlan):
        engine, before = engine.inner, plan.edits
    added = [edits] if isinstance(edits, Edit) else list(edits)
    return EditedEngine(engine, plan_edits(added, scope.names, scope.edges, before=before))
