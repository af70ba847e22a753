"""Replicas that part are found at the next check, by the right rank's name; those that do not part never are."""

import io
import itertools
import warnings
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep
from samestep.errors import DriftError, StepError, UsageError
from samestep.replicas import drift, optimizer_steps, state_digest
from samestep.replicas.drift import DriftGuard, DriftMonitor, guard_of, same_everywhere
from samestep.replicas.state_digest import (
    Difference,
    StateItem,
    describe,
    device_hash,
    differences,
    digest_of_all,
    items_of_model,
    minority_ranks,
    signed,
)
from samestep.testing import assert_same_bits

NAMES = ("0.weight", "0.bias", "3.weight", "3.bias")
BITS = 32  # of a float32


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 3))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Training:
    """A guarded replica that takes steps; `between` is called after each update, before the guard looks."""

    def __init__(self, world, guard, make=net, optimizer=sgd, **options):
        self.world = world
        self.model = samestep.replicate(make(), world, nonfinite="off", **options)
        self.module = self.model.module
        self.watch = DriftMonitor(self.module, world, guard)
        self.optimizer = optimizer(self.module.parameters())
        self.between = lambda: None
        self.optimizer.register_step_post_hook(lambda *_: self.between())
        self.generator = torch.Generator().manual_seed(world.rank)

    def step(self):
        x = torch.randn(5, 6, generator=self.generator)
        y = torch.randint(0, 3, (5,), generator=self.generator)
        F.cross_entropy(self.model(x), y).backward()
        try:
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()

    def steps(self, count):
        for _ in range(count):
            self.step()

    def parameter(self, name):
        return dict(self.module.named_parameters())[name]

    def change(self, rank, name="0.weight", by=1.0):
        """One rank does to one element what the others do not."""
        if self.world.rank == rank:
            with torch.no_grad():
                self.parameter(name).view(-1)[1] += by

    def bits(self):
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}


def caught(act):
    """The error that an act raises, in parts that can travel."""
    try:
        act()
    except DriftError as error:
        return str(error), error.ranks, error.secondary
    return None


# --- what is found, and what is not ----------------------------------------------------------


def flip(tensor, element, bit):
    tensor.detach().view(-1).view(torch.int32)[element] ^= 1 << bit if bit < 31 else -(1 << 31)


def flipped_bits(count, on_device):
    """At every other step one bit of one rank; the steps between must be healthy. Returns what was said of each."""
    stays, state_digest._on_device = state_digest._on_device, (lambda _: True) if on_device else state_digest._on_device
    try:
        with samestep.world() as world:
            training = Training(world, DriftGuard(every=1))
            chosen = torch.Generator().manual_seed(7)  # the same on every rank
            found = []
            for _ in range(count):
                training.step()
                rank, which, bit = (
                    int(torch.randint(0, most, (1,), generator=chosen)) for most in (world.size, len(NAMES), BITS)
                )
                tensor = training.parameter(NAMES[which])
                element = int(torch.randint(0, tensor.numel(), (1,), generator=chosen))

                def upset(rank=rank, tensor=tensor, element=element, bit=bit):
                    if rank == world.rank:
                        flip(tensor, element, bit)

                training.between = upset
                found.append((rank, NAMES[which], caught(training.step)))
                training.between = lambda: None
                upset()  # back again
            return found, training.watch.checks, training.watch.found
    finally:
        state_digest._on_device = stays


@pytest.mark.parametrize("on_device", [False, True], ids=["xxh3", "mixed words"])
@pytest.mark.parametrize("flips", [20, pytest.param(100, marks=pytest.mark.prove)])
def test_a_flipped_bit_is_found_at_the_next_check_each_time_by_its_rank_and_tensor(three_ranks, flips, on_device):
    for here, (found, checks, count) in enumerate(three_ranks(flipped_bits, flips, on_device)):
        assert (len(found), checks, count) == (flips, 2 * flips, flips)
        assert {rank for rank, _, _ in found} == {0, 1, 2}
        for number, (rank, name, told) in enumerate(found):
            text, ranks, secondary = told
            since = f"after step {2 * number + 1} they were alike, at step {2 * number + 2} no longer"
            expected = (
                f"the replicas of Sequential are not alike: rank {rank} differs from the others in {name}; {since}."
            )
            assert text.startswith(expected)
            assert (ranks, secondary) == ((rank,), here != rank)


def changed_in_between(at):
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=4))
        training.steps(at)
        training.change(1, by=1e-3)
        steps = 0
        while (told := caught(training.step)) is None:
            steps += 1
        return told[0], at + steps + 1


