"""The modules of a process, remembered as they are made."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace

import pytest
from torch import nn

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


@pytest.mark.parametrize(("wraps", "names"), [(True, ["weight"]), (False, ["model 1: online.weight"])])
def test_a_wrapped_model_is_not_named_by_what_holds_it_beside_the_wrapper(
    monkeypatch: pytest.MonkeyPatch, *, wraps: bool, names: list[str]
) -> None:
    """An average that one rank alone keeps holds the model that it follows."""
    model = nn.Linear(2, 1, bias=False)
    average, other = nn.ModuleDict({"online": model}), nn.Sequential()
    wrapper = type("DistributedDataParallel" if wraps else "Wrapper", (nn.ModuleDict,), {})({"module": model})
    monkeypatch.setattr(modules, "roots", lambda: [average, wrapper, other])
    found = modules.held_by(model.parameters())
    assert [name for theirs in found.values() for name in theirs] == names
