"""Site files: selection of a site, errors in a file, and the command line that each site documents.

The environments are written by hand after the sites' user guides; none was captured.
"""

from __future__ import annotations

import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.package_data import data_dir
from ezpz_llm.launcher.basics import devices
from ezpz_llm.launcher.basics.hostlist import expand_numbers
from ezpz_llm.launcher.jobs.option_parsing import parse
from ezpz_llm.launcher.planning import sites
from ezpz_llm.launcher.planning.plan import LaunchPlan, build_plan
from ezpz_llm.launcher.planning.sites import Site, find_site

SITES = ("alps", "aurora", "delta", "derecho", "frontier", "generic", "isambard-ai", "jupiter", "juwels-booster",
         "leonardo", "lumi", "marenostrum5", "perlmutter", "polaris", "sunspot", "tuolumne", "vista")
_FOLDER = data_dir("launchers") / "sites"


def test_the_site_is_the_one_named_or_a_guess_that_says_so() -> None:
    assert tuple(sorted(path.stem for path in _FOLDER.glob("*.toml"))) == SITES
    for name in SITES:
        site = find_site(name, {})
        assert (site.name, site.source) == (name, "--site")
        assert site.description
    assert find_site("polaris", {"EZPZ_LLM_SITE": "aurora"}).name == "polaris"
    assert find_site(None, {"EZPZ_LLM_SITE": "aurora", "NERSC_HOST": "perlmutter"}).source == "EZPZ_LLM_SITE"
    guesses = {"PBS_O_HOST=polaris-login-02.hsn.cm.polaris.alcf.anl.gov": "polaris",
               "PBS_O_HOST=x4407c6s2b0n0.hostmgmt2407.cm.aurora.alcf.anl.gov": "aurora",
               "PBS_JOBID=8246832.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov": "aurora",
               "PBS_JOBID=6815207.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov": "polaris",
               "SLURM_CLUSTER_NAME=frontier": "frontier", "LMOD_SYSTEM_NAME=frontier": "frontier",
               "NERSC_HOST=perlmutter": "perlmutter"}
    for said, name in guesses.items():
        site = find_site(None, dict([said.split("=")]))
        assert (site.name, site.source) == (name, f"guessed from {said}")


@pytest.mark.parametrize("env", [
    {}, {"PBS_O_HOST": "login", "PBS_JOBID": "5.login"}, {"SLURM_CLUSTER_NAME": "sim"},
    # Names of compute nodes that are common to many machines.
    {"SLURM_JOB_NODELIST": "nid[001000-001003]", "SLURM_CLUSTER_NAME": "other", "HOSTNAME": "nid001000"},
    {"PBS_O_HOST": "x1000c0s0b0n0", "HOSTNAME": "x1921c0s3b0n0"},
])
def test_nothing_is_guessed_from_names_of_compute_nodes(env: dict[str, str]) -> None:
    assert find_site(None, env) == Site(description=find_site("generic", {}).description)


def test_two_matching_sites_are_not_used() -> None:
    site = find_site(None, {"SLURM_CLUSTER_NAME": "frontier", "NERSC_HOST": "perlmutter"})
    assert site.name == "generic"
    assert "frontier (SLURM_CLUSTER_NAME=frontier)" in site.source
    assert "perlmutter (NERSC_HOST=perlmutter)" in site.source


def test_a_site_is_added_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "mine.toml"
    own.write_text('devices_per_host = 3\n[env]\nX = "1"\n[recognise]\nSLURM_CLUSTER_NAME = ["m*"]\n')
    assert find_site(str(own), {}).devices_per_host == 3
    assert find_site(None, {"EZPZ_LLM_SITE": str(own)}).env == {"X": "1"}
    with pytest.raises(UserError, match="No such file"):
        find_site("./nowhere.toml", {})
    checkout = tmp_path / "checkout"
    shutil.copytree(_FOLDER, checkout / "sites")
    shutil.copy(own, checkout / "sites")
    monkeypatch.setattr(sites, "data_dir", lambda name: checkout)
    assert find_site("mine", {}).devices_per_host == 3
    assert find_site(None, {"SLURM_CLUSTER_NAME": "m7"}).source == "guessed from SLURM_CLUSTER_NAME=m7"
    with pytest.raises(UserError, match="unknown site 'polarsi'") as raised:
        find_site("polarsi", {})
    assert "polaris" in str(raised.value.instead)


