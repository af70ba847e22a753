from __future__ import annotations

import pickle

import pytest
import torch
from safetensors.torch import save_file

import samestep
from samestep.recipes.common import load_weights
from samestep.testing import assert_same_bits


@pytest.fixture
def saved():
    return torch.nn.Linear(3, 2)


def loaded(path):
    model = torch.nn.Linear(3, 2)
    load_weights(model, path)
    return model.state_dict()


def test_a_plain_state_dict_loads(saved, tmp_path):
    torch.save(saved.state_dict(), tmp_path / "w.pth")
    assert_same_bits(dict(loaded(tmp_path / "w.pth")), dict(saved.state_dict()))


def test_safetensors_load(saved, tmp_path):
    save_file(saved.state_dict(), tmp_path / "w.safetensors")
    assert_same_bits(dict(loaded(tmp_path / "w.safetensors")), dict(saved.state_dict()))


def test_a_checkpoint_of_the_official_example_loads_without_its_prefixes(saved, tmp_path):
    weights = {f"module.{name}": tensor for name, tensor in saved.state_dict().items()}
    torch.save({"epoch": 90, "arch": "resnet18", "state_dict": weights}, tmp_path / "w.pth.tar")
    assert_same_bits(dict(loaded(tmp_path / "w.pth.tar")), dict(saved.state_dict()))


def test_weights_of_another_network_are_refused(tmp_path):
    torch.save(torch.nn.Linear(4, 2).state_dict(), tmp_path / "w.pth")
    with pytest.raises(samestep.UsageError, match=r"w\.pth do not fit Linear: size mismatch for weight"):
        loaded(tmp_path / "w.pth")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(samestep.UsageError, match=r"no file of weights at .*none\.pth"):
        loaded(tmp_path / "none.pth")


class Trap:
    def __reduce__(self):
        return (print, ("code ran",))


def test_code_in_a_file_is_not_run(tmp_path, capsys):
    (tmp_path / "w.pth").write_bytes(pickle.dumps({"state_dict": Trap()}, protocol=2))
    with pytest.raises(samestep.UsageError, match="cannot be read as weights alone: it holds other objects"):
        loaded(tmp_path / "w.pth")
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"hello"])
def test_a_file_that_holds_no_weights_is_refused_in_one_line(tmp_path, content):
    for name in ("w.pth", "w.safetensors"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(samestep.UsageError, match="cannot be read as weights alone") as caught:
            loaded(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_a_number_is_no_state_dict(tmp_path):
    torch.save(3, tmp_path / "w.pth")
    with pytest.raises(samestep.UsageError, match="holds no state_dict"):
        loaded(tmp_path / "w.pth")
