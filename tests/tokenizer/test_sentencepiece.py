"""SentencePiece vocabularies: LLaMA's own ids, any vocabulary against SentencePiece itself, texts there and back."""

from __future__ import annotations

import json
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from starscope.errors import TokenizerError
from starscope.gguf import boolean, read_gguf, write_gguf
from starscope.tokenizer import Tokenizer, TokenType
from support.sentencepieces import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    head,
    metadata,
    model_file,
    number,
    small_pieces,
    text,
)
from support.vocabularies import llama_metadata, read_ids, read_llama, read_texts

TEXTS = st.text() | st.text(st.sampled_from(" \n\t0aeinrst()=:_.'▁<>é中黃😀\0"), max_size=60)


def from_metadata(keys: dict[str, Any]) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_gguf(path, keys, [])
        with read_gguf(path) as file:
            return Tokenizer.from_gguf(file)


@cache
def llama() -> Tokenizer:
    return from_metadata(llama_metadata())


@cache
def llama_pieces() -> list[tuple[str, float, int]]:
    return list(zip(*read_llama(), strict=True))


@cache
def oracle() -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=model_file(llama_pieces()))


@cache
def library() -> tokenizers.Tokenizer:
    """The tokenizer.json that LLaMA's vocabulary is exported as."""
    return tokenizers.Tokenizer.from_str(json.dumps(llama().to_files()["tokenizer.json"]))


# LLaMA's vocabulary


def test_every_text_gives_the_ids_of_llamas_own_tokenizer() -> None:
    texts, ids = read_texts(), read_ids("llama-spm")
    assert len(texts) == len(ids) == 46
    for one, expected in zip(texts, ids, strict=True):
        assert llama().encode(one) == expected, repr(one)
        assert llama().decode(expected) == one
        assert library().encode(one, add_special_tokens=False).ids == expected


@given(one=TEXTS)
@settings(max_examples=400, deadline=None)
def test_ids_and_texts_are_those_of_sentencepiece(one: str) -> None:
    ids = llama().encode(one)
    assert ids == oracle().encode(one)
    assert llama().decode(ids) == one.replace("▁", " ")  # as every reader of these vocabularies takes that character


@given(count=st.integers(0, 70), end=st.sampled_from(["", "x", "\n", "\n  y"]))
def test_runs_of_spaces_whose_pieces_share_one_score_are_joined_as_sentencepiece_joins_them(
    count: int, end: str
) -> None:
    assert llama().encode(" " * count + end) == oracle().encode(" " * count + end)


@given(one=TEXTS)
@settings(max_examples=200, deadline=None)
def test_the_exported_tokenizer_json_gives_the_same_ids(one: str) -> None:
    assert library().encode(one, add_special_tokens=False).ids == llama().encode(one)


@given(ids=st.lists(st.integers(0, 31_999), max_size=40))
@example([1, 29871, 29871, 3])
@example([226, 187, 190, 226])
@settings(max_examples=200)
def test_streamed_text_is_the_whole_text(ids: list[int]) -> None:
    stream = llama().stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == llama().decode(ids)
    stream = llama().stream(after=[1, 450])
    going_on = b"".join(map(llama().token_bytes, ids)).decode("utf-8", "replace")
    assert "".join([*map(stream.push, ids), stream.finish()]) == going_on


def test_the_space_before_a_text_is_no_text() -> None:
    tokenizer = llama()
    hello = tokenizer.encode("Hello")
    assert [tokenizer.vocabulary[token_id].piece for token_id in hello] == ["▁Hello"]
    assert tokenizer.decode(hello) == tokenizer.decode([1, *hello]).removeprefix("<s>") == "Hello"
    assert tokenizer.decode([*hello, *hello]) == "Hello Hello"
    assert tokenizer.spelled("Hello") == " Hello"
    assert tokenizer.spelled("") == ""
    assert tokenizer.encode("") == []
    assert [tokenizer.piece(token_id) for token_id in tokenizer.encode("é\n中😀")] == [
        " é", "\n", "中", r"\xf0", r"\x9f", r"\x98", r"\x80",
    ]  # fmt: skip


def test_a_text_that_goes_on_gets_no_space_before_it() -> None:
    tokenizer = llama()
    assert tokenizer.encode("Hello", begins=False) == [10994]
    assert tokenizer.encode("☺Hello")[2:] == [10994]  # the reference's way to say so
    stream = tokenizer.stream(after=[1])
    assert stream.push(15043) == "Hello"
    assert stream.push(15043) == " Hello"
    stream = tokenizer.stream(after=[1, 450])
    assert stream.push(15043) == " Hello"


def test_a_stream_leaves_out_bytes_that_repeat_a_prompt_and_no_space_after_them() -> None:
    stream = llama().stream(after=[1])
    assert stream.push(15043, skip=6) == ""
    assert stream.push(15043) == " Hello"
    assert stream.finish() == ""
    assert stream.push(15043) == "Hello"


