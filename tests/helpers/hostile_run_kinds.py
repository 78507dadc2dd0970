"""Kinds of hostile input to a run: log lines, processes, long names, and large numbers."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
from pathlib import Path
from random import Random

import hostile_processes
from hostile_kinds import EXIT, LAUNCH, kind

from ezpz_llm.core.rundir import RunDir

_PREFIXES = [
    "application called MPI_Abort(",
    "MPI_ABORT was invoked on rank 1 ",
    "Root Cause (first observed failure):",
    "ORTE has lost communication with a remote daemon",
    "[proxy:0:0@",
    "[proxy",
    "Process name: [",
    "noticed that process rank 1 with PID 1 on node ",
    "=   PID 1 RUNNING AT x\n=   EXIT CODE: 1\n",
    "terminate called after throwing an instance of '",
    "libc++abi: terminating due to uncaught exception of type ",
    "Traceback (most recent call last):",
    "  + Exception Group Traceback (most recent call last):\n",
    '  File "x", line 1',
    "Fatal Python error: Aborted\n",
    "frame #1",
    "*** JOB ",
    "*** STEP 1 ON ",
    "srun: error: n1: task 1: Exited with exit code 1",
    "job.exception ",
    "flux-shell[1]: FATAL: task 1 (host ",
    "ssh: connect to host ",
    "x@",
    "ValueError: ",
    "[rank1]: ",
    "WARNING ",
    "1",
    " ",
    "\t",
    "a.",
    "\r 10%",
    "'/",
    "\0",
]
"""Prefixes of patterns: on a long line of them, many searches begin and none matches."""
_ENDINGS = ["", "\n", "\r\n", " - process 1\n", "]\n", "'\n", ")\n", ", 1) - process 1\n", "9" * 5000 + "\n"]


def log(rng: Random, most: int = 200_000) -> str:
    """Return a log of one or many lines made of pattern prefixes."""
    words = [rng.choice(_PREFIXES) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    between = rng.choice(["", "", "", "\n", "\r"])
    unit = between.join(words) + between
    return unit * (most // len(unit)) + rng.choice(_ENDINGS)


@kind
def loglines(rng: Random, folder: Path) -> object:
    """Let `why` read the logs of ranks that left no record."""
    import json

    from ezpz_llm.why import main

    run_dir = RunDir(folder / "run").create()
    record = {"launch": LAUNCH, "exit": {**EXIT, "failed_before_stop": None, "launcher_status": 1}}
    run_dir.record.write_text(json.dumps(record))
    for name in rng.sample(["rank0000.log", "rank0001.log", "launcher.log"], 2):
        (run_dir.path / "logs" / name).write_text(log(rng))
    return main([str(run_dir.path), *rng.choice([[], ["--json"]])])


@kind
def process(rng: Random, folder: Path) -> object:
    """Let the cleanup end a process with an arbitrary name and environment."""
    from ezpz_llm.launcher.basics.cleanup import end_marked

    run_id = f"{rng.getrandbits(128):032x}"
    program = os.path.join(os.fsencode(folder), hostile_processes.name(rng))
    os.symlink("/bin/sleep", program)
    env = hostile_processes.environment(rng, {b"EZPZ_LLM_RUN_ID": run_id.encode(), b"EZPZ_LLM_RANK": b"0"})
    words = [hostile_processes.name(rng), b"600"]
    with subprocess.Popen(words, executable=program, env=env) as child:
        try:
            assert end_marked(run_id) == []
            assert child.wait(60) == -signal.SIGKILL
        finally:
            child.kill()
    return child.returncode


@kind
def longnames(rng: Random, folder: Path) -> object:
    """Pass names with thousands of characters and numbers with thousands of digits to every command."""
    from ezpz_llm import checkpoint, watch, why
    from ezpz_llm.core.base import run_command
    from ezpz_llm.training.report import command as report
    from ezpz_llm.training.trainer.options import parse
    from ezpz_llm.training.trainer.plan import plan_run
    from ezpz_llm.verify.explain import command as explain

    length = rng.choice([250, 256, 300, 4095, 4096, 6000])
    name = rng.choice(["x" * length, "a/" * (length // 2), "hf:" + "x" * length, f"/{'x' * length}",
                       "\u00e8" * length])
    number = rng.choice(["9" * length, f"-{'9' * length}", f"1e{'9' * length}", f"0.{'9' * length}"])
    option = rng.choice(["--run-dir", "--init-from", "--corpus", "--tokenizer", "--resume", "--ds-config",
                         "--config"])
    setting = rng.choice(["--lr", "--steps", "--beta1", "--seed", "--weight-decay", "--n-layer"])
    commands = (
        lambda _: why.main([name]),
        lambda _: watch.main([name, "--once"]),
        lambda _: report.main([name]),
        lambda _: explain.main([name]),
        lambda _: checkpoint.main(["inspect", name]),
        lambda _: checkpoint.main(["verify", name]),
        lambda _: plan_run(parse([option, name]), 1) and None,
        lambda _: plan_run(parse([setting, number]), 1) and None,
    )
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = run_command(rng.choice(commands), [])
    assert code in (0, 2), (code, stderr.getvalue())
    return code
