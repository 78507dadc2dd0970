"""A stand-in for OpenPBS: qsub, qstat, qdel and pbsnodes over hosts that ssh reaches, in the captured formats.

There is no server: each job has a small process of its own, started by qsub. What is not in captured/pbs (exit
codes of qstat, options of qsub) is written after the reference guide.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def make(home: Path, nodes: dict[str, int]) -> Path:
    """Lay out an empty PBS over `nodes` (name to CPUs); the folder of its commands, to be put on PATH."""
    for folder in ("jobs", "aux", "bin"):
        (home / folder).mkdir(parents=True)
    (home / "nodes.json").write_text(json.dumps(nodes))
    for name in ("qsub", "qstat", "qdel", "pbsnodes"):
        script = home / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {Path(__file__).parent} {home} {name} "$@"\n')
        script.chmod(0o755)
    return home / "bin"
