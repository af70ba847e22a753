"""A fixture of pytest: `pytest_plugins = ["samestep.fake_gpus.fixtures"]` in a conftest.py.

@pytest.mark.parametrize("fake_gpus", [4], indirect=True)      # two without it
def test_it(fake_gpus):
    assert torch.cuda.device_count() == fake_gpus
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from samestep.fake_gpus import made


@pytest.fixture
def fake_gpus(request: pytest.FixtureRequest) -> Iterator[int]:
    """Makes fake GPUs for one test, two or as many as its parameter says; gives their number."""
    gpus = int(getattr(request, "param", 2))
    with made(gpus):
        yield gpus
