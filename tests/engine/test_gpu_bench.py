"""`benches/gpu.py` runs to its end with the CPU in the GPU's place, and says what it left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "benches" / "gpu.py"

pytestmark = pytest.mark.skipif(not BENCH.is_file(), reason="the benches are not in a source distribution")


def run(*arguments: str) -> dict:
    done = subprocess.run([sys.executable, str(BENCH), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_bench_has_every_part_and_the_ladder_gives_the_logits_of_the_cpu(tmp_path):
    found = run("--smoke", "--work", str(tmp_path))
    assert found["left_out"] == []
    assert max(row["ulp"] for row in found["kernels"]) <= 4
    assert max(row["ulp"] for row in found["attention"]) <= 32
    files = [f"tiny-{to}" for to in ("q4_0", "q8_0", "q4_k", "q6_k", "f16")] + ["llama-q4_k", "llama-q8_0"]
    assert list(dict.fromkeys(row["file"] for row in found["parity"])) == files
    for name in files:
        assert {row["gpu_layers"] for row in found["parity"] if row["file"] == name} == {0, 1, 2, 3, 4, 5}
    assert all(row["within_a_half"] for row in [*found["parity"], *found["recorded"]])
    assert [row["caches_on"] for row in found["memory"]] == ["cuda", "cpu", "cpu"] * 2
    assert {row["file"] for row in found["speed"]} >= {"1b-q4_k", "llama-q8_0", "tiny-f16", "transformers"}


def test_the_bench_ends_where_its_time_is_up_and_names_what_is_missing(tmp_path):
    found = run("--smoke", "--seconds", "0", "--work", str(tmp_path))
    assert "kernels: TimeoutError: the time was up" in found["left_out"]
    assert "parity" not in found
