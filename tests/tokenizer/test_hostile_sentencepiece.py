"""SentencePiece vocabularies that contradict themselves: each is refused in words, or read for what it holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from starscope.errors import StarscopeError, TokenizerError, UnsupportedError
from starscope.gguf import ValueType, array, boolean, f32, read_gguf, strings, u32, write_gguf
from starscope.tokenizer import Tokenizer, TokenType
from starscope.tokenizer.model_file import read_model_file
from support.sentencepieces import BYTE, NORMAL, floating, message, metadata, model_file, number, small_pieces, text
from support.vocabularies import added_token, whole_json

PIECES = small_pieces()
SIZE = len(PIECES)


def read(folder: Path, pieces: list[tuple[str, float, int]] = PIECES, **changes: Any) -> Tokenizer:
    write_gguf(folder / "model.gguf", metadata(pieces, **changes), [], force=True)
    with read_gguf(folder / "model.gguf") as file:
        return Tokenizer.from_gguf(file)


def scores(*last: float) -> Any:
    return array(ValueType.FLOAT32, [0.0] * (SIZE - len(last)) + list(last))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": None}, "has no tokenizer.ggml.scores, which a SentencePiece vocabulary needs"),
        ({"scores": scores(math.nan)}, f"the score of token {SIZE - 1} is nan; expected a number"),
        ({"scores": scores(math.inf, 0.0)}, f"the score of token {SIZE - 2} is inf; expected a number"),
        ({"scores": array(ValueType.FLOAT32, [0.0])}, f"has {SIZE} tokens and 1 scores; expected as many"),
        ({"scores": strings(["a"])}, "scores is an array of STRING; expected an array of FLOAT32"),
        ({"token_type": array(ValueType.INT32, [1])}, f"has {SIZE} tokens and 1 token types; expected as many"),
        ({"token_type": array(ValueType.INT32, [7] * SIZE)}, r"token 0 has type 7; expected 1 to 6\."),
        ({"token_type": array(ValueType.INT32, [6] * SIZE)}, "token 0 is a byte and spelled '<unk>'; expected <0x00>"),
        ({"bos_token_id": u32(SIZE)}, f"the bos token is {SIZE}; the vocabulary has {SIZE} tokens"),
        ({"add_space_prefix": f32(1.0)}, "add_space_prefix is <FLOAT32 1.0>; expected true or false"),
    ],
)
def test_contradictions_are_errors_in_words(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenizerError, match=words) as caught:
        read(tmp_path, **changes).encode("in")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([*PIECES, ("in", -3.0, NORMAL)], f"tokens 260 and {SIZE} are both 'in'; expected distinct pieces"),
        ([*PIECES, ("", -3.0, NORMAL)], f"token {SIZE} is empty; expected some text"),
        ([*PIECES, ("<0x1>", 0.0, BYTE)], f"token {SIZE} is a byte and spelled '<0x1>'"),
        ([*PIECES, ("\udcff", 0.0, NORMAL)], "which is not UTF-8"),
        ([piece for piece in PIECES if piece[0] != "▁"], "has no ordinary token ▁, which stands for a space"),
    ],
)
def test_pieces_that_cannot_be_are_errors_in_words(tmp_path: Path, pieces: list[Any], words: str) -> None:
    with pytest.raises(TokenizerError, match=words):
        read(tmp_path, pieces).encode("in")


@pytest.mark.parametrize("key", ["add_eos_token", "add_sep_token"])
def test_what_would_be_put_behind_a_text_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UnsupportedError, match=f"tokenizer.ggml.{key} asks for"):
        read(tmp_path, **{key: boolean(True)})


def test_a_file_without_types_and_ids_is_read_as_other_readers_take_it(tmp_path: Path) -> None:
    left_out = dict.fromkeys(("token_type", "bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token"))
    tokenizer, usual = read(tmp_path, **left_out), read(tmp_path)
    assert [token.type for token in tokenizer.vocabulary] == [token.type for token in usual.vocabulary]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.add_bos) == (1, 2, 0, True)
    assert tokenizer.encode("in é") == usual.encode("in é")
    assert [note.split(" ")[0] for note in tokenizer.notes] == [
        "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
    ]  # fmt: skip


def test_pieces_that_lead_to_one_another_in_every_way_end(tmp_path: Path) -> None:
    """Every run of one character up to 40 is a piece, all of one score."""
    runs = [("a" * size, -1.0, NORMAL) for size in range(2, 41) if size != 2]
    tokenizer = read(tmp_path, [*PIECES, *runs, ("aa", -1.0, NORMAL)])
    for size in (1, 39, 40, 41, 10_000):
        assert tokenizer.decode(tokenizer.encode("a" * size)) == "a" * size


# tokenizer.model


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x0a\xff\xff\xff\xff\x7f", "a field of .* bytes at byte 6, where 0 are left"),
        (b"\x0a" + b"\xff" * 12, "a number of more than ten bytes"),
        (b"\x0a\x80", "it ends inside a number"),
        (b"\x0b", "wire type 3"),
        (number(1, 5), "field 1 is no message"),
        (message(1, floating(2, 1.0)), "field 1 is absent"),
        (message(1, number(1, 1)), "field 1 is a number"),
        (message(1, text(1, "a") + number(3, 9)), "9 is not a valid TokenType"),
        (message(1, text(1, "a") + message(2, b"xx")), "unpack requires a buffer of 4 bytes"),
        (message(1, message(1, b"\xff")), "can't decode byte 0xff"),
        (b"{}", "wire type"),
        (message(2, number(3, 2)), "it has no pieces"),
    ],
)
def test_files_that_are_no_model_are_errors_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(TokenizerError, match=f"is not a SentencePiece model: .*{words}"):
        Tokenizer.from_folder(tmp_path)


@given(data=st.binary(max_size=60), at=st.integers(0, 10_000))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes, at: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = model_file(PIECES)
    path = tmp_path_factory.getbasetemp() / "any.model"
    for content in (data, whole[: at % len(whole)], whole[: at % len(whole)] + data + whole[at % len(whole) :]):
        path.write_bytes(content)
        try:
            found = read_model_file(path)
        except StarscopeError:
            continue
        assert len(found.pieces) == len(found.scores) == len(found.types) > 0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (model_file(PIECES, kind=1), "is a unigram model; supported: BPE"),
        (model_file(PIECES, kind=9), "is of model type 9; supported: BPE"),
        (model_file(PIECES, trainer=number(24, 1)), "its normalizer puts spaces behind words"),
        (model_file(PIECES, normalizer=message(2, b"map")), "its normalizer changes characters"),
        (model_file(PIECES, normalizer=number(5, 0)), "its normalizer keeps spaces as they are"),
    ],
)
def test_models_of_another_kind_are_refused_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(UnsupportedError, match=words):
        Tokenizer.from_folder(tmp_path)


def test_a_model_with_a_piece_twice_or_a_bad_score_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model_file([*PIECES, ("in", -1.0, NORMAL)]))
    with pytest.raises(TokenizerError, match="has 'in' twice; expected distinct pieces"):
        Tokenizer.from_folder(tmp_path)
    path.write_bytes(model_file([*PIECES, ("x", math.nan, NORMAL)]))
    with pytest.raises(TokenizerError, match=f"the score of token {SIZE} is nan"):
        Tokenizer.from_folder(tmp_path)


def test_tokens_added_beside_a_model_are_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_file(PIECES))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": SIZE, "<extra>": SIZE + 1}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"additional_special_tokens": ["<extra>"], "add_bos_token": False})
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert not tokenizer.add_bos
    assert tokenizer.encode("in<tool>") == [261, SIZE]
    assert SIZE + 1 not in tokenizer.encode("<extra>")
    assert tokenizer.encode("<extra>", special=True) == [SIZE + 1]
    assert [tokenizer.vocabulary[i].type for i in (SIZE, SIZE + 1)] == [TokenType.USER_DEFINED, TokenType.CONTROL]


def test_a_setting_without_a_space_before_a_text_is_kept(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_file(PIECES))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": False}))
    assert Tokenizer.from_folder(tmp_path).encode("in") == [260]


# tokenizer.json

REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
BOTH = {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}
MERGES = ["▁ ▁", "i n", "▁ in", "▁ d", "▁d e", "▁de f", "a b", "▁ ab"]
FORMS = {
    "normalizer": {"normalizer": BOTH, "pre_tokenizer": None},
    "no space": {"normalizer": REPLACE, "pre_tokenizer": None},
    **{
        scheme: {
            "normalizer": None,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        }
        for scheme in ("first", "always", "never")
    },
}


def json_form(**parts: Any) -> dict[str, Any]:
    vocab = {piece: token_id for token_id, (piece, _, _) in enumerate(PIECES)}
    added = [added_token(i, piece, special=True) for i, piece in enumerate(("<unk>", "<s>", "</s>"))]
    added.append(added_token(SIZE, "<tool>", special=False))
    data = whole_json(vocab, MERGES, added, decoder=None, **parts)
    data["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    return data


@pytest.mark.parametrize("form", FORMS)
@given(parts=st.lists(st.sampled_from(["in", " ", "  ab", "def", "é", "\n", "<s>", "</s>", "<tool>", "▁"]), max_size=8))
@settings(max_examples=80, deadline=None)
def test_ids_are_those_of_the_library_whichever_part_puts_the_space(
    form: str, parts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    one, data = "".join(parts), json_form(**FORMS[form])
    folder = tmp_path_factory.getbasetemp() / form.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    ours = Tokenizer.from_folder(folder)
    expected = tokenizers.Tokenizer.from_str(json.dumps(data)).encode(one, add_special_tokens=False).ids
    assert ours.encode(one, special=True) == expected
    exported = tokenizers.Tokenizer.from_str(json.dumps(ours.to_files()["tokenizer.json"]))
    assert exported.encode(one, add_special_tokens=False).ids == expected
    assert not {0, 1, 2} & set(ours.encode(one))
    if not {"<s>", "</s>", "<tool>", "▁"} & set(parts):
        spelled = b"".join(map(ours.token_bytes, expected)).decode()
        assert spelled == ours.spelled(one)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"normalizer": PREPEND, "pre_tokenizer": None}, "the normalizer is .*; known for byte fallback: Prepend"),
        ({"normalizer": {"type": "NFKC"}, "pre_tokenizer": None}, "the normalizer is .*NFKC"),
        (
            {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}},
            "the pre-tokenizer .*Metaspace",
        ),
        ({"normalizer": None, "pre_tokenizer": None}, "known for byte fallback"),
    ],
)
def test_other_ways_with_spaces_are_refused_in_words(tmp_path: Path, parts: dict[str, Any], words: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(json_form(**parts)), encoding="utf-8")
    with pytest.raises(UnsupportedError, match=words):
        Tokenizer.from_folder(tmp_path)


def test_what_a_gguf_file_cannot_say_of_spaces_is_a_note(tmp_path: Path) -> None:
    for form, parts in FORMS.items():
        (tmp_path / "tokenizer.json").write_text(json.dumps(json_form(**parts)), encoding="utf-8")
        notes = Tokenizer.from_folder(tmp_path).notes
        assert [note.split(",")[0] for note in notes] == {
            "first": ["a space is put before the first text alone"],
            "always": ["a space is put before a text"],
        }.get(form, [])


def test_merges_that_no_scores_express_are_read_and_not_written_into_a_gguf_file(tmp_path: Path) -> None:
    data = json_form(**FORMS["normalizer"])
    data["model"]["merges"] = [merge for merge in MERGES if merge != "a b"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    with pytest.raises(UnsupportedError, match="the merges have 0 of the 1 ways to join 'ab'"):
        tokenizer.to_metadata()


def test_merges_of_pieces_that_are_not_there_are_errors_in_words(tmp_path: Path) -> None:
    data = json_form(**FORMS["normalizer"])
    data["model"]["merges"] = [*MERGES, "d ef"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(TokenizerError, match="merge 8 joins 'd' and 'ef'; the vocabulary has no 'ef'"):
        Tokenizer.from_folder(tmp_path).encode("in")
