"""Infilling with the markers of Code Llama and DeepSeek-Coder: the ids of their own code, roles, ends, hostile text."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from starscope.errors import UnsupportedError
from starscope.gguf import Value, read_gguf, u32, write_gguf
from starscope.infill import infill_prompt
from starscope.tokenizer import FimTokens, Tokenizer
from support.sentencepieces import CONTROL, NORMAL, UNUSED, USER_DEFINED, metadata, model_file
from support.vocabularies import GPT2_PRE, added_token, read_llama, read_packed, whole_json

BOS, PREFIX, SUFFIX, MIDDLE, END = 1, 32_007, 32_008, 32_009, 32_010
MARKERS = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>")
TEXTS = st.text(st.sampled_from(" \n\tdefx():=<>é▁") | st.characters(codec="utf-8"), max_size=30)


def code_llama_pieces(kind: int) -> list[tuple[str, float, int]]:
    """LLaMA's vocabulary and the markers behind it, at Code Llama's ids."""
    between = [(f"[PAD{token_id}]", 0.0, UNUSED) for token_id in range(32_000, PREFIX)]
    markers = [(piece, 0.0, kind) for piece in (*MARKERS[:3], MARKERS[3])]
    return [*zip(*read_llama(), strict=True), *between, *markers]


@cache
def code_llama(kind: int = NORMAL) -> Tokenizer:
    return from_gguf(metadata(code_llama_pieces(kind)))


def from_gguf(keys: dict[str, Value]) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_gguf(path, keys, [])
        with read_gguf(path) as file:
            return Tokenizer.from_gguf(file)


@cache
def reference() -> Any:
    pieces = [(piece, score, kind) for piece, score, kind in zip(*read_llama(), strict=True)]
    return sentencepiece.SentencePieceProcessor(model_proto=model_file(pieces))


def without_space(text: str) -> list[int]:
    """A text without the space before it, as Code Llama's own tokenizer does it."""
    ids: list[int] = reference().encode("☺" + text)[2:]
    return ids


@given(before=TEXTS, after=TEXTS)
@settings(max_examples=150, deadline=None)
def test_prompts_are_those_of_code_llamas_own_code(before: str, after: str) -> None:
    head = reference().encode(before)
    tail = without_space(after)
    psm = infill_prompt(code_llama(), before, after, budget=500)
    spm = infill_prompt(code_llama(), before, after, budget=500, fim_order="spm")
    assert psm.ids == [BOS, PREFIX, *head, SUFFIX, *tail, MIDDLE]
    assert spm.ids == [BOS, PREFIX, SUFFIX, *tail, MIDDLE, *head]


def test_what_fills_the_hole_keeps_its_space() -> None:
    tokenizer = code_llama()
    prompt = infill_prompt(tokenizer, "x =", "\n", budget=50)
    stream = tokenizer.stream(after=prompt.ids)
    assert stream.push(tokenizer.encode("one")[0]) == " one"


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_code_llamas_markers_are_found_by_their_spelling_and_never_come_from_a_text(kind: int) -> None:
    tokenizer = code_llama(kind)
    assert tokenizer.fim == FimTokens(PREFIX, SUFFIX, MIDDLE)
    assert tokenizer.stop_ids == tokenizer.infill_stop_ids == {2, END}
    for text in ("".join(MARKERS), " <PRE> <SUF> <MID> <EOT>", "a ▁<EOT>"):
        ids = tokenizer.encode(text)
        assert max(ids) < 32_000
        assert ids == reference().encode(text)
    assert tokenizer.encode("▁<PRE>x▁<SUF>", special=True)[::2] == [PREFIX, SUFFIX]


def test_roles_that_a_file_names_win(tmp_path: Path) -> None:
    keys = metadata(
        code_llama_pieces(NORMAL), prefix_token_id=u32(300), suffix_token_id=u32(301), middle_token_id=u32(302)
    )
    tokenizer = from_gguf(keys)
    assert tokenizer.fim == FimTokens(300, 301, 302)
    assert 300 not in tokenizer.encode(tokenizer.piece(300))
    assert from_gguf(tokenizer.to_metadata()).fim == FimTokens(300, 301, 302)


@pytest.mark.parametrize("form", ["gguf", "json", "model"])
def test_code_llamas_markers_survive_every_form(form: str, tmp_path: Path) -> None:
    tokenizer = code_llama()
    if form == "gguf":
        again = from_gguf(tokenizer.to_metadata())
    else:
        if form == "json":
            for name, content in tokenizer.to_files().items():
                (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
        else:
            (tmp_path / "tokenizer.model").write_bytes(model_file(code_llama_pieces(NORMAL)))
        again = Tokenizer.from_folder(tmp_path)
    assert again.fim == tokenizer.fim
    assert again.stop_ids == {2, END}
    before, after = "def f(x):\n    return", "\n\nprint(f(1))"
    assert infill_prompt(again, before, after, budget=99) == infill_prompt(tokenizer, before, after, budget=99)


def deepseek_json(**parts: Any) -> dict[str, Any]:
    """Tokens of GPT-2 under DeepSeek-Coder's markers, which its tokenizer.json calls ordinary added tokens."""
    packed = read_packed("gpt-2")
    ids = {token: token_id for token_id, token in enumerate(packed.tokens[:50_256])}
    added = [added_token(50_256 + i, piece, special=i < 2) for i, piece in enumerate(DEEPSEEK)]
    return whole_json(ids, packed.merges, added, pre_tokenizer=GPT2_PRE, **parts)


@cache
def deepseek() -> Tokenizer:
    settings = {"bos_token": DEEPSEEK[0], "eos_token": DEEPSEEK[1], "add_bos_token": True}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(deepseek_json()), encoding="utf-8")
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return Tokenizer.from_folder(folder)


def test_prompts_read_as_deepseek_coder_was_trained() -> None:
    tokenizer = deepseek()
    prompt = infill_prompt(tokenizer, "def f(x):\n", "\n    return y\n", budget=99)
    begin, _, hole, start, end = DEEPSEEK
    assert tokenizer.decode(prompt.ids) == f"{begin}{start}def f(x):\n{hole}\n    return y\n{end}"
    assert prompt.ids == tokenizer.encode(f"{begin}{start}def f(x):\n{hole}\n    return y\n{end}", special=True)
    assert tokenizer.stop_ids == tokenizer.infill_stop_ids == {50_257}
    again = from_gguf(tokenizer.to_metadata())
    assert infill_prompt(again, "def f(x):\n", "\n    return y\n", budget=99) == prompt


def test_a_text_that_spells_deepseek_coders_markers_stays_text() -> None:
    tokenizer = deepseek()
    text = "".join(DEEPSEEK)
    assert max(tokenizer.encode(text)) < 50_256
    assert tokenizer.encode(text, special=True) == [50_256, 50_257, 50_258, 50_259, 50_260]
    assert max(infill_prompt(tokenizer, text, "", budget=999).ids[2:-2]) < 50_256


def test_other_files_and_names_are_refused_where_no_token_names_them() -> None:
    for tokenizer in (code_llama(), deepseek()):
        with pytest.raises(UnsupportedError, match="has no token that names a file"):
            infill_prompt(tokenizer, "a", "b", budget=99, filename="a.py")
