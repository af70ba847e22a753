"""Functions of samestep that are patched by their path exist: one that was renamed would not be reported any more."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from pathlib import Path

import samestep
from samestep.instrument.samestep_calls import CALLS

SOURCES = Path(samestep.__file__).parent
PATCHES = re.compile(r'(?:on_import|patch)\(\s*"(samestep[\w.]+)"((?:,\s*"[\w.]+")*)')


def test_every_path_of_samestep_that_is_patched_leads_to_a_function() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py"))
    found = PATCHES.findall(text)
    assert len({path for path, _ in found}) >= 3
    for path, names in found:
        assert importlib.util.find_spec(path) is not None, path
        for name in re.findall(r'"([\w.]+)"', names):
            assert callable(functools.reduce(getattr, name.split("."), importlib.import_module(path)))


def test_every_call_that_is_reported_is_where_it_is_looked_for() -> None:
    for name, home in CALLS.items():
        assert callable(getattr(importlib.import_module(home), name))
