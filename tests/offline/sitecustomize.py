"""Refuses every connection that does not stay on this machine.

conftest.py runs this file in the test process and puts its folder on PYTHONPATH; Python imports `sitecustomize` by
itself when it starts, so every Python that a test starts is under the same rule.
"""

import errno
import ipaddress
import sys

ADDRESS_EVENTS = ("socket.connect", "socket.sendto", "socket.sendmsg")  # arguments: the socket, the address
NAME_EVENTS = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")  # arguments: the host, ...


def is_local(host):
    if not isinstance(host, (str, bytes)):
        return True  # None: the wildcard address; an integer: not an internet address
    text = host.decode("ascii", "replace") if isinstance(host, bytes) else host
    if text in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False


def refuse_the_network(event, arguments):
    if event in ADDRESS_EVENTS:
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) and address else None  # else a Unix socket's path
    elif event in NAME_EVENTS:
        host = arguments[0]
    else:
        return
    if not is_local(host):
        raise OSError(errno.ENETUNREACH, f"the tests have no network, and this asks for {host!r}")


sys.addaudithook(refuse_the_network)
