"""Vocabularies for tests: llama.cpp's real ones, kept small, and tokenizer.json files of a few tokens.

Byte-level BPE makes its tokens from its merges: the symbols of bytes, then what each merge builds. So these, the
special tokens and their place are all that is kept of a vocabulary; a digest proves that its tokens come out the same.
Of LLaMA's, which SentencePiece made, the pieces are kept, and where their scores are not the usual -1, -2, -3 and on.
`PYTHONPATH=tests python -m support.vocabularies ggml-vocab-NAME.gguf` packs one.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data" / "vocab"
NAMES = ("starcoder", "refact", "gpt-2")
SEPARATOR = "\n__ggml_vocab_test__\n"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
STARCODER_PRE = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
}
GPT2_PRE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


@dataclass(frozen=True)
class Packed:
    """A real vocabulary: all tokens in order, the special ones of them, and the merges as "a b"."""

    pre: str
    end: int
    tokens: list[str]
    special: list[str]
    merges: list[str]

    def types(self) -> list[int]:
        special = set(self.special)
        return [3 if token in special else 4 if token.startswith("[PAD4") else 1 for token in self.tokens]


@cache
def read_packed(name: str) -> Packed:
    kept = json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()))
    tokens = _tokens_of(kept)
    assert _digest(tokens) == kept["sha256"], name
    return Packed(kept["pre"], kept["end"], tokens, kept["special"], kept["merges"])


def read_texts() -> list[str]:
    return (FOLDER / "texts.inp").read_bytes().decode().split(SEPARATOR)[:-1]


def read_ids(name: str) -> list[list[int]]:
    """The ids of each text, as the models' own tokenizers give them."""
    return [[int(token) for token in line.split()] for line in (FOLDER / f"{name}.out").read_text().split("\n")[:-1]]


@cache
def read_llama() -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and types of LLaMA's vocabulary."""
    kept = json.loads(lzma.decompress((FOLDER / "llama-spm.json.xz").read_bytes()))
    pieces = kept["pieces"]
    scores, types = _usual_llama(len(pieces))
    for token_id in kept["last"]:
        scores[token_id] = kept["last_score"]
    assert _digest([*pieces, str(scores), str(types)]) == kept["sha256"]
    return pieces, scores, types


def _usual_llama(size: int) -> tuple[list[float], list[int]]:
    """The usual scores and types: unknown, bos, eos, the bytes, and the pieces by rank."""
    return [0.0] * 259 + [-float(rank) for rank in range(size - 259)], [2, 3, 3] + [6] * 256 + [1] * (size - 259)


def llama_metadata() -> dict[str, Any]:
    """The metadata of LLaMA's vocabulary file, as starscope.gguf values."""
    from starscope.gguf import ValueType, array, boolean, string, strings, u32

    pieces, scores, types = read_llama()
    return {
        "general.architecture": string("llama"),
        "tokenizer.ggml.model": string("llama"),
        "tokenizer.ggml.pre": string("default"),
        "tokenizer.ggml.tokens": strings(pieces),
        "tokenizer.ggml.scores": array(ValueType.FLOAT32, scores),
        "tokenizer.ggml.token_type": array(ValueType.INT32, types),
        "tokenizer.ggml.bos_token_id": u32(1),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.ggml.unknown_token_id": u32(0),
        "tokenizer.ggml.add_bos_token": boolean(True),
        "tokenizer.ggml.add_eos_token": boolean(False),
    }


def gguf_metadata(packed: Packed) -> dict[str, Any]:
    """The metadata of the vocabulary file, as starscope.gguf values."""
    from starscope.gguf import ValueType, array, string, strings, u32

    return {
        "general.architecture": string("starcoder"),
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string(packed.pre),
        "tokenizer.ggml.tokens": strings(packed.tokens),
        "tokenizer.ggml.token_type": array(ValueType.INT32, packed.types()),
        "tokenizer.ggml.merges": strings(packed.merges),
        "tokenizer.ggml.bos_token_id": u32(packed.end),
        "tokenizer.ggml.eos_token_id": u32(packed.end),
        "tokenizer.ggml.unknown_token_id": u32(packed.end),
    }


def packed_json(packed: Packed) -> dict[str, Any]:
    """The tokenizer.json that the vocabulary was converted from."""
    tokens = [token for token in packed.tokens if not token.startswith("[PAD4")]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    added = [added_token(ids[token], token, special=True) for token in packed.special]
    pre = GPT2_PRE if packed.pre == "gpt-2" else STARCODER_PRE
    return whole_json(ids, packed.merges, added, pre_tokenizer=pre)


def added_token(token_id: int, content: str, *, special: bool, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
    return {"id": token_id, "content": content, **plain, "special": special, **flags}


def whole_json(
    vocab: dict[str, int], merges: list[Any], added: list[dict[str, Any]] | tuple[()] = (), **parts: Any
) -> dict[str, Any]:
    """A tokenizer.json as the library writes it."""
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocab, "merges": merges,
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": list(added), "normalizer": None,
        "pre_tokenizer": STARCODER_PRE, "post_processor": None, "decoder": dict(BYTE_LEVEL), "model": model, **parts,
    }  # fmt: skip


def symbols() -> list[str]:
    """The characters that stand for the bytes 0 to 255, written out independently of the package."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    table = {byte: chr(byte) for byte in printing} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def _tokens_of(kept: dict[str, Any]) -> list[str]:
    made = dict.fromkeys([*kept["symbols"], *("".join(merge.split(" ")) for merge in kept["merges"])])
    tokens = [*kept["special"], *made] if kept["special_first"] else [*made, *kept["special"]]
    return tokens + [f"[PAD{n}]" for n in range(len(tokens), kept["size"])]


def _digest(tokens: list[str]) -> str:
    return hashlib.sha256("\n".join(tokens).encode()).hexdigest()


def _keep_byte_level(fields: dict[str, Any]) -> dict[str, Any]:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    kept = {
        "pre": fields["tokenizer.ggml.pre"],
        "end": fields["tokenizer.ggml.eos_token_id"],
        "size": len(tokens),
        "special": special,
        "special_first": tokens[0] == special[0],
        "symbols": "".join(token for token in tokens if len(token) == 1),
        "merges": fields["tokenizer.ggml.merges"],
        "sha256": _digest(tokens),
    }
    assert _tokens_of(kept) == tokens
    return kept


def _keep_llama(fields: dict[str, Any]) -> dict[str, Any]:
    pieces, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    usual, types = _usual_llama(len(pieces))
    last = [token_id for token_id, score in enumerate(scores) if score != usual[token_id]]
    assert types == fields["tokenizer.ggml.token_type"]
    assert {scores[token_id] for token_id in last} == {min(scores)}
    digest = _digest([*pieces, str(scores), str(types)])
    return {"pieces": pieces, "last": last, "last_score": min(scores), "sha256": digest}


def main(path: Path) -> None:
    from gguf import GGUFReader

    fields = {key: field.contents() for key, field in GGUFReader(path).fields.items()}
    spm = fields["tokenizer.ggml.model"] == "llama"
    kept = _keep_llama(fields) if spm else _keep_byte_level(fields)
    data = json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]
    (FOLDER / f"{path.stem}.json.xz").write_bytes(lzma.compress(data, filters=filters))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
