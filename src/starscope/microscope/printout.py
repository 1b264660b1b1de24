"""What `print(model)` shows: the tree of the parts, with the values that each has and their layouts.

    GPTBigCodeForCausalLM(
      (layers): ModuleList(
        (0-23): 24 x GPTBigCodeBlock(
          (self_attn/attn): GPTBigCodeAttention(
            (attention_queries) -> Queries [batch num_heads seq qk_head_dim]: The queries entering attention

A part has its standard name, and behind a slash the checkpoint's where that is another; a part that has no standard
name goes by the checkpoint's. Read off the graph: nothing runs and no weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from starscope.graph import Op
from starscope.microscope.names import Names, Part
from starscope.values import ATTENTION, BESIDE_THE_GRAPH, MODEL, VALUES

STANDARD_PARTS = frozenset({
    "embed_tokens", "layers", "norm", "lm_head",
    "input_layernorm", "self_attn", "post_attention_layernorm", "mlp",
    "o_proj", "down_proj", "act_fn",
})  # fmt: skip

# The values of a host in the order in which they are printed; of other hosts it is that of the table of values.
# Learned positions are no standard part, and what comes out of theirs is printed no more than they are.
ORDER: Mapping[str, Sequence[str]] = {
    MODEL: (
        "logits", "token_embeddings", "final_norm_output", "lm_head_output", "next_token_probs", "input_ids",
        "attention_mask",
    ),
    ATTENTION: (
        "attention_queries", "attention_keys", "attention_values", "attention_scores", "attention_premix",
        "attention_output", "attention_probabilities", "attention_head_outputs",
    ),
}  # fmt: skip
INPUT_SIZE = "(input_size): [batch, seq] of the current call; read-only"


def print_part(names: Names, path: str) -> str:
    """A part and everything in it, as torch prints modules."""
    return "\n".join(_lines(names, names.parts[path]))


def children(names: Names, path: str) -> list[Part]:
    """The parts right below a part that have a place in its tree, in order: those that the checkpoint has there, then
    those that are lifted to it from below; of these the standard ones alone.
    """
    start = f"{path}." if path else ""
    own = names.parts[path].hf
    below = [
        part
        for name, part in names.parts.items()
        if name.startswith(start) and name != path and "." not in name.removeprefix(start)
    ]
    below.sort(key=lambda part: (not part.weights and part.op is not None, names.begins.get(part.path, 0)))
    here = [part for part in below if part.hf.rpartition(".")[0] == own]
    lifted = [part for part in below if part not in here and part.path.rpartition(".")[2] in STANDARD_PARTS]
    return here + lifted


def values_of(names: Names, path: str) -> list[str]:
    """The values of a part by their own names, without its path, in the order of the printout."""
    host = re.sub(r"\d+", "{i}", path) or MODEL
    there = [value.name for value in VALUES.values() if value.host == host]
    start = f"{path}." if path else ""
    return [
        name
        for name in ORDER.get(host, there)
        if f"{start}{name}" in names.graph.names or (host == MODEL and name in BESIDE_THE_GRAPH)
    ]


def describe_value(name: str) -> str:
    """`layer_mid -> Residual [batch seq hidden_size]: what it is`, with the name in brackets."""
    value = VALUES[name]
    return f"({name}) -> {value.layout} [{' '.join(value.axes)}]: {value.meaning}"


def _lines(names: Names, part: Part) -> list[str]:
    inner = [line for label, child in _folded(names, part) for line in _labelled(label, child)]
    inner += [describe_value(name) for name in values_of(names, part.path)]
    inner += [INPUT_SIZE] if not part.path else []
    if not inner:
        return [f"{part.kind}({_sizes(names, part)})"]
    return [f"{part.kind}(", *(f"  {line}" for line in inner), ")"]


def _folded(names: Names, part: Part) -> Iterator[tuple[str, list[str]]]:
    """Labels and lines of what is in a part; numbered parts that print alike, one after another, are printed once."""
    below = [(child, _lines(names, child)) for child in children(names, part.path)]
    for lines, group in groupby(below, key=lambda pair: pair[1]):
        alike = [child for child, _ in group]
        numbers = [child.path.rpartition(".")[2] for child in alike]
        if len(alike) > 1 and all(number.isdigit() for number in numbers):
            yield f"{numbers[0]}-{numbers[-1]}", [f"{len(alike)} x {lines[0]}", *lines[1:]]
        else:
            for child in alike:
                yield _label(child, part), lines


def _label(part: Part, above: Part) -> str:
    name, native = part.path.rpartition(".")[2], part.hf.rpartition(".")[2]
    is_lifted = part.hf.rpartition(".")[0] != above.hf
    if name == native or is_lifted:
        return name
    return f"{name}/{native}" if name in STANDARD_PARTS else native


def _labelled(label: str, lines: list[str]) -> list[str]:
    return [f"({label}): {lines[0]}", *lines[1:]]


def _sizes(names: Names, part: Part) -> str:
    """What stands in the brackets of a part that is one operation."""
    if part.op is None or not part.weights:
        return ""
    op = names.graph.ops[part.op]
    return SIZES[op.kind](names.graph.weights[part.weights[0]], len(part.weights) > 1, op)


def _linear(shape: tuple[int, ...], has_bias: bool, _op: Op) -> str:
    return f"in_features={shape[1]}, out_features={shape[0]}, bias={has_bias}"


def _embed(shape: tuple[int, ...], _has_bias: bool, _op: Op) -> str:
    return f"{shape[0]}, {shape[1]}"


def _layer_norm(shape: tuple[int, ...], has_bias: bool, op: Op) -> str:
    return f"{_rms_norm(shape, has_bias, op)}, elementwise_affine=True, bias={has_bias}"


def _rms_norm(shape: tuple[int, ...], _has_bias: bool, op: Op) -> str:
    epsilon = float(str(np.float32(op.attrs["epsilon"])))  # a file has 1e-05 as the nearest float32
    return f"({shape[0]},), eps={epsilon}"


SIZES: Mapping[str, Callable[[tuple[int, ...], bool, Op], str]] = {
    "linear": _linear,
    "embed": _embed,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
}
