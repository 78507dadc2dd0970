#!/usr/bin/env python3
"""Read pytest's JUnit files and a run's record for .ci/run and .ci/full. Standard library only.

results.py failed FILE        print the failed tests, one per line, as pytest takes them
results.py skipped FILE       print the skipped tests and files
results.py count FILE…        print "N passed, N failed, N skipped", with the last result of each test
results.py training RUN_DIR   check that a run succeeded and learned; print its step time and precision
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

MAX_LOSS_RATIO = 0.75
"""Bound on validation loss / unigram entropy for the README's first command."""


def results(junit_file: Path) -> dict[str, str]:
    """Return each test's result, "passed", "failed" or "skipped", by its pytest id."""
    by_test: dict[str, str] = {}
    if not junit_file.is_file():
        return by_test
    for case in ElementTree.parse(junit_file).iter("testcase"):
        module, name = case.get("classname", ""), case.get("name", "")
        # A file that fails or skips at collection has no class name, and its dotted path as its name.
        test_id = f"{module.replace('.', '/')}.py::{name}" if module else f"{name.replace('.', '/')}.py"
        if case.find("failure") is not None or case.find("error") is not None:
            by_test[test_id] = "failed"
        elif by_test.get(test_id) != "failed":
            by_test[test_id] = "skipped" if case.find("skipped") is not None else "passed"
    return by_test


def check_training(run_dir: Path) -> int:
    """Print a training run's step time, precision and loss; return 1 if it failed or did not learn."""
    record = json.loads((run_dir / "run.json").read_text())
    code, loss, entropy = record["exit"]["code"], record["val_loss"], record["unigram_entropy"]
    step_ms = 1000 * record["summary"]["step_time"]["median"]
    precision = record["precision"]
    print(f"{step_ms:.0f} ms per step in {precision}; exit code {code}; "
          f"validation loss {loss:.4f} = {loss / entropy:.3f} x unigram entropy (limit {MAX_LOSS_RATIO})")
    return 0 if code == 0 and loss <= MAX_LOSS_RATIO * entropy else 1


def main(command: str, *paths: str) -> int:
    """Run one of the commands in the module's docstring."""
    if command == "training":
        return check_training(Path(paths[0]))
    merged: dict[str, str] = {}
    for path in paths:
        merged |= results(Path(path))
    if command == "count":
        count = Counter(merged.values())
        print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    else:
        print(*(test_id for test_id, result in merged.items() if result == command), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
