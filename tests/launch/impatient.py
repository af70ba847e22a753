"""`samestep` with shorter waits: says soon for whom it waits, and holds a silent host to be lost soon."""

import sys

from samestep.cli import main
from samestep.launch import following, gather, head

gather.SOON = following.SOON = 0.5
head.SILENCE = 5.0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
