"""Devices as a command line names them: `cuda:24GiB,cuda:1:8GB` is a device and its free memory, thrice over.

The last part after a colon is a number of bytes where it ends with a unit; a bare number is a device's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from starscope.errors import UsageError
from starscope.placement.plan import Device

UNITS: Mapping[str, int] = MappingProxyType(
    {
        "b": 1,
        **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
        **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
    }
)
ONE = re.compile(
    r"(?P<kind>[a-z]+)(?::(?P<index>[0-9]{1,3}))?(?::(?P<count>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[kmgt]?i?b))?", re.I
)
MOST = 1 << 60
"""More bytes than any device has."""


def parse_devices(text: str) -> list[Device]:
    """`cuda:24GiB,cuda:1:8GB` -> devices with free bytes. UsageError for anything else, and for one named twice."""
    made: list[Device] = []
    for part in text.split(","):
        found = ONE.fullmatch(part.strip())
        if found is None or (found["unit"] and found["unit"].lower() not in UNITS):
            raise UsageError(
                f"{part.strip()!r} is not a device; expected one like cuda:24GiB, cuda:1:8GB or mps:16GiB."
            )
        kind = found["kind"].lower()
        if kind == "cpu":
            raise UsageError("cpu cannot be listed: it is always present and takes whatever no other device does.")
        name = kind + (f":{int(found['index'])}" if found["index"] else "")
        free = float(found["count"]) * UNITS[found["unit"].lower()] if found["unit"] else None
        if free is not None and free > MOST:
            raise UsageError(f"{name} is given more than {MOST >> 40} TiB of free memory; expected at most that.")
        if any(_same(device.name, name) for device in made):
            raise UsageError(f"{name} is named twice; expected each device once.")
        made.append(Device(name, None if free is None else int(free)))
    return made


def _same(one: str, other: str) -> bool:
    """Whether two names are of one device: the first of a kind goes by the kind alone too."""
    return one.removesuffix(":0") == other.removesuffix(":0")
