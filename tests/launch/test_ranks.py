"""Rank of a process, from captured environments of real launchers (tests/captured) and handwritten ones."""

from __future__ import annotations

import re

import pytest
from places import TESTS

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.basics.ranks import RankInfo, find_rank, rank_variables

CAPTURED = TESTS / "captured"


def captured(name: str) -> dict[str, str]:
    """Return the variables in a file of NAME=value lines."""
    lines = (CAPTURED / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))


def place(env: dict[str, str]) -> tuple[int, int, int, int, int]:
    info = find_rank(env)
    return info.rank, info.world_size, info.local_rank, info.local_size, info.node_rank


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
            "TORCHELASTIC_RUN_ID": "x"}
# Written by hand after the sites' documentation and public job scripts, since PALS was not available.
PALS_POLARIS = {"PALS_RANKID": "6", "PALS_LOCAL_RANKID": "2", "PALS_LOCAL_SIZE": "4", "PALS_NODEID": "1",
                "PMI_RANK": "6", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "2", "PMI_LOCAL_SIZE": "4"}
PALS_AURORA = {"PALS_RANKID": "13", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "12", "PALS_NODEID": "1",
               "PMIX_RANK": "13", "PMIX_LOCAL_RANK": "1", "EZPZ_LLM_WORLD_SIZE": "24"}


