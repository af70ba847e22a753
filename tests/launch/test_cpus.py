"""How many cores there are, on files as kernels write them, under real control groups and bindings; and their deal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.launch import cpus as room
from samestep.launch.cpus import (
    Cores,
    CpuLocation,
    Mount,
    assign_cpus,
    binding_warning,
    describe,
    threads,
)
from samestep.launch.rank.environment import threads_per_rank

UNIFIED = "29 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
LEGACY = "33 24 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
DISK = "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n"


def cores(usable=8, machine=8, quota=None, slurm=None):
    return Cores(usable=tuple(range(usable)), machine=machine, quota=quota, slurm=slurm)


def machine(root, files):
    """Lays files where a machine has them."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_lists_and_quotas_are_read():
    assert room.parse_cpu_list("0-1,4,6-7\n") == (0, 1, 4, 6, 7)
    assert room.parse_cpu_list("0\n") == (0,)


@pytest.mark.parametrize(
    ("content", "quota"), [("max 100000\n", None), ("max", None), ("5000 10000\n", 0.5), ("x", None), ("1 0", None)]
)
def test_a_quota_of_version_2_is_read(tmp_path, content, quota):
    assert room.cpu_quota(grouped(tmp_path, "0::/\n", UNIFIED, {"cpu.max": content})) == quota


@pytest.mark.parametrize(("content", "quota"), [("-1\n", None), ("0\n", None), ("250000\n", 2.5)])
def test_a_quota_of_version_1_is_read(tmp_path, content, quota):
    shown = "33 24 0:29 / /sys/fs/cgroup rw - cgroup cgroup rw,cpu\n"
    hybrid = "12:cpuset:/c\n5:cpu,cpuacct:/\n1:name=systemd:/cpu\n0::/user.slice\n"
    files = {"cpu.cfs_quota_us": content, "cpu.cfs_period_us": "100000\n"}
    assert room.cpu_quota(grouped(tmp_path, hybrid, shown, files)) == quota


def test_mounts_are_read_with_or_without_optional_fields():
    spaced = r"40 30 0:30 /a\040b /mnt/with\040space rw - cgroup2 cgroup rw" + "\n"
    assert room.parse_mounts(DISK + UNIFIED + LEGACY + spaced, "cpu") == [
        Mount(2, "/", "/sys/fs/cgroup"),
        Mount(1, "/", "/sys/fs/cgroup/cpu,cpuacct"),
        Mount(2, "/a b", "/mnt/with space"),
    ]
    assert [mount.version for mount in room.parse_mounts(UNIFIED + LEGACY, "cpuset")] == [2]


@pytest.mark.parametrize(
    ("top", "group", "expected"),
    [
        ("/", "/a/b", ["/cg/a/b", "/cg/a", "/cg"]),
        ("/", "/", ["/cg"]),
        ("/docker/7f", "/docker/7f", ["/cg"]),  # a container that has the host's view of names
        ("/docker/7f", "/elsewhere", ["/cg"]),
        ("/../..", "/", ["/cg"]),  # the host's tree, shown in a namespace of its own
        ("/", "/../sibling", ["/cg"]),
    ],
)
def test_groups_are_walked_up_to_where_they_are_mounted(top, group, expected):
    assert room.upwards(Mount(2, top, "/cg"), group) == expected


def grouped(root, group, mounts, files):
    """Lays a process's group, what is mounted and what the groups say."""
    told = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return machine(root, {"proc/self/cgroup": group, "proc/self/mountinfo": DISK + mounts, **told})


def test_the_tightest_quota_above_a_group_holds(tmp_path):
    quotas = {"pod/box": "400000 100000\n", "pod": "250000 100000\n", "aside": "10000 100000\n"}
    files = {f"{group}/cpu.max": text for group, text in quotas.items()}
    assert room.cpu_quota(grouped(tmp_path, "0::/pod/box\n", UNIFIED, files)) == 2.5


