"""What the microscope sees of a model in training: where it begins to copy, and how early it knows.

*Induction score* of a head: over random tokens that are repeated once, the attention that a token of the second half
pays to what followed the same token in the first. It rises when a head has learned to continue as before (Olsson et al.
2022). *Lens loss* of a block: the loss, in nats a token, of reading its output as the head reads the last one's.

    looks = Looks(model, tokens, seed=0)
    looks()             # {"induction": [0.02, 0.61], "lens_loss": [5.1, 3.2]}: by block
"""

from __future__ import annotations

from typing import Any

import numpy as np

from starscope.model import Model
from starscope.train.data import Ids, random_words

SEQUENCES, REPEATED = 4, 32  # random sequences, and the tokens of each before they are repeated
WINDOWS, WINDOW = 4, 128  # stretches of text for the lens
PATTERNS, STREAMS = "layers.*.self_attn.attention_probabilities", "layers.*.layer_output"


class Looks:
    """Measures a model, whose weights may change in between, on the same tokens every time."""

    def __init__(self, model: Model, ids: Ids, *, seed: int) -> None:
        """`ids` are tokens of text: what random sequences are made of, and what the lens reads."""
        self._model = model
        half = min(REPEATED, model.context_length // 2)
        pool = np.unique(ids[: 1 << 16]).astype(np.int64)
        words = random_words(seed, 3, count=SEQUENCES * half).reshape(SEQUENCES, half)
        drawn = pool[(words % np.uint64(len(pool))).astype(np.int64)]
        self._repeated = np.concatenate([drawn, drawn], axis=1).tolist()
        self._half = half
        length = min(WINDOW, model.context_length)
        starts = range(0, max(1, len(ids) - length), max(1, (len(ids) - length) // WINDOWS))
        self._windows = [ids[start : start + length + 1].astype(np.int64) for start in list(starts)[:WINDOWS]]

    def __call__(self) -> dict[str, Any]:
        """Both measures as a line of the log has them."""
        return {
            "induction": [round(float(heads.max()), 4) for heads in self.induction()],
            "lens_loss": [round(loss, 4) for loss in self.lens_loss()],
        }

    def induction(self) -> list[np.ndarray]:
        """The score of every head, `[num_heads]` for each block; 1 is all of the attention."""
        if self._half < 2:
            return []
        kept = self._model.keep_values(self._repeated, PATTERNS).to_numpy()
        queries = np.arange(self._half, 2 * self._half - 1)  # the last one's successor is not in the prompt
        return [pattern[:, :, queries, queries - self._half + 1].mean((0, 2)) for pattern in kept.values()]

    def lens_loss(self) -> list[float]:
        """Nats a token after each block."""
        blocks = int(self._model.num_layers)
        totals, count = np.zeros(blocks), 0
        for window in self._windows:
            if len(window) < 2:
                continue
            streams = self._model.keep_values(window[:-1].tolist(), STREAMS).to_numpy()
            for block, stream in enumerate(streams.values()):
                logits = np.asarray(self._model.project_on_vocab(stream[0]), np.float64)
                logits -= logits.max(-1, keepdims=True)
                picked = logits[np.arange(len(window) - 1), window[1:]]
                totals[block] += float((np.log(np.exp(logits).sum(-1)) - picked).sum())
            count += len(window) - 1
        return (totals / count).tolist() if count else []
