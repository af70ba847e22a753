from __future__ import annotations

import shutil

import pytest
import torch

import samestep
from samestep.recipes.images import DummyImages, ImageFolder, train_and_val

# a machine with fewer cores than loader processes is told so, and is right
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def first_views(dataset, workers, epochs=1):
    """What an epoch of shards yields, in order."""
    with samestep.world() as world:
        batches = samestep.shards(dataset, world, batch_size=16, workers=workers, shuffle=False)
        for _ in range(epochs):
            images = [images for images, _ in batches]
    return torch.cat(images)


def test_classes_are_folders_and_images_are_sorted(digit_folder):
    train, val = train_and_val(digit_folder, size=16, seed=0)
    assert train.classes == [str(digit) for digit in range(10)]
    assert (len(train), len(val)) == (80, 30)
    assert train.paths == sorted(train.paths)
    assert train.labels == [index // 8 for index in range(80)]
    image, label = train[79]
    assert image.shape == (3, 16, 16)
    assert label == 9


def test_views_do_not_depend_on_the_number_of_workers(digit_folder):
    train, _ = train_and_val(digit_folder, size=16, seed=0)
    alone = first_views(train, workers=0)
    assert torch.equal(alone, first_views(train, workers=1))
    assert torch.equal(alone, first_views(train, workers=3))


def test_views_change_with_the_epoch_in_workers_too(digit_folder):
    train, _ = train_and_val(digit_folder, size=16, seed=0)
    first, second = first_views(train, workers=0), first_views(train, workers=0, epochs=2)
    assert not torch.equal(first, second)
    assert torch.equal(second, first_views(train, workers=2, epochs=2))


def test_validation_views_never_change(digit_folder):
    val = ImageFolder(digit_folder / "val", size=16)
    before = val[4][0]
    val.set_epoch(7)
    assert torch.equal(before, val[4][0])


def test_images_lie_in_subfolders_too_and_other_files_are_left_alone(digit_folder, tmp_path):
    shutil.copytree(digit_folder / "val", tmp_path / "val")
    (tmp_path / "val" / "3" / "deeper").mkdir()
    shutil.copy(digit_folder / "val" / "3" / "8.png", tmp_path / "val" / "3" / "deeper" / "x.JPG")
    (tmp_path / "val" / "3" / "notes.txt").write_text("not an image")
    assert len(ImageFolder(tmp_path / "val", size=16)) == 31


def test_a_grey_image_becomes_rgb(digit_folder):
    image, _ = ImageFolder(digit_folder / "val", size=16)[0]
    assert image.shape[0] == 3


def test_a_missing_data_folder_is_named(tmp_path):
    with pytest.raises(samestep.UsageError, match="no data folder at .*nowhere"):
        train_and_val(tmp_path / "nowhere", size=16, seed=0)


def test_a_folder_without_train_is_named(tmp_path):
    with pytest.raises(samestep.UsageError, match="no folder .*train: images belong into"):
        train_and_val(tmp_path, size=16, seed=0)


def test_a_folder_without_classes_is_named(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(samestep.UsageError, match="train holds no class folders"):
        train_and_val(tmp_path, size=16, seed=0)


def test_a_class_without_images_is_named(tmp_path):
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "readme.txt").write_text("no image")
    with pytest.raises(samestep.UsageError, match="cat holds no images"):
        train_and_val(tmp_path, size=16, seed=0)


def test_classes_that_only_one_part_has_are_named(digit_folder, tmp_path):
    shutil.copytree(digit_folder, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "val" / "7")
    with pytest.raises(samestep.UsageError, match="train has 10 classes .*val has 9; only in one of them: 7"):
        train_and_val(tmp_path, size=16, seed=0)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", ["text", "truncated"])
def test_a_broken_image_is_named_from_a_worker_too(digit_folder, tmp_path, workers, damage):
    shutil.copytree(digit_folder / "train", tmp_path / "train")
    broken = tmp_path / "train" / "5" / "2.JPEG"
    whole = broken.read_bytes()
    broken.write_bytes(b"hello" if damage == "text" else whole[: len(whole) // 2])
    with pytest.raises(samestep.UsageError, match=r"cannot read image .*train/5/2\.JPEG") as caught:
        first_views(ImageFolder(tmp_path / "train", size=16), workers)
    assert "\n" not in str(caught.value)


def test_dummy_images_are_the_same_everywhere():
    one, two = DummyImages(10, size=16), DummyImages(10, size=16)
    assert len(one) == 10
    assert torch.equal(one[3][0], two[3][0])
    assert one[3][1] == two[3][1]
    assert not torch.equal(one[3][0], one[4][0])
    assert not torch.equal(one[3][0], DummyImages(10, size=16, seed=1)[3][0])
