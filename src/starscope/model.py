r"""`load()` and what it gives: a model with its tokenizer, its recorded graph and the engine that runs it.

    model = starscope.load("model.gguf")
    print(model.generate("def fibonacci(n):", max_new_tokens=40).text)
    print(model.generate("def add(a, b):\n    return ", suffix="\n\nprint(add(1, 2))").text)
    logits = model.forward(model.tokenizer.encode("x = 1"))      # [1 seq vocab_size]

MODEL is a `.gguf` file, a Hugging Face folder, "demo", the small model that comes with the package, or a hub name,
`owner/name[@revision][:TYPE]`. A path that exists is always the path.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np

from starscope import infill
from starscope.batching import generate_batch, of_prompt
from starscope.cache import Cache
from starscope.checkpoint import open_checkpoint
from starscope.checkpoint.content import short
from starscope.engine import Engine, Weights
from starscope.engine.split.choose import Placed, Placing, formats_of, place
from starscope.engine.weights import open_weights
from starscope.errors import (
    CheckpointError,
    GGUFError,
    InputError,
    InvalidContentError,
    StarscopeError,
    UsageError,
)
from starscope.family import Family, HParams, find_family_of_file, hparams_from_metadata
from starscope.generate import Completion, Piece, check_limits, generate, last_piece
from starscope.gguf.reader import GGUFFile, read_gguf
from starscope.graph import Graph, record
from starscope.hub import fetch_model, find_name
from starscope.infill import FimOrder, InfillArguments, InfillPrompt
from starscope.inputs import is_batch, sequences, token_ids
from starscope.lora import Given, adapt, as_given
from starscope.mapping import map_checkpoint
from starscope.microscope import Edit, Root, Scope
from starscope.microscope.editing import edited
from starscope.placement import Layers
from starscope.sampling import SAMPLERS, SamplingArguments, SamplingOptions, check_tokens, is_number
from starscope.tokenizer import Token, Tokenizer


class GenerateArguments(SamplingArguments, InfillArguments, total=False):
    """The options of `Model.generate` that choose tokens or describe a hole, by name."""


class Model(Root):
    """A loaded model. Sizes are read-only attributes; `notes` says what was assumed while loading, a line each."""

    def __init__(
        self,
        path: Path,
        weights: Weights,
        tokenizer: Tokenizer,
        engine: Engine,
        notes: Sequence[str] = (),
        load_s: float = 0.0,
        placed: Placed | None = None,
    ) -> None:
        self.path, self.weights, self.tokenizer, self.graph = path, weights, tokenizer, engine.graph
        self.family, self.hparams = self.graph.family, self.graph.hp
        self.notes, self.load_s, self.placed = list(notes), load_s, placed or Placed(engine)
        self._idle_cache: Cache | None = None
        self.scope = Scope(engine, weights, tokenizer)

    def with_edits(self, edits: Edit | Sequence[Edit]) -> Model:
        """This model under edits, as another: the engine and the weights are shared and stay as they are.

        UsageError for an edit that the model cannot have.
        """
        engine = edited(self.scope.engine, edits, self.scope)
        return Model(self.path, self.weights, self.tokenizer, engine, self.notes, self.load_s, self.placed)

    def __repr__(self) -> str:
        shape = f"{self.family.name}, {self.num_layers} × {self.hidden_size}"
        return f"<starscope.Model {self.path.name}: {shape}, engine {self.engine.name}>"

    @property
    def num_layers(self) -> int:
        return int(self.hparams.num_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.hparams.hidden_size)

    @property
    def num_heads(self) -> int:
        return int(self.hparams.num_heads)

    @property
    def num_kv_heads(self) -> int:
        return int(self.hparams.num_kv_heads)

    @property
    def head_dim(self) -> int:
        return int(self.hparams.head_dim)

    @property
    def qk_head_dim(self) -> int:
        return int(self.hparams.qk_head_dim)

    @property
    def intermediate_size(self) -> int:
        return int(self.hparams.intermediate_size)

    @property
    def vocab_size(self) -> int:
        return int(self.hparams.vocab_size)

    @property
    def context_length(self) -> int:
        """The positions that may be used: the model's own, or fewer when `load` was told so."""
        return self.engine.context_length

    def forward(self, ids: Any) -> Any:
        """Logits of every position: float32 `[batch seq vocab_size]`, a torch tensor when torch is installed.

        `ids` is a list of token ids, a list of such lists, or embeddings `[seq hidden_size]` (or a batch of them)
        that take the place of the token embeddings. Sequences of different lengths are run as they are and presented
        left-padded with zeros, so that `[:, -1]` is each one's last token.
        """
        logits = self.engine.forward(sequences(ids), None, "all")
        longest = max(len(rows) for rows in logits)
        out = np.zeros((len(logits), longest, self.vocab_size), np.float32)
        for i, rows in enumerate(logits):
            out[i, longest - len(rows) :] = rows
        if importlib.util.find_spec("torch") is None:
            return out
        import torch

        return torch.from_numpy(out)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts too; the first match counts
        self,
        prompt: str | Sequence[int],
        suffix: str | None = ...,
        *,
        max_new_tokens: int = ...,
        stop: str | Sequence[str] = ...,
        logprobs: int = ...,
        heal: bool = ...,
        stream: Literal[False] = ...,
        **options: Unpack[GenerateArguments],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = ...,
        *,
        max_new_tokens: int = ...,
        stop: str | Sequence[str] = ...,
        logprobs: int = ...,
        heal: bool = ...,
        stream: Literal[True],
        **options: Unpack[GenerateArguments],
    ) -> Iterator[Piece]: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        suffix: str | None = ...,
        *,
        max_new_tokens: int = ...,
        stop: str | Sequence[str] = ...,
        logprobs: int = ...,
        heal: bool = ...,
        stream: Literal[False] = ...,
        **options: Unpack[GenerateArguments],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        suffix: str | None = None,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        mirostat: int = 0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        logprobs: int = 0,
        stream: bool = False,
        typical_p: float = 1.0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        penalty_window: int = 64,
        logit_bias: Mapping[int, float] | None = None,
        samplers: str | Sequence[str] = SAMPLERS,
        fim_order: FimOrder = "psm",
        files: Sequence[tuple[str, str]] = (),
        repository: str | None = None,
        filename: str | None = None,
        heal: bool = False,
    ) -> Completion | Iterator[Piece] | list[Completion]:
        """Continue a prompt (text, or token ids), or fill the hole between it and `suffix`.

        A list of prompts gives a list of completions, in order: they share the engine's steps, and each is what its
        prompt gives alone with the same options, `suffix` and `seed` among them.

        `fim_order`, `files` ((name, text) of other files, the most useful last), `repository` and `filename` are for
        a hole: `infill.infill_prompt` says what they do. `heal` takes back the last token of the text before the
        cursor and starts with tokens that agree with it (`infill.take_back`).

        `max_new_tokens` and `logprobs` count tokens; `SamplingOptions` says what the other options do. With
        `stream=True` an iterator of pieces whose texts, joined, are the completion's; the last piece carries the
        completion. Text never turns into special tokens. Raises UsageError for an option out of range,
        ContextOverflowError for a prompt over the context and UnsupportedError for `suffix` on a model without
        fill-in-the-middle tokens. Consecutive calls reuse the cache as far as their prompts begin alike.
        """
        options = SamplingOptions(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            typical_p=typical_p,
            mirostat=mirostat,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            penalty_window=penalty_window,
            logit_bias=logit_bias,
            samplers=samplers,
        )
        if suffix is not None and not isinstance(suffix, str):
            raise UsageError(f"the suffix is {type(suffix).__name__}; expected one text, the same for every prompt.")
        if not isinstance(prompt, str) and hasattr(prompt, "__len__") and not len(prompt):
            raise UsageError("an empty list was given; expected a text, token ids, or a list of prompts.")
        check_tokens(logit_bias or {}, self.vocab_size)
        check_limits(max_new_tokens, stop, logprobs)
        hole: InfillArguments = {
            "fim_order": fim_order,
            "files": files,
            "repository": repository,
            "filename": filename,
        }
        read = partial(self._prompt, suffix=suffix, max_new_tokens=max_new_tokens, hole=hole, heal=heal)
        stop_ids = self.tokenizer.stop_ids if suffix is None else self.tokenizer.infill_stop_ids
        if is_batch(prompt):
            if stream:
                raise UsageError(
                    f"stream=True gives the pieces of one prompt; {len(prompt)} were given in a list.",
                    hint="Leave stream out, or call generate once for each prompt.",
                )
            return self._generate_batch(prompt, read, stop_ids, max_new_tokens, options, stop, logprobs)
        made = read(prompt)
        self._prepare()
        # One cache waits between calls. A call that begins while another still streams gets its own.
        cache, self._idle_cache = self._idle_cache or self.engine.new_cache(), None
        pieces = generate(
            self.engine,
            self.tokenizer,
            made.ids,
            max_new_tokens=max_new_tokens,
            options=options,
            stop=stop,
            stop_ids=stop_ids,
            cache=cache,
            logprobs=logprobs,
            load_s=self.load_s,
            begin=made.begin,
        )
        pieces = self._returning(cache, pieces, made.dropped)
        return pieces if stream else last_piece(pieces)

    def _generate_batch(
        self,
        prompts: Sequence[Any],
        read: Callable[[Any], InfillPrompt],
        stop_ids: frozenset[int],
        max_new_tokens: int,
        options: SamplingOptions,
        stop: str | Sequence[str],
        logprobs: int,
    ) -> list[Completion]:
        made = []
        for i, prompt in enumerate(prompts):
            try:
                made.append(read(prompt))
            except StarscopeError as error:
                raise of_prompt(i, error) from None
        self._prepare()
        completions = generate_batch(
            self.engine,
            self.tokenizer,
            [one.ids for one in made],
            max_new_tokens=max_new_tokens,
            options=options,
            stop=stop,
            stop_ids=stop_ids,
            logprobs=logprobs,
            load_s=self.load_s,
            begins=[one.begin for one in made],
        )
        return [
            replace(completion, dropped_tokens=one.dropped) for completion, one in zip(completions, made, strict=True)
        ]

    def _prompt(
        self, prompt: Any, *, suffix: str | None, max_new_tokens: int, hole: InfillArguments, heal: bool
    ) -> InfillPrompt:
        """A prompt's ids, the tokens around the hole that were left out, and what the text must begin with."""
        if (heal or suffix is not None) and not isinstance(prompt, str):
            what = "healing" if suffix is None else "a suffix"
            raise InvalidContentError(f"{what} needs the prompt as text; found {type(prompt).__name__}.")
        if suffix is not None:
            budget = infill.infill_budget(self.context_length, max_new_tokens)
            return infill.infill_prompt(self.tokenizer, prompt, suffix, budget=budget, heal=heal, **hole)
        infill.check_there_is_a_hole(**hole)
        if not isinstance(prompt, str):
            if isinstance(prompt, (list, tuple)) and any(isinstance(i, bool) for i in prompt):
                raise InvalidContentError(f"a prompt is {short(prompt)}; expected token ids, whole numbers.")
            return InfillPrompt(token_ids(prompt, self.vocab_size), 0)
        ids, begin = self.tokenizer.encode(prompt), b""
        if heal:
            ids, begin = infill.take_back(self.tokenizer, ids)
        if self.tokenizer.add_bos and self.tokenizer.bos_id is not None:
            ids = [self.tokenizer.bos_id, *ids]
        return InfillPrompt(ids, 0, begin)

    def _prepare(self) -> None:
        began = time.perf_counter()
        self.engine.prepare()
        self.load_s += time.perf_counter() - began

    def _returning(self, cache: Cache, pieces: Iterator[Piece], dropped: int) -> Iterator[Piece]:
        try:
            for piece in pieces:
                if piece.completion is not None and dropped:
                    piece = replace(piece, completion=replace(piece.completion, dropped_tokens=dropped))
                yield piece
        finally:
            self._idle_cache = cache

    def vocab(self) -> list[tuple[str, float, int]]:
        """Every token as (piece, score, type), by id; pieces in GGUF's byte-level form, types as GGUF numbers them."""
        tokens: Sequence[Token] = self.tokenizer.vocabulary
        return [(token.piece, token.score, int(token.type)) for token in tokens]


