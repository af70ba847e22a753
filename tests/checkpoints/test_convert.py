"""There and back every bit is the same; what strangers have made is read without executing any of it."""

from __future__ import annotations

import enum
import io
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from saved import a_model, train
from torch.distributed.checkpoint import save as save_dcp
from torch.distributed.checkpoint.metadata import Metadata

import samestep
from samestep.checkpoints import convert as convert_module
from samestep.checkpoints import convert_worker
from samestep.checkpoints.convert import from_foreign, to_dcp, to_torch
from samestep.checkpoints.convert_worker import import_states
from samestep.checkpoints.directory import CheckpointDirectory
from samestep.checkpoints.encoder import Encoder
from samestep.checkpoints.grid import PAYLOAD
from samestep.checkpoints.integrity import read_manifest, verify
from samestep.checkpoints.manifest import SCHEMA, Manifest, decode
from samestep.checkpoints.reader import read_tensors
from samestep.checkpoints.writer import write
from samestep.cli import main
from samestep.errors import CheckpointError
from samestep.testing import assert_same_bits

FORMATS = {"pt": to_torch, "dcp": to_dcp}
NEWEST = "step-00000003"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("convert") / "run"
    train(path)
    return path


def convert(*arguments):
    return main(["checkpoint", "convert", *map(str, arguments)])


REQUEST = {"step": 0, "epoch": 0, "kinds": {}}


def back(source, destination):
    return from_foreign(source, destination, timeout=100, **REQUEST)


def back_here(source, destination):
    """The same in this process, without limits: starting another takes seconds."""
    convert_worker.import_file(source, destination, REQUEST)


@pytest.fixture
def here(monkeypatch):
    """Lets the command read in this process, without limits."""
    monkeypatch.setattr(convert_module, "_run_worker", lambda request, timeout: convert_worker.handle_request(request))


# --- there and back -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "read"), [("pt", back_here), pytest.param("dcp", back, marks=pytest.mark.prove)], ids=FORMATS
)
def test_there_and_back_every_bit_is_the_same_and_a_run_goes_on(run, tmp_path, form, read):
    FORMATS[form](run / NEWEST, tmp_path / "other")
    read(tmp_path / "other", tmp_path / "back")
    assert (tmp_path / "back" / NEWEST / PAYLOAD).read_bytes() == (run / NEWEST / PAYLOAD).read_bytes()
    one, other = (vars(read_manifest(path / NEWEST)) for path in (run, tmp_path / "back"))
    assert one == other
    shutil.copytree(run, tmp_path / "straight")
    resumed, step, model = train(tmp_path / "back", steps=6)
    assert (resumed, step) == (True, 3)
    assert_same_bits(model.state_dict(), train(tmp_path / "straight", steps=6)[2].state_dict())


@pytest.mark.parametrize("form", FORMATS)
def test_structure_and_types_survive(tmp_path, form):
    weight = torch.arange(6.0).view(2, 3).t()
    thing = {
        "empty": {},
        "nothing": [],
        "none": None,
        7: {"seven": (torch.tensor(1), 2, "x")},
        "nan": [math.nan, -math.inf, -0.0],
        "bytes": b"\x00\xff",
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "tied": [weight, weight],
        "array": np.arange(4).reshape(2, 2),
        "counter": Counter({3: 1}),
        "ordered": OrderedDict(b=torch.ones(0, 3), a=1),
        "a/b.c~d": {"e": torch.tensor(True)},
    }
    encoder = Encoder()
    state = {"thing": encoder.encode(thing, "thing")}
    directory = CheckpointDirectory(tmp_path / "run")
    manifest = Manifest(SCHEMA, 5, 2, 3, "1", "2", {"thing": {"kind": "object"}}, state, None)
    folder = write(directory, manifest, encoder.tensors)
    directory.close()
    FORMATS[form](folder, tmp_path / "other")
    back_here(tmp_path / "other", tmp_path / "back")
    (returned,) = (tmp_path / "back").glob("step-*")
    manifest = read_manifest(returned)
    value = decode(manifest.state["thing"], read_tensors(returned, manifest))
    assert repr(value) == repr(decode(state["thing"], encoder.tensors))
    assert (manifest.step, manifest.epoch, manifest.world_size) == (5, 2, 3)


