"""Real vocabularies: the models' own ids, any text there and back, any ids streamed, both forms of a GGUF file."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from starscope.errors import TokenizerError
from starscope.gguf import Value, read_gguf, write_gguf
from starscope.tokenizer import Tokenizer, TokenType
from starscope.tokenizer.vocabulary import Contents
from support.vocabularies import NAMES, Packed, gguf_metadata, packed_json, read_ids, read_packed, read_texts, symbols


@cache
def from_gguf(name: str) -> Tokenizer:
    """The tokenizer of a vocabulary file, which is read back from the disk."""
    return from_metadata(gguf_metadata(read_packed(name)))


def from_metadata(metadata: dict[str, Value]) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_gguf(path, metadata, [])
        with read_gguf(path) as file:
            return Tokenizer.from_gguf(file)


@cache
def library(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(packed_json(read_packed(name))))


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder with the tokenizer.json of the vocabulary."""
    path = tmp_path_factory.mktemp(name)
    end = read_packed(name).tokens[read_packed(name).end]
    (path / "tokenizer.json").write_text(json.dumps(packed_json(read_packed(name))), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": end, "eos_token": end, "unk_token": end}))
    return path


def test_every_text_gives_the_ids_of_the_models_own_tokenizer(name: str) -> None:
    texts, ids = read_texts(), read_ids(name)
    assert len(texts) == len(ids) == 46
    for text, expected in zip(texts, ids, strict=True):
        assert from_gguf(name).encode(text) == expected, repr(text)
        assert from_gguf(name).decode(expected) == text


def test_a_tokenizer_json_gives_the_same_ids_and_metadata_as_the_vocabulary_file(name: str, folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    for text, expected in zip(read_texts(), read_ids(name), strict=True):
        assert tokenizer.encode(text) == expected, repr(text)
    written, packed = tokenizer.to_metadata(len(read_packed(name).tokens)), gguf_metadata(read_packed(name))
    for key in ("tokens", "merges", "bos_token_id", "eos_token_id", "unknown_token_id"):
        assert written[f"tokenizer.ggml.{key}"] == packed[f"tokenizer.ggml.{key}"], key


ANY_TEXT = (
    st.text()
    | st.text(st.sampled_from(" \n\t0123456789½²abcΩé中😀'.!_<>|"))
    | st.binary().map(lambda data: data.decode("utf-8", "replace"))
)


@given(text=ANY_TEXT)
@settings(max_examples=300)
def test_any_text_comes_back(text: str) -> None:
    tokenizer = from_gguf("gpt-2")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, special=True)) == text


@given(text=ANY_TEXT)
@example("a\U00040000")
@example("\U0007ffff")
@example("\U0003ffff\U00080000")
@settings(max_examples=300)
def test_a_text_comes_back_or_is_refused_for_a_byte_that_the_vocabulary_lacks(text: str) -> None:
    """StarCoder's training text never held the byte 0xF1, which begins the characters U+40000 to U+7FFFF."""
    tokenizer = from_gguf("refact")
    if any(0x40000 <= ord(character) < 0x80000 for character in text):
        with pytest.raises(TokenizerError, match="the byte 0xF1, for which the vocabulary has no token"):
            tokenizer.encode(text)
    else:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=ANY_TEXT)
@settings(max_examples=200)
def test_ids_are_those_of_the_library_that_reads_the_tokenizer_json(text: str) -> None:
    lost = any(0x40000 <= ord(character) < 0x80000 for character in text)
    for name in NAMES if not lost else ("gpt-2",):
        expected = library(name).encode(text, add_special_tokens=False).ids
        assert from_gguf(name).encode(text, special=True) == expected


IDS = st.lists(st.integers(0, 49_151), max_size=60)


@given(ids=IDS)
@example([0, 142, 231, 231, 0])
@settings(max_examples=300)
def test_streamed_text_is_the_whole_text(ids: list[int]) -> None:
    tokenizer = from_gguf("starcoder")
    stream = tokenizer.stream()
    parts = [stream.push(token_id) for token_id in ids]
    assert "".join([*parts, stream.finish()]) == tokenizer.decode(ids)
    assert stream.finish() == ""


