"""A process that holds all stages, on devices of its own, takes the step of one device."""

from __future__ import annotations

import itertools
import re
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep.errors import DeviceError, UsageError
from samestep.pipelines.devices import DeviceCopier, share, sync_streams
from samestep.pipelines.executor import ScheduleExecutor, Stage
from samestep.pipelines.pipeline import Pipeline
from samestep.pipelines.report import PARTS
from samestep.pipelines.transport import LocalTransport
from samestep.schedule.algorithms import ONE_STAGE_PER_RANK, forward_only
from samestep.testing import assert_same_bits

BATCHES = (13, 8, 3, 2)  # samples of batches: uneven, and fewer than micro-batches
HOST = ["cpu", "cpu"]
SAMPLES = 37
CUTS = [
    *((name, (3, 8), HOST) for name in ONE_STAGE_PER_RANK),
    ("interleaved", (2, 4, 6, 8), HOST),
    ("1f1b", (2, 5, 8), [*HOST, "cpu"]),
]


def model(dropout=0.3, dtype=torch.float32):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(12, 12), nn.Dropout(dropout), nn.LayerNorm(12))
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), inner, nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)


def batch(step, replica=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(10 * step + replica)
    count = BATCHES[step] - replica
    x = torch.randn(count, 6, generator=generator, dtype=dtype)
    return x, torch.randint(0, 4, (count,), generator=generator)


def trained(world, steps=4, dtype=torch.float32, dropout=0.3, **options):
    """All that steps give: losses, norms, gradients, outputs, and the state at the end."""
    stage = Pipeline(model(dropout, dtype), world, F.cross_entropy, **options)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    found = {}
    for step in range(steps):
        given = batch(step, world.data.rank, dtype)
        found[f"loss {step}"] = stage.step(given)
        found |= {f"{name} {step}": each.grad.to("cpu", copy=True) for name, each in stage.named_parameters()}
        found[f"norm {step}"] = samestep.clip_grad_norm_(stage, 0.3)
        optimizer.step()
        optimizer.zero_grad()
    found["outputs"] = stage.eval()(batch(0, world.data.rank, dtype)[0]).cpu()
    return found | {f"state {name}": each for name, each in stage.whole_state_dict().items()}


def alone(device="cpu", **options):
    with samestep.world(device=device) as world:
        return trained(world, **options)


@cache
def undivided():
    """What one stage gives."""
    return alone(ends=(8,))


@pytest.mark.parametrize(("schedule", "ends", "devices"), CUTS)
def test_stages_on_one_device_leave_its_bits(schedule, ends, devices):
    assert_same_bits(alone(ends=ends, schedule=schedule, devices=devices), undivided())


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="it needs two GPUs, or none")
def test_how_many_devices_is_enough_to_say():
    with samestep.world(pipeline=2) as world:
        stage = Pipeline(model(), world, F.cross_entropy, ends=(3, 8), devices=2)
        kinds = ["cuda:0", "cuda:1"] if torch.cuda.is_available() else HOST
        assert stage.devices == dict(enumerate(map(torch.device, kinds)))


def test_a_step_that_failed_leaves_nothing_to_the_next():
    calls = itertools.count()

    def fails_once(outputs, targets):
        if next(calls) == 1:
            raise ZeroDivisionError
        return F.cross_entropy(outputs, targets)

    found = []
    with samestep.world() as world:
        for loss in (fails_once, F.cross_entropy):
            stage = Pipeline(model(0.0), world, loss, ends=(3, 8), devices=HOST)
            if loss is fails_once:
                with pytest.raises(ZeroDivisionError):
                    stage.step(batch(0))
                stage.zero_grad()
            found.append({"loss": stage.step(batch(0))} | {n: each.grad for n, each in stage.named_parameters()})
    assert_same_bits(*found)


# --- planned models, weights in several stages, micro-batches -------------------------------------


class Tied(nn.Module):
    """A language model of which embedding and head share a weight."""

    def __init__(self):
        super().__init__()
        self.tokens, self.hidden, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        positions = torch.arange(x.size(1), device=x.device)
        return self.head(torch.tanh(self.hidden(self.tokens(x) + positions[:, None]))).flatten(0, 1)


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 12, (8, 5), generator=generator), torch.randint(0, 12, (8, 5), generator=generator)


def of_tokens(outputs, targets):
    return F.cross_entropy(outputs, targets.flatten())


def planned():
    torch.manual_seed(0)
    whole = Tied()
    options = {"stages": 2, "micro_batches": 4, "schedule": "zero-bubble", "repeats": 1}
    return whole, samestep.plan_pipeline(whole, tokens(), of_tokens, **options)