def load(
    model: str | Path,
    *,
    engine: str = "auto",
    device: str = "auto",
    gpu_layers: Layers = "auto",
    low_vram: bool = False,
    context_length: int | None = None,
    threads: int | None = None,
    kv_offload: bool = True,
    main_gpu: int | None = None,
    tensor_split: Sequence[float] | None = None,
    lora: Given | Sequence[Given] = (),
    lora_base: str | Path | None = None,
) -> Model:
    """Load a model and get it ready to run.

    `engine` is auto, native, torch or numpy; `device` anything that torch knows, several with commas between. With a
    GPU the model runs there as far as `gpu_layers` says: a number of rungs of llama.cpp's ladder (the last blocks; the
    norm and the head; values; keys), "all", or "auto": as much as fits. `low_vram` leaves keys, values and the norm
    with the host, `kv_offload=False` keys and values; `main_gpu` and `tensor_split` divide it over several GPUs. The
    model's `placed` says what became of it. `context_length` lowers the number of positions, `threads` sets the cores
    used. `lora` are adapters, PEFT folders or GGUF files, each alone or with a scale: `("style.gguf", 0.5)`;
    `lora_base` is the same model in higher precision, to whose weights they are added before these are rounded to the
    model's formats.

    Raises InputError when there is no such model, GGUFError or CheckpointError for content that does not fit together,
    UnsupportedError for what it does not do or a GPU that is not there, DoesNotFitError for one that is too small.
    """
    began = time.perf_counter()
    _check_placing(engine, main_gpu, tensor_split)
    if not isinstance(lora, (Sequence, PathLike)):
        raise UsageError(f"lora is {short(lora)}; expected a path, or a list of paths, each with or without a scale.")
    adapters = as_given(lora)
    path, (family, hp, weights, tokenizer, notes) = _open(model, context_length)
    if adapters:
        base = None if lora_base is None else open_base(lora_base, weights)
        graph, weights, told = adapt(family, hp, weights, adapters, base)
        notes += told
    elif lora_base is not None:
        raise UsageError("lora_base is only for adapters; expected lora too.")
    else:
        graph = record(family, hp)
    placing = Placing(gpu_layers, low_vram, kv_offload, main_gpu, None if tensor_split is None else tuple(tensor_split))
    placed = place(graph, weights, engine, device, placing, context_length=context_length, threads=threads)
    notes += placed.told
    return Model(path, weights, tokenizer, placed.engine, notes, time.perf_counter() - began, placed)