@given(parts=st.lists(st.sampled_from(["<s>", "</s>", "<unk>", "a", " b", "<0x0A>", "\n"]), max_size=8))
def test_text_becomes_control_tokens_only_on_request(parts: list[str]) -> None:
    one = "".join(parts)
    plain, parsed = llama().encode(one), llama().encode(one, special=True)
    assert not {0, 1, 2} & set(plain)
    assert plain == oracle().encode(one)
    assert [token_id for token_id in parsed if token_id < 3] == [
        {"<unk>": 0, "<s>": 1, "</s>": 2}[part] for part in parts if part in ("<unk>", "<s>", "</s>")
    ]
    assert parsed == library().encode(one, add_special_tokens=False).ids


def test_a_space_comes_before_every_text_between_special_tokens() -> None:
    """What llama.cpp does, and transformers by the tokenizer.json that this vocabulary was published with."""
    assert llama().encode("<s>a</s>a", special=True) == [1, 263, 2, 263]


def test_a_line_of_a_hundred_thousand_characters_is_a_matter_of_seconds() -> None:
    """Joining by going through the text again for every pair would take hours."""
    for one in ("ab(" * 33_333, "a" * 100_000, " " * 100_000, "é😀" * 50_000):
        begin = time.perf_counter()
        ids = llama().encode(one)
        assert time.perf_counter() - begin < 20, one[:4]
        assert llama().decode(ids) == one


def test_metadata_is_written_as_it_was_read() -> None:
    tokenizer, keys = llama(), llama_metadata()
    written = tokenizer.to_metadata()
    assert written.pop("tokenizer.ggml.add_space_prefix") == boolean(True)
    expected = {key: value for key, value in keys.items() if key.startswith("tokenizer.")}
    del expected["tokenizer.ggml.add_eos_token"]
    assert written == expected
    again = from_metadata(tokenizer.to_metadata(32_007))
    assert again.vocab_size == 32_007
    assert again.vocabulary[32_006].type == TokenType.UNUSED
    assert again.encode("def f(x):\n    return x") == tokenizer.encode("def f(x):\n    return x")
    assert again.decode([32_006, 15043]) == " Hello"


@pytest.mark.parametrize("name", ["tokenizer_json", "tokenizer_model", "both"])
def test_a_folder_gives_the_ids_and_the_metadata_of_the_vocabulary_file(name: str, tmp_path: Path) -> None:
    files = llama().to_files()
    if name != "tokenizer_model":
        for file, content in files.items():
            (tmp_path / file).write_text(json.dumps(content), encoding="utf-8")
    if name != "tokenizer_json":
        (tmp_path / "tokenizer.model").write_bytes(model_file(llama_pieces()))
    tokenizer = Tokenizer.from_folder(tmp_path)
    for one, ids in zip(read_texts(), read_ids("llama-spm"), strict=True):
        assert tokenizer.encode(one) == ids, repr(one)
        assert tokenizer.decode(ids) == one
    assert tokenizer.add_bos
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.stop_ids) == (1, 2, 0, {2})
    written, expected = tokenizer.to_metadata(), llama().to_metadata()
    if name == "tokenizer_json":  # which has no scores; those that are made of its merges join the same pieces
        del expected["tokenizer.ggml.scores"]
        again = from_metadata(written)
        for one, ids in zip(read_texts(), read_ids("llama-spm"), strict=True):
            assert again.encode(one) == ids, repr(one)
        assert again.encode(" " * 50) == llama().encode(" " * 50)
    assert {key: written[key] for key in expected} == expected


def test_transformers_reads_the_exported_files_as_the_same_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for file, content in llama().to_files().items():
        (tmp_path / file).write_text(json.dumps(content), encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for one, ids in zip(read_texts(), read_ids("llama-spm"), strict=True):
        assert theirs(one)["input_ids"] == [1, *ids]
        assert theirs.decode(ids) == one
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (1, 2, 0)


# Any vocabulary


@st.composite
def vocabularies(draw: st.DrawFn) -> list[tuple[str, float, int]]:
    """Pieces of few characters, so that many ways lead to each, and scores of which many are equal."""
    letters = "▁ab\n"
    joined = draw(st.lists(st.text(letters, min_size=2, max_size=5), unique=True, max_size=14))
    if draw(st.booleans()):
        joined = [piece for piece in joined if "▁" not in piece.lstrip("▁")]
    scores = st.sampled_from([-1.0, -2.0, -3.0, -4.5])
    return [*head(), *((piece, draw(scores), NORMAL) for piece in [*letters[: draw(st.integers(2, 4))], *joined])]


@given(pieces=vocabularies(), one=st.text("ab \nc", max_size=30), space=st.booleans())
@settings(max_examples=250, deadline=None)
def test_pieces_are_joined_as_sentencepiece_joins_them_whatever_the_scores(
    pieces: list[tuple[str, float, int]], one: str, space: bool
) -> None:
    normalizer = text(1, "identity") + number(3, space) + number(4, 0)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model_file(pieces, normalizer=normalizer))
    ours = from_metadata(metadata(pieces, add_space_prefix=boolean(space)))
    ids = ours.encode(one)
    assert ids == theirs.encode(one)
    assert ours.decode(ids) == one
    assert ours.encode(one, begins=False) == _without(ours, one)


