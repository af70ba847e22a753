"""Every example runs as its docstring says, and prints what it promises.

`make test` runs those that need some ranks and nothing else on ranks that are there already, and one under torchrun;
`make prove` runs every command.
"""

from __future__ import annotations

import functools
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from gallery import EXAMPLES, ON_RANKS, ROOT, TOGETHER, commands_of, run, run_on_ranks

pytestmark = [
    pytest.mark.timeout(600),  # the first that asks for an example waits for its commands
    pytest.mark.usefixtures("fork_server"),  # started before the threads that run commands ask for it
]
ROUNDING = 1e-12  # in float64: sums in another order
NAMES = [example.name for example in EXAMPLES]
BY_HAND = [
    "weights_and_gradients_by_hand.py",
    "ddp_side_by_side.py",
    "accumulation.py",
    "data_and_model_parallel.py",
]
PROVED = {"weights_and_gradients_by_hand.py", "accumulation.py"}
FEWER = {"pipeline_training.py": ["--epochs", "1"]}  # what is added to a command so that it is soon over
ELSEWHERE = {"samestep verify --mpi -n 2 examples/mpi_training.py"}  # in tests/runtime/test_mpi_world.py
APART = re.compile(r"at most (\d\.\de[+-]\d\d)")


def here(example):
    """The commands that one machine is enough for, and that no other test runs."""
    return [each for each in commands_of(example) if each.host is None and each.line not in ELSEWHERE]


@functools.cache
def done(name):
    """Every command of an example, run to its end, when the first test asks for it."""
    (example,) = [each for each in EXAMPLES if each.name == name]
    lines = here(example)
    with ThreadPoolExecutor(TOGETHER) as pool:
        ended = pool.map(lambda command: run([*command.words(), *FEWER.get(name, [])]), lines)
        return {command.line: process for command, process in zip(lines, ended, strict=True)}


@pytest.fixture
def said():
    """Returns what the commands of an example printed, one text for each."""

    def texts(name):
        assert {line: process.stderr for line, process in done(name).items() if process.returncode} == {}
        return [process.stdout for process in done(name).values()]

    return texts


@pytest.fixture(params=["ranks", pytest.param("commands", marks=pytest.mark.prove)])
def printed(request, tmp_path):
    """Returns what an example printed: on ranks that are there already, or by its commands, one text for each."""

    def texts(name):
        for command in commands_of(ROOT / "examples" / name):
            if found := ON_RANKS.fullmatch(command.line):
                ranks = request.getfixturevalue({"2": "two_ranks", "3": "three_ranks", "4": "four_ranks"}[found[1]])
                yield run_on_ranks(ranks, ROOT / found[2], found[3].split(), tmp_path)

    return (lambda name: [*texts(name)]) if request.param == "ranks" else request.getfixturevalue("said")


def largest(text):
    """The largest difference that an example has printed."""
    return max(float(number) for number in APART.findall(text))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_says_how_it_is_run_and_stays_small(example):
    assert here(example), f"{example.name} has no command in its docstring"
    assert all(f"examples/{example.name}" in command.line for command in commands_of(example))
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 80


def test_what_every_example_prints_is_judged_here():
    text = (ROOT / "tests" / "examples" / "test_examples.py").read_text(encoding="utf-8")
    assert [name for name in NAMES if not re.search(rf'(said|printed)\("{name}"\)', text) and name not in BY_HAND] == []


def test_the_index_names_every_example_and_only_commands_that_docstrings_hold():
    index = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"]({name})" not in index] == []
    shown = set(re.findall(r"`([a-z]+ [^`]*examples/\w+\.py[^`]*)`", index))
    assert shown
    assert shown - {command.line for example in EXAMPLES for command in commands_of(example)} == set()


@pytest.mark.prove
def test_hello_adds_up_under_torchrun():
    (command,) = [each for each in commands_of(ROOT / "examples" / "hello_process_group.py") if "torchrun" in each.line]
    process = run(command.words())
    assert process.returncode == 0, process.stderr
    assert sorted(re.findall(r"rank ([01]) of 2 on cpu: the sum is 3 of 3", process.stdout)) == ["0", "1"]


def trained(text, steps):
    """Checks what the parameter server printed; returns how far its weights are from those of one process."""
    assert re.search(rf"2 trainers, {steps} steps, last loss \d\.\d{{3}}\n", text), text
    assert "one process, 48 steps" in text
    return largest(text)


def test_a_parameter_server_trains_as_one_process_does():
    process = run(commands_of(ROOT / "examples" / "rpc_parameter_server.py")[0].words())
    assert process.returncode == 0, process.stderr
    assert trained(process.stdout, 48) < ROUNDING
    assert "You are using a Backend" not in process.stderr


@pytest.mark.prove
def test_asynchronous_trainers_make_steps_of_their_own(said):
    _, asynchronous = said("rpc_parameter_server.py")
    assert trained(asynchronous, 96) > 1e-4


