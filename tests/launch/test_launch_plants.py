"""Planted failures, each with its expected headline and advice."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch_runs import clean_env, launch, record

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import update_record
from ezpz_llm.launcher.diagnosis.postmortem import postmortem_of
from ezpz_llm.launcher.on_nodes.run_facts import RunFacts

_WATCHDOG = ("[rank0]:[E1122 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation"
             " timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600005 milliseconds before"
             " timing out.\n")
_FRAMES = "".join(f"frame #{number}: c10::raise()\n" for number in range(30))
_CPP = "terminate called after throwing an instance of '{}'\n  what():  {}\n"


def _os_error(number: int, path: str) -> str:
    return f"raise OSError({number}, {os.strerror(number)!r}, {path!r})"


def _aborts(words: str) -> str:
    return f"os.write(2, {words!r}.encode()); ctypes.CDLL(None).abort()"


@dataclass(frozen=True)
class Plant:
    """A rank's program, its kind of failure, and the expected text and advice of the post-mortem."""

    does: str
    kind: str
    shows: str
    advises: str


PLANTS = {
    "c++ bad_alloc": Plant(_aborts(_CPP.format("std::bad_alloc", "std::bad_alloc")), "host_memory",
                           "std::bad_alloc", "fewer ranks per node"),
    "c++ out of device memory": Plant(_aborts(_CPP.format("c10::Error", "CUDA error: out of memory") + _FRAMES),
                                      "device_memory", "CUDA error: out of memory", "a smaller batch per rank"),
    "watchdog": Plant(_aborts(_WATCHDOG + _CPP.format(
        "c10::DistBackendError", f"[PG ID 0] watchdog thread terminated with exception: {_WATCHDOG}") + _FRAMES),
                      "collective_timeout", "Watchdog caught collective operation timeout", "ezpz-llm why"),
    "watchdog alone": Plant(_aborts(_WATCHDOG), "collective_timeout", "Watchdog caught", "ezpz-llm why"),
    "heap": Plant(_aborts("free(): invalid pointer\n"), "signal", "free(): invalid pointer",
                  "two builds of one library"),
    "abort after an error": Plant(_aborts("libscore error: Cannot read Library.dat for GPU arch : gfx1201\n"
                                          " List of available files :\n" + '"gfx908.dat"\n' * 3), "signal",
                                  "libscore error: Cannot read Library.dat for GPU arch : gfx1201  (", ""),
    "abort": Plant(_aborts(""), "signal", "abort() was called  (", ""),
    "segmentation fault": Plant("ctypes.string_at(0)", "signal", "Segmentation fault  (", "ulimit -c unlimited"),
    "bus error": Plant("""
import mmap
with open(f"mapped{rank}", "w+b") as file:
    file.truncate(8192)
    view = mmap.mmap(file.fileno(), 8192)
    file.truncate(0)
    view[5000]
""", "signal", "Bus error  (", "df /dev/shm"),
    "library": Plant("ctypes.CDLL('libcudart.so.99')", "missing_module", "libcudart.so.99: cannot open shared",
                     "load the environment module that provides libcudart.so.99"),
    "module": Plant("import no_such_module", "missing_module", "No module named 'no_such_module'",
                    "ranks {others} did not fail this way"),
    "quota": Plant(_os_error(errno.EDQUOT, "/lus/project/ann/ckpt/rank-0.bin"), "disk_full", "Disk quota exceeded",
                   "free space on the file system of /lus/project/ann/ckpt/rank-0.bin (your quota there)"),
    "device memory error": Plant("raise RuntimeError('CUDA error: uncorrectable ECC error encountered')",
                                 "device_broken", "uncorrectable ECC",
                                 f"report it to the site; leave {os.uname().nodename} out: launch --hosts "),
    "device-side assert": Plant("raise RuntimeError('CUDA error: device-side assert triggered')", "exception",
                                "device-side assert triggered", "CUDA_LAUNCH_BLOCKING=1"),
    "network plug-in": Plant("""raise RuntimeError('''NCCL error in: NCCLUtils.cpp:77, invalid usage, NCCL 2.21.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Error: network AWS Libfabric not found.''')""", "exception", "RuntimeError: Error: network AWS Libfabric not found",
                             "unset NCCL_NET"),
    "open files": Plant(_os_error(errno.EMFILE, "/data/7.bin"), "exception", "Too many open files", "ulimit -n"),
    "threads": Plant("raise RuntimeError(\"can't start new thread\")", "exception", "can't start new thread",
                     "OMP_NUM_THREADS"),
    "stale handle": Plant(_os_error(errno.ESTALE, "/home/ann/data.bin"), "exception", "Stale file handle",
                          "remounted"),
    "data loader": Plant("raise RuntimeError('DataLoader worker (pid 7) is killed by signal: Bus error.')",
                         "exception", "Bus error", "a larger /dev/shm"),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run one launch in which each rank fails differently."""
    folder = tmp_path_factory.mktemp("planted")
    for number, plant in enumerate(PLANTS.values()):
        (folder / f"plant{number}.py").write_text(f"import ctypes, os\nrank = {number}\n{plant.does}\n")
    (folder / "dies.py").write_text("""
import os
rank = int(os.environ["EZPZ_LLM_RANK"])
for step in range(12):
    print(f"step {step:4d} | loss {9 - step * .1:.3f} | {step * 31.7:.1f} tokens/s", flush=True)
__import__(f"plant{rank}")
""")
    launch(folder, "-n", str(len(PLANTS)), "--run-dir", "r", sys.executable, "dies.py", timeout=120)
    return folder


@pytest.mark.parametrize("name", PLANTS)
def test_the_last_output_gives_the_cause(planted: Path, tmp_path: Path, name: str) -> None:
    """Judge each failure alone, as if launch had ended the other ranks."""
    plant, rank = PLANTS[name], list(PLANTS).index(name)
    run_dir = RunDir(tmp_path / "r")
    run_dir.create()
    shutil.copy(planted / f"r/errors/rank{rank:04d}.json", run_dir.errors)
    update_record(run_dir, launch={"typed": ["launch", "train.py"], "env": {}})
    told = postmortem_of(run_dir, RunFacts(len(PLANTS), ("n1",) * len(PLANTS), "mpiexec", 1, 1e12))
    assert (told.kind, told.rank) == (plant.kind, rank), told.text
    assert plant.shows in "\n".join(told.text.splitlines()[:2])
    others = ",".join(part for part in (f"0-{rank - 1}", f"{rank + 1}-{len(PLANTS) - 1}"))
    advised = next((line for line in told.text.splitlines() if line.startswith("  try: ")), "")
    assert plant.advises.format(others=others) in advised, told.text
    assert bool(plant.advises) == bool(advised)
    assert "Fatal Python error: Aborted" not in told.cause
    assert told.text.count("| loss") == 1  # The loss table on one line.


def test_the_rank_missing_in_the_collective_is_the_headline(tmp_path: Path) -> None:
    """Three of four ranks time out in a collective, so the fourth is the cause."""
    (tmp_path / "hangs.py").write_text(f"""
import ctypes, os, time
if os.environ["EZPZ_LLM_RANK"] != "3":
    {PLANTS["watchdog"].does}
print("reading shard 7", flush=True)
time.sleep(60)
""")
    done = launch(tmp_path, "-n", "4", "--run-dir", "r", sys.executable, "hangs.py")
    assert done.returncode == 134
    assert re.search(r"\nlaunch: rank 3 on \S+ did not join a collective in which ranks 0-2 timed out\n"
                     r"  c10::DistBackendError: .*Watchdog caught .*\n  last lines of the log of rank 3:\n"
                     r"  \| reading shard 7\n  3 ranks: timed out waiting for another rank: 0-2\n", done.stderr)


_LEAVES = """
import datetime, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="env://", rank=int(os.environ["EZPZ_LLM_RANK"]), world_size=3)
for step in range(100):
    dist.all_reduce(torch.ones(1))
    if step == 1 and dist.get_rank() == 1:
        print("no more data", flush=True)
        os._exit(0)
    time.sleep(0.2)
