"""Output formats of PBS's commands, byte for byte as captured."""

from __future__ import annotations

import json
import re


def as_json(value: object, depth: int = 0) -> str:
    """Format a value as PBS prints JSON: tabs, and a line for every key; numeric strings are already numbers."""
    if isinstance(value, dict):
        tabs = "\t" * (depth + 1)
        lines = ",\n".join(f'{tabs}"{name}":\t{as_json(inner, depth + 1)}' for name, inner in value.items())
        return "{\n" + (f"{lines}\n" if value else "") + "\t" * depth + "}"
    return json.dumps(value, ensure_ascii=False)


def as_text(job_id: str, fields: dict) -> str:
    """Format a job as `qstat -f` does."""
    lines = [f"Job Id: {job_id}"]
    for name, value in fields.items():
        if name == "Variable_List":
            value = ",".join(f"{variable}={text}" for variable, text in value.items())
        parts = value.items() if isinstance(value, dict) else [("", value)]
        lines += [_wrapped(f"    {name}{'.' if inner else ''}{inner} = ", str(text)) for inner, text in parts]
    return "\n".join(lines) + "\n\n"


def _wrapped(line: str, value: str) -> str:
    # qstat wraps at 79 columns: before a list item that does not fit, and inside an item longer than a line.
    done: list[str] = []
    items = value.split(",")
    for number, item in enumerate(items):
        item += "," if number + 1 < len(items) else ""
        if number and len(line) + 8 * bool(done) + len(item) >= 79:
            done.append(line)
            line = ""
        for letter in item:
            if len(line) + 8 * bool(done) >= 79:
                done.append(line)
                line = ""
            line += letter
    return "\n\t".join([*done, line])


def table(rows: list[tuple[str, str, str, str, str, str]]) -> str:
    """Format jobs as plain `qstat` does: id (truncated to its column), name, user, time used, state, queue."""
    head = ("Job id            Name             User              Time Use S Queue\n"
            "----------------  ---------------- ----------------  -------- - -----\n")
    return head + "".join(f"{job:<16.16}  {name:<16.16} {user:<16.16}  {used:>8} {state} {queue:<16}\n"
                          for job, name, user, used, state, queue in rows)


def clock(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def seconds_of(text: str) -> int:
    total = 0
    for part in text.split(":"):
        total = total * 60 + int(part)
    return total


def number_or_text(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?(0|[1-9][0-9]*)", text) else text