@pytest.mark.parametrize(("text", "found", "line", "accepted"), [
    ("devices_per_host = 4\ndevices = 4\n", "unknown key devices", 2, "devices_per_host"),
    ('\ndevices_per_host = "4"\n', "devices_per_host is '4'", 2, "a whole number, 1 or more"),
    ("devices_per_host = true\n", "devices_per_host is True", 1, "a whole number"),
    ('scheduler = "torque"\n', "scheduler is 'torque'", 1, "'pbs', 'slurm', 'flux', 'lsf'"),
    ('cores = "0-51"\n', "cores is '0-51'", 1, "a list with the cores of each NUMA domain"),
    ('cores = ["51-0"]\n', "cores is", 1, "a list with the cores of each NUMA domain"),
    ('reserved_cores = "first"\n', "reserved_cores is 'first'", 1, '"0,52" or "0-3,64"'),
    ("[env]\nA = 1\n", "env is {'A': 1}", 1, 'NAME = "value"'),
    ('[env]\n"A B" = "1"\n', "env is", 1, 'NAME = "value"'),
    ('[options]\nmpirun = ["-x"]\n', "options is", 1, "for mpiexec, srun or both"),
    ('[job]\nqueue = ["a"]\n', "job.queue is ['a']", 2, "a string on one line"),
    ('[job]\nlimits = [{ queue = "q", nodes = [2, 1] }]\n', "job.limits is", 2, "hours = 1, jobs = 1"),
    ('unsourced = ["core"]\n', "unsourced is", 1, "keys that the file does not set"),
    ('[job]\nsetups = []\n', "unknown key job.setups", 2, "setup"),
    ('[recognise]\nHOSTNAME = ["nid*"]\n', "recognise is", 1, "SLURM_CLUSTER_NAME"),
    ('cores = ["0-7"]\ndevices_per_host = 2\ndevice_domains = [0]\n', "device_domains is [0]", 3, "each device"),
    ('cores = ["0-7", "8-15", "16-23"]\nsockets = 2\n', "sockets is 2", 2, "evenly"),
    ("devices_per_host 4\n", "cannot read the site file: this is not TOML", None, "generic.toml"),
])
def test_errors_in_a_file_name_key_and_line(tmp_path: Path, text: str, found: str, line: int | None,
                                               accepted: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        find_site(str(path), {})
    error = raised.value
    assert found in error.found
    assert error.where == (str(path) if line is None else f"{path}, line {line}")
    assert accepted in str(error.instead)


def _programs(folder: Path, **bodies: str) -> str:
    for name, body in bodies.items():
        script = folder / name
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(folder)


def _pbs(folder: Path, hosts: tuple[str, ...], **env: str) -> dict[str, str]:
    """Return a PBS job on these nodes, with an mpiexec that only a site file identifies."""
    nodes = folder / "nodes"
    nodes.write_text("".join(f"{host}\n" for host in hosts))
    path = _programs(folder, mpiexec="echo PALS", qstat="exit 1")
    return {"PATH": path, "PBS_JOBID": "5.login", "PBS_NODEFILE": str(nodes), **env}


def _slurm(folder: Path, hosts: str, count: int, cpus: int, **env: str) -> dict[str, str]:
    path = _programs(folder, srun="exit 1", squeue="exit 1")
    return {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": hosts, "SLURM_JOB_NUM_NODES": str(count),
            "SLURM_TASKS_PER_NODE": f"1(x{count})", "SLURM_JOB_CPUS_PER_NODE": f"{cpus}(x{count})", **env}


def _plan(words: str, env: dict[str, str]) -> LaunchPlan:
    return build_plan(parse(f"--dry-run {words}".split()), env)


def _line(plan: LaunchPlan) -> str:
    """Return the launcher's arguments, without its path and the path of the hostfile."""
    words = plan.argv[1:plan.argv.index(sys.executable)]
    return " ".join(words).replace(str(plan.run_dir.path), "RUN")


def test_the_line_of_polaris(tmp_path: Path) -> None:
    hosts = tuple(f"x3006c0s{slot}b1n0.hsn.cm.polaris.alcf.anl.gov" for slot in (13, 19))
    env = _pbs(tmp_path, hosts, PBS_O_HOST="polaris-login-01", NCPUS="64", OMP_NUM_THREADS="64")
    plan = _plan("python3 x.py", env)
    assert _line(plan) == "-n 8 --ppn 4 --hostfile RUN/hostfile --depth=8 --cpu-bind=depth --envall"
    assert plan.files[plan.run_dir.path / "hostfile"] == "".join(f"{host}\n" for host in hosts)
    assert plan.launcher.title == "Cray PALS"
    values = {name: setting.value for name, setting in plan.env.items()}
    assert values["OMP_NUM_THREADS"] == "8"
    assert values["NCCL_NET"] == "AWS Libfabric"
    assert values["EZPZ_LLM_SITE"] == "polaris"
    assert values["NCCL_SOCKET_IFNAME"] == values["GLOO_SOCKET_IFNAME"] == "hsn0"
    # Device 3 is next to cores 0-7; the order makes it index 0 for every rank of the node, and hides no device.
    assert values["CUDA_VISIBLE_DEVICES"] == "3,2,1,0"
    assert [(place.cores, place.device, place.distance) for place in plan.ranks[:4]] == [
        ("0-7", "3", "near"), ("8-15", "2", "near"), ("16-23", "1", "near"), ("24-31", "0", "near")]
    half = _plan("--ppn 2 python3 x.py", env)
    assert half.env["CUDA_VISIBLE_DEVICES"].value == "3,1,2,0"
    assert [place.distance for place in half.ranks[:2]] == ["near", "near"]
    # The user's setting is kept.
    own = _plan("python3 x.py", env | {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_NET": "Socket", "OMP_NUM_THREADS": "3"})
    assert not {"CUDA_VISIBLE_DEVICES", "NCCL_NET", "OMP_NUM_THREADS"} & own.env.keys()
    assert [place.device for place in own.ranks[:2]] == ["0", "1"]
    assert own.ranks_source == "2 devices (CUDA_VISIBLE_DEVICES)"


_AURORA = "list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100"


@pytest.mark.parametrize("site", ["aurora", "sunspot"])
def test_the_line_of_aurora_and_sunspot(tmp_path: Path, site: str) -> None:
    hosts = tuple(f"x4114c1s7b{number}n0.hostmgmt2.cm.{site}.alcf.anl.gov" for number in range(2))
    env = _pbs(tmp_path, hosts, PBS_O_HOST=f"{site}-uan-0010")
    plan = _plan("python3 x.py", env)
    assert _line(plan) == f"-n 24 --ppn 12 --hostfile RUN/hostfile --cpu-bind={_AURORA} --envall"
    assert plan.env["MASTER_ADDR"].value == f"x4114c1s7b0n0.hsn.cm.{site}.alcf.anl.gov"
    assert plan.env["OMP_NUM_THREADS"].value == "8"
    assert plan.env["CCL_PROCESS_LAUNCHER"].value == "pmix"
    assert "ZE_AFFINITY_MASK" not in plan.env
    assert {place.distance for place in plan.ranks} == {"near"}
    six = _plan("--ppn 6 python3 x.py", env)
    assert "--cpu-bind=list:1-17:18-34:35-51:53-69:70-86:87-103" in _line(six)
    assert "--cpu-bind=none" in _line(_plan("--bind none python3 x.py", env))


def test_the_line_of_frontier(tmp_path: Path) -> None:
    env = _slurm(tmp_path, "frontier[00001-00002]", 2, 64, SLURM_CLUSTER_NAME="frontier")
    plan = _plan("python3 x.py", env)
    assert _line(plan).startswith("-N 2 -n 16 --ntasks-per-node 8 ")
    assert " -c 7 --cpu-bind=cores " in _line(plan)
    assert _line(plan).endswith(" --nodelist frontier00001,frontier00002 --gpus-per-task=1 --gpu-bind=closest")
    assert plan.env["NCCL_SOCKET_IFNAME"].value == "hsn0,hsn1,hsn2,hsn3"
    assert plan.env["OMP_NUM_THREADS"].value == "7"
    # srun selects the device, and each rank sees only that one.
    assert {place.device for place in plan.ranks} == {None}
    assert plan.ranks_source == "8 devices (site frontier)"
    # A plain salloc lacks the options that one of the site's variables needs.
    want = "FI_CXI_RDZV_PROTO=alt_read requires a job with --network=disable_rdzv_get"
    assert any(want in note for note in plan.notes)
    for right in ({"SLURM_NETWORK": "disable_rdzv_get"}, {"FI_CXI_RDZV_PROTO": "default"}):
        assert not any(want in note for note in _plan("python3 x.py", env | right).notes)


def test_the_line_of_perlmutter(tmp_path: Path) -> None:
    env = _slurm(tmp_path, "nid[001000-001001]", 2, 128, NERSC_HOST="perlmutter", SLURM_NTASKS="8",
                 SLURM_NTASKS_PER_NODE="4") | {"SLURM_TASKS_PER_NODE": "4(x2)"}
    plan = _plan("python3 x.py", env)
    assert " -n 8 --ntasks-per-node 4 " in _line(plan)
    assert " -c 32 --cpu-bind=cores " in _line(plan)
    assert "gpu" not in _line(plan)
    # 32 hardware threads are 16 cores.
    assert plan.env["OMP_NUM_THREADS"].value == "16"
    assert [place.device for place in plan.ranks[:4]] == ["0", "1", "2", "3"]
    # The user requested fewer cores than the site's nodes have.
    assert " -c 8 " in _line(_plan("python3 x.py", env | {"SLURM_JOB_CPUS_PER_NODE": "32(x2)"}))


_LUMI = """
scheduler = "slurm"
launcher = "srun"
devices_per_host = 8
cores = ["0-15", "16-31", "32-47", "48-63"]
reserved_cores = "0,8,16,24,32,40,48,56"
binding = "list"
device_domains = [3, 3, 1, 1, 0, 0, 2, 2]
"""
_LUMI_CORES = ("49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47")


def _lumi(folder: Path, words: str, env: dict[str, str], **keys: str) -> LaunchPlan:
    path = folder / "lumi.toml"
    lines = [line for line in _LUMI.splitlines() if line.partition(" ")[0] not in keys]
    path.write_text("\n".join([*lines, *(f"{name} = {value}" for name, value in keys.items() if value)]))
    return _plan(f"--site {path} {words} python3 x.py", env)


def _bound(plan: LaunchPlan) -> list[tuple[str | None, str | None, str | None]]:
    return [(place.cores, place.device, place.distance) for place in plan.ranks if place.host == plan.hosts[0]]


_LUMI_BOUND = [(cores, str(device), "near") for device, cores in enumerate(_LUMI_CORES)]


def test_cores_come_from_the_domain_of_each_ranks_device(tmp_path: Path) -> None:
    """LUMI numbers its devices neither in nor against the order of its NUMA domains (LUMI's user guide)."""
    slurm = _slurm(tmp_path, "nid[005000-005001]", 2, 56)
    plan = _lumi(tmp_path, "", slurm)
    masks = ",".join(hex(sum(1 << core for core in expand_numbers(cores))) for cores in _LUMI_CORES)
    assert f" --cpu-bind=mask_cpu:{masks} " in _line(plan)
    assert _bound(plan) == _LUMI_BOUND
    assert not any("not near" in note for note in plan.notes)
    assert "CUDA_VISIBLE_DEVICES" not in plan.env
    # Fewer ranks than devices share the domains of the devices that they use.
    assert _bound(_lumi(tmp_path, "--ppn 4", slurm)) == _LUMI_BOUND[:4]
    assert _bound(_lumi(tmp_path, "--ppn 1", slurm)) == [(
        "1-7,9-15,17-23,25-31,33-39,41-47,49-55,57-63", "0", "near")]
    # With more ranks than devices, ranks are not placed by device.
    assert {place.distance for place in _lumi(tmp_path, "--ppn 9", slurm).ranks[8:9]} == {None}
    # If the site's srun counts cores, it gets their number; otherwise ranks are placed by device.
    depth = _lumi(tmp_path, "", slurm, binding='"depth"')
    assert " -c 7 --cpu-bind=cores " in _line(depth)
    assert any('binding = "list" in the site file to assign them by device_domains' in note for note in depth.notes)
    assert _bound(_lumi(tmp_path, "", slurm, binding="")) == _LUMI_BOUND
    assert " -c 3 --cpu-bind=cores " in _line(_lumi(tmp_path, "", slurm | {"SLURM_JOB_CPUS_PER_NODE": "28(x2)"},
                                                    binding=""))


def test_the_same_under_mpiexec(tmp_path: Path) -> None:
    """Cores are lists, or a depth with devices in the cores' order; with a user's mask, cores are in its order."""
    job = _pbs(tmp_path, ("n1", "n2"))
    changes = {"scheduler": '"pbs"', "launcher": '"mpiexec"', "dialect": '"pals"'}
    plan = _lumi(tmp_path, "", job, **changes)
    assert f" --cpu-bind=list:{':'.join(_LUMI_CORES)} " in _line(plan)
    assert _bound(plan) == _LUMI_BOUND
    depth = _lumi(tmp_path, "", job, **changes, binding='"depth"')
    assert " --depth=7 --cpu-bind=depth " in _line(depth)
    assert depth.env["CUDA_VISIBLE_DEVICES"].value == "4,5,2,3,6,7,0,1"
    assert {distance for _, _, distance in _bound(depth)} == {"near"}
    own = _lumi(tmp_path, "", job | {"CUDA_VISIBLE_DEVICES": "0,4"}, **changes, binding='"depth"')
    assert " --cpu-bind=list:33-39,41-47,49-55,57-63:1-7,9-15,17-23,25-31 " in _line(own)
    assert {distance for _, _, distance in _bound(own)} == {"near"}
    # Half of Aurora's ranks only use devices of the first socket; cores of both sockets are used, with a note.
    half = _plan("--ppn 6 python3 x.py", _pbs(tmp_path, ("a1",), EZPZ_LLM_SITE="aurora"))
    assert ("3 of 6 ranks of a node are not near their device: local rank 3 has cores 53-69, but device 3 is on "
            "another socket") in half.notes


def test_more_ranks_than_the_job_has_cpus(tmp_path: Path) -> None:
    plan = _plan("--ppn 2 python3 x.py", _slurm(tmp_path, "n[1-2]", 2, 1))
    assert " -c 1 --cpu-bind=cores --overcommit " in _line(plan)
    assert "2 ranks share 1 CPU per node" in plan.notes
    enough = _plan("--ppn 2 python3 x.py", _slurm(tmp_path, "n[1-2]", 2, 2))
    assert "--overcommit" not in _line(enough)
    assert not any("share" in note for note in enough.notes)


def test_the_sites_interface_yields_to_the_users(tmp_path: Path) -> None:
    """It is dropped on a node that lacks it, and if the user selects an interface."""
    env = _pbs(tmp_path, ("localhost",), EZPZ_LLM_SITE="polaris")
    plan = _plan("-n 1 python3 x.py", env)
    assert "localhost has no interface hsn0, which site polaris names" in plan.notes
    assert "NCCL_SOCKET_IFNAME" not in plan.env
    own = _plan("--interface ib7 python3 x.py", _pbs(tmp_path, ("n1", "n2"), EZPZ_LLM_SITE="aurora"))
    assert own.env["GLOO_SOCKET_IFNAME"].value == "ib7"
    assert own.env["MASTER_ADDR"].value == "n1.hsn.cm.aurora.alcf.anl.gov"


def test_differences_between_node_and_site_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (tmp_path / f"gpus/0000:0{number}:00.0").mkdir(parents=True)
    monkeypatch.setattr(devices, "_NVIDIA", tmp_path / "gpus")
    plan = _plan("--site polaris python3 x.py", _slurm(tmp_path, "localhost", 1, 2))
    assert "site polaris has pbs, but this is a job of slurm" in plan.notes
    assert any(note.startswith("this node has 3 devices") and note.endswith("polaris have 4")
               for note in plan.notes)
    assert len(plan.ranks) == 3


def test_a_sites_file_is_named_by_its_whole_path_for_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('[env]\nX = "1"\n')
    plan = _plan("--site mine.toml -n 1 python3 x.py", {"PATH": _programs(tmp_path)})
    assert plan.env["EZPZ_LLM_SITE"].value == str(tmp_path / "mine.toml")
    assert plan.env["X"].source == "site mine"
    assert "EZPZ_LLM_SITE" not in _plan("-n 1 python3 x.py", {"PATH": _programs(tmp_path)}).env


def _dry_run_cpu_s(cwd: Path, env: dict[str, str]) -> tuple[float, str]:
    """Return the least CPU seconds of three runs, since other processes slow some of them, and the output."""
    return min(_one_dry_run(cwd, env) for _ in range(3))


def _one_dry_run(cwd: Path, env: dict[str, str]) -> tuple[float, str]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ("--dry-run", "--no-check", "python3", "-m", "ezpz_llm.train")
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.launch", *words], cwd=cwd, env=env,
                          capture_output=True, text=True, timeout=scaled(60), check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def test_a_plan_of_ten_thousand_hosts_takes_less_than_half_a_second(tmp_path: Path) -> None:
    """Plan for Aurora's 10,624 nodes, and for as many under Slurm.

    The limit is on processor time; on a busy machine, it is five times that of a plan for two nodes.
    """
    hosts = tuple(f"x{4000 + number // 64}c{number // 8 % 8}s{number % 8}b0n0" for number in range(10624))
    env = clean_env(**_pbs(tmp_path, hosts, PBS_O_HOST="aurora-uan-0010"))
    spent, text = _dry_run_cpu_s(tmp_path, env)
    assert "127488 on 10624 nodes" in text
    assert "127487" in text
    assert len(text.splitlines()) < 120
    of_two, _ = _dry_run_cpu_s(tmp_path, clean_env(**_pbs(tmp_path, hosts[:2], PBS_O_HOST="aurora-uan-0010")))
    assert spent < max(0.5, 5 * of_two)
    spent, text = _dry_run_cpu_s(tmp_path, clean_env(**_slurm(tmp_path, "frontier[00001-10000]", 10000, 64,
                                                              SLURM_CLUSTER_NAME="frontier")))
    assert "80000 on 10000 nodes" in text
    assert spent < max(0.5, 5 * of_two)
