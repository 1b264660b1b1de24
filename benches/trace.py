"""What looking costs: tokens per second of a generation that is read or edited, beside a plain one, in turns.

    python benches/trace.py FILE.gguf [-n 128] [--rounds 5] [-t N] [--only layers,patterns] [--json]

A round is one generation of each kind, of the same prompt; a ratio is the median of the rounds' own ratios. Steps are
timed from the first token on, so that neither counts the prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import starscope
from starscope.microscope import Edit
from starscope.model import Model

PROMPT_TOKENS = 32


def plain(model: Model, prompt: list[int], tokens: int) -> float:
    """Tokens per second of `generate`, as it says itself."""
    return model.generate(prompt, max_new_tokens=tokens, stop=(), logit_bias=no_end(model)).timings.decode_tok_s


def no_end(model: Model) -> dict[int, float]:
    """A bias that keeps the text from ending."""
    return dict.fromkeys(model.tokenizer.stop_ids, -float("inf"))


def traced(read: Callable[[Model], Any]) -> Callable[[Model, list[int], int], float]:
    """Tokens per second of a trace that reads something at every step, and keeps it."""

    def run(model: Model, prompt: list[int], tokens: int) -> float:
        kept, began = [], 0.0
        with model.trace(prompt, max_new_tokens=tokens, logit_bias=no_end(model)) as t:
            for step in t.steps():
                if step == 1:
                    began = time.perf_counter()
                kept.append(read(model))
        return (tokens - 1) / (time.perf_counter() - began)

    return run


def steered(model: Model, prompt: list[int], tokens: int) -> float:
    """Tokens per second with one vector added to one block's output."""
    vector = np.full(model.hidden_size, 1e-3, np.float32)
    with model.editing([Edit("layer_output", "add", layers=model.num_layers // 2, tensor=vector)]):
        return plain(model, prompt, tokens)


KINDS: dict[str, Callable[[Model, list[int], int], float]] = {
    "nothing read": traced(lambda model: None),
    "layers": traced(lambda model: [block.layer_output for block in model.layers]),
    "patterns": traced(lambda model: [block.self_attn.attention_probabilities for block in model.layers]),
    "steered": steered,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    model = starscope.load(asked.model, threads=asked.threads)
    prompt = np.random.default_rng(0).integers(0, model.vocab_size, PROMPT_TOKENS).tolist()
    kinds = {name: KINDS[name] for name in asked.only.split(",")}
    for run in (plain, *kinds.values()):
        run(model, prompt, min(asked.tokens, 16))
    speeds: dict[str, list[float]] = {name: [] for name in ("plain", *kinds)}
    for _ in range(asked.rounds):
        speeds["plain"].append(plain(model, prompt, asked.tokens))
        for name, run in kinds.items():
            speeds[name].append(run(model, prompt, asked.tokens))
    rows = {
        name: {
            "tok_s": statistics.median(found),
            "ratio": statistics.median(one / base for one, base in zip(found, speeds["plain"], strict=True)),
        }
        for name, found in speeds.items()
    }
    if asked.json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(f"{name:14s}{row['tok_s']:8.1f} tok/s   {row['ratio']:.3f} x plain")


if __name__ == "__main__":
    main()
