"""The torch engine: the same list with torch functions, differentiable, on any device torch has.

`forward` is the contract of every engine. `logits(ids)` is for training: sequences of one length as one batch,
without a cache, gradients flowing to `parameters`:

    engine = TorchEngine(graph, weights)
    loss = torch.nn.functional.cross_entropy(engine.logits(ids).flatten(0, 1), targets.flatten())

Inside, a value with a `query` or `key` axis is a list with one tensor `[n ...]` a group of n sequences of one
length. The three ops of attention run as one fused call wherever nobody asks for what is between them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from starscope.cache import ArrayCache, Cache
from starscope.engine.base import MASKED, Array, Batch, Sequences, StepEdits, Wanted, input_values, make_batch
from starscope.engine.edited import forward_edited
from starscope.engine.passes import tail_of
from starscope.engine.weights import Weights
from starscope.errors import DoesNotFitError, UnsupportedError
from starscope.graph import Graph, Op
from starscope.ops import OPS
from starscope.rope import inverse_frequencies

if TYPE_CHECKING:
    from starscope.engine.torch_pass import TorchPass

THREADS_OF = os.getpid()  # the process that torch's threads are in, once there are some


@dataclass(frozen=True)
class Group:
    """Sequences that attend in one call: `count` of them, each with `new` rows behind `past` cached ones."""

    count: int
    new: int
    past: int
    cache: ArrayCache | None


@dataclass(frozen=True)
class Step:
    """One run over rows that lie one after another: the groups they belong to and the rows that are wanted."""

    groups: list[Group]
    wanted: Tensor | None  # None: all of them

    def split(self, rows: Tensor) -> list[Tensor]:
        """`[rows ...]` -> one `[count new ...]` a group."""
        parts = torch.split(rows, [group.count * group.new for group in self.groups])
        return [
            part.reshape(group.count, group.new, *part.shape[1:])
            for part, group in zip(parts, self.groups, strict=True)
        ]


Kernel = Callable[[Mapping[str, Tensor], Step, Op, list[Any]], Any]


def embed(weights: Mapping[str, Tensor], _step: Step, op: Op, inputs: list[Any]) -> Tensor:
    return F.embedding(inputs[0], weights[op.weights[0]])


def add(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    total: Tensor = inputs[0] + inputs[1]
    return total


def layer_norm(weights: Mapping[str, Tensor], _step: Step, op: Op, inputs: list[Any]) -> Tensor:
    weight, *bias = (weights[name] for name in op.weights)
    return F.layer_norm(inputs[0], weight.shape, weight, bias[0] if bias else None, op.attrs["epsilon"])


def rms_norm(weights: Mapping[str, Tensor], _step: Step, op: Op, inputs: list[Any]) -> Tensor:
    weight, *bias = (weights[name] for name in op.weights)
    y = F.rms_norm(inputs[0], weight.shape, weight, op.attrs["epsilon"])
    return y + bias[0] if bias else y


def linear(weights: Mapping[str, Tensor], _step: Step, op: Op, inputs: list[Any]) -> Tensor:
    return F.linear(inputs[0], *(weights[name] for name in op.weights))


def split_heads(_weights: Mapping[str, Tensor], _step: Step, op: Op, inputs: list[Any]) -> tuple[Tensor, ...] | Tensor:
    x = inputs[0].unflatten(-1, (-1, op.attrs["head_dim"]))  # [rows sum(heads) head_dim]
    parts: tuple[Tensor, ...] = x.split(op.attrs["heads"], dim=1)
    return parts if len(parts) > 1 else parts[0]


def rope(weights: Mapping[str, Tensor], _step: Step, op: Op, inputs: list[Any]) -> Tensor:
    x, positions = inputs
    known = inverse_frequencies(x.shape[-1], op.attrs["base"], op.attrs["scale"])
    frequencies = torch.from_numpy(known).to(x.device)
    if op.weights:
        frequencies = frequencies / weights[op.weights[0]].float()
    angles = positions.float()[:, None, None] * frequencies  # [rows 1 dim/2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def cache(_weights: Mapping[str, Tensor], step: Step, op: Op, inputs: list[Any]) -> list[Tensor]:
    assert op.layer is not None
    made = []
    for group, rows in zip(step.groups, step.split(inputs[0]), strict=True):
        if group.cache is None:
            made.append(rows.transpose(1, 2))  # [n kv_heads new dim]
        else:
            made.append(group.cache.append(op.layer, op.attrs["part"], rows[0])[None])
    return made


def scores(_weights: Mapping[str, Tensor], step: Step, op: Op, inputs: list[Any]) -> list[Tensor]:
    made = []
    for group, q, k in zip(step.groups, step.split(inputs[0]), inputs[1], strict=True):
        n, kv_heads, key, _ = k.shape
        heads = q.shape[2]
        q = q.transpose(1, 2).reshape(n, kv_heads, -1, q.shape[-1])  # the query heads of a key head together
        s = (q @ k.transpose(-1, -2)).reshape(n, heads, group.new, key) * op.attrs["scale"]
        made.append(s.masked_fill(unseen(group.past, group.new, key, op.attrs["window"], s.device), MASKED))
    return made


def softmax(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> list[Tensor]:
    return [x.softmax(-1) for x in inputs[0]]


def mix(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    made = []
    for p, v in zip(inputs[0], inputs[1], strict=True):
        n, heads, query, key = p.shape
        o = (p.reshape(n, v.shape[1], -1, key) @ v).reshape(n, heads, query, -1)

        def alone(i: int, p: Tensor = p, v: Tensor = v, o: Tensor = o) -> Tensor:
            seen = p.shape[3] - p.shape[2] + i + 1
            if p[:, :, i, seen:].any():  # somebody has written probabilities there
                return o[:, :, i]
            first = int(p[:, :, i].any(dim=1).any(dim=0).int().argmax())  # behind what a window leaves out
            rows = p[:, :, i, first:seen].reshape(len(p), v.shape[1], -1, seen - first)
            return (rows @ v[:, :, first:seen]).reshape(len(p), p.shape[1], -1)

        made.append(_again(o, alone).transpose(1, 2).flatten(0, 1))
    return torch.cat(made)  # [rows num_heads head_dim]


def _again(o: Tensor, alone: Callable[[int], Tensor]) -> Tensor:
    """Attention's result `[n heads query dim]`, rows that are not finite made by themselves: alone(i), `[n heads dim]`.

    Rows that are made together multiply later values by 0, which gives NaN for infinities and NaN. On the CPU only:
    looking at numbers elsewhere means to wait for them.
    """
    if o.device.type != "cpu" or math.isfinite(o.detach().sum().item()):
        return o
    finite = o.isfinite().all(3).all(1).all(0).tolist()
    rows = [row if fine else alone(i) for i, (row, fine) in enumerate(zip(o.unbind(2), finite, strict=True))]
    return torch.stack(rows, 2)


def merge_heads(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    merged: Tensor = inputs[0].flatten(1)
    return merged


def gelu(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    return F.gelu(inputs[0])


def gelu_tanh(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    return F.gelu(inputs[0], approximate="tanh")


def silu(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    return F.silu(inputs[0])


def multiply(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    product: Tensor = inputs[0] * inputs[1]
    return product


def wanted_rows(_weights: Mapping[str, Tensor], step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    rows: Tensor = inputs[0] if step.wanted is None else inputs[0][step.wanted]
    return rows


KERNELS: dict[str, Kernel] = {name: globals()[name] for name in OPS}


def fused_attention(
    step: Step, attrs: Mapping[str, Any], rows: Tensor, keys: list[Tensor], values: list[Tensor]
) -> Tensor:
    """scores, softmax and mix in one call for each group: queries `[rows heads dim]` -> `[rows heads dim]`.

    `attrs` are those of the scores: their scale and window.
    """
    made = []
    scale, window = attrs["scale"], attrs["window"]
    for group, queries, k, v in zip(step.groups, step.split(rows), keys, values, strict=True):
        heads, length = queries.shape[2], k.shape[2]
        # A key head that serves several query heads is expanded as a view, not copied.
        k, v = (
            x.repeat_interleave(heads // x.shape[1], 1) if 1 < x.shape[1] < heads else x.expand(-1, heads, -1, -1)
            for x in (k, v)
        )
        reach = window if window is not None and window < length else None  # where it hides anything
        square = group.past == 0 and group.new > 1 and reach is None
        is_masked = not square and (group.new > 1 or reach is not None)
        mask = ~unseen(group.past, group.new, length, reach, k.device) if is_masked else None
        q = queries.transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=square, scale=scale)

        def alone(
            i: int, q: Tensor = q, k: Tensor = k, v: Tensor = v, past: int = group.past, reach: int | None = reach
        ) -> Tensor:
            stop = past + i + 1
            start = max(0, stop - reach) if reach is not None else 0
            k, v = k[:, :, start:stop], v[:, :, start:stop]
            return F.scaled_dot_product_attention(q[:, :, i : i + 1], k, v, scale=scale)[:, :, 0]

        made.append(_again(o, alone).transpose(1, 2).flatten(0, 1))
    return torch.cat(made)


def unseen(past: int, query: int, key: int, window: int | None, device: torch.device) -> Tensor:
    """Where a key is behind its query, or too far before it for a window: bool `[query key]`."""
    keys = torch.arange(key, device=device)
    queries = past + torch.arange(query, device=device)[:, None]
    future = keys > queries
    return future if window is None else future | (keys <= queries - window)


class TorchEngine:
    """Runs a graph with torch. Implements `Engine`. `parameters` are the weights, by our names; tied ones once."""

    name = "torch"
    runs_ahead = False
    edits = None

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        *,
        device: str = "cpu",
        context_length: int | None = None,
        threads: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.graph = graph
        self.context_length = context_length or graph.hp.context_length
        self._device = _find_device(device)
        self.device = str(self._device)
        self.half_cache = weights.half_cache
        if threads is not None:
            torch.set_num_threads(threads)
        check_process()
        self.threads = torch.get_num_threads()
        self.dtype = dtype
        self.parameters: dict[str, Tensor] = {}
        with memory_errors(self.device):
            for name in weights:
                if not weights.is_tied(name):
                    self.parameters[name] = torch.tensor(weights[name], dtype=dtype).to(self._device)
                    weights.forget(name)
        tied = {name: slot.tied_to for name, slot in weights.slots.items() if slot.tied_to and weights.is_tied(name)}
        self.weights: Mapping[str, Tensor] = {
            **self.parameters,
            **{name: self.parameters[other] for name, other in tied.items()},
        }
        self.fusions = _fusable(graph)

    def new_cache(self) -> Cache:
        half = self.half_cache
        return ArrayCache(
            num_layers=self.graph.hp.num_layers,
            context_length=self.context_length,
            allocate=lambda shape: torch.empty(shape, dtype=self.dtype, device=self._device),
            as_cached=(lambda rows: rows.to(torch.float16)) if half else (lambda rows: rows),
        )

    def prepare(self) -> None:
        """Nothing is left to do: the weights were decoded when the engine was made."""

    @torch.inference_mode()
    def forward(
        self,
        sequences: Sequences,
        caches: Sequence[Cache] | None = None,
        wanted: Wanted = "last",
        *,
        edits: StepEdits | None = None,
    ) -> list[Array]:
        if edits is not None:
            return forward_edited(self, sequences, caches, wanted, edits)
        batch = make_batch(self, sequences, caches, wanted)
        known, start = input_values(self.graph, batch)
        values: dict[int, Any] = {
            i: torch.from_numpy(np.ascontiguousarray(v)).to(self._device) for i, v in known.items()
        }
        with memory_errors(self.device):
            self.run(self.step(batch), values, start, len(self.graph.ops))
        batch.advance()
        logits: Tensor = values[self.graph.names["logits"]]
        return batch.split_wanted(logits.float().cpu().numpy())

    def begin(
        self,
        sequences: Sequences,
        caches: Sequence[Cache] | None = None,
        wanted: Wanted = "last",
        *,
        grad: bool = False,
    ) -> TorchPass:
        """A step that can stop between operations. `grad`: its values are nodes of an autograd graph, for which it has
        caches of its own.
        """
        from starscope.engine.torch_pass import TorchPass, grad_caches

        if grad and caches is None:
            caches = grad_caches(self, [len(one) for one in sequences])
        return TorchPass(self, make_batch(self, sequences, caches, wanted), grad=grad)

    def run_tail(self, edge: int, rows: Any) -> Tensor:
        """The logits `[n vocab_size]` that follow from rows `[n hidden_size]` of a value near the end of the graph.

        Gradients flow when `rows` asks for them.
        """
        rows = torch.as_tensor(rows).to(device=self._device, dtype=self.dtype)
        values: dict[int, Any] = {edge: rows}
        keeps_grad = torch.is_grad_enabled() and rows.requires_grad
        subclasses = torch._C.DisableTorchFunctionSubclass()
        with memory_errors(self.device), torch.set_grad_enabled(keeps_grad), subclasses:
            self.run(Step([], None), values, tail_of(self.graph, edge), len(self.graph.ops))
        logits: Tensor = values[self.graph.names["logits"]]
        return logits

    def logits(self, ids: Tensor) -> Tensor:
        """`[n seq]` ids -> `[n seq vocab_size]` logits, differentiable, every sequence from position 0."""
        n, seq = ids.shape
        positions = torch.arange(seq, device=ids.device).repeat(n)
        values: dict[int, Any] = {
            self.graph.inputs["input_ids"]: ids.flatten(),
            self.graph.inputs["positions"]: positions,
        }
        self.run(Step([Group(n, seq, 0, None)], None), values, 0, len(self.graph.ops))
        logits: Tensor = values[self.graph.names["logits"]]
        return logits.reshape(n, seq, -1)

    def step(self, batch: Batch) -> Step:
        groups = [
            Group(1, new, past, cache)
            for new, past, cache in zip(batch.lengths, batch.pasts, batch.caches, strict=True)
        ]
        return Step(groups, torch.from_numpy(batch.wanted).to(self._device))

    def run(
        self,
        step: Step,
        values: dict[int, Any],
        start: int,
        stop: int,
        keep: Collection[int] = (),
        *,
        fused: bool = True,
    ) -> None:
        """Run ops `start` to `stop` over `values` (edge -> value); an edge in `keep` outlives its last use.

        The three ops of attention are one call where nobody asks for what is between them, unless `fused` is False.
        """
        check_process()
        graph, logits = self.graph, self.graph.names["logits"]
        index = start
        while index < stop:
            op = graph.ops[index]
            inner = self.fusions.get(index) if fused else None
            if inner is not None and inner.last <= stop - 1 and not any(edge in keep for edge in inner.hidden):
                q, k, v = (values[i] for i in inner.inputs)
                values[inner.output] = fused_attention(step, op.attrs, q, k, v)
                used, index = set(inner.inputs), inner.last
            else:
                made = KERNELS[op.kind](self.weights, step, op, [values[i] for i in op.inputs])
                outputs = made if len(op.outputs) > 1 else [made]
                values.update(zip(op.outputs, outputs, strict=True))
                used = set(op.inputs)
            for i in used:
                if graph.last_use(i) <= index and i not in keep and i != logits:
                    del values[i]
            index += 1


@dataclass(frozen=True)
class Fusion:
    """Three ops that may run as one: what goes in, what comes out, what nobody sees then."""

    first: int  # op
    last: int
    inputs: tuple[int, int, int]
    output: int
    hidden: tuple[int, int]


def _fusable(graph: Graph) -> dict[int, Fusion]:
    """Where scores, softmax and mix follow one another and nothing else reads what is between them."""
    found = {}
    for op in graph.ops[:-2]:
        softmax_op, mix_op = graph.ops[op.index + 1], graph.ops[op.index + 2]
        if (op.kind, softmax_op.kind, mix_op.kind) != ("scores", "softmax", "mix"):
            continue
        hidden = (op.outputs[0], softmax_op.outputs[0])
        if (
            softmax_op.inputs[0] == hidden[0]
            and mix_op.inputs[0] == hidden[1]
            and all(len(graph.consumers[e]) == 1 for e in hidden)
        ):
            found[op.index] = Fusion(
                op.index,
                mix_op.index,
                (op.inputs[0], op.inputs[1], mix_op.inputs[1]),
                mix_op.outputs[0],
                hidden,
            )
    return found


def check_process() -> None:
    """UnsupportedError in a forked child: a fork leaves torch's threads behind, and waiting for them never ends."""
    if os.getpid() != THREADS_OF and torch.get_num_threads() > 1:
        raise UnsupportedError(
            "this process was forked from one that had torch loaded, and torch's threads stayed there.",
            hint="Load the model in the child alone, start processes by spawn, or use one thread (threads=1).",
        )


@contextmanager
def memory_errors(device: str) -> Iterator[None]:
    """Turn torch's two ways of saying that memory ran out into DoesNotFitError."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise DoesNotFitError(
            f"there is not enough memory on {device}: {reason}", hint="Use a smaller model."
        ) from None


def _find_device(name: str) -> torch.device:
    """A torch device that is there and works; UnsupportedError says what was found otherwise."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        found = (
            ["cpu"]
            + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
            + (["mps"] if torch.backends.mps.is_available() else [])
        )
        raise UnsupportedError(
            f"device {name!r} cannot be used: {_first_sentence(error)}.", hint=f"There are: {', '.join(found)}."
        ) from None
    return device


def _first_sentence(error: Exception) -> str:
    """What torch says, without the list of every device it has heard of."""
    text = str(error).splitlines()[0]
    return "torch knows no such device" if text.startswith("Expected one of") else text.partition(". ")[0].rstrip(".")
