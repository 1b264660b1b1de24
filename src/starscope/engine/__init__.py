"""What runs a graph. Every engine takes ragged batches and gives float32 logits; they differ in speed alone.

engine = make_engine("auto", graph, weights, device="auto")
cache = engine.new_cache()
[logits] = engine.forward([[1, 2, 3]], [cache], "last")     # [1 vocab_size]
[logits] = engine.forward([[4]], [cache], "last")           # one more token
"""

from __future__ import annotations

from starscope.engine.base import ENGINES, Engine, choose_engine, make_engine
from starscope.engine.weights import Weights

__all__ = ["ENGINES", "Engine", "Weights", "choose_engine", "make_engine"]
