"""Tensors that are cut among the ranks: each rank writes its own parts, and reads those that its next model wants."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import cut
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import samestep
from samestep.checkpoints import convert, convert_worker, sharded_save
from samestep.checkpoints.inspection import list_checkpoints
from samestep.checkpoints.integrity import layout, payloads, read_manifest, verify
from samestep.checkpoints.reader import read_tensors
from samestep.cli import main
from samestep.errors import CheckpointError
from samestep.testing import assert_same_bits


@pytest.fixture(autouse=True)
def _alone():
    """Ends the group of one that a mesh in this process has asked for."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


WIDE = {"HSDP", "FSDP and TP", "blocks"}  # need a mesh of two axes


REPRESENTATIVES = {"FSDP", "blocks"}  # one axis, and two axes; the rest in `make prove`


@pytest.mark.parametrize(
    "kind", [kind if kind in REPRESENTATIVES else pytest.param(kind, marks=pytest.mark.prove) for kind in cut.KINDS]
)
def test_what_was_cut_in_one_way_loads_in_any_other(two_ranks, three_ranks, four_ranks, tmp_path, kind):
    saved = (four_ranks if kind in WIDE else two_ranks)(cut.save, kind, tmp_path / "run")
    for one in saved:
        assert_same_bits(one, saved[0])
    others = [("FSDP", three_ranks), ("columns", three_ranks), ("plain", two_ranks)]
    others += [("blocks", four_ranks), (kind, four_ranks)] if kind in WIDE else [(kind, two_ranks)]
    for other, ranks in others:
        for tensors, step, is_cut_alike in ranks(cut.load, other, tmp_path / "run"):
            assert_same_bits(tensors, saved[0])
            assert (step, is_cut_alike) == (cut.STEPS, True), other
    assert_same_bits(cut.load("FSDP", tmp_path / "run")[0], saved[0])
    assert_same_bits(cut.load("plain", tmp_path / "run")[0], saved[0])


@pytest.mark.parametrize("kind", ["plain", "FSDP"])
def test_what_one_process_saved_loads_into_a_model_that_is_cut(two_ranks, four_ranks, tmp_path, kind):
    saved = cut.save(kind, tmp_path / "run")
    (folder,) = list_checkpoints(tmp_path / "run")
    assert sorted(entry.name for entry in folder.iterdir()) == ["manifest.json", "tensors.safetensors"]
    assert read_manifest(folder).parts == {}
    for other, ranks in [("FSDP", two_ranks), ("FSDP and TP", four_ranks)]:
        for tensors, step, is_cut_alike in ranks(cut.load, other, tmp_path / "run"):
            assert_same_bits(tensors, saved)
            assert (step, is_cut_alike) == (cut.STEPS, True)


def test_each_rank_writes_what_it_holds_and_the_manifest_says_of_what(two_ranks, tmp_path):
    saved = two_ranks(cut.save, "rows", tmp_path / "run")[0]
    (folder,) = list_checkpoints(tmp_path / "run")
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "manifest.json",
        "tensors-00001.safetensors",
        "tensors.safetensors",
    ]
    first, second = load_file(folder / "tensors.safetensors"), load_file(folder / "tensors-00001.safetensors")
    assert_same_bits([first["model/0.weight"], second["model/0.weight"]], [saved[0][:4], saved[0][4:]])
    assert set(second) < set(first)
    assert "model/seen" not in second
    manifest = verify(folder)
    digests = [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in (saved[0][:4], saved[0][4:])]
    assert manifest.tensors["model/0.weight"] == {"dtype": "float32", "shape": [7, 5], "sha256": digests}
    assert manifest.parts["model/0.weight"] == {"bounds": [[0, 4, 7], [0, 5]], "ranks": [0, 1]}
    assert "model/seen" not in manifest.parts
    assert_same_bits(read_tensors(folder, manifest)["model/0.weight"], saved[0])


def test_copies_are_written_by_one_rank_each_and_about_as_much_by_every_one(two_ranks, four_ranks, tmp_path):
    two_ranks(cut.save, "everywhere", tmp_path / "copies")
    (folder,) = list_checkpoints(tmp_path / "copies")
    writers = [grid["ranks"] for grid in verify(folder).parts.values()]
    assert writers == [[1]] * len(writers) != []  # what rank 0 writes of them is whole
    four_ranks(cut.save, "HSDP", tmp_path / "halves")
    (folder,) = list_checkpoints(tmp_path / "halves")
    files = [load_file(path) for path in folder.glob("tensors*")]
    sizes = [sum(one.nbytes for name, one in file.items() if "extra" not in name) for file in files]
    assert len(sizes) == 4
    assert max(sizes) < 2 * min(sizes)


