from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from samestep.recipes import images


def gradient(width, height):
    """An image in which every pixel differs."""
    pixels = np.arange(width * height * 3, dtype=np.uint32).reshape(height, width, 3) * 7 % 251
    return Image.fromarray(pixels.astype(np.uint8))


def view(seed, epoch, index):
    return images.random_view(gradient(50, 40), 24, images.sample_generator(seed, epoch, index))


def test_a_view_depends_on_seed_epoch_and_index_alone():
    first = view(0, 3, 5)
    torch.rand(10)  # the global stream has no part in it
    assert torch.equal(first, view(0, 3, 5))
    assert first.shape == (3, 24, 24)
    assert first.dtype == torch.float32


@pytest.mark.parametrize("other", [(1, 3, 5), (0, 4, 5), (0, 3, 6)])
def test_another_seed_epoch_or_index_is_another_view(other):
    assert not torch.equal(view(0, 3, 5), view(*other))


def test_about_half_of_the_views_are_mirrored():
    row = Image.fromarray(np.tile(np.linspace(0, 255, 64, dtype=np.uint8)[None, :, None], (64, 1, 3)))
    views = [images.random_view(row, 8, images.sample_generator(0, 0, index)) for index in range(200)]
    mirrored = sum(bool(each[0, 0, 0] > each[0, 0, -1]) for each in views)
    assert 70 < mirrored < 130  # 4 standard deviations of 200 fair coins are 28


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 99))
def test_a_random_box_lies_within_the_image_and_has_an_allowed_shape(width, height, index):
    left, top, right, bottom = images.random_box(width, height, images.sample_generator(0, 0, index))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    if min(right - left, bottom - top) >= 20:  # smaller ones are mostly rounding
        assert 0.7 < (right - left) / (bottom - top) < 1.43


def test_areas_cover_8_to_100_percent():
    shares = []
    for index in range(500):
        left, top, right, bottom = images.random_box(200, 200, images.sample_generator(0, 0, index))
        shares.append((right - left) * (bottom - top) / 200**2)
    assert 0.07 < min(shares) < 0.12
    assert max(shares) > 0.9
    assert math.isclose(float(np.mean(shares)), 0.5, abs_tol=0.06)


def test_an_image_too_long_for_any_box_is_cut_in_its_centre():
    assert images.centre_box(1000, 10) == (493, 0, 506, 10)
    assert images.centre_box(10, 1000) == (0, 493, 10, 506)
    assert images.centre_box(30, 30) == (0, 0, 30, 30)


@pytest.mark.parametrize(("width", "height"), [(300, 400), (400, 300), (10, 10), (225, 224)])
def test_the_centre_view_has_the_size_wanted_whatever_the_image(width, height):
    assert images.centre_view(gradient(width, height), 224).shape == (3, 224, 224)


def test_the_centre_view_shows_the_centre():
    pixels = np.zeros((256, 512, 3), dtype=np.uint8)
    pixels[64:192, 192:320] = 255
    shown = images.centre_view(Image.fromarray(pixels), 224)[0] > 0
    assert shown[112, 112]
    assert int(shown.sum()) == 128 * 128


def test_normalised_channels_are_those_of_imagenet():
    grey = images.normalise(Image.new("RGB", (1, 1), (124, 116, 104)))
    assert torch.allclose(grey.flatten(), torch.zeros(3), atol=0.02)
    white = images.normalise(Image.new("RGB", (1, 1), (255, 255, 255))).flatten()
    assert torch.allclose(white, torch.tensor([2.2489, 2.4286, 2.6400]), atol=1e-4)