@pytest.mark.parametrize("at", [0, 1, 3, 4, 6])
def test_what_changes_at_any_time_is_found_at_the_next_multiple(three_ranks, at):
    expected = 4 * (at // 4 + 1)
    since = (
        "after step 4 they were alike, at step 8 no" if at >= 4 else "found at step 4; no check before it found them"
    )
    for text, step in three_ranks(changed_in_between, at):
        assert step == expected
        assert "rank 1 differs from the others in 0.weight; " + since in text  # the others share its wrong gradients


def healthy(make, optimizer, guard, steps, options):
    with samestep.world(**options) as world:
        training = Training(world, guard, make, optimizer, **({"batchnorm": "local"} if make is normed else {}))
        if world.virtual is None:
            training.steps(steps)
        else:
            data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.arange(64) % 3)
            batches = samestep.shards(data, world, batch_size=8)
            for x, y in itertools.islice(itertools.chain.from_iterable(itertools.repeat(batches)), 4 * steps):
                batches.mean(F.cross_entropy(training.model(x), y, reduction="none")).backward()
                if batches.step_ends:
                    training.optimizer.step()
                    training.optimizer.zero_grad()
        watch = training.watch
        return watch.steps, watch.checks, watch.found, watch.last_alike


def normed():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.InstanceNorm1d(8), nn.Linear(8, 3))


def synchronised():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def test_no_false_alarm_in_200_healthy_steps_with_dropout_and_momentum(three_ranks):
    guard = DriftGuard(every=1, optimizer_state=True)
    assert three_ranks(healthy, net, sgd, guard, 200, {}) == [(200, 200, 0, 200)] * 3


@pytest.mark.parametrize("make", [normed, synchronised])
def test_no_false_alarm_with_statistics_that_are_each_ranks_own_or_of_all(two_ranks, make):
    guard = DriftGuard(every=2, optimizer_state=True)
    assert two_ranks(healthy, make, adam, guard, 9, {}) == [(9, 4, 0, 8)] * 2


