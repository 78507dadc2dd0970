"""A plan that runs from the copies instead of from the environment itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ezpz_llm.launch.plan import LaunchPlan, Setting
from ezpz_llm.launch.staging.receive import mover
from ezpz_llm.launch.staging.roots import Root

_MOVED = ("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME")
_LAUNCHERS = ("mpiexec", "srun")


def relocate(plan: LaunchPlan, roots: Sequence[Root], to: Path, env: Mapping[str, str]) -> LaunchPlan:
    """`plan` with the Python, the programs and the variables of the copy in `to`.

    The launcher itself stays: it runs on this host, which need not be one of those with a copy. So do the user's
    words, but for a first one that names a program of the environment.
    """
    moved = mover({str(root.path): root.name for root in roots}, to)
    programs = os.path.join(sys.prefix, "bin")

    def program(word: str) -> str:
        return moved(word) if os.path.dirname(word) == programs else word

    own, command = plan.argv[:len(plan.argv) - len(plan.command)], plan.argv[len(plan.argv) - len(plan.command):]
    is_launcher = os.path.basename(own[0]) in _LAUNCHERS
    argv = (own[0] if is_launcher else program(own[0]), *map(program, own[1:]), program(command[0]), *command[1:])
    now = {**env, **{name: setting.value for name, setting in plan.env.items()}}
    changed = {name: moved(now[name]) for name in _MOVED if now.get(name)}
    path = now.get("PATH", os.defpath)
    if programs in path.split(os.pathsep):
        # In front, not instead: the launcher looks for its own helpers on the same PATH.
        changed["PATH"] = os.pathsep.join([moved(programs), path])
    settings = {name: Setting(value, "--stage-env") for name, value in changed.items() if value != now.get(name)}
    return replace(plan, argv=argv, env={**plan.env, **settings})
