"""Files that people write: quantities, sections, and what is said of a value that cannot be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from samestep.errors import UsageError
from samestep.parsing import (
    BANDWIDTH,
    BYTES,
    TIME,
    load,
    many,
    one_of,
    parse_json,
    parse_toml,
    positive,
    quantity,
    read,
    read_text,
    whole,
)


@dataclass(frozen=True)
class Part:
    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Section:
    count: int = field(metadata=read(whole(1)))
    parts: tuple[Part, ...] = field(metadata=read(many(Part)), default=())
    note: str | None = None
    share: float = 0.0
    on: bool = False


def test_sections_become_dataclasses():
    given = {"count": 2, "parts": [{"name": "a", "size": 3}], "note": None, "share": 1, "on": True}
    assert load(Section, given, "") == Section(count=2, parts=(Part("a", 3),), note=None, share=1, on=True)
    assert load(Section, {"count": 1}, "") == Section(count=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "the file is []: give a section with the keys count, parts, note, share, on"),
        ({"cuont": 1}, "cuont in the file is unknown: did you mean count?"),
        ({"count": 1, "zzz": 1}, "zzz in the file is unknown: there are count, parts, note, share, on"),
        ({}, "the file lacks its count"),
        ({"count": 0}, "count is 0: give a whole number, 1 or more"),
        ({"count": True}, "count is True: give a whole number, 1 or more"),
        ({"count": 10**40}, "give a whole number, 1 or more"),
        ({"count": 1, "parts": {}}, "parts is {}: give a list"),
        ({"count": 1, "parts": [{"name": "a"}]}, "parts[0] lacks its size"),
        ({"count": 1, "parts": [{"name": 1, "size": 1}]}, "parts[0].name is 1: give a text"),
        ({"count": 1, "note": 1}, "note is 1: give a text"),
        ({"count": 1, "share": -1}, "share is -1: give a number of 0 to 1e+30"),
        ({"count": 1, "share": math.nan}, "share is nan: give a number of 0 to 1e+30"),
        ({"count": 1, "on": 1}, "on is 1: give true or false"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(given, said):
    with pytest.raises(UsageError) as refused:
        load(Section, given, "", "the file")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_quantities_have_units():
    seconds, size, rate = quantity(TIME), quantity(BYTES), quantity(BANDWIDTH)
    assert [seconds(text, "x") for text in ("1 ms", "2us", "3 µs", "4ns", 0)] == [1e-3, 2e-6, 3e-6, 4e-9, 0]
    assert [size(text, "x") for text in ("1 kB", "1.5 MiB", 7)] == [1e3, 1.5 * 2**20, 7]
    assert [rate(text, "x") for text in ("8 bit/s", "1 Gbit/s", "2 GiB/s")] == [1, 125e6, 2**31]


@pytest.mark.parametrize(
    ("reader", "value", "said"),
    [
        (quantity(TIME), "-5 us", "x is '-5 us': give a time such as \"5 us\", 0 or more"),
        (quantity(TIME), None, "x is None: give a time"),
        (quantity(BYTES), "80 Gb", "x is '80 Gb', and the unit Gb is unknown: there are B, kB"),
        (quantity(BYTES), "lots", "x is 'lots': give bytes such as \"80 GB\""),
        (quantity(BYTES), 0, "above 0"),
        (quantity(BANDWIDTH), "1 Gbits/s", "did you mean Gbit/s?"),
        (quantity(BANDWIDTH), math.inf, "above 0"),
        (positive, 0, "x is 0: give a number above 0"),
        (positive, math.inf, "give a number above 0"),
        (one_of(["ring", "torus"]), "tours", "x is 'tours': did you mean torus?"),
        (one_of(["ring", "torus"]), 7, "x is 7: there are ring, torus"),
    ],
)
def test_a_value_that_cannot_be_says_what_can(reader, value, said):
    with pytest.raises(UsageError) as refused:
        reader(value, "x")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("parse", "deep", "long"),
    [(parse_toml, "a = " + "[" * 100_000, "a = " + "9" * 5000), (parse_json, "[" * 100_000, "9" * 5000)],
    ids=["TOML", "JSON"],
)
def test_a_text_of_another_form_is_one_line(parse, deep, long):
    for text, said in (("{", "file is not valid"), (deep, "too deep"), (long, "too long")):
        with pytest.raises(UsageError) as refused:
            parse(text, "file")
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)


def test_files_that_cannot_be_read_say_why(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path, said in (
        (tmp_path / "none", "none: no such file: make one"),
        (tmp_path, " is a folder: give the file in it"),
        (tmp_path / "binary", " cannot be read: it is not a text"),
    ):
        with pytest.raises(UsageError) as refused:
            read_text(path, "make one")
        assert said in str(refused.value)
    with pytest.raises(UsageError, match="^--settings x: no such file: make one"):
        read_text(tmp_path / "none", "make one", name="--settings x")