def test_a_container_sees_its_own_quota_at_the_top(tmp_path):
    assert room.cpu_quota(grouped(tmp_path, "0::/\n", UNIFIED, {"cpu.max": "150000 100000\n"})) == 1.5


def test_version_1_in_a_container_and_beside_version_2(tmp_path):
    shown = LEGACY.replace(" / /sys", " /docker/7f /sys") + UNIFIED.replace("cgroup rw", "cgroup/unified rw", 1)
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/cpu.cfs_period_us": "25000\n"}
    assert room.cpu_quota(grouped(tmp_path, "4:cpu,cpuacct:/docker/7f\n0::/docker/7f\n", shown, files)) == 2.0


def test_of_two_mounts_the_one_that_shows_the_group_is_read(tmp_path):
    both = UNIFIED + UNIFIED.replace(" / /sys/fs/cgroup", " /other /sys/fs/cgroup/too")
    files = {"mine/cpu.max": "100000 100000\n", "too/cpu.max": "50000 100000\n"}
    assert room.cpu_quota(grouped(tmp_path, "0::/mine\n", both, files)) == 1.0


def test_where_nothing_is_mounted_there_is_no_quota(tmp_path):
    assert room.cpu_quota(tmp_path) is None
    assert room.cpu_quota(grouped(tmp_path, "0::/\n", "", {"cpu.max": "50000 100000\n"})) is None


def test_the_nearest_group_with_a_cpuset_tells_its_size(tmp_path):
    files = {"job/cpuset.cpus.effective": "0-2\n", "cpuset.cpus.effective": "0-7\n"}
    grouped(tmp_path, "0::/job/step\n", UNIFIED, files)
    machine(tmp_path, {"sys/devices/system/cpu/online": "0-7\n"})
    assert room.cpuset_size(tmp_path) == 3
    assert room.unbound_cores(tmp_path, {}.get) == 3
    assert room.unbound_cores(tmp_path, {"SLURM_CPUS_ON_NODE": "2"}.get) == 2


# what srun 22.05 and sbatch set, read off a small cluster
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", None),
        ("CPUS_ON_NODE=2 STEP_NUM_TASKS=2 STEP_TASKS_PER_NODE=2", 1),
        ("CPUS_ON_NODE=6 STEP_NUM_TASKS=2 STEP_TASKS_PER_NODE=2 CPUS_PER_TASK=3", 3),
        ("CPUS_ON_NODE=2 STEP_NUM_TASKS=4 STEP_TASKS_PER_NODE=2(x2) NODEID=1", 1),
        ("CPUS_ON_NODE=9 STEP_NUM_TASKS=4 STEP_TASKS_PER_NODE=3,1 NODEID=1", 9),
        ("CPUS_ON_NODE=1 STEP_NUM_TASKS=1 STEP_TASKS_PER_NODE=1 CPUS_PER_TASK=3", 1),  # inherited from the batch script
        ("CPUS_ON_NODE=6 CPUS_PER_TASK=3", 6),  # the batch script itself
        ("CPUS_PER_TASK=2", None),  # salloc's shell, on the login host
        ("CPUS_ON_NODE=nonsense", None),
    ],
)
def test_slurm_says_what_belongs_to_this_task(variables, expected):
    assert room.slurm_share(dict(f"SLURM_{pair}".split("=") for pair in variables.split()).get) == expected


REPORT = """
import json
from samestep.launch.cpus import read_cores
cores = read_cores(read={}.get)
print(json.dumps([cores.usable, cores.quota, cores.count, cores.limit]))
"""


def report(*prefix):
    """Returns what a process reads of itself, started by a prefix such as taskset's."""
    command = [*prefix, sys.executable, "-c", REPORT]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


