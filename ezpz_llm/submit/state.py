"""State of a job's run, for job scripts: `python3 -m ezpz_llm.submit.state RUN_DIR`.

Prints one word, by which a requeued job, or the next job of a chain, decides what to do:

new       nothing has run yet
resume    a previous job left a checkpoint to resume from
restart   a previous job ran, but did not write a checkpoint
complete  the command has finished
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.base import UserError, run_command, system_text
from ezpz_llm.rundir import RunDir, read_record

_LONGEST_NAME = 256
_SIGNALS = 128
"""Exit codes above this are 128 + the number of the signal that ended the program."""


def main(argv: Sequence[str]) -> int:
    """Print the state of a run directory."""
    if len(argv) != 1:
        raise UserError("expected one run directory", instead="python3 -m ezpz_llm.submit.state RUN_DIR")
    print(find_state(RunDir(Path(argv[0]))))
    return 0


def find_state(run_dir: RunDir) -> str:
    """Return "new", "resume", "restart" or "complete"."""
    record = read_record(run_dir)
    launched = (record.get("launch") or {}).get("started")
    # A launch from before this submission belongs to another job in the same directory.
    if launched == (record.get("submit") or {}).get("launched_before"):
        return "new"
    code = (record.get("exit") or {}).get("code")
    has_succeeded, was_killed = code == 0, code is None or code > _SIGNALS
    # The trainer also exits with code 0 if it stopped before the last step because of the job's end time.
    steps = (record.get("config") or {}).get("steps", 0)
    newest = run_dir.checkpoints / "latest"
    match = re.fullmatch(r"step-(\d+)\s*", system_text(newest, most=_LONGEST_NAME))
    saved = int(match[1]) if match else 0
    # A run that was killed after its last checkpoint is complete too.
    if (has_succeeded and record.get("steps", 0) >= steps) or (was_killed and 0 < steps <= saved):
        return "complete"
    if newest.exists() or any(run_dir.checkpoints.glob("*step-*/manifest.json")):
        return "resume"
    return "restart" if run_dir.metrics.exists() else "new"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
