"""Rank that behaves like the trainer's, without torch: heartbeats with phase and step, metrics, one log line.

    heartbeat_ranks.py STEPS SECONDS_A_STEP EXIT_CODE

It ends early once the run directory contains a file "stop".
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, RunDir, append_line
from ezpz_llm.core.rundir.records import update_record
from ezpz_llm.launcher.basics.variables import RANK_VARIABLE, TRAINING
from ezpz_llm.training.dist.heartbeat import Heartbeat

steps, step_s, code = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
rank, run_dir = int(os.environ[RANK_VARIABLE]), RunDir(Path(os.environ[RUN_DIR_VARIABLE]))
heartbeat = Heartbeat(os.environ)
if rank == 0:
    update_record(run_dir, config={"steps": 2 * steps})
    run_dir.metrics.unlink(missing_ok=True)
    print("here are the last words", flush=True)
for step in range(1, steps + 1):
    if (run_dir.path / "stop").exists():
        break
    heartbeat.beat(TRAINING, step)
    time.sleep(step_s)
    if rank == 0:
        append_line(run_dir.metrics, {"step": step, "loss": 5.0 - step / 100, "step_time_s": step_s,
                                      "tokens_per_second": 2048 / step_s})
sys.exit(code)