"""


def test_a_rank_that_ends_well_while_others_wait(tmp_path: Path) -> None:
    """The others report a lost peer, but the network is not the cause."""
    (tmp_path / "leaves.py").write_text(_LEAVES)
    done = launch(tmp_path, "-n", "3", "--run-dir", "r", sys.executable, "leaves.py", OMP_NUM_THREADS="1")
    assert done.returncode == 1
    assert re.search(r"\nlaunch: rank 1 on \S+ ended with code 0 after \d+\.\d s while ranks 0,2 were still"
                     r" running\n  last lines of the log of rank 1:\n(  \| .*\n)*  \| no more data\n", done.stderr)
    assert "network" not in done.stderr
    assert record(tmp_path / "r")["exit"]["kind"] == "ended_early"


def test_a_note_while_others_still_run(tmp_path: Path) -> None:
    (tmp_path / "soon.py").write_text("""
import sys
from ezpz_llm.launcher.running import run_monitor
from ezpz_llm.launcher.running.command import main
run_monitor._NOTE_AFTER_S, run_monitor._REPORT_POLL_S = 1.0, 0.5
sys.exit(main(sys.argv[1:]))
""")
    (tmp_path / "ends.py").write_text("""
import os, time
while os.environ["EZPZ_LLM_RANK"] != "1" and not os.path.exists("go"):
    time.sleep(0.05)
""")
    words = ("-n", "3", "--run-dir", "r", sys.executable, "ends.py")
    running = subprocess.Popen([sys.executable, "soon.py", *words], cwd=tmp_path, env=clean_env(), text=True,
                               stderr=subprocess.PIPE)
    timer = threading.Timer(60, running.kill)
    timer.start()
    note = "launch: rank 1 ended with code 0 more than 1 s ago; 2 still run (ezpz-llm why"
    try:
        assert any(note in line for line in running.stderr)
        (tmp_path / "go").touch()
        rest = running.stderr.read()
        assert running.wait() == 0
        assert note not in rest
    finally:
        timer.cancel()
        running.kill()
        running.stderr.close()


def test_an_invalid_record_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("""
import os, sys, time
open(os.path.join(os.environ["EZPZ_LLM_RUN_DIR"], "errors/rank0007.json"), "w").write("{")
sys.exit(3 if os.environ["EZPZ_LLM_RANK"] == "0" else 0)
""")
    done = launch(tmp_path, "-n", "2", "--run-dir", "r", sys.executable, "fails.py")
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert record(tmp_path / "r")["exit"]["code"] == 3
