"""Tokens in one mapped file -> batches.

The tokens of a document are followed by an end-of-text token; all documents lie one after another in a token file,
two or four bytes a token, as its header says. A sample is context_length + 1 consecutive tokens; every epoch visits
each once, in an order that is a pure function of (seed, epoch):

    batches = Batches(open_tokens("train.tokens").ids, context_length=512, seed=0)
    batches.batch(first=0, count=16)        # [16 513]
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from starscope.checkpoint.files import open_regular, parse_object
from starscope.errors import DoesNotFitError, InvalidContentError, OutputError

Ids = np.ndarray[Any, Any]

MAGIC = b"starscope tokens\n"
HEADER_BYTES = 512  # the magic and a JSON object, padded with spaces, so that the tokens are aligned
HEADER = ("version", "width", "vocab_size", "tokens", "documents", "bytes", "fingerprint")
VERSION = 1
BATCH = 1 << 18  # characters that are encoded together, so that all cores have work
MOST_PIECES = 1 << 12
CHECKED_BYTES = 1 << 20  # looked at together


class Codec(Protocol):
    """Text to ids and back, without special tokens being recognized in the text or added to it."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: list[str], begins: Sequence[bool]) -> list[list[int]]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class TokenFile:
    """An open token file: `ids` is mapped, `bytes` what the text takes in UTF-8, `ends` where documents end."""

    path: Path
    ids: Ids
    vocab_size: int
    documents: int
    bytes: int
    fingerprint: str

    def split(self, end_of_text: int) -> Iterator[Ids]:
        """The ids of each document, without the end-of-text token."""
        start = 0
        for end in np.flatnonzero(self.ids == end_of_text):
            yield self.ids[start:end]
            start = int(end) + 1


def write_tokens(
    path: Path,
    texts: Iterable[str | Iterable[str]],
    codec: Codec,
    *,
    vocab_size: int,
    end_of_text: int,
    fingerprint: str = "",
) -> None:
    """Encode documents, each whole or in pieces, into a token file, which is renamed into place when it is complete.

    InvalidContentError for an id outside the vocabulary, DoesNotFitError when the disk is full, OutputError when the
    file cannot be written; nothing is left behind then.
    """
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    count = documents = size = 0
    first = True  # the next piece is the beginning of a document
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as out:
            out.write(b" " * HEADER_BYTES)
            for batch in _batches(texts):
                pieces = [piece for piece in batch if piece is not None]
                ends = [first, *(piece is None for piece in batch)]
                begins = [end for piece, end in zip(batch, ends, strict=False) if piece is not None]
                first = ends[-1]
                encoded = iter(codec.encode_batch(pieces, begins))
                parts = ([end_of_text] if piece is None else next(encoded) for piece in batch)
                ids = np.concatenate([np.array(part, np.int64) for part in parts])
                _check_range(ids, vocab_size, "the tokenizer gave")
                out.write(ids.astype(dtype).tobytes())
                count, documents = count + len(ids), documents + len(batch) - len(pieces)
                size += sum(len(piece.encode()) for piece in pieces)
            header = {
                "version": VERSION,
                "width": dtype.itemsize,
                "vocab_size": vocab_size,
                "tokens": count,
                "documents": documents,
                "bytes": size,
                "fingerprint": fingerprint,
            }
            out.seek(0)
            out.write((MAGIC + json.dumps(header).encode()).ljust(HEADER_BYTES))
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            written = HEADER_BYTES + dtype.itemsize * count
            found = f"the disk is full after {written} bytes of {path}"
            raise DoesNotFitError(f"{found}.", hint="Free some space or take another folder.") from error
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _batches(texts: Iterable[str | Iterable[str]]) -> Iterator[list[str | None]]:
    """The pieces of all texts in batches to encode together; None ends a text."""
    batch: list[str | None] = []
    size = 0
    for text in texts:
        for piece in chain((text,) if isinstance(text, str) else text, (None,)):
            batch.append(piece)
            size += len(piece or "")
            if size >= BATCH or len(batch) >= MOST_PIECES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _check_range(ids: Ids, vocab_size: int, what: str) -> None:
    """InvalidContentError when an id is outside the vocabulary."""
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        worst = int(ids.max() if ids.min() >= 0 else ids.min())
        raise InvalidContentError(f"{what} id {worst}; expected ids below {vocab_size}.")