class Remembering(nn.Module):
    """Keeps what its own samples were, in a buffer that nobody makes alike."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.seen.copy_(x.detach().mean(dim=0))
        return x


def remembering():
    torch.manual_seed(1)
    return nn.Sequential(Remembering(), nn.Linear(6, 3))


def test_a_buffer_of_ones_own_samples_is_found_unless_left_out(two_ranks):
    assert two_ranks(healthy, remembering, adam, DriftGuard(every=2, buffers=False), 4, {}) == [(4, 2, 0, 4)] * 2
    with pytest.raises(samestep.RankFailure, match="ranks 0 and 1 differ in 0.seen, and of two nobody can tell"):
        two_ranks(healthy, remembering, adam, DriftGuard(every=2), 4, {})


@pytest.mark.parametrize("make", [net, normed, remembering])
def test_no_false_alarm_on_virtual_ranks(two_ranks, make):
    """Four slices on two ranks: two micro-batches a step."""
    guard = DriftGuard(every=2, optimizer_state=True)
    assert two_ranks(healthy, make, adam, guard, 4, {"virtual_ranks": 4}) == [(8, 4, 0, 8)] * 2


def drifted_statistics(buffers):
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=1, buffers=buffers), synchronised)
        training.step()
        if world.rank == 1:
            training.module[1].running_var[3] += 1e-3
        return caught(training.step)


def test_synchronised_statistics_are_compared_unless_left_out(three_ranks):
    for text, ranks, _ in three_ranks(drifted_statistics, True):
        assert "rank 1 differs from the others in 1.running_var;" in text
        assert ranks == (1,)
    assert three_ranks(drifted_statistics, False) == [None] * 3


def exchanged(kind):
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=1))
        training.step()

        def exchange():
            if world.rank != 1:
                return
            weight = training.parameter("0.weight").detach()
            if kind == "elements":
                weight[2, 3], weight[4, 1] = float(weight[4, 1]), float(weight[2, 3])
            else:
                weight[[0, 1]] = weight[[1, 0]]

        training.between = exchange
        return caught(training.step)


@pytest.mark.parametrize("kind", ["elements", "rows"])
def test_exchanged_elements_are_found(three_ranks, kind):
    for text, ranks, _ in three_ranks(exchanged, kind):
        assert "rank 1 differs from the others in 0.weight;" in text
        assert ranks == (1,)


def drifted_state(what, optimizer_state):
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=1, optimizer_state=optimizer_state), optimizer=adam)
        training.step()

        def upset():
            if world.rank == 2:
                weight = training.parameter("3.weight")
                if what == "lr":
                    training.optimizer.param_groups[0]["lr"] = 0.02
                elif what == "betas":
                    training.optimizer.param_groups[0]["betas"] = (0.8, 0.999)
                else:
                    training.optimizer.state[weight][what] += 1

        training.between = upset
        return caught(training.step)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("exp_avg_sq", "exp_avg_sq of 3.weight in AdamW"),
        ("step", "step of 3.weight in AdamW"),
        ("lr", "lr of AdamW's group 0"),
        ("betas", "betas of AdamW's group 0"),
    ],
)
def test_drifted_optimizer_state_is_found_on_request_and_not_without(three_ranks, what, name):
    for text, ranks, _ in three_ranks(drifted_state, what, True):
        assert f"rank 2 differs from the others in {name};" in text
        assert ranks == (2,)
    assert three_ranks(drifted_state, what, False) == [None] * 3


# --- policies --------------------------------------------------------------------------------


def parted(policy, changes):
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=2, policy=policy))
        training.steps(2)
        for rank, name in changes:
            training.change(rank, name)
        return caught(lambda: training.steps(2))


def test_all_ranks_stop_with_the_same_sentence_and_only_the_culprit_is_to_blame(three_ranks):
    told = three_ranks(parted, "stop", [(1, "3.bias"), (1, "0.bias"), (2, "0.weight")])
    text = (
        "the replicas of Sequential are not alike: rank 2 differs from the others in 0.weight; rank 1 differs from the "
        "others in 0.bias and 3.bias; after step 2 they were alike, at step 4 no longer. Averaged gradients do not "
        "part them: look for what one rank alone does to its model or optimizer, or for a faulty machine; "
        "DriftGuard(policy='repair') sends all what most have"
    )
    assert told == [(text, (1, 2), rank not in (1, 2)) for rank in range(3)]


def test_of_two_nobody_can_tell(two_ranks):
    for text, ranks, secondary in two_ranks(parted, "stop", [(1, "0.bias")]):
        assert "ranks 0 and 1 differ in 0.bias, and of two nobody can tell which is right;" in text
        assert (ranks, secondary) == ((), False)


def test_without_a_majority_nobody_can_tell(three_ranks):
    def all_different():
        with samestep.world() as world:
            training = Training(world, DriftGuard(every=1))
            training.change(world.rank, by=1.0 + world.rank)
            return caught(training.watch.check)

    for text, ranks, secondary in three_ranks(all_different):
        assert "ranks 0, 1 and 2 differ in 0.weight, no version is on most, and nobody can tell which is right" in text
        assert (ranks, secondary) == ((), False)


def warned():
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=1, policy="warn"))
        training.change(2)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            training.steps(13)
        return [str(one.message) for one in said], training.watch.found, training.watch.last_alike


def test_warnings_come_from_the_first_rank_and_only_ten_times(three_ranks):
    first, *others = three_ranks(warned)
    assert others == [([], 13, None)] * 2
    said, found, last_alike = first
    assert (len(said), found, last_alike) == (10, 13, None)
    assert "rank 2 differs from the others in 0.weight; found at step 1" in said[0]
    assert said[9].endswith("; more will only be counted")
    assert not said[8].endswith("counted")


def repaired(optimizer_state, upset):
    with samestep.world() as world, redirect_stderr(io.StringIO()) as told:
        guard = DriftGuard(every=2, policy="repair", optimizer_state=optimizer_state)
        training = Training(world, guard, optimizer=adam)
        training.steps(3)
        upset(training)
        before = training.bits()
        training.between = lambda: before.update(training.bits())  # as step 4 left them
        training.step()
        after, training.between = training.bits(), lambda: None
        training.steps(6)
        watch = training.watch
        state = {name: training.optimizer.state[training.parameter(name)] for name in NAMES}
        counts = (watch.checks, watch.found, watch.repaired, watch.last_alike)
        group = {key: value for key, value in training.optimizer.param_groups[0].items() if key != "params"}
        return before, after, training.bits(), state, group, counts, told.getvalue()


def one_weight(training):
    training.change(1)


def test_repair_gives_all_what_most_had_and_training_goes_on_alike(three_ranks):
    results = three_ranks(repaired, False, one_weight)
    before, after, later = (dict(enumerate(one)) for one in list(zip(*results, strict=True))[:3])
    for rank in range(3):
        assert_same_bits(after[rank], before[0])
        assert_same_bits(later[rank], later[0])
        assert results[rank][5] == (5, 1, 1, 10)
    assert not torch.equal(before[1]["0.weight"], before[0]["0.weight"])
    assert [told for *_, told in results[1:]] == ["", ""]
    assert results[0][-1] == (
        "samestep: the replicas of Sequential are not alike: rank 1 differs from the others in 0.weight; after step 2 "
        "they were alike, at step 4 no longer; repaired: all have what rank 0 had\n"
    )


def state_of_the_first(training):
    """Rank 0 itself is wrong here, in all that an optimizer holds."""
    if training.world.rank == 0:
        state = training.optimizer.state[training.parameter("3.bias")]
        state["exp_avg"] += 0.5
        state["step"] += 2
        training.optimizer.param_groups[0].update(lr=0.3, betas=(0.5, 0.6))


@pytest.mark.prove
def test_repair_covers_the_optimizer_where_it_is_compared(three_ranks):
    results = three_ranks(repaired, True, state_of_the_first)
    for _, _, later, state, group, counts, _ in results:
        assert_same_bits(later, results[1][2])
        assert_same_bits(state, results[1][3])
        assert (group["lr"], group["betas"]) == (0.01, (0.9, 0.999))
        assert counts == (5, 1, 1, 10)
    assert "rank 0 differs from the others in 3.bias, " not in results[0][-1]  # its parameters differ, too
    assert "all have what rank 1 had" in results[0][-1]


def test_of_two_the_lower_rank_is_taken_and_that_is_said(two_ranks):
    results = two_ranks(repaired, False, one_weight)
    assert_same_bits(results[1][1], results[0][0])
    assert_same_bits(results[1][2], results[0][2])
    assert "of two nobody can tell which is right" in results[0][-1]
    assert results[0][-1].endswith("repaired: all have what rank 0 had, be it right or wrong\n")


def drifts_again(steps):
    with samestep.world() as world, redirect_stderr(io.StringIO()):
        training = Training(world, DriftGuard(every=1, policy="repair"))
        found = []
        for ranks in steps:
            for rank in ranks:
                training.change(rank, NAMES[rank])
            found.append(caught(training.step))
        return found, training.watch.repaired


def test_the_same_rank_three_times_in_a_row_stops(three_ranks):
    for rank, (found, count) in enumerate(three_ranks(drifts_again, [[2], [1, 2], [2]])):
        assert found[:2] == [None, None]
        text, ranks, secondary = found[2]
        assert text.startswith(
            "rank 2 has drifted at 3 checks in a row, so repairing does not help, and something there is broken: the "
            "replicas of Sequential are not alike: rank 2 differs from the others in 3.weight;"
        )
        assert (ranks, secondary, count) == ((2,), rank != 2, 2)


def test_of_two_nobody_is_blamed_for_three_in_a_row(two_ranks):
    for found, count in two_ranks(drifts_again, [[1], [1], [1]]):
        assert (found[:2], count) == ([None, None], 2)
        text, ranks, secondary = found[2]
        assert text.startswith(
            "replicas have diverged at 3 checks in a row, so repairing does not help, and something is broken: the "
            "replicas of Sequential are not alike: ranks 0 and 1 differ in 0.bias, and of two nobody can tell"
        )
        assert text.endswith("neither compared nor repaired without optimizer_state=True")
        assert (ranks, secondary) == ((), False)


@pytest.mark.parametrize("steps", [[[2], [2], [], [2], [2]], [[2], [2], [1], [2], [2]]])
def test_three_times_not_in_a_row_are_repaired(three_ranks, steps):
    repairs = sum(bool(ranks) for ranks in steps)
    assert three_ranks(drifts_again, steps) == [([None] * 5, repairs)] * 3


def of_another_shape():
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=1, policy="repair"))
        if world.rank == 0:
            training.module.register_buffer("more", torch.ones(2))
        return caught(training.watch.check)


def test_what_not_all_have_cannot_be_repaired(three_ranks):
    for text, ranks, _ in three_ranks(of_another_shape):
        assert "rank 0 differs from the others in more;" in text
        assert text.endswith("; more cannot be repaired: not of one shape on all ranks")
        assert ranks == (0,)


def of_no_use():
    drift.broadcast_item, before = lambda *_: None, drift.broadcast_item
    try:
        with samestep.world() as world:
            training = Training(world, DriftGuard(every=1, policy="repair"))
            training.change(1)
            return caught(training.watch.check)
    finally:
        drift.broadcast_item = before


def test_a_repair_that_did_nothing_is_an_error(three_ranks):
    for text, ranks, _ in three_ranks(of_no_use):
        assert text.endswith("; sent to all again, they still are not alike, so something is broken")
        assert ranks == (1,)


# --- steps -----------------------------------------------------------------------------------


def adversaries():
    """Two models and two optimizers; the discriminator steps twice as often."""
    with samestep.world() as world:
        makers = {"generator": nn.Linear(6, 6), "discriminator": nn.Bilinear(6, 6, 1)}
        models = {name: samestep.replicate(make, world) for name, make in makers.items()}
        watches = {name: DriftMonitor(model.module, world, DriftGuard(every=4)) for name, model in models.items()}
        optimizers = {name: sgd(model.parameters()) for name, model in models.items()}
        found = []
        for turn in range(10):
            for name in ("discriminator", "discriminator", "generator"):
                fake = models["generator"](torch.randn(3, 6))
                models["discriminator"](fake, fake).mean().backward()
                if (turn, name, world.rank) == (6, "generator", 1):
                    models[name].module.bias.data[2] += 1
                found.append(caught(optimizers[name].step))
                for optimizer in optimizers.values():
                    optimizer.zero_grad()
        counts = [(watch.steps, watch.checks, watch.found) for watch in watches.values()]
        return [one for one in found if one is not None], counts


def test_the_models_of_a_gan_are_watched_apart(three_ranks):
    for (told,), counts in three_ranks(adversaries):
        text, ranks, _ = told
        assert "the replicas of Linear are not alike: rank 1 differs from the others in bias; after step 4" in text
        assert ranks == (1,)
        assert counts == [(10, 2, 1), (20, 5, 0)]


def shared_model(shares):
    """One model with several optimizers, of which the second steps every other time."""
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=4, optimizer_state=True))
        layers = [training.module[0], training.module[3]]
        optimizers = [adam(layer.parameters()) for layer in layers] if shares else [adam(training.module.parameters())]
        checked = []
        for number in range(9):
            training.model(torch.randn(5, 6)).sum().backward()
            for optimizer in optimizers[: 1 + number % 2] if shares else optimizers:
                before = training.watch.checks
                optimizer.step()
                if training.watch.checks > before:
                    checked.append((number + 1, optimizers.index(optimizer)))
        names = {item.name for item in training.watch._items()}
        if world.rank == 1:
            optimizers[-1].state[layers[1].bias]["exp_avg"] += 1
        return checked, "exp_avg of 3.bias in AdamW 2" in names, caught(training.watch.check)


@pytest.mark.parametrize("shares", [False, True])
def test_several_optimizers_of_a_model_take_its_steps_together(three_ranks, shares):
    name = f"exp_avg of 3.bias in AdamW{' 2' if shares else ''}"
    for checked, named, (text, ranks, _) in three_ranks(shared_model, shares):
        assert checked == [(4, 0), (8, 0)]
        assert named == shares
        assert f"rank 1 differs from the others in {name}" in text
        assert ranks == (1,)


def replaced():
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=2))
        training.steps(3)
        old, training.optimizer = training.optimizer, adam(training.module.parameters())
        training.steps(5)
        assert old is not training.optimizer
        return training.watch.steps, training.watch.checks


def test_another_optimizer_may_take_over(two_ranks):
    assert two_ranks(replaced) == [(7, 3)] * 2  # its first step belongs to the old one's last


def of_one_optimizer():
    """The watches of two models with one optimizer must check in one order, or the ranks' digests would cross."""
    with samestep.world() as world:
        models = [samestep.replicate(net(), world) for _ in range(6)]
        watches = [DriftMonitor(model.module, world, DriftGuard(every=1)) for model in models]
        optimizer = sgd([parameter for model in models for parameter in model.parameters()])
        order = []
        for watch in watches:
            watch.check = lambda watch=watch: order.append(watches.index(watch))
        optimizer.step()
        return order


