"""A script that starts its ranks by itself, and is the one rank: it may wait for them in either way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from samestep.instrument import script_io
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


class Lines(Callbacks):
    """Keeps what is printed."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def on_print(self, text: Callable[[], str], where: str) -> None:
        self.lines.append((text(), where.rpartition(":")[0]))


def test_what_a_script_logs_is_printed() -> None:
    heard = Lines()
    subscribe(heard, script_io.prints)
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO)
    logger.info("accuracy %.3f", 0.5)
    logger.setLevel(logging.WARNING)
    logger.info("not shown")
    print("loss 0.25")
    told = [text for text, _ in heard.lines]
    assert told == ["accuracy 0.500", "loss 0.25"]
    assert len({where for _, where in heard.lines}) == 1


def test_where_nobody_runs_instead_all_is_handed_on() -> None:
    given: list[Any] = []
    subscribe(Callbacks())
    _start_processes(
        lambda *args, **kwargs: given.append((args, kwargs)), print, (1,), 2, False, True, start_method="fork"
    )
    assert given == [((print, (1,), 2, False, True), {"start_method": "fork"})]