def caught(text):
    """Returns the share of balls that were caught in the last round, and the weights."""
    ((share, weights),) = re.findall(r"(\d+)% of the last balls were caught; weights ([0-9a-f]{16})\n", text)
    return int(share), weights


@pytest.mark.prove
def test_an_agent_learns_from_observers():
    process = run(
        commands_of(ROOT / "examples" / "rpc_reinforcement.py")[1].words()
    )  # on one rank, in a fifth of the time
    assert process.returncode == 0, process.stderr
    assert caught(process.stdout)[0] > 50  # one that does not move catches 14


@pytest.mark.prove
def test_what_an_agent_learns_does_not_depend_on_where_the_observers_are(said):
    assert len({caught(text) for text in said("rpc_reinforcement.py")}) == 1


@pytest.mark.prove
def test_hello_adds_up_on_whatever_started_it(said):
    *two, alone = said("hello_process_group.py")
    assert len(two) == 3
    for text in two:  # ranks that share a pipe may end their lines together
        assert sorted(re.findall(r"rank ([01]) of 2 on cpu: the sum is 3 of 3", text)) == ["0", "1"]
    assert alone == "rank 0 of 1 on cpu: the sum is 1 of 1\n"


def test_collectives_end_where_they_should(printed):
    (text,) = printed("collectives.py")
    rows = [line.replace("[rank 0] ", "").split("  ") for line in text.splitlines()[1:]]
    assert {name: [cell.strip() for cell in cells if cell] for name, *cells in rows} == {
        "broadcast": ["10", "10", ".", "10"],
        "scatter": ["100", "200", ".", "300"],
        "gather": ["10 11 13", ".", ".", "."],
        "reduce": ["34", ".", ".", "."],
        "all_gather": ["10 11 13", "10 11 13", ".", "10 11 13"],
        "all_reduce": ["34", "34", ".", "34"],
    }


@pytest.mark.prove
def test_own_processes_meet_by_variables_and_by_a_file(said):
    texts = said("own_processes.py")
    assert [sorted(text.splitlines()) for text in texts] == [[f"rank {r} of 2: the sum is 3 of 3" for r in (0, 1)]] * 2


@pytest.mark.prove
def test_spawn_and_its_counterpart_train_alike(said):
    assert largest(said("spawn.py")[0]) < ROUNDING


@pytest.mark.prove
def test_a_torchrun_script_trains_the_same_under_both_launchers(said):
    theirs, ours, checked = said("torchrun_style.py")
    losses = re.findall(r"epoch \d: loss (\d\.\d{4})", theirs)
    assert len(losses) == 3
    assert float(losses[-1]) < 0.3
    for text in (ours, checked):
        assert re.findall(r"epoch \d: loss (\d\.\d{4})", text) == losses
        assert text.count("those of rank 0: True") == 2


def test_messages_arrive(printed):
    three, *over_mpi = printed("send_recv.py")
    assert "rank 1: send 42, isend 43, from the left 0 (rank 0)" in three
    assert "rank 0: send 42, isend 43, from the left 2 (rank 2)" in three
    assert "rank 2: send 0, isend 0, from the left 1 (rank 1)" in three
    assert all("rank 1: send 42, isend 43, from the left 0 (rank 0)" in text for text in over_mpi)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.prove) if name in PROVED else name for name in BY_HAND]
)
def test_what_is_done_by_hand_and_by_samestep_is_one_training(printed, name):
    for text in printed(name):
        assert largest(text) < ROUNDING


def test_reduced_precision_trains_as_well(printed):
    for text in printed("mixed_precision.py"):
        full, half = (float(loss) for loss in re.findall(r"loss (\d\.\d{3})", text))
        assert full < 0.2
        assert half == pytest.approx(full, abs=0.05)
        assert re.search(r"bfloat16: .*outputs are torch.bfloat16, weights torch.float32\n", text)


def test_only_the_mean_of_means_is_another_training(printed):
    (text,) = printed("uneven_data.py")
    apart = {line.split("  ")[0].replace("[rank 0] ", "").strip(): largest(line) for line in text.splitlines()}
    assert apart["mean of means"] > 1e-4
    assert apart["by the sum"] < ROUNDING
    assert apart["samestep"] < ROUNDING


@pytest.mark.prove
def test_a_resumed_run_ends_where_it_would_have(said):
    plain, virtual = said("resume.py")[0].split("virtual_ranks=4\n")
    for text in (plain, virtual):
        assert "on 2: began with the weights of step 40, ended at step 58\n" in text
        assert largest(text) < ROUNDING
    assert "same bits: True" in virtual


@pytest.mark.prove
def test_a_run_in_which_a_rank_dies_has_the_bits_of_one_in_which_nobody_does(said):
    ends = [
        re.findall(r"world of (\d), from step (\d+): weights ([0-9a-f]{16})\n", text) for text in said("elastic.py")
    ]
    assert [(size, began) for ((size, began, _),) in ends] == [("2", "20"), ("2", "20"), ("4", "0"), ("1", "0")]
    assert len({weights for ((*_, weights),) in ends}) == 1


