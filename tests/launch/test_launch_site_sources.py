"""Sources for the values in site files, and command lines and masks from the sites' documentation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import step_standin
from launch_runs import launch, scheduler as make_program

from ezpz_llm.core.base.package_data import data_dir
from ezpz_llm.core.base.untrusted_input import parse_toml
from ezpz_llm.launcher.basics.hostlist import expand_numbers
from ezpz_llm.launcher.basics.variables import BIND_VARIABLE
from ezpz_llm.launcher.planning.sites import KEYS, find_site

_SOURCED = ("alps", "delta", "derecho", "isambard-ai", "jupiter", "juwels-booster", "leonardo", "lumi",
            "marenostrum5", "tuolumne", "vista")
_ABOUT = {"description", "sources", "unsourced"}


@pytest.mark.parametrize("name", _SOURCED)
def test_every_value_has_a_source(name: str) -> None:
    content = parse_toml((data_dir("launchers") / f"sites/{name}.toml").read_text(), name)
    assert content.keys() - _ABOUT == content["sources"].keys()
    assert all(link.startswith("https://") for link in content["sources"].values())
    assert content["unsourced"]
    assert not set(content["unsourced"]) & content.keys()
    assert set(content["unsourced"]) <= KEYS.keys()
    (note,) = find_site(name, {}).notes
    assert note.startswith(f"site {name} does not set {content['unsourced'][0]}")


@pytest.mark.parametrize(("name", "without"), [
    ("aurora", {"network", "stage"}), ("polaris", {"interface", "stage"}), ("frontier", {"recognise"})])
def test_what_has_no_source_in_the_first_sites(name: str, without: set[str]) -> None:
    """These sites predate the rule: the few values that their documentation lacks are listed."""
    content = parse_toml((data_dir("launchers") / f"sites/{name}.toml").read_text(), name)
    assert content.keys() - _ABOUT - content["sources"].keys() == without
    assert not content["sources"].keys() - content.keys()
    assert all(link.startswith("https://docs.") for link in content["sources"].values())


def _plan(cwd: Path, *words: str, **env: str) -> dict:
    done = launch(cwd, "--dry-run", "--json", *words, "hostname", **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _slurm(folder: Path, cpus: int) -> dict[str, str]:
    make_program(folder, "srun", "exit 0")
    return {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": f"{cpus}(x2)",
            "SLURM_JOB_END_TIME": "4000000000"}


def test_lumis_own_masks(tmp_path: Path) -> None:
    """https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/distribution-binding/#gpu-binding, "For a hybrid
    MPI+OpenMP application"."""
    documented = ["fe000000000000", "fe00000000000000", "fe0000", "fe000000", "fe", "fe00", "fe00000000",
                  "fe0000000000"]
    plan = _plan(tmp_path, "--site", "lumi", **_slurm(tmp_path / "bin", 112), SLURM_GPUS_PER_NODE="8")
    (masks,) = [word for word in plan["argv"] if word.startswith("--cpu-bind=mask_cpu:")]
    assert masks.partition(":")[2].split(",") == [f"0x{mask}" for mask in documented]
    assert plan["argv"][1:6] == ["-N", "2", "-n", "16", "--ntasks-per-node"]
    ranks = plan["ranks"][:8]
    # "rank 0 and 1 are assigned to NUMA node 3, close to GPUs 0 and 1", and so on.
    assert [(rank["domains"], rank["device"], rank["distance"]) for rank in ranks] == [
        (str(domain), str(device), "near") for device, domain in enumerate((3, 3, 1, 1, 0, 0, 2, 2))]
    assert plan["env"]["NCCL_SOCKET_IFNAME"].startswith("hsn")
    assert any("lumi does not set interface, recognise" in note for note in plan["notes"])


_CORES = ("49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47")
"""LUMI's masks as lists of cores, for local ranks 0 to 7."""
_INTEL = "0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000"
_VERSIONS = {"MPICH": "HYDRA build details:", "Intel MPI": "Intel(R) MPI Library for Linux* OS",
             "Open MPI 4": "mpiexec (OpenRTE) 4.1.8", "Open MPI 5": "mpiexec (Open MPI) 5.0.3",
             "Cray PALS": "mpiexec version 1.8.0"}


