"""The tests cannot reach a network, neither themselves nor in the Python processes that they start."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

ELSEWHERE = ("192.0.2.1", 80)  # an address reserved for documentation


@pytest.mark.parametrize(
    "ask",
    [
        lambda: socket.create_connection(ELSEWHERE, timeout=5),
        lambda: socket.getaddrinfo("model.example", 443),
        lambda: socket.gethostbyname("model.example"),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ELSEWHERE),
        lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM).connect(("2001:db8::1", 80)),
    ],
    ids=["connect", "getaddrinfo", "gethostbyname", "sendto", "ipv6"],
)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_another_machine_is_refused(ask):
    with pytest.raises(OSError, match="the tests have no network"):
        ask()


def test_another_machine_is_refused_in_a_child_process():
    code = f"import socket; socket.create_connection({ELSEWHERE!r}, timeout=5)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the tests have no network" in done.stderr


def test_loopback_works():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(("localhost", server.getsockname()[1]), timeout=5)
        accepted, _ = server.accept()
        with client, accepted:
            accepted.sendall(b"here")
            assert client.recv(4) == b"here"