@pytest.fixture
def group(request):
    """A control group within another, made under the process's own; gives the files of a version and both groups."""
    version = request.param
    if os.geteuid() != 0:
        pytest.skip("control groups are made by root")
    found = [path for number, path in room.groups(Path("/"), "cpu") if number == version]
    if not found:
        pytest.skip(f"no control groups of version {version} are mounted here")
    outer = found[0] / f"samestep-test-{os.getpid()}"
    try:
        outer.mkdir()
    except OSError as refusal:
        pytest.skip(f"no control group can be made here: {refusal}")
    try:
        if not (outer / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")).exists():
            pytest.skip(f"the cpu controller is not at work in control groups of version {version} here")
        (outer / "inner").mkdir()
        yield version, outer, outer / "inner"
    finally:
        for folder in (outer / "inner", outer):
            if folder.exists():
                folder.rmdir()


@pytest.mark.parametrize("group", [1, 2], indirect=True, ids=["version 1", "version 2"])
def test_a_real_quota_of_the_group_above_is_read_from_inside(group):
    version, outer, inner = group
    name, value = ("cpu.max", "50000 100000") if version == 2 else ("cpu.cfs_quota_us", "50000")
    (outer / name).write_text(value)
    join = f'echo $$ > {inner}/cgroup.procs && exec "$@"'
    usable, quota, count, limit = report("sh", "-c", join, "sh")
    assert (quota, count, limit) == (0.5, 1, "0.5 cores by the cgroup's quota")
    assert usable == sorted(os.sched_getaffinity(0))


def test_a_real_affinity_is_read():
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is only one core to be bound to")
    last = max(os.sched_getaffinity(0))
    usable, _, count, limit = report("taskset", "-c", str(last))
    assert (usable, count) == ([last], 1)
    assert limit.startswith(("affinity to 1 of ", "1 core by", "0."))


def test_this_process_reads_itself():
    here = room.read_cores(read={}.get)
    assert here.usable == tuple(sorted(os.sched_getaffinity(0)))
    assert 1 <= here.count <= len(here.usable) <= here.machine
    assert room.unbound_cores(read={}.get) >= here.count
    assert threads_per_rank(1) == threads(room.read_cores(), 1)
    assert threads_per_rank(1000) == 1


def test_every_cpu_of_this_machine_has_a_place_and_is_dealt_once():
    here = room.read_cores()
    assert set(room.read_locations(here.usable)) == set(here.usable)
    dealt = [cpu for rank in range(2) for cpu in room.pin(here, 2, rank)]
    assert sorted(set(dealt)) == list(here.usable)


@pytest.mark.parametrize(
    ("given", "count", "limit"),
    [
        (cores(2, 2), 2, "2 cores"),
        (cores(1, 1), 1, "1 core"),
        (cores(1, 8), 1, "affinity to 1 of 8 cores"),
        (cores(2, 2, quota=1.5), 1, "1.5 cores by the cgroup's quota"),
        (cores(2, 2, quota=0.25), 1, "0.25 cores by the cgroup's quota"),
        (cores(2, 2, quota=1 / 3), 1, "0.33 cores by the cgroup's quota"),
        (cores(8, 8, slurm=2), 2, "2 cores by Slurm"),
        (cores(8, 8, slurm=2, quota=1), 1, "1 core by the cgroup's quota"),
        (cores(2, 2, slurm=8, quota=2.0), 2, "2 cores"),
        (cores(4, 8, slurm=4, quota=4.0), 4, "affinity to 4 of 8 cores"),
    ],
)
def test_the_smallest_limit_counts_and_is_named(given, count, limit):
    assert (given.count, given.limit) == (count, limit)


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        (cores(8), 2, 4),
        (cores(8), 3, 2),
        (cores(2), 4, 1),
        (cores(8, quota=3.9), 1, 3),
        (cores(8, quota=0.5), 1, 1),
        (cores(8, slurm=4), 2, 2),
        (cores(8, slurm=2), 2, 1),
    ],
)
def test_threads_are_the_cores_divided(given, ranks, expected):
    assert threads(given, ranks) == expected