def test_several_models_of_one_optimizer_are_checked_in_the_same_order(two_ranks):
    assert two_ranks(of_one_optimizer) == [[0, 1, 2, 3, 4, 5]] * 2


def zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with samestep.world() as world:
        training = Training(
            world, DriftGuard(every=1), optimizer=lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=0.01)
        )
        training.steps(4)
        return training.watch.steps, training.watch.checks, training.watch.found


def test_an_optimizer_within_another_is_not_looked_at_in_mid_step(two_ranks):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert two_ranks(zero_redundancy) == [(4, 4, 0)] * 2


def with_closure():
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=1, optimizer_state=True))
        training.model.eval()  # dropout would make the loss another at every call
        optimizer = torch.optim.LBFGS(training.module.parameters(), max_iter=3)
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(world.rank))

        def closure():
            optimizer.zero_grad()
            loss = training.model(x).square().mean()
            loss.backward()
            torch.distributed.all_reduce(loss.detach(), group=world.data.group)  # LBFGS decides by it
            return loss

        for _ in range(3):
            optimizer.step(closure)
        names = [item.name for item in training.watch._items()]
        return training.watch.checks, training.watch.found, sum("old_dirs" in name for name in names) > 0


def test_an_optimizer_that_calls_a_closure_takes_one_step(two_ranks):
    assert two_ranks(with_closure) == [(3, 0, True)] * 2


