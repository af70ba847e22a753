"""Lines of events: written whole, bounded, and read while they are written; whatever else is in the file is skipped."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from samestep import events
from samestep.events import EventFile, Reader

STEP = {"steps": 1, "seconds": 0.25, "spent": {"data": 0.25}, "spans": [["data", 0, 250000]], "more": 0}
STEP |= {"buckets": [[0, 4096, 10, None, None]], "work": {"samples": 4, "weight": 4.0, "epoch": 0}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "0" / "host" / "rank0.events.jsonl"


def put(path: Path, *lines: tuple[str, int, dict[str, object]]) -> None:
    file = EventFile(path, 0)
    for line in lines:
        file.put(*line)
    file.close()


def test_what_is_written_is_what_is_read(path: Path) -> None:
    put(path, ("step", 1, STEP), ("values", 1, {"values": {"loss": 0.5, "norm": "nan"}}))
    step, values = Reader(path).events()
    assert {name: step[name] for name in STEP} == STEP
    assert (step["v"], step["rank"], step["attempt"], step["kind"], step["step"]) == (1, 0, 0, "step", 1)
    assert values["values"] == {"loss": 0.5, "norm": "nan"}
    assert values["t"] >= step["t"]


def test_others_cannot_read_them(path: Path) -> None:
    put(path, ("step", 1, STEP))
    assert path.stat().st_mode & 0o077 == 0


def test_every_kind_has_exactly_the_fields_that_the_page_names() -> None:
    """A schema that others read changes on purpose: here, in the docs, and with a new version."""
    page = (Path(__file__).parent.parent / "docs" / "events.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (`\w+`(?:, `\w+`)*) \|$", page, re.MULTILINE)
    assert {kind: tuple(re.findall(r"`(\w+)`", fields)) for kind, fields in rows} == {
        kind: tuple(fields) for kind, fields in events.KINDS.items()
    }
    assert f"version of this page: {events.VERSION} |" in page
    assert all(f"`{name}`" in page for name in events.PHASES)


def test_a_reader_goes_on_where_it_was_and_waits_for_the_end_of_a_line(path: Path) -> None:
    put(path, ("step", 1, STEP))
    reader = Reader(path)
    assert [event["step"] for event in reader.events()] == [1]
    line = path.read_bytes().replace(b'"step":1,', b'"step":2,')
    with path.open("ab") as file:
        file.write(line[:50])
        file.flush()
        assert list(reader.events()) == []
        file.write(line[50:] + line[:20])
    assert [event["step"] for event in reader.events()] == [2]
    assert (reader.torn, reader.newer) == (0, None)


def test_a_file_that_is_not_there_yet_has_no_events(path: Path) -> None:
    assert list(Reader(path).events()) == []


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"v":1}',
        b'{"v":1,"t":"x","rank":0,"attempt":0,"kind":"end","step":1,"error":null}',
        b'{"v":1,"t":1,"rank":0,"attempt":0,"kind":"step","step":1,"steps":1}',
        b'{"v":1,"t":1,"rank":0,"attempt":0,"kind":"values","step":1,"values":{"loss":"<b>"}}',
        b'{"v":1,"t":1,"rank":0,"attempt":0,"kind":"hang","step":1,"text":"x","ranks":[-1]}',
        b"[" * 100_000,
        b'{"v":1,"t":NaN,"rank":0,"attempt":0,"kind":"end","step":1,"error":null}',
        b'{"v":1,"t":1' + b"0" * 400 + b',"rank":0,"attempt":0,"kind":"end","step":1,"error":null}',
        b'{"v":1,"t":1,"rank":0,"attempt":0,"kind":"values","step":1,"values":{"loss":Infinity}}',
    ],
)
def test_a_line_that_is_no_event_is_counted_and_skipped(path: Path, line: bytes) -> None:
    put(path, ("step", 1, STEP))
    path.write_bytes(line + b"\n" + path.read_bytes())
    reader = Reader(path)
    assert [event["step"] for event in reader.events()] == [1]
    assert reader.torn == 1


def test_lines_of_a_later_version_are_skipped_and_it_is_known(path: Path) -> None:
    put(path, ("step", 1, STEP))
    path.write_bytes(b'{"v":2,"what":"ever"}\n' + path.read_bytes())
    reader = Reader(path)
    assert [event["step"] for event in reader.events()] == [1]
    assert (reader.torn, reader.newer) == (0, 2)


def test_a_line_without_end_does_not_fill_the_memory(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * (3 * events.MAX_LINE_BYTES))
    reader = Reader(path)
    assert list(reader.events()) == []
    assert reader.torn >= 1
    assert len(reader._rest) <= events.MAX_LINE_BYTES


def test_more_lines_than_fit_into_memory_are_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_WAITING", 3)
    monkeypatch.setattr(events, "PERIOD", 3600.0)
    put(path, *[("step", number, STEP) for number in range(1, 6)])
    *steps, dropped = Reader(path).events()
    assert [event["step"] for event in steps] == [1, 2, 3]
    assert (dropped["kind"], dropped["lines"]) == ("dropped", 2)


FULL = f"""
import resource, signal, sys
from pathlib import Path
from samestep.events import EventFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
step = {STEP!r}
file = EventFile(Path(sys.argv[1]), 0, at_once=True)
file.put("step", 1, step)
size = Path(sys.argv[1]).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, resource.RLIM_INFINITY))
file.put("step", 2, step)
file.put("step", 3, step)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.put("step", 4, step)
file.close()
"""


def test_a_full_disk_loses_lines_and_says_so_when_there_is_room_again(path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    subprocess.run([sys.executable, "-c", FULL, str(path)], check=True)
    reader = Reader(path)
    first, last, dropped = reader.events()
    assert (first["step"], last["step"], dropped["lines"], dropped["why"]) == (1, 4, 2, "File too large")
    assert reader.torn == 0


def test_a_long_run_keeps_few_lines() -> None:
    lines = sum(step % events.stride(step) == 0 for step in range(1, 1_000_001))
    assert lines < 50_000
    assert all(step % events.stride(step) == 0 for step in range(1, events.LINE_FOR_EACH + 1))


def test_a_process_whose_events_nobody_keeps_writes_none(path: Path) -> None:
    assert not events.is_attached()
    events.note("end", 1, error=None)
    file = EventFile(path, 0)
    events.attach(file)
    try:
        events.note("end", 1, error=None)
    finally:
        events.detach()
        file.close()
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["end"]
