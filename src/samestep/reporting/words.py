"""Numbers as a person reads them, and other people's texts as nothing obeys them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__: list[str] = []

LONGEST = 2_000  # letters of somebody else's text that are shown


def format_duration(value: float) -> str:
    """Returns a time with the unit that suits it.

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


def format_percent(value: float) -> str:
    """Returns a part of a whole.

    >>> format_percent(0.5), format_percent(0.034), format_percent(0.0004), format_percent(0)
    ('50 %', '3.4 %', '< 0.1 %', '0 %')
    """
    percent = 100 * value
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


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


def format_number(value: float) -> str:
    """Returns a number with as many digits as say something.

    >>> format_number(1234.0), format_number(0.123456), format_number(float("nan"))
    ('1,234', '0.1235', 'nan')
    """
    if math.isfinite(value) and value == round(value) and abs(value) < 1e15:
        return f"{round(value):,}"
    return f"{value:.4g}"


def plural(count: int, what: str) -> str:
    """Returns how many of something.

    >>> plural(1, "rank"), plural(2000, "rank")
    ('1 rank', '2,000 ranks')
    """
    return f"{count:,} {what if count == 1 else what + 's'}"


def join_and(names: Sequence[str]) -> str:
    """Returns names as a sentence has them.

    >>> join_and(["a"]), join_and(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def escape_control(text: Any) -> str:
    r"""Returns a text on one line, and without what a terminal or a page would obey; one that is too long is cut.

    >>> escape_control("a\x1b[31m\u202eb")
    'a\\x1b[31m\\u202eb'
    """
    told = str(text)
    told = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in told[:LONGEST])
    return told + ("…" if len(str(text)) > LONGEST else "")


def escape_lines(text: Any) -> str:
    """Returns a text of several lines, each of them printable."""
    return "\n".join(map(escape_control, str(text)[: 10 * LONGEST].split("\n")))