# --- what is rare -----------------------------------------------------------------------------------


ODD_TYPES = [torch.complex128, torch.complex64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint8]


def odd_parts(path, *, zero):
    """Tied weights of which a rank has nothing; no elements; a scalar; types that files store in their own way."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with samestep.world() as world:
        mesh = init_device_mesh("cpu", (world.size,))

        def put(values, place):
            values = torch.zeros_like(values) if zero else values
            return distribute_tensor(values, mesh, [place], src_data_rank=None)  # gloo does not know all types

        odd = nn.Module()
        odd.one = nn.Parameter(put(torch.arange(1.0, 4.0).view(1, 3), Shard(0)))
        odd.tied = odd.one
        odd.empty = nn.Parameter(put(torch.empty(0, 3), Shard(1)))
        odd.scalar = nn.Parameter(put(torch.tensor(7.0), Replicate()))
        for dtype in ODD_TYPES:
            odd.register_buffer(f"of_{str(dtype)[6:]}", put(torch.arange(10).view(5, 2).to(dtype), Shard(0)))
        state = samestep.checkpoint(path, world, odd=odd)
        if not state.resumed:
            state.save()
        parts = {name: part.to_local().contiguous().reshape(-1) for name, part in odd.state_dict().items()}
        return {name: part.view(torch.uint8).tolist() for name, part in parts.items()}


def test_tied_empty_scalar_and_unusual_tensors_come_back(two_ranks, three_ranks, tmp_path):
    saved = two_ranks(odd_saved, tmp_path / "run")
    manifest = verify(list_checkpoints(tmp_path / "run")[0])
    assert "odd/tied" not in manifest.tensors
    together = joined(saved)
    assert together["one"] == together["tied"] == torch.arange(1.0, 4.0).view(torch.uint8).tolist()
    assert set(together["scalar"]) == {0, 0xE0, 0x40}  # 7.0
    for ranks in (two_ranks, three_ranks):
        loaded = joined(ranks(odd_loaded, tmp_path / "run"))
        assert {**loaded, "scalar": together["scalar"]} == together
        assert set(loaded["scalar"]) == {0, 0xE0, 0x40}


def odd_saved(path):
    return odd_parts(path, zero=False)


def odd_loaded(path):
    return odd_parts(path, zero=True)


def joined(parts):
    """The bytes of all ranks, one behind the other: all is cut by rows."""
    return {name: [byte for part in parts for byte in part[name]] for name in parts[0]}


def save_again(path):
    """Several saves beside the training, of one cut and then of another."""
    with samestep.world() as world:
        net = cut.make("FSDP", world)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        state = samestep.checkpoint(path, world, every=1, keep=9, model=net, optimizer=optimizer)
        for _ in range(4):
            cut.trained(net, optimizer, 1)
            state.commit()
        state.wait()
        return state.step


def test_saves_beside_the_training_follow_one_another(two_ranks, tmp_path):
    assert two_ranks(save_again, tmp_path / "run") == [4, 4]
    folders = list_checkpoints(tmp_path / "run")
    assert [verify(folder).step for folder in folders] == [1, 2, 3, 4]
    assert not [entry for entry in (tmp_path / "run").iterdir() if ".tmp-" in entry.name]
    assert two_ranks(save_again, tmp_path / "run") == [8, 8]


def save_partial(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    with samestep.world() as world:
        holder = nn.Module()
        mesh = init_device_mesh("cpu", (world.size,))
        holder.register_buffer("sum", DTensor.from_local(torch.full((3,), 1.0 + world.rank), mesh, [Partial()]))
        samestep.checkpoint(path, world, holder=holder).save()


def test_a_sum_that_is_not_made_yet_is_made(two_ranks, tmp_path):
    two_ranks(save_partial, tmp_path / "run")
    (folder,) = list_checkpoints(tmp_path / "run")
    assert read_tensors(folder, verify(folder))["holder/sum"].tolist() == [3.0, 3.0, 3.0]


def load_into_another(path):
    """A model of other shapes: nothing may be loaded, on any rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with samestep.world() as world:
        net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Linear(6, 1))
        net.register_buffer("seen", torch.arange(3.0))
        fully_shard(net, mesh=init_device_mesh("cpu", (world.size,)))
        before = [parameter.to_local().clone() for parameter in net.parameters()]
        with pytest.raises(CheckpointError, match=r"nothing was loaded(.|\n)*model\.2\.bias: float32 \[5\] in"):
            samestep.checkpoint(path, world, model=net, optimizer=torch.optim.AdamW(net.parameters()))
        assert_same_bits([parameter.to_local() for parameter in net.parameters()], before)