def at_different_steps():
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=1))
        training.watch.steps = world.rank
        try:
            training.watch.check()
        except StepError as error:
            return str(error)


def test_ranks_at_different_steps_are_told_so(two_ranks):
    for text in two_ranks(at_different_steps):
        assert text.startswith("the ranks came to different checks of their replicas: rank 0 at step 0 of model ")
        assert ", rank 1 at step 1 of model " in text


def paused():
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=2))
        training.steps(3)
        training.watch.active = False
        training.steps(3)
        training.watch.active = True
        training.steps(1)
        return training.watch.steps, training.watch.checks


def test_it_can_be_left_alone_for_a_while(two_ranks):
    assert two_ranks(paused) == [(4, 2)] * 2


def after_the_world():
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=1))
        training.step()
    training.optimizer.step()
    try:
        training.watch.check()
    except StepError as error:
        return training.watch.checks, str(error)


def test_after_the_world_nobody_is_asked(two_ranks):
    for checks, text in two_ranks(after_the_world):
        assert checks == 1
        assert "is closed" in text


# --- weights sent again ----------------------------------------------------------------------


def sent_again():
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=100), synchronised)
        training.steps(2)
        first = training.bits()
        with torch.no_grad():
            for tensor in [*training.module.parameters(), *training.module.buffers()]:
                tensor += world.rank
        alike = caught(training.watch.check) is None
        training.watch.resync()
        return alike, first, training.bits(), training.watch.check()


