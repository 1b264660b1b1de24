"""The vocabulary of a run: trained on its text, its characters, or one that exists.

*bpe*: byte-level BPE with StarCoder's structure and special tokens. *chars*: a token a character, as byte-level BPE
too, so that every reader of such files has it: each character's bytes are merged into one token and nothing else is.
In ASCII text that is one token a byte. A character that is not in the text has no token, and encoding it is an error
that names it. Anything else is the path of a GGUF file, a Hugging Face folder or its tokenizer.json:

    tokenizer = open_tokenizer("starcoderbase-1b")          # a starscope Tokenizer, which encodes and decodes
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from starscope.checkpoint.files import read_bytes
from starscope.errors import InputError, InvalidContentError, UnsupportedError
from starscope.gguf import read_gguf
from starscope.tokenizer import Tokenizer
from starscope.tokenizer.bytelevel import bytes_to_piece
from starscope.tokenizer.vocabulary import END_SPELLINGS
from starscope.train.documents import Passage
from starscope.train.fim import END_OF_TEXT, FIM_MIDDLE, FIM_PAD, FIM_PREFIX, FIM_SUFFIX, FimIds

if TYPE_CHECKING:
    import tokenizers

# StarCoder's special tokens in its order: the first ids of its vocabulary.
SPECIAL_TOKENS = (
    END_OF_TEXT,
    FIM_PREFIX,
    FIM_MIDDLE,
    FIM_SUFFIX,
    FIM_PAD,
    "<filename>",
    "<gh_stars>",
    "<issue_start>",
    "<issue_comment>",
    "<issue_closed>",
    "<jupyter_start>",
    "<jupyter_text>",
    "<jupyter_code>",
    "<jupyter_output>",
    "<empty_output>",
    "<commit_before>",
    "<commit_msg>",
    "<commit_after>",
    "<reponame>",
)
FIM_TOKENS = (FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX, FIM_PAD)
LEAST_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)  # of a trained one: every byte is there
DEFAULT_VOCAB_SIZE = 4096  # where the text gives as many
SAMPLE_BYTES = 16 << 20  # of text that a vocabulary is trained on: more hardly changes it, and costs memory
MOST_VOCAB_SIZE = SAMPLE_BYTES  # of a trained one: as many as bytes that it is made of
LONGEST_WORD = 1 << 10  # characters that are learned from of a piece without white space, which is data, not text


class BPE:
    """A `tokenizers` byte-level BPE as a Codec; `save` writes the tokenizer.json that `starscope.Tokenizer` reads."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.encode_special_tokens = True  # text that spells a special token stays text
        self._inner = inner

    @classmethod
    def read(cls, path: Path) -> BPE:
        import tokenizers

        return cls(tokenizers.Tokenizer.from_buffer(read_bytes(path)))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, at_most: bool = False) -> BPE:
        """A vocabulary of exactly `vocab_size` tokens with StarCoder's structure: digits one by one, then bytes.

        InvalidContentError when the text gives fewer, unless `vocab_size` is the most that there may be.
        """
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers

        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        if inner.get_vocab_size() != vocab_size and not (at_most and inner.get_vocab_size() < vocab_size):
            raise InvalidContentError(
                f"the text gives {inner.get_vocab_size()} tokens; expected {vocab_size}.",
                hint="Ask for a smaller vocabulary (at least 275: 256 bytes and 19 special tokens) or add text.",
            )
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        return int(self._inner.get_vocab_size())

    def token_id(self, token: str) -> int:
        found = self._inner.token_to_id(token)
        if found is None:
            raise InvalidContentError(f"the vocabulary has no {token}.")
        return int(found)

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: list[str], _begins: Sequence[bool] | None = None) -> list[list[int]]:
        return [list(found.ids) for found in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        return str(self._inner.decode(ids, skip_special_tokens=False))

    def to_json(self) -> str:
        return str(self._inner.to_str())

    def save(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")


def text_to_learn_from(passages: Sequence[Passage], most_bytes: int = SAMPLE_BYTES) -> tuple[int, Iterator[str]]:
    """Pieces that are evenly spread over the text, about `most_bytes` in all: one in how many, and those."""
    every = max(1, -(-sum(passage.bytes for passage in passages) // most_bytes))
    pieces = (piece for passage in passages for piece in passage.pieces())
    chosen = (piece for number, piece in enumerate(pieces) if number % every == 0)
    return every, (piece if len(piece.split(None, 1)) > 1 else piece[:LONGEST_WORD] for piece in chosen)


def character_vocabulary(characters: Iterable[str], *, fim: bool) -> BPE:
    """A token for each character, after the end of text and, if asked for, the tokens of fill-in-the-middle."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    special = [END_OF_TEXT, *(FIM_TOKENS if fim else ())]
    encoded = sorted({character.encode() for character in characters})
    parts = [data[:length] for data in encoded for length in range(1, len(data) + 1)]
    parts += [data[at : at + 1] for data in encoded for at in range(1, len(data))]
    # Shorter first: every part of a character is there, and has its merge, before what is made of it.
    pieces = [bytes_to_piece(part) for part in sorted(set(parts), key=lambda part: (len(part), part))]
    merges = [(piece[:-1], piece[-1]) for piece in pieces if len(piece) > 1]
    vocab = {piece: token_id for token_id, piece in enumerate([*special, *pieces])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.add_special_tokens(special)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    return BPE(inner)


def save_vocabulary(bpe: BPE, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, as `Tokenizer.from_folder` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {f"{role}_token": END_OF_TEXT for role in ("bos", "eos")}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    bpe.save(folder / "tokenizer.json")


def open_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a GGUF file, of a folder, or of a tokenizer.json with what lies beside it."""
    path = Path(path)
    if path.is_dir():
        return Tokenizer.from_folder(path)
    if path.name == "tokenizer.json":
        return Tokenizer.from_folder(path.parent)
    if path.suffix == ".gguf":
        with read_gguf(path) as file:
            tokenizer = Tokenizer.from_gguf(file)
            tokenizer.vocabulary[0]  # reads it while the file is open
            return tokenizer
    what = "does not exist" if not path.exists() else "is not a tokenizer that starscope knows"
    raise InputError(f"{path} {what}; expected bpe, chars, a GGUF file, a folder or a tokenizer.json.")


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """A digest of all that a GGUF file says of the tokenizer; UnsupportedError when it cannot say it."""
    digest = hashlib.sha256()
    for key, value in sorted(tokenizer.to_metadata().items()):
        digest.update(key.encode() + b"\0" + value.encoded())
    return digest.hexdigest()


def find_end_of_text(tokenizer: Tokenizer, where: str) -> int:
    """The token that ends a document: what the vocabulary calls its end, or the first of the usual spellings."""
    if tokenizer.eos_id is not None:
        return tokenizer.eos_id
    for token_id, token in enumerate(tokenizer.vocabulary):
        if token.piece in END_SPELLINGS:
            return token_id
    raise UnsupportedError(f"{where} has no token that ends a text; expected one, such as {END_OF_TEXT}.")


def find_fim(tokenizer: Tokenizer, end_of_text: int) -> FimIds | None:
    """The tokens of fill-in-the-middle, when the vocabulary has all of them, padding too, and a part of a text has the
    tokens that it has alone: no space is put before it.
    """
    fim = tokenizer.fim
    if fim is None or fim.pad is None or tokenizer.spelled("a") != "a":
        return None
    return FimIds(end_of_text, fim.prefix, fim.middle, fim.suffix, fim.pad)
