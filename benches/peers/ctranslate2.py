"""starscope on a Q8_0 file beside CTranslate2, int8 by rows, on the same checkpoint: prefill and decode.

    python benches/peers/ctranslate2.py HF_FOLDER FILE.gguf [-p 512] [-n 64] [--rounds 5] [-t N] [--json]
           [--converted FOLDER] [--starscope-python PYTHON] [--peer-python PYTHON]

Needs ctranslate2 here or in --peer-python, and transformers and torch there for its conversion, which is done once
where --converted (default: FILE.gguf with .ct2 behind it) does not exist. Both sides get the same token ids and as many
threads. CTranslate2 has no step to call: it generates greedily, and the times at which its tokens come are taken. Its
prefill is the time to the first token less that of a step.
"""

from __future__ import annotations

import argparse
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
    idle_share,
    installed,
    parser,
    row_of,
    say_if_busy,
    serve,
    table,
    token_ids,
)

MOST_RANK = 9  # among our likeliest tokens, of the peer's first; both round in their own way


class CTranslate2:
    """CTranslate2's side."""

    def __init__(self, folder: Path, converted: Path, threads: int) -> None:
        self.lib = installed("ctranslate2")
        if not converted.exists():
            self.lib.converters.TransformersConverter(str(folder)).convert(str(converted), quantization="int8")
        self.generator = self.lib.Generator(
            str(converted), device="cpu", compute_type="int8", inter_threads=1, intra_threads=threads
        )
        self.tokens: list[str] = json.loads((converted / "vocabulary.json").read_text(encoding="utf-8"))

    def about(self) -> dict[str, Any]:
        kind = self.generator.compute_type
        return {"name": f"CTranslate2 {self.lib.__version__} ({kind})", "vocab_size": len(self.tokens)}

    def generate(self, ids: list[int], steps: int) -> dict[str, Any]:
        """Seconds of all `ids` but the last, which the first step takes; seconds of the steps behind the first; the
        token that the first gave.
        """
        times: list[float] = []

        def take_time(_step: Any) -> bool:
            times.append(time.perf_counter())
            return False

        began = time.perf_counter()
        [made] = self.generator.generate_batch(
            [[self.tokens[i] for i in ids]],
            min_length=steps + 1,
            max_length=steps + 1,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=take_time,
        )
        decode_s = times[steps] - times[0]
        return {
            "prefill_s": times[0] - began - decode_s / steps,
            "decode_s": decode_s,
            "token": made.sequences_ids[0][0],
        }


def compare(args: argparse.Namespace) -> tuple[list[Row], dict[str, Any], list[str]]:
    """All rows, what else was seen, and both sides' names."""
    common = (args.folder, args.file, "--converted", args.converted, "--engine", args.engine, "-t", args.threads)
    with (
        Worker(args.starscope_python, __file__, "starscope", *common) as ours,
        Worker(args.peer_python, __file__, "ctranslate2", *common) as theirs,
    ):
        count, steps = args.prompt, args.steps
        ids = token_ids(ours.about["vocab_size"], count + 1 + steps)
        logits = ours.call("logits", ids[: count + 1])
        chosen = theirs.call("generate", ids[: count + 1], 1)["token"]
        rank = sum(value > logits[chosen] for value in logits)
        if rank > MOST_RANK:
            raise SystemExit(f"the peer's first token is our {rank + 1}th: the two do not compute the same.")
        theirs.call("generate", ids[:1], 1)
        prefill, decode, decode_deep = [], [], []
        for _ in range(args.rounds):
            ours.call("fill", [])
            mine = [count / ours.call("prefill", ids[:count])]
            deep = theirs.call("generate", ids[: count + 1], steps)
            prefill.append((mine[0], count / deep["prefill_s"]))
            ours.call("fill", ids[: count + 1])
            decode_deep.append((steps / ours.call("decode", ids[count + 1 :]), steps / deep["decode_s"]))
            ours.call("fill", ids[:1])
            shallow = steps / ours.call("decode", ids[1 : steps + 1])
            decode.append((shallow, steps / theirs.call("generate", ids[:1], steps)["decode_s"]))
        rows = [
            row_of(f"prefill {count} at depth 0", "tok/s", prefill),
            row_of(f"decode {steps} at depth 1", "tok/s", decode),
            row_of(f"decode {steps} at depth {count + 1}", "tok/s", decode_deep),
        ]
        seen: dict[str, Any] = {"same_token": rank == 0}
        seen["idle_ours"] = idle_share(ours, lambda: theirs.call("generate", ids[:1], steps))
        seen["idle_theirs"] = idle_share(theirs, lambda: ours.call("decode", ids[:steps]))
        return rows, seen, [ours.about["name"], theirs.about["name"]]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("folder", type=Path, help="a Hugging Face folder")
    options.add_argument("file", type=Path, help="the same model as a GGUF file")
    options.add_argument("--converted", type=Path, help="CTranslate2's folder")
    args = options.parse_args()
    args.converted = args.converted or args.file.with_name(args.file.name + ".ct2")
    if args.worker == "starscope":
        serve(lambda: Starscope(str(args.file), args.engine, args.threads))
        return
    if args.worker:
        serve(lambda: CTranslate2(args.folder, args.converted, args.threads))
        return
    say_if_busy()
    rows, seen, names = compare(args)
    if args.json:
        print(json.dumps(as_document(rows, file=args.file.name, sides=names, threads=args.threads, **seen), indent=2))
    else:
        title = f"{args.file.name}, {args.threads} threads: {names[0]} | {names[1]}"
        sys.stdout.write(table(title, ["ours", "theirs"], rows))
    if max(seen["idle_ours"], seen["idle_theirs"]) > MOST_IDLE:
        print("a side was busy while it waited: figures are too low", file=sys.stderr)


if __name__ == "__main__":
    main()