@pytest.mark.parametrize(("file", "expected", "source"), [
    ("mpi/env_mpich_rank2.txt", (2, 4, 0, 2, 1), "Hydra (PMI_RANK)"),
    ("mpi/env_intelmpi_rank2.txt", (2, 4, 0, 2, 1), "Hydra (PMI_RANK)"),
    ("mpi/env_openmpi_rank3.txt", (3, 4, 1, 2, 1), "Open MPI (OMPI_COMM_WORLD_RANK)"),
    *((f"slurm/env_srun_pmi2_rank{rank}.txt", (rank, 4, rank % 2, 2, rank // 2), "srun with PMI (PMI_RANK)")
      for rank in range(4)),
    ("slurm/env_srun_nompi_rank0.txt", (0, 4, 0, 2, 0), "srun (SLURM_PROCID)"),
    ("slurm/env_srun_nompi_rank3.txt", (3, 4, 1, 2, 1), "srun (SLURM_PROCID)"),
    ("slurm/env_srun_one_task_step.txt", (0, 1, 0, 1, 0), "srun (SLURM_PROCID)"),
    # Neither is a rank, although a batch script has SLURM_PROCID=0 and SLURM_NTASKS=4.
    ("slurm/env_sbatch_script.txt", (0, 1, 0, 1, 0), "single process"),
    ("slurm/env_sbatch_26_05.txt", (0, 1, 0, 1, 0), "single process"),
    ("slurm/env_salloc_shell.txt", (0, 1, 0, 1, 0), "single process"),
])
def test_environments_of_real_launchers(file, expected, source):
    env = captured(file)
    assert place(env) == expected
    assert find_rank(env).source == source
    assert find_rank(env).notes == ()


def test_hydra_inside_slurm_beats_the_proxys_variables():
    text = (CAPTURED / "slurm/hydra_in_allocation.txt").read_text()
    runs = re.findall(r"rank (\d)/4 host n(\d) sum 6 local \d/2 PMI_RANK=\d MPI_LOCALRANKID=(\d) SLURM_PROCID=(\d)",
                      text)
    assert len(runs) >= 20
    wrong = 0
    for rank, host, local_rank, procid in runs:
        env = {**captured("slurm/env_srun_nompi_rank0.txt"), "SLURM_PROCID": procid, "SLURM_STEP_NUM_TASKS": "2",
               "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "PMI_RANK": rank, "PMI_SIZE": "4",
               "MPI_LOCALRANKID": local_rank, "MPI_LOCALNRANKS": "2"}
        info = find_rank(env)
        assert place(env) == (int(rank), 4, int(local_rank), 2, int(host) - 1)
        assert info.source == "Hydra (PMI_RANK)"
        assert info.notes == (f"srun (SLURM_PROCID) says rank {procid} of 2, Hydra (PMI_RANK) says rank {rank} of "
                              "4: using the latter",)
        wrong += procid != rank
    assert wrong, "the captured runs show the fault that the order of precedence is there for"


@pytest.mark.parametrize(("env", "expected", "source"), [
    ({}, (0, 1, 0, 1, 0), "single process"),
    ({"RANK": "", "WORLD_SIZE": ""}, (0, 1, 0, 1, 0), "single process"),
    (TORCHRUN, (5, 8, 1, 4, 1), "torchrun (RANK)"),
    (PALS_POLARIS, (6, 8, 2, 4, 1), "Cray PALS (PALS_RANKID)"),
    (PALS_AURORA, (13, 24, 1, 12, 1), "Cray PALS (PALS_RANKID)"),
    ({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}, (3, 4, 1, 2, 1),
     "PMI (PMI_RANK)"),
    ({"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1",
      "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, (3, 4, 1, 2, 1), "MVAPICH (MV2_COMM_WORLD_RANK)"),
    ({"JSM_NAMESPACE_RANK": "7", "JSM_NAMESPACE_SIZE": "12", "JSM_NAMESPACE_LOCAL_RANK": "1",
      "JSM_NAMESPACE_LOCAL_SIZE": "6"}, (7, 12, 1, 6, 1), "jsrun (JSM_NAMESPACE_RANK)"),
    ({"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"},
     (5, 8, 1, 4, 1), "Flux (FLUX_TASK_RANK)"),
    # Three tasks on two nodes; the last is alone on the second node.
    ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0",
      "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2,1"}, (2, 3, 0, 1, 1), "srun (SLURM_PROCID)"),
])
def test_written_environments(env, expected, source):
    assert place(env) == expected
    assert find_rank(env).source == source


@pytest.mark.parametrize("parent", ["slurm/env_srun_nompi_rank3.txt", "mpi/env_mpich_rank2.txt",
                                    "mpi/env_openmpi_rank3.txt"])
def test_children_of_torchrun_are_its_ranks_whatever_started_it(parent):
    info = find_rank({**captured(parent), **TORCHRUN})
    assert (info.rank, info.world_size, info.local_rank, info.local_size) == (5, 8, 1, 4)
    assert info.source == "torchrun (RANK)"
    assert len(info.notes) == 1
    assert "says rank 5 of 8" in info.notes[0]


def test_ranks_exported_by_hand_take_the_local_rank_from_a_matching_family():
    env = captured("slurm/env_srun_nompi_rank3.txt")
    assert place({**env, "RANK": "3", "WORLD_SIZE": "4"}) == (3, 4, 1, 2, 1)


def test_a_missing_local_rank_is_noted():
    info = find_rank({"RANK": "1", "WORLD_SIZE": "2"})
    assert info == RankInfo(1, 2, 0, 1, 1, "torchrun (RANK)",
                            ("torchrun (RANK) does not set a local rank: assuming one rank per node",))


@pytest.mark.parametrize(("env", "found"), [
    ({"RANK": "1"}, "RANK=1 is set, but WORLD_SIZE is not"),
    ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set, but RANK is not"),
    ({**captured("mpi/env_mpich_rank2.txt"), "RANK": "1"}, "RANK=1 is set, but WORLD_SIZE is not"),
    ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is not a rank of WORLD_SIZE=4"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 is not a rank of WORLD_SIZE=0"),
    ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK='one' is not a whole number"),
    ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK='-1' is not a whole number"),
    ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 is invalid for 4 ranks"),
    ({"PMI_RANK": "2"}, "PMI_RANK=2 is set, but PMI_SIZE is not"),
    ({"PALS_RANKID": "2", "PALS_LOCAL_RANKID": "0"}, "PALS_RANKID=2 is set, but PMI_SIZE and EZPZ"),
    ({"OMPI_COMM_WORLD_RANK": "3"}, "OMPI_COMM_WORLD_RANK=3 is set"),
    ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, "SLURM_PROCID=1 is set, but SLURM_STEP_NUM_TASKS is not"),
])
def test_a_broken_environment_is_an_error_and_never_rank_0(env, found):
    with pytest.raises(UserError) as error:
        find_rank(env)
    assert error.value.found.startswith(found)


