"""A checkpoint made by a stranger, who seals what he writes: refused at once, in one line, and nothing is executed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from saved import train

from samestep.checkpoints.grid import PAYLOAD
from samestep.checkpoints.integrity import verify
from samestep.checkpoints.manifest import MANIFEST, SCHEMA, Manifest, from_text, to_text
from samestep.checkpoints.reader import read_tensors
from samestep.errors import CheckpointError

SECONDS, MEMORY = 2.0, 256 * 2**20  # of the processor: a busy machine takes longer
DATA = bytes(32)
NOBODYS = "0" * 64


def listed(dtype, shape, *digests):
    return {"dtype": dtype, "shape": shape, "sha256": list(digests)}


def digest(data):
    return hashlib.sha256(data).hexdigest()


TENSORS = {
    "model/a": listed("float32", [4], digest(bytes(16))),
    "model/b": listed("int64", [2], digest(bytes(16))),
}
HEADER = {
    "model/b": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
    "model/a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]},
}


def as_header(header):
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def a_payload(folder, header=None, data=DATA, length=None):
    text = header if isinstance(header, bytes) else as_header(HEADER if header is None else header)
    prefix = (len(text) if length is None else length).to_bytes(8, "little")
    (folder / PAYLOAD).write_bytes(prefix + text + data)


def a_manifest(folder, raw=(), **changes):
    """Writes a manifest with a true seal; `raw` replaces entries by JSON text."""
    entries = {
        "schema": SCHEMA,
        "step": 9,
        "epoch": 0,
        "world_size": 1,
        "samestep": "1",
        "torch": "2",
        "about": {"model": {"kind": "module"}},
        "state": {"model": {"dict": {name: {"tensor": name} for name in TENSORS}}},
        "extra": None,
        "tensors": TENSORS,
        "parts": {},
        "run": "",
        "command": [],
        "settings": {},
    }
    entries = {name: json.dumps(value) for name, value in {**entries, **changes}.items()} | dict(raw)
    unsealed = "0" * 64
    lines = [f' "sha256": "{unsealed}"', *(f' "{name}": {text}' for name, text in entries.items())]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    sealed = text.replace(unsealed, hashlib.sha256(text.encode()).hexdigest(), 1)
    (folder / MANIFEST).write_text(sealed)


def with_manifest(**changes):
    def make(folder):
        a_payload(folder)
        a_manifest(folder, **changes)

    return make


def with_payload(header=None, **changes):
    def make(folder):
        a_payload(folder, header, **changes)
        a_manifest(folder)

    return make


def moved(**offsets):
    return {
        name: {**entry, "data_offsets": offsets.get(name[-1], entry["data_offsets"])} for name, entry in HEADER.items()
    }


def linked(name):
    def make(folder):
        a_payload(folder)
        a_manifest(folder)
        (folder / name).rename(folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return make


def linked_folder(folder):
    a_payload(folder)
    a_manifest(folder)
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def a_pipe(name):
    def make(folder):
        a_payload(folder)
        a_manifest(folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return make


def a_folder(folder):
    a_payload(folder)
    a_manifest(folder)
    (folder / PAYLOAD).unlink()
    (folder / PAYLOAD).mkdir()


def a_file(folder):
    folder.rmdir()
    folder.write_text("no folder")


def a_pickle(folder):
    (folder / PAYLOAD).write_bytes(b"\x80\x04cos\nsystem\n(S'touch executed'\ntR." + bytes(100))
    a_manifest(folder)


def a_giant_manifest(folder):
    a_payload(folder)
    with (folder / MANIFEST).open("wb") as file:
        file.truncate(2**40)  # a sparse terabyte


def a_giant_header(folder):
    a_payload(folder, b"{}", length=2**62)
    a_manifest(folder, tensors={})


def many(count, text, between=", "):
    return "[" + between.join([text] * count) + "]"


def all_that_is_allowed(folder):
    """Close to the limits of everything at once: objects of long keys, texts, numbers, short lists."""
    entry = '{{"key of {0}": 1.5e300, "other of {0}": "text of {0}", "n": [{0}.5]}}'
    with_manifest(raw={"extra": "[" + ", ".join(map(entry.format, range(220_000))) + "]"})(folder)


def million_tensors(folder):
    header = ", ".join(f'"{i}": {{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(1_000_000))
    a_payload(folder, b"{" + header.encode() + b"}", data=b"")
    a_manifest(folder, tensors={}, state={})


# --- tensors in parts ---------------------------------------------------------------------------

SECOND = "tensors-00001.safetensors"
HALVES = {"bounds": [[0, 2, 4]], "ranks": [0, 1]}


def in_parts(shapes=([2], [2]), dtypes=("F32", "F32"), **changes):
    """A tensor of four numbers, two in each of two files; `changes` are of the manifest's entries."""

    def make(folder):
        for name, dtype, shape in zip((PAYLOAD, SECOND), dtypes, shapes, strict=True):
            text = as_header({"model/a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}})
            (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        entries = {
            "tensors": {"model/a": listed("float32", [4], digest(bytes(8)), digest(bytes(8)))},
            "state": {"model": {"tensor": "model/a"}},
            "parts": {"model/a": HALVES},
        }
        a_manifest(folder, **{**entries, **changes})

    return make


def with_grid(bounds=HALVES["bounds"], ranks=HALVES["ranks"], **further):
    return in_parts(parts={"model/a": {"bounds": bounds, "ranks": ranks, **further}})


def many_parts(folder):
    """As many parts as the limits leave room for, of a tensor with as many dims."""
    ranks, count, dims = 9_000, 12, 60
    grid = {"bounds": [[0, 1]] * dims + [list(range(ranks + 1))], "ranks": list(range(ranks))}
    names = [f"model/{number}" for number in range(count)]
    in_parts(
        tensors={name: listed("float32", [1] * dims + [ranks], *[NOBODYS] * ranks) for name in names},
        state={},
        parts=dict.fromkeys(names, grid),
    )(folder)


def many_bounds(folder):
    """Cuts that nobody could count, were they multiplied out."""
    bounds = [[0, *range(1, 1000), 1000]] * 60
    in_parts(
        tensors={"model/a": listed("float32", [1000] * 60, NOBODYS, NOBODYS)},
        parts={"model/a": {"bounds": bounds, "ranks": [0, 1]}},
    )(folder)


PARTS = {
    "a gap between parts": with_grid(bounds=[[0, 2], [3, 4]]),
    "parts that end early": with_grid(bounds=[[0, 2, 3]]),
    "parts that begin late": with_grid(bounds=[[1, 2, 4]]),
    "parts that overlap": with_grid(bounds=[[0, 3, 2, 4]], ranks=[0, 1, 2]),
    "parts outside the whole": with_grid(bounds=[[0, 2, 4, 6]], ranks=[0, 1, 2]),
    "negative bounds": with_grid(bounds=[[0, -2, 4]]),
    "bounds that are no numbers": with_grid(bounds=[[0, 2.0, 4]]),
    "a part of nothing": with_grid(bounds=[[0, 2, 2, 4]], ranks=[0, 1, 2]),
    "bounds of too many dims": with_grid(bounds=[[0, 2, 4], [0, 1]]),
    "more ranks than parts": with_grid(ranks=[0, 1, 2]),
    "two parts on one rank": with_grid(ranks=[1, 1]),
    "a negative rank": with_grid(ranks=[0, -1]),
    "a rank that is a name": with_grid(ranks=[0, "../../etc/passwd"]),
    "a rank of a million digits": in_parts(
        raw={"parts": '{"model/a": {"bounds": [[0, 2, 4]], "ranks": [0, %s]}}' % ("1" * 4000)}
    ),
    "a part in a file that is not listed": with_grid(ranks=[0, 7]),
    "a part of more kinds": with_grid(file="/etc/passwd"),
    "parts of a tensor that is not there": in_parts(parts={"model/a": HALVES, "model/b": HALVES}),
    "one digest for two parts": in_parts(tensors={"model/a": listed("float32", [4], digest(bytes(8)))}),
    "a digest too many": in_parts(tensors={"model/a": listed("float32", [4], *[digest(bytes(8))] * 3)}),
    "a list for the parts": in_parts(parts=[]),
    "a part of another shape": in_parts(shapes=([2], [1, 2])),
    "a part of another type": in_parts(dtypes=("F32", "I32")),
    "a part that holds all": in_parts(shapes=([2], [4])),
    "a rank beyond all that write": with_grid(ranks=[0, 10_000]),
    "a hundred thousand parts": many_parts,
    "10^180 parts": many_bounds,
}


def test_what_the_cases_of_parts_alter_is_right_before(tmp_path):
    folder = tmp_path / "step-00000009"
    folder.mkdir()
    in_parts()(folder)
    assert read_tensors(folder, verify(folder))["model/a"].tolist() == [0.0] * 4


def test_what_the_other_cases_alter_is_right_before(tmp_path):
    folder = tmp_path / "step-00000009"
    folder.mkdir()
    with_manifest()(folder)
    assert read_tensors(folder, verify(folder))["model/b"].tolist() == [0, 0]


GIANT = {**TENSORS, "model/a": listed("float32", [2**40, 2**40], NOBODYS)}
TWICE = as_header(HEADER).strip()[:-1] + b',"model/a":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}'

CASES = {
    "a digest that is none": with_manifest(tensors={**TENSORS, "model/a": listed("float32", [4], "../../etc/passwd")}),
    "a digest that is a number": with_manifest(tensors={**TENSORS, "model/a": listed("float32", [4], 7)}),
    "a tensor without a digest": with_manifest(tensors={**TENSORS, "model/a": listed("float32", [4])}),
    "a tensor with a place of its own": with_manifest(tensors={**TENSORS, "model/a": {**TENSORS["model/a"], "at": 0}}),
    "the name of a tensor that is no text": with_manifest(tensors={**TENSORS, "\ud800": listed("int8", [0], NOBODYS)}),
    "other bytes than were saved": with_payload(data=bytes(31) + b"x"),
    "a command that is no list": with_manifest(command="rm -rf"),
    "settings that are a list": with_manifest(settings=[1]),
    "a linked manifest": linked(MANIFEST),
    "a linked payload": linked(PAYLOAD),
    "a linked folder": linked_folder,
    "a pipe as manifest": a_pipe(MANIFEST),
    "a pipe as payload": a_pipe(PAYLOAD),
    "a folder as payload": a_folder,
    "a file as folder": a_file,
    "a pickle as payload": a_pickle,
    "a tensor of 2^82 bytes": with_manifest(tensors=GIANT),
    "a negative shape": with_manifest(tensors={**TENSORS, "model/a": listed("float32", [4, -1], NOBODYS)}),
    "a shape of a thousand dims": with_manifest(tensors={**TENSORS, "model/a": listed("float32", [1] * 999, NOBODYS)}),
    "an unknown dtype": with_manifest(tensors={**TENSORS, "model/a": listed("object", [4], NOBODYS)}),
    "no tensors in the payload": with_payload({}, data=b""),
    "a manifest of a terabyte": a_giant_manifest,
    "a header of exabytes": a_giant_header,
    "a header longer than the file": with_payload(length=10_000),
    "a header of no bytes": with_payload(length=0),
    "an offset outside the file": with_payload(moved(a=[2**62, 2**62 + 16])),
    "a negative offset": with_payload(moved(a=[-16, 0])),
    "an offset that is no integer": with_payload(moved(a=[16.0, 32.0])),
    "offsets the wrong way round": with_payload(moved(a=[32, 16])),
    "offsets that overlap": with_payload(moved(a=[8, 24])),
    "two tensors in one place": with_payload(moved(a=[0, 16])),
    "a gap that hides bytes": with_payload(moved(a=[24, 40]), data=bytes(40)),
    "bytes behind the last tensor": with_payload(data=bytes(64)),
    "a tensor twice in the header": with_payload(TWICE),
    "an entry twice in the manifest": with_manifest(raw={"extra": 'null,\n "step": 9'}),
    "a tensor twice in the manifest": with_manifest(raw={"tensors": json.dumps(TENSORS)[:-1] + ', "model/a": 3}'}),
    "a million tensors": million_tensors,
    "lists 100,000 deep": with_manifest(raw={"extra": "[" * 100_000 + "]" * 100_000}),
    "lists 900 deep": with_manifest(raw={"extra": "[" * 900 + "]" * 900}),
    "objects 400 deep": with_manifest(raw={"extra": '{"dict": {"a": ' * 400 + "1" + "}}" * 400}),
    "six million empty lists": with_manifest(raw={"extra": many(6_000_000, "[]")}),
    "a million small objects": with_manifest(raw={"extra": many(1_000_000, '{"dict": {}}')}),
    "twelve million numbers": with_manifest(raw={"extra": many(12_000_000, "1")}),
    "all that is allowed, of no kind": all_that_is_allowed,
    "a number of a million digits": with_manifest(raw={"step": "1" * 1_000_000}),
    "a step that is no number": with_manifest(step=float("nan")),
    "infinity": with_manifest(extra=float("inf")),
    "a negative step": with_manifest(step=-9),
    "a step beyond 64 bits": with_manifest(step=2**70),
    "true for a step": with_manifest(step=True),
    "a list for the tensors": with_manifest(tensors=[]),
    "a text for the state": with_manifest(state="rm -rf"),
    "a state of an unknown kind": with_manifest(state={"model": {"object": "os.system"}}),
    "a tensor that is not there": with_manifest(state={"model": {"tensor": "model/c"}}),
    **PARTS,
}


@pytest.fixture
def tmp_path(tmp_path):
    """Emptied at once: some of what is made here is big."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "run"
    train(path, steps=1)
    return path


def hostile_run(good, tmp_path, case):
    """A copy of a good run with a hostile checkpoint as its newest."""
    run = tmp_path / "run"
    shutil.copytree(good, run)
    folder = run / "step-00000009"
    folder.mkdir()
    CASES[case](folder)
    return run


MEMORY_OF = """
    import re
    from pathlib import Path

    def memory(kind):
        return int(re.search(kind + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    def forget_the_peak():
        Path("/proc/self/clear_refs").write_text("5")
"""

LOOKED_AT = (
    MEMORY_OF
    + """
    import contextlib, io, json, sys, time
    import samestep.checkpoints.reader, torch
    from samestep.cli import main

    told, begun_with = [], memory("VmRSS")  # with torch, and all that the session may have imported before
    for path in sys.argv[1:]:
        forget_the_peak()
        before, shown = time.process_time(), io.StringIO()
        with contextlib.redirect_stdout(shown):
            code = main(["checkpoint", "verify", path])
        told.append([code, time.process_time() - before, memory("VmHWM") - begun_with, shown.getvalue()])
    print(json.dumps(told))
"""
)


@pytest.fixture(scope="module")
def told(good, tmp_path_factory):
    """What `samestep checkpoint verify` said of each case: exit code, seconds, most memory, text."""
    folder = tmp_path_factory.mktemp("told")
    runs = []
    for number, case in enumerate(CASES):
        (folder / str(number)).mkdir()
        runs.append(hostile_run(good, folder / str(number), case))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOOKED_AT), *map(str, runs)],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        timeout=200,
    )
    yield dict(zip(CASES, json.loads(done.stdout), strict=True))
    assert not (folder / "executed").exists()
    shutil.rmtree(folder)


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_in_one_line_at_once_and_in_little_memory(told, case):
    code, seconds, memory, text = told[case]
    refusal, *_ = (line for line in text.splitlines() if line.startswith("step-00000009: "))
    assert code == 1
    assert "damaged: " in refusal
    assert len(refusal) < 400
    assert seconds < SECONDS
    assert memory < MEMORY
    assert "step-00000001: every byte as saved" in text


RESUMED = (
    MEMORY_OF
    + """
    import logging, sys, time
    sys.path.insert(0, sys.argv[1])
    logging.getLogger("samestep.checkpoint").addHandler(logging.StreamHandler(sys.stdout))
    from saved import train
    from samestep.checkpoints.directory import CheckpointDirectory
    from samestep.checkpoints.integrity import latest_intact

    for path in sys.argv[2:]:
        forget_the_peak()
        held, before = memory("VmRSS"), time.process_time()
        directory = CheckpointDirectory(Path(path))
        name = latest_intact(directory)
        seconds, most = time.process_time() - before, memory("VmHWM") - held
        directory.close()
        print("result", name, seconds, most, flush=True)
    print("resumed", *train(path, steps=1)[:2])
"""
)


SEVERAL = [  # that are refused in other places: the folder, the manifest, its numbers, the header, the parts
    "a linked folder",
    "a manifest of a terabyte",
    "a tensor of 2^82 bytes",
    "a header of exabytes",
    "a hundred thousand parts",
]


@pytest.mark.prove
@pytest.mark.parametrize("cases", [SEVERAL, list(CASES)], ids=["several", "all"])
def test_a_run_sets_it_aside_and_resumes_from_the_one_before(good, tmp_path, cases):
    runs = []
    for number, case in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        runs.append(hostile_run(good, tmp_path / str(number), case))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(RESUMED), os.path.dirname(__file__), *map(str, runs)],  # noqa: PTH120
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    results = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("result")]
    aside = [line for line in done.stdout.splitlines() if "quarantined as step-00000009.bad" in line]
    assert len(results) == len(aside) == len(cases), done.stdout + done.stderr
    for case, (name, seconds, memory) in zip(cases, results, strict=True):
        assert name == "step-00000001", case
        assert float(seconds) < SECONDS, case
        assert int(memory) < MEMORY, case
    assert "resumed True 1" in done.stdout
    assert all(not (run / "step-00000009").exists() for run in runs)


def test_a_hundred_thousand_tensors_are_not_taken_for_an_attack():
    names = [f"optimizer/state/{number}/transformer.blocks.experts.exp_avg" for number in range(100_000)]
    tree = {"dict": {name: {"tensor": name} for name in names}}
    tensors = {name: listed("float32", [1024, 1024], digest(name.encode())) for name in names}
    about = {"optimizer": {"kind": "object"}}
    manifest = Manifest(SCHEMA, 1, 0, 1, "1", "2", about, {"optimizer": tree}, None, tensors)
    assert from_text(to_text(manifest)) == manifest


def test_what_would_not_be_read_is_not_written():
    with pytest.raises(CheckpointError, match="too many parts for one checkpoint: 600,"):
        to_text(Manifest(SCHEMA, 1, 0, 1, "1", "2", {}, {"thing": [[]] * 600_000}, None))
