"""Programs that the resume tests run on real ranks, built from the trainer's functions.

Each program takes one argument, a JSON object. Rank 0 writes the results to the file in its member `out`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ezpz_llm.core.rundir import read_lines
from ezpz_llm.training.dist import Dist, Heartbeat
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.observe import WallClock
from ezpz_llm.training.trainer.checkpoint_saves import save
from ezpz_llm.training.trainer.loop import train_step
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import resume_from_checkpoint, start
from ezpz_llm.training.trainer.run_data import Position
from ezpz_llm.training.trainer.session import Session
from ezpz_llm.training.trainer.step_end import flush


def take_steps(session: Session, count: int) -> dict[str, Any]:
    """Train `count` steps. Return their losses and the data position after them."""
    for _ in range(count):
        train_step(session, session.step)
        session.step += 1
    flush(session)
    session.data.position = session.data.position.agree(session.dist)
    session.dist.barrier()
    lines = list(read_lines(session.dist.run_dir.metrics))[-count:]
    return {"losses": [line["loss"] for line in lines], "consumed": session.data.position.consumed,
            "sample_hash": session.data.position.sample_hash}


def everywhere(dist: Dist, value: Any) -> list[Any]:
    """Gather the value of every rank."""
    values = [value] * dist.world_size
    if dist.world_size > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def begin(wanted: dict[str, Any], dist: Dist) -> Session:
    return start(parse(wanted["words"]), dist, WallClock(), Heartbeat(os.environ))


def save_and_go_on(argv: Sequence[str]) -> int:
    """Train `steps` steps, save a checkpoint, and train `steps` steps more."""
    wanted = json.loads(argv[0])
    with setup(device="cpu") as dist:
        session = begin(wanted, dist)
        take_steps(session, wanted["steps"])
        save(session, blocking=True)
        results = take_steps(session, wanted["steps"])
        if dist.is_main:
            Path(wanted["out"]).write_text(json.dumps({**results, "folder": str(session.dist.run_dir.path)}))
    return 0


def go_on_from_each(argv: Sequence[str]) -> int:
    """Load each of the `checkpoints` in turn into one engine, and train `steps` steps from it."""
    wanted = json.loads(argv[0])
    results: dict[str, Any] = {}
    with setup(device="cpu") as dist:
        session = begin(wanted, dist)
        for name, where in wanted["checkpoints"].items():
            plan = replace(session.plan, config=replace(session.config, resume=where))
            state = resume_from_checkpoint(plan, session.data.tokens, session.engine, dist)
            session.step = state.step
            session.data.position = Position.at(state.consumed, state.sample_hash)
            states = everywhere(dist, hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest())
            results[name] = {**take_steps(session, wanted["steps"]), "random_states": states}
        if dist.is_main:
            Path(wanted["out"]).write_text(json.dumps(results))
    return 0
