"""What a process writes down while it is watched stays bounded, and a torn line costs nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samestep.verification import journal


def test_values_are_kept_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST_KEPT", 12_000)
    book = journal.TraceWriter(tmp_path, 0)
    numbers = [book.keep(torch.zeros(1000)) for _ in range(6)]
    assert numbers == [1, 2, 3, None, None, None]
    assert len(list(book.values.iterdir())) == 3


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    book = journal.TraceWriter(tmp_path, 0)
    book.write("step", event=0)
    with (tmp_path / "rank0.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind":"ste')
    assert journal.read(tmp_path, 0) == [{"kind": "step", "event": 0}]
