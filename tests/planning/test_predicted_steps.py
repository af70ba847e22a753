"""Steps that are predicted: what they are made of, and what is known of them by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trainings import flat, training

import closed_forms
from samestep.network.links import Link, Links
from samestep.pipelines.layers import Device
from samestep.pipelines.partition import PartitionProblem
from samestep.planning import data_parallel, pipeline_parallel
from samestep.planning.step import ParallelLayout
from samestep.schedule.algorithms import make_schedule
from samestep.schedule.simulate import simulate

SLOW = Link(50e-6, 1e8)
PERFECT = Link(0.0, float("inf"))


def test_one_process_takes_what_it_took() -> None:
    profile = training(start_s=0.0003)
    one = data_parallel.predict(profile, flat(SLOW, 8), ParallelLayout(1))
    assert one.seconds == pytest.approx(profile.step_s, rel=1e-12)
    assert one.algorithm == ""
    assert one.parts.latency == one.parts.transfer == 0


@pytest.mark.parametrize("replicated", [2, 3, 7, 64])
def test_the_parts_of_a_step_add_up_to_its_computing_and_what_the_network_adds(replicated: int) -> None:
    profile, fabric, way = training(start_s=0.0002), flat(SLOW, 64), ParallelLayout(replicated)
    one = data_parallel.predict(profile, fabric, way)
    largest = -(-64 // replicated)
    share = data_parallel.compute_time(profile, largest)
    added = data_parallel.exposed_communication(profile, fabric, way, share.backward_s)
    beside = profile.data_s * largest / 64 + profile.optimizer_s + profile.other_s
    assert one.seconds == pytest.approx(beside + share.forward_s + share.backward_s + added.seconds, rel=1e-12)
    assert min(one.parts.shares().values()) >= 0


def test_a_perfect_network_adds_nothing_and_kernels_that_need_no_start_lose_nothing() -> None:
    one = data_parallel.predict(training(), flat(PERFECT, 64), ParallelLayout(16))
    lost = {name: seconds for name, seconds in one.parts.shares().items() if name not in ("work", "optimizer", "other")}
    assert lost.pop("data") == pytest.approx(0.001 / 16)
    assert sum(lost.values()) == pytest.approx(0, abs=1e-12)
    assert one.parts.work == pytest.approx(0.048 / 16)


def test_an_all_reduce_behind_the_last_gradient_costs_what_its_closed_form_says() -> None:
    profile = training(layers=1, nbytes=8_000_000)
    one = data_parallel.predict(profile, flat(SLOW, 64), ParallelLayout(64))
    links = Links(SLOW)
    forms = (closed_forms.ring, closed_forms.halving_doubling, closed_forms.recursive_doubling)
    assert one.parts.latency + one.parts.transfer == pytest.approx(min(form(64, 8e6, links) for form in forms))
    assert one.parts.latency == pytest.approx(12 * SLOW.latency_s)  # halving and doubling: 2 log2 64 rounds
    assert one.algorithm == "halving and doubling"


def test_a_gradient_that_is_ready_early_is_summed_beside_the_backward() -> None:
    early = training(layers=2, nbytes=100_000)
    alone = data_parallel.exposed_communication(early, flat(SLOW, 2), ParallelLayout(2), 0.016)
    half = closed_forms.recursive_doubling(2, 100_000, Links(SLOW))
    assert alone.buckets == (100_000, 100_000)
    assert alone.seconds == pytest.approx(half)  # the first is done when the second is ready
    assert alone.overlap == pytest.approx(0.5)


def test_uneven_batches_cost_what_the_largest_share_takes_longer() -> None:
    one = data_parallel.predict(training(), flat(PERFECT, 64), ParallelLayout(3))  # 22, 21 and 21 of 64
    assert one.parts.imbalance == pytest.approx(0.048 * (22 / 64 - 1 / 3))


def test_fewer_samples_than_were_measured_take_the_start_of_their_kernels() -> None:
    profile = training(layers=4, start_s=0.001)
    assert data_parallel.compute_time(profile, 1).forward_s == pytest.approx(4 * (0.001 + 0.004 / 64))
    assert data_parallel.compute_time(profile, 0).forward_s == 0
    assert data_parallel.compute_time(profile, 64, speed=2).backward_s == pytest.approx(profile.backward_s / 2)


def test_a_profile_of_one_size_is_read_in_proportion() -> None:
    assert data_parallel.compute_time(replace(training(), sizes=()), 16).backward_s == pytest.approx(0.032 / 4)


@pytest.mark.parametrize("name", ["fill-drain", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("link", [PERFECT, SLOW])
def test_a_pipelines_step_is_that_of_its_simulation(name: str, link: Link) -> None:
    profile, way = training(layers=6, start_s=0.0001), ParallelLayout(1, 3, 4, name)
    one = pipeline_parallel.predict(profile, flat(link, 64), way)
    plan = make_schedule(name, 3, 4)
    problem = PartitionProblem(profile.layers[16], [Device()] * 3, plan, pipeline_parallel.link_of(link))
    beside = one.parts.data + one.parts.optimizer + one.parts.other
    assert one.seconds - beside == pytest.approx(simulate(plan, problem.costs(one.ends)).seconds, rel=1e-9)
    assert (one.parts.messages > 1e-9) == (link is SLOW)


def test_equal_stages_have_the_bubble_of_the_textbook() -> None:
    one = pipeline_parallel.predict(training(layers=4), flat(PERFECT, 64), ParallelLayout(1, 4, 4, "fill-drain"))
    assert one.parts.work == pytest.approx(0.048 / 4)
    assert one.parts.bubble == pytest.approx(0.048 / 4 * 3 / 4)  # (stages - 1) / micro-batches
    assert one.parts.imbalance == pytest.approx(0, abs=1e-12)


def test_replicas_of_stages_sum_the_largest_stage_behind_their_step() -> None:
    profile = training(layers=4)
    hybrid = pipeline_parallel.predict(profile, flat(SLOW, 64), ParallelLayout(2, 2, 2, "1f1b"))
    expected = closed_forms.recursive_doubling(2, 2_000_000, Links(SLOW))
    assert hybrid.parts.latency + hybrid.parts.transfer == pytest.approx(expected)
    assert hybrid.hidden == 0


def test_memory_is_the_model_its_gradients_what_the_optimizer_remembers_and_activations() -> None:
    assert data_parallel.memory(training(), 32) == 4 * 4_000_000 + 4 * 4_000_000 / 2
    cut = pipeline_parallel.predict(training(layers=4), flat(PERFECT, 64), ParallelLayout(1, 2, 4, "1f1b"))
    assert cut.memory == 2 * 1_000_000 * 4 + 2 * 4e6 / 4 * 2  # two micro-batches are held by the first stage


def test_a_stage_sums_no_gradients_of_parameters_that_are_not_trained() -> None:
    whole = training(layers=4)
    head = replace(whole, gradients=whole.gradients[:1])
    hybrid = pipeline_parallel.predict(head, flat(SLOW, 64), ParallelLayout(2, 2, 2, "1f1b"))
    assert hybrid.buckets == (1_000_000,)  # and not the 2 MB of a stage's parameters


def test_parameters_that_are_not_trained_have_no_gradients_in_memory() -> None:
    whole = training(layers=4)
    head = replace(whole, gradients=whole.gradients[:1], optimizer_bytes=2_000_000)
    assert data_parallel.memory(head, 0) == 4_000_000 + 1_000_000 + 2_000_000
    cut = pipeline_parallel.predict(head, flat(PERFECT, 64), ParallelLayout(1, 2, 4, "1f1b"))
    assert cut.memory == 2 * 1_000_000 * (1 + 3 / 4) + 2 * 4e6 / 4 * 2  # shared out evenly over the parameters


def test_the_interval_holds_the_step_and_grows_with_the_ranks() -> None:
    wide = [data_parallel.predict(training(), flat(SLOW, 64), ParallelLayout(ranks)) for ranks in (2, 64)]
    for one in wide:
        assert one.low < one.seconds < one.high
    assert wide[1].high / wide[1].seconds > 1.01
