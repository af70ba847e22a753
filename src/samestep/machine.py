"""Names of this machine and of this process's namespaces; a host's name may be that of other machines too."""

from __future__ import annotations

import socket
from pathlib import Path


def machine() -> str:
    """Names the boot of this machine's kernel, whatever its hosts and containers are called; else this host's name."""
    try:
        return _boot()
    except OSError:
        return socket.gethostname()


def namespace(kind: str) -> str | None:
    """Names this boot of this kernel and this process's namespace of a kind, "net" or "pid"; None if unknown."""
    try:
        return f"{_boot()} {Path(f'/proc/self/ns/{kind}').readlink()}"
    except OSError:
        return None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
