"""Mutation testing: plant faults in copies of the code, and check that certify or a unit test detects each of them.

    python3 benchmarks/mutations.py                      # all faults of benchmarks/mutation_table/: one to two
    hours
    python3 benchmarks/mutations.py --resume             # those without a result
    python3 benchmarks/mutations.py --only clip-scales-up,rope-pairs
    python3 benchmarks/mutations.py --class tp,pp

For each fault, copies the checkout, replaces one piece of text, and runs on the copy the check that should detect
the fault: a cell of certify or a test. The fault is detected if the check fails. Each check must first pass on a
copy without a fault. The cell of a layout is compared with a reference from clean code. For faults in shared code,
certify compares a single process with the definition of the step.

Results: benchmarks/results/mutations.json, written after each fault. Exit code 0 if all selected faults were
detected.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mutation_table import EQUIVALENT, FAULTS
from mutation_table.row import Cell, Fault, options

from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"
WORK = ROOT / "runs" / "mutations"
LIMIT_S = 1500
"""Time limit in seconds for each cell or test. Clean ones take a tenth: a timeout is an effect of the fault."""

Verdict = dict[str, Any]
"""Result of a check: `seen` (the fault was detected), `how` (the first line of the failure) and `seconds`."""


@contextmanager
def copied() -> Iterator[Path]:
    """Copy the checkout with its uncommitted changes, without files that git ignores."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK, ignore_cleanup_errors=True) as place:
        folder = Path(place)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        yield folder


def plant(fault: Fault, folder: Path) -> None:
    """Replace the fault's text in a copy.

    Raises:
        SystemExit: the text does not occur exactly once.
    """
    file = folder / fault.file
    text = file.read_text()
    if text.count(fault.right) != 1:
        raise SystemExit(f"{fault.name}: {fault.file} has this {text.count(fault.right)} times:\n{fault.right}")
    file.write_text(text.replace(fault.right, fault.wrong))


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return an environment in which Python imports the copy's code."""
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **more}


