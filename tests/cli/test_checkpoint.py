"""`samestep checkpoint` as a user meets it: what lies there, whether it is right, and errors of one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.checkpoints.integrity import layout, payloads, read_manifest
from samestep.checkpoints.manifest import MANIFEST, to_text
from samestep.cli import main

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoints"))
from saved import a_model, train

STEPS = ["step-00000001", "step-00000002", "step-00000003"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "run"
    train(path)
    return path


@pytest.fixture
def run(saved, tmp_path):
    """A copy to damage."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def flip(path, place=-1):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_list_shows_every_step_and_whether_it_is_intact(saved, capsys):
    assert main(["checkpoint", "list", str(saved)]) == 0
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "step-" in line]
    assert [row[0].strip() for row in rows] == STEPS
    assert [[cell.strip() for cell in row[2:5]] for row in rows] == [["1", "0", "1"], ["2", "0", "1"], ["3", "0", "1"]]
    assert all(row[5].strip().endswith(" kB") and row[6].strip() == "yes" for row in rows)


def test_list_sees_a_file_cut_short_at_once_and_a_flipped_bit_with_digests(run, capsys):
    flip(run / STEPS[1] / "tensors.safetensors")
    assert main(["checkpoint", "list", str(run)]) == 0
    assert main(["checkpoint", "list", str(run), "--digests"]) == 1
    assert "no: tensors.safetensors has other bytes than those whose SHA-256" in capsys.readouterr().out
    with (run / STEPS[0] / "tensors.safetensors").open("ab") as file:
        file.write(b"x")
    assert main(["checkpoint", "list", str(run)]) == 1
    assert "instead of" in capsys.readouterr().out


def test_list_tells_what_earlier_runs_have_quarantine(run, capsys):
    (run / STEPS[0]).rename(run / f"{STEPS[0]}.bad")
    assert main(["checkpoint", "list", str(run)]) == 0
    assert f"damaged or of another run: {STEPS[0]}.bad" in capsys.readouterr().out