def tied(devices):
    with samestep.world(device="cpu") as world:
        whole, plan = planned()
        stage = samestep.pipeline(whole, world, plan, devices=devices)
        assert len(stage.parts) == (1 if devices is None else 2)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
        found = {}
        for step in range(2):
            found[f"first {step}"], found[f"second {step}"] = stage.step(tokens(step)), stage.step(tokens(step + 9))
            found[f"norm {step}"] = samestep.clip_grad_norm_(stage, 0.3)
            optimizer.step()
            optimizer.zero_grad()
        if devices is not None:
            assert stage.report().predicted is not None
        return found | stage.whole_state_dict(), stage


def test_a_weight_of_two_stages_is_one_weight_on_two_devices_too():
    (split, stage), (whole, _) = tied(HOST), tied(None)
    assert stage.aliases == {"head.weight": "tokens.weight"}
    assert_same_bits(split, whole)


@pytest.mark.parametrize(
    ("options", "counts"),
    [({}, {8: 4, 3: 3}), ({"micro_batches": 2}, {8: 2, 3: 2}), ({"split_size": 3}, {8: 3, 3: 1, 20: 7})],
)
def test_micro_batches_are_as_many_as_is_said_or_as_large(options, counts):
    with samestep.world(device="cpu") as world:
        whole, plan = planned()
        stage = samestep.pipeline(whole, world, plan, devices=HOST, **options)
        assert stage.step(tokens()) > 0
    for samples, count in counts.items():
        cuts = stage._micro_batch_ranges(samples, may_be_empty=False)
        assert len(cuts) == count
        assert max(end - begin for begin, end in cuts) <= options.get("split_size", samples)


def test_sizes_that_contradict_each_other_or_are_none_are_refused():
    with samestep.world(device="cpu") as world:
        whole, plan = planned()
        for options, said in (
            (
                {"micro_batches": 4, "split_size": 3},
                "4 and split_size=3 contradict each other: 8 samples, 3 in each, are 3 mic",
            ),
            ({"split_size": 0}, "split_size=0: give a whole number, 1 or more"),
            ({"split_size": True}, "split_size=True: give a whole number, 1 or more"),
            ({"micro_batches": 1.5}, r"micro_batches=1\.5: give a whole number"),
        ):
            with pytest.raises(UsageError, match=said):
                samestep.pipeline(whole, world, plan, devices=HOST, **options)
        samestep.pipeline(whole, world, plan, devices=HOST, micro_batches=3, split_size=3)


def test_a_plan_with_several_stages_a_device_is_carried_out():
    results = []
    for devices in (HOST, None):
        with samestep.world(device="cpu") as world:
            whole = model()
            plan = samestep.plan_pipeline(
                whole, batch(0), F.cross_entropy, schedule="interleaved", micro_batches=4, repeats=1
            )
            stage = samestep.pipeline(whole, world, plan, devices=devices)
            assert len(stage.parts) == (1 if devices is None else len(plan.ends))
            results.append({"loss": stage.step(batch(0))} | {n: each.grad for n, each in stage.named_parameters()})
    assert_same_bits(*results)


# --- a loop with data, evaluation and checkpoints --------------------------------------------------


def dataset():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 4, (SAMPLES,), generator=generator))


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def looped(path, epochs, stages=1, devices=None, ends=(4, 8)):
    """Losses of this part of the training, the evaluation after it, and the state; goes on from `path`."""
    with samestep.world(pipeline=stages, device="cpu") as world:
        ends = ends if devices is not None or world.pipeline.size > 1 else ends[-1:]
        stage = Pipeline(model(0.3, torch.float64), world, F.cross_entropy, ends=ends, devices=devices)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
        batches = samestep.shards(dataset(), world, batch_size=12, micro_batch_size=3)
        state = samestep.checkpoint(path, world, model=stage, optimizer=optimizer, data=batches)
        losses = []
        for _ in state.epochs(epochs):
            for each in batches:
                stage.step(each)
                if batches.step_ends:
                    samestep.clip_grad_norm_(stage, 0.3)
                    optimizer.step()
                    optimizer.zero_grad()
                    state.commit()
                    losses.append(batches.loss)
        state.save()
        score = samestep.evaluate(
            lambda each: (stage(each[0]), each[1]), dataset(), world, batch_size=10, metrics={"accuracy": accuracy}
        )
        return losses, score, stage.whole_state_dict()


