"""Calls something as soon as a module has been imported, and not before.

torch must not be imported for such a call: a script may set what torch reads at its import, or never import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader  # which takes 15 ms to import, for two methods that are written here

Act = Callable[[ModuleType], None]


def when_imported(name: str, act: Act) -> Callable[[], None]:
    """Calls `act(module)` once: now if the module is there, else when it has been imported.

    Returns what cancels that.
    """
    finder = _Finder(name, act)
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, finder)
    return lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None


def replace_function(package: str, changed: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Puts other functions in the place of a package's own, wherever its modules have those, under any name.

    What has been imported before has taken by `from package import function` what was there then.
    """
    others = {id(own): other for own, other in changed.items()}
    for module in [each for name, each in sys.modules.items() if name == package or name.startswith(f"{package}.")]:
        names = vars(module)
        if others.keys().isdisjoint(map(id, names.values())):  # of nearly all modules, and five times as fast
            continue
        for name, value in list(names.items()):
            if id(value) in others:
                setattr(module, name, others[id(value)])


class _Finder:
    """Finds one module as the others would, and puts a loader around theirs. Several may wait for one module."""

    def __init__(self, name: str, act: Act) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  (python's own finders are asked, which work both out)
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)  # it may be there another time
            return spec
        spec.loader = cast("Loader", _Loader(spec.loader, self._act))
        return spec


class _Loader:
    def __init__(self, loader: Loader, act: Act) -> None:
        self._loader = loader
        self._act = act

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)  # get_data, get_source, … of the module's own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._act(module)
