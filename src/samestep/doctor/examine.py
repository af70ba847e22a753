"""One machine, looked at from all sides at once: what waits for a disk or for torch does not hold up the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from samestep.doctor import disk, gpus, machine, names, pairs, routes, software, trial, variables
from samestep.doctor.line import Finding, kept

__all__: list[str] = []


def looks(folder: Path, busy: float = 0.0) -> dict[str, Callable[[], Iterable[Finding]]]:
    """Returns what is looked at, in the order in which it is shown; `busy` is how many cores others kept so before."""
    return {
        "software": software.look,
        "versions": pairs.look,
        "GPUs": gpus.look,
        "cores and memory": lambda: machine.look(busy=busy),
        "disk": lambda: disk.look(folder),
        "network": lambda: (*names.look(), *routes.look()),
        "variables": variables.look,
        "a step of two ranks": trial.look,
    }


def run_checks(folder: Path, tell: Callable[[str], None] = lambda _: None, *, steps: bool = True) -> list[Finding]:
    """Looks at everything; returns all lines in order.

    Args:
        folder: where runs would be written.
        tell: is told what is still looked at.
        steps: whether ranks take steps.
    """
    all_of_them = looks(folder, machine.busy_before())
    chosen = {check: look for check, look in all_of_them.items() if steps or look is not trial.look}
    with ThreadPoolExecutor(len(chosen)) as pool:
        under_way = {pool.submit(_listed, check, look): check for check, look in chosen.items()}
        tell(_left(under_way.values(), ()))
        done: dict[str, list[Finding]] = {}
        for future in as_completed(under_way):
            done[under_way[future]] = future.result()
            tell(_left(under_way.values(), done))
    return [line for check in chosen for line in done[check]]


def _listed(check: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    return list(kept(check, look))


def _left(all_of_them: Iterable[str], done: Iterable[str]) -> str:
    finished = set(done)
    return ", ".join(check for check in all_of_them if check not in finished)


def at(host: str, lines: Iterable[Finding]) -> Iterator[Finding]:
    """Yields lines with the host that they are of."""
    for line in lines:
        yield Finding(line.check, line.level, line.text, line.effect, line.fix, host)
