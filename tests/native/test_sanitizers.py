"""The C++ by itself under the compiler's sanitizers: no byte beyond a buffer, nothing undefined, no race.

Two instruction sets and two programs, so that building them stays within a minute of processor time;
`make check SANITIZE=...` in tests/native/cpp does all.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from starscope import native

SOURCES = Path(__file__).parent / "cpp"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))[0]
pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which("make") is None, reason=f"there is no {COMPILER} or no make"
)

module = native.kernels()
assert module is not None, native.why_missing()
BEST = module.isas()[-1]


@pytest.mark.parametrize(
    ("target", "sanitizer", "isas"),
    [
        ("check", "address,undefined", {"scalar": None, BEST: None}),
        ("threads", "thread", {"scalar": None}),  # which meet alike on every set
    ],
    ids=["address", "thread"],
)
def test_the_native_programs_pass_under_sanitizers(
    target: str, sanitizer: str, isas: dict[str, None], tmp_path: Path
) -> None:
    options = [f"SANITIZE={sanitizer}", f"ALL={' '.join(isas)}", f"ISAS={BEST}", f"BUILD={tmp_path}"]
    done = subprocess.run(
        ["make", "-s", "-j2", "-C", str(SOURCES), target, *options],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        env={**os.environ, "MAKEFLAGS": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line for line in done.stdout.splitlines() if line.partition(": ")[2].startswith("passed")]
    assert len(passed) >= 4 * len(isas), done.stdout
