"""Whatever can be saved comes back equal, type and order included; whatever cannot is refused by name."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, namedtuple
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.checkpoints.encoder import Encoder
from samestep.checkpoints.manifest import SCHEMA, Manifest, decode, from_text, to_text
from samestep.errors import CheckpointError
from samestep.testing import assert_same_bits


def there_and_back(value):
    encoder = Encoder()
    tree = json.loads(json.dumps(encoder.encode(value, "thing"), allow_nan=False))
    return decode(tree, encoder.tensors)


def a_manifest(**changes):
    entries = {
        "schema": SCHEMA,
        "step": 3,
        "epoch": 1,
        "world_size": 2,
        "samestep": "1",
        "torch": "2",
        "about": {"model": {"kind": "module"}},
        "state": {"model": {"dict": {"weight": {"tensor": "model/weight"}}}},
        "extra": None,
    }
    return Manifest(**{**entries, **changes})


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner) | st.dictionaries(st.text(), inner)
    ),
    max_leaves=20,
)


@given(nested)
def test_plain_data_comes_back_equal_and_of_the_same_type(value):
    assert repr(there_and_back(value)) == repr(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1 + 0.2, 2**70])
def test_every_number_survives(value):
    assert repr(there_and_back(value)) == repr(value)


def test_a_dictionary_keeps_the_type_and_order_of_its_keys():
    value = {7: "a", "7": "b", 0: torch.ones(1), "0": torch.zeros(1), 2.5: None, True: 1}
    back = there_and_back(value)
    assert list(back) == list(value)
    assert [type(key) for key in back] == [type(key) for key in value]
    assert (back[0].item(), back["0"].item()) == (1.0, 0.0)


@pytest.mark.parametrize("value", [Counter({3: 2, 9: 1}), OrderedDict(b=1, a=2)])
def test_the_mappings_that_torch_keeps_in_its_states_keep_their_kind(value):
    back = there_and_back(value)
    assert type(back) is type(value)
    assert list(back.items()) == list(value.items())


def test_numpy_scalars_become_plain_numbers_and_arrays_stay_arrays():
    back = there_and_back({"rate": np.float64(0.1), "count": np.int64(3), "table": np.arange(6).reshape(2, 3).T})
    assert (back["rate"], back["count"]) == (0.1, 3)
    np.testing.assert_array_equal(back["table"], np.arange(6).reshape(2, 3).T)


def test_arrays_of_another_byte_order_keep_their_numbers():
    [array] = there_and_back([np.array([1.5, -2.0], dtype=">f8")])
    assert array.tolist() == [1.5, -2.0]
    assert array.dtype == np.float64


def test_views_that_differ_in_sign_alone_are_stored_apart():
    pairs = torch.tensor([1 + 2j, 3 - 4j])
    assert there_and_back([pairs.imag, pairs.conj().imag])[1].tolist() == [-2.0, 4.0]


def test_keys_with_slashes_do_not_share_a_tensor():
    back = there_and_back({"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}, "a~1b": torch.full((1,), 2.0)})
    assert [back["a/b"].item(), back["a"]["b"].item(), back["a~1b"].item()] == [0.0, 1.0, 2.0]


def test_a_tied_tensor_is_stored_once_and_comes_back_under_both_names():
    weight = torch.arange(3.0)
    encoder = Encoder()
    tree = encoder.encode({"embed": weight, "head": weight.detach()}, "model")
    assert list(encoder.tensors) == ["model/embed"]
    back = decode(tree, encoder.tensors)
    assert_same_bits(back, {"embed": weight, "head": weight})


def test_views_of_one_storage_that_differ_are_stored_apart():
    whole = torch.arange(6.0)
    value = {"whole": whole, "head": whole[:3], "square": whole.view(2, 3), "turned": whole.view(2, 3).T}
    encoder = Encoder()
    encoder.encode(value, "v")
    assert len(encoder.tensors) == 4


def test_empty_tensors_are_not_taken_for_one_another():
    back = there_and_back([torch.empty(0, 3), torch.empty(0), torch.empty(0, dtype=torch.int64)])
    assert [list(tensor.shape) for tensor in back] == [[0, 3], [0], [0]]
    assert back[2].dtype == torch.int64


Point = namedtuple("Point", "x y")  # noqa: PYI024  (the untyped kind is the one found in old code)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda x: x, "function"),
        (Fraction(1, 2), "Fraction"),
        (Point(1, 2), "Point"),
        ({1, 2}, "set"),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (np.array(["a"]), "ndarray"),
        (np.longdouble(1), "longdouble"),
        (np.ones(2, dtype=np.longdouble), "ndarray"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_place_and_type(value, named):
    with pytest.raises(CheckpointError, match=rf"optimizer/groups/1/hook.*{named}"):
        Encoder().encode({"groups": [0, {"hook": value}]}, "optimizer")


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor": "nowhere"},
        {"tensor": ["x"]},
        {"tuple": 3},
        {"float": "many"},
        {"bytes": "zz"},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"object": "os.system"},
        {"a": 1, "b": 2},
        {},
    ],
)
def test_a_malformed_tree_is_refused(tree):
    with pytest.raises(CheckpointError, match="malformed manifest"):
        decode([tree], {})


def test_a_manifest_comes_back_equal():
    manifest = a_manifest(tensors={"model/weight": {"dtype": "float32", "shape": [2], "sha256": ["0" * 64]}})
    assert from_text(to_text(manifest)) == manifest


@given(st.data())
def test_no_changed_byte_of_a_manifest_goes_unnoticed(data):
    text = bytearray(to_text(a_manifest()).encode())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] ^= 1 << data.draw(st.integers(0, 6))
    with pytest.raises(CheckpointError, match="damaged"):
        from_text(text.decode("ascii"))


@pytest.mark.parametrize("length", [0, 1, 80, -1])
def test_a_manifest_cut_short_is_damaged(length):
    with pytest.raises(CheckpointError, match="damaged"):
        from_text(to_text(a_manifest())[:length])


@pytest.mark.parametrize(
    "text", ["[]", "3", "null", '{"sha256": 3}', '{"sha256": ""}', '{"a": 1, "a": 2}', "[" * 100_000]
)
def test_what_is_no_manifest_is_damaged(text):
    with pytest.raises(CheckpointError, match="damaged"):
        from_text(text)


def test_a_later_schema_is_named():
    with pytest.raises(CheckpointError, match=f"schema 99, this samestep reads {SCHEMA}"):
        from_text(to_text(a_manifest(schema=99)))
