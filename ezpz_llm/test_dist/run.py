"""The run: reductions, training, judgement, report. Every rank runs it in lockstep."""

from __future__ import annotations

import argparse
import os
import socket
import time
from dataclasses import asdict

from ezpz_llm.base.errors import UserError
from ezpz_llm.dist import Dist, Heartbeat
from ezpz_llm.dist.agree import raise_together
from ezpz_llm.dist.setup import setup
from ezpz_llm.engine.base import Engine
from ezpz_llm.engine.build import build_engine
from ezpz_llm.launch.variables import ENDING, RENDEZVOUS, STARTING
from ezpz_llm.layout.resolve import Resolved
from ezpz_llm.observe import HostProfile, profile_window, run_environment
from ezpz_llm.rundir import update_record
from ezpz_llm.test_dist.options import refuse_used
from ezpz_llm.test_dist.reductions import measure_reductions
from ezpz_llm.test_dist.report import closing, description, reductions, spreads
from ezpz_llm.test_dist.task import Mlp
from ezpz_llm.test_dist.training import held_out_loss, judge, train

TIMEOUT_S = 600.0
LR = 1e-3


def run(options: argparse.Namespace, resolved: Resolved, import_seconds: dict[str, float], began: float) -> int:
    """Test and train; the exit code is 0 if nothing was wrong on any rank, else 1.

    Args:
        import_seconds: what was imported so far; DeepSpeed's is added.
        began: when the command began, by `time.perf_counter`.
    """
    heartbeat = Heartbeat(os.environ)
    heartbeat.beat(RENDEZVOUS)
    with setup(device=options.device, run_dir=options.run_dir, name="test_dist", timeout_s=TIMEOUT_S) as dist:
        print(f"[{dist.device}][rank={dist.rank}/{dist.world_size - 1}][{dist.info.local_rank}]"
              f"[{socket.gethostname()}]", flush=True)
        heartbeat.beat(STARTING)
        _refuse_used(dist)
        engine = _engine(resolved, dist, options.seed, import_seconds)
        environment = run_environment(dist)
        if dist.is_main:
            resolved.write(dist.run_dir, dist.side)
            update_record(dist.run_dir, environment=environment, import_seconds=import_seconds,
                          config={"ds_config": options.ds_config, "steps": options.steps, "seed": options.seed,
                                  "batch": asdict(resolved.batch), "device": options.device})
            print(description(dist, resolved, environment, import_seconds), flush=True)
        measured = measure_reductions(dist)
        if dist.is_main:
            print(reductions(measured), flush=True)
        profile = HostProfile(dist.run_dir, profile_window(0, options.steps)) if dist.is_main else None
        before = held_out_loss(engine, dist, options.seed)
        lines = train(engine, dist, heartbeat, options.seed, options.steps, resolved.adam.get("lr", LR), profile)
        heartbeat.beat(ENDING, options.steps)
        after = held_out_loss(engine, dist, options.seed)
        reasons = judge(dist, lines, before, after,
                        list(dict.fromkeys(one.kind for one in measured if dist.rank in one.wrong_ranks)))
        if dist.is_main:
            update_record(dist.run_dir, test_dist={
                "healthy": not reasons, "reasons": reasons,
                "held_out_loss": {"before": before, "after": after},
                "reductions": [asdict(one) for one in measured], "spread": spreads(lines)})
            print(closing(dist.run_dir, lines, (before, after), profile and profile.path, reasons), flush=True)
        print(f"[{dist.rank}] runtime={time.perf_counter() - began:.2f}s", flush=True)
    return 1 if reasons else 0


def _refuse_used(dist: Dist) -> None:
    error = None
    if dist.is_main:
        try:
            refuse_used(dist.run_dir.path)
        except UserError as found:
            error = found
    raise_together(dist, error)


def _engine(resolved: Resolved, dist: Dist, seed: int, import_seconds: dict[str, float]) -> Engine:
    if resolved.layout.engine == "deepspeed":
        from ezpz_llm.engine.deepspeed_import import import_deepspeed

        start = time.perf_counter()
        import_deepspeed(dist.device.type)
        import_seconds["deepspeed"] = time.perf_counter() - start
    model, adam = Mlp(seed), resolved.adam
    return build_engine(model, resolved, dist, lr=adam.get("lr", LR), eps=adam.get("eps", 1e-8),
                        betas=(adam.get("beta1", 0.9), adam.get("beta2", 0.999)),
                        param_groups=[{"params": list(model.parameters()),
                                       "weight_decay": adam.get("weight_decay", 0.0)}])


