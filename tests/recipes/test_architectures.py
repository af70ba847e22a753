from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import samestep
from samestep.recipes import models
from samestep.recipes.models import architecture


@pytest.fixture
def no_libraries(monkeypatch):
    """As on a machine without torchvision and timm."""
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    monkeypatch.setitem(sys.modules, "timm", None)


@pytest.fixture
def libraries(monkeypatch):
    """torchvision and timm, as far as the recipe sees them."""
    vision, timm = ModuleType("torchvision.models"), ModuleType("timm")
    vision.list_models = lambda module: ["vit_b_16", "alexnet"]
    vision.get_model = lambda name, num_classes: torch.nn.Linear(1, num_classes)
    timm.list_models = lambda: ["convnext_tiny"]
    timm.create_model = lambda name, num_classes: torch.nn.Linear(2, num_classes)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", vision)
    monkeypatch.setitem(sys.modules, "timm", timm)


def test_a_resnet_comes_from_this_package(no_libraries):
    assert architecture("resnet18", classes=4).fc.out_features == 4


def test_an_unknown_name_lists_what_there_is(no_libraries):
    with pytest.raises(samestep.UsageError) as caught:
        architecture("resnet19", classes=4)
    said = str(caught.value)
    assert "unknown architecture 'resnet19', did you mean 'resnet18'?" in said
    assert "resnet18, resnet34, resnet50, resnet101, resnet152" in said
    assert "not importable here: torchvision (" in said
    assert "timm (" in said
    assert "\n" not in said


def test_torchvision_and_timm_serve_the_names_they_know(libraries):
    assert architecture("vit_b_16", classes=4).in_features == 1
    assert architecture("convnext_tiny", classes=4).in_features == 2


def test_an_unknown_name_counts_what_the_libraries_have(libraries):
    with pytest.raises(samestep.UsageError, match="did you mean 'alexnet'.* and 3 more"):
        architecture("alexnett", classes=4)


def test_a_library_whose_compiled_part_does_not_fit_is_told_apart(monkeypatch, no_libraries):
    def broken(library):
        raise RuntimeError("operator torchvision::nms does not exist\nmore")

    monkeypatch.setitem(models.CATALOGUES, "torchvision", broken)
    with pytest.raises(samestep.UsageError, match=r"torchvision \(operator torchvision::nms does not exist\)"):
        architecture("vit_b_16", classes=4)


def test_a_name_like_no_other_is_refused_in_a_sentence_too(no_libraries):
    with pytest.raises(samestep.UsageError, match="unknown architecture 'zzz': there are resnet18, "):
        architecture("zzz", classes=4)
