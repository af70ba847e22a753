"""The modules of a process, remembered as they are made."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace

import pytest

from samestep.verification.recording import naming as modules


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
    of_object = first.__new__(Layer)  # as torch copies a parametrized module
    assert type(of_object) is Layer
    assert modules.alive() == [first, second, copied]
    del first
    gc.collect()
    assert modules.alive() == [second, copied]
    assert (before.name, unfinished.__dict__) == ("before", {})


def test_the_lines_that_make_a_module_and_its_model_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        pass

    monkeypatch.setattr(modules, "_made", [])
    modules.remember(SimpleNamespace(Module=Base))

    class Model(Base):
        def __init__(self) -> None:
            self.layers = [Base() for _ in range(2)]

    def build() -> Model:
        return Model()

    model = build()
    numbers = [[int(line.rpartition(":")[2]) for line in lines] for lines in modules.lines().values()]
    first = build.__code__.co_firstlineno
    assert numbers == [[first + 1] * 2, [first - 2, first + 1], [first - 2, first + 1]]
    assert list(modules.lines()) == [id(one) for one in (model, *model.layers)]
