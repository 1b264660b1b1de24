"""The tokenizer: text to ids and back, with the ids that end a text or mark the parts of an infilling prompt.

    tokenizer = Tokenizer.from_folder("starcoderbase-1b")      # or Tokenizer.from_gguf(file)
    ids = tokenizer.encode("def f(x):")                         # control tokens only with special=True
    assert tokenizer.decode(ids) == "def f(x):"

Nothing is read of the vocabulary before it is needed, nothing built for encoding before the first text.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from starscope.errors import TokenizerError
from starscope.tokenizer.continuations import Continuations
from starscope.tokenizer.detokenizer import Detokenizer
from starscope.tokenizer.encoder import Encoder
from starscope.tokenizer.files import tokenizer_files
from starscope.tokenizer.folder import read_folder
from starscope.tokenizer.metadata import model_name, read_metadata, write_metadata
from starscope.tokenizer.sentencepiece import ScoreEncoder
from starscope.tokenizer.source import Source, padded
from starscope.tokenizer.vocabulary import (
    END_SPELLINGS,
    FIM_SPELLINGS,
    VERBATIM,
    Contents,
    FimTokens,
    Vocabulary,
)

if TYPE_CHECKING:
    from starscope.gguf.format import Value
    from starscope.gguf.reader import GGUFFile


class Tokenizer:
    """A BPE tokenizer. `add_bos`: whether the model expects bos before a prompt; `encode` never adds it.

    It is byte-level, or one of SentencePiece, which may put a space before a text. That space is a part of the first
    token and not of the text: `decode` leaves it out, `spelled` has it.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = source.size  # tokens, padding included where the source has it
        self.model = model_name(source)  # as GGUF names it: gpt2 or llama
        self.pre_tokenizer = source.pre_tokenizer  # as GGUF names it
        self.bos_id = source.roles.bos
        self.eos_id = source.roles.eos
        self.unk_id = source.roles.unk
        self.pad_id = source.roles.pad
        self.add_bos = source.add_bos
        self.notes = list(source.notes)  # what was assumed or left out while reading, for a person
        self.chat_templates: Mapping[str, str] = source.chat_templates

    @classmethod
    def from_folder(
        cls,
        folder: str | os.PathLike[str],
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> Self:
        """The tokenizer of a Hugging Face folder. Both configs name end tokens; those not given are read if there.

        InputError when there is no tokenizer, TokenizerError for files that contradict themselves or one another,
        UnsupportedError for a tokenizer of another kind.
        """
        return cls(read_folder(Path(folder), config, generation_config))

    @classmethod
    def from_gguf(cls, file: GGUFFile, default_pre: str = "gpt-2") -> Self:
        """The tokenizer of a GGUF file; `default_pre` names the pre-tokenizer of a file that does not."""
        return cls(read_metadata(file, default_pre))

    def padded(self, num_rows: int) -> Self:
        """The same tokenizer with unused tokens up to `num_rows`, the rows of the embedding."""
        return type(self)(replace(self._source, size=num_rows, load=lambda: padded(self._contents, num_rows)))

    @cached_property
    def _contents(self) -> Contents:
        return self._source.load()

    @cached_property
    def _encoder(self) -> Encoder | ScoreEncoder:
        contents, spaces = self._contents, self._source.spaces
        # Markers are no text, though a file may call them user-defined.
        hidden = {i for i in (*self._fim_ids.values(), *self.stop_ids) if contents.types[i] in VERBATIM}
        if spaces is not None and not contents.merges:
            return ScoreEncoder(contents, spaces, hidden)
        return Encoder(contents, self.pre_tokenizer, spaces, hidden)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Piece, score and type of every id."""
        return Vocabulary(self._contents)

    def encode(self, text: str, special: bool = False, begins: bool = True) -> list[int]:
        """The ids of a text. Control tokens that it spells become their ids with `special`, and plain text without.

        `begins=False`: the text goes on from another one, and gets no space before it where the tokenizer puts one.

        TokenizerError when the text holds half a surrogate pair, or a byte that the vocabulary cannot write.
        """
        return self._encoder.encode(text, special, begins)

    def spelled(self, text: str) -> str:
        """What the bytes of a text's tokens are: the text, with the space that the tokenizer puts before it."""
        spaces = self._source.spaces
        if not text or spaces is None or spaces.prefix == "never" or (spaces.unless_there and text.startswith(" ")):
            return text
        return f" {text}"

    def encode_batch(self, texts: list[str], begins: Sequence[bool] | None = None) -> list[list[int]]:
        """The ids of each text, as `encode` gives them one by one; on all cores. `begins` of each: None, all begin."""
        return self._encoder.encode_batch(texts, begins or [True] * len(texts))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of all tokens' bytes; control tokens are their spelling, invalid UTF-8 is U+FFFD.

        Without the space that the tokenizer puts before a text.
        """
        if not self._puts_space:
            return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        stream = self.stream()
        return "".join([*map(stream.push, ids), stream.finish()])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; none for padding. TokenizerError for an id outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            if not 0 <= token_id < self.vocab_size:
                raise TokenizerError(f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens.")
            found = self._bytes[token_id] = self._contents.token_bytes(token_id)
        return found

    def piece(self, token_id: int) -> str:
        r"""One token for reading: its text, with bytes that are no whole character as \xNN, or the name of padding."""
        data = self.token_bytes(token_id)
        return data.decode("utf-8", "backslashreplace") if data else self._contents.pieces[token_id]

    def stream(self, after: Iterable[int] = ()) -> Detokenizer:
        """A detokenizer for one sequence of ids, which goes on from the ids `after`.

        Where those hold no text yet, the space that the tokenizer puts before a text is left out.
        """
        before_text = {token_id for token_id in (self.bos_id, self.eos_id) if token_id is not None}
        begins = self._puts_space and all(token_id in before_text for token_id in after)
        return Detokenizer(self.token_bytes, drops_space=begins, before_text=before_text)

    @property
    def _puts_space(self) -> bool:
        spaces = self._source.spaces
        return spaces is not None and spaces.prefix != "never"

    def agreeing_ids(self, data: bytes, without: Collection[int] = ()) -> list[int]:
        """The tokens of text that can come next where a text goes on with `data`, ascending (see `Continuations`)."""
        return self._continuations.agreeing(data, without)

    @cached_property
    def _continuations(self) -> Continuations:
        return Continuations(self._contents)

    @cached_property
    def _fim_ids(self) -> dict[str, int]:
        """The ids of the roles of FimTokens: those that the source names, else those found by their spelling."""
        spelled = self._find({spelling for spellings in FIM_SPELLINGS.values() for spelling in spellings})
        found = {
            role: next((spelled[spelling] for spelling in spellings if spelling in spelled), None)
            for role, spellings in FIM_SPELLINGS.items()
        }
        found |= self._source.roles.fim
        return {role: token_id for role, token_id in found.items() if token_id is not None}

    def _find(self, spellings: Iterable[str]) -> dict[str, int]:
        wanted = frozenset(spellings)
        return {piece: token_id for token_id, piece in enumerate(self._contents.pieces) if piece in wanted}

    @cached_property
    def fim(self) -> FimTokens | None:
        """The infilling tokens; None unless prefix, suffix and middle are all there."""
        ids = self._fim_ids
        return FimTokens(**ids) if {"prefix", "suffix", "middle"} <= ids.keys() else None

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a text: every eos that is named, the usual spellings, and the padding of infilling."""
        roles = self._source.roles
        ids = {roles.eos, *roles.ends, *self._find(END_SPELLINGS).values(), self._fim_ids.get("pad")}
        return frozenset(token_id for token_id in ids if token_id is not None)

    @cached_property
    def infill_stop_ids(self) -> frozenset[int]:
        """`stop_ids` and the tokens that begin another file or repository, where a hole has ended."""
        return self.stop_ids | {self._fim_ids[role] for role in ("repo", "separator") if role in self._fim_ids}

    def to_metadata(self, num_rows: int | None = None) -> dict[str, Value]:
        """All `tokenizer.*` keys of a GGUF file, with unused tokens up to `num_rows`, the rows of the embedding.

        TokenizerError when there are more tokens than rows, UnsupportedError for what the format cannot say.
        """
        return write_metadata(self._source, self._contents, self._fim_ids, self._end, num_rows)

    def to_files(self) -> dict[str, dict[str, Any]]:
        """The JSON objects of a Hugging Face folder's tokenizer, by file name; `from_folder` reads them as this one."""
        return tokenizer_files(self._source, self._contents, self._end)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that the source says end a text, eos first; `stop_ids` has those known by their spelling too."""
        return tuple(token_id for token_id in (self._end, *self._source.roles.ends) if token_id is not None)

    @property
    def _end(self) -> int | None:
        """The token that ends a text: the named one, or the first with a usual spelling."""
        return min(self._find(END_SPELLINGS).values(), default=None) if self.eos_id is None else self.eos_id