def test_invalid_values_in_an_unused_family_are_noted():
    info = find_rank({**captured("mpi/env_mpich_rank2.txt"), "SLURM_STEP_ID": "0", "SLURM_PROCID": "x",
                      "SLURM_STEP_NUM_TASKS": "2"})
    assert info.rank == 2
    assert info.notes == ("SLURM_PROCID='x' is not a whole number; using Hydra (PMI_RANK)",)


# The shim's variables under each launcher: rank 2 of 4, the first rank on the second of two nodes.
_IN_THE_SHIM = {
    "mpiexec": {**captured("mpi/env_mpich_rank2.txt")},
    "srun": captured("slurm/env_srun_nompi_rank3.txt"),
    "srun with PMI": captured("slurm/env_srun_pmi2_rank2.txt"),
    "torchrun": {**TORCHRUN, "RANK": "2", "WORLD_SIZE": "4"},
    "none": {},
}


@pytest.mark.parametrize("launcher", _IN_THE_SHIM)
def test_below_the_shim_the_launchers_rank_is_used(launcher: str) -> None:
    """The shim's RANK does not count as torchrun's; the shim's variables are used if only they remain."""
    shim = _IN_THE_SHIM[launcher]
    world = {"EZPZ_LLM_WORLD_SIZE": str(find_rank(shim).world_size)}
    info = find_rank(shim | world)
    own = world | rank_variables(info)
    assert find_rank(shim | own) == info
    elastic = {name: value for name, value in shim.items() if name == "TORCHELASTIC_RUN_ID"}
    assert find_rank(elastic | own) == info


@pytest.mark.parametrize("launcher", _IN_THE_SHIM)
def test_what_is_started_inside_a_rank_has_ranks_of_its_own(launcher: str) -> None:
    shim = _IN_THE_SHIM[launcher]
    world = {"EZPZ_LLM_WORLD_SIZE": str(find_rank(shim).world_size), "EZPZ_LLM_RANKS_PER_NODE": "2(x2)"}
    rank = shim | world | rank_variables(find_rank(shim | world))
    for inner in (0, 1, 2):
        mpiexec = {"PMI_RANK": str(inner), "PMI_SIZE": "3", "MPI_LOCALRANKID": str(inner), "MPI_LOCALNRANKS": "3"}
        info = find_rank(rank | mpiexec)
        assert (info.rank, info.world_size, info.local_rank, info.local_size, info.node_rank) == (
            inner, 3, inner, 3, 0)
        assert info.source == "Hydra (PMI_RANK)"
        torchrun = {**TORCHRUN, "RANK": str(inner), "WORLD_SIZE": "3", "LOCAL_RANK": str(inner),
                    "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "0"}
        assert place(rank | torchrun) == (inner, 3, inner, 3, 0)
        assert find_rank(rank | torchrun).source == "torchrun (RANK)"
        by_hand = {"RANK": str(inner), "WORLD_SIZE": "3", "LOCAL_RANK": str(inner), "LOCAL_WORLD_SIZE": "3"}
        assert place(rank | by_hand)[:4] == (inner, 3, inner, 3)


def test_the_plan_has_the_node_rank_if_nodes_have_unequal_ranks() -> None:
    for rank, local_rank, local_size, node in ((0, 0, 1, 0), (1, 0, 2, 1), (2, 1, 2, 1)):
        env = {"PMI_RANK": str(rank), "PMI_SIZE": "3", "MPI_LOCALRANKID": str(local_rank),
               "MPI_LOCALNRANKS": str(local_size), "EZPZ_LLM_RANKS_PER_NODE": "1,2"}
        assert place(env) == (rank, 3, local_rank, local_size, node)
        bare = {"PMIX_RANK": str(rank), "EZPZ_LLM_WORLD_SIZE": "3", "EZPZ_LLM_RANKS_PER_NODE": "1,2"}
        assert place(bare) == (rank, 3, local_rank, local_size, node)
        assert place(bare | {"PMIX_LOCAL_RANK": str(local_rank)}) == (rank, 3, local_rank, local_size, node)
