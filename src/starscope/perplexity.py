"""How well a model predicts given text: perplexity and bits per byte, each document by itself.

A document is cut into windows that begin `stride` tokens apart, so that each of its tokens is predicted once, from at
least `window - stride` tokens before it where the document has so many. Before the first token stands the
vocabulary's own token for an empty prompt. Perplexity is the exponential of the mean loss of a token and compares
models of one vocabulary; bits per byte, the total negative log2-likelihood divided by the text's UTF-8 bytes, compares
any two models, and a model with a compressor (8 x compressed bytes / bytes).

    found = measure_texts(model.engine, model.tokenizer, [Path("a.py").read_text(), Path("b.py").read_text()])
    print(found.perplexity, found.bits_per_byte)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from starscope.errors import InvalidContentError, UsageError
from starscope.generate import first_id

if TYPE_CHECKING:
    from starscope.engine import Engine
    from starscope.tokenizer import Tokenizer

MOST_ROWS = 2048  # tokens run at a time: enough to keep the cores busy
LOGIT_BYTES = 64 << 20  # and fewer where the vocabulary is large
MAX_EXPONENT = 709.0  # the exponential of 710 is past float64

Ids = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]
"""Is told the bytes of text done and the bytes in all."""


@dataclass(frozen=True)
class Perplexity:
    """What was measured: the summed negative log-likelihood in nats of `tokens` tokens, which are `bytes` of UTF-8.

    `window` and `stride` are in tokens.
    """

    nats: float
    tokens: int
    bytes: int
    window: int
    stride: int

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss in nats a token; infinite past what a float holds."""
        mean = self.nats / self.tokens
        return math.exp(mean) if mean < MAX_EXPONENT else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Total negative log2-likelihood divided by bytes."""
        return self.nats / math.log(2) / self.bytes


@dataclass(frozen=True)
class Window:
    """A stretch of one document: `ids` to run, of whose predictions the last `scored` count."""

    ids: Ids  # [seq+1]
    scored: int


def windows(document: Sequence[int] | Ids, first: int, window: int, stride: int) -> Iterator[Window]:
    """Cut a document, behind the token `first`, so that each of its tokens is predicted once.

    No window runs more than `window` tokens; its predictions begin where those of the one before ended.
    """
    ids = np.concatenate([[first], document]).astype(np.int64)
    done = 1  # ids[:done] are predicted or given
    while done < len(ids):
        stop = min(len(ids), window + 1 if done == 1 else done + stride)
        yield Window(ids[max(0, stop - window - 1) : stop], stop - done)
        done = stop


def measure_texts(
    engine: Engine,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    stride: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Measure texts, one document each, in windows of all the engine's positions, `stride` (default: half) apart.

    Text never turns into special tokens. Raises UsageError for a stride that is out of range and for a vocabulary
    without a token to begin with, InvalidContentError for texts that are all empty and for logits that are no numbers.
    """
    window = engine.context_length
    stride = max(1, window // 2) if stride is None else stride
    documents = [tokenizer.encode(text) for text in texts]
    size = sum(len(text.encode()) for text in texts)
    return measure(engine, documents, size, first=first_id(tokenizer), window=window, stride=stride, progress=progress)


def measure(
    engine: Engine,
    documents: Sequence[Sequence[int] | Ids],
    size: int,
    *,
    first: int,
    window: int,
    stride: int,
    progress: Progress | None = None,
) -> Perplexity:
    """Measure documents of token ids, which are `size` bytes of text altogether; errors as for `measure_texts`."""
    if not 1 <= stride <= window:
        raise UsageError(f"the stride is {stride}; expected from 1 to the window, {window} tokens.")
    tokens = sum(len(document) for document in documents)
    if not tokens:
        raise InvalidContentError("there is no text to measure; expected at least one token.")
    rows = max(1, min(MOST_ROWS, LOGIT_BYTES // (4 * engine.graph.hp.vocab_size)))
    cut = (part for document in documents for part in windows(document, first, window, stride))
    nats, done = 0.0, 0
    for group in _groups(cut, rows):
        nats += _group_nats(engine, group) if len(group) > 1 else _window_nats(engine, group[0], rows)
        done += sum(part.scored for part in group)
        if progress is not None:
            progress(size * done // tokens, size)
    return Perplexity(nats, tokens, size, window, stride)


def _groups(cut: Iterable[Window], rows: int) -> Iterator[list[Window]]:
    """Windows that together have at most `rows` tokens to run; one that has more stands alone."""
    group: list[Window] = []
    for part in cut:
        if group and sum(len(other.ids) - 1 for other in group) + len(part.ids) - 1 > rows:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _group_nats(engine: Engine, group: Sequence[Window]) -> float:
    """The summed loss of several windows, run as one batch."""
    logits = engine.forward([part.ids[:-1] for part in group], None, "all")
    return sum(_nats(rows[-part.scored :], part.ids[-part.scored :]) for rows, part in zip(logits, group, strict=True))


def _window_nats(engine: Engine, window: Window, rows: int) -> float:
    """The summed loss of one window, run at most `rows` tokens at a time."""
    cache, ids = engine.new_cache(), window.ids[:-1]
    cache.prompt_length = len(ids)
    before = len(ids) - window.scored
    for start in range(0, before, rows):
        engine.forward([ids[start : min(start + rows, before)]], [cache], "last")
    nats = 0.0
    for start in range(before, len(ids), rows):
        stop = min(start + rows, len(ids))
        [logits] = engine.forward([ids[start:stop]], [cache], "all")
        nats += _nats(logits, window.ids[start + 1 : stop + 1])
    return nats


def _nats(logits: NDArray[np.float32], targets: Ids) -> float:
    """The summed negative log-likelihood of `targets` [n] under `logits` [n vocab_size]; sums are float64."""
    highest = logits.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        totals = np.exp(logits - highest).sum(axis=1, dtype=np.float64)
        of_targets = (highest[:, 0] - logits[np.arange(len(targets)), targets]).astype(np.float64)
        nats = float((np.log(totals) + of_targets).sum())
    if not math.isfinite(nats):
        raise InvalidContentError(
            "the model's logits are not all finite numbers.", hint="The weights are damaged, or out of float32's range."
        )
    return nats
