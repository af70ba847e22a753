"""A test for pytest: training on two processes is the training of one.

pytest examples/ci/test_training.py
"""

from pathlib import Path

import samestep

SCRIPT = Path(__file__).parents[1] / "torchrun_style.py"  # write your script's path here


def test_two_processes_train_as_one():
    """The report of `samestep verify` is the error's text."""
    samestep.verify(SCRIPT, ranks=2).require_same()