@pytest.mark.parametrize("launcher", [*_VERSIONS, "Flux", "jsrun"])
def test_the_same_domains_in_other_dialects(tmp_path: Path, launcher: str) -> None:
    """Express the site's masks for every rank of both nodes with each launcher's options.

    jsrun has no option that names cores, so the rank shim sets them.
    """
    folder = step_standin.make(tmp_path / "bin", "flux", "jsrun", resources=step_standin.resources("n[1-2]", "0-1"))
    env, words = {"PATH": f"{folder}:/usr/bin:/bin"}, ["--run-dir", "r"]
    if launcher == "Flux":
        env |= {"FLUX_ENCLOSING_ID": "ƒ2"}
    elif launcher == "jsrun":
        env |= {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 64 n2 64"}
    else:
        words += ["--scheduler", "none", "--hosts", "n1,n2"]
        make_program(folder, "mpiexec", f"echo '{_VERSIONS[launcher]}'")
    plan = _plan(tmp_path, "--site", "lumi", *words, **env)
    line, by_shim = " ".join(plan["argv"]), ":".join(_CORES)
    if launcher.startswith("Open MPI"):
        (rank_file,) = (text for path, text in plan["files"].items() if path.endswith("rankfile"))
        assert rank_file.splitlines() == [f"rank {8 * node + rank}=n{node + 1} slot={cores}"
                                          for node in range(2) for rank, cores in enumerate(_CORES)]
        assert f"{tmp_path}/r/rankfile" in line
        return
    wanted = {
        "MPICH": f"-bind-to user:{','.join('+'.join(map(str, expand_numbers(cores))) for cores in _CORES)} ",
        "Cray PALS": f"--cpu-bind=list:{by_shim} ",
        "Flux": f"-o cpu-affinity=map:{';'.join(_CORES)} ",
    }
    if launcher in wanted:
        assert wanted[launcher] in f"{line} "
    elif launcher == "Intel MPI":
        assert plan["env"]["I_MPI_PIN_DOMAIN"] == f"[{_INTEL}]"
    else:
        assert plan["env"][BIND_VARIABLE] == by_shim


@pytest.mark.parametrize(("site", "cpus", "wanted"), [
    ("leonardo", 32, ["-N", "2", "-n", "8", "--ntasks-per-node", "4", "--distribution=block", "-c", "8"]),
    ("alps", 288, ["-N", "2", "-n", "8", "--ntasks-per-node", "4", "--distribution=block", "-c", "72"]),
    ("isambard-ai", 288, ["-N", "2", "-n", "8", "--ntasks-per-node", "4", "--distribution=block", "-c", "72"]),
    ("jupiter", 288, ["-N", "2", "-n", "8", "--ntasks-per-node", "4", "--distribution=block", "-c", "72"]),
    ("juwels-booster", 96, ["-N", "2", "-n", "8", "--ntasks-per-node", "4", "--distribution=block", "-c", "24"]),
    ("marenostrum5", 80, ["-N", "2", "-n", "8", "--ntasks-per-node", "4", "--distribution=block", "-c", "20"]),
])
def test_lines_of_srun(tmp_path: Path, site: str, cpus: int, wanted: list[str]) -> None:
    """Each rank has a device and its share of the node's CPUs.

    The pages that the files cite under `launcher` and `job` have `srun --ntasks-per-node 4`, and 20 cores per
    device on MareNostrum 5.
    """
    plan = _plan(tmp_path, "--site", site, **_slurm(tmp_path / "bin", cpus))
    assert plan["argv"][1:1 + len(wanted)] == wanted


def test_the_line_of_delta(tmp_path: Path) -> None:
    """https://docs.ncsa.illinois.edu/systems/delta/en/latest/user_guide/architecture.html, "4-Way NVIDIA A100
    Mapping and GPU-CPU Affinitization": device 0 with cores 48-63, device 3 with 0-15."""
    plan = _plan(tmp_path, "--site", "delta", **_slurm(tmp_path / "bin", 64))
    assert "--cpu-bind=mask_cpu:0xffff000000000000,0xffff00000000,0xffff0000,0xffff" in plan["argv"]
    assert [(rank["cores"], rank["device"], rank["distance"]) for rank in plan["ranks"][:4]] == [
        ("48-63", "0", "near"), ("32-47", "1", "near"), ("16-31", "2", "near"), ("0-15", "3", "near")]


def test_the_line_of_vista(tmp_path: Path) -> None:
    """https://docs.tacc.utexas.edu/hpc/vista/#ml, "Running PyTorch (Multi-node)": `mpirun -np 2
    --map-by ppr:1:node`."""
    folder = make_program(tmp_path / "bin", "mpiexec", "echo mpiexec \\(Open MPI\\) 5.0.3")
    plan = _plan(tmp_path, "--site", "vista", **_slurm(folder, 72), SLURM_TASKS_PER_NODE="1(x2)")
    assert plan["argv"][:5] == [str(folder / "mpiexec"), "-n", "2", "--host", "n1:1,n2:1"]
    assert "ppr:1:node:OVERSUBSCRIBE" in plan["argv"]


def test_where_ranks_of_juwels_booster_meet(tmp_path: Path) -> None:
    """Rank 0's address is the node's name on InfiniBand (the script that the file cites for `master_suffix`)."""
    plan = _plan(tmp_path, "--site", "juwels-booster", **_slurm(tmp_path / "bin", 96))
    assert plan["env"]["MASTER_ADDR"] == "n1i"
    assert plan["env"]["NCCL_SOCKET_IFNAME"] == "ib0"


def test_the_line_of_tuolumne(tmp_path: Path) -> None:
    """The documentation's `srun -N ${NNODES} --ntasks-per-node=4`, as options of Flux."""
    folder = step_standin.make(tmp_path / "bin", "flux",
                               resources=step_standin.resources("tuolumne[1001-1002]", "0-1"))
    plan = _plan(tmp_path, "--site", "tuolumne", PATH=f"{folder}:/usr/bin:/bin", FLUX_ENCLOSING_ID="ƒ2")
    assert plan["argv"][1:6] == ["run", "--nodes=2", "--tasks-per-node=4", "--exclusive",
                                 "--requires=hosts:tuolumne[1001-1002]"]


def test_the_line_of_derecho(tmp_path: Path) -> None:
    folder = make_program(tmp_path / "bin", "mpiexec", "echo mpiexec version 1.2.12 revision 0")
    (tmp_path / "nodes").write_text("deg0001\n" * 4 + "deg0002\n" * 4)
    plan = _plan(tmp_path, "--site", "derecho", PATH=f"{folder}:/usr/bin:/bin", PBS_JOBID="7.desched1",
                 PBS_NODEFILE=str(tmp_path / "nodes"))
    assert plan["argv"][1:5] == ["-n", "8", "--ppn", "4"]
    assert Path(sys.executable).name in plan["argv"][plan["argv"].index("-m") - 1]