def test_show_tells_objects_position_versions_and_tensors(saved, capsys):
    assert main(["checkpoint", "show", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert STEPS[2] in shown.splitlines()[0]
    assert "step 3, 0 epochs finished, 1 rank" in shown
    assert "torch 2." in shown
    row = next(line for line in shown.splitlines() if "AdamW" in line).split("│")
    assert row[-2].strip() == "443"  # 5*40+40 + 40+40 + 40*3+3
    assert "data: epoch 0, 12 of 16 samples used, seed 0" in shown
    assert "weight  float32 [40, 5]  800 B" in shown
    assert "exp_avg  float32 [40]  160 B" in shown


def test_show_folds_what_is_alike_unless_all_is_asked_for(saved, capsys):
    main(["checkpoint", "show", str(saved / STEPS[0])])
    short = capsys.readouterr().out
    main(["checkpoint", "show", str(saved / STEPS[0]), "--all"])
    whole = capsys.readouterr().out
    assert "1, 2, … 3  3 alike" in short or "1 … 3  3 alike" in short
    assert "alike" not in whole
    assert whole.count("exp_avg_sq") == 6


def test_verify_says_that_every_sample_was_used_once(tmp_path, capsys):
    train(tmp_path / "run", steps=8, keep=1)
    assert main(["checkpoint", "verify", str(tmp_path / "run"), "--json", str(tmp_path / "told.json")]) == 0
    shown = capsys.readouterr().out
    assert "every byte as saved" in shown
    assert "data: every sample of 2 epochs exactly once" in shown
    assert shown.splitlines()[-1] == "1 checkpoint: all as saved"
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["ok"] is True
    assert told["checkpoints"][0]["ledgers"]["data"]["ok"] is True


def test_verify_names_the_file_and_the_tensor_that_are_damaged(run, tmp_path, capsys):
    header, sizes = layout(payloads(read_manifest(run / STEPS[2]))["tensors.safetensors"])
    before = list(sizes)[: list(sizes).index("optimizer/state/4/exp_avg")]
    flip(run / STEPS[2] / "tensors.safetensors", len(header) + sum(sizes[name] for name in before))
    assert main(["checkpoint", "verify", str(run), "--json", str(tmp_path / "told.json")]) == 1
    shown = capsys.readouterr().out
    assert f"{STEPS[2]}: damaged: tensors.safetensors has other bytes" in shown
    assert "damaged: optimizer/state/4/exp_avg" in shown
    assert shown.splitlines()[-1] == "3 checkpoints: 1 not right"
    row = json.loads((tmp_path / "told.json").read_text())["checkpoints"][2]
    assert (row["file"], row["tensors"]) == ("tensors.safetensors", ["optimizer/state/4/exp_avg"])
    assert main(["checkpoint", "verify", str(run / STEPS[1])]) == 0


def test_verify_says_which_samples_were_lost(run, capsys):

    manifest = read_manifest(run / STEPS[2])
    state = manifest.state["data"]["dict"]
    state["cursor"] = 16  # a run that jumped over four samples, and sealed what it did
    (run / STEPS[2] / MANIFEST).write_text(to_text(replace(manifest, state={**manifest.state})))
    assert main(["checkpoint", "verify", str(run / STEPS[2])]) == 1
    assert "4 samples missing" in capsys.readouterr().out


def test_a_checkpoint_without_a_ledger_is_no_error(run, capsys):

    manifest = read_manifest(run / STEPS[2])
    manifest.state["data"]["dict"].pop("ledger", None)
    (run / STEPS[2] / MANIFEST).write_text(to_text(replace(manifest)))
    assert main(["checkpoint", "verify", str(run / STEPS[2])]) == 0
    assert "data: no ledger: saved before it was kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 10**18, "cursor": 10**18},
        {"samples": -1},
        {"samples": "many"},
        {"samples": 2**70, "epoch": 2**70},
        {"seed": -(2**70)},
        {"epoch": 2**60},
        {"ledger": 3},
        {"ledger": {"dict": {"version": 1, "begins": 7, "digest": "zz", "segments": [[]]}}},
    ],
)
def test_numbers_that_no_run_has_written_are_not_right_and_cost_no_time(run, capsys, changes):

    manifest = read_manifest(run / STEPS[2])
    manifest.state["data"]["dict"].update(changes)
    (run / STEPS[2] / MANIFEST).write_text(to_text(replace(manifest)))
    assert main(["checkpoint", "verify", str(run / STEPS[2])]) == 1
    assert main(["checkpoint", "show", str(run / STEPS[2])]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    assert "1 checkpoint: 1 not right" in shown.out


def test_show_tells_virtual_ranks_and_where_nothing_says_how_many_ranks_there_were(run, tmp_path, capsys):
    import samestep

    with samestep.world(device="cpu", virtual_ranks=2) as world:
        model = samestep.replicate(a_model(), world, batchnorm="local")
        samestep.checkpoint(tmp_path / "virtual", world, model=model).save()
    for path, told in ((run, "1 rank"), (tmp_path / "virtual", "1 rank, virtual ranks: 2")):
        assert main(["checkpoint", "show", str(path), "--json", str(tmp_path / "told")]) == 0
        assert capsys.readouterr().out.splitlines()[1].endswith(f" finished, {told}")
        assert json.loads((tmp_path / "told").read_text())["virtual_ranks"] == (2 if "virtual" in told else None)
    manifest = read_manifest(run / STEPS[2])
    (run / STEPS[2] / MANIFEST).write_text(to_text(replace(manifest, world_size=0)))
    assert main(["checkpoint", "show", str(run)]) == 0
    assert "ranks unknown" in capsys.readouterr().out.splitlines()[1]


def test_names_from_a_file_do_not_steer_the_terminal(run, capsys):

    manifest = read_manifest(run / STEPS[2])
    state = {"\x1b[31mred[bold]": 3, **manifest.state}
    (run / STEPS[2] / MANIFEST).write_text(to_text(replace(manifest, state=state, torch="\x1b]0;title\x07")))
    main(["checkpoint", "show", str(run / STEPS[2])])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"\x1b[31mred[bold]" in shown


@pytest.mark.parametrize("action", ["list", "show", "verify", "--help"])
def test_nothing_takes_torch_but_what_needs_it(saved, action):
    code = (
        "import sys; from samestep.cli import main\n"
        "try: main(['checkpoint', *sys.argv[1:]])\nexcept SystemExit: pass\n"
        "print({'torch', 'safetensors'} & set(sys.modules), file=sys.stderr)"
    )
    arguments = [action] if action == "--help" else [action, str(saved)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"
    assert done.stdout


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["checkpoint", "--help"])
    assert "samestep checkpoint verify runs/digits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: ACTION, PATH"),
        (["list"], "required: PATH"),
        (["lsit", "x"], "invalid choice: 'lsit'"),
        (["list", "nowhere"], "nowhere cannot be looked at: there is no such directory"),
        (["verify", "."], "there is no checkpoint in"),
        (["show", "step-00000007"], "step-00000007 is not there, or not a folder"),
        (["list", ".", "elsewhere"], "list takes no second path"),
        (["verify", ".", "--to", "pt"], "verify takes no --to"),
        (["convert", "."], "convert needs two paths"),
        (["convert", ".", "x.pt", "--timeout", "nan"], "argument --timeout: 'nan' is not a number of seconds"),
        (["convert", ".", "x.pt", "--timeout", "0"], "argument --timeout: '0' leaves no time"),
        (["convert", ".", "x.pt", "--step", "-1"], "argument --step: '-1' is not a number of steps; give 0 or more"),
        (["verify", ".", "--jsn", "x"], "unknown option --jsn: did you mean --json?"),
    ],
)
def test_a_usage_error_is_one_line_and_code_2(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("samestep: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


def test_a_directory_where_all_is_set_aside_is_not_right(run, capsys):
    for step in STEPS:
        (run / step).rename(run / f"{step}.bad")
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert main(["checkpoint", "show", str(run)]) == 1
    assert "nothing whole is left" in capsys.readouterr().err


def test_a_live_run_may_delete_what_is_looked_at(run):
    from samestep.checkpoints.inspection import inspect, list_checkpoints

    folders = list_checkpoints(run)
    shutil.rmtree(folders[0])
    assert inspect(folders[0], digests=True) is None
    assert inspect(folders[1], digests=True).is_ok