@pytest.mark.parametrize(
    ("given", "ranks", "each", "chosen", "expected"),
    [
        (cores(2, 2), 2, 1, None, "2 ranks on 2 cores, 1 thread each"),
        (cores(2, 2), 1, 2, None, "1 rank on 2 cores, 2 threads"),
        (cores(2, 2), 4, 1, None, "4 ranks on 2 cores (oversubscribed): 1 thread each"),
        (cores(16, 16, quota=8), 2, 4, None, "2 ranks, 4 threads each on 8 of 16 cores (cgroup quota)"),
        (cores(4, 16), 2, 2, None, "2 ranks, 2 threads each on 4 of 16 cores (affinity)"),
        (cores(2, 2, quota=1.5), 2, 1, None, "2 ranks on 1.5 of 2 cores (cgroup quota, oversubscribed): 1 thread each"),
        (cores(8, 8), 2, 4, "3", "2 ranks on 8 cores, OMP_NUM_THREADS=3 as you set it"),
        (cores(2, 2), 2, 1, "3", "2 ranks on 2 cores (oversubscribed): OMP_NUM_THREADS=3 as you set it"),
        (cores(8, 8), 2, 4, "8,2", "2 ranks on 8 cores (oversubscribed): OMP_NUM_THREADS=8,2 as you set it"),
        (cores(8, 8, slurm=6), 2, 3, "3", "2 ranks, OMP_NUM_THREADS=3 as you set it, on 6 of 8 cores (Slurm)"),
    ],
)
def test_one_line_says_how_cores_are_shared(given, ranks, each, chosen, expected):
    assert describe(given, ranks, each, chosen=chosen) == expected
    assert describe(given, ranks, each, pinned=True, chosen=chosen) == f"{expected}, pinned"


def plain(count):
    return {cpu: CpuLocation(0, 0, cpu) for cpu in range(count)}


def test_neighbours_are_dealt_together():
    assert assign_cpus(plain(5), 2) == [(0, 1), (2, 3, 4)]


def test_more_ranks_than_cpus_take_turns():
    assert assign_cpus(plain(2), 5) == [(0,), (1,), (0,), (1,), (0,)]


def test_threads_of_one_core_go_to_one_rank():
    paired = {cpu: CpuLocation(0, 0, cpu % 4) for cpu in range(8)}  # 0 and 4 are one core, as on Intel's
    assert assign_cpus(paired, 4) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert assign_cpus(paired, 3) == [(0, 4), (1, 5), (2, 6, 3, 7)]


