"""Devices as torch sees them: whether one is there, what is free on it, how it is best used, and errors that say so.

device = find_device("cuda:1")                     # UnsupportedError when there is none
ways = ways_of(device, torch.float32)              # what the engine does there
with memory_errors("cuda:1", "the weights", 10**9):
    ...                                            # DoesNotFitError names what, its bytes, and what is free
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from starscope import machine
from starscope.errors import DoesNotFitError, UnsupportedError


@dataclass(frozen=True)
class Ways:
    """How an engine uses its device."""

    stored: bool = False  # matrices stay in the file's own number of bits, where the format is one of `LAYOUTS`
    triton: bool = False  # products with these by Triton's kernels
    static: bool = False  # keys and values have all of the context from the start, and never move
    recorded: bool = False  # decoding steps run over fixed shapes; on CUDA they become graphs

    def notes(self, device: str) -> list[str]:
        """What is slower than it could be there, a line each."""
        if self.stored and not self.triton and not device.startswith("cpu"):
            return [f"quantized weights are decoded by torch on {device}: Triton, which is faster, is not there."]
        return []


def ways_of(device: torch.device, dtype: torch.dtype) -> Ways:
    """What pays on a device. Other types than float32 are for gradients, whose weights are parameters."""
    if device.type == "cpu":
        return Ways()
    ways = Ways(stored=dtype == torch.float32, static=True)
    is_there = device.type == "cuda" and torch.cuda.is_available()  # ROCm goes by that name too
    has_triton = is_there and importlib.util.find_spec("triton") is not None
    return replace(ways, triton=ways.stored and has_triton, recorded=is_there)


def holds(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device computes with a type: bfloat16 is missing on some."""
    try:
        torch.zeros(1, dtype=dtype, device=device).float()
    except (RuntimeError, TypeError):
        return False
    return True


def find_device(name: str) -> torch.device:
    """A torch device that is there and works; UnsupportedError says what was found otherwise."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UnsupportedError(
            f"device {name!r} cannot be used: {_first_sentence(error)}.", hint=f"There are: {', '.join(all_devices())}."
        ) from None
    return device


def all_devices() -> list[str]:
    """The devices that torch has here, by name, the CPU first."""
    return [
        "cpu",
        *(f"cuda:{i}" for i in range(torch.cuda.device_count())),
        *(["mps"] if torch.backends.mps.is_available() else []),
    ]


def free_bytes(device: torch.device) -> tuple[int, int] | None:
    """Free and in all, as the driver says, without what torch holds ready; None where nobody says."""
    if device.type == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(device)
        ready = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + ready, total
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return max(0, total - torch.mps.driver_allocated_memory()), total
    if device.type == "cpu":
        free, total = machine.free_memory(), machine.memory()["total"] or machine.UNKNOWN_MEMORY
        return None if free >= machine.UNKNOWN_MEMORY else (free, total)
    return None


def allocated_bytes(device: torch.device) -> int | None:
    """What tensors take there, by the allocator's own figure; None where it keeps none."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    return None


@dataclass
class Asked:
    """What memory is asked for: said in an error. `needed` bytes, where they are known."""

    what: str = ""
    needed: int | None = None


@contextmanager
def memory_errors(device: str, what: str = "", needed: int | None = None) -> Iterator[Asked]:
    """Turn torch's ways of saying that memory ran out into DoesNotFitError, and let the allocator give back the rest.

    What is asked for may be said, and changed on the way, in what this gives.
    """
    asked = Asked(what, needed)
    try:
        yield asked
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        place = torch.device(device)
        if place.type == "cuda" and torch.cuda.is_available():
            torch.cuda.empty_cache()
        elif place.type == "mps":
            torch.mps.empty_cache()
        raise _does_not_fit(device, asked, error) from None


SAYS_SO = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")
"""In errors of drivers, of the CPU's allocators, of libraries of kernels that keep memory of their own."""


def _is_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in SAYS_SO)


def _does_not_fit(device: str, asked: Asked, error: Exception) -> DoesNotFitError:
    found = free_bytes(torch.device(device))
    needed = f" ({asked.needed:,} bytes)" if asked.needed is not None else ""
    what = f" for {asked.what}{needed}" if asked.what else ""
    free = f"; {found[0]:,} of {found[1]:,} bytes are free there" if found else ""
    reason = str(error).splitlines()[0].partition(" GPU ")[0].rstrip(". ")
    return DoesNotFitError(
        f"there is not enough memory on {device}{what}{free}. torch says: {reason}.",
        hint="Use a smaller model, a shorter context (--ctx), or fewer layers on the GPU (-ngl).",
    )


def _first_sentence(error: Exception) -> str:
    """What torch says, without the list of every device it has heard of."""
    text = str(error).splitlines()[0]
    return "torch knows no such device" if text.startswith("Expected one of") else text.partition(". ")[0].rstrip(".")
