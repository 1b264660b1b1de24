"""What the GPU path gives on this machine's GPU, in one run of less than eight minutes.

    python benches/gpu.py [FILE.gguf ...] [--device cuda] [--work DIR] [--seconds 420] [-o REPORT.json]

Without files, random models of two real shapes are made in DIR: tiny (20 × 768) and 1b (24 × 2048). In this order, each
part left out, and named, once the time is up:

    kernels    Triton's products with each stored format, against float64
    parity     logits of every -ngl N against the CPU's torch engine, and with low VRAM
    memory     bytes that the allocator counts, against the plan; with low VRAM
    recorded   decoding steps as CUDA graphs, against the same steps as they are
    speed      decoding and time to the first token, in turns with transformers in float16 where it is installed

One JSON document on stdout. `--smoke`: the CPU stands for the GPU and the models are small; figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import starscope
from starscope.convert import convert
from starscope.engine import Engine
from starscope.engine.gpu.devices import allocated_bytes, find_device, ways_of
from starscope.engine.gpu.products import linear
from starscope.engine.gpu.stored import LAYOUTS, read_stored
from starscope.engine.torch_engine import TorchEngine
from starscope.formats import decode, encode, find_format
from starscope.quantize import quantize

FORMATS = ("q4_0", "q8_0", "q4_k", "f16")
SMOKE = {"tiny": (2, 256, 4, 256, 300), "1b": (3, 256, 4, 256, 300)}
PROMPT = 512
ULP = 2.0**-23
HALF = 2.0**-10
"""Of the largest logit: what a key that rounds to its other neighbour in float16 moves."""


class Clock:
    """The time that the run may take."""

    def __init__(self, seconds: float) -> None:
        self._began, self._seconds = time.perf_counter(), seconds

    @property
    def is_up(self) -> bool:
        return time.perf_counter() - self._began > self._seconds


class Bench:
    """The device, the files and what has been found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.smoke, self.clock = bool(args.smoke), Clock(args.seconds)
        self.name = "cpu" if self.smoke else str(args.device)
        self.device = find_device(self.name)
        self.work = Path(args.work)
        self.report: dict[str, Any] = {"device": self.name, "torch": torch.__version__, "left_out": []}
        if self.device.type == "cuda":
            self.report["gpu"] = torch.cuda.get_device_name(self.device)
        self.report["triton"] = ways_of(self.device, torch.float32).triton
        self.files: dict[str, Path] = {path.stem: path for path in args.files}
        self.folders: dict[str, Path] = {}

    def make_models(self) -> list[Any]:
        """Random models, each from a folder that transformers reads too."""
        tools = runpy.run_path(str(Path(__file__).parent / "convert.py"), run_name="convert_bench")
        if self.smoke:
            tools["SHAPES"].update(SMOKE)
        for shape in ("tiny", "1b"):
            folder = self.work / shape
            if not folder.is_dir():
                tools["make_folder"](folder, shape, "float16")
            self.folders[shape] = folder
            whole = self.work / f"{shape}-f16.gguf"
            if not whole.is_file():
                convert(folder, whole, to="f16")
            for to in FORMATS:
                path = self.work / f"{shape}-{to}.gguf"
                if not path.is_file():
                    quantize(whole, path, to=to)
                self.files[path.stem] = path
        return []

    def load(self, path: Path, layers: Any = "all", *, engine: str = "auto", low_vram: bool = False) -> Any:
        """A model with so many layers on the device; in a smoke test on a CPU that stands for it."""
        if self.smoke:
            return stand_in(path, layers, low_vram)
        return starscope.load(path, device=self.name, gpu_layers=layers, engine=engine, low_vram=low_vram)

    def part(self, name: str, into: list[Any], action: Callable[[], list[Any]]) -> None:
        """One part of the report. An error ends it and not the run: time on a GPU is dear."""
        if self.clock.is_up:
            self.report["left_out"].append(f"{name}: the time was up")
            return
        began = time.perf_counter()
        try:
            into += action()
        except Exception as error:
            self.report["left_out"].append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
        say(f"{name}: {time.perf_counter() - began:.1f} s")

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, action: Callable[[], object]) -> float:
        self.synchronize()
        began = time.perf_counter()
        action()
        self.synchronize()
        return time.perf_counter() - began


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def stand_in(path: Path, layers: Any, low_vram: bool) -> Any:
    """The placement of a GPU with the CPU in its place."""
    from starscope.engine.split.choose import formats_of
    from starscope.engine.split.engine import SplitEngine
    from starscope.placement import Device, make_plan

    model = starscope.load(path, device="cpu", engine="torch")
    formats = formats_of(model.graph, model.weights)
    plan = make_plan(model.graph, formats, [Device("cuda")], gpu_layers=layers, low_vram=low_vram)
    if plan.is_on_host:
        return model
    engine = SplitEngine(plan, model.weights, host="torch", stand_ins={"cuda": "cpu"})
    return type(model)(model.path, model.weights, model.tokenizer, engine)


