"""What every rank but the first does."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from ezpz_llm.errors import EXIT_PREFLIGHT, UserError
from ezpz_llm.launch.ranks import RankInfo
from ezpz_llm.preflight.client import Client, reach
from ezpz_llm.preflight.report import report_path
from ezpz_llm.preflight.wire import Place
from ezpz_llm.rundir import RunDir

_GRACE_S = 5.0


def follow(info: RankInfo, env: Mapping[str, str], run_dir: RunDir, meeting: Place, limit_s: float) -> int:
    """Tell rank 0 everything; 0, since the verdict is rank 0's.

    Raises:
        UserError: rank 0 cannot be reached, and gave no verdict about that either: it is rank 0 that is missing.
    """
    began, until = time.time(), time.monotonic() + limit_s + _GRACE_S
    path = report_path(run_dir)

    def is_over() -> bool:
        # A report of an earlier preflight in the same directory says nothing about this one.
        is_judged = path.exists() and path.stat().st_mtime > began - _GRACE_S
        return is_judged or time.monotonic() > until

    connection = reach(meeting, info, run_dir.path, is_over)
    if connection is not None:
        Client(connection, info, env).converse()
        return 0
    if time.monotonic() < until:
        return 0
    raise UserError(f"rank {info.rank} on {socket.gethostname()} waited {limit_s:.0f} s for rank 0 at MASTER_ADDR "
                    f"{meeting.address}:{meeting.port}, which never gave a report",
                    where="rank 0's host, or the way to it",
                    instead="see logs/rank0000.log in the run directory", exit_code=EXIT_PREFLIGHT)
