"""The torch engine in a forked child: it would wait for ever for threads that the fork left behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

PARENT = """
import os, sys
import starscope
from starscope.errors import StarscopeError
in_parent, in_child = sys.argv[1:3]
model = starscope.load("demo", engine=in_parent, threads=2) if in_parent else None
if model: model.forward([1] * 64)
if os.fork() == 0:
    try:
        if in_child != "same":
            model = starscope.load("demo", engine=in_child.rstrip("1"), threads=1 if in_child.endswith("1") else 2)
        print("ran", list(model.forward([1] * 64).shape), flush=True)
    except StarscopeError as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
print("ended", os.wait()[1])
"""
REFUSED = (
    "UnsupportedError this process was forked from one that had torch loaded, and torch's threads stayed there. "
    "Load the model only in the child, start processes by spawn, or use one thread (threads=1)."
)
RAN = "ran [1, 64, 2560]"


@pytest.mark.parametrize(
    ("in_parent", "in_child", "said"),
    [
        ("torch", "same", REFUSED),
        ("torch", "torch", REFUSED),
        ("torch", "torch1", RAN),
        ("torch", "numpy1", RAN),
        ("torch", "native", RAN),
        ("", "torch", RAN),
    ],
)
def test_a_forked_child_says_why_or_runs_and_never_hangs(in_parent: str, in_child: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARENT, in_parent, in_child],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.stdout.splitlines() == [said, "ended 0"], done.stderr
