"""What users may give as a prompt or as input, told apart and made into arrays; anything else is refused in words."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from starscope.engine.base import Array
from starscope.errors import InvalidContentError


def is_batch(prompt: Any) -> TypeGuard[Sequence[Any]]:
    """Whether several prompts were given: a list with a text or a list in it."""
    return isinstance(prompt, (list, tuple)) and any(isinstance(one, (str, list, tuple, np.ndarray)) for one in prompt)


def token_ids(prompt: Any, vocab_size: int) -> list[int]:
    """A prompt of token ids; InvalidContentError for anything else, bytes too, and for ids out of range."""
    try:
        if isinstance(prompt, (bytes, bytearray)):
            raise TypeError
        ids = [operator.index(i) for i in prompt]
    except TypeError:
        raise InvalidContentError(
            f"a prompt is {type(prompt).__name__}; expected text or token ids, or a list of prompts."
        ) from None
    for i in ids:
        if not 0 <= i < vocab_size:
            raise InvalidContentError(f"token id {i} is out of range; expected 0 to {vocab_size - 1}.")
    return ids


def sequences(ids: Any) -> list[Array]:
    """What `forward` was given, as a list of id arrays `[n]` or of embeddings `[n hidden_size]`."""
    if isinstance(ids, (str, bytes)) or not hasattr(ids, "__len__"):
        raise InvalidContentError(
            f"{type(ids).__name__} was given; expected token ids.", hint="model.tokenizer.encode gives those of a text."
        )
    if hasattr(ids, "detach"):
        ids = _from_torch(ids)
    if isinstance(ids, np.ndarray):
        if ids.ndim == 0:
            raise InvalidContentError("a single number was given; expected a list of token ids.")
        is_one = ids.ndim == (2 if ids.dtype.kind == "f" else 1)
        return [ids] if is_one else list(ids)
    if len(ids) and all(isinstance(i, (int, np.integer)) for i in ids):
        return [np.asarray(ids)]
    return [_from_torch(item) if hasattr(item, "detach") else np.asarray(item) for item in ids]


def _from_torch(tensor: Any) -> Array:
    """A torch tensor as an array; floating ones as float32, since NumPy has no bfloat16."""
    tensor = tensor.detach().cpu()
    array: Array = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return array
