"""Numbers with units, as people write them in files: "5 us", "100 Gbit/s", "80 GB".

time         ns us µs ms s                     a plain number is seconds
bytes        B kB MB GB TB, KiB MiB GiB TiB    a plain number is bytes
bandwidth    bytes/s of these, bit/s kbit/s Mbit/s Gbit/s Tbit/s; a plain number is bytes a second
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from samestep.errors import UsageError

__all__: list[str] = []

TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
BYTES = {
    **{f"{prefix}B": 1e3**power for power, prefix in enumerate(("", "k", "M", "G", "T"))},
    **{f"{prefix}iB": 1024.0**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)},
}
RATES = {
    **{f"{unit}/s": factor for unit, factor in BYTES.items()},
    **{f"{prefix}bit/s": 1e3**power / 8 for power, prefix in enumerate(("", "k", "M", "G", "T"))},
}
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S*)\s*")


def read_seconds(value: Any, name: str) -> float:
    """Returns a time of 0 or more, in seconds.

    >>> read_seconds("5 us", "latency"), read_seconds(0.001, "latency")
    (5e-06, 0.001)
    """
    return _read(value, TIMES, name, 'a time such as "5 us"', least=0.0)


def read_bytes(value: Any, name: str) -> float:
    """Returns a number of bytes above 0.

    >>> read_bytes("80 GB", "memory"), read_bytes("1 KiB", "memory")
    (80000000000.0, 1024.0)
    """
    return _read(value, BYTES, name, 'bytes such as "80 GB"')


def read_bandwidth(value: Any, name: str) -> float:
    """Returns bytes a second above 0.

    >>> read_bandwidth("100 Gbit/s", "bandwidth"), read_bandwidth("2 GB/s", "bandwidth")
    (12500000000.0, 2000000000.0)
    """
    return _read(value, RATES, name, 'a bandwidth such as "10 Gbit/s"')


def _read(value: Any, units: Mapping[str, float], name: str, such: str, least: float | None = None) -> float:
    if isinstance(value, str):
        found = _NUMBER.fullmatch(value)
        if found is None:
            raise UsageError(f"{name} is {value!r}: give {such}")
        number = float(found[1]) * _factor(found[2], units, f"{name} is {value!r}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    else:
        raise UsageError(f"{name} is {value!r}: give {such}")
    if not number < math.inf or not (number > 0 or number == least):
        raise UsageError(f"{name} is {value!r}: give {such}, {'0 or more' if least == 0 else 'above 0'}")
    return float(f"{number:.12g}")


def _factor(unit: str, units: Mapping[str, float], said: str) -> float:
    if not unit:
        return 1.0
    if unit not in units:
        close = get_close_matches(unit, units, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(units)}"
        raise UsageError(f"{said}, and the unit {unit} is unknown: {hint}")
    return units[unit]