def _without(tokenizer: Tokenizer, one: str) -> list[int]:
    """The ids of a text by the same vocabulary without the space before it."""
    keys = tokenizer.to_metadata() | {"tokenizer.ggml.add_space_prefix": boolean(False)}
    return from_metadata(keys).encode(one)


@given(pieces=vocabularies(), one=st.text("ab \nc", max_size=20))
@settings(max_examples=200, deadline=None)
def test_scores_made_of_merges_join_as_those_that_the_merges_were_made_of(
    pieces: list[tuple[str, float, int]], one: str
) -> None:
    """Where no two pieces have one score: merges have an order of their own for ways to one piece. And where each
    character of a piece is one too, as in every trained vocabulary: merges begin at single pieces.
    """
    known = {piece for piece, _, _ in pieces}
    pieces = [row for row in pieces if row[2] != NORMAL or known.issuperset(row[0])]
    pieces = [(piece, -float(i), kind) for i, (piece, _, kind) in enumerate(pieces)]
    ours = from_metadata(metadata(pieces))
    with tempfile.TemporaryDirectory() as folder:
        for file, content in ours.to_files().items():
            (Path(folder) / file).write_text(json.dumps(content), encoding="utf-8")
        read = Tokenizer.from_folder(folder)
    again = from_metadata(read.to_metadata())
    assert again.encode(one) == ours.encode(one)


def test_extra_spaces_are_removed_where_the_vocabulary_asks_for_that(tmp_path: Path) -> None:
    normalizer = text(1, "identity") + number(4, 1)
    (tmp_path / "tokenizer.model").write_bytes(model_file(small_pieces(), normalizer=normalizer))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = Tokenizer.from_folder(tmp_path)
    again = from_metadata(ours.to_metadata())
    for one in ("  in   def ", "in", "   ", " \n in"):
        assert ours.encode(one) == again.encode(one) == theirs.encode(one), repr(one)


def test_user_defined_tokens_are_found_before_anything_is_joined() -> None:
    pieces = [*small_pieces(), ("<tool>", 0.0, USER_DEFINED), ("  ab", 0.0, USER_DEFINED), ("<end>", 0.0, CONTROL)]
    tokenizer = from_metadata(metadata(pieces))
    tool = len(pieces) - 3
    assert tokenizer.encode("in<tool>in  ab") == [261, tool, 261, tool + 1]
    assert tokenizer.encode("<end>")[0] != tool + 2
    assert tokenizer.encode("<end>", special=True) == [tool + 2]
    assert tokenizer.decode([tool + 1, 261]) == " ab in"


def test_padding_and_unused_ids_are_no_text() -> None:
    pieces = [*small_pieces(), ("[PAD275]", 0.0, UNUSED)]
    tokenizer = from_metadata(metadata(pieces))
    assert tokenizer.decode([261, 275, 261]) == "in in"
    assert 275 not in tokenizer.encode("[PAD275]", special=True)


def test_bytes_without_a_token_are_refused() -> None:
    pieces = [piece for piece in small_pieces() if piece[0] not in ("<0x0A>", "<0xC3>")]
    tokenizer = from_metadata(metadata(pieces))
    with pytest.raises(TokenizerError, match=r"holds the byte 0x0A \('\\n'\), for which the vocabulary has no token"):
        tokenizer.encode("in\nin")
    with pytest.raises(TokenizerError, match="holds the byte 0xC3, for which"):
        tokenizer.encode("é")
    with pytest.raises(TokenizerError, match="half of a surrogate pair"):
        tokenizer.encode("\ud800")


def test_byte_tokens_are_found_for_healing_and_control_tokens_are_not() -> None:
    tokenizer = from_metadata(metadata(small_pieces()))
    assert tokenizer.agreeing_ids(b" i") == [35, 261, 267]
    assert [tokenizer.token_bytes(token_id) for token_id in (35, 261, 267)] == [b" ", b" in", b" "]


@given(one=TEXTS)
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back_from_a_vocabulary_of_bytes(one: str) -> None:
    assume("▁" not in one)
    tokenizer = small()
    assert tokenizer.decode(tokenizer.encode(one)) == one


@cache
def small() -> Tokenizer:
    return from_metadata(metadata(small_pieces()))
