"""Comparison of hostnames: the same rule everywhere in launch."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path

import pytest
from launch_runs import captured_env, launch

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.basics import addresses
from ezpz_llm.launcher.basics.addresses import domain_notes, find_local_node, is_local_address
from ezpz_llm.launcher.basics.hostnames import (
    NodeNames,
    count_repeats,
    is_same_node,
    match_names,
    match_same_nodes,
    node_keys,
)
from ezpz_llm.launcher.jobs import hostfile, node_selection
from ezpz_llm.launcher.jobs.schedulers import QUICK, find_allocation, pbs, supplement
from ezpz_llm.launcher.jobs.schedulers.lsf import LsfScheduler
from ezpz_llm.launcher.jobs.schedulers.node_files import parse_slot_columns
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation, Node

_WORKERS = ["mpi-worker.1.site.example", "mpi-worker.2.site.example"]


@pytest.mark.parametrize(("one", "other", "same"), [
    ("n1", "n1.site.example", True),
    ("N1.Site.Example", "n1.site.example.", True),
    ("n1.a.example", "n1.b.example", False),
    ("n1", "n10", False),
    ("10.0.0.1", "10.0.0.2", False),
    ("10", "10.0.0.1", False),
    ("FE80::1", "fe80:0::1", True),
])
def test_names_of_one_node(one: str, other: str, same: bool) -> None:
    assert is_same_node(one, other) == is_same_node(other, one) == same


def test_a_list_keeps_two_full_names_apart() -> None:
    assert count_repeats([*_WORKERS, "MPI-WORKER.1.site.example"]) == {_WORKERS[0]: 2, _WORKERS[1]: 1}
    assert count_repeats(["n1", "n1.site.example", "n2"]) == {"n1": 2, "n2": 1}
    with pytest.raises(UserError, match=r"mpi-worker matches mpi-worker\.1\.site\.example and"):
        node_keys(["mpi-worker", *_WORKERS])


def test_another_domain_in_another_source() -> None:
    matches = match_names(["n1.hsn.example", "n2"], ["n2.mgmt.example", "n1.mgmt.example"])
    assert matches.places == (1, 0)
    (note,) = matches.notes("the file", "the job")
    assert "the file has n1.hsn.example, the job has n1.mgmt.example" in note
    # A first label shared by several nodes does not identify any of them.
    assert match_names(["mpi-worker.3.site.example"], _WORKERS).places == (None,)
    assert match_names(["w.1.x", "w.2.x"], ["w.1.y"]).places == (None, None)
    assert match_same_nodes(["n1"], ["n1.site.example", "n2"]) is None
    assert "n2.site.example" not in NodeNames(_WORKERS)


def _plan(cwd: Path, *words: str, **env: str) -> dict:
    done = launch(cwd, *words, "--dry-run", "--no-check", "--json", "python3", "x.py", **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("slots", "ranks"), [("", 2), (" slots=2", 4)])
def test_a_hostfile_of_two_domains(tmp_path: Path, slots: str, ranks: int) -> None:
    (tmp_path / "hosts").write_text("".join(f"{name}{slots}\n" for name in _WORKERS))
    plan = _plan(tmp_path, "--hostfile", "hosts", "--launcher", "mpiexec")
    assert (plan["hosts"], len(plan["ranks"])) == (_WORKERS, ranks)
    assert plan["env"]["MASTER_ADDR"] == _WORKERS[0]


def test_every_source_of_hosts_keeps_two_domains_apart(tmp_path: Path) -> None:
    lines = "\n".join(_WORKERS)
    one_line = ",".join(_WORKERS)
    for hosts in (hostfile.parse(lines, "f"), pbs.node_file_nodes(lines),
                  parse_slot_columns("".join(f"{name} 2 all.q UNDEFINED\n" for name in _WORKERS)),
                  find_allocation({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": one_line}).hosts,
                  node_selection.select_nodes(find_allocation({}), None, one_line, None).hosts):
        assert [host.name for host in hosts] == _WORKERS
    lsf = LsfScheduler().detect({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "n1 2 N1.site.example 2 n2 4",
                                 "PATH": str(tmp_path)})
    assert lsf is not None
    assert [(host.name, host.slots) for host in lsf.hosts] == [("n1", 4), ("n2", 4)]


def _allocation(*names: str) -> Allocation:
    return Allocation("pbs", "1", tuple(map(Node, names)), None, "PBS_NODEFILE")


def test_selecting_from_a_reservation() -> None:
    selection = node_selection.select_nodes(_allocation(*_WORKERS), None, _WORKERS[1].upper(), None)
    assert [host.name for host in selection.hosts] == [_WORKERS[1]]
    with pytest.raises(UserError, match="the short hostname mpi-worker matches"):
        node_selection.select_nodes(_allocation(*_WORKERS), None, "mpi-worker", None)
    with pytest.raises(UserError, match="is not in pbs job 1"):
        node_selection.select_nodes(_allocation(*_WORKERS), None, "mpi-worker.3.site.example", None)
    job = _allocation("n1.mgmt.example", "n2.mgmt.example")
    selection = node_selection.select_nodes(job, None, "n2.hsn.example", None)
    assert [host.name for host in selection.hosts] == ["n2.mgmt.example"]
    assert "--hosts n2.hsn.example has n2.hsn.example, PBS_NODEFILE has n2.mgmt.example" in selection.notes[-1]


def test_which_node_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: _WORKERS[1])
    assert find_local_node(_WORKERS) == 1
    assert is_local_address("mpi-worker")
    assert not is_local_address(_WORKERS[0])
    # In another domain, only the address identifies this node.
    assert domain_notes(["mpi-worker.x.example"], "the file")[0].endswith("launch treats them as different nodes")
    monkeypatch.setattr(addresses, "addresses_of", lambda name: ("192.0.2.7",))
    monkeypatch.setattr(addresses, "_can_bind", lambda address: address == "192.0.2.7")
    assert is_local_address("mpi-worker.x.example")
    assert domain_notes(["mpi-worker.x.example"], "the file")[0].endswith("the same node (by its address)")
    # If this node only knows its short name, the name service has the domain.
    monkeypatch.setattr(socket, "gethostname", lambda: "mpi-worker")
    monkeypatch.setattr(addresses, "canonical_name", lambda name: _WORKERS[1])
    assert find_local_node(_WORKERS) == 1


def test_squeue_and_qstat_may_spell_names_otherwise(tmp_path: Path) -> None:
    env = captured_env("slurm/env_sbatch_N2_no_ntasks.txt") | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    job = env["SLURM_JOB_ID"]
    for hosts, said in (("N[1-2].site.example", ""), ("n[1,3]", "squeue says n[1,3]: using SLURM_JOB_NODELIST")):
        answer = f"echo '{job}|2030-01-01T00:00:00|{hosts}'"
        for name, body in (("squeue", answer), ("scontrol", "exit 1"), ("srun", "exit 1")):
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(stat.S_IRWXU)
        notes = "\n".join(_plan(tmp_path, **env)["notes"])
        assert said in notes
        assert ("squeue says" in notes) == bool(said)


@pytest.mark.parametrize(("exec_host", "note"), [
    ("N1/0*2+n2/0*2", ""),
    ("n1.mgmt.example/0*2+n2.mgmt.example/0*2", "the domains differ: the node file has n1.hsn.example"),
    ("n1/0*2+n3/0*2", "qstat's exec_host has n1, n3: using the node file"),
])
def test_a_node_file_and_qstat(tmp_path: Path, exec_host: str, note: str) -> None:
    (tmp_path / "nodes").write_text("n1.hsn.example\nn1.hsn.example\nn2.hsn.example\nn2.hsn.example\n")
    (tmp_path / "qstat").write_text(f"""#!/bin/sh\necho '{{"Jobs": {{"5": {{"exec_host": "{exec_host}"}}}}}}'\n""")
    (tmp_path / "qstat").chmod(stat.S_IRWXU)
    env = {"PBS_JOBID": "5", "PBS_NODEFILE": str(tmp_path / "nodes"), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    notes = supplement(find_allocation(env), env, QUICK).notes
    found = [one for one in notes if "exec_host" in one]
    assert (note in found[0]) if note else found == []
