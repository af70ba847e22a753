"""Versions that are known not to go together, and that no package's own requirements keep apart."""

from __future__ import annotations

import pytest

from samestep.doctor import software

CUDA_13, CUDA_12 = (13, 0), (12, 8)


@pytest.fixture(autouse=True)
def on_x86(monkeypatch):
    monkeypatch.setattr(software.platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"tensorboard": "2.20.0", "setuptools": "82.0.1"}, "pkg_resources"),
        ({"tensorboard": "2.21.0", "setuptools": "84.0.0"}, None),
        ({"tensorboard": "2.20.0", "setuptools": "81.0.0"}, None),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, "import torchvision fails"),
        ({"torch": "2.13.0+cu126", "torchaudio": "2.13.0+cu130"}, "import torchaudio fails"),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, None),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, None),
        ({}, None),
    ],
)
def test_packages_that_break_each_other_are_named(installed, said):
    found = list(software.packages(installed.get))
    assert len(found) == (said is not None)
    assert all(said in line.effect and line.level == "warning" for line in found)


def test_another_build_is_fetched_from_where_it_lies():
    (line,) = software.packages({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}.get)
    assert line.fix.endswith("torchvision --index-url https://download.pytorch.org/whl/cpu")


def test_a_build_of_pypi_is_fetched_from_pypi():
    (line,) = software.packages({"torch": "2.13.0", "torchvision": "0.28.0+cpu"}.get)
    assert line.fix.endswith("install --force-reinstall --no-deps torchvision")


def test_packages_that_wrote_the_same_file_are_named():
    library = "nvidia/nccl/lib/libnccl.so.2"
    (line,) = software.overwritten_files(
        {"nvidia-nccl-cu12": {library}, "nvidia-nccl-cu13": {library}, "nvidia-x": set()}
    )
    assert line.text == f"nvidia-nccl-cu12 and nvidia-nccl-cu13 both wrote {library}"
    assert "pip uninstall -y nvidia-nccl-cu1" in line.fix


@pytest.mark.parametrize(
    ("cuda", "driver", "capability", "said"),
    [
        (CUDA_13, "550.54.15", "9.0", "wants driver 580 or newer, and this one is 550.54.15"),
        (CUDA_13, "580.65.06", "9.0", None),
        (CUDA_12, "470.82.01", "8.0", "wants driver 525 or newer"),
        (CUDA_12, "550.54.15", "9.0", None),
        (CUDA_13, "580.65.06", "7.0", "no kernels for Card (compute capability 7.0)"),
        (CUDA_13, "580.65.06", "7.5", None),
        ((12, 6), "580.65.06", "12.0", "no kernels for Card (compute capability 12.0)"),
        (CUDA_12, "580.65.06", "12.0", None),
        ((12, 6), "580.65.06", "6.1", None),
        (CUDA_12, "580.65.06", "", None),
        ((0,), "470.82.01", "9.0", None),
        (CUDA_12, "", "9.0", None),
    ],
)
def test_torchs_cuda_needs_a_driver_and_gpus_that_it_has_kernels_for(cuda, driver, capability, said):
    found = list(software.with_driver(cuda, driver, {"Card": capability}))
    assert len(found) == (said is not None)
    assert all(said in line.text and line.level == "error" for line in found)


def test_an_old_driver_is_given_a_build_that_it_can_run():
    (line,) = software.with_driver(CUDA_13, "550.54.15", {})
    assert "whl/cu126" in line.fix
    (line,) = software.with_driver(CUDA_13, "470.82.01", {})
    assert "whl/cpu" in line.fix


@pytest.mark.parametrize(("release", "count"), [("5.4.0-150-generic", 1), ("5.5.0", 0), ("6.18.44", 0), ("odd", 0)])
def test_a_kernel_that_is_too_old_is_told(release, count):
    assert len(list(software.kernel(release))) == count


def test_what_torch_was_built_for_is_read_without_importing_it(tmp_path, monkeypatch):
    import torch

    built = tuple(map(int, torch.version.cuda.split("."))) if torch.version.cuda else (0,)
    assert software.cuda_of_torch() == built

    class Found:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(software, "find_spec", lambda _: Found)
    (tmp_path / "version.py").write_text("__version__ = '2.11.0+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n")
    assert software.cuda_of_torch() == (12, 8)


def test_this_environment_has_no_such_pair():
    assert [line.text for line in software.check_versions() if line.level != "note"] == []
