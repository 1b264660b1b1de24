"""A tiny corpus, a tokenizer of it and a tiny model: enough to train in seconds."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from starscope.family import find_family
from starscope.graph import Graph, record
from starscope.train.fim import END_OF_TEXT
from starscope.train.presets import family_sizes
from starscope.train.vocabularies import BPE

DOCUMENTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
    "    def push(self, item):\n        self.items.append(item)\n",
    "for number in range(2024):\n    print(number, number ** 2)\n",
    "# Größe, naïve, 日本語, 🐍\nNAMES = ['Ångström', 'Éva']\n",
    "import os\n\n\ndef size(path):\n    with open(path) as file:\n        return len(file.read())\n",
)
VOCAB_SIZE = 300


@lru_cache
def tiny_bpe() -> BPE:
    return BPE.train(DOCUMENTS, VOCAB_SIZE)


def tiny_ids(repeat: int = 1) -> np.ndarray:
    """All documents, each with its end of text."""
    bpe = tiny_bpe()
    end = bpe.token_id(END_OF_TEXT)
    return np.array([token for text in DOCUMENTS for token in [*bpe.encode(text), end]] * repeat, "<u2")


def tiny_graph(family: str = "gpt_bigcode", **changes: object) -> Graph:
    sizes = {"context_length": 32, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "norm_epsilon": 1e-5}
    usual = {"gpt_bigcode": {"num_kv_heads": 1, "intermediate_size": 64, "activation": "gelu_pytorch_tanh"}}
    found = find_family(family)
    values = {**sizes, **usual.get(family, {}), **changes}
    return record(found, family_sizes(found, values, int(values.pop("vocab_size", VOCAB_SIZE))))