def _check_placing(engine: object, main_gpu: object, tensor_split: object) -> None:
    """UsageError for what is of another type than `load` says."""
    if not isinstance(engine, str):
        raise UsageError(f"engine is {short(engine)}; expected auto, native, torch or numpy.")
    if main_gpu is not None and not is_number(main_gpu, 0, math.inf, Integral):
        raise UsageError(f"main_gpu is {short(main_gpu)}; expected the number of a GPU, 0 or more.")
    if tensor_split is not None and not (
        isinstance(tensor_split, (Sequence, np.ndarray))
        and all(is_number(share, 0, sys.float_info.max) for share in tensor_split)
    ):
        raise UsageError(f"tensor_split is {short(tensor_split)}; expected a list of shares, numbers of 0 or more.")


def open_graph(model: str | Path, context_length: int | None = None) -> tuple[Graph, Mapping[str, str]]:
    """A model's recorded forward pass, and how each tensor is stored; no weights are read."""
    _, (family, hp, weights, _, _) = _open(model, context_length)
    graph = record(family, hp)
    return graph, formats_of(graph, weights)


def open_base(model: str | Path, weights: Weights) -> Weights:
    """The weights of a model that is the same but for its formats. InvalidContentError when it is another."""
    path, (_, _, found, _, _) = _open(model)
    for name in {**weights.slots, **found.slots}:
        shapes = [list(of.slots[name].shape) if name in of.slots else "missing" for of in (found, weights)]
        if shapes[0] != shapes[1]:
            raise InvalidContentError(
                f"{path} is not a base of this model: {name} is {shapes[0]}; expected {shapes[1]}."
            )
    return found


