"""Whatever is changed in a saved checkpoint is noticed, file and tensor are named, and the one before it is used."""

from __future__ import annotations

import logging
import random
import shutil

import pytest
from saved import train

from samestep.checkpoints.grid import PAYLOAD
from samestep.checkpoints.integrity import DamageError, layout, payloads, read_manifest, verify
from samestep.checkpoints.manifest import MANIFEST

STEPS = ["step-00000001", "step-00000002", "step-00000003"]
NEWEST = STEPS[-1]
FILES = (MANIFEST, PAYLOAD)
MANY = 1000


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the same model with other weights and data order: `mine`, and `foreign`."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("mine", "foreign")):
        train(folder / name, seed=seed)
    return folder


# --- the mutations: each returns the names of the files that may be blamed ---------------------------


def flip(stream, run, _):
    name = stream.choice([MANIFEST, PAYLOAD])
    data = bytearray((run / NEWEST / name).read_bytes())
    data[stream.randrange(len(data))] ^= 1 << stream.randrange(8)
    (run / NEWEST / name).write_bytes(data)
    return {name}


def blank(stream, run, _):
    name = stream.choice([MANIFEST, PAYLOAD])
    before = (run / NEWEST / name).read_bytes()
    data = bytearray(before)
    while data == before:  # a block of zeros may have been zeros
        start, count = stream.randrange(len(data)), stream.choice([1, 16, 512, 4096])
        data[start : start + count] = bytes(len(data[start : start + count]))
    (run / NEWEST / name).write_bytes(data)
    return {name}


def cut(stream, run, _):
    name = stream.choice([MANIFEST, PAYLOAD])
    data = (run / NEWEST / name).read_bytes()
    (run / NEWEST / name).write_bytes(data[: stream.randrange(len(data))])
    return {name}


def append(stream, run, _):
    name = stream.choice([MANIFEST, PAYLOAD])
    with (run / NEWEST / name).open("ab") as file:
        file.write(stream.randbytes(stream.choice([1, 8, 5000])))
    return {name}


def drop(stream, run, _):
    name = stream.choice([MANIFEST, PAYLOAD])
    (run / NEWEST / name).unlink()
    return {name}


def add(stream, run, foreign):
    name = stream.choice(["notes.txt", ".hidden", "tensors2.safetensors", "manifest.json~"])
    shutil.copy(foreign / NEWEST / PAYLOAD, run / NEWEST / name)
    return {name}


def swap(stream, run, _):
    name, other = stream.choice([MANIFEST, PAYLOAD]), stream.choice(STEPS[:-1])
    one, two = run / NEWEST / name, run / other / name
    held = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(held)
    return {MANIFEST, PAYLOAD}


def replace_by_foreign(stream, run, foreign):
    shutil.copy(foreign / NEWEST / (name := stream.choice([MANIFEST, PAYLOAD])), run / NEWEST / name)
    return {MANIFEST, PAYLOAD} - ({MANIFEST} if name == PAYLOAD else set())


MUTATIONS = [flip, flip, blank, blank, cut, append, drop, add, swap, replace_by_foreign]


def changed_tensors(before, after, manifest):
    """The tensors that a comparison of all bytes finds changed, cut or missing."""
    header, sizes = layout(payloads(manifest)[PAYLOAD])
    start, changed = len(header), set()
    for name, size in sizes.items():
        if before[start : start + size] != after[start : start + size]:
            changed.add(name)
        start += size
    return changed


EACH = len(MUTATIONS)
NUMBERS = [*range(EACH), *(pytest.param(number, marks=pytest.mark.prove) for number in range(EACH, MANY))]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_mutation_is_noticed_named_and_the_checkpoint_before_is_used(runs, tmp_path, caplog, number):
    stream = random.Random(number)
    run, foreign = tmp_path / "run", runs / "foreign"
    shutil.copytree(runs / "mine", run)
    mutate = MUTATIONS[number % len(MUTATIONS)]
    blamed = mutate(stream, run, foreign)

    with pytest.raises(DamageError) as caught:
        verify(run / NEWEST)
    assert caught.value.file in blamed
    assert caught.value.file in str(caught.value)
    assert "\n" not in str(caught.value)
    if caught.value.file == PAYLOAD and (run / NEWEST / PAYLOAD).exists():
        assert_tensors_are_named(caught.value, runs, run)

    whole = [step for step in STEPS[:-1] if all(same(runs / "mine" / step, run / step, name) for name in FILES)]
    with caplog.at_level(logging.WARNING, logger="samestep.checkpoint"):
        resumed, step, _ = train(run, steps=1)
    assert (resumed, f"step-{step:08d}") == (True, whole[-1])
    assert str(run / NEWEST) in caplog.text
    assert (run / f"{NEWEST}.bad").exists()


def assert_tensors_are_named(error, runs, run):
    manifest = read_manifest(run / NEWEST)
    whose = (
        "mine" if manifest == read_manifest(runs / "mine" / NEWEST) else "foreign"
    )  # the manifest is what is trusted
    before = (runs / whose / NEWEST / PAYLOAD).read_bytes()
    changed = changed_tensors(before, (run / NEWEST / PAYLOAD).read_bytes(), manifest)
    assert set(error.tensors) == changed
    if not changed:
        assert "every tensor in it is whole" in str(error)
    elif len(changed) < len(manifest.tensors):
        order = list(layout(payloads(manifest)[PAYLOAD])[1])
        assert min(changed, key=order.index) in str(error)
    else:
        assert f"none of its {len(changed)} tensors" in str(error)


def same(one, other, name):
    return (one / name).read_bytes() == (other / name).read_bytes()
