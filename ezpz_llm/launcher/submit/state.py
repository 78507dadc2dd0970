"""State of a job's run, for job scripts: `python3 -m ezpz_llm.submit --state RUN_DIR` prints one word.

It tells the script of a requeued job, or of the next job in a chain, what to do:

new       no attempt has started since the submission, or none has written metrics or a checkpoint
resume    an earlier attempt left a checkpoint to resume from
restart   an earlier attempt wrote metrics, but no checkpoint
complete  all training steps are done, or another command succeeded
"""

from __future__ import annotations

import re

from ezpz_llm.core.base import system_text
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import Exit, Launch, Submission, read_record

_MAX_NAME_BYTES = 256
_SIGNAL_OFFSET = 128
"""Exit codes above this are 128 + the number of the signal that ended the program."""


def find_state(run_dir: RunDir) -> str:
    """Return "new", "resume", "restart" or "complete"."""
    record = read_record(run_dir)
    launched = (record.launch or Launch()).started
    # If the recorded launch is older than this submission, it is an earlier job's, and this one has not started.
    if launched == (record.submit or Submission()).launched_before:
        return "new"
    code = (record.exit or Exit()).code
    has_succeeded, was_killed = code == 0, code is None or code > _SIGNAL_OFFSET
    # The trainer also exits with code 0 if it stopped before the last step because of the job's end time.
    steps = record.settings.steps or 0
    newest = run_dir.checkpoints / "latest"
    match = re.fullmatch(r"step-(\d+)\s*", system_text(newest, most=_MAX_NAME_BYTES))
    saved_step = int(match[1]) if match else 0
    # A run that was killed after its last checkpoint is complete too.
    if (has_succeeded and (record.steps or 0) >= steps) or (was_killed and 0 < steps <= saved_step):
        return "complete"
    if newest.exists() or any(run_dir.checkpoints.glob("*step-*/manifest.json")):
        return "resume"
    return "restart" if run_dir.metrics.exists() else "new"
