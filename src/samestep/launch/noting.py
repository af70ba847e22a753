"""Notes in a rank's progress record what its script does: optimizer steps, and the collectives it stands in.

Nothing has to be changed in the script: torch's own functions tell, from the moment they are imported. Ranks that the
script starts by itself, with multiprocessing or torch.multiprocessing, are recognised when they initialise their
process group; until then nothing is noted of them.

    the script              dist.all_reduce(x)          train.py:12
    the record              entered 4, left 3           "all_reduce", "train.py:12"

torch.distributed logs such calls only for itself (c10d_logger), and its flight recorder knows NCCL's alone.

And one thing is fixed on the way. A DistributedDataParallel that goes after `destroy_process_group()` is the last
owner of its group, which then ends gloo's threads with Python's lock in its hands, while one of them waits for that
lock to release a tensor: a rank that has done all its work never ends. So groups outlive their models here, until the
process does (torch 2.13; a loop that makes, uses and destroys groups hangs in its third round, under torchrun too).
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, ParamSpec, TypeVar

from samestep import progress
from samestep.launch import clocks
from samestep.launch.failure import is_user_file, relative_path
from samestep.launch.imports import replace_function, when_imported

__all__: list[str] = []

# isend and irecv are compared by identity (torch.distributed.P2POp), and return at once.
TRACED_CALLS = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "new_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_users: dict[str, bool] = {}  # by file name: whether it is the user's own
_kept: set[int] = set()  # process groups that are never destroyed
_inside = threading.local()  # a collective may be made of others; the outermost is the script's


def begin(joined: Callable[[int, int], None] | None = None) -> None:
    """Notes from now on.

    Args:
        joined: called with rank and size each time a default process group has been initialised.
    """
    when_imported("torch.distributed", functools.partial(_note_collectives, joined))
    when_imported("torch.optim.optimizer", _note_steps)
    when_imported("torch.nn.parallel.distributed", _keep_groups)
    clocks.begin()


def _keep_groups(module: ModuleType) -> None:
    wrapper = module.DistributedDataParallel
    original = wrapper.__init__

    @functools.wraps(original)
    def __init__(model: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(model, *args, **kwargs)
        clocks.watch_gradients(model)
        if id(model.process_group) not in _kept:
            _kept.add(id(model.process_group))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(model.process_group))  # for good: not even at the end it goes

    wrapper.__init__ = __init__


def _note_steps(module: ModuleType) -> None:
    module.register_optimizer_step_pre_hook(_begin_step)
    module.register_optimizer_step_post_hook(_count_step)


def _begin_step(*_: Any) -> None:
    if not _is_compiling():
        progress.set_phase("optimizer")


def _count_step(*_: Any) -> None:
    if not _is_compiling():  # a compiled optimizer's steps are not counted, and stay one graph
        progress.set_phase("train")
        progress.count_step()


def _note_collectives(joined: Callable[[int, int], None] | None, module: ModuleType) -> None:
    if not module.is_available():
        return
    calls = {getattr(module, name): name for name in TRACED_CALLS if hasattr(module, name)}
    changed = {call: noted(call, name) for call, name in calls.items()}
    changed[module.init_process_group] = _initialising(module, joined)
    replace_function("torch.distributed", changed)


def _initialising(module: ModuleType, joined: Callable[[int, int], None] | None) -> Callable[..., None]:
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        noted(original, "init_process_group")(*args, **kwargs)
        if joined is not None:
            joined(module.get_rank(), module.get_world_size())

    return init_process_group


def noted(call: Callable[Arguments, Result], name: str) -> Callable[Arguments, Result]:
    """Returns `call`, noted in this process's progress record for as long as it lasts."""

    @functools.wraps(call)
    def noting(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if getattr(_inside, "collective", False) or _is_compiling():
            return call(*args, **kwargs)
        _inside.collective = True
        caller = sys._getframe(1)  # noqa: SLF001  (documented; the name only looks private)
        progress.enter_collective(name, call_site(caller), direct=is_own(caller.f_code.co_filename))
        try:
            return call(*args, **kwargs)
        finally:
            progress.exit_collective()
            _inside.collective = False

    return noting


def _is_compiling() -> bool:
    import torch  # is there: its functions have called us

    return torch.compiler.is_compiling()


def call_site(frame: FrameType | None) -> str:
    """Returns "file:line" of the innermost frame that is the user's own, from `frame` outwards, or of `frame`."""
    own = frame
    while own is not None and not is_own(own.f_code.co_filename):
        own = own.f_back
    standing = own or frame
    return "" if standing is None else f"{relative_path(standing.f_code.co_filename)}:{standing.f_lineno}"


def is_own(filename: str) -> bool:
    """Returns whether a file is the user's own; remembered, since it is asked at every call."""
    if filename not in _users:
        _users[filename] = is_user_file(filename)
    return _users[filename]
