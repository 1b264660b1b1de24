"""Large blocks of memory straight from the system, so that what is freed is really free.

With recomputed activations, large tensors come and go between small ones that stay. glibc keeps what was freed on its
heap, in holes that the next tensor does not fit into: a process of 0.56 GB then takes 0.89. Where blocks from a fixed
size on are mapped one by one, each goes back to the system when it is freed; every new page then costs a page fault.
"""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD = -3  # mallopt's number for it
LARGE = 1 << 18  # bytes


def map_large_blocks() -> bool:
    """From now on, for the whole process. False where the C library has no such setting: then nothing changes."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGE))
