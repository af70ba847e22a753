"""Examples in docstrings are tests: each runs in a folder of its own, since some write checkpoints."""

from __future__ import annotations

import pytest

collect_ignore_glob = ["tests/*conftest.py"]  # no doctests there, and two files of one name cannot be collected


@pytest.fixture(autouse=True)
def _own_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(tmp_path_factory.mktemp("example"))
