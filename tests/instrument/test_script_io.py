"""A script that starts its ranks by itself, and is the one rank: it may wait for them in either way."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.instrument.callbacks import Callbacks, subscribe
from samestep.instrument.script_io import _start_processes


class Instead(Callbacks):
    """Is the rank that would have been started."""

    def on_spawn(self, start: Any, arguments: Any, processes: int) -> bool:
        del processes
        start(0, *arguments)
        return True


@pytest.mark.parametrize("join", [True, False])
def test_what_ran_here_instead_has_ended_when_it_is_waited_for(join: bool) -> None:
    done: list[Any] = []
    subscribe(Instead())
    context = _start_processes(
        lambda *_, **__: pytest.fail("nobody is to be started"),
        lambda rank, what: done.append((rank, what)),
        ("x",),
        2,
        join=join,
    )
    assert done == [(0, "x")]
    assert (context is None) if join else context.join()


def test_where_nobody_runs_instead_all_is_handed_on() -> None:
    given: list[Any] = []
    subscribe(Callbacks())
    _start_processes(
        lambda *args, **kwargs: given.append((args, kwargs)), print, (1,), 2, False, True, start_method="fork"
    )
    assert given == [((print, (1,), 2, False, True), {"start_method": "fork"})]
