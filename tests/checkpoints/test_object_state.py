"""Names in a checkpoint are those of bare modules; what does not fit is refused before anything is loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

import samestep
from samestep.checkpoints.encoder import Encoder
from samestep.checkpoints.integrity import read_manifest
from samestep.checkpoints.manifest import MANIFEST, decode, to_text
from samestep.checkpoints.state import ObjectState, capture_state, check_names, first_lines, mismatches, restore_state
from samestep.errors import CheckpointError, UsageError
from samestep.testing import assert_same_bits


def a_net(dtype=torch.float32, hidden=3):
    return nn.Sequential(nn.Linear(2, hidden, dtype=dtype), nn.ReLU(), nn.Linear(hidden, 1, dtype=dtype))


def wrapped_names_on_each_rank():
    with samestep.world(device="cpu") as world:
        bare = a_net()
        inside = nn.ModuleDict({"body": samestep.replicate(a_net(), world), "head": nn.Linear(1, 1)})
        outside = nn.parallel.DistributedDataParallel(a_net(), process_group=world.data.group)
        nested = nn.ModuleDict({"body": outside})
        names = [list(capture_state(model).content) for model in (bare, outside, inside, nested)]
        restore_state(outside, capture_state(bare))
        fits = all(torch.equal(a, b) for a, b in zip(outside.parameters(), bare.parameters(), strict=True))
        del outside, nested
        return names, fits


def test_the_prefix_of_distributed_data_parallel_is_taken_off_and_put_back(two_ranks):
    for (bare, outside, inside, nested), fits in two_ranks(wrapped_names_on_each_rank):
        assert outside == bare == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert inside == [f"body.{name}" for name in bare] + ["head.weight", "head.bias"]
        assert nested == [f"body.{name}" for name in bare]
        assert fits


def test_the_prefix_of_compile_is_taken_off_and_put_back():
    bare, part = a_net(), a_net()
    part[0] = torch.compile(part[0], backend="eager")
    for wrapped in (torch.compile(a_net(), backend="eager"), part):
        assert list(capture_state(wrapped).content) == list(bare.state_dict())
        restore_state(wrapped, capture_state(bare))
        assert_same_bits(list(wrapped.parameters()), list(bare.parameters()))


def test_a_tied_model_loads_into_a_tied_model():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    saved, fresh = Tied(), Tied()
    restore_state(fresh, capture_state(saved))
    assert fresh.head.weight is fresh.embed.weight
    assert_same_bits(fresh.embed.weight, saved.embed.weight)


def test_states_that_fit_have_no_differences():
    one = {"model": capture_state(a_net()), "optimizer": capture_state(torch.optim.Adam(a_net().parameters()))}
    two = {"model": capture_state(a_net()), "optimizer": capture_state(torch.optim.Adam(a_net().parameters()))}
    assert mismatches(one, two) == []


def test_names_shapes_and_types_of_parameters_are_compared():
    deeper = nn.Sequential(*a_net(hidden=5), nn.Linear(1, 1))
    lines = mismatches({"model": capture_state(a_net())}, {"model": capture_state(deeper)})
    assert "model.0.weight: float32 [3, 2] in the checkpoint, float32 [5, 2] in the model" in lines
    assert "model.3.weight: in the model, not in the checkpoint" in lines
    assert len(lines) == 5
    back = mismatches({"model": capture_state(deeper)}, {"model": capture_state(a_net())})
    assert "model.3.weight: in the checkpoint, not in the model" in back
    cast = mismatches({"model": capture_state(a_net())}, {"model": capture_state(a_net(torch.float64))})
    assert "model.2.bias: float32 [1] in the checkpoint, float64 [1] in the model" in cast


def test_objects_that_were_not_saved_or_not_named_are_listed():
    lines = mismatches({"model": capture_state(a_net())}, {"net": capture_state(a_net())})
    assert lines == [
        "model: in the checkpoint, not named here; name it, as in checkpoint(…, model=…)",
        "net: named here, not in the checkpoint",
    ]


def layers(number, hidden=3, prefix=""):
    net = nn.Sequential(*[nn.Linear(hidden, hidden) for _ in range(number)])
    for piece in prefix.split(".")[:-1]:
        net = nn.ModuleDict({piece: net})
    return net


RENAMED = ": the names of 8 tensors begin with "


@pytest.mark.parametrize(
    ("saved", "present", "told"),
    [
        (layers(4), layers(4, prefix="net."), f"{RENAMED}'net.' in the model, and do not in the checkpoint"),
        (layers(4, prefix="b.a."), layers(4), f"{RENAMED}'a.b.' in the checkpoint, and do not in the model"),
        (
            layers(4, prefix="b.old."),
            layers(4, prefix="b.new."),
            f"{RENAMED}'old.' in the checkpoint, with 'new.' in the model",
        ),
        (layers(2), layers(5), ": 6 tensors in the model, not in the checkpoint: 2.bias, 2.weight, 3.bias, …"),
        (layers(4), layers(4, hidden=5), ".0.bias: float32 [3] in the checkpoint, float32 [5] in the model"),
    ],
)
def test_many_tensors_that_differ_alike_are_told_once(saved, present, told):
    first, *rest = mismatches({"model": capture_state(saved)}, {"model": capture_state(present)})
    assert first == f"model{told}"
    assert rest == (["model: 7 more tensors have another shape or type"] if "float32" in told else [])


def test_another_kind_of_optimizer_or_schedule_is_refused():
    net = a_net()
    sgd, adam = torch.optim.SGD(net.parameters(), lr=1), torch.optim.Adam(net.parameters())
    step = torch.optim.lr_scheduler.StepLR(sgd, 3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 3)
    (line,) = mismatches({"optimizer": capture_state(sgd)}, {"optimizer": capture_state(adam)})
    assert line == "optimizer: was a torch.optim.sgd.SGD, is a torch.optim.adam.Adam"
    assert len(mismatches({"schedule": capture_state(step)}, {"schedule": capture_state(cosine)})) == 1


def test_an_optimizer_over_other_parameters_is_refused():
    net = a_net()
    forwards = torch.optim.Adam(net.parameters())
    backwards = torch.optim.Adam(reversed(list(net.parameters())))
    fewer = torch.optim.Adam([net[0].weight])
    lines = mismatches({"optimizer": capture_state(forwards)}, {"optimizer": capture_state(backwards)})
    first = "parameter 0 of group 0 has shape [3, 2] in the checkpoint, [1] here"
    assert lines == [f"optimizer: 4 of 4 parameters have another shape; {first}"]
    assert mismatches({"optimizer": capture_state(forwards)}, {"optimizer": capture_state(fewer)}) == [
        "optimizer: groups of [4] parameters in the checkpoint, of [1] here"
    ]


def test_a_long_list_is_cut_and_counted():
    assert first_lines([f"line {i}" for i in range(9)]).splitlines()[-2:] == ["  line 5", "  and 3 more"]
    assert first_lines(["one"]) == "\n  one"


def test_optimizer_state_keeps_a_precision_above_its_parameters():
    def an_optimizer():
        weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        return torch.optim.SGD([weight], lr=0.1, momentum=0.9), weight

    (saved, weight), (fresh, other) = an_optimizer(), an_optimizer()
    saved.state[weight]["momentum_buffer"] = torch.tensor([1.0, 1 / 3, 1e-6])
    restore_state(fresh, capture_state(saved))
    assert_same_bits(fresh.state[other]["momentum_buffer"], saved.state[weight]["momentum_buffer"])


SCHEDULES = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda k: 0.9**k),
    "milestones": lambda o: lrs.MultiStepLR(o, [2, 4, 4]),
    "cosine": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=9),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.1, 0.5, step_size_up=2, cycle_momentum=False),
    "warm-up": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)], [3]),
}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_every_schedule_goes_on_where_it_stood(make):
    def start():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "schedule": make(optimizer)}

    def rates(run, count):
        for _ in range(count):
            run["optimizer"].step()
            run["schedule"].step()
            yield run["optimizer"].param_groups[0]["lr"]

    whole, part, resumed = start(), start(), start()
    expected = list(rates(whole, 6))
    before = list(rates(part, 3))
    encoder = Encoder()
    for name, thing in resumed.items():
        saved = capture_state(part[name])
        tree = encoder.encode(saved.content, name)
        restore_state(thing, ObjectState(saved.about, decode(tree, encoder.tensors)))
    assert before + list(rates(resumed, 3)) == expected


def test_a_gradient_scaler_goes_on_where_it_stood():
    scaler, fresh = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.update(64.0)
    tree = Encoder().encode(capture_state(scaler).content, "scaler")
    restore_state(fresh, ObjectState({"kind": "object"}, decode(tree, {})))
    assert fresh.get_scale() == 64.0
    assert fresh.state_dict() == scaler.state_dict()


def test_what_has_no_state_cannot_be_named():
    with pytest.raises(UsageError, match="learning_rate=float cannot be saved: it has no state_dict"):
        check_names({"model": a_net(), "learning_rate": 0.1})
    with pytest.raises(UsageError, match="cannot be saved"):
        check_names({"model": nn.Linear})
    with pytest.raises(UsageError, match="name at least one object"):
        check_names({})


def test_two_names_that_become_one_are_refused():
    odd = nn.ModuleDict({"_orig_mod": nn.Linear(1, 1)})
    odd.register_parameter("weight", nn.Parameter(torch.ones(1)))
    with pytest.raises(CheckpointError, match="have one name"):
        capture_state(odd)


# --- what no run has saved ----------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [None, 5, "[[1]]", {}, [3], [[1], None]], ids=repr)
def test_an_optimizer_that_does_not_say_which_parameters_it_had_is_refused(shapes):
    optimizer = torch.optim.SGD(a_net().parameters(), lr=0.1)
    present = capture_state(optimizer)
    about = {"kind": present.about["kind"]} | ({} if shapes is None else {"shapes": shapes})
    (line,) = mismatches({"optimizer": ObjectState(about, present.content)}, {"optimizer": present})
    assert line == "optimizer: the checkpoint does not say which parameters it had"


@pytest.mark.parametrize("content", [None, 5, [1], {1: torch.ones(1)}], ids=repr)
def test_what_cannot_be_the_state_of_a_module_is_refused(content):
    (line,) = mismatches({"model": ObjectState({"kind": "module"}, content)}, {"model": capture_state(a_net())})
    assert line == f"model: the checkpoint holds a {type(content).__name__} for a module"


@pytest.mark.parametrize(
    "content", [None, 5, {}, {"state": 3, "param_groups": 4}, {"state": {}, "param_groups": [{}]}], ids=repr
)
def test_what_cannot_be_the_state_of_an_optimizer_is_refused(content):
    optimizer = torch.optim.SGD(a_net().parameters(), lr=0.1)
    with pytest.raises(
        CheckpointError, match=r"the saved state of a torch\.optim\.sgd\.SGD cannot be loaded: \w+Error"
    ):
        restore_state(optimizer, ObjectState(capture_state(optimizer).about, content))


def test_a_manifest_whose_optimizer_has_no_shapes_is_a_checkpoint_error(tmp_path):
    def objects():
        model = a_net()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    with samestep.world(device="cpu") as world:
        state = samestep.checkpoint(tmp_path, world, **objects())
        folder = state.save()
        state.close()
        manifest = read_manifest(folder)
        del manifest.about["optimizer"]["shapes"]
        (folder / MANIFEST).write_text(to_text(manifest))
        with pytest.raises(CheckpointError, match="does not say which parameters it had"):
            samestep.checkpoint(tmp_path, world, **objects())
