"""A profile as a file: the same after it was written and read, and refused where it cannot be what it says."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from trainings import training

from samestep.errors import UsageError
from samestep.planning.profile import VERSION, Profile, load, parse


def given(**changed: Any) -> dict[str, Any]:
    """A profile as JSON has it, with other fields; those that are None are left out."""
    told = json.loads(json.dumps({"v": VERSION, **asdict(training())})) | changed
    return {key: value for key, value in told.items() if value is not None or key == "uncut"}


@pytest.mark.parametrize(
    "profile",
    [training(), training(cut=False), replace(training(), data_s=0.1 + 0.2, sizes=(), script="año.py")],
    ids=["cut", "uncut", "odd numbers"],
)
def test_what_is_read_is_what_was_written_to_the_last_bit(tmp_path: Path, profile: Profile) -> None:
    path = tmp_path / "below" / "profile.json"
    profile.save(path)
    assert load(path) == profile
    text = path.read_text(encoding="utf-8")
    load(path).save(path)
    assert path.read_text(encoding="utf-8") == text


def test_a_step_is_the_sum_of_its_parts() -> None:
    profile = training()
    parts = profile.data_s, profile.forward_s, profile.backward_s, profile.optimizer_s, profile.other_s
    assert profile.step_s == sum(parts)


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as refused:
        load(path)
    said = str(refused.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    return said.removeprefix(str(path))


def test_a_file_that_is_not_there_says_what_makes_one(tmp_path: Path) -> None:
    assert "samestep plan --save-profile makes one" in refusal(tmp_path / "profile.json")


def test_a_folder_is_no_profile(tmp_path: Path) -> None:
    assert refusal(tmp_path) == " is a folder: give the file in it"


def test_a_profile_that_is_cut_off_says_in_which_line(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    training().save(path)
    path.write_text(path.read_text(encoding="utf-8")[:300], encoding="utf-8")
    assert "is not valid JSON, or cut off: line 1" in refusal(path)
    path.write_bytes(b"\xff\xfe\x00")
    assert refusal(path) == " cannot be read: it is not a text"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"v": ' + "9" * 5000 + "}"], ids=["deep", "long"])
def test_what_json_itself_cannot_read_is_no_profile(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    assert refusal(path) == ": its numbers are too long, or its lists too deep"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([], "a profile of version None, and this samestep reads 1"),
        (given(v=2), "a profile of version 2, and this samestep reads 1"),
        (given(v=None), "a profile of version None"),
        (given(batch=None), "the profile lacks its batch"),
        (given(bach=64), "bach in the profile is unknown: did you mean batch?"),
        (given(batch=0), "batch is 0: give a whole number, 1 or more"),
        (given(batch=6.5), "batch is 6.5: give a whole number, 1 or more"),
        (given(data_s="1 ms"), "data_s is '1 ms': give a number of 0 to 1e+30"),
        (given(other_s=-0.5), "other_s is -0.5"),
        (given(other_s=float("nan")), "other_s is nan"),
        (given(step_high_s=float("inf")), "step_high_s is inf"),
        (given(data_s=10**400), "data_s is 1000"),
        (given(script=7), "script is 7: give a text"),
        (given(per_rank=1), "per_rank is 1: give true or false"),
        (given(gradients=[]), "a profile without gradients"),
        (given(gradients={}), "gradients is {}: give a list"),
        (given(gradients=[{"name": "w", "nbytes": 4}]), "gradients[0] lacks its ready_s"),
        (given(gradients=[{"name": "w", "nbytes": 4, "ready_s": -1.0}]), "gradients[0].ready_s is -1.0"),
        (given(sizes=[8]), "sizes[0] is 8: give a section with the keys samples, forward_s, backward_s"),
        (given(layers=[]), "layers is []: give a list of layers for each size of a micro-batch"),
        (given(layers={"many": []}), "micro-batches of 'many' samples"),
        (given(layers={"0": []}), "micro-batches of '0' samples"),
        (given(layers={"9" * 5000: []}), "samples: give a whole number above 0"),
        (given(layers={"8": [{"name": "0", "forward": 1.0}]}), "layers[8][0] lacks its inputs"),
        (given(layers={"8": [{"name": "0", "forward": -1.0, "inputs": 0.0}]}), "layers[8][0].forward is -1.0"),
        (given(layers={"8": [], "16": [{"name": "0", "forward": 1.0, "inputs": 0.0}]}), "other layers for each size"),
        (given(layers={"8": []}), "other layers for each size of a micro-batch, or none"),
        (given(sizes=[{"samples": 8, "forward_s": 1.0, "backward_s": 1.0}] * 2), "sizes of [8, 8] samples"),
        (given(sizes=[{"samples": 0, "forward_s": 1.0, "backward_s": 1.0}]), "each must be 1 or more"),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(told: Any, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(told)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_step_of_no_time_is_refused_for_nothing_can_be_said_of_its_parts() -> None:
    nothing = dict.fromkeys(("data_s", "forward_s", "backward_s", "optimizer_s", "other_s"), 0.0)
    with pytest.raises(UsageError, match="a step that takes no time"):
        parse(given(**nothing))


def test_whole_numbers_of_seconds_are_numbers() -> None:
    assert parse(given(data_s=1)).data_s == 1
