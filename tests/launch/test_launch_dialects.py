"""Command line, binding and hostfiles for each launcher, and the choice of the launcher. Nothing is started."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from launch_runs import CAPTURED, launch

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.basics.devices import MASKS
from ezpz_llm.launcher.basics.hostlist import expand_numbers
from ezpz_llm.launcher.planning.dialects import choose_launcher, identify, srun, torchrun
from ezpz_llm.launcher.planning.dialects.work import Built, Dialect, Launcher, Work, mask
from ezpz_llm.launcher.planning.environment import forwarded_names, is_users_choice
from ezpz_llm.launcher.planning.logical_cores import logical_cores
from ezpz_llm.launcher.planning.placement import Placement
from ezpz_llm.launcher.planning.rank_binding import Binding

_PALS = "mpiexec version 1.8.0 revision 1.2.3\n"
_TWO = (("n1", 2), ("n2", 2))


def _version_texts() -> dict[str, str]:
    # The captured blocks end with the first line of the launcher's version text.
    lines = (CAPTURED / "mpi/flags_two_hosts.txt").read_text().splitlines()
    texts = {name: next(line for line in lines if line.startswith(start)) for name, start in
             (("mpich", "HYDRA build details:"), ("intel", "Intel(R) MPI"), ("openmpi5", "mpiexec (Open MPI)"))}
    return texts | {"openmpi4": "mpiexec (OpenRTE) 4.1.8\n", "pals": _PALS}


def _work(*ranks: tuple[str, int], bound: str = "none", **changes: object) -> Work:
    """Return work for two ranks per node; `bound` is the kind of binding, or the cores of two local ranks."""
    cores = ("1-2,5", "3-4") if bound == "list" else ()
    binding = Binding(bound, cores, source="the test")
    work = Work(("python3", "-m", "SHIM", "cmd", "a b"), Placement(ranks, "test"), False, Path("/r/hostfile"), 4,
                ("PATH",), False, binding=binding, master=("n1-hsn", 4242))
    return work._replace(**changes)


def _built(name: str, work: Work) -> Built:
    if name == "srun":
        return srun.build("srun", work)
    chosen = identify(_version_texts()[name], "mpiexec", "test")
    return chosen.build(work)


def _words(built: Built) -> str:
    """Return the command line without the ranks' command, which is the same for all launchers."""
    assert built.argv[-5:] == ("python3", "-m", "SHIM", "cmd", "a b")
    return " ".join(built.argv[:-5])


def test_each_launcher_has_its_own_line() -> None:
    for name in ("mpich", "intel"):
        assert _words(_built(name, _work(*_TWO))) == "mpiexec -n 4 -ppn 2 -hosts n1,n2 -genvall"
    for name in ("openmpi4", "openmpi5"):
        built = _built(name, _work(*_TWO, as_root=True))
        assert _words(built) == ("mpiexec -n 4 --host n1:2,n2:2 --map-by ppr:2:node:OVERSUBSCRIBE --bind-to none"
                                 " -x PATH" + " -x EZPZ_LLM_PATH" * (name == "openmpi4"))
        assert built.env["OMPI_ALLOW_RUN_AS_ROOT"][0] == "1"
    pals = _built("pals", _work(*_TWO))
    assert _words(pals) == "mpiexec -n 4 --ppn 2 --hostfile /r/hostfile --cpu-bind=none --envall"
    assert pals.files == {Path("/r/hostfile"): "n1\nn2\n"}
    assert _words(_built("srun", _work(*_TWO))) == (
        "srun -N 2 -n 4 --ntasks-per-node 2 --distribution=block -c 4 --cpu-bind=none --overlap --export=ALL"
        " --wait=0 --kill-on-bad-exit=0 --input=0 --nodelist n1,n2")


def test_the_sites_words_stand_before_the_command() -> None:
    for name in ("mpich", "intel", "openmpi5", "pals", "srun"):
        work = _work(*_TWO, site_options=("--gpus-per-task=1", "--gpu-bind=closest"))
        assert _words(_built(name, work)).endswith(" --gpus-per-task=1 --gpu-bind=closest"), name


def test_ranks_on_this_host_need_no_name_and_no_scheduler() -> None:
    alone = {"here": True, "scheduler": "slurm"}
    for name in ("mpich", "intel"):
        built = _built(name, _work(("n2", 2), **alone))
        assert _words(built) == "mpiexec -n 2 -ppn 2 -launcher fork -hosts localhost -genvall"
        assert not any("--overlap" in value for value, _ in built.env.values())
    assert "--host localhost:2 " in _words(_built("openmpi5", _work(("n2", 2), here=True)))
    assert "--host n2:2 " in _words(_built("openmpi5", _work(("n2", 2), **alone)))