def test_a_model_on_two_devices_has_one_devices_gradients(said):
    (text,) = said("model_parallel_by_hand.py")
    assert len(APART.findall(text)) == 3
    assert largest(text) < ROUNDING
    assert "devices cpu, cpu; two streams: no" in text or "devices cuda:0, cuda:1; two streams: yes" in text


@pytest.mark.prove
def test_two_machines_work_as_one_does(said):
    losses = {loss for text in said("two_machines.py") for loss in re.findall(r"loss (\d\.\d{12})", text)}
    assert len({loss[:-2] for loss in losses}) == 1


def test_a_ring_adds_up_exactly_and_sends_what_it_should(printed):
    texts = printed("ring_all_reduce.py")
    for text, ranks in zip(texts, (4, 3)[: len(texts)], strict=True):
        assert text.count(f"equal True, sent {2 * (ranks - 1) / ranks:.3f} times the tensor") == ranks


@pytest.mark.prove
def test_eight_bits_train_as_well_with_a_quarter_of_the_bytes(printed):
    rows = re.findall(r"\] (\S.*?) +loss (\d\.\d{4}), +([\d,]+) bytes", printed("quantised_gradients.py")[0])
    loss, sent = ({name: float(row[at].replace(",", "")) for name, *row in rows} for at in (0, 1))
    assert sent["float32"] == 2 * 1 / 2 * 4 * 9610 * 5 * 29  # a ring of two; 29 steps an epoch
    for name in ("int8 by hand", 'compress="int8"'):
        assert loss[name] == pytest.approx(loss["float32"], rel=0.05)
        assert 0.25 < sent[name] / sent["float32"] < 0.3


@pytest.mark.prove
def test_mpi_says_hello_and_trains(said):
    for text in said("mpi_hello.py"):
        assert "rank 1 has 1" in text
    over_mpi, over_gloo = said("mpi_training.py")
    assert over_mpi.count("loss") == 2
    assert re.findall(r"loss \d\.\d{3}", over_mpi) == re.findall(r"loss \d\.\d{3}", over_gloo)


@pytest.mark.prove
def test_a_pipeline_learns_on_one_process_and_on_several(said):
    for text in said("pipeline_training.py"):
        ((loss, right),) = re.findall(r"epoch 1: loss (\d\.\d{3}), (\d+\.\d)% of the held-out digits", text)
        assert float(loss) < 2.0  # guessing has ln 10 = 2.3
        assert float(right) > 30


@pytest.mark.prove
def test_imagenets_recipe_comes_to_the_same_figures_on_two_ranks(said):
    told = r"loss (\d\.\d{4}).*\n.*(top-1 .* of 70 validation images)"
    (two,), (alone,) = (re.findall(told, text) for text in said("imagenet.py"))
    assert two == alone


@pytest.mark.prove
def test_commands_for_two_machines_work_where_a_file_is_their_meeting_point(tmp_path):
    """The four commands by hand, two and two, as on machines that share a folder."""
    (example,) = [each for each in EXAMPLES if each.name == "two_machines.py"]
    by_hand = [command for command in commands_of(example) if "--rendezvous" in command.line]
    losses = set()
    for number, pair in enumerate(zip(by_hand[::2], by_hand[1::2], strict=True)):
        meeting = str(tmp_path / f"meeting{number}")
        words = [[word.replace("node1:29500", meeting) for word in command.words()] for command in pair]
        with ThreadPoolExecutor(2) as pool:
            ended = list(pool.map(run, words))
        assert [process.returncode for process in ended] == [0, 0], "".join(process.stderr for process in ended)
        found = re.findall(r"rank (\d) of (\d), .* loss (\d\.\d{10})", ended[0].stdout)  # node 0 shows all
        assert sorted(rank for rank, _, _ in found) == [str(rank) for rank in range(int(found[0][1]))]
        assert len(found) == 4 - 2 * number
        losses |= {loss for *_, loss in found}
    assert len(losses) == 1


def test_commands_that_need_other_machines_are_understood():
    (example,) = [each for each in EXAMPLES if each.name == "two_machines.py"]
    elsewhere = [each for each in commands_of(example) if each.host and "--rendezvous" not in each.line]
    assert len(elsewhere) == 3
    for command in elsewhere:
        program, verb, *rest = command.words()
        process = run([program, verb, "--dry-run", *rest])
        assert process.returncode == 0, process.stderr
        assert "two_machines.py" in process.stdout


@pytest.mark.prove
def test_a_failing_rank_of_own_processes_does_not_leave_the_others(tmp_path):
    source = (ROOT / "examples" / "own_processes.py").read_text(encoding="utf-8")
    (tmp_path / "broken.py").write_text(
        source.replace("    total = ", "    assert rank != 1\n    total = "), encoding="utf-8"
    )
    process = run([sys.executable, str(tmp_path / "broken.py")])
    assert process.returncode != 0
    assert "AssertionError" in process.stderr
