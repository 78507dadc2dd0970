"""What Slurm writes about a job's end into the job's own output, which launch does not see pass."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

from ezpz_llm.launch.schedulers.asking import ask_command
from ezpz_llm.launch.schedulers.slurm import JOB_VARIABLE

_ANSWER_S = 3.0
_TAIL_BYTES = 1 << 16
_SLACK_S = 60.0


def cancellations(env: Mapping[str, str], since: float) -> str:
    """Lines such as `slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T03:04:05 ***` of this batch job
    since the epoch time `since`; empty where there is none or it is no batch job of Slurm's."""
    job = env.get(JOB_VARIABLE)
    if not job:
        return ""
    said = ask_command(("scontrol", "show", "job", job), env, _ANSWER_S, tries=1).text or ""
    path = re.search(r"^\s*StdErr=(\S.*)$", said, re.MULTILINE)
    if path is None:
        return ""
    try:
        with Path(path[1]).open("rb") as file:
            file.seek(max(0, Path(path[1]).stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    found = re.finditer(rf"^.*\*\*\* JOB {re.escape(job)} ON \S+ CANCELLED AT (\S+) .*$", text, re.MULTILINE)
    # A job that was queued again goes on in the same file.
    return "".join(f"{line[0]}\n" for line in found if _epoch(line[1]) > since - _SLACK_S)


def _epoch(stamp: str) -> float:
    try:
        return time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return 0.0