def test_a_loop_over_shards_goes_on_from_any_checkpoint(two_ranks, tmp_path):
    """One epoch each of two ranks, two devices and one device is one training."""
    ways = [(1, None), (2, None), (1, HOST)]
    for number, order in enumerate(([0, 0, 0], [1, 2, 0])):
        path, losses = str(tmp_path / str(number)), []
        for epochs, way in enumerate(order, 1):
            if way == 1:
                found, other = two_ranks(looped, path, epochs, *ways[way])
                assert found[:2] == other[:2]
            else:
                found = looped(path, epochs, *ways[way])
            losses += found[0]
        if number == 0:
            expected = losses, found[1], found[2]
            assert len(losses) == 12
        assert (losses, found[1]) == expected[:2]
        assert_same_bits(found[2], expected[2])


# --- processes with several devices each ------------------------------------------------------------


def hybrid(stages, devices, options):
    with samestep.world(pipeline=stages, device="cpu") as world:
        return trained(world, 3, devices=devices, **options)


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.prove), "zero-bubble"])
def test_two_processes_of_two_devices_have_the_bits_of_four_processes(two_ranks, four_ranks, schedule):
    found = two_ranks(hybrid, 1, HOST, {"ends": (3, 8), "schedule": schedule})
    meshed = four_ranks(hybrid, 2, None, {"ends": (3, 8), "schedule": schedule})
    for replica, ours in enumerate(found):
        for theirs in meshed[2 * replica : 2 * replica + 2]:
            assert_same_bits({name: ours[name] for name in theirs}, theirs)
    same = {name for name in found[0] if name != "outputs"}
    assert_same_bits(*({name: each[name] for name in same} for each in found))


def test_two_processes_of_two_devices_take_the_step_of_one_process(two_ranks):
    dtype = torch.float64
    results = two_ranks(hybrid, 1, HOST, {"ends": (3, 8), "dtype": dtype, "dropout": 0.0})
    whole = model(0.0, dtype)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x, y = (torch.cat(each) for each in zip(*(batch(step, replica, dtype) for replica in (0, 1)), strict=True))
        loss = F.cross_entropy(whole(x), y)
        loss.backward()
        for found in results:
            torch.testing.assert_close(found[f"loss {step}"], loss.detach(), rtol=1e-12, atol=0)
            for name, each in whole.named_parameters():
                torch.testing.assert_close(found[f"{name} {step}"], each.grad, rtol=1e-12, atol=1e-14)
        samestep.clip_grad_norm_(whole, 0.3)
        optimizer.step()
        optimizer.zero_grad()


def one_of_them_has_nothing(devices):
    """Losses of an epoch whose last batch leaves the second replica without samples."""
    with samestep.world(device="cpu") as world:
        ends = (8,) if devices is None else (4, 8)
        stage = Pipeline(model(0.0, torch.float64), world, F.cross_entropy, ends=ends, devices=devices)
        batches, losses = samestep.shards(dataset(), world, batch_size=12), []
        for each in batches:
            stage.zero_grad()
            stage.step(each)
            batches.commit()
            losses.append(batches.loss)
        return losses, {name: each.grad for name, each in stage.named_parameters()}


def test_a_replica_without_samples_takes_part(two_ranks):
    assert SAMPLES % 12 == 1
    losses, gradients = one_of_them_has_nothing(None)
    for found, own in two_ranks(one_of_them_has_nothing, HOST):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, each in own.items():
            torch.testing.assert_close(each, gradients[name], rtol=1e-12, atol=1e-14)


# --- the report -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "ends"), [("1f1b", (3, 8)), ("interleaved", (2, 4, 6, 8))])
def test_a_report_tells_devices_apart(schedule, ends):
    with samestep.world() as world:
        stage = Pipeline(model(), world, F.cross_entropy, ends=ends, schedule=schedule, devices=HOST)
        for _ in range(2):
            stage.step(batch(1))
        report = stage.report()
    assert (report.steps, list(report.parts)) == (2, list(PARTS))
    assert sum(report.parts.values()) == pytest.approx(report.seconds, rel=1e-9)
    for rank, order in enumerate(report.timeline.schedule.rank_actions):
        assert tuple(span.action for span in report.timeline.spans if span.rank == rank) == order


# --- what cannot be -------------------------------------------------------------------------------


