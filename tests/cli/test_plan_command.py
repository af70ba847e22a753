"""`samestep plan` as a person uses it: with a profile, a cluster file, and mistakes in either."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from samestep.cli import main as run_command
from samestep.cli.plan import main
from samestep.errors import UsageError
from samestep.launch.cpus import Cores
from samestep.network.cluster import parse
from samestep.pipelines.layers import Layer
from samestep.planning import measure_cluster
from samestep.planning import profile_script as profiling
from samestep.planning.observer import FEWEST
from samestep.planning.profile import BatchTime, Gradient, Profile
from samestep.planning.settings import load

CLUSTER = """
[nodes]
count = 4
devices = 4
memory = "80 GB"
[links]
inside = { latency = "2 us", bandwidth = "100 GB/s" }
between = { latency = "5 us", bandwidth = "100 Gbit/s" }
adding = "50 GB/s"
"""
LAYERS = 6


def layers(samples: int) -> tuple[Layer, ...]:
    part = samples / 64
    return tuple(
        Layer(str(n), 0.001 + 0.004 * part, 0.004 * part, 0.004 * part, 1e5 * part, 1e6 * part, 4e6)
        for n in range(LAYERS)
    )


def profile(**changes: object) -> Profile:
    sizes = {size: layers(size) for size in (16, 32, 64)}
    told = {
        "script": "train.py",
        "machine": "cpu, 1 thread",
        "torch": "2.13.0",
        "batch": 64,
        "steps": 10,
        "data_s": 0.001,
        "forward_s": 0.03,
        "backward_s": 0.048,
        "optimizer_s": 0.001,
        "other_s": 0.0,
        "step_low_s": 0.079,
        "step_high_s": 0.081,
        "gradients": tuple(Gradient(f"{n}.weight", 4_000_000, 0.008 * (LAYERS - n)) for n in reversed(range(LAYERS))),
        "parameter_bytes": 24_000_000,
        "buffer_bytes": 0,
        "optimizer_bytes": 48_000_000,
        "activation_bytes": 6_000_000,
        "sizes": tuple(
            BatchTime(size, sum(one.forward for one in each), sum(one.inputs + one.weights for one in each))
            for size, each in sizes.items()
        ),
        "layers": sizes,
    }
    return Profile(**(told | changes))  # type: ignore[arg-type]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    profile().save(tmp_path / "profile.json")
    return tmp_path / "profile.json", tmp_path / "cluster.toml"


def plan(*arguments: object) -> int:
    return main([str(each) for each in arguments])


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with every file that a plan writes, and what it prints."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "cluster.toml").write_text(CLUSTER)
    profile().save(folder / "profile.json")
    given = ["--profile", folder / "profile.json", "--cluster", folder / "cluster.toml"]
    picture = ["--picture", folder / "plan.html"] if find_spec("plotly") else []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert plan(*given, "--json", folder / "plan.json", "--apply", folder / "chosen.toml", *picture) == 0
    return folder, printed.getvalue()


def test_a_plan_is_a_table_sentences_and_what_to_do_next(planned) -> None:
    _, said = planned
    assert "train.py: a step of 64 samples takes 80 ms on cpu, 1 thread (10 steps)" in said
    assert "cluster: 4 hosts of 4 devices, switch of 4 ports" in said
    rows = [line.split()[0] for line in said.splitlines() if line.strip()[:1].isdecimal() and "%" in line]
    assert rows[:5] == ["1", "2", "4", "8", "16"]
    for begin in ("Fastest: ", "  all-reduce: ", "  memory: ", "Next: ", "Compressing gradients to 8 bits "):
        assert any(line.startswith(begin) for line in said.splitlines()), begin


def test_every_number_is_in_the_json_and_the_parts_add_up(planned) -> None:
    told = json.loads((planned[0] / "plan.json").read_text())
    assert [point["ranks"] for point in told["points"]] == [1, 2, 4, 8, 16]
    assert told["best"]["seconds"] == pytest.approx(sum(told["best"]["parts"].values()))
    assert told["alone_s"] == pytest.approx(0.08)


def test_the_settings_are_those_that_run_takes(planned) -> None:
    chosen = load(planned[0] / "chosen.toml")
    assert chosen.processes == 4
    assert chosen.buckets is not None
    assert (planned[0] / "chosen.toml").read_text().startswith("# train.py on 4 hosts of 4 devices")


def test_ranks_that_do_not_fill_their_last_host_are_started_with_slots(files, tmp_path, capsys) -> None:
    profile(layers={}, uncut="its forward cannot be followed").save(tmp_path / "whole.json")
    given = ("--profile", tmp_path / "whole.json", "--cluster", files[1], "--scale-batch")
    assert plan(*given, "--ranks", 7, "--apply", tmp_path / "chosen.toml") == 0
    assert load(tmp_path / "chosen.toml").processes is None  # 4 on each of 2 hosts would be 8
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"samestep run --settings {tmp_path / 'chosen.toml'} --hosts …:4,…:3 … starts it so"


@pytest.mark.prove
def test_the_settings_are_for_the_script_as_it_is_where_a_pipeline_would_be_faster(files, tmp_path, capsys) -> None:
    slow = CLUSTER.replace('bandwidth = "100 Gbit/s"', 'bandwidth = "100 Mbit/s"')
    slow = re.sub(r"inside = .*", 'inside = { latency = "1 ms", bandwidth = "1 Gbit/s" }', slow)
    (tmp_path / "slow.toml").write_text(slow)
    assert plan("--profile", files[0], "--cluster", tmp_path / "slow.toml", "--apply", tmp_path / "chosen.toml") == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert re.search(
        r"starts (1 process|\d replicas), .* a step: \d+ stages.* take samestep.pipeline in the script", said
    )
    assert "stages" not in (tmp_path / "chosen.toml").read_text()


def test_a_model_that_fits_nowhere_says_by_how_much(files, tmp_path, capsys) -> None:
    (tmp_path / "small.toml").write_text(CLUSTER.replace("80 GB", "10 MB"))
    profile(layers={}, uncut="its forward cannot be followed").save(tmp_path / "whole.json")
    assert plan("--profile", tmp_path / "whole.json", "--cluster", tmp_path / "small.toml") == 1
    said = capsys.readouterr().out
    assert "Nothing fits 16 ranks." in said
    assert "a device needs 96.4 MB, and has 10 MB: 86.4 MB too little" in said
    assert "its forward cannot be followed" in said


@pytest.mark.prove
def test_a_batch_that_grows_is_said_to_be_larger(files, capsys) -> None:
    assert plan("--profile", files[0], "--cluster", files[1], "--scale-batch", "--ranks", 8) == 0
    assert "a step of 512 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no script is given: `samestep plan train.py`"),
        (("nowhere.py",), "there is no script nowhere.py"),
        (("--cluster", "{cluster}", "--profile", "nowhere.json"), "nowhere.json: no such file"),
        (("--cluster", "nowhere.toml", "--profile", "{profile}"), "nowhere.toml: no such file"),
        (("--cluster", "{cluster}", "--profile", "{profile}", "train.py"), "leave one of them out"),
        (("--cluster", "{cluster}", "--profile", "{profile}", "--ranks", "17"), "the cluster has 16: give 1 to that"),
        (
            ("--cluster", "{cluster}", "--profile", "{profile}", "--ranks", "0"),
            "'0' is not a number of processes; give 1 or more",
        ),
        (
            ("--steps", str(FEWEST - 1), "train.py"),
            f"'{FEWEST - 1}' is not a number of steps; give {FEWEST} or more: their median is taken",
        ),
        (("--cluster", "{cluster}", "--profile", "{profile}", "--json", "no/such/plan.json"), "make it first"),
        (("--cluster", "{cluster}", "--profile", "{cluster}"), "is not valid JSON"),
        (("--cluster", "{profile}", "--profile", "{profile}"), "is not valid TOML"),
    ],
)
def test_a_mistake_is_one_line(files, monkeypatch, tmp_path, arguments, said) -> None:
    monkeypatch.chdir(tmp_path)
    given = [each.format(profile=files[0], cluster=files[1]) for each in arguments]
    with pytest.raises(UsageError) as caught:
        plan(*given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_behind_the_script_are_its_own_and_that_is_said(tmp_path, monkeypatch, capsys) -> None:
    given = []

    def fails(program, arguments, **options):
        given.append((program, arguments, options["steps"]))
        raise UsageError("train.py fails by itself")

    monkeypatch.setattr(profiling, "profile_script", fails)
    monkeypatch.setattr(measure_cluster, "local_cluster", lambda: parse("[nodes]\ncount = 1", "this machine"))
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert run_command(["plan", "train.py", "--cluster=mine.toml"]) == 2
    said = capsys.readouterr().err
    assert "note: --cluster=mine.toml comes after train.py and is passed to it" in said
    assert run_command(["plan", "--steps", "5", "train.py", "--lr", "0.1"]) == 2
    assert given == [("train.py", ["--cluster=mine.toml"], 10), ("train.py", ["--lr", "0.1"], 5)]
    assert "comes after" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--save-profile", "--apply", "--picture", "--json"])
def test_a_file_that_cannot_be_written_is_named_with_its_own_option(files, option) -> None:
    with pytest.raises(UsageError, match=f"^{option} nowhere/file cannot be written: there is no directory nowhere"):
        plan("--profile", files[0], "--cluster", files[1], option, "nowhere/file")


def test_this_machine_has_no_more_ranks_than_its_quota_has_cores(monkeypatch) -> None:
    monkeypatch.setattr(measure_cluster, "visible_gpus", lambda: 0)
    monkeypatch.setattr(measure_cluster, "read_cores", lambda: Cores(usable=tuple(range(64)), machine=64, quota=2.5))
    assert measure_cluster.devices() == 2


@pytest.mark.prove
def test_without_a_cluster_file_the_links_of_this_machine_are_measured(two_ranks, monkeypatch) -> None:
    monkeypatch.setattr(measure_cluster, "devices", lambda: 2)
    monkeypatch.setattr(
        "samestep.launch.functions.spawn.spawn", lambda function, n, *args, progress: two_ranks(function, *args)
    )
    found = measure_cluster.local_cluster()
    assert (found.nodes, found.devices) == (1, 2)
    assert found.shared is not None
    assert found.links.inside.bytes_per_s > 1e6
    monkeypatch.setattr(measure_cluster, "devices", lambda: 1)
    assert measure_cluster.local_cluster().ranks == 1


def test_the_picture_is_a_page_that_needs_no_network(planned) -> None:
    pytest.importorskip("plotly")
    page = (planned[0] / "plan.html").read_text()
    assert "bandwidth of the all-reduce" in page
    assert 'src="http' not in page


@pytest.mark.prove
def test_a_better_order_of_the_ranks_is_proposed(files, tmp_path, capsys) -> None:
    network = '[network]\nkind = "torus"\ndims = [4, 4]\nplacement = "random"\n'
    slow = CLUSTER.replace("count = 4\ndevices = 4", "count = 16").replace("100 Gbit/s", "1 Gbit/s")
    (tmp_path / "torus.toml").write_text(slow + network)
    assert plan("--profile", files[0], "--cluster", tmp_path / "torus.toml", "--scale-batch") == 0
    assert 'placement = "' in capsys.readouterr().out


def test_who_reads_no_further_is_no_failure_to_complain_of(files, tmp_path) -> None:
    words = [sys.executable, "-m", "samestep", "plan", "--profile", files[0], "--cluster", files[1], "--ranks", 1]
    command = [*map(str, words), "--json", str(tmp_path / "plan.json")]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    assert json.loads((tmp_path / "plan.json").read_text())["alone_s"] > 0


def test_help_needs_no_torch() -> None:
    code = "import sys; from samestep.cli import main; main(['plan', '--help'])"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=False)
    assert "samestep run --settings chosen.toml train.py" in done.stdout
    assert "| torch\n" not in done.stderr


DEALT = """
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dataset = TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset, num_replicas=1, rank=0))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
"""


def test_a_batch_of_a_distributed_sampler_is_one_ranks(files, tmp_path, capfd) -> None:
    (tmp_path / "train.py").write_text(DEALT)
    saved = tmp_path / "dealt.json"
    assert plan("--cluster", files[1], "--ranks", 4, "--save-profile", saved, tmp_path / "train.py") == 0
    assert "each process keeps its batch of 16, as DistributedSampler has it" in capfd.readouterr().err
    assert json.loads(saved.read_text())["per_rank"] is True
    samples = []
    for option in ("--scale-batch", "--no-scale-batch"):
        assert plan("--profile", saved, "--cluster", files[1], "--ranks", 4, option, "--json", tmp_path / "p.json") == 0
        points = json.loads((tmp_path / "p.json").read_text())["points"]
        samples.append([one["data"]["samples"] for one in points if "data" in one])
    assert samples == [[32, 64], [16, 16]]
