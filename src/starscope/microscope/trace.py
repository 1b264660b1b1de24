"""Traces: the forward pass of a prompt, or of a text that is being generated, with the body of a `with` at the wheel.

    with model.trace("def add(a, b):", max_new_tokens=8) as t:
        for step in t.steps():                       # step 0 is the prompt
            probs = model.layers[5].self_attn.attention_probabilities
            model.layers[3].layer_output[:, -1] += direction
    print(model.tokenizer.decode(t.result[0].tolist()))

The body is ordinary Python; nothing of it is read or rewritten. Asking for a value runs the model as far as that value.
Leaving the block runs the rest; an exception leaves nothing behind.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import numpy as np

from starscope.engine import Engine
from starscope.engine.edited import change_rows, changes_of_others
from starscope.errors import (
    ContextOverflowError,
    DoesNotFitError,
    OutOfOrder,
    OutsideTrace,
    StarscopeError,
    Stopped,
    UnsupportedError,
    UsageError,
    ValueShapeError,
)
from starscope.machine import bytes_text, free_memory
from starscope.microscope.asked import checked_names
from starscope.microscope.edges import Edges
from starscope.microscope.forward import Forward
from starscope.microscope.step_inputs import Inputs, check_mask
from starscope.microscope.tensors import as_array, as_value, has_torch
from starscope.sampling import SamplingOptions, make_sampler

if TYPE_CHECKING:
    from starscope.cache import Cache
    from starscope.engine.base import EditRows
    from starscope.engine.passes import Pass
    from starscope.microscope.names import Reading
    from starscope.tokenizer import Tokenizer

F = TypeVar("F", bound=Callable[..., Any])

# The traces that have been entered and not left, of all models, the innermost last.
_ENTERED: ContextVar[tuple[Trace, ...]] = ContextVar("entered", default=())


def entered_trace(edges: Edges) -> Trace | None:
    """The innermost trace of a model, known by its edges, if there is one."""
    for trace in reversed(_ENTERED.get()):
        if trace.edges is edges:
            return trace
    return None


def current_trace(edges: Edges) -> Trace:
    """The innermost trace of a model; OutsideTrace when there is none."""
    if (trace := entered_trace(edges)) is not None:
        return trace
    raise OutsideTrace(
        "a value of the forward pass was asked for outside a trace.",
        hint="Ask for it inside `with model.trace(prompt):`.",
    )


@dataclass(frozen=True)
class Plan:
    """What a trace is to run: ids or embeddings `[n hidden_size]` of each prompt, and how many tokens to generate."""

    prompts: list[Any]
    max_new_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    grad: bool = False


class Output:
    """What a forward pass without generation leaves: `logits` `[batch seq vocab_size]`."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    @property
    def logits(self) -> Any:
        return self._forward.all_logits()

    def save(self) -> Self:
        return self


def _alone(method: F) -> F:
    """A method of a trace that runs the model: for one thread at a time. What interrupts the model in the middle of its
    work, Ctrl-C or an error that is none of ours, ends the run: nobody knows what has been done.
    """

    @functools.wraps(method)
    def running(self: Trace, *given: Any) -> Any:
        try:
            with self._lock:
                return method(self, *given)
        except StarscopeError:
            raise
        except BaseException:
            self._end()
            raise

    return cast(F, running)


