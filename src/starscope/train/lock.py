"""One run in one folder at a time: two would take each other's half-written files for their own.

with held(Path("out")):
    ...                                 # another process that asks for it is refused until the end of this one

The lock is the system's, on the folder itself: it leaves no file, and ends with its process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from starscope.errors import OutputError
from starscope.train.log import unwritable


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if it is not there, and goes again if nothing was put into it.

    OutputError while another run holds it, or when it cannot be made. Where a file system has no locks, nothing is
    held.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"another run is at work in {folder}.", hint="Wait for its end, or take another folder."
            ) from None
        except OSError:  # no locks there
            pass
        yield
    finally:
        os.close(descriptor)
        if made:
            with suppress(OSError):  # something is in it
                folder.rmdir()
