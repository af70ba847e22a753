"""Hosts that are started by hand share a secret, unless they meet on the loopback address."""

from __future__ import annotations

import pytest

from samestep.cli import run
from samestep.cli.hosts import _by_hand
from samestep.errors import UsageError


def started_by_hand(address):
    words = ["--nnodes", "2", "--node-rank", "1", "--rendezvous", f"{address}:29500", "-n", "1", "train.py"]
    return _by_hand(run._parser().parse(words))


@pytest.mark.parametrize("length", [0, 1, 15])
def test_on_a_network_a_short_secret_is_refused(monkeypatch, length):
    monkeypatch.setenv("SAMESTEP_TOKEN", "s" * length)
    with pytest.raises(UsageError, match=r"--nnodes 2 needs a secret, .* 16 or more random characters"):
        started_by_hand("192.0.2.1")


@pytest.mark.parametrize("length", [16, 32])
def test_on_a_network_a_long_secret_is_used(monkeypatch, length):
    monkeypatch.setenv("SAMESTEP_TOKEN", "s" * length)
    assert started_by_hand("192.0.2.1").token == "s" * length


def test_on_the_loopback_address_the_secret_of_the_user_does(monkeypatch):
    monkeypatch.delenv("SAMESTEP_TOKEN", raising=False)
    own = started_by_hand("127.0.0.1").token
    assert len(own) >= 16
    assert started_by_hand("127.0.0.1").token == own
