"""Check training on several ranks with devices, and write one JSON file that can be sent to the project.

    python3 tests/gpu/several/suite.py --ranks 8              # two to eight GPUs of this node
    python3 tests/gpu/several/suite.py --ranks 2              # the same on one GPU, which the ranks then share
    python3 tests/gpu/several/suite.py --ranks 2 --device cpu # a test of the suite itself
    python3 tests/gpu/several/suite.py --page                 # list the files in benchmarks/results/machines/

Takes up to 20 minutes. The file is rewritten after each section, so that an interrupted run leaves its results.
Exits with 1 if a section failed. Ranks that share a GPU use NCCL over sockets, or gloo if NCCL refuses (or with
--gloo): their values count, not their speed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from faulty_rank import FAULTS
from sections import SECTIONS, Setting, sharing_works

ROOT = Path(__file__).resolve().parents[3]
MACHINES = ROOT / "benchmarks" / "results" / "machines"
PAGE = ROOT / "benchmarks" / "results" / "machines.md"
_ABOUT_DEVICES = """
import json, torch
kind = next((kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()), "cpu")
module = getattr(torch, kind)
print(json.dumps([kind, 0, 0] if kind == "cpu" else
                 [kind, module.device_count(), module.get_device_properties(0).total_memory / 1e9]))
"""


def main() -> int:
    options = _parse()
    if options.page:
        PAGE.write_text(page([json.loads(path.read_text()) for path in sorted(MACHINES.glob("*.json"))]))
        return 0
    kind, count, memory = _devices()
    device = options.device or kind
    with tempfile.TemporaryDirectory(prefix="several-") as folder:
        setting = Setting(options.ranks, device, Path(folder), shares_device=0 < count < options.ranks
                          and device != "cpu", uses_gloo=options.gloo, plant=options.plant, device_gb=memory)
        deadline = time.monotonic() + 60 * options.minutes
        if setting.shares_device and not setting.uses_gloo:
            setting = replace(setting, uses_gloo=not sharing_works(setting.until(deadline)))
        result: dict[str, Any] = {
            "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}", "commit": _commit(),
            "ranks": options.ranks, "device": device, "devices": count, "gloo": setting.uses_gloo,
            "sections": {}}
        for name, section in SECTIONS.items():
            if options.only and name not in options.only.split(","):
                continue
            result["sections"][name] = _run(name, section, setting, deadline)
            _write(options.out, result)
    passed = all(section["passed"] for section in result["sections"].values())
    print(f"{'passed' if passed else 'failed'}: {options.out}")
    return 0 if passed else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=range(2, 9), metavar="N")
    parser.add_argument("--device", choices=("cuda", "xpu", "cpu"))
    parser.add_argument("--out", type=Path, default=Path("several.json"), metavar="FILE")
    parser.add_argument("--minutes", type=float, default=20.0, metavar="M")
    parser.add_argument("--only", metavar="NAME,…", help=", ".join(SECTIONS))
    parser.add_argument("--plant", metavar="FAULT", help="plant a fault (faulty_rank.py), which must be found")
    parser.add_argument("--gloo", action="store_true", help="use gloo for collectives of device tensors")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if unknown := set((options.only or "").split(",")) - {*SECTIONS, ""}:
        parser.error(f"--only {', '.join(unknown)}: the sections are {', '.join(SECTIONS)}")
    if options.plant not in (None, *FAULTS):
        parser.error(f"--plant {options.plant}: the faults are {', '.join(FAULTS)}")
    return options


def _devices() -> tuple[str, int, float]:
    """Return kind, number, and memory in GB of this node's devices, from a process that then releases them."""
    printed = subprocess.run([sys.executable, "-c", _ABOUT_DEVICES], capture_output=True, text=True, check=True)
    kind, count, memory = json.loads(printed.stdout)
    return kind, count, memory


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                          check=False).stdout.strip()


def _run(name: str, section: Callable[[Setting], dict[str, Any]], setting: Setting,
         deadline: float) -> dict[str, Any]:
    """Run a section; an exception or an exceeded time limit is a failure of the section."""
    print(f"== {name}", flush=True)
    began = time.monotonic()
    if began > deadline:
        return {"passed": False, "found": ["not run: the time was up"], "seconds": 0}
    try:
        result = section(setting.until(deadline))
    except Exception as error:  # the other sections must still run
        result = {"found": [f"{type(error).__name__}: {error}"]}
    result = {"passed": not result["found"], **result, "seconds": round(time.monotonic() - began)}
    for line in result["found"]:
        print(f"   {line}", flush=True)
    return result


def _write(path: Path, result: dict[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, path)


def page(results: list[dict[str, Any]]) -> str:
    """Return a Markdown page with a row for each file."""
    lines = ["# Machines", "",
             "`python3 tests/gpu/several/suite.py --page` writes this page from `machines/*.json`, the results of",
             "the suite for several ranks. MFU is that of the largest model that ran.", "",
             "| date | devices | ranks | passed | failed | MFU |", "| --- | --- | --- | --- | --- | --- |"]
    for result in results:
        sections = result["sections"]
        failed = [f"{name}: {section['found'][0]}" for name, section in sections.items() if not section["passed"]]
        rates = [run["mfu"] for run in sections.get("speed", {}).get("runs", {}).values() if run.get("mfu")]
        lines.append(f"| {result['date']} | {result['devices']} x {result['device']} | {result['ranks']} | "
                     f"{len(sections) - len(failed)} of {len(sections)} | {'; '.join(failed) or '-'} | "
                     f"{f'{rates[-1]:.1%}' if rates else '-'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
