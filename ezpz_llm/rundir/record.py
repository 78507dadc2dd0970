"""`run.json`: what ran, with what, where, and what came out. Secrets are redacted on the way in."""

from __future__ import annotations

import json
import re
from typing import Any

from ezpz_llm.rundir.files import write_json
from ezpz_llm.rundir.layout import RunDir

# Environment names are upper case, where any mention counts; elsewhere only the whole word does, so that
# `tokens_per_second` or `tokenizer` keep their values.
_SECRET = re.compile(
    r"^[A-Z0-9_]*(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)[A-Z0-9_]*$"
    r"|(^|_)(token|key|secret|password|credentials?)(_|$)"
)


def redact(value: Any, name: str = "") -> Any:
    """`value` with the text of every member whose name speaks of a secret replaced by "[redacted]"."""
    if isinstance(value, dict):
        return {key: redact(member, str(key)) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(member, name) for member in value]
    if isinstance(value, str) and _SECRET.search(name):
        return "[redacted]"
    return value


def read_record(run_dir: RunDir) -> dict[str, Any]:
    """The record as it stands; empty where there is none yet."""
    if not run_dir.record.exists():
        return {}
    return json.loads(run_dir.record.read_text())


def update_record(run_dir: RunDir, **members: Any) -> None:
    """Set top-level members of run.json. One writer at a time: `launch` before and after, rank 0 between."""
    write_json(run_dir.record, {**read_record(run_dir), **redact(members)})
