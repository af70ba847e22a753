"""A script on fake GPUs, whatever has started it.

    SAMESTEP_FAKE_GPUS=2 torchrun --nproc-per-node 2 -m samestep.fake_gpus train.py --lr 0.1
    SAMESTEP_FAKE_GPUS=4 python -m samestep.fake_gpus -m package.train

Without the variable there is a GPU for each rank of the host.
"""

from __future__ import annotations

import sys

from samestep import fake_gpus
from samestep.errors import UsageError
from samestep.launch.rank.script import run_module, run_script
from samestep.rankenv import variable


def main(words: list[str]) -> None:
    is_module = words[:1] == ["-m"]
    program, *arguments = words[is_module:] or [""]
    if not program:
        raise UsageError("no script is given: `python -m samestep.fake_gpus train.py`, or `-m module`")
    fake_gpus.install(fake_gpus.requested() or int(variable("LOCAL_WORLD_SIZE") or 1))
    (run_module if is_module else run_script)(program, arguments)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        sys.exit(f"samestep.fake_gpus: {error}")
