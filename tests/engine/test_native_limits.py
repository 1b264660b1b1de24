"""The native engine where the system gives it less than it asks for, and in a child of a busy process."""

from __future__ import annotations

import subprocess
import sys

import pytest

resource = pytest.importorskip("resource")

LIMITED = (
    "import resource, sys\n"
    "def limit(size):\n"
    "    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))\n"
    "def used():\n"
    "    return int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LIMITED + code], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the used addresses are read from /proc")
def test_threads_that_cannot_be_started_are_said_and_the_model_works_once_they_can() -> None:
    done = run(
        "import starscope\n"
        "from starscope.errors import DoesNotFitError\n"
        "model = starscope.load('demo', engine='native', threads=256)\n"
        "cache = model.engine.new_cache()\n"
        "limit(used() + (64 << 20))\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        model.engine.forward([[1, 2]], [cache])\n"
        "    except DoesNotFitError as error:\n"
        "        print(error.message.split(':')[0])\n"
        "limit(resource.RLIM_INFINITY)\n"
        "print(model.engine.forward([[1, 2]], [cache])[0].shape)\n"
    )
    assert done.stdout.splitlines() == ["256 threads cannot be started"] * 2 + ["(1, 2560)"], done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the used addresses are read from /proc")
def test_a_small_model_runs_where_addresses_are_scarce() -> None:
    done = run(
        "import numpy, starscope\n"
        "limit(used() + (500 << 20))\n"
        "print(starscope.load('demo', engine='native', threads=2).engine.forward([[1, 2]])[0].shape)\n"
    )
    assert done.stdout == "(1, 2560)\n", done.stderr


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="there is no fork")
def test_a_child_forked_during_a_step_computes_what_its_parent_does() -> None:
    done = run(
        "import os, signal, threading, starscope\n"
        "model = starscope.load('demo', engine='native', threads=2)\n"
        "ids = list(range(20, 220))\n"
        "expected = model.engine.forward([ids])[0].tobytes()\n"
        "stop = threading.Event()\n"
        "def busy():\n"
        "    while not stop.is_set():\n"
        "        model.engine.forward([ids])\n"
        "thread = threading.Thread(target=busy)\n"
        "thread.start()\n"
        "codes = []\n"
        "for _ in range(5):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        signal.alarm(20)\n"
        "        os._exit(0 if model.engine.forward([ids])[0].tobytes() == expected else 1)\n"
        "    codes.append(os.waitpid(child, 0)[1])\n"
        "stop.set()\n"
        "thread.join()\n"
        "print(codes)\n"
    )
    assert done.stdout == "[0, 0, 0, 0, 0]\n", done.stderr
