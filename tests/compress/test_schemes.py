"""What the ranks' schemes give, on simulated ranks: the plain mathematics, the same bits everywhere, and how many."""

from __future__ import annotations

import pytest
import torch

from samestep import compress
from samestep.compress.chunks import Chunk, chunks_of, pieces_of, row_owners
from samestep.compress.codecs import Codec, Plain
from samestep.compress.compressed_mean import ReductionContext, mean, run_all
from samestep.compress.error_feedback import ErrorFeedback
from samestep.compress.powersgd import orthonormal

MOST = 8192  # elements of a piece here
SHAPES = {"a": (100, 70), "b": (16, 32, 3, 3), "c": (200, 100)}  # the last of three pieces
CODECS = [*(compress.named(name) for name in compress.CODEC_NAMES), Plain(), compress.TopK(fraction=0.1, momentum=0.9)]
NEAREST = compress.Int8(rounding="nearest")


def pieces(codec: Codec, shapes=SHAPES) -> list:
    found: list = []
    for name, shape in shapes.items():
        found += pieces_of(name, shape, len(found), most=None if codec.name == "PowerSGD" else MOST)
    return found


def chunks(codec: Codec, shapes=SHAPES, most: int = MOST) -> list[Chunk]:
    return chunks_of(pieces(codec, shapes), getattr(codec, "block", 1), most)


def one_chunk(codec: Codec, shapes: dict[str, tuple[int, ...]]) -> Chunk:
    whole = [pieces_of(name, shape, number)[0] for number, (name, shape) in enumerate(shapes.items())]
    return Chunk(tuple(whole), getattr(codec, "block", 1))


class Ranks:
    """Some ranks, and what they remember."""

    def __init__(self, codec: Codec, size: int) -> None:
        self.codec, self.size, self.step = codec, size, 0
        self.memories = [ErrorFeedback() for _ in range(size)]
        self.sent = [0] * size

    def mean(self, chunk: Chunk, flats: list[torch.Tensor]) -> torch.Tensor:
        """Returns the mean; the same bits on all ranks."""
        parts = [
            ReductionContext(chunk, rank, self.size, self.step, 0, self.memories[rank]) for rank in range(self.size)
        ]
        made = [mean(self.codec, part, flat.clone()) for part, flat in zip(parts, flats, strict=True)]
        means, sent = run_all(made)
        bits = [each.view(torch.int32) for each in means]  # NaN has some, too
        assert all(torch.equal(each, bits[0]) for each in bits)
        self.sent = [before + new for before, new in zip(self.sent, sent, strict=True)]
        return means[0]


def gradients(chunk: Chunk, size: int, step: int) -> list[torch.Tensor]:
    flats = []
    for rank in range(size):
        flat = torch.zeros(chunk.length)
        for view, piece in zip(chunk.views(flat), chunk.pieces, strict=True):
            key = 1000 * step + 10 * piece.number + rank
            view.copy_(torch.randn(piece.shape, generator=torch.Generator().manual_seed(key)))
        flats.append(flat)
    return flats