def test_what_does_not_fit_is_not_loaded_in_part(two_ranks, tmp_path):
    two_ranks(cut.save, "FSDP", tmp_path / "run")
    two_ranks(load_into_another, tmp_path / "run")


# --- faults -----------------------------------------------------------------------------------------


def fill_the_disk(disk):
    """Of three mebibytes rank 1 writes two, a copy, since rank 0 has one to write anyhow; there is room for less."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    with samestep.world() as world:
        big = nn.Module()
        mesh = init_device_mesh("cpu", (world.size,))
        big.copy = nn.Parameter(distribute_tensor(torch.arange(2.0**19), mesh, [Replicate()]))
        big.own = nn.Parameter(torch.arange(2.0**18))
        state = samestep.checkpoint(disk / "run", world, every=1, keep=1, big=big)
        first = state.save()
        said = []
        with pytest.raises(CheckpointError) as caught:
            state.save()
        said.append(str(caught.value))
        state.commit()  # due, and fails beside the training, which goes on
        world.everyone.check_open()
        outcome = state._store._writer.wait()
        said.append(str(outcome.error) if outcome is not None else None)
        left = sorted(entry.name for entry in (disk / "run").iterdir() if "step" in entry.name)
        return str(first), said, left


def test_a_disk_too_full_for_one_ranks_share_costs_that_save_alone(two_ranks, tmp_path, small_disk_of_five):
    told = two_ranks(fill_the_disk, small_disk_of_five)
    _, said, left = told[0]
    where = rf"cannot save {small_disk_of_five}/run/step-.*"
    pattern = rf"{where}: rank 1: disk full at .*: needs 2\.1 MB, free [\d.]+ [kM]B"
    for line in said:
        assert re.search(pattern, line), line
    assert left == ["step-00000000"]
    assert "rank 0 failed: CheckpointError" in told[1][1][0]
    assert "rank 1: disk full" in told[1][1][0]
    verify(list_checkpoints(small_disk_of_five / "run")[0])


def lose_a_folder(path):
    """Rank 1 does not find the folder that rank 0 has made."""

    with samestep.world() as world:
        net = cut.make("FSDP", world)
        state = samestep.checkpoint(path, world, model=net)
        state.save()
        kept = sharded_save.write_shard
        if world.rank == 1:
            sharded_save.write_shard = lambda folder, *rest: kept(folder.parent / "elsewhere", *rest)
        try:
            with pytest.raises(CheckpointError, match=r"rank 1: .*elsewhere is not visible here; all ranks need one"):
                state.save()
        finally:
            sharded_save.write_shard = kept
        state.save()


def test_a_rank_that_does_not_see_the_folder_fails_the_save_on_all(two_ranks, tmp_path):
    two_ranks(lose_a_folder, tmp_path / "run")
    assert len(list_checkpoints(tmp_path / "run")) == 2
    assert not [entry for entry in (tmp_path / "run").iterdir() if ".tmp-" in entry.name]


def fall_silent(path):
    """Rank 1 writes no letter and does not beat, as if it were gone."""
    with samestep.world() as world:
        state = samestep.checkpoint(path, world, model=cut.make("FSDP", world))
        kept = sharded_save.HEARTBEAT_TIMEOUT_S, sharded_save.StoreReports.report
        sharded_save.HEARTBEAT_TIMEOUT_S = 0.3
        if world.rank == 1:
            sharded_save.StoreReports.report = lambda *_: None
        try:
            with pytest.raises(CheckpointError, match=r"rank 1: no heartbeat for 0\.3 s"):
                state.save()
        finally:
            sharded_save.HEARTBEAT_TIMEOUT_S, sharded_save.StoreReports.report = kept
        state.save()


def test_nobody_waits_for_ever_for_a_rank_that_is_gone(two_ranks, tmp_path):
    two_ranks(fall_silent, tmp_path / "run")
    assert len(list_checkpoints(tmp_path / "run")) == 1


# --- damage -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(two_ranks, tmp_path_factory):
    """A run of two ranks with the checkpoints of four steps."""
    folder = tmp_path_factory.mktemp("good")
    two_ranks(save_again, folder)
    return folder


SECOND = "tensors-00001.safetensors"


def flipped(newest):
    data = bytearray((newest / SECOND).read_bytes())
    header, sizes = layout(payloads(read_manifest(newest))[SECOND])
    names = list(sizes)
    data[len(header) + sum(sizes[name] for name in names[: names.index("model/2.weight")])] ^= 1
    (newest / SECOND).write_bytes(data)


def exchanged(newest):
    first, second = (newest / "tensors.safetensors").read_bytes(), (newest / SECOND).read_bytes()
    (newest / "tensors.safetensors").write_bytes(second)
    (newest / SECOND).write_bytes(first)


def missing(newest):
    (newest / SECOND).unlink()


def extra(newest):
    shutil.copy(newest / SECOND, newest / "tensors-00002.safetensors")


def cut_short(newest):
    (newest / SECOND).write_bytes((newest / SECOND).read_bytes()[:-4])


def of_another_step(newest):
    shutil.copy(newest.parent / "step-00000003" / SECOND, newest / SECOND)


@pytest.mark.parametrize(
    ("change", "file", "said"),
    [
        (flipped, SECOND, r"has other bytes .*; damaged: model/2\.weight$"),
        (cut_short, SECOND, r"bytes instead of .*; damaged: "),
        (missing, SECOND, "is missing"),
        (extra, "tensors-00002.safetensors", "is no part of it"),
        (exchanged, "tensors.safetensors", "bytes instead of"),
        (of_another_step, SECOND, "has other bytes"),
    ],
)
def test_damage_of_one_ranks_file_is_told_by_file_and_tensor(good, tmp_path, capsys, change, file, said):
    shutil.copytree(good, tmp_path / "run")
    newest = list_checkpoints(tmp_path / "run")[-1]
    change(newest)
    with pytest.raises(CheckpointError, match=said) as caught:
        verify(newest)
    assert caught.value.file == file
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 1
    shown = capsys.readouterr().out
    assert f"step-00000004: damaged: {str(caught.value)[:30]}" in shown
    assert shown.count("every byte as saved") == 3


def test_the_run_goes_on_from_the_checkpoint_before_a_damaged_one(two_ranks, good, tmp_path):
    shutil.copytree(good, tmp_path / "run")
    flipped(list_checkpoints(tmp_path / "run")[-1])
    assert two_ranks(save_again, tmp_path / "run") == [7, 7]
    assert (tmp_path / "run" / "step-00000004.bad").exists()


# --- from outside -----------------------------------------------------------------------------------


def test_it_is_shown_with_its_files_and_parts(good, tmp_path, capsys):
    told = tmp_path / "told.json"
    assert main(["checkpoint", "show", str(good), "--json", str(told)]) == 0
    shown = capsys.readouterr().out
    assert "in 2 files" in shown
    shown = json.loads(told.read_text())
    assert shown["files"] == ["tensors.safetensors", SECOND]
    assert shown["parts"]["model/0.weight"]["ranks"] == [0, 1]
    assert main(["checkpoint", "list", "--digests", str(good)]) == 0
    assert main(["checkpoint", "verify", str(good)]) == 0


@pytest.mark.parametrize("name", ["out.pt", "exported"])
def test_other_formats_hold_whole_tensors_and_come_back(good, tmp_path, monkeypatch, name):
    monkeypatch.setattr(
        convert, "_run_worker", lambda request, timeout: convert_worker.handle_request(request)
    )  # not in a process of its own
    newest = list_checkpoints(good)[-1]
    expected = read_tensors(newest, read_manifest(newest))
    assert main(["checkpoint", "convert", str(good), str(tmp_path / name)]) == 0
    assert main(["checkpoint", "convert", str(tmp_path / name), str(tmp_path / "back")]) == 0
    (folder,) = list_checkpoints(tmp_path / "back")
    assert_same_bits(read_tensors(folder, verify(folder)), expected)
    if name == "out.pt":
        model = torch.load(tmp_path / name, weights_only=True)["model"]
        assert_same_bits(model["0.weight"], expected["model/0.weight"])