def open_tokens(path: Path) -> TokenFile:
    """Map a token file and look through it once.

    InvalidContentError when it is not one, its length is not what its header says, or an id is outside the vocabulary.
    """
    with open(open_regular(path), "rb") as file:
        head = file.read(HEADER_BYTES)
        actual = os.fstat(file.fileno()).st_size
    if not head.startswith(MAGIC) or len(head) < HEADER_BYTES:
        raise InvalidContentError(f"{path} is not a starscope token file.")
    header = _read_header(head, path)
    expected = HEADER_BYTES + header["width"] * header["tokens"]
    if actual != expected:
        found = f"{path} has {actual} bytes; expected {expected} for {header['tokens']} tokens."
        raise InvalidContentError(found, hint="Delete it to make it again.")
    if header["tokens"] == 0:
        raise InvalidContentError(f"{path} has no tokens; expected some.", hint="Delete it to make it again.")
    dtype = np.dtype(f"<u{header['width']}")
    with open(open_regular(path), "rb") as file:  # read, not mapped: what is mapped and touched counts as memory
        file.seek(HEADER_BYTES)
        while chunk := file.read(CHECKED_BYTES):
            _check_range(np.frombuffer(chunk, dtype), header["vocab_size"], f"{path} has the")
    ids = np.memmap(path, dtype, "r", HEADER_BYTES, (header["tokens"],))
    return TokenFile(path, ids, header["vocab_size"], header["documents"], header["bytes"], header["fingerprint"])


def _read_header(head: bytes, path: Path) -> dict[str, Any]:
    header = parse_object(head[len(MAGIC) :], f"the header of {path}")
    kinds = {name: str if name == "fingerprint" else int for name in HEADER}
    if set(header) != set(HEADER) or any(type(header[name]) is not kind for name, kind in kinds.items()):
        raise InvalidContentError(f"the header of {path} has {', '.join(header)}; expected {', '.join(HEADER)}.")
    if header["version"] != VERSION or header["width"] not in (2, 4):
        found = f"version {header['version']} and {header['width']} bytes a token"
        raise InvalidContentError(f"{path} has {found}; expected version {VERSION}, 2 or 4 bytes.")
    if min(value for value in header.values() if type(value) is int) < 0:
        raise InvalidContentError(f"the header of {path} has a negative number.")
    return header


MIX = np.uint64(0x9E3779B97F4A7C15)


def mix(x: Ids) -> Ids:
    """SplitMix64's output function over an array of uint64: every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Ids = x ^ (x >> np.uint64(31))
    return mixed


def random_words(*key: int, count: int) -> Ids:
    """`count` random uint64 that depend on the key alone: a counter-based generator, the same on every machine."""
    with np.errstate(over="ignore"):
        state = np.zeros(1, np.uint64)
        for word in key:
            state = mix((state ^ np.uint64(word & (2**64 - 1))) + MIX)
        return mix(state + MIX * np.arange(1, count + 1, dtype=np.uint64))


@lru_cache(maxsize=2)
def _word(*key: int) -> int:
    return int(random_words(*key, count=1)[0])


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, samples: int) -> Ids:
    """The order in which an epoch visits its samples: a permutation of range(samples)."""
    return np.argsort(random_words(seed, epoch, 1, count=samples), kind="stable")


Transform = Callable[[Ids, int, int], Ids]  # (ids [context_length+1], epoch, index in the epoch) -> ids of that length


class Batches:
    """Samples of context_length + 1 tokens. Sample number k is index k % per_epoch of epoch k // per_epoch.

    Sample starts lie context_length apart on the circle of all tokens, from a shift that each epoch draws anew: so
    within an epoch no token is a target twice, and at most context_length - 1 tokens are not a target at all.
    """

    def __init__(self, ids: Ids, *, context_length: int, seed: int, transform: Transform | None = None) -> None:
        self.ids, self.context_length, self.seed = ids, context_length, seed
        self._transform = transform
        self.per_epoch = len(ids) // context_length
        if self.per_epoch == 0:
            raise InvalidContentError(
                f"the data has {len(ids)} tokens; expected at least context_length, {context_length}.",
                hint="Add text or take a shorter context.",
            )

    def start(self, number: int) -> int:
        """Where sample `number` begins."""
        epoch, index = divmod(number, self.per_epoch)
        shift = _word(self.seed, epoch, 2) % len(self.ids)
        place = int(epoch_order(self.seed, epoch, self.per_epoch)[index])
        return (shift + place * self.context_length) % len(self.ids)

    def sample(self, number: int) -> Ids:  # [context_length+1]
        start = self.start(number)
        ids = self.ids[start : start + self.context_length + 1].astype(np.int64)
        while len(ids) < self.context_length + 1:  # past the end the data begins again
            ids = np.concatenate([ids, self.ids[: self.context_length + 1 - len(ids)].astype(np.int64)])
        epoch, index = divmod(number, self.per_epoch)
        return ids if self._transform is None else self._transform(ids, epoch, index)

    def batch(self, first: int, count: int) -> Ids:  # [count context_length+1]
        return np.stack([self.sample(number) for number in range(first, first + count)])