@given(text=ANY_TEXT)
def test_a_stream_gives_each_character_out_with_its_last_byte(text: str) -> None:
    tokenizer = from_gguf("gpt-2")
    stream, ids = tokenizer.stream(), tokenizer.encode(text)
    shown = ""
    for number, token_id in enumerate(ids, start=1):
        shown += stream.push(token_id)
        whole = b"".join(map(tokenizer.token_bytes, ids[:number]))
        assert shown == whole.decode("utf-8", "ignore")
    assert stream.finish() == ""


@given(ids=IDS)
def test_decoded_text_is_the_librarys(ids: list[int]) -> None:
    expected = library("starcoder").decode(ids, skip_special_tokens=False)
    assert from_gguf("starcoder").decode(ids) == expected


SPECIAL = st.lists(st.sampled_from(read_packed("refact").special) | st.text(max_size=5)).map("".join)


@given(text=SPECIAL.filter(lambda text: not any(0x40000 <= ord(character) < 0x80000 for character in text)))
def test_text_becomes_control_tokens_only_on_request(text: str) -> None:
    tokenizer = from_gguf("refact")
    control = set(range(len(read_packed("refact").special)))
    plain, parsed = tokenizer.encode(text), tokenizer.encode(text, special=True)
    assert not control & set(plain)
    assert tokenizer.decode(plain) == tokenizer.decode(parsed) == text
    assert parsed == library("refact").encode(text, add_special_tokens=False).ids


def test_control_tokens_are_decoded_as_their_text() -> None:
    tokenizer = from_gguf("refact")
    ids = tokenizer.encode("<fim_prefix>def <fim_suffix>\n<fim_middle>", special=True)
    assert [token_id for token_id in ids if token_id < 19] == [1, 3, 2]
    assert tokenizer.decode(ids) == "<fim_prefix>def <fim_suffix>\n<fim_middle>"


def test_infilling_and_end_tokens_are_found_by_their_spelling() -> None:
    starcoder_1, starcoder_2, gpt2 = map(from_gguf, ("refact", "starcoder", "gpt-2"))
    for tokenizer, repo, separator in ((starcoder_1, 18, 5), (starcoder_2, 5, 6)):
        fim = tokenizer.fim
        assert fim is not None
        assert (fim.prefix, fim.suffix, fim.middle, fim.pad, fim.repo, fim.separator) == (1, 3, 2, 4, repo, separator)
        assert tokenizer.stop_ids == {0, 4}
        assert tokenizer.infill_stop_ids == {0, 4, repo, separator}
    assert gpt2.fim is None
    assert gpt2.stop_ids == gpt2.infill_stop_ids == {50256}


def test_padding_is_no_text_and_no_text_is_padding() -> None:
    """The file calls its padding user-defined, as converters did."""
    tokenizer = from_gguf("refact")
    assert tokenizer.vocabulary[49_200].type == TokenType.USER_DEFINED
    assert tokenizer.decode([32, 49_200, 33]) == tokenizer.decode([32, 33])
    assert tokenizer.piece(49_200) == "[PAD49200]"
    assert max(tokenizer.encode("[PAD49200]", special=True)) < 49_152


def source_form(name: str, path: Path) -> Path:
    """The file that the first StarCoder converter wrote: raw bytes, every type normal, no pre-tokenizer."""
    from gguf import GGUFWriter

    packed = read_packed(name)
    byte = {symbol: value for value, symbol in enumerate(symbols())}
    writer = GGUFWriter(path, "starcoder")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([bytes(byte[symbol] for symbol in token) for token in packed.tokens])
    writer.add_token_scores([0.0] * len(packed.tokens))
    writer.add_token_types([1] * len(packed.tokens))
    writer.add_token_merges(packed.merges)
    writer.add_bos_token_id(packed.end)
    writer.add_eos_token_id(packed.end)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_raw_bytes_is_read_as_the_same_tokenizer(name: str, tmp_path: Path) -> None:
    with read_gguf(source_form(name, tmp_path / "raw.gguf")) as file:
        raw = Tokenizer.from_gguf(file, default_pre="gpt-2" if name == "gpt-2" else "starcoder")
    for text, ids in zip(read_texts(), read_ids(name), strict=True):
        assert raw.encode(text) == ids, repr(text)
        assert raw.decode(ids) == text
    usual = from_gguf(name)
    assert [token.piece for token in raw.vocabulary] == [token.piece for token in usual.vocabulary]
    special = {token_id for token_id, token in enumerate(raw.vocabulary) if token.type == TokenType.CONTROL}
    assert special == {token_id for token_id, token in enumerate(usual.vocabulary) if token.type == TokenType.CONTROL}
    unused = [token_id for token_id, token in enumerate(raw.vocabulary) if token.type == TokenType.UNUSED]
    assert unused == [token_id for token_id, token in enumerate(usual.vocabulary) if token.piece == f"[PAD{token_id}]"]
    assert (raw.fim, raw.stop_ids) == (usual.fim, usual.stop_ids)