def ids_of(vocabulary: int, count: int) -> list[int]:
    return np.random.default_rng(0).integers(0, vocabulary, count).tolist()


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in parts of the largest magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def kernels(bench: Bench) -> list[dict[str, Any]]:
    """Errors of products, in ulp of float32 of the same product of magnitudes."""
    from starscope.engine import Weights
    from starscope.family import Slot

    class Source:
        """One matrix in memory."""

        def has(self, slot: Slot) -> bool:
            return True

        def format_name(self, slot: Slot) -> str:
            return name

        def read_stored(self, slot: Slot, start: int, stop: int, into: Any) -> Any:
            return raw[start:stop]

    rows, cols = (67, 512) if bench.smoke else (1027, 2048)
    rng, made = np.random.default_rng(1), []
    for name in LAYOUTS:
        fmt = find_format(name)
        raw = encode(fmt, rng.normal(0, 0.05, (rows, cols)).astype(np.float32))
        w = decode(fmt, raw).astype(np.float64)
        weights = Weights([Slot("w", "w", "w", (rows, cols), always_f32=False)], Source())  # type: ignore[arg-type]
        matrix = read_stored(weights, "w", bench.device, by_triton=ways_of(bench.device, torch.float32).triton)
        assert (matrix.decode().cpu().numpy() == w).all(), f"{name} does not decode to its bits"
        for n in (1, 2, 17, 64, 300):
            x = rng.normal(size=(n, cols)).astype(np.float32)
            there = torch.from_numpy(x).to(bench.device)
            found = linear(there, matrix).cpu().numpy()
            error = np.abs(found - x.astype(np.float64) @ w.T) / (np.abs(x).astype(np.float64) @ np.abs(w).T)
            timed = statistics.median(bench.seconds(lambda m=matrix, t=there: linear(t, m)) for _ in range(5))  # type: ignore[misc]
            made.append(
                {"format": name, "rows": n, "ulp": round(float(error.max() / ULP), 2), "us": round(timed * 1e6)}
            )
    return made