REFUSED = [
    (["cpu"], "1f1b", UsageError, "1 device for 2 stages: give one for each"),
    (["cpu"] * 3, "1f1b", UsageError, "3 devices for 2 stages: give one for each"),
    (["cpu"] * 3, "interleaved", UsageError, "3 devices for 2 stages: give one for each"),
    (["cpu", "gpu"], "1f1b", DeviceError, "devices has 'gpu', which is none: give 'cpu', 'cuda:0'"),
    (["cpu", None], "1f1b", DeviceError, "devices has None, which is none"),
    (["cpu", "meta"], "1f1b", DeviceError, "devices has 'meta': stages compute on 'cpu', 'cuda:0'"),
    (
        ["cuda:0", "cuda:99"],
        "1f1b",
        DeviceError,
        r"device 'cuda:\d+' was asked for, but this process sees \d+ GPUs",
    ),
    (
        "cuda:0",
        "1f1b",
        UsageError,
        r"devices='cuda:0': give one for each stage, \['cuda:0', 'cuda:1'\] say, or how",
    ),
    (0, "1f1b", UsageError, "devices=0: give 1 or more, or name them"),
    ([], "1f1b", UsageError, "0 devices for 2 stages: give one for each"),
]


def test_devices_that_are_not_there_or_do_not_fit_are_refused():
    with samestep.world() as world:
        for devices, schedule, error, said in REFUSED:
            with pytest.raises(error, match=said):
                Pipeline(model(), world, F.cross_entropy, ends=(3, 8), schedule=schedule, devices=devices)


def of_a_rank(devices):
    with samestep.world(pipeline=2, device="cpu") as world:
        try:
            return Pipeline(model(), world, F.cross_entropy, ends=(3, 8), devices=devices).step(batch(0))
        except UsageError as error:
            return str(error)


def test_a_rank_with_one_stage_has_one_device(two_ranks):
    said = "2 devices for a rank of a pipeline of 2 ranks, which has one: give one, or let each process hold all stages"
    assert [told[: len(said)] for told in two_ranks(of_a_rank, HOST)] == [said] * 2
    expected = undivided()["loss 0"]
    assert [torch.equal(loss, expected) for loss in two_ranks(of_a_rank, ["cpu"])] == [True] * 2


def of_unlike(known):
    with samestep.world() as world:
        try:
            Pipeline(
                model(), world, F.cross_entropy, ends=(3, 8), devices=HOST if world.rank < known else ["cuda:77"] * 2
            )
        except samestep.SamestepError as error:
            return str(error)


def test_a_device_that_one_rank_has_not_stops_all(two_ranks):
    first, second = two_ranks(of_unlike, 1)
    assert re.match(r"rank 1 failed: DeviceError: device 'cuda:77' was asked for", first)
    assert second.startswith("device 'cuda:77' was asked for")


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        ((2, 0, 4, 8), [0, 1]),
        ((2, 3, 4, 8), [6, 7]),
        ((3, 1, 2, 6), [3, 4, 5]),
        ((2, 3, 4, 2), [0, 1]),
        ((1, 1, 2, 4), [1]),
    ],
)
def test_processes_of_a_host_have_devices_one_beside_another(asked, numbers):
    assert share(*asked) == tuple(torch.device("cuda", number) for number in numbers)


def test_too_few_devices_of_a_host_are_refused():
    with pytest.raises(
        DeviceError, match="devices=2 for each of 4 processes on this host, and this one sees 6 GPUs: sta"
    ):
        share(2, 0, 4, 6)


# --- copies -----------------------------------------------------------------------------------------


class Queue:
    """A stream that does nothing but say what it is asked for."""

    def __init__(self, name, said):
        self.name, self.said = name, said

    def wait_stream(self, other):
        self.said.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.said.append(f"{self.name} waits for {event}")

    def record_event(self):
        return f"an event of {self.name}"


class Tracked:
    """A tensor on a GPU, as far as copies look at it."""

    def __init__(self, said, device="cuda:0"):
        self.said, self.device = said, torch.device(device)

    def record_stream(self, stream):
        self.said.append(f"memory is kept for {stream.name}")


@pytest.fixture
def said(monkeypatch):
    """What streams and tensors are asked for."""
    said = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Queue(f"copies of {device}", said))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Queue(f"work of {device}", said))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: said.append(f"on {stream.name}") or nullcontext())
    monkeypatch.setattr("samestep.pipelines.devices.tensors_of", lambda batch: batch)
    monkeypatch.setattr(
        "samestep.pipelines.devices.to_device", lambda batch, device: [Tracked(said, device) for _ in batch]
    )
    return said


