"""Run a rank of a program: python3 -m peers.worker TASK.json writes rankN.json into the task's scratch folder."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from peers.programs import PROGRAMS
from peers.task import Clock, Task


def main() -> int:
    import torch

    task = Task.read(Path(sys.argv[1]))
    clock = Clock(task.steps)
    result = importlib.import_module(f"peers.{PROGRAMS[task.program].module}").run(task, clock)
    rank = int(os.environ.get("RANK", os.environ.get("PMI_RANK", "0")))
    result = {**clock.found(), "threads": torch.get_num_threads(), **result}
    (Path(task.scratch) / f"rank{rank}.json").write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
