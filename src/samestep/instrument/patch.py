"""Replaces functions of torch and Python, with undo, and finds the line of the script that calls them.

Code that torch.compile traces calls the original: a replacement would end its graph. The original is `__wrapped__` of
what stands in its place.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from types import FrameType, ModuleType
from typing import Any

from samestep.launch.rank.import_hooks import Act, replace_function, when_imported
from samestep.launch.rank.user_code import is_user_file, relative_path

Install = Callable[[], None]


class Patches:
    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def on_undo(self, act: Callable[[], object]) -> None:
        self._undo.append(act)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replaces `owner.name`, which the owner may inherit or not have."""
        held = vars(owner)
        self.on_undo(partial(setattr, owner, name, held[name]) if name in held else partial(delattr, owner, name))
        setattr(owner, name, value)

    def exchange(self, package: str, functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        """Replaces functions in all modules of a package that have them, under whatever name."""
        replace_function(package, functions)
        self.on_undo(partial(replace_function, package, {new: old for old, new in functions.items()}))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


_patches = Patches()  # those of all groups
on_undo, exchange = _patches.on_undo, _patches.exchange
_installed: set[Install] = set()
_users: dict[str, bool] = {}  # by file name: whether it is the user's own


class Group:
    """Patches that are installed together, each as soon as its module has been imported, behind the groups `needed`."""

    def __init__(self, *needed: Group) -> None:
        self._needed = needed
        self._acts: dict[str, list[Act]] = {}

    def __call__(self) -> None:
        install(*self._needed)
        for module, acts in self._acts.items():
            on_import(module, partial(_call_each, acts))

    def on_import(self, module: str) -> Callable[[Act], Act]:
        """Returns a decorator of a function that patches a module by itself."""

        def add(act: Act) -> Act:
            self._acts.setdefault(module, []).append(act)
            return act

        return add

    def patch(
        self, module: str, *names: str, compiled: bool = False, package: str | None = None
    ) -> Callable[[Any], Any]:
        """Returns a decorator that replaces "function" or "Class.method" of a module, as :func:`patch` does."""

        def add(replacement: Callable[..., Any]) -> Any:
            def act(home: ModuleType) -> None:
                for owner, _, name in (each.rpartition(".") for each in names):
                    of = attrgetter(owner)(home) if owner else home
                    patch(of, name, compiled=compiled, package=package)(replacement)

            self.on_import(module)(act)
            return replacement

        return add


def _call_each(acts: list[Act], module: ModuleType) -> None:
    for act in acts:
        act(module)


def install(*groups: Install) -> None:
    for group in groups:
        if group not in _installed:
            _installed.add(group)
            group()


def uninstall() -> None:
    """Takes all patches back, and those that wait for a module to be imported."""
    _patches.undo()
    _installed.clear()


def on_import(name: str, act: Act) -> None:
    on_undo(when_imported(name, act))


def patch(owner: Any, name: str, *, compiled: bool = False, package: str | None = None) -> Callable[[Any], Any]:
    """Returns a decorator that puts a function in the place of `owner.name`, which it gets as its first argument.

    The owner is a class or a module. `compiled` replaces it in code that torch.compile traces, too; `package` in all
    modules of this package that have imported it.
    """

    def replace(replacement: Callable[..., Any]) -> Any:
        original = getattr(owner, name)
        replaced = wrap(original, replacement, getattr(owner, "__module__", owner.__name__), compiled=compiled)
        _patches.set(owner, name, replaced)
        if package is not None:
            exchange(package, {original: replaced})
        return replaced

    return replace


def wrap(
    original: Callable[..., Any], replacement: Callable[..., Any], module: str, *, compiled: bool = False
) -> Callable[..., Any]:
    """Returns what looks like `original`, a function of the module, and calls `replacement(original, …)`."""
    is_unreported = is_traced if module.startswith("torch") else _may_be_compiling

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if not compiled and is_unreported():
            return original(*args, **kwargs)
        return replacement(original, *args, **kwargs)

    return patched


def is_traced() -> bool:
    """Returns whether torch compiles the code at hand, or torch.func transforms it: its tensors have no values then."""
    import torch  # is there: its functions have called us

    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001


def _may_be_compiling() -> bool:
    compiler = getattr(sys.modules.get("torch"), "compiler", None)  # a script may print before torch is there whole
    return compiler is not None and bool(compiler.is_compiling())


def caller() -> FrameType:
    frame = sys._getframe(1)  # noqa: SLF001  (documented; the name only looks private)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("samestep.instrument"):
        frame = frame.f_back
    return frame


def user_line() -> str:
    """Returns "file:line" of the script's own line that calls a patched function."""
    return call_site(caller())


def call_site(frame: FrameType | None) -> str:
    """Returns "file:line" of the innermost frame that is the user's own, from `frame` outwards, or of `frame`."""
    found = own_frame(frame) or frame
    return "" if found is None else f"{relative_path(found.f_code.co_filename)}:{found.f_lineno}"


def own_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame that is the user's own, from `frame` outwards; None where none is."""
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_own(filename: str) -> bool:
    """Returns whether a file is the user's own; remembered, since it is asked at every call."""
    if filename not in _users:
        _users[filename] = is_user_file(filename)
    return _users[filename]
