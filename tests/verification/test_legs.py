"""The table of what verify compares: every finding belongs to a leg, and every leg has its findings."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import samestep
from samestep.verification.findings import (
    DECISIVE,
    LEGS,
    NO_OUTCOME,
    NONE_SEEN,
    NOT_REACHED,
    PROPERTIES,
    Finding,
    unchecked,
)
from samestep.verification.pages import PAGES
from samestep.verification.report import Report

SOURCES = Path(samestep.__file__).parent / "verification"
PAGE = Path(__file__).parents[2] / "docs" / "verify-method.md"


def made() -> set[tuple[str, str]]:
    """Property and code of every finding that the sources make."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                given = {one.arg: one.value for one in node.keywords}
                code, name = given["code"], given.get("property", ast.Constant(""))
                assert isinstance(code, ast.Constant), path
                assert isinstance(name, ast.Constant), path
                finding = Finding(code=str(code.value), property=str(name.value), cause="")
                found.add((finding.property, finding.code))
    return found


def test_every_finding_is_one_of_a_leg_and_every_code_of_a_leg_is_found() -> None:
    resumed = {
        ("checkpoint", code) for code in ("samples-repeated", "samples-missing")
    }  # by a second start: restart.py
    assert made() | resumed == {(name, code) for name, leg in LEGS.items() for code in leg.codes}


def test_every_code_has_its_page() -> None:
    assert {code for leg in LEGS.values() for code in leg.codes} == PAGES.keys()


def test_a_finding_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="gradient-scale is no finding about data"):
        Finding(code="gradient-scale", property="data", cause="")


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_leg_that_was_not_checked_leaves_the_verdict_open_if_it_decides(name: str) -> None:
    report = Report(ranks=2, coverage=dict.fromkeys(PROPERTIES, "identical"))
    assert report.verdict == "same"
    report.coverage[name] = unchecked("it could not be compared")
    assert report.verdict == ("inconclusive" if name in (*DECISIVE, "evaluation") else "same")
    report.add([Finding(code=LEGS[name].codes[0], property=name, cause="it differs")])
    assert (report.verdict, report.coverage[name]) == ("different", "differs")


@pytest.mark.parametrize("state", [NONE_SEEN, NO_OUTCOME, NOT_REACHED])
def test_an_evaluation_that_comes_to_nothing_leaves_nothing_open(state: str) -> None:
    report = Report(ranks=2, coverage=dict.fromkeys(PROPERTIES, "identical") | {"evaluation": state})
    assert report.verdict == "same"


def test_the_page_has_the_table() -> None:
    rows = {line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")}
    for name, leg in LEGS.items():
        row = f"| {name.replace('_', ' ')}{'' if leg.decides else ' (if there)'} | {leg.recorded} | {leg.reference} | "
        assert row + ", ".join(f"`{code}`" for code in leg.codes) + " |" in rows
