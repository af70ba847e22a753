"""Latency and bandwidth: what a message takes, and the line through measured times."""

from __future__ import annotations

import pytest

from samestep.errors import UsageError
from samestep.network.links import Link, Links, fit
from samestep.text import bytes_text, seconds_text


def test_a_message_takes_its_latency_and_its_bytes():
    assert Link(latency_s=2**-10, bytes_per_s=2**20).seconds(2**10) == 2**-10 + 2**-10


def test_without_hosts_there_is_one_link():
    links = Links(Link(1, 2))
    assert links.across() == links.inside


@pytest.mark.parametrize("latency", [0.0, 5e-6, 1e-3])
@pytest.mark.parametrize("bandwidth", [1e6, 1.25e9])
def test_times_that_lie_on_a_line_give_that_line(latency, bandwidth):
    link = Link(latency, bandwidth)
    found = fit([(size, link.seconds(size)) for size in (8, 4096, 65536, 1 << 20)])
    assert found.bytes_per_s == pytest.approx(bandwidth, rel=1e-5)
    assert found.latency_s == pytest.approx(latency, rel=1e-4, abs=1e-12)


def test_a_small_message_counts_as_much_as_a_large_one():
    # 10 % off at 1 GB would be 100 ms, as if latency did not exist
    found = fit([(0, 10e-6), (1e9, 1.1), (2e9, 2.0)])
    assert 9e-6 < found.latency_s < 11e-6


def test_latency_is_never_negative_and_bandwidth_may_be_unlimited():
    assert fit([(1000, 1e-6), (2000, 3e-6)]).latency_s == 0
    assert fit([(0, 2e-6), (1000, 1e-6)]).bytes_per_s == float("inf")


@pytest.mark.parametrize("samples", [[], [(8, 1e-6)], [(8, 1e-6), (8, 2e-6)], [(8, 0.0), (16, 1e-6)]], ids=str)
def test_a_line_needs_two_sizes_and_real_times(samples):
    with pytest.raises(UsageError, match="two sizes or more"):
        fit(samples)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Link(-1e-6, 1e9), "latency of 0 or more"),
        (lambda: Link(0, 0), "bandwidth above 0"),
        (lambda: Link(0, float("nan")), "bandwidth above 0"),
        (lambda: Links(Link(0, 1), Link(0, 1)), "give local="),
        (lambda: Links(Link(0, 1), local=0), "local is 0"),
        (lambda: Links(Link(0, 1), nics=0), "nics is 0"),
        (lambda: Links(Link(0, 1), ports=-1), "ports is -1"),
        (lambda: Links(Link(0, 1), adding_bytes_per_s=0), "number above 0"),
    ],
)
def test_impossible_links_are_refused(make, problem):
    with pytest.raises(UsageError, match=problem):
        make()


def test_links_say_what_they_are_in_units_one_reads():
    links = Links(Link(5e-6, 10e9), Link(20e-6, 1.25e9), local=8, adding_bytes_per_s=5e9)
    assert str(links) == (
        "inside a host 5 µs a message and 10 GB/s, between hosts of 8 ranks 20 µs a message and 1.25 GB/s, "
        "adding 5 GB/s"
    )
    assert str(Links(Link(5e-6, 10e9))) == "5 µs a message and 10 GB/s"


def test_no_unit_shows_a_thousand_of_itself():
    assert seconds_text(0.0009999) == "1 ms"
    assert seconds_text(999.6e-9) == "1 µs"
    assert bytes_text(999_999) == "1 MB"
    assert bytes_text(999.4) == "999 B"
