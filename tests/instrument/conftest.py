"""Every test finds torch as it is, and leaves it so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from samestep.instrument.callbacks import unsubscribe_all


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    unsubscribe_all()