def test_copies_wait_for_what_is_copied_and_computing_for_copies(said):
    copier = DeviceCopier(torch.device("cuda:0"), torch.device("cuda:1"))
    sent = copier.send([Tracked(said), Tracked(said, "cpu")])
    assert said == [
        "copies of cuda:0 waits for work of cuda:0",
        "memory is kept for copies of cuda:0",
        "on copies of cuda:0",
        "on copies of cuda:1",
    ]
    copier.receive(sent)
    kept = "memory is kept for work of cuda:1"
    assert said[4:] == ["work of cuda:1 waits for an event of copies of cuda:1", kept, kept]
    said.clear()
    sync_streams([torch.device("cuda:0"), torch.device("cuda:1")])
    assert [what.partition(" waits for an event of ")[2] for what in said] == ["work of cuda:0", "work of cuda:1"] * 2


def test_the_host_waits_for_a_copy_from_a_gpu_before_it_reads_it(said, monkeypatch):
    class Event(str):
        __slots__ = ()

        def synchronize(self):
            said.append(f"the host waits for {self}")

    monkeypatch.setattr(Queue, "record_event", lambda self: Event(f"an event of {self.name}"))
    copier = DeviceCopier(torch.device("cuda:0"), torch.device("cpu"))
    copier.receive(copier.send([]))
    assert said[-1] == "the host waits for an event of copies of cuda:0"


def test_what_stays_on_a_device_is_not_copied():
    x = torch.ones(2)
    copier = DeviceCopier(x.device, x.device)
    assert copier.receive(copier.send([x]))[0] is x


def test_each_stage_has_its_inputs_on_its_own_device():
    """In forwards only: nothing comes back from "meta", which has no values."""
    first, second = nn.Linear(3, 4), nn.Linear(4, 2, device="meta")
    transport = LocalTransport({0: torch.device("cpu"), 1: torch.device("meta")})
    stages = {0: Stage(0, first), 1: Stage(1, second)}
    results = ScheduleExecutor(forward_only(2, 3), None, stages, transport).run(
        lambda _: (torch.ones(5, 3),), None, [5] * 3
    )
    assert [(each.device.type, each.shape) for (each,) in results] == [("meta", (5, 2))] * 3
    assert transport.to_stage(torch.ones(2), 1).device.type == "meta"


# --- with GPUs ---------------------------------------------------------------------------------------

on_gpus = pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
on_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")


@on_gpus
@pytest.mark.parametrize(("schedule", "ends", "devices"), CUTS)
def test_stages_on_one_gpu_leave_its_bits(schedule, ends, devices):
    found = alone(ends=ends, schedule=schedule, devices=["cuda:0"] * len(devices))
    assert_same_bits(found, alone(None, ends=(8,)))


@on_two
@pytest.mark.parametrize("schedule", ONE_STAGE_PER_RANK)
def test_stages_on_two_gpus_leave_the_bits_of_one(schedule):
    assert_same_bits(alone(ends=(3, 8), schedule=schedule, devices=["cuda:0", "cuda:1"]), alone(None, ends=(8,)))


def queues(devices):
    """Device and stream of each copy to a stage, and of each kernel, as the profiler has seen them."""
    from torch.profiler import ProfilerActivity, profile

    with samestep.world() as world:
        stage = Pipeline(model(0.0), world, F.cross_entropy, ends=(3, 8), devices=devices)
        given = batch(0)
        stage.step(given)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as seen:
            stage.step(given)
        events = [each for each in seen.profiler.kineto_results.events() if each.device_type().name == "CUDA"]

    def of(wanted):
        return {(each.device_index(), each.device_resource_id()) for each in events if wanted(each.name())}

    return of(lambda name: "PtoP" in name or "HtoD" in name), of(lambda name: not name.startswith("Mem"))


@on_gpus
def test_copies_from_the_host_run_beside_the_kernels():
    copies, kernels = queues(["cpu", "cuda:0"])
    assert copies
    assert kernels
    assert not copies & kernels


@on_two
def test_copies_between_gpus_run_beside_the_kernels():
    copies, kernels = queues(["cuda:0", "cuda:1"])
    assert copies
    assert kernels
    assert not copies & kernels


@on_gpus
def test_stages_on_host_and_gpu_take_the_step_of_one_device():
    ours = alone(ends=(3, 8), devices=["cpu", "cuda:0"], dtype=torch.float64, dropout=0.0, steps=1)
    theirs = alone(ends=(3, 8), devices=HOST, dtype=torch.float64, dropout=0.0, steps=1)
    for name, each in theirs.items():
        if name.endswith(" 0"):
            torch.testing.assert_close(ours[name], each, rtol=1e-10, atol=1e-12)
