"""What a run is said to need, and what it then takes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from starscope.family import all_families
from starscope.graph import record
from starscope.ops import OPS
from starscope.train.estimate import estimate, resident_bytes
from starscope.train.loop import TrainOptions
from starscope.train.presets import family_sizes
from starscope.train.settings import resolve
from support.runs import SCHEDULE
from support.training import tiny_graph


def test_every_op_is_of_a_family_whose_memory_is_estimated():
    """One that a new family brings has to be counted, or be said to keep nothing."""
    used = set()
    for family in all_families().values():
        graph = record(family, family_sizes(family, resolve({}).sizes, 300))
        assert estimate(graph, TrainOptions(2, SCHEDULE)).total > 0
        used |= {op.kind for op in graph.ops}
    assert used >= set(OPS) - {"gelu"}  # as gelu_tanh, its approximation


RUN = """
    import sys, tempfile
    from starscope.bench import peak_rss_bytes
    from pathlib import Path
    import numpy as np, torch
    from starscope.train.estimate import estimate
    from starscope.train.loop import Batches, Trainer, TrainOptions
    from starscope.train.schedules import Schedule
    sys.path.insert(0, {tests!r})
    from support.training import tiny_graph

    graph = tiny_graph({shape})
    options = TrainOptions(2, Schedule(1e-3, 1, 10), 8, 8, precision={dtype!r}, {options})
    said = estimate(graph, options, getattr(torch, {dtype!r})).total
    ids = np.random.default_rng(0).integers(0, graph.hp.vocab_size, 20000).astype("<u2")
    batches = Batches(ids, context_length=graph.hp.context_length, seed=0)
    Trainer(graph, batches, options, folder=Path(tempfile.mkdtemp())).run()
    print(said / peak_rss_bytes())
"""
DEEP = "context_length=256, hidden_size=256, num_layers=8, intermediate_size=1024"
LARGE = "context_length=32, hidden_size=256, num_layers=6, intermediate_size=1024, vocab_size=8192"
WIDE = "context_length=128, hidden_size=128, num_layers=4, intermediate_size=512, vocab_size=32000, num_kv_heads=4"

LLAMA = f"family='llama', num_kv_heads=2, activation='silu', {DEEP.replace('256', '128', 1)}"
LLAMA_LONG = f"family='llama', num_kv_heads=2, activation='silu', {DEEP}"


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        (DEEP, "float32", ""),
        (DEEP, "bfloat16", ""),
        (DEEP, "float32", "recompute=True"),
        (WIDE, "float32", ""),
        (LLAMA, "float32", ""),
        (LLAMA, "bfloat16", "recompute=True"),
        (LLAMA_LONG, "bfloat16", ""),
        (LARGE, "float32", "optimizer='lbfgs', lbfgs_iterations=8"),
    ],
    ids=["deep", "bfloat16", "recompute", "wide", "llama", "llama recompute", "llama long", "lbfgs"],
)
def test_the_peak_is_within_15_percent_of_what_was_said(shape, dtype, options):
    tests = str(Path(__file__).parent.parent)
    script = textwrap.dedent(RUN).format(tests=tests, shape=shape, dtype=dtype, options=options)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(1.0, abs=0.15)


def test_each_choice_that_saves_memory_lowers_the_estimate():
    graph = tiny_graph(num_layers=8, context_length=256)

    def parts(micro: int = 16, dtype: torch.dtype = torch.float32, **options: object) -> dict[str, int]:
        return estimate(graph, TrainOptions(1, SCHEDULE, 16, micro, **options), dtype).parts  # type: ignore[arg-type]

    whole = parts()
    assert parts(micro=4)["activations"] == whole["activations"] // 4
    assert parts(recompute=True)["activations"] < whole["activations"] / 2
    assert parts(dtype=torch.bfloat16)["activations"] < whole["activations"]
    assert parts(optimizer="lbfgs")["optimizer"] > whole["optimizer"]
    assert resident_bytes() > 10_000_000
