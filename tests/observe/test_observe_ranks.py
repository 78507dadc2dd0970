"""Two real ranks: one collective per flush averages the losses, only rank 0 writes, and the slow rank is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from slowness import scaled

from ezpz_llm.core.rundir import RunDir, read_lines

RANK = """
import json, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.observe import MetricsLog, StepTimeline, StepWork, run_environment

me = setup(device="cpu", run_dir=Path(sys.argv[1]))
rank, world, run_dir = me.rank, me.world_size, me.run_dir
collectives = []
for name in ("all_reduce", "all_gather", "reduce", "broadcast", "all_gather_into_tensor"):
    def counted(*args, _original=getattr(dist, name), _name=name, **kwargs):
        collectives.append(_name)
        return _original(*args, **kwargs)
    setattr(dist, name, counted)

log = MetricsLog(run_dir, me, StepWork(1, 1, world, world, 16), total_steps=20, flush_every=10)
timeline = StepTimeline(me.device)
for step in range(1, 21):
    timeline.begin_step()
    with timeline.span("data"):
        time.sleep(0.001 + 0.005 * rank)
    timeline.end_step()
    bad = step == 15 and rank == 1
    log.record(step, torch.tensor(float("nan") if bad else step + 0.1 * rank), torch.tensor(0.5), 1e-3)
    if log.due:
        log.flush(timeline)
log.flush(timeline)
flush_collectives = list(collectives)
straggler = log.straggler()
environment = run_environment(me)
Path(f"{sys.argv[1]}/rank{rank}.json").write_text(json.dumps({
    "collectives": flush_collectives, "straggler": [straggler.rank, straggler.seconds, straggler.median_s],
    "environment": as_plain(environment)}))
me.close()
"""


def test_two_ranks(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "NCCL_API_KEY": "hush"}
    result = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                             "--", str(script), str(run_dir.path)],
                            env=env, capture_output=True, text=True, timeout=scaled(120))
    assert result.returncode == 0, result.stdout + result.stderr

    lines = list(read_lines(run_dir.metrics))
    assert [line["step"] for line in lines] == list(range(1, 21))
    for line in lines:
        if line["step"] == 15:
            assert line["loss"] is None
        else:
            assert abs(line["loss"] - (line["step"] + 0.05)) < 1e-6
        assert line["grad_norm"] == 0.5
        assert abs(line["tokens_per_second"] / line["tokens_per_second_per_device"] - 2) < 1e-9
    assert result.stdout.count("val loss") == 1, "only rank 0 prints the legend"
    assert "not finite from step 15 on" in result.stdout

    ranks = [json.loads((run_dir.path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for rank in ranks:
        assert rank["collectives"] == ["all_reduce"] * 3, "one collective per flush (after steps 1, 10, and 20)"
        slowest, seconds, median = rank["straggler"]
        assert slowest == 1
        assert seconds > 0.006 > median > 0.001
    environment = ranks[0]["environment"]
    assert len(environment["hosts"]) == 1
    assert environment["versions"]["torch"]
    assert environment["versions"]["deepspeed"]
    assert environment["variables"]["OMP_NUM_THREADS"] == "1"
    assert environment["variables"]["NCCL_API_KEY"] == "[redacted]"
    assert environment["device"]["type"] == "cpu"
