"""The contract of an engine, the ragged batch that each of them runs, and the choice between them."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from starscope import native
from starscope.cache import Cache
from starscope.errors import ContextOverflowError, InvalidContentError, UnsupportedError, UsageError
from starscope.graph import Graph

if TYPE_CHECKING:
    from starscope.engine.passes import Pass
    from starscope.engine.weights import Weights
    from starscope.family import HParams

Array = npt.NDArray[Any]
Sequences = Sequence[Sequence[int] | Array]
Wanted = Literal["last", "all"]

# The lowest finite float32: what a masked score holds.
MASKED = float(np.finfo(np.float32).min)


class Engine(Protocol):
    """Runs a graph.

    `forward` runs one step: for each sequence its new tokens, as ids `[n]` or as embeddings `[n hidden_size]` that
    take the place of `token_embeddings`, and its cache, which grows by them (None: no history, nothing kept). It
    returns float32 logits for each sequence: `[1 vocab_size]` for "last", `[n vocab_size]` for "all". A sequence's
    logits do not depend on the other sequences, nor on how its tokens were split into steps, beyond rounding.
    Raises ContextOverflowError past the model's positions and InvalidContentError for ids out of range; no cache
    has changed then. `edits` change values on the way; `edits` of an engine are those that its every step has.
    """

    name: str
    runs_ahead: bool  # whether stopping a pass costs so much that it is worth foreseeing what will be read
    device: str
    threads: int
    graph: Graph
    context_length: int

    @property
    def edits(self) -> StepEdits | None: ...

    def new_cache(self) -> Cache: ...

    def prepare(self) -> None:
        """Decode whatever weights are not decoded yet, so that the first step costs what the others do."""

    def forward(
        self,
        sequences: Sequences,
        caches: Sequence[Cache] | None = None,
        wanted: Wanted = "last",
        *,
        edits: StepEdits | None = None,
    ) -> list[Array]: ...

    def begin(self, sequences: Sequences, caches: Sequence[Cache] | None = None, wanted: Wanted = "last") -> Pass:
        """The same step, not yet run, which can stop between any two operations."""

    def run_tail(self, edge: int, rows: Any) -> Any:
        """The logits `[n vocab_size]` that follow from rows `[n hidden_size]` of `final_norm_output` or of the last
        block's output, in the engine's own arrays; while a pass is under way too.
        """


@dataclass(frozen=True)
class Batch:
    """One step's input: the new tokens of every sequence one after another, each with its own position."""

    ids: Array | None  # int64 [rows]
    embeddings: Array | None  # float32 [rows hidden_size], instead of ids
    positions: Array  # int64 [rows]
    lengths: list[int]  # new tokens of each sequence
    pasts: list[int]  # cached tokens of each sequence
    caches: list[Any]  # each engine's own kind of Cache
    wanted: Array  # int64 [wanted], rows
    wanted_lengths: list[int]

    @property
    def starts(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    def split_wanted(self, logits: Array) -> list[Array]:
        """Logits `[wanted vocab_size]` cut into one array a sequence."""
        ends = list(itertools.accumulate(self.wanted_lengths))
        return [logits[end - length : end] for end, length in zip(ends, self.wanted_lengths, strict=True)]

    def advance(self) -> None:
        """Tell every cache that the step is complete."""
        starts = self.starts
        for i, cache in enumerate(self.caches):
            ids = None if self.ids is None else self.ids[starts[i] : starts[i + 1]].tolist()
            cache.advance(ids, self.lengths[i])


class EditRows(NamedTuple):
    """One change of some rows of a value: `x[row, first_col : first_col + cols] = scale * x + values`, in float32.

    A scale of 0 writes exactly `values`, whatever was there. `rows` count from the first row of the piece that is run;
    of a value with the axis "wanted" they count its wanted rows. A value's other axes are one behind the other in the
    columns: `head * head_dim + d`.

    Keys and values are changed in their new rows, once these are rounded as the cache keeps them, and rounded again.
    Scores and probabilities: a row is a query, columns are key positions, of the heads `first_head` and up; keys behind
    the query are left out.
    """

    rows: Array  # int64 [n]
    first_col: int
    cols: int
    scale: float
    values: Array  # float32 [n or 1, cols or 1]
    first_head: int = 0
    heads: int = 0  # 0: not a value with heads of its own, as scores have


class StepEdits(Protocol):
    """Changes of values, by edge, at the rows that their positions select. They come right behind a value's producer,
    in order; `key` tells two apart.
    """

    @property
    def edges(self) -> Set[int]:
        """The edges that any step may change."""

    def of_step(self, batch: Batch, start: int, stop: int) -> Mapping[int, Sequence[EditRows]]:
        """The changes of rows start to stop of a batch, by edge, without edges that have none."""

    def key(self, prompt_length: int, row: int) -> object:
        """What the keys and values of a prompt depend on besides its tokens; equal for equal changes."""


def make_batch(engine: Engine, sequences: Sequences, caches: Sequence[Cache] | None, wanted: Wanted) -> Batch:
    """Check a step's input against the model and lay it out. Nothing is changed when it is refused."""
    hp = engine.graph.hp
    if not len(sequences):
        raise InvalidContentError("no sequence was given; expected at least one.")
    if caches is not None and len(caches) != len(sequences):
        raise InvalidContentError(f"{len(caches)} caches for {len(sequences)} sequences; expected one each.")
    own = caches is None
    caches = [engine.new_cache() for _ in sequences] if caches is None else list(caches)
    if len({id(cache) for cache in caches}) != len(caches):
        raise InvalidContentError("one cache was given for two sequences; expected one each.")
    arrays = [_as_input(sequence, hp) for sequence in sequences]
    embedded = arrays[0].ndim == 2
    if any((array.ndim == 2) != embedded for array in arrays):
        raise InvalidContentError("some sequences are token ids and some are embeddings; expected one kind.")
    lengths = [len(array) for array in arrays]
    for length, cache in zip(lengths, caches, strict=True):
        total = cache.length + length
        if total > cache.context_length:
            raise ContextOverflowError(
                f"{total} tokens do not fit: the context is {cache.context_length} tokens.",
                hint="Shorten the prompt; this family has no positions past its end.",
            )
    if own:
        for row, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
            cache.row, cache.prompt_length = row, length
    pasts = [cache.length for cache in caches]
    rows = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    positions = [np.arange(past, past + n) for past, n in zip(pasts, lengths, strict=True)]
    return Batch(
        ids=None if embedded else rows,
        embeddings=rows if embedded else None,
        positions=positions[0] if len(positions) == 1 else np.concatenate(positions),
        lengths=lengths,
        pasts=pasts,
        caches=caches,
        wanted=np.array([end - 1 for end in itertools.accumulate(lengths)])
        if wanted == "last"
        else np.arange(len(rows)),
        wanted_lengths=[1] * len(arrays) if wanted == "last" else lengths,
    )


def _as_input(sequence: Any, hp: HParams) -> Array:
    """Ids as int64 `[n]` or embeddings as float32 `[n hidden_size]`, of the model's range and width."""
    if isinstance(sequence, list) and len(sequence) == 1 and type(sequence[0]) is int:  # decoding: not much else to do
        low = high = sequence[0]
        array = np.array(sequence)
    else:
        array = np.asarray(sequence)
        if array.ndim == 2:
            if array.shape[1] != hp.hidden_size or array.dtype.kind != "f":
                raise InvalidContentError(
                    f"embeddings are {array.dtype} {list(array.shape)}; expected float [n {hp.hidden_size}]."
                )
        elif array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
            raise InvalidContentError(f"a sequence is {array.dtype} {list(array.shape)}; expected a list of token ids.")
        if not len(array):
            raise InvalidContentError("a sequence has no token; expected at least one.")
        if array.ndim == 2:
            return array.astype(np.float32)
        low, high = int(array.min()), int(array.max())
    if low < 0 or high >= hp.vocab_size:
        wrong = next(int(i) for i in array if not 0 <= i < hp.vocab_size)
        raise InvalidContentError(f"token id {wrong} is out of range; expected 0 to {hp.vocab_size - 1}.")
    return array.astype(np.int64)


def whole_batch(rows: int) -> Batch:
    """So many rows, all of them wanted, for a run of operations that looks at nothing else of a batch."""
    every = np.arange(rows)
    return Batch(None, None, every, [rows], [0], [], every, [rows])


def input_values(graph: Graph, batch: Batch) -> tuple[dict[int, Array], int]:
    """The edges that are known before the first op, and the index of the first op to run.

    Embeddings stand for the output of the op that embeds `input_ids`, which is then left out.
    """
    values: dict[int, Array] = {graph.inputs["positions"]: batch.positions}
    if batch.ids is not None:
        return {graph.inputs["input_ids"]: batch.ids, **values}, 0
    first = graph.ops[0]
    if first.kind != "embed" or first.attrs["source"] != "input_ids":
        raise UnsupportedError(
            f"{graph.family.name} cannot be fed embeddings: it does not begin with its token embedding."
        )
    assert batch.embeddings is not None
    return {first.outputs[0]: batch.embeddings, **values}, 1


# name -> the module and class that implement it, and the package that they need
ENGINES: Mapping[str, tuple[str, str, str]] = {
    "native": ("starscope.engine.native_engine", "NativeEngine", "starscope"),
    "numpy": ("starscope.engine.numpy_engine", "NumpyEngine", "numpy"),
    "torch": ("starscope.engine.torch_engine", "TorchEngine", "torch"),
}
MAX_THREADS = 4096


def choose_engine(device: str) -> tuple[str, str | None]:
    """The engine for a device when none is asked for, and a line to say when it is not the fastest there could be.

    The native one on the CPU; without the compiled module torch, or else NumPy. torch for any other device.
    """
    if device not in ("auto", "cpu"):
        return "torch", None
    if native.kernels() is not None:
        return "native", None
    name = "torch" if importlib.util.find_spec("torch") is not None else "numpy"
    return name, f"the {name} engine runs it: the native one is not in this installation ({native.why_missing()})."


def make_engine(
    name: str,
    graph: Graph,
    weights: Weights,
    *,
    device: str = "auto",
    context_length: int | None = None,
    threads: int | None = None,
) -> Engine:
    """An engine for a graph. "auto" takes what `choose_engine` says.

    `context_length` limits the positions (default: all of the model's); `threads` the cores used.
    """
    if not isinstance(device, str) or not device:
        raise UsageError(f"device is {device!r}; expected auto, cpu, cuda, cuda:1, ...")
    if name == "auto":
        name, _ = choose_engine(device)
    if name not in ENGINES:
        raise UsageError(f"engine {name!r} is unknown; expected auto, {', '.join(ENGINES)}.")
    if name != "torch" and device not in ("auto", "cpu"):
        raise UsageError(f"the {name} engine runs on the CPU; device {device!r} needs the torch engine.")
    limit = check_context_length(graph, context_length)
    if threads is not None and not (_is_count(threads) and 1 <= threads <= MAX_THREADS):
        raise UsageError(f"threads is {threads}; expected 1 to {MAX_THREADS}.")
    module, cls, needs = ENGINES[name]
    if importlib.util.find_spec(needs) is None:
        raise UnsupportedError(
            f"the {name} engine needs {needs}, which is not installed.",
            hint=f"Install {needs}, or leave the engine to be chosen.",
        )
    engine: Engine = getattr(importlib.import_module(module), cls)(
        graph,
        weights,
        device="cpu" if device == "auto" else device,
        context_length=context_length or limit,
        threads=threads,
    )
    return engine


def check_context_length(graph: Graph, asked: int | None) -> int:
    """The positions that a model has. UsageError or ContextOverflowError when others are asked for."""
    limit = int(graph.hp.context_length)
    if asked is not None and (not _is_count(asked) or asked < 1):
        raise UsageError(f"the context is {asked}; expected a number of tokens, 1 to {limit}.")
    if asked is not None and asked > limit:
        raise ContextOverflowError(f"a context of {asked} tokens was asked for; this model has 1 to {limit}.")
    return limit


def _is_count(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
