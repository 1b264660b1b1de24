"""Folders of a few tokens: every form of the files, added tokens, and ids there and back."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from starscope.errors import TokenizerError, UnsupportedError
from starscope.tokenizer import Tokenizer, TokenType
from support.checkpoints import make_tokenizer
from support.tokenizer_folders import BOS_TEMPLATE, FIM, MERGES, read, reread, small_json, small_vocab, special, write
from support.vocabularies import BYTE_LEVEL, GPT2_PRE, STARCODER_PRE, added_token, whole_json

# The forms of the files


def test_merges_are_read_as_texts_and_as_pairs(tmp_path: Path) -> None:
    pairs = small_json()
    pairs["model"]["merges"] = [merge.split(" ") for merge in MERGES]
    as_texts, as_pairs = read(tmp_path / "a", tokenizer_json=small_json()), read(tmp_path / "b", tokenizer_json=pairs)
    assert as_texts.encode("def in ##") == as_pairs.encode("def in ##") == [260, 257, 32, 258]
    assert as_texts.to_metadata() == as_pairs.to_metadata()


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("header", ["#version: 0.2", None])
def test_a_first_line_of_merges_that_is_no_header_is_a_merge(tmp_path: Path, header: str | None, ending: str) -> None:
    merges = [*MERGES[2:], *MERGES[:2]]  # "# #" comes first
    text = ending.join([*([header] if header else []), *merges, ""])
    tokenizer = read(tmp_path / "model", vocab_json=small_vocab(), merges_txt=text)
    assert tokenizer.encode("##in") == [258, 256]
    assert tokenizer.pre_tokenizer == "gpt-2"
    assert tokenizer.encode("12") == [ord("1"), ord("2")]


def test_vocab_and_merges_give_the_ids_of_transformers(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    vocab = small_vocab() | {"<|endoftext|>": 261}
    folder = write(
        tmp_path / "model",
        vocab_json=vocab,
        merges_txt="#version: 0.2\n" + "\n".join(MERGES) + "\n",
        added_tokens_json={"<extra one>": 263, "  x": 262},
        special_tokens_map_json={"eos_token": "<|endoftext|>", "additional_special_tokens": ["<extra one>"]},
        tokenizer_config_json={"tokenizer_class": "GPT2Tokenizer"},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = GPT2Tokenizer.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    for text in ("def in ##", "a  x <extra one>b", "<|endoftext|>def 42 é", " in  in\n\tdef"):
        assert ours.encode(text, special=True) == theirs(text)["input_ids"]
        assert ours.decode(theirs(text)["input_ids"]) == text
    assert (ours.bos_id, ours.eos_id, ours.unk_id, ours.vocab_size) == (261, 261, 261, 264)
    assert [ours.vocabulary[n].type for n in (261, 262, 263)] == [3, 4, 3]
    assert 263 not in ours.encode("<extra one>")
    assert 262 in ours.encode("  x")


def test_a_folder_that_transformers_wrote_gives_its_ids(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    make_tokenizer(tmp_path, 300)
    ours, theirs = Tokenizer.from_folder(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    texts = ("def add(a, b):\n    return a + b1234\n", "<fim_prefix>x<fim_suffix> y<fim_middle>", "é中😀 \n\n  ", "")
    for text in texts:
        assert ours.encode(text, special=True) == theirs(text)["input_ids"]
        assert ours.decode(theirs(text)["input_ids"]) == theirs.decode(theirs(text)["input_ids"]) == text
    assert (ours.bos_id, ours.eos_id, ours.unk_id, ours.add_bos) == (0, 0, 0, False)
    assert ours.stop_ids == {0, 4}
    assert ours.pre_tokenizer == "starcoder"


@pytest.mark.parametrize("form", ["prefix", "suffix", "middle"])
@pytest.mark.parametrize("spelling", ["<fim_{}>", "<fim-{}>", "<|fim_{}|>"])
def test_every_spelling_of_the_infilling_tokens_is_found(tmp_path: Path, spelling: str, form: str) -> None:
    names = ("prefix", "suffix", "middle", "pad")
    added = special(261, *map(spelling.format, names), "<|repo_name|>", "<file_sep>", "<|endoftext|>")
    tokenizer = read(tmp_path / "model", tokenizer_json=small_json(added))
    fim = tokenizer.fim
    assert fim is not None
    assert getattr(fim, form) == 261 + names.index(form)
    assert (fim.pad, fim.repo, fim.separator) == (264, 265, 266)
    assert tokenizer.stop_ids == {264, 267}
    assert tokenizer.infill_stop_ids == {264, 265, 266, 267}
    assert reread(tokenizer, tmp_path / "x.gguf").fim == fim


def test_without_all_three_there_is_no_infilling(tmp_path: Path) -> None:
    assert read(tmp_path / "model", tokenizer_json=small_json(special(261, *FIM[:2]))).fim is None


def test_several_end_tokens_are_possible(tmp_path: Path) -> None:
    added = special(261, "<|endoftext|>", "<|end|>", "<|user|>", "<|stop|>")
    tokenizer = read(
        tmp_path / "model",
        tokenizer_json=small_json(added),
        tokenizer_config_json={"eos_token": {"content": "<|endoftext|>"}},
        config_json={"eos_token_id": 261, "bos_token_id": 50_256},
        generation_config_json={"eos_token_id": [261, 264]},
    )
    assert (tokenizer.eos_id, tokenizer.bos_id) == (261, None)
    assert tokenizer.stop_ids == {261, 262, 264}
    again = reread(tokenizer, tmp_path / "x.gguf")
    assert (again.eos_id, again.bos_id) == (261, 261)
    assert again.stop_ids == {261, 262, 264}
    given = Tokenizer.from_folder(tmp_path / "model", {"eos_token_id": 263}, {})
    assert given.stop_ids == {261, 262, 263}


def test_end_tokens_are_written_even_when_no_file_names_one(tmp_path: Path) -> None:
    tokenizer = read(tmp_path / "model", tokenizer_json=small_json())
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (None, {261})
    again = reread(tokenizer, tmp_path / "x.gguf")
    assert (again.bos_id, again.eos_id, again.add_bos) == (261, 261, False)


def test_a_special_token_that_no_vocabulary_has_gets_the_next_id(tmp_path: Path) -> None:
    settings = {"eos_token": "<|endoftext|>", "pad_token": "<pad>", "extra_special_tokens": {"image": "<image>"}}
    files = {"tokenizer_json": small_json([]), "tokenizer_config_json": settings}
    tokenizer = read(tmp_path / "model", **files)
    assert [token.piece for token in tokenizer.vocabulary[261:]] == ["<|endoftext|>", "<pad>", "<image>"]
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (261, 262, 264)
    assert {token.type for token in tokenizer.vocabulary[261:]} == {TokenType.CONTROL}


def test_chat_templates_are_kept(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "{{ a }}"}, {"name": "tool_use", "template": "{{ b }}"}]
    expected = {"default": "{{ a }}", "tool_use": "{{ b }}"}
    settings = {"eos_token": "<|endoftext|>", "chat_template": named}
    tokenizer = read(tmp_path / "model", tokenizer_json=small_json(), tokenizer_config_json=settings)
    assert tokenizer.chat_templates == expected
    assert reread(tokenizer, tmp_path / "x.gguf").chat_templates == expected
    assert read(tmp_path / "model", chat_template_jinja="{{ c }}").chat_templates == {"default": "{{ c }}"}


@pytest.mark.parametrize(
    "pre", [STARCODER_PRE, GPT2_PRE, BYTE_LEVEL, {"type": "Sequence", "pretokenizers": [GPT2_PRE]}]
)
def test_the_pre_tokenizer_is_found_from_its_steps(tmp_path: Path, pre: dict[str, Any]) -> None:
    tokenizer = read(tmp_path / "model", tokenizer_json=small_json(pre_tokenizer=pre, post_processor=BYTE_LEVEL))
    assert tokenizer.pre_tokenizer == ("starcoder" if pre is STARCODER_PRE else "gpt-2")
    assert reread(tokenizer, tmp_path / "x.gguf").pre_tokenizer == tokenizer.pre_tokenizer


@pytest.mark.parametrize(
    ("processor", "settings", "add_bos"),
    [
        (BOS_TEMPLATE, {}, True),
        ({"type": "Sequence", "processors": [BYTE_LEVEL, BOS_TEMPLATE]}, {}, True),
        (BOS_TEMPLATE, {"add_bos_token": False}, False),
        (BOS_TEMPLATE | {"single": BOS_TEMPLATE["single"][1:]}, {}, False),
        (BYTE_LEVEL, {"add_bos_token": True, "bos_token": "<|endoftext|>"}, True),
        (None, {}, False),
    ],
)
def test_whether_bos_is_expected(
    tmp_path: Path, processor: dict[str, Any] | None, settings: dict[str, Any], add_bos: bool
) -> None:
    data = small_json(post_processor=processor)
    tokenizer = read(tmp_path / "model", tokenizer_json=data, tokenizer_config_json=settings)
    for reader in (tokenizer, reread(tokenizer, tmp_path / "x.gguf")):
        assert reader.add_bos is add_bos
        assert reader.bos_id == 261 or not add_bos
        assert 261 not in reader.encode("in")  # the caller adds it


# Added tokens


def test_added_tokens_are_found_as_the_library_finds_them(tmp_path: Path) -> None:
    added = [
        added_token(261, "<|endoftext|>", special=True),
        added_token(262, "<a", special=False),
        added_token(263, "<a b>", special=False),
        added_token(264, "left", special=False, lstrip=True),
        added_token(265, "right", special=False, rstrip=True),
        added_token(266, "word", special=False, single_word=True),
        added_token(267, "b>x", special=False, normalized=False),
        added_token(268, "é ", special=False),
    ]
    tokenizer = read(tmp_path / "model", tokenizer_json=small_json(added))
    library = tokenizers.Tokenizer.from_str(json.dumps(small_json(added)))
    for text in ("<a b>x", "x <a b> <a", "in  left in", "right  in", "words word", "é é in", "<|endoftext|><a b"):
        assert tokenizer.encode(text, special=True) == library.encode(text, add_special_tokens=False).ids, text
    assert tokenizer.decode(tokenizer.encode("né é")) == "né é"
    with pytest.raises(UnsupportedError, match=r"'left' sets lstrip, rstrip or single_word, which a GGUF file cannot"):
        tokenizer.to_metadata()


def test_user_defined_tokens_inside_a_control_tokens_text_are_still_found(tmp_path: Path) -> None:
    added = [added_token(261, "<|sys|>", special=True), added_token(262, "sys", special=False)]
    tokenizer = read(tmp_path / "model", tokenizer_json=small_json(added))
    for reader in (tokenizer, reread(tokenizer, tmp_path / "x.gguf")):
        assert reader.encode("<|sys|>") == [ord("<"), ord("|"), 262, ord("|"), ord(">")]
        assert reader.encode("<|sys|>", special=True) == [261]


def test_merges_never_build_a_control_token(tmp_path: Path) -> None:
    added = [added_token(260, "def", special=True)]  # "de f" is a merge
    tokenizer = read(tmp_path / "model", tokenizer_json=small_json(added))
    assert tokenizer.encode("def") == [259, ord("f")]
    assert tokenizer.encode("def", special=True) == [260]


def test_tokenizer_config_decides_which_added_tokens_are_special(tmp_path: Path) -> None:
    added = [added_token(261, "<|user|>", special=False), added_token(262, "<tool>", special=False)]
    tokenizer = read(
        tmp_path / "model",
        tokenizer_json=small_json(added),
        tokenizer_config_json={"added_tokens_decoder": {"262": {"content": "<tool>", "special": True}}},
        special_tokens_map_json={"additional_special_tokens": ["<|user|>"]},
    )
    assert [token.type for token in tokenizer.vocabulary[261:]] == [TokenType.CONTROL, TokenType.CONTROL]


def test_ids_that_no_token_has_are_unused(tmp_path: Path) -> None:
    tokenizer = read(tmp_path / "model", tokenizer_json=small_json(special(265, "<|endoftext|>")))
    assert tokenizer.vocab_size == 266
    assert [token.piece for token in tokenizer.vocabulary[261:]] == [
        *(f"[PAD{n}]" for n in range(261, 265)),
        "<|endoftext|>",
    ]
    assert tokenizer.vocabulary[262].type == TokenType.UNUSED
    assert tokenizer.decode([262, 265]) == "<|endoftext|>"
    assert tokenizer.encode("[PAD262]", special=True) == [ord(character) for character in "[PAD262]"]


def test_padding_follows_the_added_tokens(tmp_path: Path) -> None:
    tokenizer = read(tmp_path / "model", tokenizer_json=small_json(special(261, "<|endoftext|>", *FIM)))
    padded = reread(tokenizer, tmp_path / "x.gguf", 270)
    assert [token.piece for token in padded.vocabulary[261:]] == [
        "<|endoftext|>",
        *FIM,
        *(f"[PAD{n}]" for n in range(266, 270)),
    ]
    assert len(tokenizer.to_metadata(266)["tokenizer.ggml.tokens"].data) == 266
    with pytest.raises(TokenizerError, match="has 266 tokens, added ones included; the embedding has 265 rows"):
        tokenizer.to_metadata(265)


def test_a_token_spelled_like_the_padding_is_an_error(tmp_path: Path) -> None:
    tokenizer = read(tmp_path / "model", tokenizer_json=small_json(special(261, "[PAD265]")))
    with pytest.raises(TokenizerError, match=r"spelled like the padding from \[PAD262\] on"):
        tokenizer.to_metadata(266)


# Text and ids


def test_a_byte_without_a_token_is_refused_and_never_dropped(tmp_path: Path) -> None:
    vocab = {piece: token_id for piece, token_id in small_vocab().items() if piece != "z"}
    added = [added_token(261, "<zoo>", special=True), added_token(262, "zz", special=False)]
    tokenizer = read(tmp_path / "model", tokenizer_json=whole_json(vocab, MERGES, added))
    assert tokenizer.decode(tokenizer.encode("izzi")) == "izzi"  # inside a token it is no loss
    assert tokenizer.encode("<zoo>", special=True) == [261]
    for text in ("z", "zzz", "<zoo>"):
        with pytest.raises(
            TokenizerError, match=r"the text holds the byte 0x7A \('z'\), for which the vocabulary has no token"
        ):
            tokenizer.encode(text)


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    tokenizer = read(tmp_path / "model", tokenizer_json=small_json())
    with pytest.raises(TokenizerError, match=r"character 2 of the text is U\+D83D, half of a surrogate pair"):
        tokenizer.encode("ab\ud83d")


@pytest.mark.parametrize("token_id", [262, -1, 10**12])
def test_an_id_outside_the_vocabulary_is_an_error(tmp_path: Path, token_id: int) -> None:
    tokenizer = read(tmp_path / "model", tokenizer_json=small_json())
    for use in (lambda: tokenizer.decode([0, token_id]), lambda: tokenizer.stream().push(token_id)):
        with pytest.raises(TokenizerError, match=f"token id {token_id} is outside the vocabulary of 262 tokens"):
            use()


def test_pieces_are_readable(tmp_path: Path) -> None:
    tokenizer = read(tmp_path / "model", tokenizer_json=small_json(special(265, "<|endoftext|>")))
    assert [tokenizer.piece(n) for n in (257, 0xC3, 0x0A, 261, 265)] == [
        " in",
        "\\xc3",
        "\n",
        "[PAD261]",
        "<|endoftext|>",
    ]
    assert [tokenizer.token_bytes(n) for n in (257, 0xC3, 0x0A, 261)] == [b" in", b"\xc3", b"\n", b""]


def test_the_vocabulary_is_a_sequence_of_tokens(tmp_path: Path) -> None:
    vocabulary = read(tmp_path / "model", tokenizer_json=small_json()).vocabulary
    assert len(vocabulary) == len(list(vocabulary)) == 262
    assert vocabulary[257] == vocabulary[-5] == vocabulary[250:258][-1]
    assert (vocabulary[257].piece, vocabulary[257].score, vocabulary[257].type) == ("Ġin", 0.0, TokenType.NORMAL)
    with pytest.raises(IndexError):
        vocabulary[262]
