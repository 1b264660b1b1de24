"""What memory a run will need, by part, before it is begun.

The memory that a step holds follows from the graph: the values that each operation's gradient needs, for one
micro-batch. Parameters, gradients and the optimizer's numbers are float32 each.

    estimate(graph, options).total                  # bytes
    estimate(graph, options).parts                  # {"parameters": ..., "activations": ..., ...}
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from starscope.graph import Graph, Op
from starscope.train.forward import LOGIT_BYTES, segments
from starscope.train.kernels import CHUNK_BYTES, SHORT
from starscope.train.lbfgs import HISTORY
from starscope.train.loop import TrainOptions

FLOAT = 4  # bytes
LIBRARIES = 80_000_000  # bytes that torch's optimizer, autograd and kernels take when they are first used
COMPILER = 85_000_000  # more, where it looks for torch's compiler: so does recomputation
KEEPS_NOTHING = frozenset({"embed", "add", "split_heads", "softmax", "merge_heads", "wanted_rows"})


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the highest moment of a step. `process` is what this one takes now, and torch's own on top."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def estimate(graph: Graph, options: TrainOptions, dtype: torch.dtype = torch.float32) -> MemoryEstimate:
    """The memory of a run with products in `dtype` (`choose_precision()[0]` where the run would probe)."""
    parameters = FLOAT * sum(math.prod(slot.shape) for slot in graph.family.slots(graph.hp) if not slot.tied_to)
    rows = options.micro_batch_size * graph.hp.context_length
    # Arrays of the model's size: moments; pairs of history, directions and what a line search keeps of its tries.
    held = {"adamw": 2, "lbfgs": 2 * HISTORY + 8}[options.optimizer]
    return MemoryEstimate(
        {
            "process": resident_bytes() + LIBRARIES + (COMPILER if options.recompute else 0),
            "parameters": parameters,
            "gradients": parameters,
            "optimizer": held * parameters,
            "activations": _activations(graph, rows, options, dtype),
            "logits": _logits(graph, rows),
        }
    )


def resident_bytes() -> int:
    """What the process has in memory now; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")]
    return found[0] if found else 0


def _activations(graph: Graph, rows: int, options: TrainOptions, dtype: torch.dtype) -> int:
    """What is kept from the forward pass for the gradients; with `recompute`, the blocks' inputs and one block."""
    each = {op.index: _kept(graph, op, rows, dtype) for op in graph.ops}
    blocks = [sum(each[i] for i in range(s.start, s.stop)) for s in segments(graph) if s.is_block]
    outside = sum(each.values()) - sum(blocks)
    if dtype == torch.bfloat16:  # copies of the linear layers' weights
        names = {name for op in graph.ops if op.kind == "linear" for name in op.weights}
        outside += 2 * sum(math.prod(graph.weights[name]) for name in names)
    if not options.recompute or not blocks:
        return outside + sum(blocks)
    inputs: int = FLOAT * rows * graph.hp.hidden_size
    return outside + len(blocks) * inputs + max(blocks)


def _kept(graph: Graph, op: Op, rows: int, dtype: torch.dtype) -> int:
    """The bytes that an operation's gradient needs, but for inputs that are counted where they are made."""
    low = dtype == torch.bfloat16
    narrow = 2 if low else FLOAT

    def size(edge: int, seq: int = graph.hp.context_length) -> int:
        named = {"rows": rows, "wanted": rows, "query": seq, "key": seq}
        axes = [named[axis] if isinstance(axis, str) else axis for axis in graph.edges[edge].axes]
        return math.prod(axes) * (rows // seq if graph.edges[edge].per_sequence else 1)

    if op.kind == "layer_norm":  # its input and its output, which a linear layer reads
        return FLOAT * size(op.inputs[0]) + (FLOAT + 2 * low) * size(op.outputs[0])
    if op.kind == "rms_norm":  # its input, that divided by the root, and its output: once for each layer in bfloat16
        readers = len(graph.consumers[op.outputs[0]])
        return FLOAT * size(op.inputs[0]) + (FLOAT + (2 * readers if low else FLOAT)) * size(op.outputs[0])
    if op.kind == "linear":  # logits are counted by themselves
        is_kept = any(_keeps_input(graph.ops[i]) for i in graph.consumers[op.outputs[0]])
        return narrow * size(op.outputs[0]) if is_kept and op.outputs[0] != graph.names["logits"] else 0
    if op.kind in ("gelu", "gelu_tanh", "silu", "multiply", "mix", "cache"):  # results that the next one reads
        return narrow * size(op.outputs[0])
    if op.kind == "rope":  # a cosine and a sine for each row and each pair of dimensions
        return narrow * rows * int(graph.hp.head_dim)
    if op.kind == "scores":  # queries, scaled and in order; probabilities where attention is plain
        plain = graph.hp.context_length <= SHORT
        copies = (
            0 if plain or graph.hp.num_kv_heads in (1, graph.hp.num_heads) else 2
        )  # of keys and values: a head each
        return narrow * ((1 + copies) * size(op.inputs[0]) + (2 * size(op.outputs[0]) if plain else 0))
    if op.kind in KEEPS_NOTHING:
        return 0
    raise NotImplementedError(f"what {op.kind} keeps for its gradient is not counted")


def _keeps_input(op: Op) -> bool:
    """Whether the operation, or what looks at a part of its input, needs the input for its gradient."""
    return not (op.kind == "add" or (op.kind == "split_heads" and len(op.outputs) == 1))


def _logits(graph: Graph, rows: int) -> int:
    """Logits, their logarithms and the gradients of both; in parts over a large vocabulary."""
    whole: int = FLOAT * rows * graph.hp.vocab_size
    if whole <= LOGIT_BYTES:
        return 4 * whole
    table: int = FLOAT * graph.hp.vocab_size * graph.hp.hidden_size  # whose gradient is there once more for a moment
    return 3 * CHUNK_BYTES + table
