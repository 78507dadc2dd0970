"""Selection of nodes in a reservation: --hostfile, --hosts, --nodes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from launch_runs import CAPTURED, captured_env, clean_env, cpu_seconds, launch

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.jobs.node_selection import select_nodes
from ezpz_llm.launcher.jobs.option_parsing import parse
from ezpz_llm.launcher.jobs.schedulers import find_allocation
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation
from ezpz_llm.launcher.planning.plan import LaunchPlan, build_plan


def _slurm(hosts: str = "n[1-4]") -> Allocation:
    env = captured_env("slurm/env_sbatch_N2_no_ntasks.txt")
    return find_allocation(env | {"SLURM_JOB_NODELIST": hosts, "SLURM_JOB_NUM_NODES": "4"})


def _pbs() -> Allocation:
    env = captured_env("pbs/env_job_mixed.txt")
    return find_allocation(env | {"PBS_NODEFILE": str(CAPTURED / "pbs/nodefile_mixed.txt")})


def _hosts(allocation: Allocation) -> list[tuple[str, int | None]]:
    return [(host.name, host.slots) for host in allocation.hosts]


def _file(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_each_option_leaves_its_part(tmp_path: Path) -> None:
    assert _hosts(select_nodes(_pbs(), None, None, None)) == [("n1", 1), ("n2", 2), ("n3", 2)]
    assert _hosts(select_nodes(_pbs(), 2, None, None)) == [("n1", 1), ("n2", 2)]
    # In the given order, and with any spelling; the plan keeps the reservation's spelling.
    assert _hosts(select_nodes(_pbs(), None, "n3.example,n1", None)) == [("n3", 2), ("n1", 1)]
    assert _hosts(select_nodes(_slurm(), None, "n[2-3]", None)) == [("n2", None), ("n3", None)]
    selection = select_nodes(_pbs(), None, None, _file(tmp_path, "n3\nn2\n"))
    assert (_hosts(selection), selection.slots_are_a_limit, selection.job_id) == (
        [("n3", 2), ("n2", 2)], False, "9.login")
    selection = select_nodes(_pbs(), None, None, _file(tmp_path, "n3 slots=4\nn2 slots=1\n"))
    assert (_hosts(selection), selection.slots_are_a_limit) == ([("n3", 4), ("n2", 1)], True)
    selection = select_nodes(_pbs(), 1, "n1,n3", _file(tmp_path, "n3:4\nn2:1\nn1:1\n"))
    assert _hosts(selection) == [("n1", 1)]


def test_slurm_keeps_the_jobs_order() -> None:
    """srun numbers the nodes of a step in the job's order, whatever the order of --nodelist."""
    selection = select_nodes(_slurm(), None, "n4,n2", None)
    assert [host.name for host in selection.hosts] == ["n2", "n4"]
    assert selection.notes == ("Slurm numbers nodes in the job's order: rank 0 is on n2, not on n4",)


def test_hosts_outside_the_reservation_are_refused(tmp_path: Path) -> None:
    for hosts, hostfile in (("n1,n7", None), (None, _file(tmp_path, "n1\nn7 slots=2\n"))):
        with pytest.raises(UserError, match=r"n7 is not in slurm job \d+, which has n1, n2, n3, n4") as raised:
            select_nodes(_slurm(), None, hosts, hostfile)
        assert (f"--hosts {hosts}" if hosts else f"--hostfile {hostfile}") in str(raised.value)
        assert "SLURM_JOB_NODELIST" in str(raised.value)
    # Only if the reservation is ignored.
    aside = find_allocation(captured_env("slurm/env_sbatch_script.txt"), "none")
    assert _hosts(select_nodes(aside, None, None, tmp_path / "hosts")) == [("n1", None), ("n7", 2)]
    with pytest.raises(UserError, match=r"which has n1, n2, n3, n4, n5, n6, n7, n8, … \(900 in total\)"):
        select_nodes(_slurm("n[1-900]"), None, "n1000", None)


