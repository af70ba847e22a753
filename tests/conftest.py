"""Real ranks for every test: processes start at a set's first use and stay until the session ends."""

from __future__ import annotations

import pytest

from samestep.testing import ranks


@pytest.fixture(scope="session")
def two_ranks():
    with ranks(2) as run:
        yield run


@pytest.fixture(scope="session")
def three_ranks():
    with ranks(3) as run:
        yield run


@pytest.fixture(scope="session")
def four_ranks():
    with ranks(4) as run:
        yield run
