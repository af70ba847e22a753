"""Runs PyTorch's own backend-generic tests of torch.distributed, which ship inside torch, against the backend samestep.

    .venv/bin/python scripts/torch_suite.py                          all of them, with 2 ranks
    .venv/bin/python scripts/torch_suite.py --ranks 3 --repeat 10
    .venv/bin/python scripts/torch_suite.py --backend gloo           what they say of gloo here
    .venv/bin/python scripts/torch_suite.py -k "all_reduce or ddp_hook"

torch decides by the backend's name which tests may run, and knows samestep as little as any plugin. So the tests are
chosen as for gloo, and then run over samestep. Left out are those of `monitored_barrier`, which asks for gloo by name.

Exit code 0 when no test fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve()


def main() -> int:
    """Runs the tests as often as asked, and sums up."""
    asked = parsed()
    failed = 0
    for number in range(1, asked.repeat + 1):
        code, summary = run(asked)
        print(f"run {number} of {asked.repeat}, {asked.ranks} ranks over {asked.backend}: {summary}", flush=True)
        failed += code != 0
    return int(failed > 0)


def parsed() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="samestep")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=60, help="seconds that one test may take")
    parser.add_argument("-k", default="", help="which tests, as for pytest")
    return parser.parse_args()


def run(asked: argparse.Namespace) -> tuple[int, str]:
    """Runs the tests once in a process of their own; returns its exit code and pytest's last line."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rfE", "-k", asked.k, *FREE_OF_OURS, str(HERE)],
            env={**os.environ, **variables(asked, folder)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return done.returncode, re.sub(r"^=+ | =+$", "", lines[-1])


# torch's tests warn, are ordered, and may last; our own settings for tests are not theirs
FREE_OF_OURS = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "--rootdir", "/")


def variables(asked: argparse.Namespace, folder: str) -> dict[str, str]:
    """Returns what torch's tests read when they are imported."""
    return {
        "BACKEND": "gloo",
        "SUITE_BACKEND": asked.backend,
        "WORLD_SIZE": str(asked.ranks),
        "TEMP_DIR": folder,
        "INIT_METHOD": f"file://{folder}/meet",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(asked.timeout),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent / "src"), os.environ.get("PYTHONPATH", "")]),
    }


if __name__ == "__main__":
    sys.exit(main())

# --- what pytest collects in this file: torch's tests, under the variables above ---

import torch  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

import samestep  # noqa: E402, F401  (registers the backend)


class AsGloo(str):
    """A backend's name that tests take for "gloo" too, where they ask what they have to do."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __hash__(self) -> int:
        return str.__hash__(self)


BACKEND = os.environ["SUITE_BACKEND"]
distributed_test.BACKEND = AsGloo(BACKEND)  # what may run, torch has decided by now


class TestDistributed(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # noqa: SLF001
    """Torch's tests, each in forked processes."""

    def setUp(self) -> None:
        """Starts the ranks."""
        if BACKEND != "gloo" and "monitored_barrier" in self._testMethodName:
            self.skipTest("monitored_barrier asks for gloo by name")
        super().setUp()
        torch.set_num_threads(1)
        self._start_processes(torch.multiprocessing.get_context("fork").Process)