@pytest.mark.parametrize(("nodes", "hosts", "found"), [
    (5, None, "--nodes 5, but the allocation has 4 nodes: n1, n2, n3, n4"),
    (2, "n1", "--nodes 2, but the allocation has 1 node: n1"),
    (None, "n1,n1.example", "n1.example is listed twice"),
    (None, "n[1", "not a Slurm host list: 'n[1'"),
    (None, " ", "--hosts lists no nodes"),
])
def test_invalid_selections(nodes: int | None, hosts: str | None, found: str) -> None:
    with pytest.raises(UserError) as raised:
        select_nodes(_slurm(), nodes, hosts, None)
    assert raised.value.found == found


def test_without_a_reservation_hosts_are_taken_as_they_are() -> None:
    selection = select_nodes(find_allocation({}), None, "m[1-2].example", None)
    assert (_hosts(selection), selection.source) == (
        [("m1.example", None), ("m2.example", None)], "--hosts m[1-2].example")
    with pytest.raises(UserError, match="not a hostfile line"):
        select_nodes(find_allocation({}), None, "-oProxyCommand=x", None)


def test_a_rank_has_nothing_to_choose() -> None:
    rank = find_allocation(captured_env("mpi/env_mpich_rank2.txt"))
    selection = select_nodes(rank, 1, "n1", None)
    assert selection.hosts == rank.hosts
    assert selection.notes[-1] == "ignoring --hosts n1, --nodes 1: this process is already a rank"


def _plan(words: str, **env: str) -> LaunchPlan:
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}/usr/bin:/bin"
    return build_plan(parse(f"--launcher mpiexec {words}".split()), {"PATH": path, **env})


def test_two_runs_side_by_side_share_nothing(tmp_path: Path) -> None:
    """Two halves of a job have different nodes, run directories and ports."""
    node_file = _file(tmp_path, "n1\nn1\nn2\nn2\nn3\nn3\nn4\nn4\n")
    env = captured_env("pbs/env_job_sel2_nc2_mpi2.txt") | {"PBS_NODEFILE": str(node_file)}
    env.pop("PATH")
    first = _plan("--hosts n1,n2 --run-dir /runs/one hostname", **env)
    second = _plan("--hosts n3,n4 --run-dir /runs/two hostname", **env)
    assert {place.host for place in first.ranks}.isdisjoint(place.host for place in second.ranks)
    assert len(first.ranks) == len(second.ranks) == 4
    assert (first.env["MASTER_ADDR"].value, second.env["MASTER_ADDR"].value) == ("n1", "n3")
    # Ports are random: other users can know the job and the run directory, and could take a derived port first.
    again = [_plan("--hosts n1,n2 --run-dir /runs/one hostname", **env) for _ in range(4)]
    assert len({plan.env["MASTER_PORT"].value for plan in (first, second, *again)}) > 1


@pytest.mark.full
def test_a_plan_for_all_of_aurora_is_quick(tmp_path: Path) -> None:
    """Nothing may have quadratic cost: 10,624 nodes with twelve ranks each."""
    names = [f"x{4000 + number // 64}c{number // 8 % 8}s{number % 8}b0n0.hsn.invalid" for number in range(10624)]
    env = captured_env("pbs/env_job_sel2_nc2_mpi2.txt") | {"PATH": clean_env()["PATH"]}
    took: dict[int, list[float]] = {2: [], 10624: []}
    for _ in range(3):
        for count, seconds in took.items():
            node_file = _file(tmp_path, "".join(f"{name}\n" for name in names[:count]))
            begun = cpu_seconds()
            done = launch(tmp_path, "--dry-run", "--ppn", "12", "hostname",
                          **{**env, "PBS_NODEFILE": str(node_file)})
            seconds.append(cpu_seconds() - begun)
            assert done.returncode == 0, done.stderr
            assert f"{12 * count} on {count} node{'s' * (count > 1)}: {names[0]}" in done.stdout
    # 0.13 s on a quiet machine; several times as long if other programs use its caches and cores.
    assert min(took[10624]) < max(0.5, 5 * min(took[2]))