def find_model(model: str | Path) -> Path:
    """The file or folder that MODEL names, in the shared cache for a hub name; InputError when there is none."""
    if not isinstance(model, (str, PathLike)):
        raise UsageError(
            f"the model is {short(model)}; expected a .gguf file, a Hugging Face folder, owner/name, or demo."
        )
    if not str(model):
        raise UsageError(
            "the model's name is empty; expected a .gguf file, a Hugging Face folder, owner/name, or demo."
        )
    path = Path(model)
    if str(model) == "demo" and not path.exists():
        path = Path(str(resources.files("starscope") / "demo" / "demo.gguf"))
        if not path.is_file():
            raise InputError(f"the demo model is not in this installation ({path}).", hint="Install the package again.")
    if (name := find_name(model)) is not None:
        return fetch_model(name)
    if path.is_symlink() and not path.exists():
        raise InputError(f"{path} is a broken link: its target does not exist, or it leads back to itself.")
    if not path.exists():
        raise InputError(
            f"{path} does not exist.", hint="Give a .gguf file, a Hugging Face folder, owner/name of the hub, or demo."
        )
    return path


Opened = tuple[Family, HParams, Weights, Tokenizer, list[str]]


def _open(model: str | Path, context_length: int | None = None) -> tuple[Path, Opened]:
    """What MODEL names, opened; with the sizes for a context that was asked for, where the family knows longer ones."""
    path = find_model(model)
    family, hp, weights, tokenizer, notes = _open_folder(path) if path.is_dir() else _open_file(path)
    if family.stretch and context_length is not None:
        hp = family.stretch(hp, context_length)
    return path, (family, hp, weights, tokenizer, notes)