def test_control_tokens_are_recognised_in_a_file_that_calls_every_token_normal(tmp_path: Path) -> None:
    metadata = gguf_metadata(read_packed("refact"))
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = from_metadata(metadata)
    types = [token.type for token in tokenizer.vocabulary]
    assert types[:19] == [TokenType.CONTROL] * 19
    assert set(types[19:49_152]) == {TokenType.NORMAL}
    assert set(types[49_152:]) == {TokenType.UNUSED}


@pytest.mark.parametrize("name", NAMES)
def test_written_metadata_is_read_as_the_same_tokenizer(name: str) -> None:
    first = from_gguf(name)
    rows = first.vocab_size + 3
    written = first.to_metadata(rows)
    again = from_metadata(written)
    assert again.to_metadata(rows) == written
    assert again.vocab_size == rows
    assert (again.bos_id, again.eos_id, again.unk_id, again.pad_id) == (first.bos_id, first.eos_id, first.unk_id, None)
    assert (again.fim, again.stop_ids, again.pre_tokenizer) == (first.fim, first.stop_ids, first.pre_tokenizer)
    assert again.vocabulary[rows - 1].piece == f"[PAD{rows - 1}]"
    assert again.vocabulary[rows - 1].type == TokenType.UNUSED
    for text, ids in zip(read_texts(), read_ids(name), strict=True):
        assert again.encode(text) == ids


def test_the_gguf_package_reads_what_is_written(tmp_path: Path) -> None:
    from gguf import GGUFReader

    packed = read_packed("refact")
    tokens, merges = packed.tokens[:1000], packed.merges[: 1000 - 19 - 242]
    metadata = gguf_metadata(Packed(packed.pre, packed.end, tokens, packed.special, merges))
    write_gguf(tmp_path / "model.gguf", from_metadata(metadata).to_metadata(1010), [])
    fields = {key: field.contents() for key, field in GGUFReader(tmp_path / "model.gguf").fields.items()}
    found = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items() if key.startswith("tokenizer")}
    assert found.pop("tokens") == tokens + [f"[PAD{n}]" for n in range(1000, 1010)]
    assert found.pop("token_type") == [3] * 19 + [1] * 981 + [5] * 10
    assert found.pop("merges") == merges
    assert found == {
        "model": "gpt2", "pre": "refact", "bos_token_id": 0, "eos_token_id": 0, "unknown_token_id": 0,
        "fim_pre_token_id": 1, "fim_suf_token_id": 3, "fim_mid_token_id": 2, "fim_pad_token_id": 4,
        "fim_rep_token_id": 18, "fim_sep_token_id": 5, "add_bos_token": False,
    }  # fmt: skip


def test_nothing_is_decoded_before_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", gguf_metadata(read_packed("starcoder")), [])
    monkeypatch.setattr(Contents, "__post_init__", lambda self: pytest.fail("the vocabulary was decoded"))
    monkeypatch.setattr(Value, "_strings", lambda self: pytest.fail("an array of texts was decoded"))
    with read_gguf(tmp_path / "model.gguf") as file:
        tokenizer = Tokenizer.from_gguf(file)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (49_152, 0, 0, False)
    assert tokenizer.pre_tokenizer == "starcoder"
