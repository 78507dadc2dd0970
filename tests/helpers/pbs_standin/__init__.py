"""Stand-in for OpenPBS: qsub, qstat, qdel and pbsnodes over nodes reached by ssh, with the captured output formats.

There is no server: qsub starts a small process for each job. Behavior that is not in captured/pbs (exit codes of
qstat, options of qsub) follows the reference guide.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def make(home: Path, nodes: dict[str, int]) -> Path:
    """Create an empty PBS over `nodes` (name to CPUs). Return the folder of its commands, for PATH."""
    for folder in ("jobs", "aux", "bin"):
        (home / folder).mkdir(parents=True)
    (home / "nodes.json").write_text(json.dumps(nodes))
    for name in ("qsub", "qstat", "qdel", "pbsnodes"):
        script = home / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {Path(__file__).parent} {home} {name} "$@"\n')
        script.chmod(0o755)
    return home / "bin"
