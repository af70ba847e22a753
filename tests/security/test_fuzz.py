"""Whatever a stranger writes where samestep reads: one error of its own that says so, at once, and nothing run.

Some hundred of each by `make test`; for ten minutes together by `make prove`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import select
import shutil
import socket
import tempfile
import time
from pathlib import Path

import pytest
import torch
from fuzz_screens import DRAWN, MORE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import samestep
from samestep.checkpoints import manifest
from samestep.checkpoints.reader import read_tensors
from samestep.errors import SamestepError
from samestep.launch.hosts.hostlist import parse_hostfile, parse_hosts
from samestep.launch.hosts.secure_link import AuthenticatedLink, new_token
from samestep.launch.link import Link
from samestep.launch.output.lines import strip_control
from samestep.network.cluster import parse as parse_cluster
from samestep.reporting.run_log import open_run
from samestep.runtime.store_messages import decode_registration

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
MANIFEST = {"schema": 1, "step": 3, "world_size": 2, "state": {"t": "w"}, "tensors": {}, "parts": {}}
near_manifests = st.dictionaries(st.sampled_from([*MANIFEST, "sha256", "extra", "run"]), json_values)
ENTRY = {"host": "a", "pid": 3, "size": 2, "samestep": "0.1.0", "torch": "2.13.0", "network": "n"}
near_entries = st.fixed_dictionaries({}, optional={name: json_values | st.just(ENTRY[name]) for name in ENTRY})
EVENT = {"v": 1, "t": 1.0, "rank": 0, "attempt": 0, "kind": "step", "step": 1, "steps": 1, "seconds": 0.1}
near_events = st.fixed_dictionaries({}, optional={name: json_values | st.just(EVENT[name]) for name in EVENT})
raw = st.binary(max_size=300)
texts = st.text(max_size=200)


def store_entries(data):
    value = data.draw(raw | near_entries.map(lambda entry: json.dumps(entry).encode()))
    assert set(decode_registration(value, 1)) >= {"host", "pid", "size"}


def manifests(data):
    manifest.from_text(data.draw(texts | near_manifests.map(json.dumps)))


def payloads(data):
    """The file of a good checkpoint, with another length, header or end."""
    header = data.draw(raw | near_manifests.map(lambda entry: json.dumps(entry).encode()))
    length = data.draw(st.sampled_from([len(header), 0, 1, 1 << 63, (1 << 64) - 1]))
    with tempfile.TemporaryDirectory() as name:
        folder = shutil.copytree(good(), Path(name) / "step")
        whole = manifest.from_text((folder / "manifest.json").read_text(encoding="ascii"))
        (file,) = folder.glob("*.safetensors")
        file.write_bytes(length.to_bytes(8, "little") + header + data.draw(raw))
        with pytest.raises(SamestepError):
            read_tensors(folder, whole)


@functools.cache
def good():
    """The folder of a checkpoint that can be read, kept until the tests end."""
    kept = tempfile.TemporaryDirectory()
    atexit.register(kept.cleanup)
    with samestep.world() as world:
        state = samestep.checkpoint(kept.name, world, every=1, model=torch.nn.Linear(2, 2))
        state.commit()
        state.save()
    return min(Path(kept.name).glob("step-*"))


def sealed_frames(data):
    """Bytes of a stranger on a connection whose key they do not know: none is taken for a message."""
    said = data.draw(st.binary(min_size=1, max_size=4000))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        ours, _ = server.accept()
        with ours:
            link = AuthenticatedLink(ours, bytes.fromhex(new_token()), "ours", "theirs", {})
            theirs.sendall(said)
            select.select([ours], [], [])
            assert link.receive() == []


def frames(data):
    """What comes from a process of one's own: whole messages, in order."""
    sent = [{"kind": "note", "text": text} for text in data.draw(st.lists(texts, max_size=3))]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = Link(theirs), Link(ours)
        for message in sent:
            sender.send(message)
        assert [{"kind": one.kind, **one.body} for one in receiver.receive()] == sent


def host_lists(data):
    parse_hosts(data.draw(st.text("ab[1-9],:@. \x00\n", max_size=30) | texts))


def host_files(data):
    parse_hostfile(data.draw(st.text("node123 slots=\n#", max_size=60) | texts), "hosts")


def cluster_files(data):
    words = st.text('[nodeslink]count = 1"\n{},', max_size=80)
    parse_cluster(data.draw(words | texts))


def run_directories(data):
    lines = data.draw(st.lists(near_events.map(json.dumps) | texts, max_size=6))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "0" / "host"
        folder.mkdir(parents=True)
        (Path(name) / "run.json").write_text(data.draw(texts | json_values.map(json.dumps)), encoding="utf-8")
        (folder / "rank0.events.jsonl").write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
        open_run(Path(name))


def terminal_lines(data):
    line = strip_control(data.draw(st.text("\x1b[]0;m2JPX\x07\\a\x9b\x08", max_size=60)).encode())
    left = line
    while (place := left.find(b"\x1b")) >= 0:  # colours only
        end = left.find(b"m", place)
        assert left[place + 1 : place + 2] == b"["
        assert set(left[place + 2 : end]) <= set(b"0123456789;:")
        left = left[end + 1 :]


TARGETS = [
    store_entries,
    manifests,
    payloads,
    sealed_frames,
    frames,
    host_lists,
    host_files,
    cluster_files,
    run_directories,
    terminal_lines,
    *MORE,
]
EXAMPLES = 200  # of one round: the slowest takes 0.2 s for each
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def tried(target, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=SLOW, database=None)
    @given(st.data())
    def one(data):
        with contextlib.suppress(SamestepError):  # its own error is what a target may raise, and no other
            target(data)

    return one


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_what_strangers_write_is_refused_in_words(target):
    tried(target, 12 if target in DRAWN else 50)()


@pytest.mark.prove
@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_a_minute_of_each_is_clean(target):
    until, rounds = time.monotonic() + 60, 0
    while time.monotonic() < until:
        tried(target, EXAMPLES)()
        rounds += 1
    print(f"{target.__name__}: {EXAMPLES * rounds} examples")
    assert rounds
