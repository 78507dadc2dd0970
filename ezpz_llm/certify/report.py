"""Verdict table and certify.json of a run of certify (imports no torch)."""

from __future__ import annotations

import io
import json
import math
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ezpz_llm.certify import recipe, verdict
from ezpz_llm.certify.cases import Skipped
from ezpz_llm.certify.lead import results
from ezpz_llm.certify.options import Work
from ezpz_llm.observe.tables import table
from ezpz_llm.rundir import RunDir, update_record, write_atomic

Result = dict[str, Any]
_COLUMNS = ("layout", "model", "ranks", "dtype", "loss / bound", "norm / bound", "gradient, worst",
            "weights, worst", "verdict")
_WIDTH = 150


def all_passed(results: Sequence[Result], skipped: Sequence[Skipped]) -> bool:
    """Return True if every requested case passed; cases that no machine could run do not count."""
    return bool(results) and all(one["passed"] for one in results) and all(one.illegal for one in skipped)


def verdict_table(results: Sequence[Result], *, rich: bool) -> str:
    """One row a case. Gradients and weights in units of their bounds."""
    rows = [_row(one) for one in results]
    if not rich:
        return table("certify", _COLUMNS, rows)
    from rich.console import Console
    from rich.table import Table

    drawn = Table()
    for number, name in enumerate(_COLUMNS):
        drawn.add_column(name, justify="left" if number == 0 else "right")
    for row, one in zip(rows, results, strict=True):
        drawn.add_row(*row, style=None if one["passed"] else "red")
    text = io.StringIO()
    Console(file=text, force_terminal=True, width=_WIDTH).print(drawn)
    return text.getvalue()


def closing(results: Sequence[Result], skipped: Sequence[Skipped]) -> str:
    """Return the failures, the skipped cases and the overall verdict as text."""
    lines = []
    for one in results:
        if not one["passed"]:
            lines += [f"{title(one)}:", *(f"    {line}" for line in one["failures"])]
    reasons: dict[tuple[str, str, bool], list[int]] = {}
    for left in skipped:
        reasons.setdefault((left.case.layout, left.reason, left.illegal), []).append(left.case.world)
    for (layout, reason, illegal), worlds in reasons.items():
        ranks = ", ".join(map(str, sorted(set(worlds))))
        lines.append(f"{'skipped' if illegal else 'MISSING'}: {layout} on {ranks} ranks: {reason}")
    quiet = dict.fromkeys(name for one in results for name in one.get("reference", {}).get("zero_by_symmetry", ()))
    if quiet:
        lines.append(f"without a gradient, by symmetry, and so judged by the losses: {', '.join(quiet)}")
    failed = sum(not one["passed"] for one in results)
    missing = sum(not one.illegal for one in skipped)
    lines.append(f"{len(results) - failed} of {len(results)} are the same maths as one process"
                 + (f"; {missing} could not be run" if missing else ""))
    return "\n".join(lines)


def injected_fault(one: Result) -> str | None:
    """Return the name of the fault injected into a result's layout. Results of older releases call it `plant`."""
    return one["fault"] if "fault" in one else one["plant"]


def title(one: Result) -> str:
    fault = f" with {name}" if (name := injected_fault(one)) else ""
    return f"{one['layout']} {one['model']} {one['dtype']} on {one['world']} ranks{fault}"


def record(work: Work, results: Sequence[Result], environment: dict[str, Any], command: str,
           seconds: float) -> dict[str, Any]:
    """Return the content of certify.json: all but the numbers of each parameter, which cells.jsonl has."""
    machine = {name: value for name, value in environment.items()
               if name in ("versions", "platform", "device", "threads")}
    references = {f"{one['model']} {one['dtype']}": one["reference"] for one in results if "reference" in one}
    return {
        "command": command, "date": time.strftime("%Y-%m-%d"), "seconds": round(seconds, 1),
        "passed": all_passed(results, work.skipped), "environment": machine,
        "recipe": {"steps": work.steps, "global_batch": recipe.GLOBAL_BATCH, "accumulation": recipe.ACCUMULATION,
                   "pipeline_accumulation": recipe.PIPELINE_ACCUMULATION, "clip": recipe.CLIP,
                   "betas": recipe.BETAS, "eps": recipe.EPS, "weight_decay": recipe.WEIGHT_DECAY,
                   "lr": [recipe.learning_rate(step, work.steps) for step in range(work.steps)],
                   "seed": recipe.SEED, "data_seed": recipe.DATA_SEED},
        "bounds": {"rounding": verdict.ROUNDING, "k": verdict.K, "C": verdict.C, "factor": verdict.FACTOR,
                   "least_loss": verdict.LEAST_LOSS},
        "skipped": [{**vars(one.case), "reason": one.reason, "illegal": one.illegal} for one in work.skipped],
        "references": references,
        "results": [{key: value for key, value in one.items() if key not in ("by_parameter", "reference")}
                    for one in results],
    }


def as_json(kept: dict[str, Any]) -> str:
    """A record as text, one line a result: a matrix has hundreds. NaN and Inf become null."""
    kept = _finite(kept)
    head = json.dumps({key: value for key, value in kept.items() if key != "results"}, indent=2)
    lines = ",\n    ".join(map(json.dumps, kept["results"]))
    return f'{head[:-2]},\n  "results": [\n    {lines}\n  ]\n}}\n'


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(one: Result) -> tuple[str, ...]:
    worst = one["worst"]
    name = one["layout"] + (f" +{fault}" if (fault := injected_fault(one)) else "")
    return (name, one["model"], str(one["world"]), one["dtype"],
            *(f"{worst[kind]['value']:.1e} / {worst[kind]['bound']:.1e}" if kind in worst else "-"
              for kind in ("loss", "norm")),
            *(f"{worst[kind]['ratio']:.2f} {_short(worst[kind]['what'])}" if kind in worst else "-"
              for kind in ("gradient", "weight")),
            "the same" if one["passed"] else "NOT the same")


def _short(what: str) -> str:
    return what.partition(" of ")[2].removeprefix("transformer.")


def conclude(work: Work, options: Namespace, argv: Sequence[str], began: float, run_dir: RunDir,
             environment: dict) -> int:
    """Print and write the outcome; the exit code. One process calls it."""
    found = results(run_dir.path)
    command = shlex.join(["ezpz-llm", "certify", *argv])
    kept = record(work, found, environment, command, time.perf_counter() - began)
    for path in (run_dir.path / "certify.json", *([options.json] if options.json else [])):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), as_json(kept))
    update_record(run_dir, certify={"passed": kept["passed"], "command": command})
    print(verdict_table(found, rich=sys.stdout.isatty()))
    print(closing(found, work.skipped))
    print(f"{kept['seconds']:.0f} s; all numbers: {run_dir.path / 'certify.json'}", flush=True)
    if options.write_docs:
        from ezpz_llm.certify.docs import write_docs

        write_docs(kept)
    return 0 if kept["passed"] else 1
