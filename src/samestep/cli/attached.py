"""A command that ends with whoever has started it: `python -m samestep.cli.attached PID run …`.

What verify starts outlives it otherwise, if it is killed.
"""

from __future__ import annotations

import sys

from samestep.cli import main
from samestep.launch.process import die_with_parent

__all__: list[str] = []

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
