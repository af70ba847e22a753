"""The outcome of `samestep run --check`, read from the run directory when the run is over. No torch here.

findings.jsonl    a finding a line, as `verify --json` has them
checked.json      {"ranks": 2, "steps": 512}; absent where no rank came to its end
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samestep.verification.findings import PROPERTIES, unchecked

FINDINGS, CHECKED = "findings.jsonl", "checked.json"
NOT_CHECKED = (
    "buffers, evaluations, checkpoints, and whether one process takes the same steps: `samestep verify` checks these"
)
_ONLY = unchecked("--check compares the ranks with each other, and none with one process")


def online_outcome(folder: Path, ranks: int) -> dict[str, Any]:
    """Returns what `--json` says of a checked run: the keys of `verify --json`.

    The verdict is "different" where an error was found, else "inconclusive": that ranks agree proves nothing yet.
    """
    findings = [json.loads(line) for line in _lines(folder / FINDINGS)]
    counts = next((json.loads(line) for line in _lines(folder / CHECKED)), {"steps": 0})
    bad = any(finding["severity"] == "error" for finding in findings)
    return {
        "verdict": "different" if bad else "inconclusive",
        "ranks": ranks,
        "steps": counts["steps"],
        "findings": findings,
        "coverage": dict.fromkeys(PROPERTIES, _ONLY),
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
