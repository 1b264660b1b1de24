"""Vocabularies of characters, and those that exist: they come back the same from every file that holds them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starscope.errors import InputError, InvalidContentError, StarscopeError, TokenizerError, UnsupportedError
from starscope.gguf import read_gguf, string, write_gguf
from starscope.tokenizer import Tokenizer
from starscope.tokenizer.vocabulary import FimTokens
from starscope.train.data import open_tokens, write_tokens
from starscope.train.vocabularies import (
    BPE,
    SPECIAL_TOKENS,
    character_vocabulary,
    find_end_of_text,
    find_fim,
    open_tokenizer,
    save_vocabulary,
    vocabulary_digest,
)
from support.sentencepieces import metadata, small_pieces
from support.training import DOCUMENTS, VOCAB_SIZE, tiny_bpe

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak. 1623 'tis\t"


def saved(folder: Path, characters: str, *, fim: bool = False) -> Tokenizer:
    save_vocabulary(character_vocabulary(characters, fim=fim), folder)
    return Tokenizer.from_folder(folder)


def through_gguf(tokenizer: Tokenizer, path: Path) -> Tokenizer:
    write_gguf(path, {"general.architecture": string("starcoder"), **tokenizer.to_metadata()}, [], force=True)
    return open_tokenizer(path)


def test_a_text_of_ascii_has_a_token_a_character_and_the_end_of_text(tmp_path):
    tokenizer = saved(tmp_path, TEXT)
    assert tokenizer.vocab_size == len(set(TEXT)) + 1
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT)
    assert [tokenizer.decode([token]) for token in ids] == list(TEXT)
    assert find_end_of_text(tokenizer, "it") == 0
    assert find_fim(tokenizer, 0) is None


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=60), st.data())
def test_any_characters_have_a_token_each_in_any_order(tmp_path_factory, text, data):
    tokenizer = saved(tmp_path_factory.mktemp("chars"), text, fim=True)
    other = "".join(data.draw(st.lists(st.sampled_from(text), max_size=80)))
    assert [tokenizer.decode([token]) for token in tokenizer.encode(other)] == list(other)


def test_a_vocabulary_of_characters_is_the_same_from_gguf_and_from_a_folder(tmp_path):
    tokenizer = saved(tmp_path / "a", TEXT + "".join(DOCUMENTS), fim=True)
    gguf = through_gguf(tokenizer, tmp_path / "a.gguf")
    (tmp_path / "b").mkdir()
    for name, content in gguf.to_files().items():
        (tmp_path / "b" / name).write_text(json.dumps(content))
    again = open_tokenizer(tmp_path / "b" / "tokenizer.json")
    for text in (*DOCUMENTS, TEXT):
        assert gguf.encode(text) == again.encode(text) == tokenizer.encode(text)
        assert gguf.decode(gguf.encode(text)) == text
    assert vocabulary_digest(gguf) == vocabulary_digest(tokenizer) == vocabulary_digest(again)
    assert find_fim(gguf, 0) == find_fim(tokenizer, 0) is not None


def test_a_vocabulary_of_ascii_characters_has_no_merges_and_survives_gguf(tmp_path):
    tokenizer = saved(tmp_path, TEXT)
    gguf = through_gguf(tokenizer, tmp_path / "a.gguf")
    with read_gguf(tmp_path / "a.gguf") as file:
        assert file.metadata["tokenizer.ggml.merges"].count == 0
    assert gguf.encode(TEXT) == tokenizer.encode(TEXT)
    assert (gguf.eos_id, gguf.vocab_size) == (0, tokenizer.vocab_size)


def test_transformers_reads_a_vocabulary_of_characters(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = saved(tmp_path, "".join(DOCUMENTS), fim=True)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in DOCUMENTS:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
        assert theirs.decode(ours.encode(text), clean_up_tokenization_spaces=False) == text


def test_a_character_without_a_token_is_named_and_never_dropped(tmp_path):
    tokenizer = saved(tmp_path, "abcé")
    with pytest.raises(
        TokenizerError, match=r"the text holds the byte 0x7A \('z'\), for which the vocabulary has no token"
    ):
        tokenizer.encode("abz")
    assert tokenizer.decode(tokenizer.encode("aé")) == "aé"


def test_text_that_spells_a_special_token_stays_text(tmp_path):
    tokenizer = saved(tmp_path, "<fim_prefix>|endoftext")
    ids = tokenizer.encode("<fim_prefix><|endoftext|>")
    assert len(ids) == len("<fim_prefix><|endoftext|>")
    assert 0 not in ids


def test_a_tokenizer_is_opened_from_gguf_folder_and_file(tmp_path):
    save_vocabulary(tiny_bpe(), tmp_path / "folder")
    folder = open_tokenizer(tmp_path / "folder")
    file = open_tokenizer(tmp_path / "folder" / "tokenizer.json")
    gguf = through_gguf(folder, tmp_path / "vocab.gguf")
    for text in DOCUMENTS:
        assert folder.encode(text) == file.encode(text) == gguf.encode(text) == tiny_bpe().encode(text)
    assert vocabulary_digest(folder) == vocabulary_digest(gguf)
    fim = find_fim(gguf, find_end_of_text(gguf, "it"))
    assert fim is not None
    assert (fim.end_of_text, fim.prefix, fim.middle, fim.suffix, fim.pad) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("missing.gguf", None, StarscopeError, r"missing\.gguf cannot be opened"),
        ("bpee", None, InputError, r"bpee does not exist; expected bpe, chars, a GGUF file, a folder or a tokenizer"),
        ("vocab.txt", "a b c", InputError, r"vocab\.txt is not a tokenizer that starscope knows"),
        ("tokenizer.json", '{"model": {"type": "Unigram"}}', UnsupportedError, "the model is Unigram; supported: BPE"),
    ],
    ids=["no file", "misspelt", "another file", "another kind"],
)
def test_what_is_no_tokenizer_is_refused_before_anything_is_trained(tmp_path, name, content, error, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=message):
        open_tokenizer(tmp_path / name)


def test_sentencepieces_of_a_document_in_parts_are_those_of_the_whole(tmp_path, monkeypatch):
    """And a space before its beginning alone; what is rearranged would get one before every part."""
    write_gguf(tmp_path / "spm.gguf", metadata(small_pieces()), [])
    tokenizer = open_tokenizer(tmp_path / "spm.gguf")
    monkeypatch.setattr("starscope.train.data.MOST_PIECES", 2)
    texts = ["def in in ab", "ab def"]
    pieces = [["def", " in", " in ab"], ["ab", " def"]]
    write_tokens(tmp_path / "a.tokens", pieces, tokenizer, vocab_size=tokenizer.vocab_size, end_of_text=2)
    found = open_tokens(tmp_path / "a.tokens").ids.tolist()
    assert found == [*tokenizer.encode(texts[0]), 2, *tokenizer.encode(texts[1]), 2]
    assert found != [*tokenizer.encode("def"), *tokenizer.encode("in"), *tokenizer.encode(" in ab"), 2]
    spaced = SimpleNamespace(fim=FimTokens(3, 4, 5, pad=6), spelled=tokenizer.spelled)
    assert find_fim(spaced, 2) is None  # type: ignore[arg-type]


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    data = json.loads(tiny_bpe().to_json())
    data["added_tokens"] = []
    renamed = {"<|end|>" if token == "<|endoftext|>" else token: i for token, i in data["model"]["vocab"].items()}
    data["model"]["vocab"] = {token.replace("<|end|>", "<nothing>"): i for token, i in renamed.items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UnsupportedError, match=r"it has no token that ends a text; expected one"):
        find_end_of_text(Tokenizer.from_folder(tmp_path), "it")


def test_the_trained_vocabulary_has_starcoders_structure():
    bpe = tiny_bpe()
    assert bpe.vocab_size == VOCAB_SIZE
    assert [bpe.token_id(token) for token in SPECIAL_TOKENS] == list(range(19))
    assert len(bpe.encode("2024")) == 4  # digits one by one
    text = "x = '<fim_prefix>' # ☃\t\r\n"
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert min(ids) >= 19  # text that spells a special token stays text
    with pytest.raises(InvalidContentError, match="expected 100000"):
        BPE.train(DOCUMENTS, 100_000)


def test_texts_that_are_encoded_together_have_the_ids_of_each_alone(tmp_path):
    tokenizer = saved(tmp_path, "".join(DOCUMENTS))
    texts = [*DOCUMENTS, "", "a"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tiny_bpe().encode_batch(texts) == [tiny_bpe().encode(text) for text in texts]
    with pytest.raises(TokenizerError, match="the text holds the byte 0x7E"):
        tokenizer.encode_batch(["a", "~"])
    with pytest.raises(TokenizerError, match="half of a surrogate pair"):
        tokenizer.encode_batch(["a", "\ud800"])