def parity(bench: Bench, path: Path) -> list[dict[str, Any]]:
    """Every rung of the ladder against the torch engine on the CPU: prompt, and eight steps behind it."""
    plain = starscope.load(path, device="cpu", engine="torch")
    ids = ids_of(plain.vocab_size, 40)
    expected = run(plain.engine, ids)
    layers, made = plain.num_layers, []
    rungs = [0, 1, layers // 2, layers, layers + 1, layers + 2, layers + 3]
    for low_vram in (False, True):
        for n in dict.fromkeys(rungs if not low_vram else [1, layers + 3]):
            found = run(bench.load(path, n, engine="torch", low_vram=low_vram).engine, ids)
            apart = distance(found, expected)
            made.append(
                {
                    "file": path.stem,
                    "gpu_layers": n,
                    "low_vram": low_vram,
                    "distance": apart,
                    "within_a_half": apart <= HALF,
                    "same_tokens": bool((found.argmax(-1) == expected.argmax(-1)).all()),
                }
            )
    return made


def run(engine: Engine, ids: list[int]) -> np.ndarray:
    """Logits of all of a text: all but eight tokens at once, those one by one."""
    cache = engine.new_cache()
    parts = [ids[:-8], *([one] for one in ids[-8:])]
    return np.concatenate([engine.forward([part], [cache], "all")[0] for part in parts])


def memory(bench: Bench, path: Path) -> list[dict[str, Any]]:
    """Weights, keys and values as allocated, and the peak of a step of a whole batch, beside the plan's figures."""
    made = []
    for low_vram in (False, True):
        before = allocated_bytes(bench.device)
        if before is not None and bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(bench.device)
        model = bench.load(path, "all", low_vram=low_vram)
        plan = getattr(model.engine, "plan", None)
        cache = model.engine.new_cache()
        room = min(PROMPT, model.context_length - 2)
        model.engine.forward([ids_of(model.vocab_size, room)], [cache])
        row: dict[str, Any] = {"file": path.stem, "low_vram": low_vram}
        if plan is not None:
            row["plan"] = plan.bytes[plan.main].as_document()
            row["caches_on"] = sorted(set(plan.caches.values()))
        if before is not None:
            row["allocated"] = (allocated_bytes(bench.device) or 0) - before
            if bench.device.type == "cuda":
                row["peak"] = torch.cuda.max_memory_allocated(bench.device) - before
        if plan is not None and "peak" in row:
            held = row["plan"]["weights"] + row["plan"]["kv"]
            row["allocated_of_plan"] = round(row["allocated"] / held, 4)
            row["peak_of_plan"] = round(row["peak"] / row["plan"]["total"], 4)
        made.append(row)
        del model, cache
    return made


def recorded(bench: Bench, path: Path) -> dict[str, Any]:
    """The same decoding steps with and without recording: the distance of their logits, milliseconds of each."""
    weights = starscope.load(path, device="cpu", engine="numpy")
    ways = ways_of(bench.device, torch.float32)
    if bench.smoke:
        ways = type(ways)(stored=True, static=True)
    made: dict[bool, tuple[np.ndarray, float]] = {}
    for is_recorded in (False, True):
        chosen = type(ways)(ways.stored, ways.triton, ways.static, is_recorded)
        engine = TorchEngine(weights.graph, weights.weights, device=bench.name, ways=chosen)
        cache = engine.new_cache()
        engine.forward([ids_of(weights.vocab_size, 20)], [cache])
        logits, times = [], []
        for i in ids_of(weights.vocab_size, 24):
            began = time.perf_counter()
            logits.append(engine.forward([[i]], [cache])[0])
            times.append(time.perf_counter() - began)
        made[is_recorded] = np.concatenate(logits), statistics.median(times[4:])
        del engine, cache
    apart = distance(made[True][0], made[False][0])
    return {
        "file": path.stem,
        "distance": apart,
        "within_a_half": apart <= HALF,
        "plain_ms": round(made[False][1] * 1e3, 3),
        "recorded_ms": round(made[True][1] * 1e3, 3),
    }


def ours(bench: Bench, path: Path) -> Callable[[int, int], tuple[float, float]]:
    """(prompt, tokens) -> seconds to the first token, tokens per second after it."""
    model = bench.load(path, "all")

    def measure(prompt: int, tokens: int) -> tuple[float, float]:
        ids, cache = ids_of(model.vocab_size, prompt), model.engine.new_cache()
        logits: list[np.ndarray] = []
        first = bench.seconds(lambda: logits.extend(model.engine.forward([ids], [cache])))

        def go() -> None:
            last = logits[0]
            for _ in range(tokens):
                [last] = model.engine.forward([[int(last[-1].argmax())]], [cache])

        return first, tokens / bench.seconds(go)

    return measure


def theirs(bench: Bench, folder: Path) -> Callable[[int, int], tuple[float, float]]:
    """The same of transformers."""
    import transformers

    dtype = torch.float32 if bench.smoke else torch.float16
    cls = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model = cls.from_pretrained(folder, dtype=dtype).to(bench.device).eval()

    def measure(prompt: int, tokens: int) -> tuple[float, float]:
        ids = torch.tensor([ids_of(model.config.vocab_size, prompt)], device=bench.device)
        held: list[Any] = []

        @torch.inference_mode()
        def start() -> None:
            out = model(ids, use_cache=True, logits_to_keep=1)
            held[:] = [out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)]
            held[1].cpu()

        @torch.inference_mode()
        def go() -> None:
            past, last = held
            for _ in range(tokens):
                out = model(last, past_key_values=past, use_cache=True)
                past, last = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
                last.cpu()

        return bench.seconds(start), tokens / bench.seconds(go)

    return measure


