"""Train the demo model on this Python's standard library and write it to src/starscope/demo/.

    python scripts/train_demo.py --recipe                   # the model in the package; the same again goes on with it
    python scripts/train_demo.py --steps 2000               # from scratch, keeping its work in --work
    python scripts/train_demo.py --steps 4000 --resume      # longer, from the last checkpoint
    python scripts/train_demo.py --minutes 30

The library's own modules are the text, plus a share of its test suite. Modules whose name's hash says so are held out
and never trained on. Stopping it (Ctrl-C) saves a checkpoint; --resume goes on with the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import platform
import re
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from starscope.engine.torch_engine import TorchEngine
from starscope.engine.weights import open_weights
from starscope.errors import InvalidContentError, StarscopeError, UsageError
from starscope.family import find_family, hparams_from_metadata, make_hparams
from starscope.gguf import read_gguf
from starscope.graph import Graph, record
from starscope.tokenizer import Tokenizer
from starscope.train.checkpoints import CURRENT, PREVIOUS, load_checkpoint
from starscope.train.data import Batches, TokenFile, open_tokens, write_tokens
from starscope.train.documents import Document, find_documents
from starscope.train.fim import END_OF_TEXT, FillInTheMiddle, FimIds
from starscope.train.loop import HeldOut, Trainer, TrainOptions, bits_per_byte
from starscope.train.output import write_model
from starscope.train.schedules import Schedule
from starscope.train.split import name_fraction
from starscope.train.vocabularies import BPE

DEMO = Path(__file__).resolve().parent.parent / "src" / "starscope" / "demo"
MOST_BYTES = 5_000_000  # what the model may take in the wheel
SEED = 0
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
HELD_OUT = 0.025  # of the library's modules
TEST_SHARE = 0.25  # of the library's tests that the tokenizer is made of, and the model as a rule
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
# Tables written by programs, tests of broken files, and examples that hold data more than code.
SKIPPED = re.compile(
    r"encodings/(?!__init__|aliases|idna|punycode|utf_8)|pydoc_data/|_sysconfigdata|lib2to3/pgen2/|html/entities"
    r"|unicodedata|tkinter/tix|turtledemo/|badsyntax|bad_coding"
)
TESTS = re.compile(r"(^|/)(test|tests|idle_test)(/|$)|(^|/)test_")
# Where a test module is cut into documents of its own: the blank lines before a function, a method or a class.
PIECE = re.compile(r"\n+(?=\n(?:    )?(?:@|def |class |async def ))")
SHORT_LINES = (2, 9)  # of a document when they are short


@dataclass(frozen=True)
class Stage:
    """A part of the recipe: train until `steps` are made, on a schedule of `decay_steps`, with a share of `tests`."""

    steps: int
    decay_steps: int
    tests: float = TEST_SHARE
    short: bool = False
    batch_size: int = 8
    learning_rate: float = 1.5e-3


# What the model in the package was made by. The second schedule took the place of the first when a third of it was
# done; short documents come last, so that the last steps are on middles of an editor's kind.
RECIPE = (
    Stage(500, 7000),
    Stage(1320, 7000),
    Stage(2915, 4300),
    Stage(4800, 4800, tests=1.0, short=True),
    Stage(5400, 5400, tests=1.0, short=True),
    Stage(7000, 7000, tests=1.0, short=True),
)


@dataclass(frozen=True)
class Data:
    """What a run reads: the tokenizer, and tokens to train on and to measure with."""

    bpe: BPE
    train: TokenFile
    held_out: TokenFile
    held_out_names: list[str]
    xz_bits_per_byte: float  # of the held-out text in one archive: what a general compressor needs


def is_test(name: str) -> bool:
    return TESTS.search(name) is not None


def library(test_share: float) -> tuple[list[Document], list[Document]]:
    """The documents to train on and the held-out ones. Tests are never held out: they are extra text."""

    def keep(name: str) -> bool:
        if SKIPPED_FOLDERS & set(name.split("/")) or SKIPPED.search(name):
            return False
        return not is_test(name) or name_fraction("test share " + name) < test_share

    found = find_documents([sysconfig.get_paths()["stdlib"]], suffixes=[".py"], keep=keep).documents
    modules = [document for document in found if not is_test(document.name)]
    train, held_out = (
        [document for document in modules if (name_fraction(document.name) < HELD_OUT) is chosen]
        for chosen in (False, True)
    )
    return train + [document for document in found if is_test(document.name)], held_out


def read(documents: list[Document], *, short: bool = False) -> dict[str, str]:
    """Texts by name. The few files that are empty, or on purpose not UTF-8, are left out.

    A test module becomes one text for each of its functions, or, when they are to be `short`, one for every few lines.
    Cuts for fill-in-the-middle are uniform over a document, so it is in short documents that a model meets short
    middles, the kind that an editor asks for.
    """
    texts = {}
    for document in documents:
        try:
            text = document.text()
        except InvalidContentError:
            continue
        if is_test(document.name):
            pieces = [piece.lstrip("\n") for piece in PIECE.split(text)]
            if short:
                pieces = [part for piece in pieces for part in few_lines(piece, document.name)]
            texts.update((f"{document.name}#{number}", piece) for number, piece in enumerate(pieces) if piece.strip())
        elif text.strip():
            texts[document.name] = text
    return texts


def few_lines(text: str, name: str) -> list[str]:
    """A text in parts of 2 to 9 lines."""
    lines, parts = text.splitlines(keepends=True), []
    low, high = SHORT_LINES
    while lines:
        count = low + int(name_fraction(f"{name} {len(parts)} {len(lines)}") * (high - low + 1))
        parts.append("".join(lines[:count]))
        lines = lines[count:]
    return parts


def prepare(work: Path, test_share: float, *, short: bool) -> Data:
    """The tokenizer and the token files, made when they are missing or the text has changed.

    The tokenizer is that of the usual documents, whichever are trained on.
    """
    train, held_out = map(read, library(TEST_SHARE))
    tokenizer = work / "tokenizer.json"
    if changed(work / "data.sha256", [VOCAB_SIZE, train, held_out]) or not tokenizer.exists():
        BPE.train(train.values(), VOCAB_SIZE).save(tokenizer)
    bpe = BPE.read(tokenizer)
    if short or test_share != TEST_SHARE:
        train = read(library(test_share)[0], short=short)
    name = "short" if short else "train"
    for part, texts in ((name, train), ("held_out", held_out)):
        path = work / f"{part}.tokens"
        if changed(work / f"{part}.sha256", [bpe.to_json(), texts]) or not path.exists():
            end = bpe.token_id(END_OF_TEXT)
            write_tokens(path, texts.values(), bpe, vocab_size=VOCAB_SIZE, end_of_text=end)
    text = "".join(held_out.values()).encode()
    packed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    return Data(
        bpe,
        open_tokens(work / f"{name}.tokens"),
        open_tokens(work / "held_out.tokens"),
        list(held_out),
        8 * len(packed) / len(text),
    )


def changed(stamp: Path, content: object) -> bool:
    """Whether the content is another than when this was last asked; the stamp remembers."""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return False
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest)
    return True


def make_trainer(args: argparse.Namespace, graph: Graph, data: Data, steps: int) -> Trainer:
    fim = FimIds.of(data.bpe)
    decay_steps = args.decay_steps or steps
    schedule = Schedule(
        peak=args.learning_rate,
        warmup_steps=min(100, decay_steps // 10),
        decay_steps=decay_steps,
        final=args.learning_rate / 50,
    )
    transform = FillInTheMiddle(data.bpe, fim, seed=SEED, rate=0.5)
    return Trainer(
        graph,
        Batches(data.train.ids, context_length=graph.hp.context_length, seed=SEED, transform=transform),
        TrainOptions(steps, schedule, args.batch_size, min(8, args.batch_size), seed=SEED),
        folder=args.work,
        held_out=held_out_documents(data),
        pad=fim.pad,
        facts={"tokenizer": hashlib.sha256(data.bpe.to_json().encode()).hexdigest()},
        notes={"tests": args.tests, "short": args.short},
        report=say,
    )


def held_out_documents(data: Data) -> HeldOut:
    end = data.bpe.token_id(END_OF_TEXT)
    return HeldOut(list(data.held_out.split(end)), data.held_out.bytes, end)


def steps_in(minutes: float, trial: Trainer) -> int:
    """How many steps fit into so much time, from five of them."""
    trial.train_step()
    start = time.perf_counter()
    for _ in range(5):
        trial.train_step()
    return max(20, round(minutes * 60 / ((time.perf_counter() - start) / 5)))


def write_demo(trainer: Trainer, graph: Graph, data: Data, work: Path) -> None:
    """demo.gguf, its card and its log."""
    special = {f"{role}_token": END_OF_TEXT for role in ("bos", "eos", "unk")}
    (work / "tokenizer_config.json").write_text(json.dumps(special))
    tokenizer = Tokenizer.from_folder(work)
    DEMO.mkdir(exist_ok=True)
    path = DEMO / "demo.gguf"
    probe = data.held_out.ids[:64].tolist()
    size = write_model(
        path,
        graph,
        trainer.weights(),
        tokenizer,
        to="q8_0",
        name="starscope demo",
        license_name="apache-2.0",
        probe=probe,
        force=True,
    )
    if size > MOST_BYTES:
        raise UsageError(f"{path.name} has {size} bytes; expected at most {MOST_BYTES}.")
    with read_gguf(path) as file:
        _, weights = open_weights(file, graph.family, hparams_from_metadata(graph.family, file))
        context = graph.hp.context_length
        measured = bits_per_byte(
            TorchEngine(graph, weights), held_out_documents(data), context_length=context, stride=context // 2
        )
        parameters = sum(weights.slots[name].parameters for name in weights if not weights.is_tied(name))
    log = [json.loads(line) for line in trainer.log_path.read_text(encoding="utf-8").splitlines()]
    kept = [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in log]
    (DEMO / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    (DEMO / "MODEL_CARD.md").write_text(card(trainer, data, log, size, parameters, measured), encoding="utf-8")
    say({"bytes": size, "parameters": parameters, "bits_per_byte": round(measured, 4)})


def stages_left(step: int, recipe: Sequence[Stage] = RECIPE) -> list[Stage]:
    """The stages that are not finished after so many steps: the first of them is under way."""
    return [stage for stage in recipe if step < stage.steps]


def is_recipe(log: list[dict[str, Any]], recipe: Sequence[Stage] = RECIPE) -> bool:
    """Whether each step that the log has was made as the recipe says, whatever interrupted it."""
    stage, step = None, 0
    for line in log:
        step, run = line["step"], line.get("run")
        if run is not None:
            stage = next(iter(stages_left(step, recipe)), None)
            made = {"tests": TEST_SHARE, "short": False, **run}
            if stage is None or any(made[name] != value for name, value in asdict(stage).items() if name != "steps"):
                return False
        if stage is None or step > stage.steps:
            return False
    return step == recipe[-1].steps


def commands(log: list[dict[str, Any]]) -> str:
    """The commands that made the model, from the lines that the log has where a run began."""
    if is_recipe(log):
        return "python scripts/train_demo.py --recipe"
    runs = [line for line in log if "run" in line]
    ends = [*(line["step"] for line in runs[1:]), runs[-1]["run"]["steps"]]
    return "\n".join(
        f"python scripts/train_demo.py --batch-size {line['run']['batch_size']} --steps {end} "
        f"--decay-steps {line['run']['decay_steps']} --learning-rate {line['run']['learning_rate']:g}"
        + (f" --tests {line['run']['tests']:g}" if line["run"].get("tests", TEST_SHARE) != TEST_SHARE else "")
        + (" --short" if line["run"].get("short") else "")
        + (" --resume" if line["step"] else "")
        for line, end in zip(runs, ends, strict=True)
    )


def short_tokens(log: list[dict[str, Any]]) -> int:
    """The tokens of the runs on short documents."""
    total, before, short = 0, 0, False
    for line in log:
        if "tokens" in line:
            total += line["tokens"] - before if short else 0
            before = line["tokens"]
        elif "run" in line:
            short = line["run"].get("short", False)
    return total


def card(trainer: Trainer, data: Data, log: list[dict[str, Any]], size: int, parameters: int, measured: float) -> str:
    hp = trainer.engine.graph.hp
    samples = trainer.step * trainer.options.batch_size
    train, held_out = data.train, data.held_out
    tokens, short = samples * hp.context_length, short_tokens(log)
    rows = {
        "architecture": "GPT-BigCode (GGUF: `starcoder`): multi-query attention, learned positions, tied embedding",
        "shape": f"{hp.num_layers} blocks × {hp.hidden_size}, {hp.num_heads} heads of {hp.head_dim}, "
        f"MLP {hp.intermediate_size}, context {hp.context_length}, vocabulary {hp.vocab_size:,}",
        "parameters": f"{parameters / 1e6:.2f} million",
        "file": f"`demo.gguf`, Q8_0 (positions, norms and biases F32), {size / 1e6:.2f} MB",
        "tokenizer": "byte-level BPE of the same text: one token per digit, StarCoder's special tokens in its order",
        "trained on": f"{tokens / 1e6:.1f} million tokens of the library's modules and tests, {short / 1e6:.1f} "
        f"million of them with the tests cut into documents of a few lines (at that point {train.documents:,} "
        f"documents, {len(train.ids) / 1e6:.1f} million tokens, {train.bytes / 1e6:.1f} MB)",
        "objective": "next token; half of all document fragments rearranged for fill-in-the-middle, half of those in "
        "SPM order, as in StarCoder's training",
        "held out": f"**{measured:.3f} bits per byte** on {held_out.documents} modules it never saw, "
        f"{held_out.bytes / 1e3:.0f} kB",
    }
    return CARD.format(
        rows="\n".join(f"| {name} | {text} |" for name, text in rows.items()),
        context_length=hp.context_length,
        stride=hp.context_length // 2,
        xz=data.xz_bits_per_byte,
        version=platform.python_version(),
        fraction=HELD_OUT,
        names=", ".join(f"`{name}`" for name in data.held_out_names),
        commands=commands(log),
    )


CARD = """# The demo model

