"""What `--to TYPE` means: the format of every tensor, and the number by which a file says so.

A type is a format, which every matrix then has, or one of llama.cpp's mixtures: Q4_K_S and Q4_K_M are Q4_K with more
bits where they matter most (the output matrix; in some blocks the values of attention and the last matrix of the MLP),
Q5_K_S and Q5_K_M likewise. Norms, biases and positions stay F32 in all of them. Rows that are not whole quant blocks
fall back to a format with smaller ones.

    recipe = find_recipe("q4_k_m")
    formats, notes = choose_formats(family.slots(hp), recipe)      # {"blk.0.attn_qkv.weight": Q6_K, ...}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from starscope.errors import UsageError
from starscope.family import Slot
from starscope.formats import Format, find_format
from starscope.gguf.format import Value, u32

QUANTIZATION_VERSION = 2  # of ggml's block layouts, those of formats.py
LAST_RESORT = "F16"  # for rows that are not whole blocks of 32 either
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
LIKE_VALUES = ("self_attn.v_proj.weight", "self_attn.qkv_proj.weight")
DOWN = ("mlp.down_proj.weight",)

WhichBlocks = Callable[[int, int], bool]
"""Of block i of n."""


@dataclass(frozen=True)
class Recipe:
    """One row of the table of types: `format` for every matrix, but for the head and for those that `more` names."""

    name: str
    file_type: int  # general.file_type, as llama.cpp counts
    format: str
    head: str = ""  # of the matrix that gives the logits, the embedding when the two are one; empty: like the others
    more: Mapping[tuple[str, ...], tuple[str, WhichBlocks]] = field(default_factory=dict)  # by role: format, blocks


def _some(i: int, n: int) -> bool:
    """The first eighth of the blocks, the last eighth, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


_SOME = {LIKE_VALUES: ("Q6_K", _some), DOWN: ("Q6_K", _some)}
_FIRST = {LIKE_VALUES: ("Q5_K", lambda i, n: i < 4), DOWN: ("Q5_K", lambda i, n: i < n // 8)}
_TABLE = (
    Recipe("F32", 0, "F32"),
    Recipe("F16", 1, "F16"),
    Recipe("Q4_0", 2, "Q4_0"),
    Recipe("Q4_1", 3, "Q4_1"),
    Recipe("Q8_0", 7, "Q8_0"),
    Recipe("Q5_0", 8, "Q5_0"),
    Recipe("Q5_1", 9, "Q5_1"),
    Recipe("BF16", 32, "BF16"),
    Recipe("Q4_K_S", 14, "Q4_K", head="Q6_K", more=_FIRST),
    Recipe("Q4_K_M", 15, "Q4_K", head="Q6_K", more=_SOME),
    Recipe("Q5_K_S", 16, "Q5_K", head="Q6_K"),
    Recipe("Q5_K_M", 17, "Q5_K", head="Q6_K", more=_SOME),
    Recipe("Q6_K", 18, "Q6_K"),
)
RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _TABLE})
ALIASES = {"Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}  # as in llama.cpp


def find_recipe(to: str) -> Recipe:
    """The type of this name, in upper or lower case; UsageError lists those that a file can be written in."""
    name = to.upper()
    found = RECIPES.get(ALIASES.get(name, name))
    if found is None:
        raise UsageError(f"type {to!r} is unknown; expected one of {', '.join(RECIPES)}.")
    return found


def choose_formats(slots: Iterable[Slot], recipe: Recipe) -> tuple[dict[str, Format], list[str]]:
    """The format of each tensor of a file, by its name in GGUF, and a note about those that fell back to another.

    `slots` are the tensors that the file has, blocks in their order: without a head, the embedding is taken for one.
    """
    slots = list(slots)
    wanted = _wanted(slots, recipe)
    chosen = {slot.gguf: _fitting(find_format(wanted[slot.name]), slot.shape[-1]) for slot in slots}
    fallen: dict[tuple[int, str], list[str]] = {}
    for slot in slots:
        before, after = find_format(wanted[slot.name]), chosen[slot.gguf]
        if before != after:
            fallen.setdefault((before.block_size, after.name), []).append(slot.gguf)
    return chosen, [_note(size, name, tensors) for (size, name), tensors in fallen.items()]


def file_type_metadata(recipe: Recipe) -> dict[str, Value]:
    """The keys that say what formats a file's matrices are in."""
    return {
        "general.file_type": u32(recipe.file_type),
        "general.quantization_version": u32(QUANTIZATION_VERSION),
    }


def _wanted(slots: list[Slot], recipe: Recipe) -> dict[str, str]:
    """The format's name of each slot, by the slot's, as if all rows were whole blocks."""
    names = {slot.name for slot in slots}
    head = HEAD if HEAD in names else EMBEDDING
    wanted = {slot.name: "F32" if slot.always_f32 else recipe.format for slot in slots}
    for roles, (form, which) in recipe.more.items():
        named = [name for name in wanted if name.endswith(roles)]  # in the order of the blocks
        wanted |= {name: form for i, name in enumerate(named) if which(i, len(named))}
    if recipe.head and head in wanted:
        wanted[head] = recipe.head
    return wanted


def _fitting(form: Format, cols: int) -> Format:
    """`form`, or the first of its fallbacks whose quant blocks divide a row."""
    while cols % form.block_size:
        form = find_format(FALLBACKS.get(form.name, LAST_RESORT))
    return form


def _note(size: int, name: str, tensors: list[str]) -> str:
    listed = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
    return f"rows that are not whole blocks of {size} are {name}: {listed}."
