"""What a run would read, without making it: sizes, tokens, what is held out, and whether the model could know it.

    report = examine(DataOptions(["src"], vocab_size=2048))
    print(report.train_tokens, report.leakage.line_share, report.problems)

Memory stays constant whatever the text's size: everything is read a little at a time, and of a large text the tokens
are counted in evenly spread pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from starscope.errors import InvalidContentError, StarscopeError
from starscope.train.data import Codec
from starscope.train.documents import Corpus, Passage, find_documents, survey
from starscope.train.leakage import Leakage, measure_leakage
from starscope.train.prepare import DataOptions, Progress, nothing
from starscope.train.split import Split, split_text
from starscope.train.vocabularies import (
    BPE,
    DEFAULT_VOCAB_SIZE,
    character_vocabulary,
    find_end_of_text,
    find_fim,
    open_tokenizer,
    text_to_learn_from,
)

COUNTED_BYTES = 2 << 20  # of each part whose tokens are counted; more is estimated from as much
VOCABULARY_BYTES = 8 << 20  # of text that a vocabulary is tried on
MUCH = 0.1  # a share of held-out 13-grams that is worth a word


@dataclass(frozen=True)
class Problem:
    """What would stop a run, or spoil what it measures. `status` is what the run would end with; 0: it would go on."""

    text: str
    status: int = 0


@dataclass(frozen=True)
class DataReport:
    """Sizes are in bytes of text; `is_estimate` says whether the tokens were counted or estimated from a part.

    `notes` are what was found, assumed or left out.
    """

    documents: int
    left_out: dict[str, int]  # files by reason
    bytes: int
    vocab: str
    vocab_size: int
    train_documents: int
    train_bytes: int
    train_tokens: int
    held_out_documents: int
    held_out_bytes: int
    held_out_tokens: int
    held_out_share: float
    is_estimate: bool
    samples: int  # in an epoch
    leakage: Leakage | None  # None when nothing is held out
    notes: list[str]
    problems: list[Problem]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "problems": [problem.text for problem in self.problems]}


def examine(options: DataOptions, progress: Progress = nothing) -> DataReport:
    """Read the text and report; nothing is written. Raises what `prepare` raises for text and tokenizers."""
    found = find_documents(options.paths, suffixes=options.suffixes, exclude=options.exclude)
    corpus = survey(found, lambda done, total: progress("reading", done, total))
    parts = split_text(corpus.passages, options.held_out, options.split)
    problems: list[Problem] = []
    notes = [*corpus.notes, parts.note]
    codec, vocab_size, has_fim = _vocabulary(options, corpus, parts, problems)
    if options.fim_rate > 0 and not has_fim:
        notes.append("the vocabulary has no tokens for filling in the middle: all text stays in its order.")
    tokens = {name: _count(codec, passages) for name, passages in (("train", parts.train), ("held", parts.held_out))}
    leakage = measure_leakage(parts.train, parts.held_out) if parts.held_out else None
    if leakage is not None and leakage.gram_share > MUCH:
        share = f"{leakage.gram_share:.0%} of the held-out runs of 13 words are in the training text too"
        problems.append(Problem(f"{share}: what is measured on them is partly memory."))
    train_tokens = tokens["train"][0]
    if train_tokens < options.context_length:
        found_tokens = f"the text to train on has {train_tokens} tokens"
        expected = f"expected at least the context, {options.context_length}"
        problems.append(Problem(f"{found_tokens}; {expected}.", InvalidContentError.exit_status))
    train_bytes, held_out_bytes = _bytes(parts.train), _bytes(parts.held_out)
    return DataReport(
        documents=len(corpus.passages),
        left_out=dict(sorted((+corpus.left_out).items())),
        bytes=corpus.bytes,
        vocab=str(options.vocab),
        vocab_size=vocab_size,
        train_documents=len(parts.train),
        train_bytes=train_bytes,
        train_tokens=train_tokens,
        held_out_documents=len(parts.held_out),
        held_out_bytes=held_out_bytes,
        held_out_tokens=tokens["held"][0],
        held_out_share=held_out_bytes / corpus.bytes,
        is_estimate=not all(exact for _, exact in tokens.values()),
        samples=train_tokens // options.context_length,
        leakage=leakage,
        notes=notes,
        problems=problems,
    )


def _bytes(passages: Sequence[Passage]) -> int:
    return sum(passage.bytes for passage in passages)


def _vocabulary(options: DataOptions, corpus: Corpus, parts: Split, problems: list[Problem]) -> tuple[Codec, int, bool]:
    """A codec like that of the run, its size, and whether it can mark a middle."""
    if options.vocab == "chars":
        characters = {
            character for passage in corpus.passages for piece in passage.pieces() for character in set(piece)
        }
        bpe = character_vocabulary(characters, fim=options.fim_rate > 0)
        return bpe, bpe.vocab_size, options.fim_rate > 0
    if options.vocab == "bpe":
        _, pieces = text_to_learn_from(parts.train, VOCABULARY_BYTES)
        size = options.vocab_size or DEFAULT_VOCAB_SIZE
        try:
            bpe = BPE.train(pieces, size, at_most=True)
        except StarscopeError as error:
            raise InvalidContentError(f"no vocabulary can be made: {error.message}") from error
        if options.vocab_size is not None and bpe.vocab_size != size and _bytes(parts.train) <= VOCABULARY_BYTES:
            text = f"the text gives {bpe.vocab_size} tokens; a vocabulary of {size} was asked for."
            problems.append(Problem(text, InvalidContentError.exit_status))
        return bpe, size if options.vocab_size is not None else bpe.vocab_size, True
    tokenizer = open_tokenizer(options.vocab)
    tokenizer.to_metadata()  # refuses what the finished model's file could not hold
    end_of_text = find_end_of_text(tokenizer, str(options.vocab))
    return tokenizer, tokenizer.vocab_size, find_fim(tokenizer, end_of_text) is not None


def _spread(passages: Sequence[Passage], most_bytes: int) -> Iterator[str]:
    """Pieces evenly spread over the text, about `most_bytes` in all."""
    every = max(1, -(-_bytes(passages) // most_bytes))
    pieces = (piece for passage in passages for piece in passage.pieces())
    return (piece for number, piece in enumerate(pieces) if number % every == 0)


def _count(codec: Codec, passages: Sequence[Passage]) -> tuple[int, bool]:
    """The tokens of documents with their ends, and whether all of the text was counted."""
    tokens = size = 0
    for piece in _spread(passages, COUNTED_BYTES):
        tokens += len(codec.encode(piece))
        size += len(piece.encode())
    total = _bytes(passages)
    exact = size == total
    return (tokens if exact else round(tokens * total / max(size, 1))) + len(passages), exact
