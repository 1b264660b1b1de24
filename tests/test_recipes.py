"""Which format each tensor gets: llama.cpp's choices, block by block."""

from __future__ import annotations

from typing import Any

import pytest
from gguf import LlamaFileType

from starscope.errors import UsageError
from starscope.families.gpt_bigcode import FAMILY
from starscope.family import Slot, make_hparams
from starscope.recipes import RECIPES, choose_formats, file_type_metadata, find_recipe

SHORT = {"Q4_K": "4", "Q5_K": "5", "Q6_K": "6", "Q5_0": "o", "Q5_1": "l", "Q8_0": "8"}
ROLES = (
    "token_embd.weight",
    "attn_qkv.weight",
    "attn_output.weight",
    "ffn_up.weight",
    "ffn_down.weight",
    "output.weight",
)

# What llama_model_quantize of llama.cpp (with ggml 0.25.3) stored, by shape and type: a letter a block, "-" for no such
# tensor, in the order of ROLES. Whole blocks of 256 are: in A all rows, in B the MLP's inner rows, in C all but these,
# in D none. B and C are tied.
LLAMA_CPP = {
    ("A", "Q4_K_S"): "4 55554444444444444444 44444444444444444444 44444444444444444444 55444444444444444444 6",
    ("A", "Q4_K_M"): "4 66446446446446446666 44444444444444444444 44444444444444444444 66446446446446446666 6",
    ("A", "Q5_K_S"): "5 55555555555555555555 55555555555555555555 55555555555555555555 55555555555555555555 6",
    ("A", "Q5_K_M"): "5 66556556556556556666 55555555555555555555 55555555555555555555 66556556556556556666 6",
    ("A", "Q6_K"): "6 66666666666666666666 66666666666666666666 66666666666666666666 66666666666666666666 6",
    ("B", "Q4_K_S"): "8 lllloooooo oooooooooo oooooooooo 5444444444 -",
    ("B", "Q4_K_M"): "8 8oo8oo8o88 oooooooooo oooooooooo 6446446466 -",
    ("B", "Q5_K_S"): "8 llllllllll llllllllll llllllllll 5555555555 -",
    ("B", "Q5_K_M"): "8 8ll8ll8l88 llllllllll llllllllll 6556556566 -",
    ("B", "Q6_K"): "8 8888888888 8888888888 8888888888 6666666666 -",
    ("C", "Q4_K_S"): "6 55554444444 44444444444 44444444444 loooooooooo -",
    ("C", "Q4_K_M"): "6 64464464466 44444444444 44444444444 8oo8oo8oo88 -",
    ("C", "Q5_K_S"): "6 55555555555 55555555555 55555555555 lllllllllll -",
    ("C", "Q5_K_M"): "6 65565565566 55555555555 55555555555 8ll8ll8ll88 -",
    ("C", "Q6_K"): "6 66666666666 66666666666 66666666666 88888888888 -",
    ("D", "Q4_K_S"): "o lll ooo ooo ooo 8",
    ("D", "Q4_K_M"): "o oo8 ooo ooo oo8 8",
    ("D", "Q5_K_S"): "l lll lll lll lll 8",
    ("D", "Q5_K_M"): "l ll8 lll lll ll8 8",
    ("D", "Q6_K"): "8 888 888 888 888 8",
}  # fmt: skip


def slots(*, tied: bool, layers: int, hidden: int, inner: int) -> list[Slot]:
    sizes = {
        "context_length": 128, "hidden_size": hidden, "num_layers": layers, "intermediate_size": inner, "num_heads": 4,
        "num_kv_heads": 1, "norm_epsilon": 1e-5, "activation": "gelu", "vocab_size": 320,
    }  # fmt: skip
    hp = make_hparams(FAMILY, sizes)
    return [slot for slot in FAMILY.slots(hp) if not (tied and slot.name == "lm_head.weight")]


SHAPES: dict[str, dict[str, Any]] = {
    "A": {"tied": False, "layers": 20, "hidden": 256, "inner": 512},
    "B": {"tied": True, "layers": 10, "hidden": 288, "inner": 512},
    "C": {"tied": True, "layers": 11, "hidden": 256, "inner": 1056},
    "D": {"tied": False, "layers": 3, "hidden": 288, "inner": 544},
}


@pytest.mark.parametrize(("shape", "name"), LLAMA_CPP)
def test_every_tensor_of_a_mixture_has_the_format_that_llama_cpp_gives_it(shape: str, name: str) -> None:
    formats, _ = choose_formats(slots(**SHAPES[shape]), find_recipe(name))
    found = [
        "".join(SHORT[form.name] for tensor, form in formats.items() if f".{tensor}".endswith(f".{role}")) or "-"
        for role in ROLES
    ]
    assert " ".join(found) == LLAMA_CPP[shape, name]
    others = {form.name for tensor, form in formats.items() if not tensor.endswith(ROLES)}
    assert others == {"F32"}


def test_a_format_is_that_of_every_matrix() -> None:
    for name in ("F16", "Q8_0", "Q4_0", "Q6_K"):
        formats, notes = choose_formats(slots(**SHAPES["A"]), find_recipe(name))
        assert {form.name for tensor, form in formats.items() if tensor.endswith(ROLES)} == {name}
        assert formats["position_embd.weight"].name == formats["blk.0.attn_qkv.bias"].name == "F32"
        assert notes == []


def test_what_falls_back_is_noted_by_format() -> None:
    _, notes = choose_formats(slots(**SHAPES["B"]), find_recipe("q4_k_m"))
    assert notes == [
        "rows that are not whole blocks of 256 are Q8_0: token_embd.weight, blk.0.attn_qkv.weight, "
        "blk.3.attn_qkv.weight and 3 more.",
        "rows that are not whole blocks of 256 are Q5_0: blk.0.attn_output.weight, blk.0.ffn_up.weight, "
        "blk.1.attn_qkv.weight and 22 more.",
    ]


@pytest.mark.parametrize("name", ["Q4_K_S", "Q5_K_M", "Q6_K", "Q4_0"])
def test_rows_that_are_not_whole_blocks_of_32_either_are_f16(name: str) -> None:
    formats, notes = choose_formats(slots(tied=True, layers=2, hidden=48, inner=192), find_recipe(name))
    assert formats["token_embd.weight"].name == formats["blk.0.attn_qkv.weight"].name == "F16"
    assert formats["blk.0.ffn_down.weight"].name == {"Q4_K_S": "Q5_0", "Q5_K_M": "Q5_1", "Q6_K": "Q8_0"}.get(name, name)
    assert any(note.startswith("rows that are not whole blocks of") and "are F16: token_embd" in note for note in notes)


def test_the_number_of_a_type_is_llama_cpps() -> None:
    for name, recipe in RECIPES.items():
        assert LlamaFileType(recipe.file_type).name == f"{'ALL' if name == 'F32' else 'MOSTLY'}_{name}"
        assert file_type_metadata(recipe)["general.file_type"].data == recipe.file_type
        assert file_type_metadata(recipe)["general.quantization_version"].data == 2


def test_a_type_is_found_in_any_case_and_q4_k_is_its_medium_mixture() -> None:
    assert find_recipe("q4_K_m") is find_recipe("Q4_K") is RECIPES["Q4_K_M"]
    assert find_recipe("q5_k") is RECIPES["Q5_K_M"]


@pytest.mark.parametrize("name", ["q3_k", "", " "])
def test_a_type_that_there_is_not_is_named_beside_those_that_there_are(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^type '{name}' is unknown; expected one of F32, .*Q5_K_M, Q6_K\.$"):
        find_recipe(name)
