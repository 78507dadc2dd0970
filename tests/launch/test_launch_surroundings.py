"""Restricted environments: no shared memory, file size limits, little memory, read-only checkouts, clock changes.

A run keeps its own exit code, and reports what is wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env, left_over, record
from places import ROOT
from slowness import scaled


def _inside(setting: str, cwd: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `launch WORDS` after the shell command `setting`, in new namespaces."""
    tried = subprocess.run(["unshare", "-m", "sh", "-c", setting], capture_output=True, text=True,
                           timeout=scaled(120), check=False)
    if tried.returncode:
        pytest.skip(f"not to be had here: {tried.stderr.strip()[-200:]}")
    command = f'{setting} && exec "$0" -m ezpz_llm.launch "$@"'
    return subprocess.run(["unshare", "-m", "sh", "-c", command, sys.executable, *words], cwd=cwd,
                          env=clean_env(**env), capture_output=True, text=True, timeout=scaled(200), check=False)


@pytest.mark.parametrize("how", ["ro", "size=4k,nr_inodes=1"], ids=["read-only", "without-room"])
def test_no_shared_memory(tmp_path: Path, how: str) -> None:
    """A read-only /dev/shm is replaced by the temporary folder; a full one gives a note: hangs go undetected."""
    child = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True); sys.exit(3)"
    done = _inside(f"mount -t tmpfs -o {how} none /dev/shm", tmp_path, "-n", "2", "--run-dir", "r", sys.executable,
                   "-c", child, TMPDIR=str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert ("hangs cannot be detected here" in done.stderr) == (how != "ro")
    assert left_over(tmp_path / "r") == {}


def test_files_may_not_grow(tmp_path: Path) -> None:
    """Writes beyond the limit fail in the middle of a file."""
    program = "import sys; print('x' * 300_000, flush=True); print('y', file=sys.stderr); sys.exit(7)"
    done = _inside("ulimit -f 128", tmp_path, "-n", "2", "--run-dir", "r", "--tee", "none", sys.executable, "-c",
                   program)
    assert done.returncode == 7, done.stderr
    assert "continues without its log: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert record(tmp_path / "r")["exit"]["code"] == 7


_QUOTA = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
static size_t written;
ssize_t write(int to, const void *data, size_t size) {
    struct stat found;
    ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    if (fstat(to, &found) == 0 && S_ISREG(found.st_mode) && (written += size) > (size_t) atol(getenv("QUOTA"))) {
        errno = EDQUOT;
        return -1;
    }
    return real(to, data, size);
}
"""
"""Source of an LD_PRELOAD library: after a number of bytes, a process's writes fail with EDQUOT."""


@pytest.fixture
def quota(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "quota.c").write_text(_QUOTA)
    words = ["cc", "-shared", "-fPIC", "-o", tmp_path / "quota.so", tmp_path / "quota.c", "-ldl"]
    if shutil.which("cc") is None or subprocess.run(words, check=False).returncode:
        pytest.skip("no C compiler")
    return {"LD_PRELOAD": str(tmp_path / "quota.so")}


def test_over_quota(tmp_path: Path, quota: dict[str, str]) -> None:
    """A running job continues without the files that cannot be written; a new one does not start."""
    program = "import sys; print('x' * 300_000, flush=True); print('y', file=sys.stderr); sys.exit(7)"
    done = _inside("true", tmp_path, "-n", "2", "--run-dir", "r", "--tee", "none", sys.executable, "-c", program,
                   QUOTA="131072", **quota)
    assert done.returncode == 7, done.stderr
    assert "continues without its log: Disk quota exceeded" in done.stderr
    assert "Traceback" not in done.stderr
    assert record(tmp_path / "r")["exit"]["code"] == 7
    done = _inside("true", tmp_path, "-n", "2", "--run-dir", "s", "true", QUOTA="0", **quota)
    assert done.returncode in (1, 2), done.stderr
    assert "Disk quota exceeded" in done.stderr
    assert "instead:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_gets_no_memory_is_named(tmp_path: Path) -> None:
    program = ("import os, resource; resource.setrlimit(resource.RLIMIT_AS, (400 << 20,) * 2)\n"
               "if os.environ['EZPZ_LLM_RANK'] == '1': x = bytearray(1 << 30)\n"
               "import time; time.sleep(60)")
    done = _inside("true", tmp_path, "-n", "2", "--run-dir", "r", sys.executable, "-c", program)
    assert done.returncode == 1, done.stderr
    assert record(tmp_path / "r")["exit"]["kind"] == "host_memory"
    assert "rank 1 on" in done.stderr
    assert "MemoryError" in done.stderr


def test_a_checkout_that_is_read_only(tmp_path: Path) -> None:
    done = _inside(f"mount --bind {ROOT} {ROOT} && mount -o remount,bind,ro {ROOT}", tmp_path,
                   "-n", "2", "--run-dir", "r", sys.executable, "-c", "import ezpz_llm, pathlib, sys; "
                   "sys.exit(0 if not __import__('os').access(pathlib.Path(ezpz_llm.__file__), 2) else 9)")
    assert done.returncode == 0, done.stderr
    assert left_over(tmp_path / "r") == {}


def test_a_run_in_a_folder_that_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "ro").mkdir()
    done = _inside(f"mount -t tmpfs -o ro none {tmp_path / 'ro'} && cd {tmp_path / 'ro'}", tmp_path, "-n", "1",
                   "true")
    assert done.returncode in (2, 3), done.stderr
    assert "Read-only file system" in done.stderr
    assert "--run-dir" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_clock_that_is_set_during_a_run(tmp_path: Path) -> None:
    """The wall clock jumps by a day between the rank's start and end; the recorded duration does not."""
    for name in ("logs", "errors", "heartbeat", "control"):
        (tmp_path / name).mkdir(mode=0o700)
    jumping = ("import sys, time; real, calls = time.time, []\n"
               "def jumped(): calls.append(1); return real() + (86400 if len(calls) > 1 else 0)\n"
               "time.time = jumped\n"
               "from ezpz_llm.launcher.on_nodes.shim.__main__ import main; sys.exit(main(sys.argv[1:]))")
    env = clean_env(EZPZ_LLM_RUN_DIR=str(tmp_path), EZPZ_LLM_RUN_ID=f"test-clock-{os.getpid()}",
                    EZPZ_LLM_WORLD_SIZE="1", PMI_RANK="0", PMI_SIZE="1", MPI_LOCALRANKID="0", MPI_LOCALNRANKS="1")
    done = subprocess.run([sys.executable, "-c", jumping, "--", "sh", "-c", "sleep 0.3; exit 5"], env=env,
                          capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 5, done.stderr
    assert 0 < json.loads((tmp_path / "errors/rank0000.json").read_text())["duration_s"] < 60


_SET_MEANWHILE = """
import os, time
real = time.time
time.time = lambda: real() + (float(os.environ["SET_BY"]) if os.path.exists(os.environ["SET_WHEN"]) else 0)
"""


@pytest.mark.parametrize("by", ["86400", pytest.param("-86400", marks=pytest.mark.full)])
def test_a_clock_that_is_set_in_launch_agent_and_ranks(tmp_path: Path, by: str) -> None:
    """The run continues, and its end is reported with the true cause."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock/sitecustomize.py").write_text(_SET_MEANWHILE)
    program = ("import os, sys, time; open(os.environ['SET_WHEN'], 'w').close(); time.sleep(2.5)\n"
               "sys.exit(3 * int(os.environ['EZPZ_LLM_RANK']))")
    done = _inside("true", tmp_path, "-n", "2", "--idle-timeout", "60", "--run-dir", "r", sys.executable, "-c",
                   program, PYTHONPATH=f"{tmp_path}/clock:{ROOT}", SET_BY=by,
                   SET_WHEN=f"{tmp_path}/set")
    assert done.returncode == 3, done.stderr
    assert f"rank 1 on {os.uname().nodename} failed: exit code 3" in done.stderr
    for wrong in ("no sign of life", "may be left", "Traceback", "not reported"):
        assert wrong not in done.stderr, done.stderr
    assert left_over(tmp_path / "r") == {}
    ended = record(tmp_path / "r")
    assert abs(ended["exit"]["ended"] - ended["launch"]["started"]) > 80_000, "the clock of launch was set, too"