def test_resync_sends_parameters_and_buffers_of_rank_0(three_ranks):
    results = three_ranks(sent_again)
    for alike, _, after, alike_again in results:
        assert (alike, alike_again) == (False, True)
        assert_same_bits(after, results[0][1])


def epochs(every, count):
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=100, policy="warn", resync_epochs=every))
        alike = []
        for epoch in range(count):
            if world.rank == 1:
                training.parameter("3.bias").data.fill_(epoch + 1.0)
            training.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                training.watch.end_epoch()
                training.watch.end_epoch()  # of a loop for evaluation: no step in between
                alike.append(training.watch.check())
        return alike, training.watch.epochs


def test_weights_are_sent_again_every_few_epochs_of_training(two_ranks):
    assert two_ranks(epochs, 2, 5) == [([False, True, False, True, False], 5)] * 2
    assert two_ranks(epochs, None, 2) == [([False, False], 2)] * 2


def in_an_epoch(guard, steps, at):
    """Trains one epoch over samestep.shards; before its step `at` rank 1 goes its own way."""
    with redirect_stderr(io.StringIO()) as told, warnings.catch_warnings(), samestep.world() as world:
        warnings.simplefilter("ignore")
        model = samestep.replicate(net(), world, guard=guard)
        optimizer = sgd(model.parameters())
        data = torch.utils.data.TensorDataset(torch.randn(8 * steps, 6), torch.arange(8 * steps) % 3)
        found = None
        try:
            for number, (x, y) in enumerate(samestep.shards(data, world, batch_size=8)):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if (number, world.rank) == (at, 1):
                    model.module[0].weight.data[1, 1] += 1
        except DriftError as error:
            found = str(error)
        watch = model.drift
        counts = watch.steps, watch.checks, watch.found
    return found, counts, told.getvalue()


def test_what_changes_behind_the_last_check_is_found_at_the_end_of_the_epoch(two_ranks):
    for found, counts, _ in two_ranks(in_an_epoch, DriftGuard(every=4), 6, 5):
        assert "differ in 0.weight, and of two nobody can tell which is right" in found
        assert "after step 4 they were alike, at step 6 no longer" in found
        assert found.endswith("sends all what the lower rank has")
        assert counts == (6, 2, 1)
    assert [one[:2] for one in two_ranks(in_an_epoch, DriftGuard(every=4), 8, 99)] == [(None, (8, 2, 0))] * 2


def test_how_often_is_told_at_the_end_where_not_all_was(two_ranks):
    first, other = two_ranks(in_an_epoch, DriftGuard(every=1, policy="warn"), 14, 1)
    assert first[2] == "samestep: the replicas of Sequential were not alike at 12 of 14 checks\n"
    assert other[2] == ""


# --- the digest ------------------------------------------------------------------------------


def test_pair_changes_and_exchanges_are_told_apart_on_a_device():
    def one(values, dtype=torch.int64):
        return int(device_hash([torch.tensor(values, dtype=dtype)]))

    assert torch.hash_tensor(torch.tensor([1, 1, 3])) == torch.hash_tensor(torch.tensor([2, 2, 3]))  # what it must not
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        assert one([1, 1, 3], dtype) != one([2, 2, 3], dtype)
        assert one([1, 2, 3], dtype) != one([2, 1, 3], dtype)
    seen = {one(order) for order in itertools.permutations(range(6))}
    assert len(seen) == 720
    values = [0, 1, -1, 2**63 - 1, -(2**63), 2**62]
    assert len({one([value, other]) for value in values for other in values}) == 36  # x and ~x, too


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_every_single_bit_changes_the_digest_of_a_device(dtype):
    tensor = torch.ones(37, dtype=dtype)  # of most types no whole number of words
    data, before = tensor.view(torch.uint8), int(device_hash([tensor]))
    seen = {before}
    for byte in range(len(data)):
        for bit in range(1 if dtype == torch.bool else 8):
            data[byte] ^= 1 << bit
            seen.add(int(device_hash([tensor])))
            data[byte] ^= 1 << bit
    assert len(seen) == 1 + len(data) * (1 if dtype == torch.bool else 8)
    assert int(device_hash([tensor])) == before


