"""`python -m samestep` is the command `samestep`."""

from __future__ import annotations

import sys

from samestep.cli import main

if __name__ == "__main__":
    sys.exit(main())
