"""Does llama.cpp read a file as starscope does? The likeliest token at each position of a text, a greedy continuation,
and the perplexity of both on the same windows.

    python benches/peers/agreement.py MODEL.gguf TEXT_FILE [--tokens 2000] [--window 256] [--floor 0.995] [--engine E]

Needs llama-cpp-python in the same environment (`pip install llama-cpp-python`; it builds for about five minutes).
Tokens, not text, are handed over, so that tokenizers are compared apart. Ends with status 1 below the floor.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from side_by_side import installed

import starscope

llama_cpp = installed("llama_cpp")


def peer_logits(peer: llama_cpp.Llama, ids: list[int]) -> np.ndarray:  # float32 [len(ids) vocab_size]
    peer.reset()
    peer.eval(ids)
    return np.array(peer.scores[: len(ids)], np.float32)


def surprise(logits: np.ndarray, ids: list[int]) -> float:
    """The negative log-likelihood, in nats, of the tokens after the first."""
    logits = logits[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return float((np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(ids) - 1), ids[1:]]).sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--floor", type=float, default=0.995)
    parser.add_argument("--continue-tokens", type=int, default=64)
    parser.add_argument("--engine", default="auto")
    args = parser.parse_args()

    ours = starscope.load(args.model, engine=args.engine)
    window = min(args.window, ours.context_length)
    peer = llama_cpp.Llama(str(args.model), n_ctx=window + args.continue_tokens, logits_all=True, verbose=False)
    text = args.text.read_text(encoding="utf-8")
    ids = ours.tokenizer.encode(text)[: args.tokens]
    peer_ids = peer.tokenize(text.encode(), add_bos=False, special=False)[: args.tokens]

    agree = total = predicted = 0
    worst = mine_nats = theirs_nats = 0.0
    for start in range(0, len(ids), window):
        part = ids[start : start + window]
        [mine] = ours.engine.forward([part], None, "all")
        theirs = peer_logits(peer, part)
        agree += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
        total, predicted = total + len(part), predicted + len(part) - 1
        mine_nats, theirs_nats = mine_nats + surprise(mine, part), theirs_nats + surprise(theirs, part)
        worst = max(worst, float(np.abs(mine - theirs).max() / np.abs(mine).max()))

    prompt = ids[:32]
    mine_next = ours.generate(prompt, max_new_tokens=args.continue_tokens).token_ids
    theirs_next: list[int] = []
    for _ in range(len(mine_next)):
        theirs_next.append(int(peer_logits(peer, prompt + theirs_next)[-1].argmax()))
    same = next((i for i, (a, b) in enumerate(zip(mine_next, theirs_next, strict=True)) if a != b), len(mine_next))
    result = {
        "model": args.model.name,
        "engine": ours.engine.name,
        "positions": total,
        "most_likely_token_agrees": agree / total,
        "largest_relative_difference": worst,
        "perplexity": float(np.exp(mine_nats / predicted)),
        "peer_perplexity": float(np.exp(theirs_nats / predicted)),
        "same_token_ids": ids == peer_ids,
        "greedy_tokens_equal": same,
        "greedy_tokens": len(mine_next),
    }
    print(json.dumps(result, indent=2))
    return 0 if agree / total >= args.floor and ids == peer_ids else 1


if __name__ == "__main__":
    sys.exit(main())
