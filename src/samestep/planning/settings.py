"""What a plan sets: a small file that `samestep plan --apply` writes and `samestep run --settings` takes.

    # train.py on 16 ranks: 42.1 ms a step predicted
    processes = 8        # on each host, where -n does not say
    buckets = 12.5       # MiB, where the script says nothing: replicate(model, world) without buckets=

Nothing in it changes the training. What would (another batch, compressed gradients), or takes other lines in the script
(a pipeline), the plan says in words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from samestep import parsing
from samestep.errors import UsageError
from samestep.parsing import positive, read, whole

BUCKETS = "SAMESTEP_BUCKETS"  # the variable that every rank gets


@dataclass(frozen=True, kw_only=True)
class Settings:
    processes: int | None = field(metadata=read(whole(1)), default=None)  # on each host; None leaves it to the run
    # MiB of a gradient bucket; None leaves it to the script
    buckets: float | None = field(metadata=read(positive), default=None)

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
    text = parsing.read_text(path, f"`samestep plan … --apply {path}` makes it", name=f"--settings {path}")
    given = parsing.parse_toml(text, f"--settings {path}")
    try:
        return parsing.load(Settings, given, "", "the file")
    except UsageError as error:
        raise UsageError(f"--settings {path}: {error}") from None
