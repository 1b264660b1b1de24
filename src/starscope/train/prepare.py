"""Text -> a vocabulary and two token files, one to train on and one to measure with, made once and then reused.

    prepared = prepare(DataOptions(["src"], vocab_size=2048, context_length=256), Path("run/data"))
    prepared.tokenizer                      # a starscope Tokenizer, which is also the codec
    prepared.batches().batch(0, 16)         # [16 257]
    prepared.held_out                       # a TokenFile, None when nothing is held out

Whole documents are held out, chosen by their names; where that cannot give about the share that was asked for (a
single document, say), the last share of every document is. `facts` say what the tokens are made of: a run that is
resumed must have the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starscope.checkpoint.files import read_text
from starscope.errors import InputError, InvalidContentError, OutputError, StarscopeError, UsageError
from starscope.tokenizer import Tokenizer
from starscope.train.data import Batches, TokenFile, open_tokens, write_tokens
from starscope.train.documents import Corpus, Found, Passage, find_documents, survey
from starscope.train.fim import FillInTheMiddle, FimIds
from starscope.train.log import unwritable
from starscope.train.split import SPLITS, Split, split_text
from starscope.train.vocabularies import (
    BPE,
    DEFAULT_VOCAB_SIZE,
    LEAST_VOCAB_SIZE,
    MOST_VOCAB_SIZE,
    SPECIAL_TOKENS,
    character_vocabulary,
    find_end_of_text,
    find_fim,
    open_tokenizer,
    save_vocabulary,
    text_to_learn_from,
    vocabulary_digest,
)

VERSION = 1  # of what is kept in the folder
SETTLED = 2.0  # seconds after its last change from which a file's times tell whether it changes again

Report = Callable[[str], None]
"""Is told in a sentence what was found, assumed or left out."""
Progress = Callable[[str, int, int], None]
"""Is told what is being done, the bytes done and the bytes in all."""


def nothing(*_: object) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class DataOptions:
    """What to train on. `vocab`: bpe, chars, or the path of a tokenizer; `vocab_size`: of bpe alone; None: up to 4,096.

    `held_out` is the share of the text to measure with, 0 for none; `split` says of what: "documents", "last" (the
    last share of each document) or "auto". With `fim_rate`, that share of the text is rearranged to fill in the
    middle, `spm_rate` of it suffix first; a vocabulary without the tokens for it leaves it out and says so.
    """

    paths: Sequence[str | os.PathLike[str]]
    suffixes: Sequence[str] = ()
    exclude: Sequence[str | os.PathLike[str]] = ()  # folders whose files are not taken, such as the run's own
    vocab: str | os.PathLike[str] = "bpe"
    vocab_size: int | None = None
    held_out: float = 0.05
    split: str = "auto"
    context_length: int = 256  # tokens
    seed: int = 0
    fim_rate: float = 0.5
    spm_rate: float = 0.5

    def __post_init__(self) -> None:
        if not self.paths:
            raise UsageError("there is nothing to train on; expected files or folders.")
        if not 0 <= self.held_out < 1:
            raise UsageError(f"the held-out share is {self.held_out}; expected from 0 to less than 1.")
        if not (0 <= self.fim_rate <= 1 and 0 <= self.spm_rate <= 1):
            found = f"the rates are {self.fim_rate} and {self.spm_rate}"
            raise UsageError(f"{found}; expected probabilities between 0 and 1.")
        if self.split not in SPLITS:
            raise UsageError(f"the split is {self.split!r}; expected {', '.join(SPLITS)}.")
        if self.context_length < 1:
            raise UsageError(f"the context is {self.context_length} tokens; expected at least 1.")
        if self.vocab == "bpe" and self.vocab_size is not None and self.vocab_size < LEAST_VOCAB_SIZE:
            raise UsageError(
                f"the vocabulary is of {self.vocab_size} tokens; expected at least {LEAST_VOCAB_SIZE}: "
                f"256 bytes and {len(SPECIAL_TOKENS)} special tokens."
            )
        if self.vocab == "bpe" and self.vocab_size is not None and self.vocab_size > MOST_VOCAB_SIZE:
            raise UsageError(f"the vocabulary is of {self.vocab_size} tokens; expected at most {MOST_VOCAB_SIZE}.")


@dataclass(frozen=True)
class Prepared:
    """What a run reads. `notes` are sentences for a person; `facts` must be equal for a run to be resumed."""

    options: DataOptions
    tokenizer: Tokenizer
    end_of_text: int
    fim: FimIds | None  # None: nothing is rearranged
    train: TokenFile
    held_out: TokenFile | None
    facts: dict[str, Any]
    notes: list[str]
    reused: bool

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def pad(self) -> int | None:
        """The token that is no target: what fills a sample that got shorter when it was rearranged."""
        return None if self.fim is None else self.fim.pad

    def batches(self) -> Batches:
        """The samples, a pure function of their number; InvalidContentError when the text is shorter than a context."""
        options = self.options
        transform = None
        if self.fim is not None:
            rates = {"rate": options.fim_rate, "spm_rate": options.spm_rate}
            transform = FillInTheMiddle(self.tokenizer, self.fim, seed=options.seed, **rates)
        length = options.context_length
        return Batches(self.train.ids, context_length=length, seed=options.seed, transform=transform)

    def check_fits(self, rows: int) -> None:
        """InvalidContentError when a model whose embedding has so many rows has none for some token."""
        if self.vocab_size > rows:
            raise InvalidContentError(
                f"the tokenizer has {self.vocab_size} tokens; the model has {rows}.",
                hint="Use the model's own tokenizer, or train a new model.",
            )


def prepare(
    options: DataOptions,
    folder: Path,
    report: Report = nothing,
    progress: Progress = nothing,
    *,
    resume: bool = False,
) -> Prepared:
    """The vocabulary and the token files, in `folder`; what is there already is reused when nothing has changed.

    With `resume`, what has changed is InvalidContentError, and the folder stays as it is.

    InputError and InvalidContentError for text, UnsupportedError for a tokenizer that cannot be used (or that a GGUF
    file could not hold), DoesNotFitError and OutputError when `folder` cannot take the files.
    """
    found = find_documents(options.paths, suffixes=options.suffixes, exclude=(*options.exclude, folder))
    stamp, latest = found.stamp()
    if latest > time.time() - SETTLED:
        stamp = ""  # too fresh to be recognised by
    existing = None if options.vocab in ("bpe", "chars") else open_tokenizer(options.vocab)
    asked = _asked(options, existing)
    kept = _read_record(folder)
    if resume and kept and kept["asked"] != asked:
        raise InvalidContentError(
            f"the run in {folder} began with another vocabulary, another held-out share or another split.",
            hint="Give the same options, or start a new run in another folder.",
        )
    if kept.get("asked") == asked:
        if stamp and kept.get("stamp") == stamp and (old := _reuse(options, folder, kept, existing, report)):
            return old
        corpus = _survey(found, progress)
        if kept.get("data") == corpus.fingerprint and (old := _reuse(options, folder, kept, existing, report)):
            _write_record(folder, {**kept, "stamp": stamp})
            return old
        if resume and kept["data"] != corpus.fingerprint:
            had, has = kept["bytes"], corpus.bytes
            sizes = f"{had} bytes and has {has}" if had != has else f"as many bytes, {had}, and they were others"
            raise InvalidContentError(
                f"the text has changed since the run in {folder} began: it had {sizes}.",
                hint="Give it the text that it began with, or start a new run in another folder.",
            )
    else:
        corpus = _survey(found, progress)
    return _make(options, folder, corpus, {"asked": asked, "stamp": stamp}, existing, report, progress)


def _survey(found: Found, progress: Progress) -> Corpus:
    return survey(found, lambda done, total: progress("reading", done, total))


def _asked(options: DataOptions, existing: Tokenizer | None) -> str:
    """A digest of the options on which the files in the folder depend."""
    vocab = str(options.vocab) if existing is None else vocabulary_digest(existing)
    fim = options.fim_rate > 0 if options.vocab == "chars" else None
    facts = [VERSION, vocab, options.vocab_size, fim, options.held_out, options.split]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _make(
    options: DataOptions,
    folder: Path,
    corpus: Corpus,
    record: dict[str, Any],
    existing: Tokenizer | None,
    report: Report,
    progress: Progress,
) -> Prepared:
    parts = split_text(corpus.passages, options.held_out, options.split)
    notes = [*corpus.notes, parts.note]
    _make_folder(folder)
    (folder / "data.json").unlink(missing_ok=True)  # what follows changes the files that it speaks of
    if existing is None:
        notes += _make_vocabulary(options, folder, corpus, parts, progress)
    tokenizer = Tokenizer.from_folder(folder) if existing is None else existing
    end_of_text = find_end_of_text(tokenizer, str(options.vocab))
    fingerprint = hashlib.sha256(f"{record['asked']} {corpus.fingerprint}".encode()).hexdigest()
    total, done = corpus.bytes, 0

    def told(passage: Passage) -> Iterator[str]:
        nonlocal done
        for piece in passage.pieces():
            yield piece
            done += len(piece.encode())
            progress("tokenizing", done, total)

    for name, passages in (("train", parts.train), ("held_out", parts.held_out)):
        path = folder / f"{name}.tokens"
        if not passages:
            path.unlink(missing_ok=True)
            continue
        write_tokens(
            path,
            map(told, passages),
            tokenizer,
            vocab_size=tokenizer.vocab_size,
            end_of_text=end_of_text,
            fingerprint=fingerprint,
        )
    record |= {
        "data": corpus.fingerprint,
        "bytes": corpus.bytes,
        "tokens": fingerprint,
        "vocabulary": vocabulary_digest(tokenizer),
        "held_out": bool(parts.held_out),
        "notes": notes,
    }
    _write_record(folder, record)
    return _open(options, folder, record, tokenizer, report, reused=False)


def _make_vocabulary(options: DataOptions, folder: Path, corpus: Corpus, parts: Split, progress: Progress) -> list[str]:
    """Write tokenizer.json into the folder; returns what there is to say about it."""
    if options.vocab == "chars":
        characters: set[str] = set()
        text = (piece for passage in corpus.passages for piece in passage.pieces())
        for piece in _told(text, corpus.bytes, progress):
            characters.update(piece)
        _save_vocabulary(character_vocabulary(characters, fim=options.fim_rate > 0), folder)
        return []
    every, pieces = text_to_learn_from(parts.train)
    size = options.vocab_size or DEFAULT_VOCAB_SIZE
    total = sum(passage.bytes for passage in parts.train) // every
    bpe = BPE.train(_told(pieces, total, progress), size, at_most=options.vocab_size is None)
    _save_vocabulary(bpe, folder)
    return [] if every == 1 else [f"the vocabulary is trained on one in {every} pieces of the text."]


def _save_vocabulary(made: Any, folder: Path) -> None:
    try:
        save_vocabulary(made, folder)
    except OSError as error:
        raise unwritable(folder, error) from error


def _told(pieces: Iterator[str], total: int, progress: Progress) -> Iterator[str]:
    done = 0
    for piece in pieces:
        yield piece
        done += len(piece.encode())
        progress("making the vocabulary", min(done, total), total)


def _reuse(
    options: DataOptions, folder: Path, record: dict[str, Any], existing: Tokenizer | None, report: Report
) -> Prepared | None:
    """What is in the folder, when it is whole and what its record says."""
    try:
        tokenizer = Tokenizer.from_folder(folder) if existing is None else existing
        if vocabulary_digest(tokenizer) != record.get("vocabulary"):
            return None
        return _open(options, folder, record, tokenizer, report, reused=True)
    except StarscopeError as error:
        report(f"the tokens in {folder} are made again: {error}")
        return None


def _open(
    options: DataOptions, folder: Path, record: dict[str, Any], tokenizer: Tokenizer, report: Report, *, reused: bool
) -> Prepared:
    files = [open_tokens(folder / f"{name}.tokens") for name in ("train", "held_out")[: 1 + record["held_out"]]]
    for file in files:
        if file.fingerprint != record["tokens"] or file.vocab_size != tokenizer.vocab_size:
            raise InvalidContentError(f"{file.path} is of other text or of another vocabulary.")
    end_of_text = find_end_of_text(tokenizer, str(options.vocab))
    fim = find_fim(tokenizer, end_of_text) if options.fim_rate > 0 else None
    notes = list(record["notes"])
    if options.fim_rate > 0 and fim is None:
        notes.append("the vocabulary has no tokens for filling in the middle: all text stays in its order.")
    facts = {
        "data": f"{sum(file.bytes for file in files)} bytes, sha256 {record['data'][:16]}",
        "tokenizer": f"{tokenizer.vocab_size} tokens, sha256 {record['vocabulary'][:16]}",
        "held_out": [options.held_out, options.split],
        "context_length": options.context_length,
        "data_seed": options.seed,
        "fim": None if fim is None else [options.fim_rate, options.spm_rate],
    }
    for note in notes:
        report(note)
    if reused:
        report(f"the tokens in {folder} are reused: nothing has changed.")
    held_out = files[1] if record["held_out"] else None
    return Prepared(options, tokenizer, end_of_text, fim, files[0], held_out, facts, notes, reused)


RECORD_TYPES = {
    "asked": str,
    "bytes": int,
    "stamp": str,
    "data": str,
    "tokens": str,
    "vocabulary": str,
    "held_out": bool,
    "notes": list,
}


def _read_record(folder: Path) -> dict[str, Any]:
    """What was kept about the files in the folder; empty when there is nothing to go by."""
    try:
        record = json.loads(read_text(folder / "data.json"))
    except (InputError, ValueError, RecursionError):
        return {}
    whole = isinstance(record, dict) and all(isinstance(record.get(key), kind) for key, kind in RECORD_TYPES.items())
    return record if whole else {}


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    temporary = folder / "data.json.tmp"
    try:
        temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
        temporary.replace(folder / "data.json")
    except OSError as error:
        raise unwritable(folder / "data.json", error) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder} cannot be made: {error.strerror}.") from error
