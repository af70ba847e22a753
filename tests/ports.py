"""Ports for what a test starts: below those that the kernel gives to connections, so that nobody else has one."""

from __future__ import annotations

import itertools
import os
import socket

__all__ = ["free_port"]

_FIRST, _END = 18000, 29000  # below 29500, torch's own, and 32768, where the kernel's begin
_tried = itertools.count(_FIRST + 97 * os.getpid() % (_END - _FIRST))  # test processes beside this begin elsewhere


def free_port() -> int:
    """Returns a port that no address of this machine has, and that this process was not given before."""
    for number in _tried:
        port = _FIRST + (number - _FIRST) % (_END - _FIRST)
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("", port))
            except OSError:
                continue
        return port
    raise AssertionError("unreachable: the count has no end")
