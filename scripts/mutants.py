"""Measures how well a test suite protects the code: makes small faults (mutants) and counts those that fail a test.

python scripts/mutants.py list                    writes tests/mutants.jsonl, the mutants that are judged
python scripts/mutants.py show KEY                prints a mutant as a diff; a key is path:line:operator
python scripts/mutants.py judge --root DIR --journal FILE [--set first|decide] [--only N,...] [--tests new|old]
python scripts/mutants.py report JOURNAL_OLD JOURNAL_NEW [--set first|decide]

`list` orders every candidate by the SHA-256 of its key, so nobody chooses a mutant, and takes from each layer a share
in proportion to its lines. The list is written once, before a test is changed: with other sources it would be another.
Of the set that decides, 21 whose code was rewritten since gave their places to the next of their layer's order.
Code inside f-strings is left out, since Python 3.11 does not give its exact place.

`judge` needs a checkout of its own, with its own environment (`make compiled`): it changes and restores its sources.
First run the test files that name the mutated module, then the others of its layer, each until a test fails. Code that
has moved is followed where its line stands once in the sources; else the mutant is gone. A timeout counts as killed, an
unfinished mutant as neither.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.jsonl"
SIZES = {"first": 100, "decide": 50}
_WORDS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_WORDS |= {ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}
_PAIRS = (("==", "!="), ("<", "<="), (">", ">="), ("is", "is not"), ("in", "not in"))
_SWAPPED = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}

# Tests of a layer: files and folders of tests/; those that are not there are skipped. The layer's doctests, the folder
# of its name and test_surface.py belong to every layer.
_OLD = {
    "base": "test_architecture.py test_events.py test_paths.py test_progress.py test_rankenv.py test_testing.py "
    "test_topology.py runtime/test_seeds.py",
    "checkpoints": "cli/test_checkpoint.py equivalence/test_elastic.py security",
    "cli": "security",
    "collectives": "replicas/test_tree_sums.py replicas/test_reduction.py",
    "compress": "replicas/test_compression.py pipelines/test_compressed_gradients.py "
    "recipes/test_compressed_recipes.py verification/test_compressed.py",
    "data": "equivalence",
    "launch": "security",
    "replicas": "equivalence",
    "runtime": "equivalence",
    "schedule": "pipelines",
}
TESTS = {"old": _OLD, "new": dict(_OLD)}
ELSEWHERE = "(no test, pytest itself)"  # what fails where a mutant breaks a conftest.py
MARK = "MUTANT_JUDGED_BY"  # in the environment of every process of a judged test run


@dataclass(frozen=True)
class Mutant:
    """A small fault: at `line` (from 1) and `column` (characters, from 0) of `path`, `after` instead of `before`."""

    set: str
    layer: str
    path: str
    line: int
    column: int
    operator: str
    before: str
    after: str
    text: str  # the line, to recognise code that has moved
    digest: str

    @property
    def key(self) -> str:
        """What names the mutant in journals."""
        return f"{self.path}:{self.line}:{self.operator}"

    def put_into(self, source: str) -> str | None:
        """Returns the mutated source, or None if the code does not stand where it stood."""
        lines = source.split("\n")
        start = sum(len(line) + 1 for line in lines[: self.line - 1]) + self.column
        stands = self.line <= len(lines) and lines[self.line - 1].strip() == self.text
        if not stands or not source.startswith(self.before, start):
            return None
        return source[:start] + self.after + source[start + len(self.before) :]

    def followed(self, root: Path) -> Mutant | None:
        """Returns the mutant where its code stands in a checkout today; None where that is not one place."""
        path = root / self.path
        if path.exists() and self.put_into(path.read_text(encoding="utf-8")) is not None:
            return self
        places = [
            (other, number, line)
            for other in sorted((root / "src" / "samestep").rglob("*.py"))
            for number, line in enumerate(other.read_text(encoding="utf-8").split("\n"), 1)
            if line.strip() == self.text
        ]
        # Indentation is a multiple of 4, which tells of which of several equal pieces of a line the mutant is.
        within = [at for at in _places_of(self.before, self.text) if self.column >= at and (self.column - at) % 4 == 0]
        if len(places) != 1 or len(within) != 1:
            return None
        other, number, line = places[0]
        column = len(line) - len(line.lstrip()) + within[0]
        moved = other.relative_to(root)
        layer = moved.parts[2] if len(moved.parts) > 3 else "base"
        return replace(self, path=moved.as_posix(), line=number, column=column, layer=layer)


def _places_of(part: str, text: str) -> list[int]:
    return [at for at in range(len(text)) if text.startswith(part, at)]


# --- list ---------------------------------------------------------------------------------------------------------


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of code that runs: no annotations, `__all__`, f-strings or `if TYPE_CHECKING`."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.Assign | ast.AugAssign | ast.AnnAssign) and "__all__" in ast.unparse(child):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for other in child.orelse:
                    yield from _nodes(other)
                continue
            yield from _nodes(child)


def _changed_constant(value: object) -> str | None:
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + 1)
    if isinstance(value, float) and math.isfinite(value * 2):
        return repr(value * 2 if value else 1.0)
    return None


def _changed_comparison(node: ast.Compare, source: str, before: str) -> str | None:
    word = _WORDS[type(node.ops[0])]
    left, right = _segment(source, node.left), _segment(source, node.comparators[0])
    after_left = before.index(left) + len(left)
    found = re.compile(word.replace(" ", r"\s+")).search(before, after_left)
    if found is None or "#" in before[after_left : found.end()] or right not in before[found.end() :]:
        return None
    return before[: found.start()] + _SWAPPED[word] + before[found.end() :]


def _segment(source: str, node: ast.expr | ast.stmt) -> str:
    found = ast.get_source_segment(source, node)
    assert found is not None
    return found


def _candidates_of(path: Path) -> Iterator[Mutant]:
    """Yields the mutants of a file; of several with the same key, the first of the line."""
    source = path.read_bytes().decode()
    lines = source.split("\n")
    relative = path.relative_to(ROOT).as_posix()
    parts = path.relative_to(ROOT / "src" / "samestep").parts
    found: dict[str, Mutant] = {}

    def add(node: ast.expr | ast.stmt, operator: str, after: str | None) -> None:
        if after is None:
            return
        line = lines[node.lineno - 1]
        mutant = Mutant(
            set="",
            layer=parts[0] if len(parts) > 1 else "base",
            path=relative,
            line=node.lineno,
            column=len(line.encode()[: node.col_offset].decode()),
            operator=operator,
            before=_segment(source, node),
            after=after,
            text=line.strip(),
            digest=hashlib.sha256(f"{relative}:{node.lineno}:{operator}".encode()).hexdigest(),
        )
        if mutant.key not in found or mutant.column < found[mutant.key].column:
            found[mutant.key] = mutant

    for node in _nodes(ast.parse(source)):
        if isinstance(node, ast.Compare):
            add(node, "comparison", _changed_comparison(node, source, _segment(source, node)))
        elif isinstance(node, ast.Constant):
            add(node, "constant", _changed_constant(node.value))
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            add(node.test, "condition", f"not ({_segment(source, node.test)})")
        elif isinstance(node, ast.Return) and node.value is not None:
            is_none = isinstance(node.value, ast.Constant) and node.value.value is None
            add(node, "return", None if is_none else "return None")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
            add(node, "call", "pass")
    yield from found.values()


def _is_valid(mutant: Mutant) -> bool:
    source = (ROOT / mutant.path).read_bytes().decode()
    mutated = mutant.put_into(source)
    try:
        return mutated is not None and ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def _shares(lines: dict[str, int], places: int) -> dict[str, int]:
    """Divides places in proportion to lines of code, by the largest remainder."""
    total = sum(lines.values())
    given = {layer: places * count // total for layer, count in lines.items()}
    by_remainder = sorted(lines, key=lambda layer: (-(places * lines[layer] % total), layer))
    for layer in by_remainder[: places - sum(given.values())]:
        given[layer] += 1
    return given


def write_list(_: argparse.Namespace) -> None:
    """Writes the list; lines of code are those that are neither blank nor only a comment."""
    lines: Counter[str] = Counter()
    candidates: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted((ROOT / "src" / "samestep").rglob("*.py")):
        if path.name == "_version.py":
            continue
        parts = path.relative_to(ROOT / "src" / "samestep").parts
        code = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        lines[parts[0] if len(parts) > 1 else "base"] += sum(not line.lstrip().startswith("#") for line in code)
        for mutant in _candidates_of(path):
            candidates[mutant.layer].append(mutant)
    layers = sorted(lines)
    ordered = {layer: iter(sorted(candidates[layer], key=lambda each: each.digest)) for layer in layers}
    chosen: list[Mutant] = []
    taken: dict[str, dict[str, int]] = {}
    for name, size in SIZES.items():
        taken[name] = _shares(dict(lines), size)
        for layer in layers:
            valid = (replace(each, set=name) for each in ordered[layer] if _is_valid(each))
            chosen += [next(valid) for _ in range(taken[name][layer])]
    head = {
        "commit": _git(ROOT, "log", "-1", "--format=%H", "--", "src/samestep"),
        "lines": dict(sorted(lines.items())),
        "candidates": {layer: len(candidates[layer]) for layer in layers},
        "sets": {name: dict(sorted(given.items())) for name, given in taken.items()},
    }
    records = [head, *map(asdict, chosen)]
    LIST.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records), encoding="utf-8")
    print(f"{sum(map(len, candidates.values()))} candidates, {len(chosen)} mutants in {LIST.relative_to(ROOT)}")


def _read_list() -> list[Mutant]:
    return [Mutant(**json.loads(line)) for line in LIST.read_text(encoding="utf-8").splitlines()[1:]]


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def show(options: argparse.Namespace) -> None:
    """Prints a mutant as a unified diff."""
    mutant = next((each for each in _read_list() if each.key == options.key), None)
    if mutant is None:
        sys.exit(f"no mutant {options.key} in {LIST.relative_to(ROOT)}")
    followed = mutant.followed(ROOT)
    if followed is None:
        sys.exit(f"the code of {mutant.key} is gone, or stands at several places; it read: {mutant.text}")
    mutant, source = followed, (ROOT / followed.path).read_bytes().decode()
    mutated = mutant.put_into(source) or ""
    texts = (source.splitlines(keepends=True), mutated.splitlines(keepends=True))
    sys.stdout.writelines(difflib.unified_diff(*texts, f"a/{mutant.path}", f"b/{mutant.path}"))


# --- judge --------------------------------------------------------------------------------------------------------


class Judge:
    """Runs the tests of a checkout on its mutated sources.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._root: Path = options.root.resolve()
        self._tests = TESTS[options.tests]
        self._timeout: float = options.timeout
        self._limit: float = options.limit
        self._testers: int = options.testers
        self._twice: bool = options.twice
        self._deselect = [f"--deselect={name}" for name in options.deselect]
        self._seconds: Counter[str] = Counter()  # of a test file, where they are known
        if options.times is not None:
            for name, spent in json.loads(options.times.read_text(encoding="utf-8")).items():
                self._seconds[name.partition("::")[0]] += spent[1]
        self._texts = {path: path.read_text(encoding="utf-8") for path in self._root.glob("tests/**/*.py")}
        self._texts |= {path: path.read_text(encoding="utf-8") for path in self._root.glob("src/samestep/**/*.py")}

    def check_checkout(self) -> None:
        """Exits unless the sources are as committed, are those that run, and tests can be collected."""
        if _git(self._root, "status", "--porcelain", "--", "src"):
            sys.exit(f"{self._root}/src is not as committed; restore it first: git checkout -- src")
        code, output = self._run(["-c", "import samestep; print(samestep.__file__)"])
        if code != 0 or not output.strip().endswith(f"{self._root}/src/samestep/__init__.py"):
            sys.exit(f"{self._root}/.venv does not run {self._root}/src; `make compiled` there\n{output}")
        code, output = self._pytest(["--collect-only", "tests/test_surface.py"])
        if code != 0:
            sys.exit(f"pytest collects nothing in {self._root}\n{output}")

    def judge(self, mutant: Mutant, confirm: str | None) -> dict[str, object]:
        """Returns the verdict: killed, survived, timeout, unfinished or gone; the source is restored."""
        began = time.monotonic()
        followed = mutant.followed(self._root)
        if followed is None:
            return {"verdict": "gone", "test": None, "stage": None, "seconds": 0.0}
        mutant, path = followed, self._root / followed.path
        source = path.read_bytes()
        mutated = mutant.put_into(source.decode())
        assert mutated is not None
        times = path.stat()
        try:
            path.write_bytes(mutated.encode())
            _forget_compiled(path)
            verdict, test, stage = self._stages(mutant, confirm, began + self._limit)
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            _forget_compiled(path)
        return {"verdict": verdict, "test": test, "stage": stage, "seconds": round(time.monotonic() - began, 1)}

    def _stages(self, mutant: Mutant, confirm: str | None, end: float) -> tuple[str, str | None, str | None]:
        likely, others = self._files(mutant)
        several = ["-n", str(self._testers), "--dist", "loadscope", "--no-loadscope-reorder"]
        stages = [("confirm", [confirm])] if confirm and confirm != ELSEWHERE else []
        stages += [(name, [*several, *files]) for name, files in (("likely", likely), ("others", others)) if files]
        passed_alone: list[str] = []
        while stages:
            stage, arguments = stages[0]
            code, output = self._pytest([*arguments, *(f"--deselect={test}" for test in passed_alone)], end)
            if code is None:
                return output, None, stage
            if code in {0, 5} or (stage == "confirm" and code == 4):  # 5: no tests; 4: the test is not there
                del stages[0]
                continue
            summary = output.rpartition("short test summary info")[2]
            failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", summary, re.MULTILINE)
            test = failed[1] if failed else ELSEWHERE
            if not self._twice or "::" not in test or test in passed_alone or self._pytest([test], end)[0] != 0:
                return "killed", test, stage
            passed_alone.append(test)
        return "survived", None, None

    def _files(self, mutant: Mutant) -> tuple[list[str], list[str]]:
        """Returns the test files that name the mutated module, wherever they are, and the others of its layer."""
        source = self._root / mutant.path
        parts = Path(mutant.path).relative_to("src").with_suffix("").parts
        is_package = parts[-1] == "__init__"
        parts = parts[:-1] if is_package else parts
        dotted, package, stem = (re.escape(text) for text in (".".join(parts), ".".join(parts[:-1]), parts[-1]))
        imported = re.compile(rf"\b{dotted}\b(?!\.)|from {package} import (?:\([^)]*|[^\n]*)\b{stem}\b")
        layer = self._root / "src" / "samestep"
        own = layer.glob("*.py") if mutant.layer == "base" else (layer / mutant.layer).rglob("*.py")
        of_layer = {path for path in own if path == source or ">>> " in self._texts[path]}
        for name in ("test_surface.py", mutant.layer, *self._tests.get(mutant.layer, "").split()):
            path = self._root / "tests" / name
            of_layer |= {path} if path.is_file() else set(path.rglob("test_*.py"))
        likely = {path for path in of_layer if stem in path.stem or (imported.search(self._texts[path]))}
        if mutant.layer != "base" and not is_package:  # half of the tests import errors or paths, or a whole package
            everywhere = set((self._root / "tests").rglob("test_*.py")) - set(
                (self._root / "tests/examples").rglob("*")
            )
            likely |= {path for path in everywhere if imported.search(self._texts[path])}
        return self._cheapest_first(likely | {source}), self._cheapest_first(of_layer - likely - {source})

    def _cheapest_first(self, paths: set[Path]) -> list[str]:
        """Orders test files by their seconds, where known; else those that start processes last, then by size."""

        def cost(path: Path) -> tuple[float, int, int, str]:
            name, text = path.relative_to(self._root).as_posix(), self._texts[path]
            starts = len(re.findall(r"_ranks\b|\bsubprocess\b|\bspawn\b|\blaunch\(|\brun\(", text))
            known = self._seconds.get(name, 0.0 if "src" in path.parts else 10.0 if self._seconds else 0.0)
            return known, starts, len(text), name

        return [path.relative_to(self._root).as_posix() for path in sorted(paths, key=cost)]

    def _pytest(self, arguments: list[str], end: float = math.inf) -> tuple[int | None, str]:
        fixed = ["-m", "pytest", "-q", "-x", "-m", "not prove", "-p", "no:cacheprovider", "-p", "no:randomly"]
        return self._run([*fixed, *self._deselect, *arguments], end)

    def _run(self, arguments: list[str], end: float = math.inf) -> tuple[int | None, str]:
        """Returns exit code and output of the checkout's python; no process of it stays.

        Where it was killed: None, and "timeout" if nothing was written for the timeout, "unfinished" if `end` came.
        """
        mark = f"{os.getpid()}.{time.monotonic_ns()}"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [str(self._root / ".venv" / "bin" / "python"), *arguments],
                cwd=self._root,
                env=environment | {MARK: mark, "PYTEST_ADDOPTS": ""},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            written, quiet_since = 0, time.monotonic()
            try:
                while process.poll() is None:
                    time.sleep(0.1)
                    now, size = time.monotonic(), os.fstat(output.fileno()).st_size
                    written, quiet_since = size, now if size != written else quiet_since
                    if now > end or now > quiet_since + self._timeout:
                        return None, "unfinished" if now > end else "timeout"
            finally:
                _end(process, mark)
            output.seek(0)
            return process.returncode, output.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kills the process group, then whoever left it but still has the mark in its environment."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def _forget_compiled(path: Path) -> None:
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _read_journal(path: Path | None) -> dict[str, dict[str, str]]:
    if path is None or not path.exists():
        return {}
    return {each["key"]: each for each in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def judge_all(options: argparse.Namespace) -> None:
    """Judges the mutants that the journal does not have yet, one after the other."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the source is restored then, too
    wanted = {int(number) for number in options.only.split(",")} if options.only else None
    judging = Judge(options)
    judging.check_checkout()
    confirmed = _read_journal(options.confirm)
    done = {key for key, record in _read_journal(options.journal).items() if record["verdict"] != "unfinished"}
    for number, mutant in enumerate(_read_list(), 1):
        if (options.set and mutant.set != options.set) or (wanted and number not in wanted) or mutant.key in done:
            continue
        record = judging.judge(mutant, confirmed.get(mutant.key, {}).get("test"))
        told = {"key": mutant.key, "number": number, "set": mutant.set, "layer": mutant.layer, "tests": options.tests}
        with options.journal.open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(told | record) + "\n")
        print(number, mutant.key, record["verdict"], record["test"] or "", f"{record['seconds']} s", flush=True)


# --- report -------------------------------------------------------------------------------------------------------


def report(options: argparse.Namespace) -> None:
    """Prints what both test suites killed, of the mutants that both judged."""
    old, new = _read_journal(options.old), _read_journal(options.new)
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    lost: list[str] = []
    for mutant in _read_list():
        if options.set and mutant.set != options.set:
            continue
        verdicts = [journal.get(mutant.key, {}).get("verdict", "unjudged") for journal in (old, new)]
        judged = {"killed", "timeout", "survived"} >= set(verdicts)
        by_old, by_new = (judged and verdict in {"killed", "timeout"} for verdict in verdicts)
        counts = Counter(mutants=1, judged=judged, old=by_old, new=by_new, lost=by_old and not by_new)
        rows[mutant.layer] += counts
        rows["all"] += counts
        if by_old and not by_new:
            lost.append(f"{mutant.key}  {mutant.before!r} -> {mutant.after!r}, killed by {old[mutant.key]['test']}")
    print("| layer | mutants | judged by both | killed by old | by new | by old, not new | rate old | rate new |")
    print("|---|---|---|---|---|---|---|---|")
    for layer in [*sorted(set(rows) - {"all"}), "all"]:
        row = rows[layer]
        rates = (f"{row[name] / row['judged']:.0%}" if row["judged"] else "" for name in ("old", "new"))
        cells = [*(row[name] for name in ("mutants", "judged", "old", "new", "lost")), *rates]
        print(f"| {layer} | {' | '.join(map(str, cells))} |")
    print(*(["", "Killed by old, not by new:", *lost] if lost else []), sep="\n")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("list", help="write the list")
    shown = commands.add_parser("show", help="print a mutant as a diff")
    shown.add_argument("key", help="path:line:operator")
    judged = commands.add_parser("judge", help="run the tests of each mutant's layer in a checkout")
    judged.add_argument("--root", type=Path, required=True, help="the checkout, with an environment in .venv")
    judged.add_argument("--journal", type=Path, required=True, help="verdicts are appended; those in it are skipped")
    judged.add_argument("--set", choices=SIZES, help="only this part of the list")
    judged.add_argument("--only", metavar="N,...", help="only these mutants, counted from 1")
    judged.add_argument("--tests", choices=TESTS, default="new", help="whose map from layers to tests counts")
    judged.add_argument("--confirm", type=Path, metavar="JOURNAL", help="first run the test that killed it there")
    judged.add_argument("--times", type=Path, metavar="JSON", help="what scripts/test_times.py wrote: cheapest first")
    judged.add_argument("--deselect", action="append", default=[], metavar="TEST", help="fails without a mutant")
    judged.add_argument("--twice", action="store_true", help="a kill counts if the test fails again, alone")
    judged.add_argument(
        "--timeout", type=float, default=900.0, help="seconds of silence: killed (default: %(default)s)"
    )
    judged.add_argument(
        "--limit", type=float, default=math.inf, help="seconds for a mutant: unfinished (default: none)"
    )
    judged.add_argument("--testers", type=int, default=2, help="processes that test (default: %(default)s)")
    told = commands.add_parser("report", help="compare two journals")
    told.add_argument("old", type=Path)
    told.add_argument("new", type=Path)
    told.add_argument("--set", choices=SIZES, help="only this part of the list")
    for command, function in ((listed, write_list), (shown, show), (judged, judge_all), (told, report)):
        command.set_defaults(function=function)
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
