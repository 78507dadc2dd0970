"""Progress of a run directory's job: `python3 -m ezpz_llm.submit.state RUN_DIR` in a job's script.

Prints one word. A job may be started again (requeued, or the next of a chain), and has then to know what to do:

new       nothing has run yet
resume    something ran and left a checkpoint to go on from
restart   something ran, but did not come as far as its first checkpoint
complete  the command has done all it was told to do
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.base import UserError, run_command, system_text
from ezpz_llm.rundir import RunDir, read_record

_LONGEST_NAME = 256
_SIGNALS = 128
"""Exit codes above tell which signal ended a program."""


def main(argv: Sequence[str]) -> int:
    """Print the state of the one run directory named."""
    if len(argv) != 1:
        raise UserError("one run directory, please", instead="python3 -m ezpz_llm.submit.state RUN_DIR")
    print(find_state(RunDir(Path(argv[0]))))
    return 0


def find_state(run_dir: RunDir) -> str:
    """One of the four words above."""
    record = read_record(run_dir)
    launched = (record.get("launch") or {}).get("started")
    # A launch before the submission was another job's, in the same directory.
    if launched == (record.get("submit") or {}).get("launched_before"):
        return "new"
    code = (record.get("exit") or {}).get("code")
    ended_well, was_killed = code == 0, code is None or code > _SIGNALS
    # The trainer ends with 0 also where the reservation's end left steps undone.
    wanted = (record.get("config") or {}).get("steps", 0)
    newest = run_dir.checkpoints / "latest"
    named = re.fullmatch(r"step-(\d+)\s*", system_text(newest, most=_LONGEST_NAME))
    saved = int(named[1]) if named else 0
    # Killed after its last checkpoint, a run has nothing left to do either.
    if (ended_well and record.get("steps", 0) >= wanted) or (was_killed and 0 < wanted <= saved):
        return "complete"
    if newest.exists() or any(run_dir.checkpoints.glob("*step-*/manifest.json")):
        return "resume"
    return "restart" if run_dir.metrics.exists() else "new"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