def test_uneven_ranks() -> None:
    uneven = _work(("n1", 1), ("n2", 2))
    for name in ("mpich", "intel"):
        built = _built(name, uneven)
        assert _words(built) == "mpiexec -n 3 -f /r/hostfile -genvall"
        assert built.files == {Path("/r/hostfile"): "n1:1\nn2:2\n"}
    assert "--host n1:1,n2:2 --map-by slot:OVERSUBSCRIBE" in _words(_built("openmpi5", uneven))
    words = _words(_built("srun", uneven))
    assert "--distribution=arbitrary" in words
    assert not {"--ntasks-per-node", "-N"} & {*words.split()}  # srun 23.11 rejects both with this distribution
    assert words.endswith("--nodelist n1,n2,n2")
    with pytest.raises(UserError, match=r"PALS fills nodes in order and cannot place \[1, 2\] ranks"):
        _built("pals", uneven)
    # --ppn fills nodes in order, the last one partly.
    assert "-n 3 --ppn 2 " in _words(_built("pals", _work(("n1", 2), ("n2", 1))))


def test_open_mpi_5_cannot_read_a_rank_file_with_a_colon_in_its_path() -> None:
    work = _work(*_TWO, bound="list", node_list_path=Path("/r/09:30/hostfile"))
    with pytest.raises(UserError, match="Open MPI 5 cannot read a rank file in /r/09:30"):
        _built("openmpi5", work)
    assert "--rankfile /r/09:30/rankfile" in _words(_built("openmpi4", work))
    assert "--bind-to none" in _words(_built("openmpi5", work._replace(binding=_work(*_TWO).binding)))


def test_device_masks_reach_other_nodes() -> None:
    env = {name: "2,3" for name in MASKS} | {"UNRELATED": "1"}
    assert forwarded_names(env, {}) == tuple(sorted(MASKS))


def test_long_host_lists_go_into_a_file() -> None:
    many = _work(*((f"n{number}", 2) for number in range(20)))
    for name, option, first in (("mpich", "-f /r/hostfile", "n0\nn1\n"), ("intel", "-f /r/hostfile", "n0\nn1\n"),
                                ("openmpi5", "--hostfile /r/hostfile", "n0 slots=2\nn1 slots=2\n"),
                                ("openmpi4", "--hostfile /r/hostfile", "n0 slots=2\nn1 slots=2\n"),
                                ("pals", "--hostfile /r/hostfile", "n0\nn1\n"),
                                ("srun", "--nodelist /r/hostfile", "n0\nn1\n")):
        built = _built(name, many)
        assert option in _words(built), name
        assert built.files[Path("/r/hostfile")].startswith(first)
        assert "n1," not in _words(built)


def test_binding_in_each_launchers_own_option(monkeypatch: pytest.MonkeyPatch) -> None:
    # Open MPI numbers cores itself. For other nodes, the numbers come from the site, not from this machine.
    monkeypatch.setattr("ezpz_llm.launcher.planning.dialects.openmpi.logical_cores",
                        lambda: {1: 7, 2: 7, 3: 8, 4: 8, 5: 9})
    listed, depth, none = (_work(*_TWO, bound=kind) for kind in ("list", "depth", "none"))
    assert " -bind-to user:1+2+5,3+4 " in _words(_built("mpich", listed))
    assert "-bind-to" not in _words(_built("mpich", none))
    assert _built("intel", listed).env["I_MPI_PIN_DOMAIN"] == ("[0x26,0x18]", "the test")
    assert _built("intel", none).env["I_MPI_PIN"][0] == "off"
    # It rejects more domains than a node has ranks.
    uneven = _built("intel", _work(("n1", 2), ("n2", 1), bound="list"))
    assert (uneven.env.keys(), uneven.env["I_MPI_PIN"][0]) == ({"I_MPI_PIN"}, "off")
    rank_file = "rank 0=n1 slot=1-2,5\nrank 1=n1 slot=3-4\nrank 2=n2 slot=1-2,5\nrank 3=n2 slot=3-4\n"
    for name, words in (("openmpi4", "--rankfile /r/rankfile"),
                        ("openmpi5", "--map-by rankfile:file=/r/rankfile:OVERSUBSCRIBE --bind-to core")):
        built = _built(name, listed)
        assert f"--host n1:2,n2:2 {words} -x" in _words(built)
        assert built.files[Path("/r/rankfile")] == rank_file
        assert "--bind-to none" in _words(_built(name, none))
        here = _built(name, _work((socket.gethostname(), 2), bound="list"))
        assert here.files[Path("/r/rankfile")].splitlines()[0].endswith(" slot=7,9")
    for work, pals, slurm in ((listed, "--cpu-bind=list:1-2,5:3-4", "-c 4 --cpu-bind=mask_cpu:0x26,0x18"),
                              (depth, "--depth=4 --cpu-bind=depth", "-c 4 --cpu-bind=cores"),
                              (none, "--cpu-bind=none", "-c 4 --cpu-bind=none")):
        assert f"/r/hostfile {pals} --envall" in _words(_built("pals", work))
        assert f"{slurm} --overlap" in _words(_built("srun", work))


