"""Print pip's progress as one line, from its log.

    python progress.py LOG FIRST_LINE
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

_FETCHED = re.compile(r"\s*(?:Downloading|Using cached) (\S+\.(?:whl|zip|tar\.gz)) \(([\d.]+) (kB|MB|GB)\)")
_NOW = (
    (re.compile(r"\s*Collecting ([\w.-]+)"), "resolving {0}"),
    (re.compile(r"\s*Building wheel for ([\w.-]+)"), "building {0}"),
    (re.compile(r"\s*Installing build dependencies"), "installing build dependencies"),
)
_MEGABYTES = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}


def progress(lines: Iterable[str]) -> str:
    """Return pip's current activity and the downloads so far; empty if the log shows neither."""
    activity, files, size = "", 0, 0.0
    for line in lines:
        if match := _FETCHED.match(line):
            name, amount, unit = match.groups()
            files, size = files + 1, size + float(amount) * _MEGABYTES[unit]
            activity = f"downloading {name.rpartition('/')[2].partition('-')[0]} ({amount} {unit})"
        elif line.startswith("Installing collected packages:"):
            activity = f"unpacking {line.count(',') + 1} packages"
        else:
            activity = next((words.format(match[1]) if match.groups() else words for pattern, words in _NOW
                             if (match := pattern.match(line))), activity)
    return f"{activity}; {files} files, {size:.0f} MB so far" if files else activity


if __name__ == "__main__":
    print(progress(Path(sys.argv[1]).read_text(errors="replace").splitlines()[int(sys.argv[2]):]))
