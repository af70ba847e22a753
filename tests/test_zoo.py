"""The zoo is complete and well-formed, and its scoring counts what it should; no process is started here."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from samestep.verification.pages import PAGES

ROOT = Path(__file__).resolve().parent.parent
ZOO = ROOT / "zoo"
PAIRS = sorted(path for path in ZOO.iterdir() if path.is_dir() and path.name not in {"healthy", "blind", "__pycache__"})
HEALTHY = sorted((ZOO / "healthy").glob("*.py"))
CODES = set(PAGES)  # those of `samestep verify --explain CODE`
KEYS = {"id", "title", "why", "codes", "rank", "tensor", "factor", "where", "notes", "args", "ranks", "fix"}
GIVE_AWAYS = ("bug", "wrong", "forgot", "oops", "should be", "fixme")


def load_scoring():
    spec = importlib.util.spec_from_file_location("zoo_scoring", ROOT / "scripts" / "zoo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


scoring = load_scoring()
CASES = scoring.cases()


def changed_lines(buggy: str, fixed: str) -> int:
    matcher = difflib.SequenceMatcher(None, buggy.splitlines(), fixed.splitlines(), autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def source(case) -> str:
    return scoring.fixed(case) if case.kind == "fixed" else case.script.read_text()


def name(path: Path) -> str:
    return path.stem if path.suffix else path.name


def test_there_are_enough_scripts():
    assert len(PAIRS) >= 45
    assert len(HEALTHY) >= 15


@pytest.mark.parametrize("folder", PAIRS, ids=name)
def test_a_directory_is_complete(folder):
    kept = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert kept == {"buggy.py", "expected.toml"}


@pytest.mark.parametrize("folder", PAIRS, ids=name)
def test_what_is_expected_is_valid(folder):
    expected = tomllib.loads((folder / "expected.toml").read_text())
    assert {"id", "title", "why", "codes", "fix"} <= set(expected) <= KEYS
    assert expected["codes"]
    assert set(expected["codes"]) | set(expected.get("notes", [])) <= CODES
    assert isinstance(expected.get("factor", 1.0), float)
    assert isinstance(expected.get("rank", 0), int)


@pytest.mark.parametrize("folder", PAIRS, ids=name)
def test_a_culprit_line_stands_in_the_buggy_script(folder):
    expected = tomllib.loads((folder / "expected.toml").read_text())
    script = (folder / "buggy.py").read_text()
    if wanted := scoring.texts(expected.get("where", [])):
        assert any(text in script for text in wanted)


@pytest.mark.parametrize("case", [case for case in CASES if case.kind == "fixed"], ids=scoring.key)
def test_each_fix_replaces_a_text_that_occurs_once_and_few_lines_differ(case):
    buggy, fixes = case.script.read_text(), case.expected["fix"]
    assert all(set(fix) == {"old", "new"} for fix in fixes)
    assert [fix["old"] for fix in fixes if buggy.count(fix["old"]) != 1] == []
    assert [fix["old"] for fix in fixes if f"\n{fix['old']}\n" not in buggy] == []  # whole lines
    assert 1 <= changed_lines(buggy, scoring.fixed(case)) <= 6


@pytest.mark.parametrize("case", CASES, ids=scoring.key)
def test_a_script_compiles_and_begins_with_one_line_on_what_it_trains(case):
    tree = ast.parse(source(case))
    compile(tree, scoring.key(case), "exec")
    said = ast.get_docstring(tree)
    assert said
    assert "\n" not in said


@pytest.mark.parametrize("script", [p / "buggy.py" for p in PAIRS], ids=lambda path: path.parent.name)
def test_a_buggy_script_does_not_give_itself_away(script):
    text = script.read_text().lower()
    assert not [word for word in GIVE_AWAYS if word in text]


def test_no_script_knows_of_verify():
    for case in CASES:
        imported = [node for node in ast.walk(ast.parse(source(case))) if isinstance(node, ast.ImportFrom)]
        assert not [node for node in imported if (node.module or "").startswith("samestep")], case


@pytest.mark.parametrize("beside", sorted((ZOO / "healthy").glob("*.toml")), ids=name)
def test_a_healthy_scripts_options_are_valid(beside):
    expected = tomllib.loads(beside.read_text())
    assert set(expected) <= {"notes", "args", "ranks"}
    assert set(expected.get("notes", [])) <= CODES
    assert beside.with_suffix(".py").exists()


# --- the scoring -------------------------------------------------------------------------------------------------


def test_a_fix_whose_text_is_not_there_once_is_refused(tmp_path):
    made = case(tmp_path, fix=[{"old": "loss * 2", "new": "loss * 4"}, {"old": "loss * 2", "new": "loss"}])
    with pytest.raises(ValueError, match=r"buggy\.py must hold this text of a fix once:\nloss \* 2"):
        scoring.fixed(made)
    with pytest.raises(ValueError, match="once"):
        scoring.fixed(case(tmp_path, fix=[{"old": "loss", "new": "cost"}]))


def test_verify_is_given_the_fixed_script_or_the_one_that_stands_there(tmp_path, monkeypatch):
    given = {}

    def run(command, cwd, **options):
        given[command[-1]] = Path(command[-1]).read_text()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(scoring.subprocess, "run", run)
    made = case(tmp_path, fix=[{"old": "loss * 2", "new": "loss"}, {"old": "import torch\n", "new": ""}])
    assert scoring.observe(dataclasses.replace(made, kind="fixed"), 1.0)[:2] == (None, 0)
    assert scoring.observe(made, 1.0)[:2] == (None, 0)
    assert list(given.values()) == ["loss = loss\n", made.script.read_text()]
    assert list(given)[1] == str(made.script)


def test_fixed_scripts_are_written_on_request(tmp_path):
    assert scoring.main(["--only", "loss-summed", "gan", "--write-fixed", str(tmp_path / "out")]) == 0
    (written,) = (tmp_path / "out").iterdir()
    assert written.name == "loss-summed.py"
    assert "criterion(model(x), y) * world_size" in written.read_text()


def case(tmp_path, kind="buggy", **expected):
    script = tmp_path / f"{kind}.py"
    script.write_text("import torch\nloss = loss * 2\n")
    return scoring.Case("sample", kind, script, {"codes": ["gradient-scale", "gradient-differs"], **expected})


def finding(code="gradient-scale", severity="error", **traits):
    return {"code": code, "severity": severity, "rank": None, "tensor": None, "factor": None, "where": None, **traits}


def judged(made, *findings, verdict="different"):
    return scoring.judge(made, {"verdict": verdict, "findings": list(findings)}, 1, 2.0)


def test_an_error_with_an_acceptable_code_is_a_detection(tmp_path):
    assert judged(case(tmp_path), finding("gradient-differs")).detected
    assert not judged(case(tmp_path), finding("hang")).detected
    assert not judged(case(tmp_path), finding(severity="note")).detected


def test_a_missing_report_is_a_miss_and_counts_as_inconclusive(tmp_path):
    result = scoring.judge(case(tmp_path), None, None, 180.0)
    assert result.detected is False
    assert scoring.score([result])["inconclusive"] == 1


def test_a_culprit_is_named_when_every_given_trait_is_told(tmp_path):
    made = case(tmp_path, factor=2.0, where=["loss * 2"], rank=1, tensor="head")
    told = finding(factor=1.999, where=f"{made.script}:2", rank=1, tensor="module.head.weight")
    assert judged(made, told).named
    for trait, other in [
        ("factor", 4.0),
        ("where", f"{made.script}:1"),
        ("rank", 0),
        ("tensor", "body"),
        ("rank", None),
    ]:
        assert not judged(made, told | {trait: other}).named
    assert judged(case(tmp_path), finding()).named is None


def test_traits_of_a_finding_with_another_code_do_not_count(tmp_path):
    made = case(tmp_path, factor=2.0)
    assert not judged(made, finding(), finding("hang", factor=2.0)).named


def test_a_line_of_another_file_names_nobody(tmp_path):
    made = case(tmp_path, where="loss * 2")
    assert not judged(made, finding(where="/elsewhere/other.py:2")).named
    assert not judged(made, finding(where=f"{made.script}:99")).named


def test_an_error_on_a_clean_script_is_a_false_alarm_and_an_allowed_note_is_not(tmp_path):
    made = case(tmp_path, "fixed", notes=["buffers-diverged"])
    assert judged(made, finding(), verdict="different").false_alarm
    assert judged(made, verdict="different").false_alarm
    quiet = judged(made, finding("buffers-diverged", "note"), verdict="same")
    assert not quiet.false_alarm
    assert not quiet.surprise
    assert "hang" in judged(made, finding("hang", "note"), verdict="same").surprise


def test_the_targets_are_95_and_90_per_cent_and_no_false_alarm():
    right = {"buggy": 20, "detected": 19, "with_culprit": 10, "named": 9, "clean": 5, "false_alarms": 0}
    assert scoring.passed(right)
    for key, value in [("detected", 18), ("named", 8), ("false_alarms", 1)]:
        assert not scoring.passed(right | {key: value})


def test_results_survive_a_restart_and_fill_the_page(tmp_path):
    made = case(tmp_path, id="B3", title="summed")
    results = [judged(made, finding()), judged(case(tmp_path, "fixed"), verdict="same")]
    scoring.write(tmp_path / "zoo.json", results)
    assert list(scoring.read(tmp_path / "zoo.json").values()) == results
    page = scoring.markdown([made], results)
    assert "| `sample` | B3 | summed | `gradient-scale` | - | same |" in page