def test_launchers_own_daemons_start_inside_a_slurm_step() -> None:
    inside = _work(*_TWO, scheduler="slurm")
    assert _built("mpich", inside).env["HYDRA_LAUNCHER_EXTRA_ARGS"][0] == "--overlap --export=ALL"
    intel = _built("intel", inside)
    assert "-bootstrap slurm" in _words(intel)
    assert intel.env["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"][0] == "--overlap --export=ALL"
    assert "PRTE_MCA_plm_slurm_args" in _built("openmpi5", inside).env
    assert "OMPI_MCA_plm_slurm_args" in _built("openmpi4", inside).env
    assert not _built("mpich", _work(*_TWO)).env


def test_the_users_ssh_does_not_get_the_options_that_slurm_sets_for_srun() -> None:
    """Slurm 23.02 and newer set these variables in a job."""
    for name, launcher, options in (("mpich", "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXTRA_ARGS"),
                                    ("intel", "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")):
        env = {"HYDRA_BOOTSTRAP": "slurm", options: "--external-launcher"}
        assert _built(name, _work(*_TWO, scheduler="slurm", env=env | {launcher: "ssh"})).env[options][0] == ""
        assert options not in _built(name, _work(*_TWO, scheduler="slurm", env=env | {launcher: "slurm"})).env
        assert not is_users_choice(options, env)
        assert is_users_choice(options, {options: "--my-option"})


def test_unsupported_work_is_rejected() -> None:
    colon = _work(*_TWO, command=("SHIM", "cmd", ":", "x"))
    odd = _work(("n1; reboot", 1), ("-oProxyCommand=x", 1))
    for name in (*_version_texts(), "srun"):
        with pytest.raises(UserError, match="does not accept ':' as an argument") as raised:
            _built(name, colon)
        assert "script" in str(raised.value)
        with pytest.raises(UserError, match="invalid hostname 'n1; reboot'"):
            _built(name, odd)


def test_which_mpiexec() -> None:
    texts = _version_texts()
    names = {name: identify(text, "m", "t").title for name, text in texts.items()}
    assert names == {"mpich": "MPICH/Hydra", "intel": "Intel MPI 2021.18.1", "openmpi4": "Open MPI 4.1.8",
                     "openmpi5": "Open MPI 5.0.11", "pals": "Cray PALS 1.8.0"}
    with pytest.raises(UserError, match="begins with 'PBS mpiexec'"):
        identify("PBS mpiexec\n", "m", "t")
    of_site = identify("something newer\n", "m", "t", "pals")
    assert (of_site.title, of_site.source) == ("Cray PALS", "t; the site's dialect")
    # The mpiexec of a conda environment, first on PATH on a PALS machine, gets its own dialect.
    hiding = identify(texts["mpich"], "/conda/bin/mpiexec", "t", "pals")
    assert hiding.title == "MPICH/Hydra"
    assert "/conda/bin/mpiexec is MPICH/Hydra, but the site's mpiexec is Cray PALS" in hiding.notes[0]
    assert not identify(_PALS, "m", "t", "pals").notes


def _never() -> Launcher:
    raise AssertionError("torchrun on this host needs nobody to start it")


def test_torchrun_on_this_host() -> None:
    built = torchrun.build("torchrun", _work(("n1", 2), here=True), _never)
    assert _words(built) == ("torchrun --nnodes 1 --nproc-per-node 2 --rdzv-backend c10d"
                             " --rdzv-endpoint localhost:0 --log-dir /r/torchrun --no-python --")


