"""What a run in progress adds to its record (imports no torch)."""

from __future__ import annotations

import sys
from typing import Any

from ezpz_llm.rundir import RunDir, update_record


def note(run_dir: RunDir, **members: Any) -> None:
    """Put members into run.json; where it cannot be written (a full disk, say), warn and go on.

    One rank writes it, and the others would wait in their next collective for one that gave up.
    """
    try:
        update_record(run_dir, **members)
    except OSError as error:
        print(f"warning: run.json could not be written: {error.strerror}\n  it will lack {', '.join(members)}",
              file=sys.stderr, flush=True)
