"""Say in one line how far pip is, from what it has written to its log.

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
    (re.compile(r"\s*Installing build dependencies"), "installing what a build needs"),
)
_MEGABYTES = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}


def progress(lines: Iterable[str]) -> str:
    """What pip is doing, and what it has fetched so far; empty where its output says nothing of either."""
    doing, files, size = "", 0, 0.0
    for line in lines:
        if found := _FETCHED.match(line):
            name, amount, unit = found.groups()
            files, size = files + 1, size + float(amount) * _MEGABYTES[unit]
            doing = f"downloading {name.rpartition('/')[2].partition('-')[0]} ({amount} {unit})"
        elif line.startswith("Installing collected packages:"):
            doing = f"unpacking {line.count(',') + 1} packages"
        else:
            doing = next((words.format(found[1]) if found.groups() else words for pattern, words in _NOW
                          if (found := pattern.match(line))), doing)
    return f"{doing}; {files} files, {size:.0f} MB so far" if files else doing


if __name__ == "__main__":
    print(progress(Path(sys.argv[1]).read_text(errors="replace").splitlines()[int(sys.argv[2]):]))
