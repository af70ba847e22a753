import pytest

from samestep.errors import RankVariablesError
from samestep.rankenv import expand_tasks_per_node, read_rank_variables

# launcher         rank of size, local rank of local size, host; and the variables as that launcher sets them
TABLE = {
    "torchrun": (
        (3, 4, 1, 2, 1),
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "1",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29500",
        },
    ),
    "by hand": ((1, 2, None, None, None), {"RANK": "1", "WORLD_SIZE": "2"}),
    "srun": (
        (3, 4, 0, 1, 1),
        {
            "SLURM_PROCID": "3",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "3,1",
            "SLURM_NODEID": "1",
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
        },
    ),
    "Open MPI": (
        (1, 2, 1, 2, None),
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
    ),
    "MPICH": (
        (1, 2, 1, 2, None),
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    ),
}


@pytest.mark.parametrize("launcher", TABLE)
def test_every_launcher_is_read(launcher):
    expected, variables = TABLE[launcher]
    found = read_rank_variables(variables)
    assert (found.rank, found.size, found.local_rank, found.local_size, found.host_index) == expected


def test_nothing_set_is_nobody_launched():
    assert read_rank_variables({}) is None


def test_a_batch_script_outside_srun_is_not_a_rank():
    assert read_rank_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}) is None


def test_a_launcher_inside_srun_wins():
    srun = TABLE["srun"][1]
    assert read_rank_variables({**srun, "RANK": "0", "WORLD_SIZE": "2"}).source == "env"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "RANK is set.*WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set.*RANK is not"),
        ({"PMI_RANK": "0"}, "PMI_RANK is set.*PMI_SIZE is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 but WORLD_SIZE is 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK is 0 but WORLD_SIZE is 0"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK must be a whole number.*'zero'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1 but"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT is 99999: a port is"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT must be a whole number"),
    ],
)
def test_half_set_or_contradictory_variables_are_named(variables, message):
    with pytest.raises(RankVariablesError, match=message):
        read_rank_variables(variables)


@pytest.mark.parametrize(("text", "counts"), [("2(x2)", [2, 2]), ("3,1", [3, 1]), ("1", [1]), ("2(x2),1", [2, 2, 1])])
def test_slurm_tasks_per_node_are_expanded(text, counts):
    assert expand_tasks_per_node(text) == counts


def test_malformed_slurm_tasks_are_refused():
    with pytest.raises(RankVariablesError, match="SLURM_STEP_TASKS_PER_NODE"):
        expand_tasks_per_node("two")