def test_the_digest_of_a_device_depends_on_bytes_alone():
    tensors = [torch.randn(5, 7), torch.randn(()), torch.zeros(0), torch.randn(33).bfloat16(), torch.randn(3, 4, 5)]
    whole = int(device_hash(tensors))
    assert {int(device_hash(tensors, chunk)) for chunk in (8, 16, 64, 104, 1 << 20)} == {whole}
    tensors[4] = tensors[4].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert int(device_hash(tensors)) == whole
    flat = torch.cat([tensors[0].reshape(-1), tensors[1].reshape(1)])
    assert int(device_hash([flat, *tensors[2:]])) == whole


@pytest.mark.parametrize("on_device", [False, True])
def test_names_types_and_shapes_are_part_of_the_digest(on_device, monkeypatch):
    if on_device:
        monkeypatch.setattr(state_digest, "_on_device", lambda _: True)
    values = [torch.zeros(6), torch.zeros(6, dtype=torch.int32), torch.zeros(2, 3), torch.zeros(3, 2)]
    words = [digest_of_all([StateItem("a", value)], "") for value in values]
    words += [digest_of_all([StateItem("b", values[0])], ""), digest_of_all([StateItem("a", values[0])], "1 16")]
    assert len(set(words)) == len(words)
    assert len({StateItem("a", value).digest() for value in values}) == 4
    assert all(-(2**63) <= word < 2**63 for word in words)


def test_the_devices_hash_is_what_its_formula_says():
    """In plain integers: each word with its place through MurmurHash3's finaliser, added up."""
    tensor = torch.randn(11, dtype=torch.float64)
    total = 0
    for place, word in enumerate(tensor.view(torch.int64).tolist()):
        k = (word ^ (place * 0x9E3779B97F4A7C15)) & 2**64 - 1
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            k = ((k ^ k >> 33) * factor) & 2**64 - 1
        total += k ^ k >> 33
    assert int(device_hash([tensor])) == signed(total & 2**64 - 1)


EXTREMES = (-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 2, 2**63 - 1)


def test_the_pair_tells_equal_from_unequal_in_the_order_of_signed_integers():
    for words in itertools.product(EXTREMES, repeat=3):
        pairs = torch.tensor([[word, ~word] for word in words])
        largest, other = pairs.amax(dim=0).tolist()
        assert (largest == ~other) == (len(set(words)) == 1)


def agreement():
    with samestep.world() as world:
        return [
            same_everywhere(world.data, words[world.rank]) == (len(set(words)) == 1)
            for words in itertools.product(EXTREMES, repeat=2)
        ]


def test_so_it_does_in_an_all_reduce(two_ranks):
    assert two_ranks(agreement) == [[True] * len(EXTREMES) ** 2] * 2


# --- who differs -----------------------------------------------------------------------------


def told_of(**versions):
    """Every rank's letter, from the versions of each tensor by rank; None where a rank has none."""
    ranks = len(next(iter(versions.values())))
    return [
        {name: [each[rank], "float32 [2]"] for name, each in versions.items() if each[rank] is not None}
        for rank in range(ranks)
    ]


def test_the_majority_is_taken_tensor_by_tensor():
    found = differences(told_of(a=[1, 1, 2], b=[5, 5, 5], c=[3, 4, 4], d=[None, 7, 7]))
    assert found == [
        Difference("a", 0, (2,), is_decided=True, can_be_sent=True),
        Difference("c", 1, (0,), is_decided=True, can_be_sent=True),
        Difference("d", 1, (0,), is_decided=True, can_be_sent=False),
    ]
    assert minority_ranks(found) == (0, 2)


def test_without_a_majority_the_lowest_of_those_that_agree_with_most_is_the_source():
    (found,) = differences(told_of(a=[9, 1, 2, 1, 2]))
    assert found == Difference("a", 1, (0, 2, 4), is_decided=False, can_be_sent=True)
    assert minority_ranks([found]) == ()
    (half,) = differences(told_of(a=[2, 1, 1, 2]))
    assert (half.source, half.is_decided) == (0, False)


