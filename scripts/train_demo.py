"""Train the demo model on this Python's standard library and write it to src/starscope/demo/.

    python scripts/train_demo.py --steps 2000               # from scratch, into --work
    python scripts/train_demo.py --steps 4000 --resume      # longer, from the last checkpoint

The library's own modules are the text, plus a share of its test suite. Modules whose name's hash says so are held out
and never trained on. Stopping it (Ctrl-C) saves; --resume goes on with the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from starscope.errors import InvalidContentError, StarscopeError
from starscope.family import find_family, make_hparams
from starscope.graph import record
from starscope.train.data import (
    BPE,
    END_OF_TEXT,
    Batches,
    Document,
    find_documents,
    name_fraction,
    open_tokens,
    split_held_out,
    write_tokens,
)
from starscope.train.fim import FillInTheMiddle, FimIds
from starscope.train.loop import HeldOut, Trainer, TrainOptions
from starscope.train.optim import Schedule

DEMO = Path(__file__).resolve().parent.parent / "src" / "starscope" / "demo"
VOCAB_SIZE = 2560
HPARAMS = {
    "context_length": 512,
    "hidden_size": 256,
    "num_layers": 6,
    "intermediate_size": 768,
    "num_heads": 4,
    "num_kv_heads": 1,
    "norm_epsilon": 1e-5,
    "activation": "gelu_pytorch_tanh",
    "vocab_size": VOCAB_SIZE,
}
HELD_OUT = 0.025
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
# Tables that a program wrote: they are large and teach nothing.
GENERATED = re.compile(
    r"encodings/(?!__init__|aliases|idna|punycode|utf_8)|pydoc_data/|_sysconfigdata|lib2to3/pgen2/|unicodedata|/_?unicode_?tables?|html/entities|tkinter/tix|turtledemo/|badsyntax|bad_coding"
)
TESTS = re.compile(r"(^|/)(test|tests|idle_test)(/|$)|(^|/)test_")


def is_test(name: str) -> bool:
    return TESTS.search(name) is not None


def readable(documents: list[Document]) -> Iterator[tuple[Document, str]]:
    """Documents with their text; the few that are not UTF-8 on purpose are left out."""
    for document in documents:
        try:
            text = document.text()
        except InvalidContentError:
            continue
        if text.strip():
            yield document, text


def library(test_share: float) -> tuple[list[Document], list[Document]]:
    """The documents to train on and the held-out ones. Tests are never held out: they are extra text."""

    def keep(name: str) -> bool:
        parts = name.split("/")
        if SKIPPED_FOLDERS & set(parts) or GENERATED.search(name):
            return False
        return not is_test(name) or name_fraction("test share " + name) < test_share

    found = find_documents([sysconfig.get_paths()["stdlib"]], suffixes=[".py"], keep=keep)
    train, held_out = split_held_out([d for d in found if not is_test(d.name)], HELD_OUT)
    return train + [d for d in found if is_test(d.name)], held_out


def prepare(work: Path, test_share: float) -> BPE:
    """The tokenizer and the two token files, made when they are missing or were made from other text."""
    train, held_out = library(test_share)
    digest = hashlib.sha256(
        f"{VOCAB_SIZE} {sys.version_info[:3]} {[d.name for d in train]} {[d.name for d in held_out]}".encode()
    ).hexdigest()
    stamp, tokenizer = work / "data.sha256", work / "tokenizer.json"
    if stamp.exists() and stamp.read_text() == digest:
        return BPE.read(tokenizer)
    work.mkdir(parents=True, exist_ok=True)
    bpe = BPE.train((text for _, text in readable(train)), VOCAB_SIZE)
    bpe.save(tokenizer)
    for name, documents in (("train", train), ("held_out", held_out)):
        texts = (text for _, text in readable(documents))
        write_tokens(
            work / f"{name}.tokens",
            texts,
            bpe,
            vocab_size=VOCAB_SIZE,
            end_of_text=bpe.token_id(END_OF_TEXT),
            fingerprint=digest,
        )
    stamp.write_text(digest)
    return bpe


def say(line: Mapping[str, Any] | str) -> None:
    print(line if isinstance(line, str) else json.dumps(line), file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=Path("demo_train"), help="tokens and checkpoints (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--minutes", type=float, help="instead of --steps: as many as a trial of a few steps says will fit"
    )
    parser.add_argument("--decay-steps", type=int, help="the schedule's length (default: --steps)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument(
        "--tests",
        type=float,
        default=0.25,
        help="the share of the library's test files to train on (default: %(default)s)",
    )
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-export", action="store_true", help="train only")
    return parser.parse_args()


def main() -> int:
    args = parse()
    torch.manual_seed(0)
    bpe = prepare(args.work, args.tests)
    tokens, held = open_tokens(args.work / "train.tokens"), open_tokens(args.work / "held_out.tokens")
    say(
        f"training: {tokens.documents} files, {tokens.bytes} bytes, {len(tokens.ids)} tokens; held out: {held.documents} files, {held.bytes} bytes, {len(held.ids)} tokens"
    )
    family = find_family("gpt_bigcode")
    hp = make_hparams(family, HPARAMS)
    fim = FimIds.of(bpe)
    batches = Batches(tokens.ids, context_length=hp.context_length, seed=0, transform=FillInTheMiddle(bpe, fim, seed=0))
    held_out = HeldOut(list(held.split(fim.end_of_text)), held.bytes, fim.end_of_text)

    def trainer(steps: int, decay_steps: int) -> Trainer:
        schedule = Schedule(
            peak=args.learning_rate,
            warmup_steps=min(100, decay_steps // 10),
            decay_steps=decay_steps,
            final=args.learning_rate / 50,
        )
        options = TrainOptions(
            steps=steps, schedule=schedule, batch_size=args.batch_size, micro_batch_size=min(8, args.batch_size)
        )
        facts = {"data": tokens.fingerprint}
        return Trainer(
            record(family, hp),
            batches,
            options,
            folder=args.work,
            held_out=held_out,
            pad=fim.pad,
            facts=facts,
            report=say,
        )

    steps = args.steps
    if args.minutes:
        trial = trainer(10**6, 10**6)
        trial.train_step()
        start = time.perf_counter()
        for _ in range(5):
            trial.train_step()
        steps = max(20, round(args.minutes * 60 / ((time.perf_counter() - start) / 5)))
        say(f"{steps} steps for {args.minutes} minutes")
    made = trainer(steps, args.decay_steps or steps)
    say(made.why)
    if args.resume and (note := made.resume()):
        say(note)
    outcome = made.run()
    if outcome.signal is not None:
        say(f"stopped after step {outcome.step}; --resume goes on from there")
        return 128 + outcome.signal
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StarscopeError as error:
        say(str(error))
        sys.exit(error.exit_status)