@pytest.mark.parametrize("scheduler", ["slurm", "none"])
def test_torchrun_on_several_hosts(scheduler: str) -> None:
    def starter() -> Launcher:
        if scheduler == "slurm":
            return Launcher("srun", Dialect("Slurm", None, srun.build), "srun", "test")
        return identify(_version_texts()["mpich"], "mpiexec", "test")

    work = _work(*_TWO, bound="list", scheduler=scheduler, cores_per_node=9, site_options=("--gpus-per-task=1",))
    words = _words(torchrun.build("torchrun", work, starter))
    outer, inner = words.split(" python3 -m ezpz_llm.launcher.planning.dialects.on_node ")
    assert inner == ("2 2 torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend static --rdzv-endpoint n1-hsn:4242"
                     " --log-dir /r/torchrun --no-python --")
    assert "gpus-per-task" not in words
    if scheduler == "slurm":
        # The torchrun of a node gets all of its cores, not a rank's mask.
        assert outer.startswith("srun -N 2 -n 2 --ntasks-per-node 1 --distribution=block -c 9 --cpu-bind=none ")
    else:
        assert outer == "mpiexec -n 2 -ppn 1 -hosts n1,n2 -genvall"
    elsewhere = _words(torchrun.build("torchrun", _work(("n2", 2), scheduler=scheduler), starter))
    assert "--nnodes 1 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0" in elsewhere
    with pytest.raises(UserError, match="the same number of ranks on every node"):
        torchrun.build("torchrun", _work(("n1", 1), ("n2", 2)), starter)
    with pytest.raises(UserError, match="requires a rendezvous port"):
        torchrun.build("torchrun", _work(*_TWO, master=("n1", None)), starter)


def test_core_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert expand_numbers("1-3,8") == (1, 2, 3, 8)
    assert mask("1-3,8") == "0x10e"
    assert mask("104-111") == hex(0xff << 104)
    # Two sockets numbered alternately, two threads per core; CPUs 3 and 7 belong to another container.
    for number in range(8):
        topology = tmp_path / f"devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{number % 2}\n")
        (topology / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5, 6})
    assert logical_cores(tmp_path) == {0: 0, 4: 0, 2: 1, 6: 1, 1: 2, 5: 2}
    assert logical_cores(tmp_path / "no-sysfs") == {}


def _mpiexec_of(folder: Path, version_text: str) -> Path:
    folder.mkdir()
    program = folder / "mpiexec"
    program.write_text(f"#!/bin/sh\necho '{version_text}'\n")
    program.chmod(0o755)
    return program


def test_pbs_own_wrapper_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = _mpiexec_of(tmp_path / "pbs", "pbs_version = 23.06.06")
    said = f"skipping {wrapper}: it is PBS's own wrapper, not the mpiexec of an MPI"
    # There is no other mpiexec next to Python: torchrun is used on one node, and no launcher for one rank.
    monkeypatch.setattr("sys.executable", str(tmp_path / "venv/bin/python"))
    torchrun_beside = tmp_path / "venv/bin/torchrun"
    torchrun_beside.parent.mkdir(parents=True)
    torchrun_beside.write_text("")
    torchrun_beside.chmod(0o755)
    only = {"PATH": str(wrapper.parent)}
    chosen = choose_launcher("auto", "none", 2, only)
    assert (chosen.kind, chosen.program, chosen.notes) == ("torchrun", str(torchrun_beside), (said,))
    assert (choose_launcher("auto", "pbs", 1, only).kind,
            choose_launcher("auto", "pbs", 1, only).notes) == ("launch", (said,))
    with pytest.raises(UserError, match="mpiexec is not on PATH") as raised:
        choose_launcher("mpiexec", "pbs", 2, only)
    assert said in str(raised.value)
    # MPICH next to Python, where with-env installs it; then one later on PATH, in a PBS job.
    beside = _mpiexec_of(tmp_path / "venv/mpi", _version_texts()["mpich"])
    assert choose_launcher("mpiexec", "pbs", 2, only).program == str(beside)
    assert choose_launcher("auto", "none", 2, only).notes == (said,)
    later = _mpiexec_of(tmp_path / "site", _version_texts()["openmpi5"])
    chosen = choose_launcher("auto", "pbs", 2, {"PATH": f"{wrapper.parent}:{later.parent}"})
    assert (chosen.program, chosen.title, chosen.notes) == (str(later), "Open MPI 5.0.11", (said,))
    # At a site with PALS, PBS's wrapper does not get PALS' dialect.
    assert choose_launcher("auto", "pbs", 2, only, "pals").program == str(beside)


def test_a_plan_says_that_pbs_own_wrapper_was_passed_over(tmp_path: Path) -> None:
    wrapper = _mpiexec_of(tmp_path / "pbs", "pbs_version = 23.06.06")
    shown = launch(tmp_path, "--dry-run", "-n", "2", "hostname",
                   PATH=f"{wrapper.parent}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}").stdout
    assert f"note       skipping {wrapper}: it is PBS's own wrapper" in shown
    assert str(wrapper) not in shown.partition("note ")[0]