def speed(bench: Bench, shape: str) -> list[dict[str, Any]]:
    """Medians of rounds in turns: every file of a shape, and transformers."""
    prompt, tokens, rounds = (20, 4, 1) if bench.smoke else (PROMPT, 64, 3)
    sides = {name: ours(bench, path) for name, path in bench.files.items() if name.startswith(shape)}
    if shape in bench.folders and importlib.util.find_spec("transformers") is not None:
        sides["transformers"] = theirs(bench, bench.folders[shape])
    else:
        bench.report["left_out"].append("speed of transformers: it, or a folder, is not there")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for name, measure in sides.items():
        measure(prompt, min(tokens, 8))  # kernels are compiled, steps recorded
        say(f"{name} is warm")
    for _ in range(rounds):
        for name, measure in sides.items():
            found[name].append(measure(prompt, tokens))
    rows = []
    for name, each in found.items():
        first, rate = (statistics.median(one[i] for one in each) for i in (0, 1))
        rows.append(
            {"file": name, "shape": shape, "first_token_ms": round(first * 1e3, 2), "decode_tok_s": round(rate, 1)}
        )
    peer = next((row for row in rows if row["file"] == "transformers"), None)
    for row in rows if peer else []:
        row["decode_ratio"] = round(row["decode_tok_s"] / peer["decode_tok_s"], 2)
        row["first_token_ratio"] = round(peer["first_token_ms"] / row["first_token_ms"], 2)
    return rows


def measure_all(bench: Bench) -> dict[str, Any]:
    """All parts, in order."""
    report = bench.report
    report.update({name: [] for name in ("kernels", "parity", "memory", "recorded", "speed")})
    if not bench.files:
        bench.part("models", [], bench.make_models)
    bench.part("kernels", report["kernels"], lambda: kernels(bench))
    small = [path for name, path in bench.files.items() if not name.startswith("1b")]
    large = [path for name, path in bench.files.items() if name.startswith("1b")] or small
    for path in small:
        bench.part(f"parity of {path.stem}", report["parity"], lambda p=path: parity(bench, p))
    for path in large[:2]:
        bench.part(f"memory of {path.stem}", report["memory"], lambda p=path: memory(bench, p))
    for path in [*small[:1], *large[:1]]:
        bench.part(f"recorded steps of {path.stem}", report["recorded"], lambda p=path: [recorded(bench, p)])
    for shape in bench.folders or bench.files:
        bench.part(f"speed of {shape}", report["speed"], lambda s=shape: speed(bench, s))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="GGUF files; without any, random models are made")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--work", default=str(Path(tempfile.gettempdir()) / "starscope-gpu"), help="where models are made"
    )
    parser.add_argument("--seconds", type=float, default=420, help="no part begins after so many")
    parser.add_argument("--smoke", action="store_true", help="the CPU stands for the GPU")
    parser.add_argument("-o", "--out", type=Path, help="write the document there too")
    args = parser.parse_args()
    Path(args.work).mkdir(parents=True, exist_ok=True)
    document = json.dumps(measure_all(Bench(args)), indent=2)
    if args.out:
        args.out.write_text(document, encoding="utf-8")
    print(document)


if __name__ == "__main__":
    main()
