"""The doctor command, and building DeepSpeed's ops with a real compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ezpz_llm.engine import build_ops, ops
from ezpz_llm.errors import UserError


def run_doctor(*words: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ezpz_llm.doctor", *words], env={**os.environ, **env},
                          capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path))
    return tmp_path


def test_help_is_quick() -> None:
    started = time.monotonic()
    done = run_doctor("--help")
    assert time.monotonic() - started < 1
    assert done.returncode == 0
    assert "--build-ops" in done.stdout


def test_the_table_names_versions_ops_and_stale_locks(cache: Path, tmp_path: Path) -> None:
    lock = tmp_path / "torch ops" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    done = run_doctor(TORCH_EXTENSIONS_DIR=str(lock.parent.parent))
    assert done.returncode == 0, done.stderr
    for word in ("python", "torch", "deepspeed", "launcher", "devices", str(cache),
                 "not built: ezpz-llm doctor --build-ops cpu_adam", f"rm '{lock}'"):
        assert word in done.stdout


def test_an_unknown_op_offers_the_nearest(cache: Path) -> None:
    done = run_doctor("--build-ops", "cpu_adm")
    assert done.returncode == 2
    assert "did you mean cpu_adam" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_compiler_is_named(cache: Path) -> None:
    done = run_doctor("--build-ops", CXX="no-such-compiler")
    assert done.returncode == 1
    assert "no-such-compiler" in done.stderr
    assert list(cache.iterdir()) == []


def test_a_build_that_fails_leaves_nothing_to_wait_for(cache: Path) -> None:
    """The compiler is `false`: the reason is shown, the log kept, no lock left."""
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
            build_ops._clear("cpu_adam")
        assert str(worker.pid) in str(caught.value)
        assert lock.exists()
    finally:
        worker.kill()
        worker.wait()
    build_ops._clear("cpu_adam")
    assert not lock.exists()
    assert f"removing the stale lock {lock}" in capsys.readouterr().out


def test_two_builds_of_one_op_do_not_meet(cache: Path) -> None:
    with build_ops._alone("cpu_adam"):
        done = run_doctor("--build-ops", "cpu_adam")
    assert done.returncode == 1
    assert f"process {os.getpid()}" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_op_is_built_with_progress_and_then_found(cache: Path) -> None:
    done = run_doctor("--build-ops", "cpu_adam", timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "building cpu_adam: 5 s" in done.stdout
    assert ops.is_built("cpu_adam")
    again = run_doctor("--build-ops")
    assert again.stdout.startswith("cpu_adam is built")
    load = "from ezpz_llm.engine.deepspeed_import import *; import_deepspeed('cpu'); load_op('cpu_adam'); " \
           "import torch, deepspeed; deepspeed.ops.adam.DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(3))])"
    subprocess.run([sys.executable, "-c", load], timeout=120, check=True)