def run(words: Sequence[str], folder: Path, env: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """Run a command and return its exit code, None after a timeout, and its output."""
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()  # certify stops its ranks
            time.sleep(15)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return code, output.read()


def certified(cells: Sequence[Cell], folder: Path, references: Path | None) -> Verdict:
    """Run cells that differ only in their layout, in a copy.

    Args:
        references: references from clean code; missing ones are created with the code of this copy.
    """
    run_dir = folder / "run"
    if references is not None and references.is_dir():
        shutil.copytree(references, run_dir / "reference")
    words = [sys.executable, "-m", "ezpz_llm.certify", "--device", "cpu", *shlex.split(options(cells))]
    # A single process does not need launch: it is the only rank.
    is_alone = cells[0].world == 1
    env = environment(folder, **{RUN_DIR_VARIABLE: str(run_dir)} if is_alone else {})
    command = words if is_alone else [*words, "--run-dir", str(run_dir)]
    code, output = run(command, folder, env, LIMIT_S * len(cells))
    if code is None:
        return {"seen": True, "how": f"no end in {LIMIT_S} s"}
    if code == 0:
        return {"seen": False, "how": "certified"}
    path = run_dir / "certify.json"
    record = json.loads(path.read_text()) if path.is_file() else {}
    lines = [record["refused"]["why"]] if record.get("refused") else [
        line for result in record.get("results", ()) for line in result["failures"]]
    if code != 1:
        raise SystemExit(f"{' '.join(words)}\nended with code {code}:\n{output[-4000:]}")
    # A single process that crashes leaves no record: use its last line of output.
    how = (lines or output.strip().splitlines()[-1:])[0][:400]
    # Without paths of the copy, which no longer exists.
    return {"seen": True, "how": re.sub(r"; see /[^)]*", "", how).splitlines()[0]}


def tested(tests: Sequence[str], folder: Path) -> Verdict:
    """Run tests in a copy."""
    words = [sys.executable, "-m", "pytest", "-n0", "-x", "-p", "no:cacheprovider", "-m",
             "full or slow or not full", *tests]
    code, output = run(words, folder, environment(folder), LIMIT_S * len(tests))
    if code is None:
        return {"seen": True, "how": f"no end in {LIMIT_S} s"}
    if code not in (0, 1) or (code == 0 and " passed" not in output):
        raise SystemExit(f"pytest {' '.join(tests)}\nended with code {code}:\n{output[-4000:]}")
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return {"seen": code == 1, "how": failed[0][:400] if failed else "passed"}


def planted(fault: Fault, references: Path) -> Verdict:
    """Plant a fault in a copy, and run the check that should detect it."""
    with copied() as folder:
        plant(fault, folder)
        began = time.monotonic()
        if isinstance(fault.sees, Cell):
            verdict = certified([fault.sees], folder, references if fault.is_of_a_layout else None)
        else:
            verdict = tested([fault.sees], folder)
        return {**verdict, "seconds": round(time.monotonic() - began, 1)}


def control(sees: Sequence[Any], references: Path) -> Verdict:
    """Run checks on a copy without a fault, and keep the references that they create."""
    with copied() as folder:
        began = time.monotonic()
        if isinstance(sees[0], Cell):
            verdict = certified(sees, folder, references)
            shutil.copytree(folder / "run" / "reference", references, dirs_exist_ok=True)
        else:
            verdict = tested(sees, folder)
        return {"passed": not verdict["seen"], "how": verdict["how"],
                "seconds": round(time.monotonic() - began, 1)}


def with_it(sees: Cell | str) -> list[Any]:
    """Return all checks that can run together with a given one: cells of a launch, tests of a file."""
    def group(check: Cell | str) -> tuple[Any, ...]:
        """Return a key that is equal for checks that can run together."""
        if isinstance(check, Cell):
            return check.world, check.model, check.dtype
        return (check.partition("::")[0],)

    return [check for check in dict.fromkeys(fault.sees for fault in FAULTS) if group(check) == group(sees)]


def git(*words: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def score(found: dict[str, Verdict]) -> dict[str, dict[str, int]]:
    """Count the faults that were run, detected, and detected by certify, by class and in total."""
    table: dict[str, dict[str, int]] = {}
    for fault in FAULTS:
        if fault.name in found:
            for row in (fault.kind, "all"):
                entry = table.setdefault(row, {"faults": 0, "seen": 0, "by certify": 0})
                seen, by = (found[fault.name][key] for key in ("seen", "sees"))
                entry["faults"] += 1
                entry["seen"] += seen
                entry["by certify"] += seen and by.startswith("certify")
    return {**{kind: row for kind, row in table.items() if kind != "all"}, **{"all": table["all"]}} if table else {}


def show(table: dict[str, dict[str, int]]) -> None:
    """Print a score."""
    print(f"\n{'class':<20}{'faults':>8}{'seen':>8}{'by certify':>12}")
    for kind, row in table.items():
        print(f"{kind:<20}{row['faults']:>8}{row['seen']:>8}{row['by certify']:>12}")


def chosen(only: str | None, kinds: str | None) -> list[Fault]:
    """Return the faults with these names and classes.

    Raises:
        SystemExit: a name or class is unknown.
    """
    def words(text: str, known: set[str]) -> set[str]:
        """Return the words of a comma-separated list, after checking that they are known."""
        given = set(text.split(","))
        if given - known:
            raise SystemExit(f"unknown: {', '.join(sorted(given - known))}; choose from {', '.join(sorted(known))}")
        return given

    names = words(only, {fault.name for fault in FAULTS}) if only else None
    classes = words(kinds, {fault.kind for fault in FAULTS}) if kinds else None
    return [fault for fault in FAULTS
            if (names is None or fault.name in names) and (classes is None or fault.kind in classes)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME,…", help="run only these faults")
    parser.add_argument("--class", dest="kinds", metavar="NAME,…", help="run only faults of these classes")
    parser.add_argument("--resume", action="store_true", help="skip faults that have a result")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that child processes are cleaned up
    faults = chosen(given.only, given.kinds)
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    known = {fault.name for fault in FAULTS}
    found: dict[str, Verdict] = {name: one for name, one in kept.get("faults", {}).items() if name in known}
    commit, package = git("rev-parse", "--short", "HEAD"), git("rev-parse", "--short", "HEAD:ezpz_llm")
    controls: dict[str, Verdict] = kept.get("controls", {})
    references = WORK / f"reference-{package}"
    todo = [fault for fault in faults if not (given.resume and fault.name in found)]

    def write() -> None:
        """Write the results so far."""
        versions = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "numpy")}
        write_json(RESULTS, {
            "command": "python3 benchmarks/mutations.py", "date": datetime.date.today().isoformat(),
            "commit": commit, "versions": {"python": platform.python_version(), **versions},
            "score": score(found), "equivalent": EQUIVALENT, "controls": controls,
            "faults": {fault.name: found[fault.name] for fault in FAULTS if fault.name in found}})

    def is_controlled(sees: Cell | str) -> bool:
        """Return True if the check has passed on clean code, and its reference still exists."""
        is_kept = not isinstance(sees, Cell) or (references / sees.reference / "reference.json").is_file()
        return is_kept and controls.get(str(sees), {}).get("package") == package

    for fault in todo:
        if not is_controlled(fault.sees):
            group = with_it(fault.sees)
            clean = control(group, references)
            print(f"no fault: {fault.sees}, {len(group)} at once: {clean['how']}, {clean['seconds']} s", flush=True)
            if not clean["passed"]:
                return 1
            controls.update({str(sees): {"passed": True, "package": package} for sees in group})
            write()
        verdict = planted(fault, references)
        found[fault.name] = {"class": fault.kind, "file": fault.file, "sees": str(fault.sees), **verdict,
                             "commit": commit}
        print(f"{fault.name} ({fault.kind}): {'seen' if verdict['seen'] else 'NOT SEEN'}, {verdict['seconds']} s: "
              f"{verdict['how']}", flush=True)
        write()
    show(score({fault.name: found[fault.name] for fault in faults}))
    return 0 if all(found[fault.name]["seen"] for fault in faults) else 1


if __name__ == "__main__":
    sys.exit(main())
