"""One training run from set-up to summary."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ezpz_llm.dist import Heartbeat
from ezpz_llm.dist.setup import setup
from ezpz_llm.launch.phases import MEETING
from ezpz_llm.rundir.side_files import print_whatever_happens
from ezpz_llm.trainer.finish import finish
from ezpz_llm.trainer.loop import train
from ezpz_llm.trainer.options import Options
from ezpz_llm.trainer.session import WallClock
from ezpz_llm.trainer.start import settle_beginning, start


def run(options: Options) -> int:
    """Train as `options` say; returns the exit code. Every rank calls it."""
    print_whatever_happens()
    config = options.config
    clock, heartbeat = WallClock(), Heartbeat(os.environ)
    clock.passed("imports")
    heartbeat.beat(MEETING)
    run_dir = Path(config.run_dir) if config.run_dir is not None else None
    with clock.span("set-up"):
        dist = setup(device=config.device, run_dir=run_dir, name=config.model)
        clock.passed("meeting")
    with dist:
        with clock.span("set-up"):
            begins = settle_beginning(options, dist)
            if begins.complete:
                return 0
            session = start(begins.options, dist, clock, heartbeat)
            clock.passed("the rest")
        code = 1
        try:
            train(session)
            code = finish(session)
        finally:
            session.tracking.close(failed=code != 0)
            for lost in dist.side.close():
                print(f"warning: {lost}", file=sys.stderr, flush=True)
        return code
