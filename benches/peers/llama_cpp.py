"""starscope beside llama.cpp on the same GGUF files: prefill, decode, batches, load to first token, memory.

    python benches/peers/llama_cpp.py FILE.gguf... [-p 512] [-n 64] [-d 0,2048] [-b 1,8] [--rounds 5] [-t N] [--json]
           [--starscope-python PYTHON] [--peer-python PYTHON]

Needs llama-cpp-python (`pip install llama-cpp-python`; it builds for about five minutes) here or in --peer-python.
Both sides get the same token ids and as many threads; nothing is sampled. llama.cpp runs as its own tools run it:
steps of 512 tokens, flash attention where it chooses so, a float16 cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

from side_by_side import (
    MOST_IDLE,
    Row,
    Starscope,
    Worker,
    as_document,
    check_agreement,
    idle_share,
    in_turns,
    installed,
    numbers,
    parser,
    row_of,
    say_if_busy,
    serve,
    table,
    token_ids,
)

STEP = 512  # tokens
FIRST_PROMPT = 16  # tokens, of "load to first token"


class LlamaCpp:
    """llama.cpp's side, through its C interface."""

    def __init__(self, file: str, threads: int, context_length: int) -> None:
        self.lib = lib = installed("llama_cpp")
        self.quiet = lib.llama_log_callback(lambda _level, _text, _data: None)  # kept: C holds its address
        lib.llama_log_set(self.quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.threads = threads
        self.model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {file}")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.ctx = self._context(context_length, 1)
        self.ids: list[int] = []
        self.batch_ctx: tuple[int, Any] | None = None

    def _context(self, length: int, sequences: int) -> Any:
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = length, max(STEP, length), STEP, sequences
        params.n_threads = params.n_threads_batch = self.threads
        ctx = self.lib.llama_init_from_model(self.model, params)
        if not ctx:
            raise SystemExit(f"llama.cpp gives no context of {length} tokens")
        return ctx

    def about(self) -> dict[str, Any]:
        return {"name": f"llama.cpp (llama-cpp-python {self.lib.__version__})", "vocab_size": self.vocab_size}

    def _decode(self, ids: list[int]) -> None:
        array = (self.lib.llama_token * len(ids))(*ids)
        if self.lib.llama_decode(self.ctx, self.lib.llama_batch_get_one(array, len(ids))):
            raise SystemExit("llama_decode failed")
        self.lib.llama_synchronize(self.ctx)

    def _cut(self, length: int) -> None:
        memory = self.lib.llama_get_memory(self.ctx)
        if length:
            self.lib.llama_memory_seq_rm(memory, 0, length, -1)
        else:
            self.lib.llama_memory_clear(memory, True)

    def logits(self, ids: list[int]) -> list[float]:
        self.fill([])
        self._decode(ids)
        made = self.lib.llama_get_logits_ith(self.ctx, -1)[: self.vocab_size]
        self._cut(0)
        return list(made)

    def fill(self, ids: list[int]) -> None:
        kept = min(len(self.ids), len(ids))
        if self.ids[:kept] != ids[:kept]:
            kept = 0
        self._cut(kept)
        for start in range(kept, len(ids), STEP):
            self._decode(ids[start : start + STEP])
        self.ids = ids

    def prefill(self, ids: list[int]) -> float:
        return self._timed([ids])

    def decode(self, ids: list[int]) -> float:
        return self._timed([[token] for token in ids])

    def _timed(self, steps: list[list[int]]) -> float:
        began = time.perf_counter()
        for step in steps:
            self._decode(step)
        seconds = time.perf_counter() - began
        self._cut(len(self.ids))
        return seconds

    def batch(self, steps: list[list[int]]) -> float:
        lib, size = self.lib, len(steps[0])
        if self.batch_ctx is None or self.batch_ctx[0] != size:
            if self.batch_ctx is not None:
                lib.llama_free(self.batch_ctx[1])
            self.batch_ctx = size, self._context(max(256, len(steps)) * size, size)
        ctx = self.batch_ctx[1]
        batch = lib.llama_batch_init(size, 0, 1)
        batch.n_tokens = size

        def run(ids: list[int], position: int) -> None:
            for i, token in enumerate(ids):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
                batch.seq_id[i][0] = i
            if lib.llama_decode(ctx, batch):
                raise SystemExit("llama_decode failed")
            lib.llama_synchronize(ctx)

        memory = lib.llama_get_memory(ctx)
        lib.llama_memory_clear(memory, True)
        run(steps[0], 0)  # what a context does once
        lib.llama_memory_clear(memory, True)
        began = time.perf_counter()
        for position, ids in enumerate(steps):
            run(ids, position)
        seconds = time.perf_counter() - began
        lib.llama_batch_free(batch)
        return seconds


def compare(file: Path, args: argparse.Namespace) -> tuple[list[Row], dict[str, Any], list[str]]:
    """All rows of one file, what else was seen, and both sides' names."""
    depths, batches = numbers(args.depths), numbers(args.batches)
    longest = max([0, *depths]) + max(args.prompt, args.steps)

    def start(side: str, context_length: int) -> Worker:
        python = args.starscope_python if side == "starscope" else args.peer_python
        settings = ("--engine", args.engine, "-t", args.threads, "--context-length", context_length)
        return Worker(python, __file__, side, file, *settings)

    def first_token(side: str) -> float:
        with start(side, 512) as worker:
            ids = token_ids(worker.about["vocab_size"], FIRST_PROMPT)
            return float(worker.about["load_s"] + worker.call("prefill", ids))

    first = [(first_token("starscope"), first_token("llama.cpp")) for _ in range(args.rounds)]
    rows = [row_of("load to first token", "s", first)]
    with start("starscope", longest) as ours, start("llama.cpp", longest) as theirs:
        vocab_size = ours.about["vocab_size"]
        ids = token_ids(vocab_size, longest + max([1, *batches]))
        prompt = ids[: args.prompt]
        seen = check_agreement(ours.call("logits", prompt), theirs.call("logits", prompt))
        for depth in depths:
            for side in (ours, theirs):
                side.call("fill", ids[:depth])
                side.call("decode", ids[:2])  # what a side does once
            for name, count in (("prefill", args.prompt), ("decode", args.steps)):
                part = ids[depth : depth + count]

                def speed(side: Worker, name: str = name, part: list[int] = part) -> float:
                    return float(len(part) / side.call(name, part))

                rows.append(in_turns(f"{name} {count} at depth {depth}", "tok/s", args.rounds, speed, ours, theirs))
        for size in batches:
            steps = [ids[at : at + size] for at in range(args.steps)]

            def speed_together(side: Worker, steps: list[list[int]] = steps) -> float:
                return float(len(steps) * len(steps[0]) / side.call("batch", steps))

            rows.append(in_turns(f"decode {size} together", "tok/s", args.rounds, speed_together, ours, theirs))
        peaks = (ours.call("peak_rss") / 2**20, theirs.call("peak_rss") / 2**20)
        rows.append(row_of("peak memory", "MiB", [peaks]))
        for name, idle, busy in (("ours", ours, theirs), ("theirs", theirs, ours)):
            seen[f"idle_{name}"] = idle_share(idle, lambda busy=busy: busy.call("decode", ids[: args.steps]))
        return rows, seen, [ours.about["name"], theirs.about["name"]]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("files", nargs="+", type=Path)
    options.add_argument("-d", "--depths", default="0,2048", help="tokens that the cache holds before")
    options.add_argument("-b", "--batches", default="1,8", help="sequences to decode together")
    options.add_argument("--context-length", type=int, default=0, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.worker:
        file = str(args.files[0])
        if args.worker == "starscope":
            import starscope.model  # noqa: F401  (not a part of loading a file)

            serve(lambda: Starscope(file, args.engine, args.threads))
        else:
            installed("llama_cpp")
            serve(lambda: LlamaCpp(file, args.threads, args.context_length))
        return
    say_if_busy()
    documents = []
    for file in args.files:
        rows, seen, names = compare(file, args)
        documents.append(as_document(rows, file=file.name, sides=names, threads=args.threads, **seen))
        if not args.json:
            title = f"{file.name}, {args.threads} threads: {names[0]} | {names[1]}"
            sys.stdout.write(table(title, ["ours", "theirs"], rows) + "\n")
            sys.stdout.flush()
        if not seen["same_token"]:
            difference = seen["largest_relative_difference"]
            print(f"{file.name}: the likeliest tokens differ; logits by {difference:.1%} at most", file=sys.stderr)
        if max(seen["idle_ours"], seen["idle_theirs"]) > MOST_IDLE:
            print(f"{file.name}: a side was busy while it waited: figures are too low", file=sys.stderr)
    if args.json:
        print(json.dumps({"files": documents}, indent=2))


if __name__ == "__main__":
    main()
