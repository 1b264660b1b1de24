"""Runs a command where no network exists but loopback: `offline.py COMMAND [ARGUMENT...]`.

A network namespace of its own, which root may always make and an ordinary user on most Linux systems (inside a user
namespace, where it stays who it was). Where none can be made the command runs all the same, after a line saying so: the
tests refuse connections by themselves, too.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def enter_namespace() -> None:
    """Moves this process into a namespace with nothing but loopback, or raises OSError."""
    user, group = os.getuid(), os.getgid()
    unshare(CLONE_NEWNET if user == 0 else CLONE_NEWNET | CLONE_NEWUSER)
    if user != 0:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{user} {user} 1")
        write("/proc/self/gid_map", f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def unshare(flags: int) -> None:
    """The system call."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "unshare"):
        raise OSError("this system has no namespaces")
    if library.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare: " + os.strerror(ctypes.get_errno()))


def write(path: str, text: str) -> None:
    """Writes to a file of /proc."""
    with open(path, "w") as file:
        file.write(text)


def works() -> bool:
    """Whether a child gets into a namespace; a try that fails half-way would spoil this process."""
    child = os.fork()
    if child == 0:
        try:
            enter_namespace()
        except OSError as error:
            print(
                f"starscope: no network namespace ({error}); connections are refused by the tests alone.",
                file=sys.stderr,
            )
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: offline.py COMMAND [ARGUMENT...]")
    if works():
        enter_namespace()
    os.execvp(sys.argv[1], sys.argv[1:])
