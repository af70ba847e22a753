"""What a plan sets: a small file that `samestep plan --apply` writes and `samestep run --settings` takes.

    # train.py on 16 ranks: 42.1 ms a step predicted
    processes = 8        # on each host, where -n does not say
    buckets = 12.5       # MiB, where the script says nothing: replicate(model, world) without buckets=

Nothing in it changes the training. What would (another batch, compressed gradients), or takes other lines in the script
(a pipeline), the plan says in words.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from samestep.errors import UsageError

__all__: list[str] = []

BUCKETS = "SAMESTEP_BUCKETS"  # the variable that every rank gets


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is to be started with.

    Attributes:
        processes: on each host; None leaves it to the run.
        buckets: MiB of a gradient bucket; None leaves it to the script.
    """

    processes: int | None = None
    buckets: float | None = None

    @property
    def variables(self) -> dict[str, str]:
        """What every rank's environment has of them."""
        return {} if self.buckets is None else {BUCKETS: f"{self.buckets:g}"}

    def dumps(self, title: str = "") -> str:
        """Returns the file's text.

        >>> print(Settings(processes=8, buckets=12.5).dumps("train.py on 16 ranks"), end="")
        # train.py on 16 ranks
        processes = 8
        buckets = 12.5
        """
        lines = [f"# {line}" for line in title.splitlines()]
        lines += [f"{name} = {value:g}" for name, value in vars(self).items() if value is not None]
        return "\n".join([*lines, ""])


def load(path: Path) -> Settings:
    """Returns the settings of a file.

    Raises:
        UsageError: it is missing or no TOML, has a key that is unknown, or a value that cannot be.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--settings {path}: no such file: `samestep plan … --apply {path}` makes it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--settings {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--settings {path} is not valid TOML: {str(error).lower()}") from None
    except (RecursionError, ValueError):  # Python's own limits: of lists in lists, and of digits
        raise UsageError(f"--settings {path}: its numbers are too long, or its lists too deep") from None
    for key, value in given.items():
        _check(path, key, value)
    return Settings(**given)


_MOST = sys.float_info.max  # beyond it a whole number is none of a float


def _check(path: Path, key: str, value: Any) -> None:
    known = [one.name for one in fields(Settings)]
    if key not in known:
        close = get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        raise UsageError(f"--settings {path}: {key} is unknown: {hint}")
    whole = key == "processes"
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < _MOST:
        kind = "whole number" if whole else "number"
        raise UsageError(f"--settings {path}: {key} is {value!r}: give a {kind} above 0")
