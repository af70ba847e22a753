from __future__ import annotations

import pytest
import torch

from samestep.recipes.models import RESNETS, Bottleneck, ResNet, resnet

PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_resnet_has_as_many_parameters_as_published(name):
    with torch.device("meta"):
        assert parameters(resnet(name)) == PUBLISHED[name]


def test_all_resnets_are_named():
    assert list(RESNETS) == list(PUBLISHED)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_an_image_becomes_scores_of_each_class(name):
    assert resnet(name, classes=7)(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


def test_resolution_halves_five_times_and_the_stages_widen():
    model = resnet("resnet18")
    seen = {}
    for name in ("layer1", "layer2", "layer3", "layer4"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: tuple(out.shape[1:])}))
    model(torch.zeros(1, 3, 224, 224))
    assert seen == {"layer1": (64, 56, 56), "layer2": (128, 28, 28), "layer3": (256, 14, 14), "layer4": (512, 7, 7)}


def test_a_bottleneck_strides_in_its_3x3_convolution():
    block = resnet("resnet50").layer2[0]
    assert isinstance(block, Bottleneck)
    assert [block.conv1.stride, block.conv2.stride, block.conv3.stride] == [(1, 1), (2, 2), (1, 1)]


def test_zero_init_makes_every_block_the_identity_of_its_shortcut():
    plain, zeroed = resnet("resnet50"), resnet("resnet50", zero_init=True)
    block = zeroed.layer1[1].eval()
    x = torch.rand(1, 256, 8, 8)  # not negative, so the last relu changes nothing
    assert torch.equal(block(x), x)
    assert not torch.equal(plain.layer1[1].eval()(x), x)


def test_an_empty_batch_gives_no_scores():
    assert resnet("resnet18", classes=10).eval()(torch.zeros(0, 3, 32, 32)).shape == (0, 10)


def test_parameters_bear_the_names_that_weights_are_published_under():
    names = set(resnet("resnet50").state_dict())
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.downsample.0.weight", "layer4.2.bn3.bias"} <= names
    assert {"layer1.0.downsample.1.num_batches_tracked", "fc.weight", "fc.bias"} <= names
    assert len(names) == 320


def test_every_parameter_gets_a_gradient():
    model = ResNet(Bottleneck, (1, 1, 1, 1), classes=4)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
