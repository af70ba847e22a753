"""The modules of a process, remembered as they are made."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace

import pytest

from samestep.verification.recording import modules


class Module:
    def __init__(self, name: str) -> None:
        self.name = name
        self._modules: dict[str, Module] = {}


class Layer(Module):
    pass


def test_modules_are_remembered_in_their_order_until_they_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "_made", [])
    monkeypatch.setattr(Module, "__new__", Module.__new__)
    assert modules.alive() is None
    before = Layer("before")
    modules.remember(SimpleNamespace(Module=Module))
    first, second = Layer("first"), Module("second")
    copied = copy.deepcopy(first)
    unfinished = Module.__new__(Module)
    assert modules.alive() == [first, second, copied]
    del first
    gc.collect()
    assert modules.alive() == [second, copied]
    assert (before.name, unfinished.__dict__) == ("before", {})
