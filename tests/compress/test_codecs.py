"""Each codec by itself: how far it is off, and what it does at the ends of the range."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from samestep import compress
from samestep.compress.codecs import Plain, RowCodec
from samestep.compress.powersgd import PowerSGD, orthonormal
from samestep.compress.topk import largest_places
from samestep.errors import UsageError

ROWS = [Plain(), compress.Float16(), compress.BFloat16(), compress.Int8(), compress.Int8(rounding="nearest")]
ROWS += [compress.Sign(), compress.Int8(block=8), compress.Float16(block=24)]
ROW_BYTES = {
    "Plain": lambda block: 4 * block,
    "Float16": lambda block: 4 + 2 * block,
    "BFloat16": lambda block: 2 * block,
    "Int8": lambda block: 4 + block,
    "Sign": lambda block: 4 + block // 8,
}
RELATIVE = {"Plain": 0.0, "Float16": 2**-11, "BFloat16": 2**-8}  # bfloat16 keeps 8 bits


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(codec: RowCodec, rows: torch.Tensor, seed: int = 1) -> torch.Tensor:
    noise = torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed))
    packets = codec.encode(rows, noise)
    assert packets.shape == (len(rows), ROW_BYTES[codec.name](codec.block))
    assert packets.dtype == torch.uint8
    return codec.decode(packets)


@pytest.mark.parametrize("codec", ROWS, ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_rows_come_back_as_near_as_the_codec_promises(codec, scale):
    rows = drawn(40, codec.block) * scale
    before = rows.clone()
    found = there_and_back(codec, rows)
    assert torch.equal(rows, before)  # what is encoded is not touched
    off = (found - rows).abs()
    most = rows.abs().amax(1, keepdim=True)
    match codec.name:
        case "Int8":
            step = most / 126
            assert (off <= step * (0.5001 if codec.rounding == "nearest" else 1.0001)).all()
        case "Sign":
            assert torch.equal(found.sign(), torch.where(rows >= 0, 1.0, -1.0))
            torch.testing.assert_close(found.abs(), rows.abs().mean(1, keepdim=True).expand_as(rows))
        case name:
            assert (off <= RELATIVE[name] * rows.abs() + most * 2**-39 * bool(RELATIVE[name])).all()


@pytest.mark.parametrize("codec", ROWS, ids=str)
def test_zeros_come_back_as_zeros(codec):
    assert not there_and_back(codec, torch.zeros(3, codec.block)).any()


@pytest.mark.parametrize("codec", ROWS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(codec, bad):
    rows = drawn(3, codec.block)
    rows[1, 3] = bad
    found = there_and_back(codec, rows)
    assert not torch.isfinite(found[1]).all()
    assert torch.isfinite(found[[0, 2]]).all()


def test_float16_holds_sums_that_float16_itself_would_not():
    rows = torch.full((1, 512), 1e6)  # 65504 is where float16 ends
    assert not torch.isfinite(rows.half()).all()
    torch.testing.assert_close(there_and_back(compress.Float16(), rows), rows, rtol=2**-11, atol=0)


def test_stochastic_rounding_has_no_bias_and_nearest_has():
    rows = torch.full((1, 512), 0.3)
    rows[0, 0] = 126.0  # so that a level is 1
    stochastic = torch.stack([there_and_back(compress.Int8(), rows, seed) for seed in range(200)])
    # 200 · 511 draws of a variable of deviation 0.458: the mean is within 5 deviations of the mean, 0.0072
    assert abs(float(stochastic[..., 1:].mean()) - 0.3) < 5 * math.sqrt(0.3 * 0.7 / (200 * 511))
    assert not there_and_back(compress.Int8(rounding="nearest"), rows)[0, 1:].any()


@pytest.mark.parametrize("count", [1, 7, 1000, 12_000, 99_999, 100_000])
@pytest.mark.parametrize("kind", ["normal", "ties", "few", "sorted"])
def test_the_largest_are_found_whatever_the_sample_says(count, kind):
    values = drawn(100_000)
    if kind == "ties":
        values = values.round()
    if kind == "few":
        values[torch.rand(100_000, generator=torch.Generator().manual_seed(3)) > 1e-3] = 0.0
    if kind == "sorted":
        values = values.sort().values
    found = largest_places(values, count)
    assert len(found.unique()) == count
    expected = values.abs().topk(count).values
    assert torch.equal(values[found].abs().sort().values, expected.sort().values)


def test_nan_counts_as_largest():
    values = drawn(100_000)
    values[77_777] = math.nan
    assert 77_777 in largest_places(values, 10).tolist()


def test_a_basis_is_orthonormal():
    basis = orthonormal(drawn(50, 4))
    torch.testing.assert_close(basis.T @ basis, torch.eye(4), atol=1e-6, rtol=0)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dependent", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.0, 1.0, 0.0)])
def test_columns_that_are_zero_or_alike_leave_no_gap_in_the_basis(scale, dependent):
    matrix = torch.zeros(50, 4)
    matrix[0, 0] = scale  # along the first unit vector, which is what a gap would be filled with
    matrix[:, 1:] = matrix[:, :1] * torch.tensor(dependent)
    basis = orthonormal(matrix)
    torch.testing.assert_close(basis.T @ basis, torch.eye(4), atol=1e-6, rtol=0)
    assert basis[0, 0] == 1.0


def test_a_basis_is_the_same_by_any_number_of_threads():
    matrix, before = drawn(50_000, 2), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(orthonormal(matrix))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("shape", "taken"), [((64,), False), ((8, 8), False), ((100, 100), True), ((64, 32, 3, 3), True), ((2, 600), False)]
)
def test_small_and_flat_tensors_are_exempt_and_what_low_rank_would_not_halve(shape, taken):
    assert PowerSGD(rank=2).takes(torch.Size(shape)) == taken


def test_a_warm_up_falls_by_the_same_factor_each_step():
    codec = compress.TopK(fraction=0.001, warmup=4)
    fractions = [codec.fraction_at(step) for step in range(6)]
    assert fractions[0] == 0.25
    assert fractions[4] == fractions[5] == 0.001
    ratios = [after / before for before, after in itertools.pairwise(fractions[:5])]
    assert all(math.isclose(ratio, ratios[0]) for ratio in ratios)


BAD = [
    (lambda: compress.TopK(fraction=0), "fraction=0 is no part of the elements"),
    (lambda: compress.TopK(fraction=1.5), "fraction=1.5 is no part"),
    (lambda: compress.TopK(fraction=math.nan), "fraction=nan is no part"),
    (lambda: compress.TopK(momentum=1.0), "momentum=1.0 must be"),
    (lambda: compress.TopK(warmup=-1), "warmup=-1 is no number"),
    (lambda: compress.TopK(feedback=False), "never send what is small"),
    (lambda: compress.Int8(block=12), "block=12 is no length"),
    (lambda: compress.Int8(rounding="up"), "rounding='up' is unknown"),
    (lambda: compress.Sign(block=8), "give a multiple of 32"),
    (lambda: compress.PowerSGD(rank=0), "rank=0 is no rank"),
    (lambda: compress.Int8(exempt=-1), "exempt=-1 is no number"),
    (lambda: compress.named("int4"), "compress='int4' is no codec: use 'fp16', 'bf16', 'int8'"),
    (lambda: compress.named(8), "compress=8 is no codec"),
    (lambda: compress.Int8().check_dtype("w", torch.complex64), "codes float32, .* w is complex64"),
    (lambda: compress.Float16().check_dtype("w", torch.bfloat16), "saves nothing where gradients have 2 bytes"),
]


@pytest.mark.parametrize(("make", "said"), BAD, ids=[said for _, said in BAD])
def test_settings_that_make_no_sense_are_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()


def test_every_name_is_a_codec_that_declares_itself():
    for name, kind in compress.CODEC_NAMES.items():
        codec = compress.named(name)
        assert isinstance(codec, kind)
        assert codec.declared()["codec"] == kind.__name__
        assert compress.named(codec) is codec
