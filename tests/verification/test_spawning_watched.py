"""A script that starts its ranks by itself, and is the one rank: it may wait for them in either way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from samestep.verification.watching.listener import Callbacks
from samestep.verification.watching.spawning import _watch


class Instead(Callbacks):
    """Is the rank that would have been started."""

    def spawning(self, start: Any, arguments: Any, processes: int) -> bool:
        del processes
        start(0, *arguments)
        return True


@pytest.mark.parametrize("join", [True, False])
def test_what_ran_here_instead_has_ended_when_it_is_waited_for(join: bool) -> None:
    module, done = SimpleNamespace(start_processes=None), []
    module.start_processes = lambda *_, **__: pytest.fail("nobody is to be started")
    _watch(Instead(), module)
    context = module.start_processes(lambda rank, what: done.append((rank, what)), ("x",), 2, join=join)
    assert done == [(0, "x")]
    assert (context is None) if join else context.join()


def test_where_nobody_runs_instead_all_is_handed_on() -> None:
    given: list[Any] = []
    module = SimpleNamespace(start_processes=lambda *args, **kwargs: given.append((args, kwargs)))
    _watch(Callbacks(), module)
    module.start_processes(print, (1,), 2, False, True, start_method="fork")
    assert given == [((print, (1,), 2, False, True), {"start_method": "fork"})]
