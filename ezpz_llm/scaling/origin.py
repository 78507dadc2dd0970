"""What made a point: its exact command and the environment it ran in, from run.json (standard library only)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.rundir import RunDir, read_record


@dataclass(frozen=True)
class Origin:
    """`commands`: what was typed, and what that started. `environment`: versions, device, hosts, variables."""

    commands: tuple[str, ...]
    environment: dict[str, str]


def origin_of(run_dirs: Sequence[Path]) -> Origin:
    """The origin of a point's runs, as the first one has it, with the hosts of each; parts that records lack are
    left out."""
    records = [read_record(RunDir(run_dir)) for run_dir in run_dirs]
    record = records[0]
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
        "hosts": ", then ".join(dict.fromkeys(filter(None, map(_hosts, records)))) or None,
        **{name: value for name, value in {**(environment.get("variables") or {}),
                                           **(launch.get("env") or {})}.items()},
    }
    return Origin(tuple(commands), {name: str(value) for name, value in found.items() if value is not None})


def _hosts(record: dict[str, Any]) -> str:
    return " ".join((record.get("environment") or {}).get("hosts") or (record.get("launch") or {}).get("hosts")
                    or ())
