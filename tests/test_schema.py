"""JSON from others has the form that a dataclass says, or is refused with the place where it has not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from samestep.schema import from_json, parse_object


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Whole:
    part: Part
    seconds: float
    kind: Literal["a", "b"] = "a"
    pairs: tuple[tuple[str, int], ...] = ()
    names: dict[str, str | None] = field(default_factory=dict)
    more: list[bool] = field(default_factory=list)
    other: Any = None


def test_objects_become_dataclasses_and_lists_tuples():
    body = {"part": {"name": "x", "sizes": [1, 2]}, "seconds": 3, "pairs": [["a", 1]], "names": {"b": None}}
    body |= {"more": [True], "kind": "b", "other": [1], "unknown": 1}
    expected = Whole(Part("x", (1, 2)), 3, "b", (("a", 1),), {"b": None}, [True], [1])
    assert from_json(Whole, body) == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"part": {}}, "value.part has no name"),
        ({"part": 1}, "value.part is 1, not Part"),
        ({"part": {"name": "x", "sizes": [1, True]}}, r"value.part.sizes\[1\] is True, not int"),
        ({"part": {"name": "x", "sizes": [1, 2.0]}}, r"value.part.sizes\[1\] is 2.0, not int"),
        ({"seconds": "1"}, "value.seconds is '1', not float"),
        ({"seconds": True}, "value.seconds is True, not float"),
        ({"kind": "c"}, "value.kind is 'c', not "),
        ({"kind": []}, r"value.kind is \[\], not "),
        ({"pairs": [["a"]]}, r"value.pairs\[0\] is \['a'\], not "),
        ({"names": {"b": 1}}, "value.names.b is 1, not"),
        ({"more": [None]}, r"value.more\[0\] is None, not bool"),
    ],
)
def test_another_form_is_refused_with_its_place(change, reason):
    body = {"part": {"name": "x"}, "seconds": 1.0}
    with pytest.raises(ValueError, match=reason):
        from_json(Whole, body | change)


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_no_object_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011  (of several parsers)
        parse_object(text)