class Trace:
    """One run of one or several prompts. Made by `model.trace`; values are read and changed on the model's parts."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, edges: Edges, reading: Callable[[str], Reading], plan: Plan
    ) -> None:
        self.engine, self.edges, self.plan = engine, edges, plan
        self.step = 0
        self._reading = reading
        self._tokenizer = tokenizer
        pad = tokenizer.eos_id
        self._pad = 0 if pad is None else pad
        self._prompts: list[Any] = [np.asarray(prompt) for prompt in plan.prompts]
        self._tokens: list[list[int]] = [[] for _ in plan.prompts]
        self._samplers: list[Any] = []
        self._ended_rows = [False] * len(plan.prompts)
        self._caches: Sequence[Cache] | None = None
        self._holes: set[int] = set()
        self._forward: Forward | None = None
        self._step_ended = False
        self._expected: frozenset[int] = frozenset()
        self._inputs = Inputs(self._prompts, [0] * len(plan.prompts), self._pad)
        self._state = "new"  # then entered, stopped or done
        self._lock = threading.RLock()
        self._check_memory()

    # The block.

    def __enter__(self) -> Self:
        if self._state != "new":
            raise UsageError("a trace was entered twice; make another with model.trace(...).")
        self._state = "entered"
        _ENTERED.set((*_ENTERED.get(), self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None and self._state == "entered":
                self._complete()
        finally:
            if self._state == "entered":
                self._state = "stopped"
            self._leave()

    def _leave(self) -> None:
        """Let go of everything that the run needed, so that nothing outlives it but what the body has."""
        _ENTERED.set(tuple(trace for trace in _ENTERED.get() if trace is not self))
        self._caches = None
        self._samplers = []
        if self.plan.max_new_tokens is not None or self._state != "done":
            self._forward = None

    def stop(self) -> None:
        """End the run here: what has not run does not, and values can be read no more."""
        self._check_entered()
        self._end()

    def _end(self) -> None:
        if self._state == "entered":
            self._state = "stopped"
        self._forward = None

    # Values.

    def reason(self, edge: int) -> str | None:
        """Why this step does not have a value; None where it has, or nothing has run that says otherwise."""
        if self._inputs.is_embedded and edge == self.edges.graph.inputs["input_ids"]:
            return "the model was given embeddings"
        return None if self._forward is None else self._forward.reason(edge)

    @_alone
    def get(self, edge: int) -> Any:
        """A value by its edge; runs the model as far as that."""
        return self._running().get(edge)

    @_alone
    def get_shaped(self, edge: int, rest: tuple[int, ...]) -> Any:
        return self._running().get_shaped(edge, rest)

    @_alone
    def set(self, edge: int, value: Any) -> None:
        self._running().set(edge, value)

    @_alone
    def set_shaped(self, edge: int, rest: tuple[int, ...], value: Any) -> None:
        self._running().set_shaped(edge, rest, value)

    def keep(self, names: str | Sequence[str]) -> None:
        """Have values of this step readable to its end, whatever has run; said before it has."""
        readings = [self._reading(name) for name in checked_names(names)]
        self._keep([one.edge for one in readings if one.edge is not None])

    @_alone
    def _keep(self, edges: list[int]) -> None:
        self._running().keep(edges)

    @_alone
    def skip(self, first: int, last: int, value: Any = None) -> None:
        """Let blocks first to last not run in this step; `value` (or the first one's input) is what they give."""
        self._running().skip(first, last, value)

    @property
    def input_ids(self) -> Any:
        """The step's new tokens, int64 `[batch seq]`."""
        self._check_entered()
        if self._inputs.is_embedded:
            raise UnsupportedError("the model was given embeddings; there are no input_ids.")
        return self._inputs.ids

    @input_ids.setter
    def input_ids(self, value: Any) -> None:
        self._check_not_begun("input_ids")
        ids = as_array(value)
        if ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.size == 0:
            raise ValueShapeError(f"input_ids was given {ids.dtype} {list(ids.shape)}; expected integers [batch seq].")
        if len(ids) != len(self._prompts):
            raise ValueShapeError(f"input_ids was given {len(ids)} rows; expected {len(self._prompts)}.")
        if self.step and ids.shape[1] != 1:
            raise ValueShapeError(f"input_ids was given {list(ids.shape)}; expected one token a row while generating.")
        if self._inputs.is_embedded:
            raise UnsupportedError("the model was given embeddings; there are no input_ids to replace.")
        self._inputs.assign_ids(ids)

    @property
    def attention_mask(self) -> Any:
        """int64 `[batch key]`: 1 where a token is, 0 where there is padding."""
        self._check_entered()
        return self._inputs.mask

    @attention_mask.setter
    def attention_mask(self, value: Any) -> None:
        self._check_not_begun("attention_mask")
        if self.step:
            raise OutOfOrder(
                "attention_mask was assigned while generating; expected it in step 0, before anything runs."
            )
        self._inputs.assign_mask(check_mask(value, tuple(self._inputs.mask.shape)))

    @property
    def input_size(self) -> Any:
        """[batch, seq] of the current step."""
        self._check_entered()
        return _size(self._inputs.shape)

    @property
    def next_token_probs(self) -> Any:
        """`[batch vocab_size]`: the softmax of the logits of each prompt's last token, as they are now."""
        logits = self.get(self.edges.logits)[:, -1]
        if hasattr(logits, "softmax"):
            return logits.softmax(-1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def _check_inputs(self) -> None:
        """OutOfOrder when the tokens of a step were changed after it had begun."""
        if self._inputs.is_changed:
            raise OutOfOrder(
                "input_ids or attention_mask was changed after the run had begun.",
                hint="Change it before reading values.",
            )

    def _check_not_begun(self, name: str) -> None:
        self._check_entered()
        if self._forward is not None:
            raise OutOfOrder(f"{name} was assigned after the run had begun.", hint="Assign it before reading values.")

    def _check_entered(self) -> None:
        if self._state == "entered":
            return
        if self._state == "new":
            raise OutsideTrace("the trace has not been entered.", hint="Write `with model.trace(prompt) as t:`.")
        raise Stopped("a value was asked for after the run had ended.", hint="Read it before, or begin another trace.")

    # Steps.

    def steps(self) -> Iterator[int]:
        """The steps of a generation: 0 runs the prompt, every further one the token chosen at the end of the last.

        Ends when `max_new_tokens` have been chosen, or all rows have met a stop token or the end of the context. Rows
        that have ended stay in the batch until all have, fed with padding.
        """
        if self.plan.max_new_tokens is None:
            raise UsageError("steps() needs max_new_tokens: model.trace(prompt, max_new_tokens=N).")
        self._check_entered()
        if self.step:
            raise UsageError("steps() was begun in the middle of a generation; expected it once, at step 0.")
        yield 0
        while self._state == "entered" and self._next_step():
            yield self.step

    def _next_step(self) -> bool:
        """Finish this step and choose a token for every row; False when nothing is left to run."""
        self._finish_step()
        if self._is_over():
            return False
        self.step += 1
        pasts = [cache.length for cache in self._caches or ()]
        self._inputs = Inputs([np.array(tokens[-1:]) for tokens in self._tokens], pasts, self._pad)
        self._forward, self._step_ended = None, False
        return True

    @_alone
    def _finish_step(self) -> None:
        if self._step_ended:
            return
        if self._forward is None and self.step and not self.plan.grad and not self._holes:
            # Nobody looked.
            logits = self.engine.forward(self._inputs.take(), self._caches, "last")
            self._step_ended = True
            self._choose(np.concatenate(logits))
            return
        forward = self._running()
        forward.finish()
        self._step_ended = True
        self._check_inputs()
        self._caches = forward.caches
        # What was only read in this step will be read in the next, as it seems.
        may_run_ahead = self.engine.runs_ahead and not forward.was_changed and not self._holes
        self._expected = forward.was_read if may_run_ahead else frozenset()
        self._holes |= forward.skipped
        if self.plan.max_new_tokens is not None:
            self._choose(as_array(forward.next_logits()))

    def _choose(self, logits: np.ndarray[Any, Any]) -> None:
        """The next token of every row `[batch vocab_size]`."""
        if not self._samplers:
            prompts = [prompt.tolist() if prompt.ndim == 1 else [] for prompt in self._prompts]
            self._samplers = [make_sampler(self.plan.sampling, prompt) for prompt in prompts]
        for row, (sampler, tokens) in enumerate(zip(self._samplers, self._tokens, strict=True)):
            if self._ended_rows[row]:
                tokens.append(self._pad)
                continue
            tokens.append(sampler.choose(np.ascontiguousarray(logits[row], np.float32)).token_id)
            self._ended_rows[row] = tokens[-1] in self._tokenizer.stop_ids

    def _is_over(self) -> bool:
        assert self.plan.max_new_tokens is not None
        assert self._caches is not None
        is_full = any(cache.length >= cache.context_length for cache in self._caches)
        return is_full or all(self._ended_rows) or len(self._tokens[0]) >= self.plan.max_new_tokens

    @_alone
    def _complete(self) -> None:
        """Run what is left, with nobody looking."""
        self._finish_step()
        if self.plan.max_new_tokens is not None:
            while not self._is_over():
                rows = [row for row, ended in enumerate(self._ended_rows) if not ended]
                if self._holes or self.plan.grad:
                    self._next_step()
                    continue
                assert self._caches is not None
                caches = [self._caches[row] for row in rows]
                logits = self.engine.forward([self._tokens[row][-1:] for row in rows], caches, "last")
                whole = np.zeros((len(self._tokens), self.edges.graph.hp.vocab_size), np.float32)
                whole[rows] = np.concatenate(logits)
                self._choose(whole)
                self.step += 1
        elif self._forward is not None:
            self._forward.release()
        self._state = "done"

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens generated so far, of each prompt; padding behind the stop token of a row that has ended."""
        return [list(tokens) for tokens in self._tokens]

    @property
    def result(self) -> Any:
        """After a generation the ids, int64 `[batch prompt+new]`, left-padded; else an object with `logits`.

        Asked for inside the block, the rest runs first.
        """
        if self._state == "new":
            self._check_entered()
        if self._state == "entered":
            self._complete()
        if self.plan.max_new_tokens is not None:
            rows = [
                [*(prompt.tolist() if prompt.ndim == 1 else []), *tokens]
                for prompt, tokens in zip(self._prompts, self._tokens, strict=True)
            ]
            longest = max(len(row) for row in rows)
            return as_value(np.array([[self._pad] * (longest - len(row)) + row for row in rows], np.int64))
        if self._forward is None:
            raise Stopped("the run was stopped before its end: there is no result.")
        return Output(self._forward)

    # What runs.

    def _running(self) -> Forward:
        self._check_entered()
        if self._forward is None:
            if self._step_ended:
                raise OutOfOrder(f"step {self.step} had ended when one of its values was asked for.")
            self._forward = self._begin()
        return self._forward

    def _begin(self) -> Forward:
        sequences = self._inputs.take()
        if self.step == 0:
            self._prompts = sequences
        # What the two below hold is not this trace, which holds them: nothing waits for a collector of garbage.
        engine, edges, caches = self.engine, self.edges, self._caches
        options = {"grad": True} if self.plan.grad else {}
        others: list[EditRows] = []  # edits of logits, in the rows that are not the last

        def begin() -> Pass:
            one = engine.begin(sequences, caches, "last", **options)
            if engine.edits is not None:
                others[:] = changes_of_others(engine.edits, edges.graph, one.batch)
            return one

        def project(rows: Any) -> Any:
            return functools.reduce(change_rows, others, engine.run_tail(edges.head, rows))

        return Forward(
            begin,
            edges,
            project,
            grad=self.plan.grad,
            holes=self._holes,
            expected=self._expected,
        )

    def _check_memory(self) -> None:
        """A prompt is one piece: DoesNotFitError, before anything runs, when its values need more than is free."""
        graph, limit = self.engine.graph, self.engine.context_length
        lengths = [len(prompt) for prompt in self._prompts]
        if max(lengths) > limit:
            raise ContextOverflowError(f"{max(lengths)} tokens do not fit: the context is {limit} tokens.")
        if self.engine.device != "cpu":
            return
        sizes = {"rows": sum(lengths), "wanted": len(lengths), "query": max(lengths), "key": max(lengths)}
        needed, free = graph.peak_bytes(sizes), free_memory()
        if needed > free:
            raise DoesNotFitError(
                f"a trace runs a prompt in one piece: {sum(lengths)} tokens need {bytes_text(needed)}; "
                f"{bytes_text(free)} are free.",
                hint="Shorten the prompt.",
            )


class Session:
    """Several traces in one block, one after another: `with model.trace() as t: with t.invoke(prompt): ...`."""

    def __init__(self, trace: Any) -> None:
        self._trace = trace

    def invoke(self, prompt: Any = None, **options: Any) -> Trace:
        """A trace of its own; values of earlier ones may be used in it."""
        if prompt is None:
            raise UsageError(
                "invoke() was given no prompt.", hint="Give one; model.trace([a, b]) runs several together."
            )
        made: Trace = self._trace(prompt, **options)
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nothing is left to do: every trace in it has ended."""


def _size(shape: tuple[int, ...]) -> Any:
    if not has_torch():
        return shape
    import torch

    return torch.Size(shape)
