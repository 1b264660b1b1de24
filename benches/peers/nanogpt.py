"""Training from scratch beside nanoGPT on the CPU: its recipe on tiny shakespeare, and tokens a second.

    python benches/peers/nanogpt.py recipe NANOGPT_FOLDER tinyshakespeare.txt    # 4 x 128, context 64, batch 12
    python benches/peers/nanogpt.py speed NANOGPT_FOLDER                         # 16 x 256, vocabulary 32,000

Both train in this process and in turns, some steps each, so that what the machine does besides hits both alike; only
the steps and the evaluations that belong to them are timed. nanoGPT's side is its model, its optimizer, its batches,
its evaluations (20 batches of each split every 250 steps) and its README's options for a CPU. In the recipe starscope
measures all of the held-out tenth every 500 steps; nanoGPT's model is measured on all of it in the end, untimed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from starscope.family import find_family, make_hparams
from starscope.graph import record
from starscope.train.data import Batches
from starscope.train.loop import HeldOut, Trainer, TrainOptions
from starscope.train.schedules import Schedule

RECIPE = {"num_layers": 4, "hidden_size": 128, "num_heads": 4, "context_length": 64, "batch_size": 12, "steps": 2000}
SPEED = {"num_layers": 16, "hidden_size": 256, "num_heads": 8, "context_length": 64, "batch_size": 16}
SPEED_VOCABULARY = 32_000


class NanoGPT:
    """Its training loop, as train.py has it for --device=cpu --compile=False --dropout=0.0."""

    def __init__(self, folder: Path, shape: dict[str, int], vocab_size: int, train: np.ndarray, held_out: np.ndarray):
        sys.path.insert(0, str(folder))
        from model import GPT, GPTConfig

        torch.manual_seed(1337)
        self.shape, self.splits, self.iteration = shape, {"train": train, "val": held_out}, 0
        self.model = GPT(
            GPTConfig(
                n_layer=shape["num_layers"],
                n_head=shape["num_heads"],
                n_embd=shape["hidden_size"],
                block_size=shape["context_length"],
                bias=False,
                vocab_size=vocab_size,
                dropout=0.0,
            )
        )
        self.optimizer = self.model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
        self.next = self.batch("train")

    def batch(self, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        data, size = self.splits[split], self.shape["context_length"]
        ix = torch.randint(len(data) - size, (self.shape["batch_size"],))
        x = torch.stack([torch.from_numpy((data[i : i + size]).astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + size]).astype(np.int64)) for i in ix])
        return x, y

    def rate(self) -> float:
        warmup, decay, highest, lowest = 100, 2000, 1e-3, 1e-4
        if self.iteration < warmup:
            return highest * (self.iteration + 1) / (warmup + 1)
        ratio = min(1.0, (self.iteration - warmup) / (decay - warmup))
        return lowest + 0.5 * (1 + math.cos(math.pi * ratio)) * (highest - lowest)

    @torch.no_grad()
    def estimate(self) -> None:
        self.model.eval()
        for split in self.splits:
            for _ in range(20):
                self.model(*self.batch(split))[1].item()
        self.model.train()

    def step(self, *, evaluates: bool = False) -> None:
        if evaluates and self.iteration % 250 == 0:
            self.estimate()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        _, loss = self.model(*self.next)
        self.next = self.batch("train")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss.item()
        self.iteration += 1

    @torch.no_grad()
    def whole_loss(self) -> float:
        """Nats a token over all of the held-out part."""
        data, size = torch.from_numpy(self.splits["val"].astype(np.int64)), self.shape["context_length"]
        total = 0.0
        for start in range(0, len(data) - 1, size):
            part = data[start : start + size + 1]
            total += self.model(part[None, :-1], part[None, 1:])[1].item() * (len(part) - 1)
        return total / (len(data) - 1)


def make_trainer(args: argparse.Namespace, shape: dict[str, int], ids: np.ndarray, held_out: HeldOut | None, size: int):
    family = find_family("gpt_bigcode")
    sizes = {key: shape[key] for key in ("num_layers", "hidden_size", "num_heads", "context_length")}
    kv_heads = 1 if args.multi_query else shape["num_heads"]
    inner, norm = 4 * shape["hidden_size"], {"norm_epsilon": 1e-5, "activation": "gelu"}
    hp = make_hparams(
        family, {**sizes, **norm, "num_kv_heads": kv_heads, "intermediate_size": inner, "vocab_size": size}
    )
    options = TrainOptions(
        steps=2000,
        schedule=Schedule(args.learning_rate, 100, 2000, args.learning_rate / 50),
        batch_size=shape["batch_size"],
        micro_batch_size=shape["batch_size"],
        precision=args.precision,
    )
    batches = Batches(ids, context_length=shape["context_length"], seed=0)
    return Trainer(record(family, hp), batches, options, folder=Path(tempfile.mkdtemp()), held_out=held_out)


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def recipe(args: argparse.Namespace) -> dict[str, Any]:
    """Both trained to the end, 25 steps in turn."""
    text = args.text.read_text()
    characters = sorted(set(text))
    index = {character: i for i, character in enumerate(characters)}
    ids = np.array([index[character] for character in text], np.uint16)
    train, held_out = ids[: int(0.9 * len(ids))], ids[int(0.9 * len(ids)) :]
    measured = HeldOut([held_out[1:]], len(held_out) - 1, int(held_out[0]))  # its first token is only context
    ours = make_trainer(args, RECIPE, train, measured, len(characters))
    theirs = NanoGPT(args.folder, RECIPE, len(characters), train, held_out)

    def our_turn() -> None:
        for _ in range(25):
            ours.train_step()
        if ours.step % 500 == 0:
            ours.evaluate()

    def their_turn() -> None:
        for _ in range(25):
            theirs.step(evaluates=True)

    seconds = {"starscope": 0.0, "nanoGPT": 0.0}
    ratios = []
    for turn in range(RECIPE["steps"] // 25):
        a, b = timed(our_turn), timed(their_turn)
        seconds = {"starscope": seconds["starscope"] + a, "nanoGPT": seconds["nanoGPT"] + b}
        ratios.append(a / b)
        if turn % 10 == 9:
            say({"steps": ours.step, **seconds, "median_ratio": statistics.median(ratios)})
    loss = ours.measured.nats / ours.measured.tokens
    return {
        "seconds": seconds,
        "ratio": seconds["starscope"] / seconds["nanoGPT"],
        "median_ratio": statistics.median(ratios),
        "held_out_loss": {"starscope": loss, "nanoGPT": theirs.whole_loss()},
        "precision": ours.why,
    }


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second, a step in turn; the ratio is the median of the rounds'."""
    ids = np.random.default_rng(0).integers(0, SPEED_VOCABULARY, 200_000).astype(np.uint16)
    ours = make_trainer(args, SPEED, ids, None, SPEED_VOCABULARY)
    theirs = NanoGPT(args.folder, SPEED, SPEED_VOCABULARY, ids, ids)
    tokens = SPEED["batch_size"] * SPEED["context_length"]
    ours.train_step()
    theirs.step()
    pairs = []
    for _ in range(args.rounds):
        pairs.append((timed(ours.train_step), timed(theirs.step)))
        say({"starscope": tokens / pairs[-1][0], "nanoGPT": tokens / pairs[-1][1]})
    return {
        "tokens_per_second": {
            name: tokens / statistics.median(pair[side] for pair in pairs)
            for side, name in enumerate(("starscope", "nanoGPT"))
        },
        "ratio": statistics.median(b / a for a, b in pairs),
        "precision": ours.why,
    }


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("recipe", "speed"))
    parser.add_argument("folder", type=Path, help="a clone of nanoGPT")
    parser.add_argument("text", type=Path, nargs="?", help="tinyshakespeare.txt, for the recipe")
    parser.add_argument("--rounds", type=int, default=10, help="of speed (default: %(default)s)")
    parser.add_argument("--precision", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--multi-query", action="store_true", help="one key head; nanoGPT has one for each query head")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at its highest (default: %(default)s)")
    args = parser.parse_args()
    if args.what == "recipe" and args.text is None:
        parser.error("the recipe needs the text")
    print(json.dumps({"recipe": recipe, "speed": speed}[args.what](args), indent=2))


if __name__ == "__main__":
    main()
