"""How long a conversion takes beside `dd conv=fdatasync` writing as many bytes, in the same run, and how much memory.

    python benches/convert.py WORK_DIR --shape 1b --to f16 --rounds 5

A random Hugging Face folder is made in WORK_DIR (once; about 4.6 GB for 1b in float32). Each round runs dd and the
conversion, each a process of its own, one after the other, and removes what they wrote; the file is compared with the
source first. Printed: seconds and ratios, the peak of anonymous memory (sampled) and of all memory, as one JSON
document. The source is in the page cache, as after a download, unless --cold drops it before each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from starscope.convert import convert
from starscope.family import find_family, read_config
from starscope.tokenizer.bytelevel import ALPHABET

SHAPES = {  # layers, hidden, heads, positions, vocabulary
    "tiny": (20, 768, 12, 8192, 49152),
    "1b": (24, 2048, 16, 8192, 49152),
    "3b": (36, 2816, 22, 8192, 49152),
}
BYTES_OF = {"float32": 4, "float16": 2, "bfloat16": 2}
STORED_AS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
BLOCK = 1 << 22  # values drawn at a time
SAMPLE_S = 0.005
CONVERT = "import sys; from starscope.convert import convert; convert(sys.argv[1], sys.argv[2], to=sys.argv[3])"


def make_folder(folder: Path, shape: str, dtype: str) -> None:
    """A checkpoint of a real model's shape: normal values, a byte-level vocabulary that the conversion pads."""
    layers, hidden, heads, positions, vocabulary = SHAPES[shape]
    family = find_family("gpt_bigcode")
    config = {
        "architectures": [family.hf_architectures[0]],
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": vocabulary,
        "activation_function": "gelu_pytorch_tanh",
    }
    folder.mkdir(parents=True)
    tokens = ["<|endoftext|>", *ALPHABET]
    write_json(
        folder / "tokenizer.json",
        {
            "added_tokens": [{"id": 0, "content": tokens[0], "special": True}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []},
        },
    )
    slots = [slot for slot in family.slots(read_config(family, config)) if slot.tied_to is None]
    entries: dict[str, Any] = {}
    at = 0
    for slot in slots:
        end = at + slot.parameters * BYTES_OF[dtype]
        entries[slot.hf] = {"dtype": STORED_AS[dtype], "shape": list(slot.shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    random = np.random.default_rng(0)
    values = random.standard_normal(BLOCK, np.float32) * np.float32(0.02)
    stored = {
        "float32": values.view(np.uint8),
        "float16": values.astype(np.float16).view(np.uint8),
        "bfloat16": (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8),
    }[dtype]
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, at, len(stored)):
            file.write(stored[: min(len(stored), at - start)])
        os.fsync(file.fileno())
    write_json(folder / "config.json", config)


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


def run_dd(out: Path, size: int) -> float:
    """Seconds that dd takes for `size` bytes of zeros, on the disk at the end."""
    blocks = -(-size // (1 << 20))
    began = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={out}", "bs=1M", f"count={blocks}", "conv=fdatasync"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    out.unlink()
    return seconds


def run_conversion(folder: Path, out: Path, to: str) -> tuple[float, int, int]:
    """Seconds of the whole process, the peak of its anonymous memory (sampled) and of all its memory, in bytes."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", CONVERT, str(folder), str(out), to])
    anonymous = resident = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if "VmHWM" in fields:  # a process that has ended has no memory
            anonymous = max(anonymous, 1024 * int(fields["RssAnon"].split()[0]))
            resident = max(resident, 1024 * int(fields["VmHWM"].split()[0]))
        time.sleep(SAMPLE_S)
    if process.returncode:
        raise SystemExit(f"the conversion ended with status {process.returncode}")
    return time.perf_counter() - began, anonymous, resident


def drop_from_cache(folder: Path) -> None:
    """Forget the folder's files, so that they are read from the disk."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_whole(folder: Path) -> None:
    """Bring the folder's files into the page cache."""
    buffer = bytearray(1 << 24)
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="a folder for the source and the outputs")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--dtype", choices=BYTES_OF, default="float32")
    parser.add_argument("--to", default="f16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="read the source from the disk in each round")
    parser.add_argument("--source", type=Path, help="use this folder instead of a random one")
    args = parser.parse_args()

    folder = args.source or args.work / f"{args.shape}-{args.dtype}"
    if not folder.is_dir():
        make_folder(folder, args.shape, args.dtype)
    out = args.work / "bench.gguf"
    size = convert(folder, out, to=args.to, verify=True, force=True).bytes
    out.unlink()

    rounds = []
    for _ in range(args.rounds):
        dd = run_dd(out, size)
        (drop_from_cache if args.cold else read_whole)(folder)
        seconds, anonymous, resident = run_conversion(folder, out, args.to)
        out.unlink()
        rounds.append(
            {
                "dd_s": round(dd, 2),
                "convert_s": round(seconds, 2),
                "ratio": round(seconds / dd, 2),
                "anonymous_mb": anonymous // 10**6,
                "resident_mb": resident // 10**6,
            }
        )
    report = {
        "shape": args.shape,
        "dtype": args.dtype,
        "to": args.to,
        "source_cached": not args.cold,
        "output_bytes": size,
        "rounds": rounds,
        "median_dd_s": statistics.median(r["dd_s"] for r in rounds),
        "median_convert_s": statistics.median(r["convert_s"] for r in rounds),
        "median_ratio": statistics.median(r["ratio"] for r in rounds),
        "peak_anonymous_mb": max(r["anonymous_mb"] for r in rounds),
        "peak_resident_mb": max(r["resident_mb"] for r in rounds),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
