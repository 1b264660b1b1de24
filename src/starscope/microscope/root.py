"""The model as the root of its parts: values, parts and traces as attributes of `Model`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from starscope.errors import UnsupportedError, UsageError, ValueShapeError
from starscope.inputs import is_batch, sequences
from starscope.microscope.asked import Asked
from starscope.microscope.cached import ActivationCache, Positions, run_with_cache
from starscope.microscope.editing import Editable
from starscope.microscope.hosts import Layers, ValueProperty, layer_index, read_only
from starscope.microscope.positions import check_span, overlapping, token_spans
from starscope.microscope.scan import Scan, is_stand_in, stand_in
from starscope.microscope.scope import Scope
from starscope.microscope.tensors import as_array, as_value
from starscope.microscope.trace import Plan, Session, Trace, current_trace
from starscope.sampling import SamplingOptions

if TYPE_CHECKING:
    from starscope.engine import Weights
    from starscope.family import HParams
    from starscope.sampling import SamplingArguments
    from starscope.tokenizer import Tokenizer


class RootValue(ValueProperty):
    """A value of the whole model."""

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        return self if model is None else model.scope.get(self.name)

    def __set__(self, model: Any, value: Any) -> None:
        model.scope.set(self.name, value)


class Root(Editable):
    """What `Model` has of traces. Its values are attributes, `model.logits`, and so are its parts, `model.layers`."""

    weights: Weights
    tokenizer: Tokenizer
    hparams: HParams
    scope: Scope

    logits, token_embeddings, final_norm_output = (
        RootValue("logits"),
        RootValue("token_embeddings"),
        RootValue("final_norm_output"),
    )
    position_embeddings, lm_head_output = RootValue("position_embeddings"), RootValue("lm_head_output")
    input_ids, attention_mask = RootValue("input_ids"), RootValue("attention_mask")
    next_token_probs = RootValue("next_token_probs")

    @property
    def layers(self) -> Layers:
        """The blocks, in order."""
        layers: Layers = self.scope.part("layers")
        return layers

    @property
    def input_size(self) -> Any:
        """[batch, seq] of the step that is traced; read-only."""
        return current_trace(self.scope.edges).input_size

    @input_size.setter
    def input_size(self, value: Any) -> None:
        raise AttributeError("input_size is read-only; assign input_ids instead.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "scope" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.scope.part(""), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(size := getattr(type(self), name, None), property) and size.fset is None:
            raise AttributeError(read_only(name))
        known = (
            name.startswith("_") or name in self.__dict__ or hasattr(type(self), name) or "scope" not in self.__dict__
        )
        if known:
            object.__setattr__(self, name, value)
        else:
            setattr(self.scope.part(""), name, value)

    def __str__(self) -> str:
        return self.scope.print_part("")

    def support(self, layer: int | None = None) -> dict[str, Any]:
        """Which values there are: None where one can be read, else the reason; of blocks' values the reasons by block.

        With `layer` those of one block alone, without the model's own. In a trace, of its current step: what a skipped
        block would have made is not there. Nothing runs.
        """
        if layer is None:
            return self.scope.support_of("")
        support: dict[str, Any] = self.scope.part("layers")[layer].support()
        return support

    # Traces.

    def trace(
        self,
        prompt: Any = None,
        *,
        max_new_tokens: int | None = None,
        grad: bool = False,
        **options: Unpack[SamplingArguments],
    ) -> Any:
        """Run a prompt (text, ids, embeddings `[seq hidden_size]`, or a list of them) with a look inside.

        With `max_new_tokens` a text is generated, chosen as `SamplingOptions` says. `grad`: values are nodes of torch's
        autograd graph (torch engine). Without a prompt: a block in which `t.invoke(prompt)` makes traces one by one.
        Raises UnsupportedError for gradients on another engine, ContextOverflowError for a prompt over the context and
        DoesNotFitError when its values do not fit into memory.
        """
        if prompt is None:
            return Session(self.trace)
        if grad and self.engine.name != "torch":
            raise UnsupportedError(
                f"the {self.engine.name} engine has no gradients.", hint='Load the model with engine="torch".'
            )
        plan = Plan(self._prompts(prompt), _checked(max_new_tokens), SamplingOptions(**options), grad)
        return Trace(self.engine, self.tokenizer, self.scope.edges, self.scope.reading, plan)

    def scan(self, prompt: Any, *, max_new_tokens: int | None = None) -> Scan:
        """A trace in which nothing runs: values have their shapes and types and no numbers.

        torch tensors on the device "meta", where torch is installed; NumPy arrays without memory elsewhere. With
        `max_new_tokens` there are as many steps, each token a stand-in too.
        """
        plan = Plan(self._prompts(prompt), _checked(max_new_tokens))
        return Scan(self.engine, self.tokenizer, self.scope.edges, self.scope.reading, plan)

    def run_with_cache(
        self, prompt: Any, names: Asked = None, *, stop_at_layer: int | None = None, rows: Positions = None
    ) -> tuple[Any, ActivationCache]:
        """Run a prompt (or a list of them, as for `trace`) and keep the values that are named, and those alone.

        `names`: one, a pattern (`layers.*.layer_output`), a list of both, a function of a name, or None for every
        standard value. `stop_at_layer`: the blocks before this one run and nothing else does; there are no logits then.
        `rows`: the positions to keep, -1 the last one, along `seq` and `query`; of scores and patterns the other
        queries are not even computed where the engine can leave them out.

        Returns the logits `[batch seq vocab_size]` of those positions and the values by name. Raises TraceError for a
        name that is none and, before anything runs, DoesNotFitError when what is to be kept does not fit into memory.
        """
        logits, cache = run_with_cache(
            self.scope, self.engine, self._prompts(prompt), names, stop_at_layer=stop_at_layer, rows=rows
        )
        if logits is None:
            return None, cache
        return (cache["logits"] if "logits" in cache else as_value(logits)), cache

    def keep_values(self, prompt: Any, names: Asked, *, rows: Positions = None) -> ActivationCache:
        """The values of `run_with_cache` alone: nothing runs behind the last of them, and torch is imported no sooner
        than one is asked for as a tensor.
        """
        _, cache = run_with_cache(self.scope, self.engine, self._prompts(prompt), names, rows=rows, wants_logits=False)
        return cache

    def _prompts(self, prompt: Any) -> list[Any]:
        """Ids or embeddings of every prompt."""
        if isinstance(prompt, str):
            return [self._ids(prompt)]
        if is_batch(prompt) and any(isinstance(one, str) for one in prompt):
            if not all(isinstance(one, str) for one in prompt):
                raise UsageError("the prompts are of several kinds; expected texts, or ids, or embeddings.")
            return [self._ids(one) for one in prompt]
        found = [as_array(one) for one in sequences(prompt)]
        if not found:
            raise UsageError("an empty list was given; expected a text, token ids, or a list of prompts.")
        if any(one.ndim == 0 for one in found):
            raise UsageError(
                f"{type(prompt).__name__} of single values was given; expected token ids, which are integers."
            )
        return found

    def _ids(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text)
        if self.tokenizer.add_bos and self.tokenizer.bos_id is not None:
            ids = [self.tokenizer.bos_id, *ids]
        if not ids:
            raise UsageError("the prompt is empty; expected some text.")
        return ids

    # Places in a text.

    def token_spans(self, prompt: str) -> list[tuple[int, int]]:
        """Of each token of a prompt, as a trace runs it, the characters `[start, stop)` of the text that it has a part
        of. A character of several bytes may be of several tokens; a token that the text does not have, a BOS, has none.
        """
        ids = self._ids(prompt)
        added = len(ids) - len(self.tokenizer.encode(prompt))
        spelled = self.tokenizer.spelled(prompt)
        before = len(spelled) - len(prompt)  # a space that the tokenizer puts there
        spans = token_spans(self.tokenizer.token_bytes, ids[added:], spelled)
        return [(0, 0)] * added + [(max(0, start - before), stop - before) for start, stop in spans]

    def token_positions(self, prompt: str, start: int, stop: int) -> list[int]:
        """The positions of the tokens that have a part of the characters `[start, stop)` of a prompt, ascending."""
        check_span(prompt, start, stop)
        return overlapping(self.token_spans(prompt), start, stop)

    def skip_layers(self, start: int, end: int, skip_with: Any = None) -> None:
        """In a trace, before block `start` has begun: let blocks start to end (inclusive, negative ones from the end)
        not run. Each one's layer_output is the input of `start`, or `skip_with` `[batch seq hidden_size]`.
        """
        first, last = (layer_index(layer, int(self.hparams.num_layers)) for layer in (start, end))
        if first > last:
            raise UsageError(f"layers {start} to {end} are not a range; expected the first before the last.")
        current_trace(self.scope.edges).skip(first, last, skip_with)

    def skip_layer(self, layer: int, skip_with: Any = None) -> None:
        """`skip_layers(layer, layer)`."""
        self.skip_layers(layer, layer, skip_with)

    def steer(
        self,
        layers: int | Sequence[int],
        vector: Any,
        factor: float = 1.0,
        token_positions: int | Sequence[int] | slice | None = None,
        batch_index: int | Sequence[int] | slice | None = None,
    ) -> None:
        """In a trace: add `factor * vector` `[hidden_size]` to the output of blocks, everywhere or in places.

        Several positions and several rows: at each of the positions in each of the rows.
        """
        count, size = int(self.hparams.num_layers), int(self.hparams.hidden_size)
        given: Any = layers
        chosen = {layer_index(layer, count) for layer in ([given] if np.ndim(given) == 0 else given)}
        blocks = {layer: self.scope.part("layers")[layer] for layer in chosen}
        if tuple(np.shape(vector)) != (size,):
            raise ValueShapeError(f"the vector is {list(np.shape(vector))}; expected [{size}].")
        rows: Any = slice(None) if batch_index is None else batch_index
        cols: Any = slice(None) if token_positions is None else token_positions
        if not any(isinstance(one, (int, np.integer, slice)) for one in (rows, cols)):
            rows, cols = as_array(rows)[:, None], as_array(cols)
        for _, block in sorted(blocks.items()):
            output = block.layer_output
            output[rows, cols] += factor * self._like(vector, output)

    @staticmethod
    def _like(vector: Any, value: Any) -> Any:
        """A vector in the kind, type and place of a value."""
        if hasattr(value, "detach"):
            import torch

            tensor = vector if isinstance(vector, torch.Tensor) else torch.from_numpy(np.asarray(vector))
            tensor = tensor if value.requires_grad else tensor.detach()
            return tensor.to(device=value.device, dtype=value.dtype)
        return as_array(vector).astype(value.dtype)

    # Reading the stream as the head does.

    def project_on_vocab(self, hidden: Any) -> Any:
        """The logits `[... vocab_size]` that the head would give for a residual stream `[... hidden_size]`.

        The same operations as the model's own: of the last block's output they are the logits, to the bit.
        """
        graph, size = self.scope.graph, int(self.hparams.hidden_size)
        if is_stand_in(hidden) and hidden.shape[-1] == size:
            return stand_in((*hidden.shape[:-1], int(self.hparams.vocab_size)))
        is_torch = self.engine.name == "torch"
        rows = hidden if is_torch and hasattr(hidden, "detach") else as_array(hidden).astype(np.float32)
        if rows.shape[-1:] != (size,):
            raise UsageError(f"hidden is {list(rows.shape)}; expected [... {size}], a residual stream.")
        edge = graph.names[f"layers.{graph.hp.num_layers - 1}.layer_output"]
        shape = rows.shape[:-1]
        if rows.size == 0 if isinstance(rows, np.ndarray) else rows.numel() == 0:
            return as_value(np.empty((*shape, int(self.hparams.vocab_size)), np.float32))
        rows = rows.reshape(-1, shape[-1] if shape else 1, size)
        # The last position of each row together, the others together: as in a trace, since sums depend on the count.
        last = self.engine.run_tail(edge, rows[:, -1])[:, None]
        if rows.shape[1] == 1:
            made = last
        else:
            others = self.engine.run_tail(edge, rows[:, :-1].reshape(-1, size)).reshape(
                len(rows), rows.shape[1] - 1, -1
            )
            made = _join(others, last)
        return as_value(made.reshape(*shape, made.shape[-1]))

    def get_topk_closest_tokens(self, hidden: Any, k: int = 5) -> list[dict[str, float]]:
        """The k likeliest next tokens as text, with their probabilities, of each position of a residual stream."""
        logits = as_array(self.project_on_vocab(hidden))
        logits = logits.reshape(-1, logits.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return [self.probs_to_dict(one, k) for one in weights / weights.sum(-1, keepdims=True)]

    def probs_to_dict(self, probs: Any, k: int = 5) -> dict[str, float]:
        """The k likeliest tokens of `[vocab_size]`, by their text; by piece, then `#id`, where two have one text."""
        array = as_array(probs)
        if array.ndim != 1 or not 1 <= k <= len(array):
            raise UsageError(f"probs is {list(array.shape)} and k is {k}; expected [vocab_size] and 1 to {len(array)}.")
        found: dict[str, float] = {}
        for token in np.argsort(-array, kind="stable")[:k].tolist():
            names = (self.tokenizer.decode([token]), self.tokenizer.piece(token), f"#{token}")
            name = next((one for one in names if one not in found), f"#{token}")
            found[name] = float(array[token])
        return found


def _checked(max_new_tokens: int | None) -> int | None:
    if max_new_tokens is not None and (not isinstance(max_new_tokens, int) or max_new_tokens < 1):
        raise UsageError(f"max_new_tokens is {max_new_tokens!r}; expected a number of tokens, 1 or more.")
    return max_new_tokens


def _join(others: Any, last: Any) -> Any:
    if isinstance(last, np.ndarray):
        return np.concatenate([others, last], axis=1)
    import torch

    return torch.cat([others, last], dim=1)
