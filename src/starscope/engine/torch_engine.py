"""The torch engine: the same list with torch functions, differentiable, on any device torch has.

`forward` is the contract of every engine. `logits(ids)` is for training: sequences of one length as one batch,
without a cache, gradients flowing to `parameters`:

    engine = TorchEngine(graph, weights)
    loss = torch.nn.functional.cross_entropy(engine.logits(ids).flatten(0, 1), targets.flatten())

Inside, a value with a `query` or `key` axis is a list with one tensor `[n ...]` a group of n sequences of one
length. The three ops of attention run as one fused call wherever nobody asks for what is between them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from starscope.cache import ArrayCache, Cache
from starscope.engine.base import Array, Batch, Sequences, StepEdits, Wanted, input_values, make_batch
from starscope.engine.edited import forward_edited
from starscope.engine.gpu.devices import Asked, Ways, find_device, holds, ways_of
from starscope.engine.gpu.devices import memory_errors as memory_errors
from starscope.engine.gpu.products import why_no_triton
from starscope.engine.gpu.static import Recorder, StaticCache
from starscope.engine.gpu.stored import LAYOUTS, StoredMatrix, device_bytes, read_stored
from starscope.engine.passes import tail_of
from starscope.engine.torch_kernels import KERNELS as KERNELS
from starscope.engine.torch_kernels import Group as Group
from starscope.engine.torch_kernels import Step as Step
from starscope.engine.torch_kernels import Weight, fused_attention
from starscope.engine.torch_kernels import gelu_tanh as gelu_tanh
from starscope.engine.weights import Weights
from starscope.errors import UnsupportedError
from starscope.graph import Graph, Op

if TYPE_CHECKING:
    from starscope.engine.torch_pass import TorchPass

THREADS_OF = os.getpid()  # the process that torch's threads are in, once there are some


class TorchEngine:
    """Runs a graph with torch. Implements `Engine`. `parameters` are the weights that are plain tensors, by our names;
    tied ones once. `ways`: how it uses its device, by default what pays there; `notes` says what it does without.
    """

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
        ways: Ways | None = None,
    ) -> None:
        self.graph = graph
        self.context_length = context_length or graph.hp.context_length
        self._device = find_device(device)
        self.device = str(self._device)
        self.half_cache = weights.half_cache
        if threads is not None:
            torch.set_num_threads(threads)
        check_process()
        self.threads = torch.get_num_threads()
        self.dtype = dtype
        self.ways = ways or ways_of(self._device, dtype)
        self.notes = self.ways.notes(self.device)
        self.weights: dict[str, Weight] = {}
        for name in weights:
            if not weights.is_tied(name):
                self.weights[name] = self._place(weights, name)
        if self.ways.triton:
            self._try_triton()
        self.parameters = {name: weight for name, weight in self.weights.items() if isinstance(weight, Tensor)}
        for name, slot in weights.slots.items():
            if slot.tied_to and weights.is_tied(name):
                self.weights[name] = self.weights[slot.tied_to]
        self.recorder = Recorder(self) if self.ways.recorded else None
        self.fusions = _fusable(graph)
        self._told = [_tell(graph, op) for op in graph.ops]

    def _place(self, weights: Weights, name: str) -> Weight:
        """One of the weights, on the device. DoesNotFitError names it when there is no room."""
        form, shape = weights.format_name(name), weights.slots[name].shape
        stays = self.ways.stored and len(shape) == 2 and form in LAYOUTS
        if stays and form == "BF16" and not holds(torch.bfloat16, self._device):
            self.notes.append(f"{name} is decoded to float32: {self.device} has no bfloat16.")
            stays = False
        needed = device_bytes(form, shape) if stays else weights.slots[name].parameters * self.dtype.itemsize
        with memory_errors(self.device, f"{name}, [{' '.join(map(str, shape))}] in {form}", needed):
            if stays:
                return read_stored(weights, name, self._device, by_triton=self.ways.triton)
            placed = torch.tensor(weights[name], dtype=self.dtype).to(self._device)
        weights.forget(name)
        return placed

    def _try_triton(self) -> None:
        """One product with each format; torch decodes them all, and a note says why, where one does not run."""
        stored = {name: weight for name, weight in self.weights.items() if isinstance(weight, StoredMatrix)}
        with memory_errors(self.device, "a product with one row"):
            each = {weight.format_name: weight for weight in stored.values()}.values()
            reason = next(filter(None, map(why_no_triton, each)), None)
        if reason is not None:
            self.ways = replace(self.ways, triton=False)
            self.weights.update({name: replace(weight, by_triton=False) for name, weight in stored.items()})
            self.notes.append(f"quantized weights are decoded by torch on {self.device}: Triton fails there: {reason}")

    @property
    def weight_bytes(self) -> int:
        """The bytes that the weights take on the device."""
        return sum(weight.nbytes for weight in {id(weight): weight for weight in self.weights.values()}.values())

    def new_cache(self) -> Cache:
        half = self.half_cache
        if self.ways.static:
            kept = torch.float16 if half else self.dtype
            return StaticCache(
                num_layers=self.graph.hp.num_layers,
                context_length=self.context_length,
                make=lambda shape: torch.zeros(shape, dtype=kept, device=self._device),
                dtype=self.dtype,
            )
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
        if caches is None:  # of this step alone: no room for more
            for cache, length in zip(batch.caches, batch.lengths, strict=True):
                cache.context_length = length
        known, start = input_values(self.graph, batch)
        with memory_errors(self.device):
            values: dict[int, Any] = {
                i: torch.from_numpy(np.ascontiguousarray(v)).to(self._device) for i, v in known.items()
            }
            if self.recorder is not None and self.recorder.fits(batch):
                self.recorder.run(batch, values, start, len(self.graph.ops))
            else:
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
        with memory_errors(self.device) as asked:
            self._run(step, values, start, stop, keep, fused, asked)

    def _run(
        self,
        step: Step,
        values: dict[int, Any],
        start: int,
        stop: int,
        keep: Collection[int],
        fused: bool,
        asked: Asked,
    ) -> None:
        graph, logits = self.graph, self.graph.names["logits"]
        index = start
        while index < stop:
            asked.what = self._told[index]
            op = graph.ops[index]
            inner = self.fusions.get(index) if fused else None
            if inner is not None and inner.last <= stop - 1 and not any(edge in keep for edge in inner.hidden):
                values[inner.output] = fused_attention(step, op.attrs, *(values[i] for i in inner.inputs))
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


def _tell(graph: Graph, op: Op) -> str:
    """An op's result in words."""
    names = graph.edges[op.outputs[0]].names
    return names[0] if names else op.kind + (f" of block {op.layer}" if op.layer is not None else "")


def check_process() -> None:
    """UnsupportedError in a forked child: a fork leaves torch's threads behind, and waiting for them never ends."""
    if os.getpid() != THREADS_OF and torch.get_num_threads() > 1:
        raise UnsupportedError(
            "this process was forked from one that had torch loaded, and torch's threads stayed there.",
            hint="Load the model only in the child, start processes by spawn, or use one thread (threads=1).",
        )