def test_numbers_are_told_before_tensors():
    """A learning rate of one rank's own explains all the tensors."""
    told = told_of(**{name: [1, 1, 2] for name in "abcde"})
    for rank, one in enumerate(told):
        one["lr of AdamW's group 0"] = [int(rank == 2), "number"]
    assert (
        describe(differences(told), range(3))
        == "rank 2 differs from the others in lr of AdamW's group 0, a, b and 3 more"
    )


def test_the_sentence_names_the_first_few():
    found = differences(told_of(**{name: [1, 1, 1, 2, 2, 1, 1] for name in "abcde"}, f=[1, 2, 3, 4, 5, 6, 6]))
    assert describe(found, (0, 2, 4, 6, 8, 10, 12)) == (
        "ranks 6 and 8 differ from the others in a, b, c and 2 more; ranks 0, 2, 4, 6, 8, 10 and 12 differ in f, no "
        "version is on most, and nobody can tell which is right"
    )
    many = differences(told_of(**{str(n): [int(rank == n) for rank in range(7)] for n in range(7)}))
    assert describe(many, range(7)).endswith(
        "rank 3 differs from the others in 3; 3 more sets of ranks differ in other tensors"
    )


# --- alone, asked for wrongly, saved ---------------------------------------------------------


def test_alone_nothing_is_watched_and_nothing_costs():
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=1))
        assert training.watch not in optimizer_steps._listeners
        training.steps(2)
        assert training.watch.check()
        training.watch.resync()
        training.watch.end_epoch()
        assert (training.watch.steps, training.watch.checks) == (0, 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"every": 0}, "every=0 is no number of steps: give a whole number of at least 1, such as 16"),
        ({"every": True}, "every=True is no number of steps"),
        ({"every": 1.5}, "every=1.5 is no number of steps"),
        ({"policy": "fix"}, "policy='fix' is unknown: use 'stop', 'warn' or 'repair'"),
        ({"optimizer_state": 1}, "optimizer_state=1 must be True or False"),
        ({"buffers": None}, "buffers=None must be True or False"),
        ({"resync_epochs": 0}, "resync_epochs=0 is no number of epochs: give a whole number of at least 1, or None"),
    ],
)
def test_a_guard_that_makes_no_sense_is_refused(options, sentence):
    with pytest.raises(UsageError, match=f"^{sentence}"):
        DriftGuard(**options)


@pytest.mark.parametrize("asked", ["stop", 0, True, 2.5, {"every": 3}])
def test_what_is_no_guard_is_refused(asked):
    with pytest.raises(
        UsageError, match="is unknown: give the steps from one check to the next, such as 16, or a Drift"
    ):
        guard_of(asked)


def test_a_guard_may_be_a_number_of_steps():
    assert guard_of(None) is None
    assert guard_of(8) == DriftGuard(every=8)
    assert guard_of(DriftGuard(policy="warn")) == DriftGuard(policy="warn")


def resumed(path):
    with samestep.world() as world:
        training = Training(world, DriftGuard(every=2))
        state = samestep.checkpoint(path, world, every=None, model=training.model, guard=training.watch)
        for _ in state.epochs(state.epoch + 1):
            training.steps(3)
            state.commit()
        return training.watch.state_dict(), bool(state.resumed)


def test_a_checkpoint_keeps_the_counts(two_ranks, tmp_path):
    first = {"steps": 3, "epochs": 0, "checks": 1, "found": 0, "repaired": 0, "last_alike": 2}
    assert two_ranks(resumed, str(tmp_path)) == [(first, False)] * 2
    second = {"steps": 6, "epochs": 0, "checks": 3, "found": 0, "repaired": 0, "last_alike": 6}
    assert two_ranks(resumed, str(tmp_path)) == [(second, True)] * 2


def test_counts_of_a_fresh_guard_can_be_saved(two_ranks, tmp_path):
    def fresh(path):
        with samestep.world() as world:
            watch = DriftMonitor(samestep.replicate(net(), world).module, world, DriftGuard())
            samestep.checkpoint(path, world, every=None, guard=watch).save()
            return watch.last_alike

    assert two_ranks(fresh, str(tmp_path)) == [None] * 2
    assert two_ranks(fresh, str(tmp_path)) == [None] * 2


def test_items_are_parameters_and_buffers_by_their_names():
    names = [item.name for item in items_of_model(synchronised(), buffers=True)]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]  # statistics of its own
    with samestep.world() as world:
        module = samestep.replicate(nn.Sequential(nn.Linear(2, 2)), world).module
        module.register_buffer("table", torch.ones(2), persistent=False)
        assert [item.name for item in items_of_model(module, buffers=True)] == ["0.weight", "0.bias", "table"]
        assert [item.name for item in items_of_model(module, buffers=False)] == ["0.weight", "0.bias"]
