"""Numbers, lists of ranks and other people's text, as they stand in messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST = 2_000  # characters of a foreign text that are shown
_MOST_LISTED = 3  # names


def spans(ranks: Iterable[int]) -> str:
    """Returns numbers in ascending order, runs of them in short.

    >>> spans([5, 0, 1, 2])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def rank_list(ranks: Iterable[int]) -> str:
    """Returns "rank" or "ranks", and which.

    >>> rank_list([0]), rank_list([2, 0, 1])
    ('rank 0', 'ranks 0-2')
    """
    numbers = list(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {spans(numbers)}"


def plural(count: float, what: str) -> str:
    """Returns how many of something.

    >>> plural(1, "rank"), plural(2000, "rank"), plural(2, "batch"), plural(2.5, "core")
    ('1 rank', '2,000 ranks', '2 batches', '2.5 cores')
    """
    number = f"{count:,}" if isinstance(count, int) else f"{round(count, 2):,g}"
    if count == 1:
        return f"{number} {what}"
    return f"{number} {what}{'es' if what.endswith(('tch', 's', 'sh')) else 's'}"


def listed(names: Sequence[str], what: str = "tensor") -> str:
    """Returns names in short.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more tensors'
    """
    shown = ", ".join(names[:_MOST_LISTED])
    rest = len(names) - _MOST_LISTED
    return shown if rest <= 0 else f"{shown} and {plural(rest, f'more {what}')}"


def numbers(values: Sequence[float]) -> str:
    """Returns "0.1, 0.05"."""
    return ", ".join(f"{value:g}" for value in values)


def join_and(names: Sequence[str]) -> str:
    """Returns names as a sentence has them.

    >>> join_and(["a"]), join_and(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def format_duration(value: float) -> str:
    """Returns a time in seconds with the unit that suits it.

    >>> [format_duration(value) for value in (0.00042, 0.0184, 1.5, 125, 7320)]
    ['0.42 ms', '18.4 ms', '1.50 s', '2 min 05 s', '2 h 02 min']
    """
    if value < 0.9995:
        milliseconds = 1e3 * value
        return f"{milliseconds:.2f} ms" if milliseconds < 9.995 else f"{milliseconds:.{int(milliseconds < 99.95)}f} ms"
    if value < 59.995:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def format_elapsed(seconds: float) -> str:
    """Returns a time that goes on, in whole seconds or in its two largest units.

    >>> format_elapsed(12.3), format_elapsed(185), format_elapsed(7384)
    ('12 s', '3 min 5 s', '2 h 3 min')
    """
    minutes, rest = divmod(int(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def seconds_text(seconds: float) -> str:
    """Returns a time with three digits and its unit, down to nanoseconds.

    >>> [seconds_text(s) for s in (0, 2.5e-8, 1.234e-5, 0.0099999, 12, -1.5e-4)]
    ['0 s', '25 ns', '12.3 µs', '10 ms', '12 s', '-150 µs']
    """
    if seconds < 0:
        return f"-{seconds_text(-seconds)}"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds == 0 or float(f"{seconds:.3g}") >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns"


def bytes_text(nbytes: float) -> str:
    """Returns a size with three digits and its decimal unit.

    >>> [bytes_text(n) for n in (17, 1000, 2.5e6, 3.21e11, float("inf"))]
    ['17 B', '1 kB', '2.5 MB', '321 GB', 'unlimited B']
    """
    if nbytes == float("inf"):
        return "unlimited B"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if float(f"{nbytes:.3g}") >= scale:
            return f"{_three_digits(nbytes / scale)} {unit}"
    return f"{_three_digits(nbytes)} B"


def _three_digits(number: float) -> str:
    rounded = float(f"{number:.3g}")
    return f"{rounded:.0f}" if rounded >= 100 else f"{rounded:g}"  # never an exponent


def format_bytes(count: float) -> str:
    """Returns a number of bytes, in powers of 1000.

    >>> format_bytes(999), format_bytes(1234567)
    ('999 B', '1.2 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_percent(value: float) -> str:
    """Returns a part of a whole.

    >>> format_percent(0.5), format_percent(0.034), format_percent(0.0004), format_percent(0)
    ('50 %', '3.4 %', '< 0.1 %', '0 %')
    """
    percent = 100 * value
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def format_number(value: float) -> str:
    """Returns a number with as many digits as say something.

    >>> format_number(1234.0), format_number(0.123456), format_number(float("nan"))
    ('1,234', '0.1235', 'nan')
    """
    if math.isfinite(value) and value == round(value) and abs(value) < 1e15:
        return f"{round(value):,}"
    return f"{value:.4g}"


def escape_control(text: Any) -> str:
    r"""Returns a text on one line, without what a terminal or a page would interpret; one that is too long is cut.

    >>> escape_control("a\x1b[31m\u202eb")
    'a\\x1b[31m\\u202eb'
    """
    whole = str(text)
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in whole[:LONGEST])
    return shown + ("…" if len(whole) > LONGEST else "")


def escape_lines(text: Any) -> str:
    """Returns a text of several lines, each of them printable."""
    return "\n".join(map(escape_control, str(text)[: 10 * LONGEST].split("\n")))