A GPT-BigCode model small enough to ship with the package, so that every command has something to run on. starscope
trained it from scratch, through the same recorded graph that runs it.

| | |
|---|---|
{rows}

Bits per byte are measured with `demo.gguf` itself, one document per file, in windows of {context_length} tokens that
start {stride} tokens apart. `xz -9e` needs {xz:.2f} for the same text in one piece.

## Data and licence

The text is the standard library of CPython {version} and part of its test suite, © Python Software Foundation, under
the PSF License Version 2 (https://docs.python.org/3/license.html), without generated tables. The weights are published
with starscope under its own licence, Apache-2.0. A module is held out if the first eight bytes of the SHA-256 of its
path, as a fraction, are below {fraction}: {names}.

## How it was made

```
{commands}
```

`log.jsonl` is the training log: its loss is in nats per token, over ordinary and rearranged samples alike.

## Limits

It has seen one library in one language, and little of that: it knows what Python looks like and the library's habits.
It invents names, is seldom right, and may repeat passages of the library. Use it to try the commands and to look inside
a model, not to write code.
"""


def say(line: Mapping[str, Any] | str) -> None:
    print(line if isinstance(line, str) else json.dumps(line), file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, default=Path("demo_train"), help="tokens and checkpoints (default: %(default)s)")
    add("--steps", type=int, default=2000, help="train until so many steps are made (default: %(default)s)")
    add("--minutes", type=float, help="instead of --steps: as many as a trial says will fit")
    add("--decay-steps", type=int, help="the length of the learning rate's schedule (default: as --steps)")
    add("--batch-size", type=int, default=8, help="samples a step (default: %(default)s)")
    add("--learning-rate", type=float, default=2.5e-3, help="at its highest (default: %(default)s)")
    add(
        "--tests",
        type=float,
        default=TEST_SHARE,
        help="share of the library's tests to train on (default: %(default)s)",
    )
    add("--short", action="store_true", help="cut the tests into documents of a few lines")
    add("--resume", action="store_true", help="go on from the last checkpoint in --work")
    add("--recipe", action="store_true", help="all stages of the model in the package, from where --work is in them")
    return parser.parse_args()


def saved_step(work: Path) -> int:
    """The step of the newest whole checkpoint; 0 where there is none."""
    if not any((work / name).exists() for name in (CURRENT, PREVIOUS)):
        return 0
    return load_checkpoint(work)[0].step


def follow_recipe(args: argparse.Namespace, recipe: Sequence[Stage] = RECIPE) -> int:
    """Every stage that is left in --work, one after another."""
    left = stages_left(saved_step(args.work), recipe) or [recipe[-1]]  # a finished one writes the model again
    for stage in left:
        given = {**vars(args), **asdict(stage), "minutes": None, "resume": saved_step(args.work) > 0}
        if status := train(argparse.Namespace(**given), is_last=stage is recipe[-1]):
            return status
    return 0


def train(args: argparse.Namespace, *, is_last: bool = True) -> int:
    """One run, and the files of the model when it is the last one. Returns the exit status."""
    data = prepare(args.work, args.tests, short=args.short)
    for what, file in (("training", data.train), ("held out", data.held_out)):
        say(f"{what}: {file.documents} files, {file.bytes} bytes, {len(file.ids)} tokens")
    family = find_family("gpt_bigcode")
    graph = record(family, make_hparams(family, HPARAMS))
    steps = args.steps
    if args.minutes:
        steps = steps_in(args.minutes, make_trainer(args, graph, data, 10**6))
        say(f"{steps} steps in {args.minutes:g} minutes")
    trainer = make_trainer(args, graph, data, steps)
    say(trainer.why)
    if args.resume and (note := trainer.resume()):
        say(note)
    outcome = trainer.run()
    if outcome.signal is not None:
        say(f"stopped after step {outcome.step}; --resume goes on from there")
        return 128 + outcome.signal
    if is_last:
        write_demo(trainer, graph, data, args.work)
    return 0


def main() -> int:
    args = parse()
    return follow_recipe(args) if args.recipe else train(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StarscopeError as error:
        say(str(error))
        sys.exit(error.exit_status)