def by_piece(chunk: Chunk, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return {piece.name: view.clone() for piece, view in zip(chunk.pieces, chunk.views(flat), strict=True)}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_plain_rows_give_the_mean_added_in_the_order_of_the_ranks(size):
    ranks = Ranks(Plain(), size)
    for chunk in chunks(Plain()):
        flats = gradients(chunk, size, 0)
        total = flats[0].clone()
        for flat in flats[1:]:
            total += flat
        assert torch.equal(ranks.mean(chunk, flats), total / size)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("codec", [NEAREST, compress.Sign(), compress.Float16(feedback=True)], ids=str)
def test_rows_are_coded_twice_and_both_losses_are_owed(codec, size):
    ranks = Ranks(codec, size)
    chunk = one_chunk(codec, {"a": (300, 70), "b": (64, 32, 3, 3)})
    brought = [torch.zeros(chunk.length) for _ in range(size)]
    added = torch.zeros(chunk.length)

    def coded(flat: torch.Tensor) -> torch.Tensor:
        return codec.decode(codec.encode(flat.view(-1, codec.block))).view(-1)

    for step in range(4):
        ranks.step = step
        flats = gradients(chunk, size, step)
        total = torch.zeros(chunk.length)
        for rank, flat in enumerate(flats):
            owed = brought[rank] + flat
            brought[rank] = owed - coded(owed)
            total = coded(owed) if rank == 0 else total + coded(owed)
        owed = added + total / size
        added = owed - coded(owed)
        assert torch.equal(ranks.mean(chunk, flats), coded(owed))


def test_the_largest_travel_with_momentum_and_the_rest_is_owed():
    codec, size = compress.TopK(fraction=0.1, momentum=0.5), 3
    ranks = Ranks(codec, size)
    chunk = one_chunk(codec, {"a": (300, 70)})
    late, owed = ([torch.zeros(21_000) for _ in range(size)] for _ in range(2))
    for step in range(4):
        ranks.step = step
        flats, total = gradients(chunk, size, step), torch.zeros(21_000)
        for rank, flat in enumerate(flats):
            late[rank] = 0.5 * late[rank] + flat
            owed[rank] = owed[rank] + late[rank]
            places = owed[rank].abs().topk(2100).indices
            total[places] += owed[rank][places]
            late[rank][places] = owed[rank][places] = 0.0
        torch.testing.assert_close(ranks.mean(chunk, flats), total / size, rtol=0, atol=1e-6)


def test_low_rank_is_a_step_of_subspace_iteration():
    codec, size = compress.PowerSGD(rank=3), 2
    ranks = Ranks(codec, size)
    chunk = one_chunk(codec, {"a": (300, 70)})
    basis = torch.randn(70, 3, generator=torch.Generator().manual_seed(0))
    owed = [torch.zeros(300, 70) for _ in range(size)]
    for step in range(3):
        ranks.step = step
        flats = gradients(chunk, size, step)
        owed = [each + flat.view(300, 70) for each, flat in zip(owed, flats, strict=True)]
        column = orthonormal(sum(each @ basis for each in owed) / size)
        own = [each.T @ column for each in owed]
        owed = [each - column @ mine.T for each, mine in zip(owed, own, strict=True)]
        basis = sum(own) / size
        found = ranks.mean(chunk, flats).view(300, 70)
        torch.testing.assert_close(found, column @ basis.T, rtol=1e-3, atol=1e-3)


def test_a_gradient_of_low_rank_comes_back_whole():
    codec = compress.PowerSGD(rank=2)
    ranks = Ranks(codec, 2)
    chunk = one_chunk(codec, {"a": (300, 70)})
    made = torch.Generator().manual_seed(5)
    flats = [torch.randn(300, 1, generator=made) @ torch.randn(1, 70, generator=made) for _ in range(2)]
    found = ranks.mean(chunk, [flat.reshape(-1) for flat in flats])
    torch.testing.assert_close(found.view(300, 70), sum(flats) / 2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_chunks_do_not_change_a_bit(codec, size):
    together, apart = Ranks(codec, size), Ranks(codec, size)
    for step in range(3):
        found: list[dict[str, torch.Tensor]] = []
        for ranks, most in ((together, 4 * MOST), (apart, 1)):
            ranks.step = step
            found.append({})
            for chunk in chunks(codec, most=most if step < 2 else MOST):  # and buckets may change meanwhile
                found[-1] |= by_piece(chunk, ranks.mean(chunk, gradients(chunk, size, step)))
        assert found[0].keys() == found[1].keys()
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_remembered_can_be_saved_and_taken_up(codec):
    ranks = Ranks(codec, 2)
    for step in range(2):
        ranks.step = step
        for chunk in chunks(codec):
            ranks.mean(chunk, gradients(chunk, 2, step))
    resumed = Ranks(codec, 2)
    for old, new in zip(ranks.memories, resumed.memories, strict=True):
        saved = {kind: {name: part.clone() for name, part in parts.items()} for kind, parts in old.state().items()}
        new.load(saved)
    for one in (ranks, resumed):
        one.step = 2
    for chunk in chunks(codec, most=1):
        flats = gradients(chunk, 2, 2)
        assert torch.equal(ranks.mean(chunk, flats), resumed.mean(chunk, flats))


@pytest.mark.parametrize(
    "codec", [codec for codec in CODECS if codec.feedback and not getattr(codec, "momentum", 0)], ids=str
)
def test_with_feedback_nothing_is_lost_for_good(codec):
    """What has come out is what went in, but for what is still owed, which does not grow with the steps."""
    ranks, steps = Ranks(codec, 2), 12
    chunk = one_chunk(codec, {"a": (300, 70)})
    flats = gradients(chunk, 2, 0)  # the same again and again: a bias would add up
    wanted, off = (flats[0] + flats[1]) / 2, []
    total = torch.zeros(chunk.length)
    for step in range(steps):
        ranks.step = step
        total += ranks.mean(chunk, flats)
        off.append(float((total - (step + 1) * wanted).norm() / wanted.norm()))
    limit = {"TopK": 60, "PowerSGD": 30, "Sign": 4}.get(codec.name, 0.02)
    assert off[-1] < limit
    assert off[-1] / steps < 0.9  # of each step's gradient, most has come out


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_int8_sends_a_quarter_of_a_ring_at_any_number_of_ranks(size):
    ranks = Ranks(compress.Int8(), size)
    chunk = one_chunk(ranks.codec, {"a": (512, 512)})
    ranks.mean(chunk, gradients(chunk, size, 0))
    ring = 2 * (size - 1) / size * 4 * 512 * 512
    assert all(sent == pytest.approx(ring / 4 * 516 / 512, rel=0.01) for sent in ranks.sent)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_on_all_ranks_and_is_not_owed(codec, bad):
    ranks = Ranks(codec, 2)
    chunk = one_chunk(codec, {"a": (300, 70)})
    flats = gradients(chunk, 2, 0)
    flats[1][77] = bad
    assert not torch.isfinite(ranks.mean(chunk, flats)).all()
    ranks.step = 1
    assert torch.isfinite(ranks.mean(chunk, gradients(chunk, 2, 1))).all()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_row_is_one_ranks(size):
    for chunk in chunks(compress.Int8(), most=4 * MOST):
        owners = row_owners(chunk, size)
        rows = torch.arange(sum(chunk.rows))
        assert owners.order.sort().values.equal(rows)
        padded = torch.full((size, max(owners.counts)), -1)
        for rank, mine in enumerate(owners.order.split(list(owners.counts))):
            padded[rank, : len(mine)] = mine
            assert sum(owners.pieces[rank]) == len(mine)
        assert padded.flatten()[owners.places].equal(rows)
        assert max(owners.counts) - min(owners.counts) <= len(chunk.pieces)
