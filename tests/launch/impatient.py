"""`samestep` with shorter waits: says soon for whom it waits, and holds a silent host to be lost soon."""

import sys

from samestep.cli import main
from samestep.launch import controller
from samestep.launch.hosts import foreground_agent, join

join.SAY_AFTER_S = foreground_agent.SAY_AFTER_S = 0.5
controller.HEARTBEAT_TIMEOUT_S = 5.0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
