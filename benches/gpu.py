"""What the GPU path gives on this machine's GPU, in one run of less than eight minutes.

    python benches/gpu.py [FILE.gguf ...] [--device cuda] [--work DIR] [--seconds 400] [-o REPORT.json]

Without files, random models of three shapes are made in DIR (`gpu_models.py`). In this order, each part that the time
or an error left out named in the report:

    kernels      Triton's products with each stored format, against float64
    attention    softmax rows of every length up to two blocks of a kernel, against float64
    parity       logits of every -ngl N against the CPU's torch engine, and with low VRAM
    memory       bytes that the allocator counts, against the plan; with low VRAM; and what happens when there is none
    recorded     decoding steps as CUDA graphs, against the same steps as they are
    speed        decoding and time to the first token, in turns with transformers in float16 where it is installed

A table on stderr and one JSON document on stdout. `--smoke`: the CPU stands for the GPU and the models are small;
figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_models
import numpy as np
import torch
from gpu_kernels import attention, distance, kernels

import starscope
from starscope.engine import Engine
from starscope.engine.gpu.devices import allocated_bytes, find_device, ways_of
from starscope.engine.split.choose import formats_of
from starscope.engine.split.engine import SplitEngine
from starscope.engine.torch_engine import TorchEngine
from starscope.errors import DoesNotFitError
from starscope.placement import Device, make_plan

PROMPT = 512
HALF = 2.0**-10
"""Of the largest logit: what keys that round to their other neighbours in float16 move."""


class Bench:
    """The device, the models and what has been found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.smoke, self._ends = bool(args.smoke), time.perf_counter() + args.seconds
        if self.smoke:
            torch.set_num_threads(1)
        self.name = "cpu" if self.smoke else str(args.device)
        self.device = find_device(self.name)
        self.is_cuda = self.device.type == "cuda"
        self.ways = ways_of(self.device, torch.float32)
        self.work = Path(args.work)
        self.shapes: dict[str, list[Path]] = {path.stem: [path] for path in args.files}
        self.folders: dict[str, Path] = {}
        self.report: dict[str, Any] = {
            "device": self.name,
            "gpu": torch.cuda.get_device_name(self.device) if self.is_cuda else None,
            "torch": torch.__version__,
            "triton": self.ways.triton,
            "seconds": {},
            "left_out": [],
        }

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self._ends

    def part(self, kind: str, name: str, action: Callable[[], Iterator[dict[str, Any]]]) -> None:
        """One part: its rows go into the report as they come. An error ends it and not the run: a GPU is dear."""
        began, said = time.perf_counter(), f"{kind} {name}".strip()
        try:
            if self.is_over:
                raise TimeoutError("the time was up")
            for row in action():
                self.report.setdefault(kind, []).append(row)
                if self.is_over:
                    raise TimeoutError("the time was up; what is there is there")
        except Exception as error:
            self.report["left_out"].append(f"{said}: {type(error).__name__}: {str(error).splitlines()[0]}")
        self.report["seconds"][said] = round(time.perf_counter() - began, 1)
        say(f"{said}: {self.report['seconds'][said]} s")

    def make_models(self, shape: str) -> Iterator[dict[str, Any]]:
        self.folders[shape], files = gpu_models.make_models(self.work, shape, smoke=self.smoke)
        self.shapes[shape] = list(files.values())
        yield from ({"file": name, "bytes": path.stat().st_size} for name, path in files.items())

    def load(self, path: Path, layers: Any = "all", **options: Any) -> Any:
        """A model with so many layers on the device; in a smoke test on a CPU that stands for it."""
        if self.smoke:
            return stand_in(path, layers, **options)
        return starscope.load(path, device=self.name, gpu_layers=layers, **options)

    def seconds(self, action: Callable[[], object]) -> float:
        self.synchronize()
        began = time.perf_counter()
        action()
        self.synchronize()
        return time.perf_counter() - began

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def there(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def stand_in(path: Path, layers: Any, *, engine: str = "torch", **options: Any) -> Any:
    """The placement of a GPU with the CPU in its place."""
    model = starscope.load(path, device="cpu", engine="torch")
    plan = make_plan(
        model.graph, formats_of(model.graph, model.weights), [Device("cuda")], gpu_layers=layers, **options
    )
    if plan.is_on_host:
        return model
    made = SplitEngine(plan, model.weights, host=engine, stand_ins={"cuda": "cpu"})
    return type(model)(model.path, model.weights, model.tokenizer, made)


def ids_of(vocabulary: int, count: int) -> list[int]:
    return np.random.default_rng(0).integers(0, vocabulary, count).tolist()


def parity(bench: Bench, path: Path, *, every: bool) -> Iterator[dict[str, Any]]:
    """Rungs of the ladder against the torch engine on the CPU: a prompt, and eight steps behind it."""
    plain = starscope.load(path, device="cpu", engine="torch")
    ids, layers = ids_of(plain.vocab_size, 40), plain.num_layers
    expected = run(plain.engine, ids)
    some = [0, 1, layers, layers + 1, layers + 2, layers + 3]
    for low_vram, rungs in ((False, range(layers + 4) if every else some), (True, [1, layers, layers + 1])):
        for n in rungs:
            found = run(bench.load(path, n, engine="torch", low_vram=low_vram).engine, ids)
            apart = distance(found, expected)
            yield {
                "file": path.stem,
                "gpu_layers": n,
                "low_vram": low_vram,
                "distance": apart,
                "within_a_half": apart <= HALF,
                "same_tokens": round(float((found.argmax(-1) == expected.argmax(-1)).mean()), 3),
            }


def run(engine: Engine, ids: list[int]) -> np.ndarray:
    """Logits of all of a text: all but eight tokens at once, those one by one."""
    cache = engine.new_cache()
    parts = [ids[:-8], *([one] for one in ids[-8:])]
    return np.concatenate([engine.forward([part], [cache], "all")[0] for part in parts])


def memory(bench: Bench, path: Path) -> Iterator[dict[str, Any]]:
    """What is allocated, and the peak while a text fills the context, beside the figures of the plan."""
    plain = starscope.load(path, device="cpu", engine="numpy")
    layers, context = plain.num_layers, min(plain.context_length, 2048)  # what is left to the host takes long
    for n, low_vram, limit in (("all", False, None), (layers // 2, False, context), ("all", True, context)):
        before = allocated_bytes(bench.device) or 0
        if bench.is_cuda:
            torch.cuda.reset_peak_memory_stats(bench.device)
        model = bench.load(path, n, low_vram=low_vram, context_length=limit)
        plan, cache = model.engine.plan, model.engine.new_cache()
        while cache.length < plan.context_length:
            count = min(PROMPT, plan.context_length - cache.length)
            model.engine.forward([ids_of(model.vocab_size, count)], [cache])
        found = plan.bytes[plan.main]
        row = {"file": path.stem, "gpu_layers": n, "low_vram": low_vram, "context": plan.context_length}
        row |= {f"plan_{name}": size for name, size in found.as_document().items()}
        row["caches_on"] = " ".join(sorted(set(plan.caches.values())))
        if (now := allocated_bytes(bench.device)) is not None:
            row["allocated"] = now - before
            row["allocated_of_plan"] = round((now - before) / (found.weights + found.kv), 4)
        if bench.is_cuda:
            row["peak"] = torch.cuda.max_memory_allocated(bench.device) - before
            row["peak_of_plan"] = round(row["peak"] / found.total, 4)
        yield row
        del model, cache


def no_memory(bench: Bench, path: Path) -> Iterator[dict[str, Any]]:
    """What is said when the allocator may not have enough, and that the process goes on."""
    if not bench.is_cuda:
        return
    index = torch.cuda.current_device() if bench.device.index is None else bench.device.index
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(bench.device)[1]
    allowed = (torch.cuda.memory_allocated(bench.device) + path.stat().st_size // 2) / total
    try:
        torch.cuda.set_per_process_memory_fraction(allowed, index)
        bench.load(path)
        said = None
    except DoesNotFitError as error:
        said = str(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)
    model = bench.load(path)
    logits = model.engine.forward([ids_of(model.vocab_size, 8)])[0]
    yield {"file": path.stem, "error": said, "goes_on": bool(np.isfinite(logits).all())}


def recorded(bench: Bench, path: Path) -> Iterator[dict[str, Any]]:
    """The same decoding steps with and without recording: the distance of their logits, milliseconds of each."""
    model = starscope.load(path, device="cpu", engine="numpy")
    ways = replace(bench.ways, stored=True, static=True)

    def steps(is_recorded: bool) -> tuple[np.ndarray, float, list[str]]:
        chosen = replace(ways, recorded=is_recorded)
        engine = TorchEngine(model.graph, model.weights, device=bench.name, ways=chosen)
        cache, logits = engine.new_cache(), list[np.ndarray]()
        engine.forward([ids_of(model.vocab_size, 20)], [cache])
        times = [
            bench.seconds(lambda i=i: logits.append(engine.forward([[i]], [cache])[0]))  # type: ignore[misc]
            for i in ids_of(model.vocab_size, 24)
        ]
        return np.concatenate(logits), statistics.median(times[4:]), list(engine.notes)

    plain, other = steps(False), steps(True)
    apart = distance(other[0], plain[0])
    yield {
        "file": path.stem,
        "distance": apart,
        "within_a_half": apart <= HALF,
        "plain_ms": round(plain[1] * 1e3, 3),
        "recorded_ms": round(other[1] * 1e3, 3),
        "notes": "; ".join(other[2]),
    }


def ours(bench: Bench, path: Path) -> Callable[[int, int], tuple[float, float]]:
    """(prompt, tokens) -> seconds to the first token, tokens per second after it."""
    model = bench.load(path)

    def measure(prompt: int, tokens: int) -> tuple[float, float]:
        ids, cache = ids_of(model.vocab_size, prompt), model.engine.new_cache()
        logits: list[np.ndarray] = []
        first = bench.seconds(lambda: logits.extend(model.engine.forward([ids], [cache])))

        def go() -> None:
            [last] = logits
            for _ in range(tokens):
                [last] = model.engine.forward([[int(last[-1].argmax())]], [cache])

        return first, tokens / bench.seconds(go)

    return measure


def theirs(bench: Bench, folder: Path) -> Callable[[int, int], tuple[float, float]]:
    """The same of transformers."""
    import transformers

    warnings.simplefilter("ignore", FutureWarning)  # `past_key_values` has another name in later versions
    dtype = torch.float32 if bench.smoke else torch.float16
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(bench.device).eval()

    def measure(prompt: int, tokens: int) -> tuple[float, float]:
        ids = torch.tensor([ids_of(model.config.vocab_size, prompt)], device=bench.device)
        held: list[Any] = []

        @torch.inference_mode()
        def step(last: torch.Tensor, past: Any) -> None:
            out = model(last, past_key_values=past, use_cache=True, logits_to_keep=1)
            held[:] = [out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values]
            held[0].cpu()

        def go() -> None:
            for _ in range(tokens):
                step(*held)

        return bench.seconds(lambda: step(ids, None)), tokens / bench.seconds(go)

    return measure


def speed(bench: Bench, shape: str) -> Iterator[dict[str, Any]]:
    """Medians of rounds in turns: every file of a shape, and transformers."""
    prompt, tokens, rounds = (20, 4, 1) if bench.smoke else (PROMPT, 64, 3)
    sides = {path.stem: ours(bench, path) for path in bench.shapes[shape]}
    if shape in bench.folders and importlib.util.find_spec("transformers") is not None:
        sides["transformers"] = theirs(bench, bench.folders[shape])
    else:
        bench.report["left_out"].append(f"speed {shape}, transformers: it, or a folder, is not there")
    for name, measure in sides.items():
        measure(prompt, min(tokens, 8))  # kernels are compiled
        say(f"  {name} is warm")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measure in sides.items():
            found[name].append(measure(prompt, tokens))
    medians = {name: [statistics.median(one[i] for one in each) for i in (0, 1)] for name, each in found.items()}
    peer = medians.get("transformers")
    for name, (first, rate) in medians.items():
        row = {"shape": shape, "file": name, "first_token_ms": round(first * 1e3, 2), "decode_tok_s": round(rate, 1)}
        if peer:
            row |= {"first_token_ratio": round(peer[0] / first, 2), "decode_ratio": round(rate / peer[1], 2)}
        yield row


def measure_all(bench: Bench) -> dict[str, Any]:
    """All parts, in order."""
    made = [] if bench.shapes else list(gpu_models.CONFIGS)
    for shape in made:
        bench.part("models", shape, lambda s=shape: bench.make_models(s))  # type: ignore[misc]
    bench.part("kernels", "", lambda: kernels(bench))
    bench.part("attention", "", lambda: attention(bench))
    *small, large = list(bench.shapes) or [""]
    for shape in small or [large]:
        for number, path in enumerate(bench.shapes.get(shape, [])):
            bench.part("parity", path.stem, lambda p=path, every=number == 0: parity(bench, p, every=every))  # type: ignore[misc]
    for path in bench.shapes.get(large, [])[:2]:
        bench.part("memory", path.stem, lambda p=path: memory(bench, p))  # type: ignore[misc]
    for path in bench.shapes.get(large, [])[:1]:
        bench.part("no_memory", path.stem, lambda p=path: no_memory(bench, p))  # type: ignore[misc]
    for paths in bench.shapes.values():
        bench.part("recorded", paths[0].stem, lambda p=paths[0]: recorded(bench, p))  # type: ignore[misc]
    for shape in reversed(bench.shapes):
        bench.part("speed", shape, lambda s=shape: speed(bench, s))  # type: ignore[misc]
    return bench.report


def table(report: dict[str, Any]) -> list[str]:
    """The rows of each part in columns."""
    lines = [f"{report['device']} ({report['gpu'] or 'no GPU'}), torch {report['torch']}, Triton: {report['triton']}"]
    for kind in ("kernels", "attention", "parity", "memory", "no_memory", "recorded", "speed"):
        rows = report.get(kind, [])
        names = list(dict.fromkeys(name for row in rows for name in row))
        texts = [names, *([short(row.get(name, "")) for name in names] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines += ["", kind] if rows else []
        lines += ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in texts if rows]
    return [*lines, "", *(f"left out: {one}" for one in report["left_out"])]


def short(value: Any) -> str:
    return f"{value:.2e}" if isinstance(value, float) and value and abs(value) < 1e-2 else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="GGUF files; without any, random models are made")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--work", default=str(Path(tempfile.gettempdir()) / "starscope-gpu"), help="where models are made"
    )
    parser.add_argument("--seconds", type=float, default=400, help="nothing begins after so many")
    parser.add_argument("--smoke", action="store_true", help="the CPU stands for the GPU")
    parser.add_argument("-o", "--out", type=Path, help="write the document there too")
    args = parser.parse_args()
    Path(args.work).mkdir(parents=True, exist_ok=True)
    report = measure_all(Bench(args))
    document = json.dumps(report, indent=2)
    if args.out:
        args.out.write_text(document, encoding="utf-8")
    say("\n".join(table(report)))
    print(document)


if __name__ == "__main__":
    main()
