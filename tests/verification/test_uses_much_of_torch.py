"""What the recorder patches, wraps and hooks must not make a script fail."""

from __future__ import annotations

from pathlib import Path

import pytest

import samestep

SCRIPT = Path(__file__).with_name("uses_much_of_torch.py")


@pytest.mark.prove
def test_a_script_that_uses_much_of_torch_ends_well_under_verify() -> None:
    """Copies with a weight norm, and gradients by vmap, once failed there, and nowhere else."""
    report = samestep.verify(SCRIPT)
    assert report.inconclusive is None, str(report)  # "the script fails alone too"
    assert "crash" not in {one.code for one in report.errors}, str(report)
    assert report.steps > 50
