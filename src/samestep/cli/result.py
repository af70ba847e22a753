"""What a command has found, for programs: the file that `--json` names, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samestep.errors import UsageError

__all__: list[str] = []


def write_json(file: Path | None, told: Any, code: int = 0) -> int:
    """Writes it, if there is a file to write it to; returns the exit code, as :func:`write_text` does."""
    return code if file is None else write_text(file, f"{json.dumps(told, indent=2)}\n", code, option="--json")


def write_text(file: Path | None, text: str, code: int = 0, *, option: str) -> int:
    """Writes a file that an option names, if it names one; returns the exit code, `code`.

    Where it cannot be written after all, that is said, and a code of 0 becomes another: nobody shall take what an
    earlier command has left there for this one's.
    """
    if file is None:
        return code
    from samestep.files import write_atomic
    from samestep.launch.output.console import say

    try:
        write_atomic(file, [text])
    except UsageError as error:
        say(f"error: {option} {error}")
        return code or error.exit_code
    return code