def test_the_file_holds_plain_tensors_under_the_names_of_the_bare_model(run, tmp_path, capsys):
    assert convert(run, tmp_path / "model.pt") == 0
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    assert set(content) == {"model", "optimizer", "data", "samestep"}
    a_model().load_state_dict(content["model"], strict=True)
    assert {type(value) for value in content["model"].values()} == {torch.Tensor}
    assert content["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert "is now" in capsys.readouterr().out


def test_torchs_own_loader_reads_the_directory(run, tmp_path):
    from torch.distributed.checkpoint import load

    assert convert(run, tmp_path / "exported") == 0
    model = a_model(seed=5)
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group
        load(state, checkpoint_id=tmp_path / "exported")
    manifest = read_manifest(run / NEWEST)
    saved = decode(manifest.state["model"], read_tensors(run / NEWEST, manifest))
    assert_same_bits(dict(model.state_dict()), saved)


@pytest.mark.prove
def test_from_one_foreign_format_to_the_other(run, tmp_path):
    assert convert(run, tmp_path / "one.pt") == 0
    assert convert(tmp_path / "one.pt", tmp_path / "two", "--to", "dcp") == 0
    assert convert(tmp_path / "two", tmp_path / "three.pt") == 0
    one, three = (torch.load(tmp_path / name, weights_only=True) for name in ("one.pt", "three.pt"))
    assert_same_bits(one["model"], three["model"])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["one.pt", "three.pt", "two"]


# --- what others have saved ---------------------------------------------------------------------------


def test_a_file_saved_by_hand_with_wrappers_resumes_here(here, tmp_path, capsys):
    model = a_model(seed=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model(torch.ones(3, 5)).sum().backward()
    optimizer.step()
    wrapped = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save({"net": wrapped, "optimizer": optimizer.state_dict(), "epoch": 3, "best": 0.5}, tmp_path / "old.pt")
    options = ("--kind", "optimizer=torch.optim.AdamW", "--step", "120", "--epoch", "3")
    assert convert(tmp_path / "old.pt", tmp_path / "run", *options) == 0
    assert "left out, because no states: 'epoch', 'best'" in capsys.readouterr().out
    with samestep.world(device="cpu") as world:
        net, fresh = a_model(), None
        fresh = torch.optim.AdamW(net.parameters())
        state = samestep.checkpoint(tmp_path / "run", world, net=net, optimizer=fresh)
        assert (bool(state.resumed), state.step, state.epoch) == (True, 120, 3)
        assert_same_bits(dict(net.state_dict()), dict(model.state_dict()))
        assert_same_bits(fresh.state_dict(), optimizer.state_dict())


def test_a_bare_state_of_a_model_and_a_directory_of_one_are_taken_too(tmp_path):
    model = a_model()
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group
        save_dcp({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    for name in ("bare.pth", "dcp"):
        back_here(tmp_path / name, tmp_path / f"run of {name}")
        folder = tmp_path / f"run of {name}" / "step-00000000"
        assert_same_bits(
            read_tensors(folder, verify(folder)), {f"model/{key}": value for key, value in model.state_dict().items()}
        )


# --- what strangers have made -------------------------------------------------------------------------


class Attack:
    def __reduce__(self):
        return (os.system, ("touch executed",))


def a_program(path):
    torch.save({"model": {"weight": torch.ones(3)}, "x": Attack()}, path)


def a_bare_pickle(path):
    path.write_bytes(pickle.dumps(Attack()))


def a_giant(path):
    """A file of 1 kB whose tensor is broadcast to 4 TB as soon as somebody stores it."""
    torch.save({"model": {"weight": torch.zeros(1).expand(2**40)}}, path)


def a_bomb(path):
    torch.save({"model": {"weight": torch.zeros(10)}}, path.with_suffix(".small"))
    with zipfile.ZipFile(path.with_suffix(".small")) as small, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in small.namelist():
            data = small.read(name)
            bomb.writestr(name, bytes(40 * 2**20) if name.endswith("data/0") else data)


def no_file_of_torch(path):
    path.write_bytes(b"just text")


def no_states(path):
    torch.save([1, 2], path)


def metadata_that_is_a_program(path):
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(Attack()))


def changed_metadata(change):
    def make(path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no process group
            save_dcp({"model": {"weight": torch.ones(3)}, "note": "text"}, checkpoint_id=path)
        metadata = pickle.loads((path / ".metadata").read_bytes())
        change(path, metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return make


def lead_elsewhere(path, metadata):
    shutil.copy(path / "__0_0.distcp", path.parent / "elsewhere.distcp")
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere.distcp"


def lead_along_a_link(path, metadata):
    (path / "__0_0.distcp").rename(path.parent / "elsewhere.distcp")
    (path / "__0_0.distcp").symlink_to(path.parent / "elsewhere.distcp")


def make_a_value_a_program(path, metadata):
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == "note")
    saved = io.BytesIO()
    torch.save(Attack(), saved)
    with (path / "__0_0.distcp").open("ab") as file:
        info.offset = file.tell()
        info.length = file.write(saved.getvalue())


class BeforePython3114(pickle.Pickler):
    """Pickles members of enumerations as Python before 3.11.4 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


class TakesAnAttribute:
    def __reduce__(self):
        return getattr, (Metadata, "__init__")


def test_metadata_of_an_older_python_are_read_and_only_their_enumerations(tmp_path):
    changed_metadata(lambda *_: None)(tmp_path / "saved")
    place = tmp_path / "saved" / ".metadata"
    metadata, text = pickle.loads(place.read_bytes()), io.BytesIO()
    BeforePython3114(text).dump(metadata)
    assert b"getattr" in text.getvalue()
    place.write_bytes(text.getvalue())
    assert convert_worker.read_directory(tmp_path / "saved")["model"]["weight"].tolist() == [1, 1, 1]
    place.write_bytes(pickle.dumps(TakesAnAttribute()))
    with pytest.raises(pickle.UnpicklingError, match=r"GLOBAL builtins\.getattr"):
        convert_worker.read_directory(tmp_path / "saved")


def make_it_giant(path, metadata):
    entry = metadata.state_dict_metadata["model.weight"]
    entry.size = torch.Size([2**42])


STRANGERS = {
    "a program": (
        a_program,
        r"something else than tensors and plain data \([\w.]*system\); nothing of it was executed",
    ),
    "a bare pickle": (a_bare_pickle, "nothing of it was executed"),
    "a giant": (a_giant, "it asks for more memory than a file of its size can need"),
    "a bomb": (a_bomb, "record size .* does not match"),
    "no file of torch": (no_file_of_torch, "it is no file that torch.save has written"),
    "no states": (no_states, "it holds a list, no dictionary of states"),
    "metadata that are a program": (metadata_that_is_a_program, "nothing of it was executed"),
    "a value that is a program": (changed_metadata(make_a_value_a_program), "nothing of it was executed"),
    "a name that leads elsewhere": (changed_metadata(lead_elsewhere), "'../elsewhere.distcp', which is no plain file"),
    "a link": (changed_metadata(lead_along_a_link), "'__0_0.distcp', which is no plain file"),
    "a giant in the metadata": (changed_metadata(make_it_giant), "it asks for more memory than a file of its size"),
}


ALONE = {"a program"}  # the others too in `make prove`; and all of them below, in one process


@pytest.mark.parametrize(
    "name", [name if name in ALONE else pytest.param(name, marks=pytest.mark.prove) for name in STRANGERS]
)
def test_what_a_stranger_has_made_is_refused_in_one_line_and_not_executed(tmp_path, monkeypatch, capsys, name):
    make, message = STRANGERS[name]
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "strange")
    before = sorted(entry.name for entry in tmp_path.iterdir())
    assert convert("strange", "mine", "--to", "samestep", "--timeout", "60") == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("samestep: error: cannot convert strange: ")
    assert shown.err.count("\n") == 1
    assert re.search(message, shown.err), shown.err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


ONE_FOR_ALL = """
import json, sys
from pathlib import Path
from samestep.errors import CheckpointError
from samestep.checkpoints import convert_worker
convert_worker.set_limits(Path(sys.argv[1]), 100)
for path in sys.argv[1:]:
    request = {"source": path, "into": path + ".into", "step": 0, "epoch": 0, "kinds": {}}
    print(json.dumps(convert_worker.handle_request(request)))
"""


def test_one_process_reads_all_of_them_and_executes_none(tmp_path):
    paths = []
    for number, (make, _) in enumerate(STRANGERS.values()):
        (tmp_path / str(number)).mkdir()
        paths.append(tmp_path / str(number) / "strange")
        make(paths[-1])
    (tmp_path / "script.py").write_text(ONE_FOR_ALL)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), *map(str, paths)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    for (name, (_, message)), one in zip(STRANGERS.items(), told, strict=True):
        assert re.search(message, one["error"]), name
        assert "\n" not in one["error"]
        assert len(one["error"]) < 400
    assert not list(tmp_path.rglob("executed"))


def test_reading_that_takes_too_long_is_ended(run, tmp_path, capsys):
    to_torch(run / NEWEST, tmp_path / "model.pt")
    assert convert(tmp_path / "model.pt", tmp_path / "back", "--timeout", "0.01") == 1
    assert "reading took more than 0.01 s" in capsys.readouterr().err


# --- mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere", "x.pt"], 2, "nowhere is not there"),
        (["nowhere", "exists.pt"], 2, "nowhere is not there, and exists.pt is: give what is converted first"),
        (["run", "exists.pt"], 2, "exists.pt exists; nothing is written over"),
        (["run", "x", "--to", "samestep"], 2, "has the format samestep already: give --to pt or --to dcp"),
        (["run", "x.pt", "--kind", "a=b"], 2, "--kind is for files that do not tell"),
        (["model.pt", "x", "--kind", "optimizer"], 2, "give NAME=CLASS"),
        (["model.pt", "x", "--step", "-1"], 2, "0 or more"),
        (["run", "x.pt", "--json", "f"], 2, "convert takes no --json"),
        (["run", "model.pt/x.pt"], 2, "model.pt/x.pt cannot be written: model.pt is a file, not a directory"),
        (["damaged", "x.pt"], 1, "tensors.safetensors has other bytes"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(run, tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "run")
    shutil.copytree(run, "damaged")
    payload = tmp_path / "damaged" / NEWEST / PAYLOAD
    payload.write_bytes(payload.read_bytes()[:-1] + b"?")
    (tmp_path / "exists.pt").touch()
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
    before = sorted(entry.name for entry in tmp_path.iterdir())
    assert convert(*arguments) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("samestep: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"nobody": "torch.optim.SGD"}, "--kind nobody: it holds model, optimizer"),
        ({"optimizer": "torch.optim.SGD"}, "the shape of its parameter 0 cannot be told from its state"),
    ],
)
def test_a_kind_that_cannot_be_is_refused(kinds, message):
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=message):
        import_states({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kinds)


def test_two_tensors_that_would_have_one_name_are_refused():
    with pytest.raises(CheckpointError, match="two of its tensors have one name"):
        import_states({"model": {"a._orig_mod.b": torch.ones(1), "a.b": torch.ones(1)}}, {})


def test_an_entry_of_ours_that_does_not_fit_the_rest_is_refused(run, tmp_path):
    to_torch(run / NEWEST, tmp_path / "model.pt")
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    del content["model"]["0.weight"]
    torch.save(content, tmp_path / "changed.pt")
    with pytest.raises(CheckpointError, match="its entry 'samestep' does not fit the rest"):
        back_here(tmp_path / "changed.pt", tmp_path / "back")
