"""Enters namespaces and runs a module, or a script: `python in_namespaces.py /run/netns/node1 samestep run train.py`.

The first argument is a list of files, separated by commas, of the network and the host name (/proc/PID/ns/uts).
It is a script, so that the fork server of the session can start it: what has imported torch need not do so on each
of several hosts.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from pathlib import Path


def enter(*namespaces: str) -> None:
    """Moves this process into namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    for path in namespaces:
        with Path(path).open() as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


if __name__ == "__main__":
    _, where, module, *arguments = sys.argv
    enter(*where.split(","))
    if not sys.flags.safe_path or sys.path[0] == str(Path(__file__).parent):
        del sys.path[0]  # of this script
    sys.argv[:] = [module, *arguments]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy._run_module_as_main(module)