def test_more_ranks_than_cores_share_their_threads():
    paired = {cpu: CpuLocation(0, 0, cpu // 2) for cpu in range(8)}
    assert assign_cpus(paired, 5) == [(0,), (1, 2), (3,), (4, 5), (6, 7)]


def test_memory_nodes_come_one_after_the_other():
    woven = {cpu: CpuLocation(cpu % 2, cpu % 2, cpu // 2) for cpu in range(8)}  # even cpus on node 0, odd on node 1
    assert assign_cpus(woven, 2) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    # equal core numbers of two packages are two cores
    assert assign_cpus({0: CpuLocation(0, 0, 0), 1: CpuLocation(0, 1, 0)}, 2) == [(0,), (1,)]


@given(
    st.dictionaries(
        st.integers(0, 99), st.builds(CpuLocation, st.integers(0, 1), st.integers(0, 1), st.integers(0, 5)), min_size=1
    ),
    st.integers(1, 40),
)
def test_whatever_the_machine_every_cpu_is_dealt_and_none_twice(places, ranks):
    parts = assign_cpus(places, ranks)
    dealt = [cpu for part in parts for cpu in part]
    assert len(parts) == ranks
    assert all(parts)
    assert set(dealt) == set(places)
    if ranks > len(places):
        assert all(len(part) == 1 for part in parts)
        assert max(map(dealt.count, dealt)) - min(map(dealt.count, dealt)) <= 1
        return
    assert len(dealt) == len(places)
    split = [place for place in set(places.values()) if len([p for p in parts if place in lies(p, places)]) > 1]
    assert not (split and ranks <= len(set(places.values())))


def lies(part, places):
    return {places[cpu] for cpu in part}


def test_places_are_read_as_the_kernel_writes_them(tmp_path):
    folder = "sys/devices/system/cpu"
    files = {
        f"{folder}/cpu0/topology/physical_package_id": "0\n",
        f"{folder}/cpu0/topology/core_id": "4\n",
        f"{folder}/cpu0/node1/cpulist": "0-1\n",
        f"{folder}/cpu1/topology/physical_package_id": "-1\n",
        f"{folder}/cpu1/topology/core_id": "-1\n",
    }
    assert room.read_locations([0, 1, 2], machine(tmp_path, files)) == {
        0: CpuLocation(1, 0, 4),
        1: CpuLocation(0, -1, 1),
        2: CpuLocation(0, -1, 2),
    }


def test_a_rank_gets_its_part_of_what_may_be_used():
    some = Cores(usable=(1, 3, 5, 7), machine=8)
    places = {cpu: CpuLocation(0, 0, cpu) for cpu in some.usable}
    assert assign_cpus(places, 2) == [(1, 3), (5, 7)]


def test_ranks_crowded_on_one_core_are_noticed():
    assert binding_warning([{0}, {0}], 8).startswith("all 2 ranks of this host are bound to core 0")
    assert binding_warning([{0, 1}, {0, 1}], 8) is None
    assert binding_warning([{0}, {0}], 1) is None


def test_the_warning_names_the_option_of_what_started_the_ranks():
    crowded = [{3}] * 4
    start = "all 4 ranks of this host are bound to core 3, though 8 cores are there and 2 threads are meant for each: "
    mpi = "start them with `mpiexec --bind-to none`, or `mpiexec --map-by slot:PE=2`"
    assert binding_warning(crowded, 8, launcher="openmpi") == start + mpi
    assert binding_warning(crowded, 8) == start + mpi + "; with `srun --cpu-bind=none`, or `srun -c 2`"
    assert (
        binding_warning(crowded, 8, launcher="slurm")
        == start + "start them with `srun --cpu-bind=none`, or `srun -c 2`"
    )
    assert "I_MPI_PIN=off" in binding_warning(crowded, 8, launcher="pmi")
    assert "taskset" in binding_warning(crowded, 8, launcher="env")


def test_a_core_for_each_is_too_few_where_more_threads_are_meant():
    text = binding_warning([{0}, {1}], 8, launcher="openmpi")
    assert text.startswith(
        "each of the 2 ranks of this host is bound to a single core, though 8 cores are there and 4 "
    )
    assert binding_warning([{0}], 4).startswith("the only rank of this host is bound to a single core")
    assert binding_warning([{0}, {1}], 2) is None  # as many as there are for each
    assert binding_warning([{0}, {1, 2}], 8) is None
    assert binding_warning([{0, 1}, {2, 3}], 8) is None
    assert binding_warning([], 8) is None


def test_crowded_ranks_are_warned_about_even_if_each_means_one_thread():
    text = binding_warning([{0}, {0}], 2)
    assert text.startswith("all 2 ranks of this host are bound to core 0, though 2 cores are there: ")


def test_a_real_mpiexec_that_binds_is_noticed(tmp_path):
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("no mpiexec is installed beside this Python (the mpich wheel brings one)")
    core = min(os.sched_getaffinity(0))
    code = "import os; open(os.environ['PMI_RANK'], 'w').write(str(list(os.sched_getaffinity(0))))"
    command = [mpiexec, "-n", "2", "-bind-to", f"user:{core},{core}", sys.executable, "-c", code]
    subprocess.run(command, cwd=tmp_path, timeout=60, check=True)  # files: it mixes the ranks' lines of output
    affinities = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert affinities == [[core], [core]]
    assert len(set().union(*affinities)) == 1
    assert "--bind-to none" in binding_warning(affinities, 2)
