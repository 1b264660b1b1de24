"""The tokenizer keys of GGUF files: which win, which are refused, and what is wrong with the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from starscope.errors import InvalidContentError, StarscopeError, TokenizerError, UnsupportedError
from starscope.gguf import Value, ValueType, array, boolean, f32, read_gguf, string, strings, u32, write_gguf
from starscope.tokenizer import FimTokens, Tokenizer, TokenType
from support.vocabularies import symbols

TOKENS = [*symbols(), "in", "<|endoftext|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "A", "B"]
TYPES = [1] * 257 + [3] * 4


def metadata(**changes: Value | None) -> dict[str, Value]:
    """A vocabulary of 261 tokens; `changes` by the end of the key, None to leave one out."""
    found: dict[str, Value | None] = {
        "model": string("gpt2"),
        "pre": string("starcoder"),
        "tokens": strings(TOKENS[:261]),
        "token_type": array(ValueType.INT32, TYPES),
        "merges": strings(["i n"]),
        "eos_token_id": u32(257),
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def read(path: Path, default_pre: str = "gpt-2", **changes: Value | None) -> Tokenizer:
    write_gguf(path / "model.gguf", metadata(**changes), [], force=True)
    with read_gguf(path / "model.gguf") as file:
        return Tokenizer.from_gguf(file, default_pre)


def test_ids_that_the_file_names_win_over_spellings(tmp_path: Path) -> None:
    assert read(tmp_path).fim == FimTokens(258, 259, 260)
    old = {"prefix_token_id": u32(1), "suffix_token_id": u32(2), "middle_token_id": u32(3)}
    assert read(tmp_path, **old).fim == FimTokens(1, 2, 3)
    new = {
        f"fim_{role}_token_id": u32(number)
        for number, role in enumerate(("pre", "suf", "mid", "pad", "rep", "sep"), 10)
    }
    tokenizer = read(tmp_path, **old, **new)
    assert tokenizer.fim == FimTokens(10, 11, 12, pad=13, repo=14, separator=15)
    assert tokenizer.stop_ids == {257, 13}
    assert tokenizer.infill_stop_ids == {257, 13, 14, 15}


def test_every_end_token_of_a_file_ends_a_text(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, eos_token_id=u32(5), eot_token_id=u32(6), eom_token_id=u32(7))
    assert tokenizer.stop_ids == {5, 6, 7, 257}
    assert tokenizer.eos_id == 5


@pytest.mark.parametrize("pre", [None, string("default")])
def test_a_file_without_a_pre_tokenizer_takes_the_callers(tmp_path: Path, pre: Value | None) -> None:
    assert read(tmp_path, pre=pre).pre_tokenizer == "gpt-2"
    assert read(tmp_path, "starcoder", pre=pre).pre_tokenizer == "starcoder"


@pytest.mark.parametrize("name", ["gpt-2", "starcoder", "refact", "smollm", "codeshell"])
def test_names_of_pre_tokenizers_are_kept(tmp_path: Path, name: str) -> None:
    tokenizer = read(tmp_path, pre=string(name))
    assert tokenizer.to_metadata()["tokenizer.ggml.pre"] == string(name)
    joined = read(tmp_path, pre=string(name), tokens=strings([*TOKENS[:261], "12"]), token_type=None,
                  merges=strings(["i n", "1 2"]))  # fmt: skip
    assert joined.encode("12") == ([261] if name == "gpt-2" else [ord("1"), ord("2")])


def test_scores_are_kept_in_the_vocabulary_and_not_written(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, scores=array(ValueType.FLOAT32, [float(n) for n in range(261)]))
    assert tokenizer.vocabulary[7].score == 7.0
    assert "tokenizer.ggml.scores" not in tokenizer.to_metadata()


def test_unknown_tokens_are_hidden_as_control_tokens_are(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, token_type=array(ValueType.INT32, [1] * 257 + [2] * 4))
    assert tokenizer.encode("<fim_prefix>", special=True) == [258]
    assert 258 not in tokenizer.encode("<fim_prefix>")


def test_spaces_and_symbols_inside_added_tokens_are_text(tmp_path: Path) -> None:
    """Their piece is the text itself: é is no byte 0xE9, and a space is a space."""
    tokens = [*TOKENS[:259], "< é >", "Ġ!"]
    tokenizer = read(tmp_path, tokens=strings(tokens), token_type=array(ValueType.INT32, [1] * 257 + [3, 3, 4, 4]))
    assert tokenizer.encode("x< é >in") == [ord("x"), 259, 256]
    assert tokenizer.encode("Ġ!") == [260]
    assert tokenizer.encode(" !") == [0x20, ord("!")]
    assert tokenizer.decode([259, 260]) == "< é >Ġ!"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": string("bert")}, "tokenizer.ggml.model is 'bert'; supported: 'gpt2', byte-level BPE, and 'llama'"),
        (
            {"pre": string("tekken")},
            "tokenizer.ggml.pre is 'tekken'; known: gpt-2, phi-2, mellum, starcoder, refact",
        ),
        ({"add_space_prefix": boolean(True)}, "tokenizer.ggml.add_space_prefix asks for a space before every text"),
        ({"add_eos_token": boolean(True)}, "tokenizer.ggml.add_eos_token asks for an end token after every text"),
        ({"add_sep_token": boolean(True)}, "tokenizer.ggml.add_sep_token asks for a separator"),
        (
            {"remove_extra_whitespaces": boolean(True)},
            "tokenizer.ggml.remove_extra_whitespaces asks for spaces removed",
        ),
    ],
)
def test_other_tokenizers_are_refused_in_words(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(tmp_path, **changes)


def types(*last: int) -> Value:
    return array(ValueType.INT32, [1] * 257 + list(last))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, "has no tokenizer: tokenizer.ggml.model is absent"),
        ({"model": u32(1)}, "tokenizer.ggml.model is <UINT32 1>; expected a text"),
        ({"pre": strings(["a"])}, "tokenizer.ggml.pre is <1 × STRING>; expected a text"),
        ({"tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokens": string("a")}, "tokenizer.ggml.tokens is STRING; expected an array of STRING"),
        (
            {"tokens": array(ValueType.INT32, [1])},
            "tokenizer.ggml.tokens is an array of INT32; expected an array of STRING",
        ),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"merges": strings(["in"])}, "merge 0 is 'in'; expected two pieces with a space"),
        ({"merges": strings(["i n", "n o"])}, "merge 1 joins 'n' and 'o'; the vocabulary has no 'no'"),
        ({"tokens": strings([*TOKENS[:260], "in"])}, "tokens 256 and 260 are both 'in'; expected distinct pieces"),
        ({"tokens": strings([*TOKENS[:260], "\udcff"])}, r"token 260 is b'\\xff', which is not UTF-8"),
        ({"token_type": array(ValueType.INT32, [1, 3])}, "has 261 tokens and 2 token types; expected as many"),
        ({"token_type": types(3, 3, 3, 6)}, "token 260 has type 6; expected 1 to 5"),
        ({"token_type": types(3, 0, 3, 3)}, "token 258 has type 0; expected 1 to 5"),
        (
            {"token_type": array(ValueType.FLOAT32, [1.0])},
            "token_type is an array of FLOAT32; expected an array of INT32",
        ),
        ({"scores": array(ValueType.FLOAT32, [1.0])}, "has 261 tokens and 1 scores"),
        ({"eos_token_id": u32(261)}, "the eos token is 261; the vocabulary has 261 tokens"),
        ({"fim_pre_token_id": u32(999)}, "the fim prefix token is 999; the vocabulary has 261 tokens"),
        ({"eot_token_id": u32(999)}, "the end 0 token is 999; the vocabulary has 261 tokens"),
        ({"bos_token_id": f32(1.0)}, "bos_token_id is <FLOAT32 1.0>; expected a token id"),
        ({"add_bos_token": u32(1)}, "add_bos_token is <UINT32 1>; expected true or false"),
        ({"add_bos_token": boolean(True)}, "asks for a bos token before every text and names none"),
    ],
)
def test_contradictions_are_errors_in_words(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidContentError, match=words) as caught:
        read(tmp_path, **changes).encode("in")
    assert isinstance(caught.value, TokenizerError)
    assert str(tmp_path) in str(caught.value)


def test_raw_bytes_that_are_no_text_are_read_in_the_old_form(tmp_path: Path) -> None:
    """Halves of characters, spaces inside special tokens, and a merge that only the re-encoded tokens explain."""
    raw = [bytes([byte]).decode("utf-8", "surrogateescape") for byte in range(256)]
    tokens = [*raw, " in", "<|end of text|>", "<fim-prefix>", "[PAD259]", "é"]
    changes = {"tokens": strings(tokens), "token_type": array(ValueType.INT32, [1] * 261), "eos_token_id": None,
               "merges": strings(["Ġ i", "Ã ©"])}  # fmt: skip
    with pytest.raises(StarscopeError, match="merge 0 joins 'Ġ' and 'i'; the vocabulary has no 'Ġi'"):
        read(tmp_path, **changes).encode(" i")
    tokens[256] = " i"
    tokenizer = read(tmp_path, **changes | {"tokens": strings(tokens)})
    assert tokenizer.encode(" in é\xff") == [256, ord("n"), 32, 260, 0xC3, 0xBF]
    assert tokenizer.decode([256, 0xC3, 0xA9, 257]) == " ié<|end of text|>"
    kinds = [tokenizer.vocabulary[n].type for n in range(256, 261)]
    assert kinds == [TokenType.NORMAL, TokenType.NORMAL, TokenType.CONTROL, TokenType.UNUSED, TokenType.NORMAL]
    named = read(tmp_path, **changes | {"tokens": strings(tokens), "eos_token_id": u32(257)})
    assert named.vocabulary[257].type == TokenType.CONTROL
    assert named.encode("<|end of text|>", special=True) == [257]


def test_raw_bytes_are_recognised_without_merges(tmp_path: Path) -> None:
    raw = [bytes([byte]).decode("utf-8", "surrogateescape") for byte in range(256)]
    tokenizer = read(tmp_path, tokens=strings(raw), token_type=None, merges=strings([]), eos_token_id=None)
    assert tokenizer.encode("a é") == [ord("a"), 0x20, 0xC3, 0xA9]
    plain = read(tmp_path, tokens=strings(symbols()), token_type=None, merges=strings([]), eos_token_id=None)
    assert plain.encode("a é") == [ord("a"), 0x20, 0xC3, 0xA9]
    assert [token.piece for token in plain.vocabulary] == [token.piece for token in tokenizer.vocabulary] == symbols()
