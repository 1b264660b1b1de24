"""What holds for every test: no network, reproducible properties, one thread a process."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path

from hypothesis import settings

OFFLINE = Path(__file__).parent / "offline"

runpy.run_path(str(OFFLINE / "sitecustomize.py"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OFFLINE), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; Triton looks when they are imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # pytest-xdist has the cores busy
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A job that a shell starts in the background begins with Ctrl-C ignored, one under nohup with SIGHUP, and so would its
# children; what has a handler here begins with the default there.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda _signal, _frame: None)

settings.register_profile("starscope", deadline=None, database=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("starscope")


def pytest_report_header() -> str:
    """Which starscope is under test."""
    import starscope
    from starscope import native

    kernels = native.kernels()
    engine = f"native module: {kernels.isa()}" if kernels else f"no native module ({native.why_missing()})"
    return f"starscope {starscope.__version__} from {Path(starscope.__file__).parent}, {engine}"