def _open_file(path: Path) -> Opened:
    file: GGUFFile = read_gguf(path)
    family = find_family_of_file(file)
    stored = hparams_from_metadata(family, file)
    hp, weights = open_weights(file, family, stored)
    notes = [
        f"{family.gguf_architecture}.{row.gguf} is not in the file; {hp[row.name]} is assumed."
        for row in family.hparams
        if row.gguf
        and row.default is not None
        and not row.optional
        and not any(f"{family.gguf_architecture}.{key}" in file.metadata for key in (row.gguf, *row.also))
    ]
    if hp.num_kv_heads != stored.num_kv_heads:
        notes.append(f"all {stored.num_kv_heads} key and value heads are copies of the first; one is kept.")
    tokenizer = Tokenizer.from_gguf(file, family.default_pre_tokenizer)
    if tokenizer.vocab_size != hp.vocab_size:
        raise GGUFError(
            f"{path} has {tokenizer.vocab_size} tokens for {hp.vocab_size} embeddings; expected the same number."
        )
    return family, hp, weights, tokenizer, notes + tokenizer.notes


def _open_folder(path: Path) -> Opened:
    checkpoint = open_checkpoint(path)
    mapped = map_checkpoint(checkpoint)
    tokenizer = Tokenizer.from_folder(path, checkpoint.config)
    if tokenizer.vocab_size > mapped.hparams.vocab_size:
        raise CheckpointError(
            f"{path} has {tokenizer.vocab_size} tokens for {mapped.hparams.vocab_size} embeddings; "
            "expected at most as many."
        )
    weights = Weights(mapped.family.slots(mapped.hparams), mapped)
    tokenizer = tokenizer.padded(mapped.hparams.vocab_size)
    return mapped.family, mapped.hparams, weights, tokenizer, [*mapped.notes, *tokenizer.notes]
