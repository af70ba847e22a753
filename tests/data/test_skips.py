import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import samestep
from samestep.data.audit import audit
from samestep.data.order import SampleOrder
from samestep.errors import DataError

ORDER = SampleOrder(24, seed=0).take(0, 24).tolist()


class WithBadSamples(Dataset):
    def __init__(self, bad):
        self.bad = set(bad)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"no picture {index}")
        return torch.tensor(float(index), dtype=torch.float64), f"name {index}"


def epoch_of(bad, options):
    """What this rank saw, its losses' sum, the step losses, and what the ledger says."""
    with samestep.world() as world:
        batches = samestep.shards(WithBadSamples(bad), world, batch_size=8, on_bad_sample="skip", **options)
        seen, values, losses = [], [], []
        for x, names in batches:
            assert len(names) == len(x)
            seen.append([int(value) for value in x])
            values.append(batches.mean(x * 1.0, torch.ones_like(x) if "weight" in options else None).item())
            if batches.step_ends:
                batches.commit()
                losses.append(batches.loss)
        return seen, values, losses, batches.state_dict()


@pytest.mark.parametrize(
    "options", [{}, {"micro_batch_size": 2}, {"workers": 1}, {"workers": 2}, {"weight": lambda batch: len(batch[0])}]
)
def test_what_is_bad_is_left_out_on_all_ranks_alike(options, three_ranks, capfd):
    bad = [ORDER[3], ORDER[17]]
    found = three_ranks(epoch_of, bad, options)
    steps = [[index for index in ORDER[at : at + 8] if index not in bad] for at in (0, 8, 16)]
    seen = {index for samples, *_ in found for micro_batch in samples for index in micro_batch}
    assert seen == set(ORDER) - set(bad)
    expected = [sum(step) / len(step) for step in steps]
    for _, _, losses, state in found:
        assert losses == pytest.approx(expected, rel=1e-14)
        assert state == found[0][3]
    said = audit(found[0][3])
    assert said.ok
    reasons = ", ".join(f"index {index} (epoch 0: ValueError: no picture {index})" for index in bad)
    assert said.summary == f"every sample of 1 epoch exactly once except 2 skipped: {reasons}"


def test_the_record_is_the_same_for_any_number_of_ranks(two_ranks, three_ranks):
    bad = [ORDER[0], ORDER[1], ORDER[23]]
    alone = epoch_of(bad, {})[3]
    assert all(state == alone for *_, state in two_ranks(epoch_of, bad, {}) + three_ranks(epoch_of, bad, {}))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_micro_batch_of_bad_samples_alone_becomes_an_empty_one(workers, two_ranks):
    first, second = two_ranks(epoch_of, ORDER[0:4], {"workers": workers})
    assert first[0] == [[], ORDER[8:12], ORDER[16:20]]
    assert first[1][0] == 0.0
    assert second[0] == [ORDER[4:8], ORDER[12:16], ORDER[20:24]]
    assert first[2][0] == pytest.approx(sum(ORDER[4:8]) / 4)


def gradient(bad, ranks_divide):
    with samestep.world() as world:
        torch.manual_seed(0)
        model = samestep.replicate(nn.Linear(1, 1).double(), world)
        batches = samestep.shards(WithBadSamples(bad), world, batch_size=8, on_bad_sample="skip", micro_batch_size=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for x, _ in batches:
            batches.mean(model(x[:, None]).flatten() ** 2).backward()
            if batches.step_ends:
                optimizer.step()
                optimizer.zero_grad()
                batches.commit()
        return [parameter.tolist() for parameter in model.module.parameters()]


def test_training_is_that_of_one_process_that_skips_them_too(three_ranks):
    bad = [ORDER[2], ORDER[3], ORDER[11]]
    alone = gradient(bad, 1)
    for weight, bias in three_ranks(gradient, bad, 3):
        assert weight[0] == pytest.approx(alone[0][0], rel=1e-12)
        assert bias == pytest.approx(alone[1], rel=1e-12)


def test_a_step_that_was_not_committed_leaves_no_record():
    with samestep.world() as world:
        batches = samestep.shards(WithBadSamples(ORDER[9:10]), world, batch_size=8, on_bad_sample="skip")
        loop = iter(batches)
        next(loop)
        batches.commit()
        next(loop)
        loop.close()
        assert batches.state_dict()["ledger"]["segments"][0][5] == ()
        resumed = samestep.shards(WithBadSamples([]), world, batch_size=8, on_bad_sample="skip")
        resumed.load_state_dict(batches.state_dict())
        list(resumed)  # it could be read this time
        assert audit(resumed.state_dict()).summary == "every sample of 1 epoch exactly once"


def all_of_a_step_is_bad():
    with samestep.world() as world:
        batches = samestep.shards(WithBadSamples(ORDER[8:16]), world, batch_size=8, on_bad_sample="skip")
        with pytest.raises(DataError) as caught:
            list(batches)
        return str(caught.value)


def test_a_whole_step_of_bad_samples_is_an_error_on_every_rank(two_ranks):
    line = f"all 8 samples of a step are bad, which is the dataset and not a sample; the first is sample {ORDER[8]}"
    assert all(said.startswith(line) for said in two_ranks(all_of_a_step_is_bad))


def test_a_dataset_that_is_bad_all_over_is_an_error():
    with samestep.world() as world, pytest.raises(DataError, match="of the dataset are all bad"):
        list(samestep.shards(WithBadSamples(range(24)), world, batch_size=8, on_bad_sample="skip"))


def test_skipped_samples_are_said_on_standard_error(capsys):
    epoch_of(ORDER[:1], {})
    assert capsys.readouterr().err == (
        f"samestep: skips sample {ORDER[0]} in epoch 0: ValueError: no picture {ORDER[0]}\n"
    )


def test_another_policy_is_refused():
    with samestep.world() as world, pytest.raises(DataError, match="neither"):
        samestep.shards(WithBadSamples([]), world, batch_size=8, on_bad_sample="ignore")
