import copy
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap

import pytest
import torch
import torch.distributed as dist
from mpi_jobs import mpiexec

import samestep
from ports import free_port
from samestep.errors import (
    BackendError,
    RankVariablesError,
    RendezvousError,
    StepError,
    UsageError,
)
from samestep.runtime import membership
from samestep.runtime.store_messages import check_ranks_agree

JOIN = """
    import sys, samestep
    with samestep.world({arguments}) as world:
        place = world.rank, world.size, world.local_rank, world.local_size, world.device, world.backend
        print(" ".join(map(str, place)) + "\\n", end="")  # in one piece: mpiexec mixes what it gets
"""


def start(folder, arguments="", code=JOIN, **variables):
    """Starts one rank by hand, from a script in a folder, with nothing but these variables."""
    clean = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}}
    number, script = tempfile.mkstemp(".py", "rank", folder)
    with os.fdopen(number, "w") as file:
        file.write("import tempfile\ntempfile.tempdir = None  # the fork server has found its own\n")
        file.write(textwrap.dedent(code).format(arguments=arguments))
    return subprocess.Popen(
        [sys.executable, script],
        env={**clean, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes):
    results = [process.communicate(timeout=60) for process in processes]
    return [(process.returncode, out.strip(), err) for process, (out, err) in zip(processes, results, strict=True)]


@pytest.fixture
def port():
    """A port that nobody serves, kept bound but not listening so that nobody else is given it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def last_line(text):
    return text.strip().splitlines()[-1]


def test_a_process_that_nobody_launched_is_a_world_of_one_without_a_group():
    with samestep.world() as world:
        assert (world.rank, world.size, world.local_rank, world.backend) == (0, 1, 0, None)
        assert not dist.is_initialized()
        assert world.group([0]) is None
        world.barrier()


def test_a_launched_world_of_one_needs_no_address(tmp_path):
    assert finish(start(tmp_path, RANK="0", WORLD_SIZE="1")) == [(0, "0 1 0 1 cpu None", "")]


def joined():
    with samestep.world() as world:
        return world.rank, world.size, world.local_rank, world.host_index, world.backend, len(world.data.ranks)


def test_ranks_know_their_place(three_ranks):
    assert three_ranks(joined) == [(rank, 3, rank, 0, "gloo", 3) for rank in range(3)]


@pytest.mark.parametrize("method", ["file", "env"])
def test_ranks_started_by_hand_meet(tmp_path, method):
    if method == "file":
        ranks = [start(tmp_path, f"init_method='file://{tmp_path}/meet', rank={rank}, size=2") for rank in range(2)]
    else:  # mpiexec's variables and nothing else: they meet through a file named for the process that started them
        here = {"TMPDIR": str(tmp_path)}
        ranks = [
            start(tmp_path, PMI_RANK=str(rank), PMI_SIZE="2", MPI_LOCALRANKID=str(rank), MPI_LOCALNRANKS="2", **here)
            for rank in range(2)
        ]
    results = finish(*ranks)
    assert [(code, out) for code, out, _ in results] == [(0, f"{rank} 2 {rank} 2 cpu gloo") for rank in range(2)]


def test_ranks_meet_at_a_tcp_address(tmp_path):
    serving = """
        import samestep
        with samestep.world(init_method="tcp://127.0.0.1:PORT?rank=0&world_size=2") as world:
            print(world.rank)
    """
    port = free_port()
    first = start(tmp_path, code=serving.replace("PORT", str(port)))
    second = start(tmp_path, f"init_method='tcp://127.0.0.1:{port}', rank=1, size=2")
    (code, out, _), (other_code, other_out, _) = finish(first, second)
    assert (code, out, other_code, other_out) == (0, "0", 0, "1 2 1 2 cpu gloo")


def test_ranks_of_a_real_mpiexec_meet(tmp_path):
    (tmp_path / "join.py").write_text(textwrap.dedent(JOIN).format(arguments=""))
    done = mpiexec("mpich", 2, sys.executable, "join.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 0 2 cpu gloo", "1 2 1 2 cpu gloo"]


def groups():
    with samestep.world() as world:
        pair = world.group([2, 0])
        ones = torch.ones(1)
        if pair is not None:
            dist.all_reduce(ones, group=pair)
        return ones.item()


def test_a_group_of_some_ranks_adds_up_without_the_others(three_ranks):
    assert three_ranks(groups) == [2.0, 1.0, 2.0]


def axes():
    with samestep.world(pipeline=2) as world:
        summed = torch.tensor([1.0 + world.rank])
        dist.all_reduce(summed, group=world.data.group)
        return world.data.ranks, world.data.rank, world.pipeline.ranks, world.pipeline.rank, summed.item()


def test_both_axes_have_groups_of_their_own(four_ranks):
    assert four_ranks(axes) == [
        ((0, 2), 0, (0, 1), 0, 4.0),
        ((1, 3), 0, (0, 1), 1, 6.0),
        ((0, 2), 1, (2, 3), 0, 4.0),
        ((1, 3), 1, (2, 3), 1, 6.0),
    ]


def twice():
    sums = []
    for _ in range(2):
        with samestep.world() as world:
            total = torch.ones(1)
            dist.all_reduce(total, group=world.everyone.group)
            sums.append(total.item())
    return sums


def test_one_process_may_join_a_second_world_after_the_first(two_ranks):
    assert two_ranks(twice) == [[2.0, 2.0]] * 2


def test_a_second_world_over_the_same_file_does_not_read_the_firsts_addresses(tmp_path):
    code = """
        import samestep, torch, torch.distributed as dist
        for _ in range(3):
            with samestep.world({arguments}) as world:
                total = torch.ones(1)
                dist.all_reduce(total, group=world.everyone.group)
        print(int(total))
    """
    where = f"init_method='file://{tmp_path}/meet', size=2, join_timeout=30"
    ranks = [start(tmp_path, f"{where}, rank={rank}", code) for rank in range(2)]
    assert [(status, out) for status, out, _ in finish(*ranks)] == [(0, "2"), (0, "2")]


def contradicted():
    try:
        samestep.world(rank=0, size=3)
    except RankVariablesError as error:
        return str(error)


def test_a_size_that_contradicts_the_launchers_is_refused_at_once(two_ranks):
    assert "the caller says rank 0 of 3, the launcher rank 1 of 2" in two_ranks(contradicted)[1]


def left_by_error():
    try:
        with samestep.world() as world:
            samestep.replicate(torch.nn.Linear(2, 2), world)
            raise KeyError("lost")
    except KeyError:
        return dist.is_initialized()


def test_the_group_is_destroyed_on_the_way_out_of_an_error(two_ranks):
    assert two_ranks(left_by_error) == [False, False]


def adopted():
    dist.init_process_group("gloo")
    try:
        with samestep.world() as world:
            place = world.rank, world.size
        return place, dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_group_that_the_script_made_is_used_and_left_to_it(two_ranks):
    assert two_ranks(adopted) == [((0, 2), True), ((1, 2), True)]


def streams():
    with samestep.world(seed=4) as world:
        shared = torch.rand(()).item()
        model = samestep.replicate(torch.nn.Linear(2, 1), world)
        own = torch.rand(()).item()
        purposes = world.generator("a").initial_seed(), world.generator("a", per_rank=False).initial_seed()
        return shared, model.module.weight.detach().clone(), own, purposes


def test_models_start_alike_and_dropout_differs(two_ranks):
    (shared, weight, own, purpose), (other_shared, other_weight, other_own, other_purpose) = two_ranks(streams)
    assert shared == other_shared
    assert torch.equal(weight, other_weight)
    assert own != other_own
    assert purpose[0] != other_purpose[0]
    assert purpose[1] == other_purpose[1]


def test_without_a_seed_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    with samestep.world(seed=None):
        assert torch.equal(before, torch.get_rng_state())


def deterministic():
    torch.backends.cudnn.deterministic = False
    with samestep.world(deterministic=True):
        asked = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = False
    return asked


def test_deterministic_mode_is_asked_of_torch_and_cudnn(two_ranks):
    assert two_ranks(deterministic) == [(True, True)] * 2


# --- bad input: one clear line each ---


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "glo"}, BackendError, "unknown backend 'glo'"),
        ({"init_method": "udp://host:1", "rank": 0, "size": 2}, UsageError, "init_method 'udp://host:1' is unknown"),
        ({"init_method": "tcp://host", "rank": 0, "size": 2}, UsageError, "needs a host and a port"),
        ({"init_method": "tcp://host:1?rank=²"}, RankVariablesError, "rank in the address must be a whole number"),
        ({"init_method": "file://here", "rank": 0, "size": 2}, UsageError, "absolute path"),
        ({"init_method": "tcp://host:1"}, RankVariablesError, "rank and world size are unknown"),
        ({"init_method": "tcp://host:1", "rank": 2, "size": 2}, RankVariablesError, "rank is 2 but the world's size"),
        ({"pipeline": 0}, UsageError, "world of 1 cannot be cut into pipelines of 0"),
        (
            {"init_method": "file:///nowhere/at/all", "rank": 0, "size": 2},
            RendezvousError,
            "/nowhere/at does not exist",
        ),
        ({"init_method": "env://", "rank": 0, "size": 2}, RankVariablesError, "MASTER_ADDR and MASTER_PORT not set"),
        ({"join_timeout": 0, "rank": 0, "size": 2}, UsageError, "more than 0 seconds"),
    ],
)
def test_what_cannot_be_joined_is_refused_in_one_line(options, error, message):
    with pytest.raises(error, match=message) as caught:
        samestep.world(**options)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_half_set_variables_are_named(tmp_path):
    (code, _, err) = finish(start(tmp_path, RANK="0"))[0]
    assert code == 2
    assert "RANK is set ('0') but WORLD_SIZE is not" in last_line(err)


def test_an_address_where_nobody_answers_is_named_with_the_wait(port):
    with pytest.raises(RendezvousError, match=rf"waited 0\.\d s for rank 0 at host 127.0.0.1, port {port}"):
        samestep.world(init_method=f"tcp://127.0.0.1:{port}", rank=1, size=2, join_timeout=0.3)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"port {taken} is taken"):
            samestep.world(init_method=f"tcp://127.0.0.1:{taken}", rank=0, size=2, join_timeout=5)


def test_missing_ranks_are_named(tmp_path):
    with pytest.raises(RendezvousError, match=r"3 of 4 ranks never came: 0, 1, 3"):
        samestep.world(init_method=f"file://{tmp_path}/meet", rank=2, size=4, join_timeout=0.5)


def test_a_file_left_over_from_a_dead_run_is_recognised(tmp_path, monkeypatch):
    alone = start(tmp_path, f"init_method='file://{tmp_path}/meet', rank=0, size=2, join_timeout=0.5")
    assert "never came: 1" in last_line(finish(alone)[0][2])
    shutil.copy(tmp_path / "meet", tmp_path / "elsewhere")
    again = {"rank": 0, "size": 2, "join_timeout": 0.5}
    with pytest.raises(RendezvousError, match=f"left over from a dead run: pid {alone.pid}.*Delete the file"):
        samestep.world(init_method=f"file://{tmp_path}/meet", **again)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")  # there nobody knows whether it is dead
    with pytest.raises(RendezvousError, match=f"is in use, or left over.*pid {alone.pid} on"):
        samestep.world(init_method=f"file://{tmp_path}/elsewhere", **again)


def test_a_rank_that_is_there_twice_is_named(tmp_path):
    twins = [start(tmp_path, f"init_method='file://{tmp_path}/meet', rank=0, size=3") for _ in range(2)]
    handles = {os.pidfd_open(twin.pid): twin for twin in twins}
    (ended, *_), _, _ = select.select(list(handles), [], [], 60)  # the other one waits for ranks 1 and 2
    (_, _, err), *_ = finish(handles[ended])
    for handle, twin in handles.items():
        os.close(handle)
        twin.kill()
        twin.communicate()
    assert "rank 0 is there twice: pid" in last_line(err)


def disagreeing():
    with pytest.raises(RendezvousError) as refused:
        samestep.world(pipeline=2 if os.environ["RANK"] == "0" else 1)
    return str(refused.value)


def test_ranks_that_disagree_on_the_world_say_so(two_ranks):
    for said in two_ranks(disagreeing):
        assert said.startswith("the ranks do not agree on pipeline: rank 0: 2; rank 1: 1")


def saved_axis():
    with samestep.world(virtual_ranks=4) as world:
        return pickle.loads(pickle.dumps(world.data)), copy.deepcopy(world.data) is world.data


def test_a_saved_axis_keeps_its_place_and_nobody_to_talk_to(two_ranks):
    for rank, (axis, is_shared) in enumerate(two_ranks(saved_axis)):
        assert (axis.name, axis.rank, axis.ranks, axis.tree_sums) == ("data", rank, (0, 1), True)
        assert axis.group is axis.control is axis.inter_host is axis.scalars is axis.host_map is None
        assert is_shared
        with pytest.raises(StepError, match="the world of 2 ranks is closed"):
            axis.check_open()


def refused_after_joining(options):
    with pytest.raises(UsageError):
        samestep.world(**options)
    left = dist.is_initialized()
    with samestep.world() as world:  # a world of its own, and not what the refused one has left
        return left, world.size, dist.is_initialized()


def test_what_is_refused_after_joining_leaves_no_group_behind(two_ranks):
    assert two_ranks(refused_after_joining, {"virtual_ranks": 3}) == [(False, 2, True)] * 2


def fail_together(*args):
    dist.barrier()  # a rank that left before another one had connected would be that one's failure
    raise LookupError("no axes")


def failing_while_joining():
    whole, membership._make_axes = membership._make_axes, fail_together
    try:
        with pytest.raises(LookupError):
            samestep.world()
    finally:
        membership._make_axes = whole
    return dist.is_initialized()


def test_what_fails_while_joining_leaves_no_group_behind(two_ranks):
    assert two_ranks(failing_while_joining) == [False, False]


def waiting_too_late():
    with samestep.world() as world:
        world.barrier()
    with pytest.raises(StepError, match="the world of 2 ranks is closed"):
        world.barrier()
    return True


def test_nobody_waits_for_others_after_the_world(two_ranks):
    assert two_ranks(waiting_too_late) == [True, True]


def settled(rank, hosts):
    member = membership.Membership(rank=rank, size=len(hosts))
    membership._number_hosts(member, hosts, None)
    return member.local_rank, member.local_size, member.host_index


def test_machines_of_one_name_are_told_apart():
    hosts = [["node", machine] for machine in ("a", "b", "a", "b")]
    assert [settled(rank, hosts) for rank in range(4)] == [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)]


def test_containers_of_one_machine_are_hosts_of_their_own():
    hosts = [[name, "a"] for name in ("left", "right")]
    assert [settled(rank, hosts) for rank in range(2)] == [(0, 1, 0), (0, 1, 1)]


def test_a_host_whose_gpus_are_hidden_is_named_before_anybody_waits_for_its_card():
    entries = [{"size": 2, "device": device} for device in ("cuda", "cpu")]
    with pytest.raises(RendezvousError, match="the ranks do not agree on device: rank 0: cuda; rank 1: cpu"):
        check_ranks_agree(entries)


def adopted_on_machines_of_their_own():
    """As a script that starts its own ranks on several machines, and tells nobody which of them is where."""
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "machine", lambda: f"machine {dist.get_rank() // 2}")
        patch.delenv("LOCAL_RANK")
        patch.delenv("LOCAL_WORLD_SIZE")
        with samestep.world() as world:
            return world.local_rank, world.local_size, world.host_index


def test_ranks_of_a_script_s_own_group_find_out_who_is_beside_them(four_ranks):
    assert four_ranks(adopted_on_machines_of_their_own) == [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)]
