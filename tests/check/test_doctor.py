"""Tests of the doctor command, and of building DeepSpeed's ops with a real compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_runs import cpu_seconds
from slowness import scaled

from ezpz_llm.core.base import count_noun
from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.basics.devices import Devices
from ezpz_llm.training.layout import ops
from ezpz_llm.verify.check.doctor import machine as doctor, software


def run_doctor(*words: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ezpz_llm.doctor", *words], env={**os.environ, **env},
                          capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path))
    return tmp_path


def test_help_is_fast() -> None:
    began = cpu_seconds()
    done = run_doctor("--help")
    assert cpu_seconds() - began < scaled(1)
    assert done.returncode == 0
    assert "--build-ops" in done.stdout


def test_every_check_prints_its_level_and_remedy(cache: Path, tmp_path: Path) -> None:
    lock = tmp_path / "torch ops" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    began = cpu_seconds()
    done = run_doctor(TORCH_EXTENSIONS_DIR=str(lock.parent.parent))
    assert cpu_seconds() - began < scaled(10)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("python", "torch", "deepspeed", "MPI library", "scheduler", "job", "site", "launcher", "devices",
                 "cores", "memory", "/dev/shm", "open files", "locked memory", "temporary", "interfaces",
                 "host name", "compiler", "py-spy", "clock", str(cache), "not built",
                 "ezpz-llm doctor --build-ops cpu_adam", f"rm '{lock}'"):
        assert word in done.stdout
    *lines, last = done.stdout.splitlines()
    levels = [line.split()[0] for line in lines]
    assert set(levels) <= {"ok", "warn", "do:"}
    warnings = levels.count("warn")
    assert last == f"doctor: fit, {count_noun(warnings, 'warning')} ({warnings + levels.count('ok')} checks)"


def test_bad_findings_give_exit_code_1(tmp_path: Path) -> None:
    """Use an unwritable cache, a missing interface, no torch, and Open MPI's mpiexec with MPICH's library."""
    mpiexec = tmp_path / "bin" / "mpiexec"
    mpiexec.parent.mkdir()
    mpiexec.write_text("#!/bin/sh\necho 'mpiexec (Open MPI) 5.0.11'\n")
    mpiexec.chmod(0o755)
    path = f"{mpiexec.parent}{os.pathsep}{os.environ['PATH']}"
    place = "/proc/ezpz"
    (tmp_path / "hide.py").write_text(
        "import importlib.util, runpy, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'torch' else real(name, *more)\n"
        "sys.argv = ['doctor', '--json']\n"
        "runpy.run_module('ezpz_llm.doctor', run_name='__main__')\n")
    done = subprocess.run([sys.executable, tmp_path / "hide.py"], capture_output=True, text=True,
                          timeout=scaled(60), check=False, env={**os.environ, "PATH": path, "EZPZ_LLM_CACHE": place,
                                            "GLOO_SOCKET_IFNAME": "nope0"})
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["fit"] is False
    bad = {check["topic"]: check for check in report["findings"] if check["level"] == "bad"}
    assert bad.keys() == {"torch", "cache", "interface", "MPI library"}
    assert "mpi4py loads MPICH" in bad["MPI library"]["found"]
    assert "Open MPI 5.0.11" in bad["MPI library"]["found"]
    assert "with-env" in bad["torch"]["instead"]
    assert "no interface nope0 (GLOO_SOCKET_IFNAME=nope0)" in bad["interface"]["found"]


def test_build_ops_and_json_are_mutually_exclusive(cache: Path) -> None:
    done = run_doctor("--build-ops", "cpu_adam", "--json")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


CPU_BUILD, CUDA_BUILD = {"version": "2.13.0+cpu"}, {"version": "2.13.0+cu128", "cuda": "12.8"}


@pytest.mark.parametrize(("build", "loaded", "driver", "level", "words"), [
    (CPU_BUILD, {}, None, "ok", "built for CPU"),
    (CPU_BUILD, {"NVIDIA": "550.54"}, (12, 4), "bad", "this machine has NVIDIA driver 550.54"),
    (CUDA_BUILD, {"NVIDIA": "550.54"}, (12, 4), "ok", "CUDA 12.8; NVIDIA driver 550.54"),
    ({"version": "2.13.0", "cuda": "13.0"}, {"NVIDIA": "550.54"}, (12, 4), "bad", "supports CUDA up to 12.4"),
    (CUDA_BUILD, {}, None, "warn", "no driver for it"),
    ({"version": "2.9.0", "hip": "6.4"}, {"AMD": "6.10"}, None, "ok", "ROCm 6.4"),
    ({"version": "2.9.0", "xpu": "2025"}, {"AMD": "6.10"}, None, "bad", "AMD driver 6.10"),
    ({"version": "2.5.1"}, {}, None, "bad", "2.5.1"),
    ({}, {}, None, "bad", "not installed"),
])
def test_torch_and_driver_match(build: dict, loaded: dict, driver: tuple | None, level: str, words: str) -> None:
    check = software.check_torch(build, loaded, driver)
    assert (check.level, words in check.found) == (level, True), check
    assert bool(check.instead) == (level != "ok")


@pytest.mark.parametrize(("library", "dialect", "level"), [
    ("MPICH Version: 5.0.2", "MPICH/Hydra 5.0.2", "ok"), ("MPICH Version: 5.0.2", "Open MPI 5.0.11", "bad"),
    ("Open MPI v5.0.11, package: …", "MPICH/Hydra 5.0.2", "bad"), ("Open MPI v4.1.4", "Open MPI 4.1.4", "ok"),
    ("Intel(R) MPI Library 2021.18", "Intel MPI 2021.18", "ok"),
    ("MPI VERSION : CRAY MPICH version 8.1", "Cray PALS 1.8", "ok"),
    (None, "MPICH/Hydra 5.0.2", "warn"), ("MPICH Version: 5.0.2", None, "ok"),
])
def test_mpi_library_and_mpiexec_must_match(library: str | None, dialect: str | None, level: str) -> None:
    assert software.check_mpi(library, dialect).level == level


@pytest.mark.parametrize(("error", "found"), [
    ("", "2 visible (CUDA_VISIBLE_DEVICES), but torch finds none"),
    ("a\nno driver\n", "2 visible (CUDA_VISIBLE_DEVICES), but torch finds none: no driver"),
])
def test_devices_that_torch_does_not_find(monkeypatch: pytest.MonkeyPatch, error: str, found: str) -> None:
    monkeypatch.setattr(software.subprocess, "run",
                        lambda words, **options: subprocess.CompletedProcess(words, 1, "", error))
    monkeypatch.setattr(software, "visible_devices", lambda env: Devices(("0", "1"), "CUDA_VISIBLE_DEVICES"))
    assert software.check_devices({}, {"version": "2.6"}).found == found


def test_login_nodes_and_jobs_are_reported(tmp_path: Path) -> None:
    for name in ("sbatch", "qsub"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert doctor.schedulers_finding({"PATH": str(tmp_path)}).found == "Slurm (sbatch) and PBS (qsub)"
    assert "not inside a job" in doctor.job_finding("none", None, 1, None).found
    inside = doctor.job_finding("slurm", "7", 2, time.time() + 3615)
    assert inside.found == "inside slurm job 7: 2 nodes, 60 min left"
    broken = list(doctor.job_checks({"PATH": "", "SLURM_JOB_ID": "7"}))
    assert [check.level for check in broken if check.topic == "job"] == ["bad"]
    assert doctor.site_finding({"EZPZ_LLM_SITE": "polari"}).level == "bad"
    assert doctor.site_finding({"EZPZ_LLM_SITE": "polaris"}).found.startswith("polaris (")


def test_cores_limits_and_disks(tmp_path: Path) -> None:
    check = doctor.check_cores([0, 1], [0, 1, 2, 3], {"0": [0, 1], "1": [2, 3]})
    assert (check.level, check.found) == ("ok", "2 of 4 (0-1), in 1 of 2 NUMA domains")
    assert doctor.check_cores([5], list(range(8)), {}).level == "warn"
    assert [check.level for check in doctor.check_limits((1024, 4096), (2**16, 2**16), False)] == ["ok", "ok"]
    assert [check.level for check in doctor.check_limits((1024, 1024), (2**16, 2**16), True)] == ["warn", "warn"]
    assert [check.level for check in doctor.check_limits((2**20, 2**20), (-1, -1), True)] == ["ok", "ok"]
    assert doctor.check_temporary_folder("/var/tmp/pbs." + "x" * 90, "xfs").level == "warn"
    assert doctor.check_temporary_folder(str(tmp_path), "lustre").level == "warn"
    assert doctor.check_free_space("/dev/shm", 2**26, 2**26, 2**28, "more").level == "warn"
    assert doctor.file_system(Path("/proc/self")) == "proc"


def test_hostname_and_clock() -> None:
    assert [doctor.check_hostname("n1", address).level for address in ("10.0.0.1", "127.0.1.1", None)] == [
        "ok", "warn", "warn"]
    assert software.check_clock(1.8e9, True).level == "ok"
    assert software.check_clock(0.0, True).level == "bad"
    assert software.is_clock_synchronized() in (True, False, None)


def test_an_unknown_op_suggests_the_nearest(cache: Path) -> None:
    done = run_doctor("--build-ops", "cpu_adm")
    assert done.returncode == 2
    assert "did you mean cpu_adam" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_compiler_is_reported(cache: Path) -> None:
    done = run_doctor("--build-ops", CXX="no-such-compiler")
    assert done.returncode == 1
    assert "no-such-compiler" in done.stderr
    assert list(cache.iterdir()) == []


def test_missing_libaio_is_reported_before_any_build(cache: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-laio*) echo "error: no libaio.h" >&2; exit 1;; esac\n'
                        'exec c++ "$@"\n')
    compiler.chmod(0o755)
    done = run_doctor("--build-ops", "async_io", CXX=str(compiler))
    assert done.returncode == 1
    assert "error: no libaio.h" in done.stderr
    assert "apt-get install libaio-dev" in done.stderr
    assert not ops.ops_dir().exists()


@pytest.mark.full
def test_a_failed_build_leaves_no_lock(cache: Path) -> None:
    """The error of the compiler `false` is shown and its log kept."""
    done = run_doctor("--build-ops", "cpu_adam", CXX="false", timeout=120)
    assert done.returncode == 1
    assert "compiling cpu_adam failed" in done.stderr
    assert (ops.ops_dir() / "cpu_adam.log").read_text()
    assert not ops.build_lock("cpu_adam").parent.exists()
    assert not ops.is_built("cpu_adam")


def test_a_stale_lock_is_removed_and_a_held_one_is_not(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = ops.build_lock("cpu_adam")
    lock.parent.mkdir(parents=True)
    lock.touch()
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=lock.parent)
    try:
        with pytest.raises(UserError) as caught:
            ops._remove_unfinished("cpu_adam")
        assert str(worker.pid) in str(caught.value)
        assert lock.exists()
    finally:
        worker.kill()
        worker.wait()
    ops._remove_unfinished("cpu_adam")
    assert not lock.exists()
    assert f"removing the stale lock {lock}" in capsys.readouterr().out


def test_two_builds_of_an_op_do_not_run_at_the_same_time(cache: Path) -> None:
    with ops._hold_build_lock("cpu_adam"):
        done = run_doctor("--build-ops", "cpu_adam")
    assert done.returncode == 1
    assert f"process {os.getpid()}" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_op_is_built_with_progress_and_then_used(cache: Path) -> None:
    done = run_doctor("--build-ops", "cpu_adam", timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "building cpu_adam: 5 s" in done.stdout
    assert ops.is_built("cpu_adam")
    again = run_doctor("--build-ops", "cpu_adam")
    assert again.stdout.startswith("cpu_adam is built")
    load = "from ezpz_llm.training.engine.deepspeed_import import *; import_deepspeed('cpu'); " \
           "load_op('cpu_adam'); import torch, deepspeed; " \
           "deepspeed.ops.adam.DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(3))])"
    subprocess.run([sys.executable, "-c", load], timeout=scaled(120), check=True)


@pytest.mark.parametrize(("version", "level"), [(None, "bad"), ("0.17.5", "warn"), ("0.17.6", "ok"),
                                                ("0.19.10+abc", "ok"), ("0.20.0", "warn")])
def test_a_version_outside_the_tested_range_is_reported(monkeypatch, version, level):
    monkeypatch.setattr(software, "installed", lambda name: version)
    check = software.check_package("deepspeed", (0, 17, 6), (0, 20))
    assert check.level == level
    assert level == "ok" or "deepspeed>=0.17.6,<0.20" in check.instead
