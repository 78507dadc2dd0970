"""What made a point: its exact command and the environment it ran in, from run.json (standard library only)."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.rundir import RunDir, read_record


@dataclass(frozen=True)
class Origin:
    """`commands`: what was typed, and what that started. `environment`: versions, device, hosts, variables."""

    commands: tuple[str, ...]
    environment: dict[str, str]


def origin_of(run_dir: Path) -> Origin:
    """The origin of a run; parts that its record lacks are left out."""
    record = read_record(RunDir(run_dir))
    launch, environment = record.get("launch") or {}, record.get("environment") or {}
    commands = [shlex.join(words) for words in (launch.get("typed"), launch.get("argv")) if words]
    device = environment.get("device") or {}
    found: dict[str, Any] = {
        **{f"{name}": version for name, version in (environment.get("versions") or {}).items()},
        "platform": environment.get("platform"),
        "device": " ".join(str(device[key]) for key in ("type", "name") if device.get(key)) or None,
        "backend": environment.get("backend"),
        "threads": environment.get("threads"),
        "precision": record.get("precision"),
        "scheduler": launch.get("scheduler"),
        "launcher": " ".join(str(launch[key]) for key in ("launcher", "dialect") if launch.get(key)) or None,
        "hosts": " ".join(environment.get("hosts") or launch.get("hosts") or ()) or None,
        **{name: value for name, value in {**(environment.get("variables") or {}),
                                           **(launch.get("env") or {})}.items()},
    }
    return Origin(tuple(commands), {name: str(value) for name, value in found.items() if value is not None})
