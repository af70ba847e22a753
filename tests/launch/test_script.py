"""A script finds what it would find under python alone, and its packages are imported by the ranks only."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("given", ["inner/train.py", "./inner/train.py", "inner"])
def test_a_script_has_the_names_that_python_gives_it(folder, given, start):
    body = "print(__file__, sys.argv[0], sys.path[0], sys._getframe().f_code.co_filename, __name__)"
    folder.script(body, "inner/train.py")
    folder.script(body, "inner/__main__.py")
    environment = {"RANK": "0", "WORLD_SIZE": "1", "PATH": ""}
    alone = subprocess.run(
        [sys.executable, given], cwd=folder.path, env=environment, capture_output=True, text=True, check=True
    )
    done = folder.run("-n", 2, "--start", start, given)
    assert {line.partition("] ")[2] for line in done.stdout.splitlines()} == {alone.stdout.strip()}, done.stderr


def test_a_script_that_leaves_its_folder_still_finds_its_own_source(folder):
    script = folder.script("""
        import inspect
        def lesson(): return 1
        os.chdir("/")
        print(inspect.getsource(lesson).strip())
        raise ValueError("elsewhere")
    """)
    done = folder.run("-n", 2, script)
    assert "[rank 0] def lesson(): return 1" in done.stdout.splitlines(), done.stderr
    assert folder.result["failure"]["where"].startswith("train.py:")
    assert 'raise ValueError("elsewhere")' in done.stderr


def found_from(folder):
    """The launcher itself finds packages in the folder too, as `python -m samestep` does."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder.path), os.environ.get("PYTHONPATH")]))}


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_package_is_imported_by_the_ranks_alone(folder, start):
    folder.script("from package import RANK\nprint('rank', RANK)", "package/train.py")
    (folder.path / "package/__init__.py").write_text("import os\nRANK = int(os.environ['RANK'])\n")
    done = folder.run("-n", 2, "--start", start, "-m", "package.train", env=found_from(folder))
    assert sorted(done.stdout.splitlines()) == ["[rank 0] rank 0", "[rank 1] rank 1"], done.stderr


def test_a_package_that_refuses_to_be_imported_is_the_ranks_failure(folder):
    folder.script("pass", "package/train.py")
    (folder.path / "package/__init__.py").write_text("raise SystemExit('needs a licence')\n")
    done = folder.run("-n", 2, "--start", "spawn", "-m", "package.train", env=found_from(folder))
    assert done.returncode == 1
    assert "all 2 ranks failed: exit code 1" in done.stderr
    assert "its last line: needs a licence" in done.stderr


def test_the_main_module_of_a_package_stays_until_the_end(folder):
    body = "import atexit, pickle\nclass Late: pass\natexit.register(lambda: print(len(pickle.dumps(Late())) > 0))"
    folder.script(body, "package/__main__.py")
    (folder.path / "package/__init__.py").write_text("")
    for program in (["-m", "package"], ["package"]):
        done = folder.run(*program)
        assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("name", ["secrets", "argparse", "signal"])
def test_a_module_of_the_scripts_own_is_found_though_the_launcher_has_imported_pythons(folder, name, start):
    (folder.path / f"{name}.py").write_text("KEY = 1\n")
    (folder.path / "train.py").write_text(f"import {name}\nprint({name}.KEY)\n")
    done = folder.run("-n", 2, "--start", start, "train.py")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 1", "[rank 1] 1"], done.stderr


def test_a_script_that_only_one_process_could_read_is_refused_for_several(folder):
    done = folder.run("-n", 2, "/dev/stdin", stdin=None, env={})
    assert done.returncode == 2
    assert "/dev/stdin can be read by one process only" in done.stderr


def test_a_script_in_a_folder_whose_name_is_no_utf8_is_blamed_like_any_other(folder):
    script = folder.script("join()\nmeet()\nif rank == 1:\n    raise ValueError('here')\nmeet()", "d\udcff/train.py")
    done = folder.run("-n", 2, script)
    assert (done.returncode, folder.result["failure"]["rank"]) == (1, 1), done.stderr
    assert "ValueError: here" in done.stderr


def test_a_script_among_pythons_own_modules_does_not_make_it_forget_them(folder):
    done = folder.run("-n", 2, "--start", "spawn", textwrap.__file__)
    assert done.returncode == 0, done.stderr
