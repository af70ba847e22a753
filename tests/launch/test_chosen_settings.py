"""`samestep run --settings`: what a plan has chosen reaches ranks and models."""

from __future__ import annotations

import pytest

TRAIN = """
    import gc, samestep, torch
    from torch.nn.parallel import DistributedDataParallel
    with samestep.world() as world:
        model = samestep.replicate(torch.nn.Linear(2, 1), world{given})
        model(torch.ones(1, 2)).sum().backward()
        inner = [one for one in gc.get_objects() if isinstance(one, DistributedDataParallel)]
        print("ranks", world.size, "bytes", *(one.bucket_bytes_cap for one in inner))
"""


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        ((), "", "ranks 2 bytes 3145728"),
        (("-n", 3), ", buckets=1", "ranks 3 bytes 1048576"),  # the command line and the script have the last word
    ],
)
def test_a_run_takes_what_a_plan_has_chosen(folder, options, given, said):
    (folder.path / "chosen.toml").write_text("processes = 2\nbuckets = 3\n")
    done = folder.run(
        "--settings", "chosen.toml", *options, folder.script(TRAIN.format(given=given)), env={"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_a_wrong_file_is_refused_before_anything_starts(folder):
    (folder.path / "chosen.toml").write_text("proceses = 2\n")
    done = folder.run("--settings", "chosen.toml", folder.script(""))
    assert done.returncode == 2
    assert (
        done.stderr
        == "samestep: error: --settings chosen.toml: proceses in the file is unknown: did you mean processes?\n"
    )
    assert not (folder.path / "runs").exists()
