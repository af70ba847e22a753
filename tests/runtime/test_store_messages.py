"""What stands in the store is taken for what a rank writes only where it has that form."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from samestep.errors import RendezvousError
from samestep.runtime.store_messages import MAX_MESSAGE_BYTES, decode_message, matches_type


@dataclass
class Inner:
    name: str
    rows: dict[str, int]


@dataclass
class Outer:
    inner: list[Inner]
    rate: float
    note: str | None


GOOD = {"inner": [{"name": "a", "rows": {"b": 1}}], "rate": 1, "note": None}


@pytest.mark.parametrize(
    ("value", "form", "right"),
    [
        (GOOD, Outer, True),
        ({**GOOD, "rate": "1"}, Outer, False),
        ({**GOOD, "more": 1}, Outer, False),
        ({"inner": [], "rate": 0.5}, Outer, False),
        ({**GOOD, "inner": [{"name": "a", "rows": {"b": True}}]}, Outer, False),
        ([1, "a"], tuple[int, str | None], True),
        ([1, None], tuple[int, str | None], True),
        ([1], tuple[int, str | None], False),
        ([1, "a", 2], tuple[int, str | None], False),
        ({"a": [1]}, dict[str, list[int]], True),
        ({"a": 1}, dict[str, list[int]], False),
        ({"bad": None}, {"bad": None}, True),
        ({"bad": "x"}, {"bad": None}, False),
        (True, int, False),
        (1, float, True),
        ("a", list[str], False),
    ],
)
def test_a_form_is_held_to(value, form, right):
    assert matches_type(value, form) is right


def test_a_letter_is_what_was_written():
    assert decode_message(json.dumps(GOOD), Outer, of="rank 1") == GOOD
    assert decode_message(b'{"error": "full"}', {"ok": int}, {"error": str}, of="rank 1") == {"error": "full"}


@pytest.mark.parametrize("value", [b"", b"{", b"[" * 100_000, b"\xff", b"null", b'"a"', b"9" * 5000])
def test_anything_else_is_refused_in_words(value):
    with pytest.raises(RendezvousError, match="the message of rank 1 in the store is malformed"):
        decode_message(value, Outer, of="rank 1")


def test_a_letter_that_fills_memory_is_not_even_parsed():
    with pytest.raises(RendezvousError, match="somebody else writes there"):
        decode_message(b"[" + b"1," * (MAX_MESSAGE_BYTES // 2) + b"1]", list[int], of="rank 1")
