"""The file that a plan sets a run with."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.errors import UsageError
from samestep.planning.settings import Settings, load


def test_settings_are_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    for one in (Settings(processes=8, buckets=12.5), Settings(buckets=25.0), Settings()):
        file.write_text(one.dumps("train.py on 16 ranks\n42 ms a step"))
        assert load(file) == one


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bucket = 25", "bucket in the file is unknown: did you mean buckets?"),
        ("batch = 25", "batch in the file is unknown: there are processes, buckets"),
        ("processes = 0", "processes is 0: give a whole number, 1 or more"),
        ("processes = 2.5", "processes is 2.5: give a whole number, 1 or more"),
        ("buckets = true", "buckets is True: give a number above 0"),
        ("buckets = inf", "buckets is inf: give a number above 0"),
        pytest.param("buckets = 1" + 400 * "0", ": give a number above 0", id="large"),
        pytest.param("buckets = 1" + 5000 * "0", "its numbers are too long", id="long"),
        ("buckets = nan", "buckets is nan: give a number above 0"),
        ("buckets", "is not valid TOML: "),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(file)
    assert str(caught.value).startswith(f"--settings {file}")
    assert said in str(caught.value)


def test_a_file_that_is_missing_says_who_makes_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file: `samestep plan … --apply"):
        load(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="is a folder"):
        load(tmp_path)
