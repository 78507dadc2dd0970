"""Report of certify: verdict table, certify.json, and the table in benchmarks/results/certified.md (no torch)."""

from __future__ import annotations

import json
import math
import shlex
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, group_by_key
from ezpz_llm.base.records import as_plain
from ezpz_llm.certify import recipe, target_file, verdict
from ezpz_llm.certify.cases import Skipped, Work, load_layout, omitted_cases
from ezpz_llm.certify.local_launches import Definition, read_definition_outcomes, read_reference_error, read_results
from ezpz_llm.layout.resolve import Request, resolve
from ezpz_llm.observe.tables import table
from ezpz_llm.rundir import RunDir, write_atomic
from ezpz_llm.rundir.records import CertifyOutcome, Environment, update_record

Result = dict[str, Any]
_COLUMNS = ("layout", "model", "ranks", "dtype", "loss / bound", "norm / bound", "worst gradient",
            "worst weights", "bound / decrease", "bound / movement", "verdict")
_WIDTH = 180


def all_passed(results: Sequence[Result], skipped: Sequence[Skipped]) -> bool:
    """Return True if every requested case passed, except cases that no machine can run."""
    return bool(results) and all(result["passed"] for result in results) and all(skip.illegal for skip in skipped)


def _verdict_table(results: Sequence[Result], *, rich: bool) -> str:
    """Format the verdict table, with one row per case.

    Differences of gradients and weights are in units of their bounds. Two columns show the sensitivity: the bound
    of the loss relative to its decrease, and the bound of weights relative to their movement (median over
    parameters).
    """
    return table("certify", _COLUMNS, [_row(result) for result in results], rich=rich, width=_WIDTH,
                 marked=[number for number, result in enumerate(results) if not result["passed"]])


def closing_text(results: Sequence[Result], skipped: Sequence[Skipped],
                 refused: dict[str, str] | None = None) -> str:
    """Return the failures, skipped cases and overall verdict as text.

    Args:
        refused: reason why the single-process reference is unusable, from `read_reference_error`.
    """
    lines = [refused["why"], f"    {refused['instead']}"] if refused else []
    for result in results:
        if not result["passed"]:
            lines += [f"{title(result)}:", *(f"    {line}" for line in result["failures"])]
    reasons = group_by_key(((skip.case.layout, skip.reason, skip.illegal), skip.case.world) for skip in skipped)
    for (layout, reason, illegal), worlds in reasons.items():
        ranks = ", ".join(map(str, sorted(set(worlds))))
        lines.append(f"{'skipped' if illegal else 'MISSING'}: {layout} on {ranks} ranks: {reason}")
    symmetric = dict.fromkeys(name for result in results
                              for name in result.get("reference", {}).get("zero_by_symmetry", ()))
    if symmetric:
        lines.append(f"gradient is zero by symmetry, so only the losses were compared: {', '.join(symmetric)}")
    failed = sum(not result["passed"] for result in results)
    missing = sum(not skip.illegal for skip in skipped)
    compared = (f"{len(results) - failed} of {len(results)} case{'s' * (len(results) != 1)} passed: "
                "same results as a single process")
    lines.append(("no layout was compared" if refused and not results else compared)
                 + (f"; {missing} could not run" if missing else ""))
    return "\n".join(lines)


def title(result: Result) -> str:
    """Return the title of a result for a line of output."""
    fault = f" with {name}" if (name := result["fault"]) else ""
    return f"{result['layout']} {result['model']} {result['dtype']} on {result['world']} ranks{fault}"


def basis(steps: int) -> dict[str, Any]:
    """Return the recipe and the constants of the bounds, which all cases of a certificate share."""
    return {
        "recipe": {"steps": steps, "global_batch": recipe.GLOBAL_BATCH, "accumulation": recipe.ACCUMULATION,
                   "pipeline_accumulation": recipe.PIPELINE_ACCUMULATION, "clip": recipe.CLIP,
                   "betas": recipe.BETAS, "eps": recipe.EPS, "weight_decay": recipe.WEIGHT_DECAY,
                   "lr": [recipe.learning_rate(step, steps) for step in range(steps)],
                   "seed": recipe.SEED, "data_seed": recipe.DATA_SEED,
                   "shapes": {name: asdict(recipe.model_config(name)) for name in recipe.MODELS}},
        "bounds": {"rounding": verdict.ROUNDING, "k": verdict.K, "C": verdict.C, "factor": verdict.FACTOR,
                   "least_loss": verdict.MIN_LOSS},
    }


def record(work: Work, results: Sequence[Result], environment: Environment | None, command: str,
           seconds: float, refused: dict[str, str] | None = None,
           checks: Sequence[Definition] = ()) -> dict[str, Any]:
    """Return the content of certify.json. The numbers of each parameter are only in cells.jsonl.

    Args:
        refused: reason why the single-process reference is unusable, from `read_reference_error`.
        checks: outcomes of the definition checks, from `local_launches.read_definition_outcomes`.
    """
    machine = {name: value for name, value in as_plain(environment or Environment()).items()
               if name in ("versions", "platform", "device", "threads")}
    references = {_reference(result, work): result["reference"] for result in results if "reference" in result}
    return {
        "command": command, "date": time.strftime("%Y-%m-%d"), "seconds": round(seconds, 1),
        "passed": refused is None and all_passed(results, work.skipped),
        "refused": refused, "environment": machine,
        **({"definitions": checks} if checks else {}),
        **(basis(work.steps) if work.target is None else target_file.basis(work.target, work.steps)),
        "skipped": [{**vars(skip.case), "reason": skip.reason, "illegal": skip.illegal} for skip in work.skipped],
        "references": references,
        "results": [{key: value for key, value in result.items() if key not in ("by_parameter", "reference")}
                    for result in results],
    }


def _reference(result: Result, work: Work) -> str:
    """Return the name of a result's reference. A target has a separate reference for each world size."""
    ranks = "" if work.target is None else f" for {result['world']} ranks"
    return f"{result['model']} {result['dtype']}{ranks}"


def as_json(certificate: dict[str, Any]) -> str:
    """Format a record as JSON with one line per result, since a matrix has hundreds. NaN and Inf become null."""
    certificate = _finite(certificate)
    head = json.dumps({key: value for key, value in certificate.items() if key != "results"}, indent=2)
    lines = ",\n    ".join(map(json.dumps, certificate["results"]))
    return f'{head[:-2]},\n  "results": [\n    {lines}\n  ]\n}}\n'


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(result: Result) -> tuple[str, ...]:
    worst = result["worst"]
    name = result["layout"] + (f" +{fault}" if (fault := result["fault"]) else "")
    return (name, result["model"], str(result["world"]), result["dtype"],
            *(f"{worst[kind]['value']:.1e} / {worst[kind]['bound']:.1e}" if kind in worst else "-"
              for kind in ("loss", "norm")),
            *(f"{worst[kind]['ratio']:.2f} {_short(worst[kind]['what'])}" if kind in worst else "-"
              for kind in ("gradient", "weight")),
            *(f"{sight[quantity]:.2g}" if (sight := result.get("reference", {}).get("sight")) else "-"
              for quantity in ("loss", "weights")),
            "passed" if result["passed"] else "FAILED")


def _short(label: str) -> str:
    return label.partition(" of ")[2].removeprefix("transformer.")


def conclude(work: Work, options: Namespace, argv: Sequence[str], began: float, run_dir: RunDir,
             environment: Environment | None) -> int:
    """Print and write the outcome, and return the exit code. Call on one rank only."""
    outcome, refused = read_results(run_dir.path), read_reference_error(run_dir.path)
    checks = read_definition_outcomes(run_dir.path)
    command = shlex.join(["ezpz-llm", "certify", *argv])
    certificate = record(work, outcome, environment, command, time.perf_counter() - began, refused, checks)
    for path in (run_dir.path / "certify.json", *([options.json] if options.json else [])):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), as_json(certificate))
    update_record(run_dir, certify=CertifyOutcome(passed=certificate["passed"], command=command))
    if outcome:
        print(_verdict_table(outcome, rich=sys.stdout.isatty()))
    print(closing_text(outcome, work.skipped, refused))
    if checks and refused is None:
        print(f"single-process checks passed: {', '.join(topic['what'] for topic in checks)}")
    if work.target is None:
        print(omitted_cases(work))
    print(f"{certificate['seconds']:.0f} s; all numbers: {run_dir.path / 'certify.json'}", flush=True)
    if options.write_docs and refused is None:
        write_docs(certificate)
    return 0 if certificate["passed"] else 1


BEGIN, END = "<!-- certified: written by certify --write-docs -->", "<!-- certified: end -->"
_PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "certified.md"
_HEADER = ("layout", "supports", "certified", "memory per rank, measured / estimated",
           "collectives per rank and step", "collectives expected from papers")
_EXTRA_WORLD = 8


def write_docs(certificate: dict[str, Any], page: Path = _PAGE) -> None:
    """Replace the table between the markers of a page, or append it with markers.

    Args:
        certificate: content of certify.json, from `report.record`.

    Raises:
        UserError: the page does not exist.
    """
    if not page.is_file():
        raise UserError("--write-docs found no page to update", where=str(page),
                        instead="certify in a checkout of the repository")
    text = page.read_text()
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n## Certified\n\n{BEGIN}\n{END}\n"
    head, _, tail = text.partition(BEGIN)
    write_atomic(page, f"{head}{BEGIN}\n{_certified_table(certificate)}{END}{tail.partition(END)[2]}")


def _certified_table(certificate: dict[str, Any]) -> str:
    """Return the table for the docs as Markdown, after an explanation of its numbers."""
    results = [result for result in certificate["results"] if not result["fault"]]
    layouts = dict.fromkeys(each["layout"] for each in (*results, *certificate["skipped"]))
    versions = certificate["environment"].get("versions", {})
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "deepspeed", "python") if name in versions)
    passed = sum(result["passed"] for result in results)
    about = (
        f"`{certificate['command']}`, {certificate['date']}, {named}: {passed} of {len(results)} cases passed in "
        f"{certificate['seconds'] / 60:.0f} minutes. Memory and collectives are measured with certify's "
        f"{recipe.MODELS[0]} in fp32, on rank 0 of the largest certified world. Memory is the peak of parameters, "
        "gradients and optimizer state (with DeepSpeed's copy of its partition) during a step. After the plus sign "
        "are full parameters that stage 3 has gathered or keeps, buckets, and other buffers. Collectives count the "
        "bytes of full buffers; the last column is what the papers give for the same step. DeepSpeed's buckets and "
        "thresholds are scaled down with the model.")

    rows = [_HEADER, ("---",) * len(_HEADER), *(_docs_row(name, results, certificate) for name in sorted(layouts))]
    lines = [*textwrap.wrap(about, 116, break_long_words=False, break_on_hyphens=False), "",
             *(f"| {' | '.join(row)} |" for row in rows), "", *_sensitivity_table(certificate)]
    return "\n".join(lines)


def _sensitivity_table(record: dict[str, Any]) -> list[str]:
    """Format the sensitivity table: the bounds relative to the decrease of the loss and the movement of weights."""
    sights = {name: reference["sight"] for name, reference in record["references"].items() if "sight" in reference}
    if not sights:
        return []
    rows = [("reference", "loss: bound / decrease", "weights: bound / movement, median", "largest"), ("---",) * 4,
            *((name, *("-" if sight[quantity] is None else f"{sight[quantity]:.2g}"
                       for quantity in ("loss", "weights", "weights_largest")))
              for name, sight in sights.items())]
    return [*(f"| {' | '.join(row)} |" for row in rows), ""]


def _docs_row(name: str, results: list[dict[str, Any]], certificate: dict[str, Any]) -> tuple[str, ...]:
    layout_results = [result for result in results if result["layout"] == name]
    shown = [result for result in layout_results
             if result["dtype"] == "fp32" and result["model"] == recipe.MODELS[0] and result["worst"]]
    best = max(shown, key=lambda result: result["world"], default=None)
    return (f"`{name}`", _supported_axes(name), _certified_cell(name, layout_results, certificate),
            *(("-", "-", "-") if best is None else
              (_memory(best), _collectives(best), _expected_collectives(best["textbook"]))))


def _supported_axes(name: str) -> str:
    """Return the axes (dp, tp, pp, sp) that can have degree 2 in a layout whose ds_config leaves them at 1."""
    layout = load_layout(name)
    axes = ["dp"]
    for axis in ("tp", "pp", "sp"):
        if getattr(layout, axis) > 1:
            continue
        degree: dict[str, Any] = {axis: 2}
        try:
            resolve(Request(name, world_size=_EXTRA_WORLD, global_batch=recipe.GLOBAL_BATCH,
                            accumulation=1 if axis == "sp" else 2, precision="fp32", device="cpu",
                            model=recipe.model_config(recipe.MODELS[0]), **degree))
        except UserError:
            continue
        axes.append(axis)
    return ", ".join(axes)


def _certified_cell(name: str, results: list[dict[str, Any]], certificate: dict[str, Any]) -> str:
    if not results:
        reason = next((skip["reason"] for skip in certificate["skipped"] if skip["layout"] == name), "not run")
        return f"no: {reason}"
    failed = [result for result in results if not result["passed"]]
    if failed:
        return f"**no**: {len(failed)} of {len(results)} failed"
    worlds = ", ".join(str(world) for world in sorted({result["world"] for result in results}))
    dtypes = ", ".join(sorted({result["dtype"] for result in results}, reverse=True))
    return f"{certificate['date']}: {worlds} ranks; {dtypes}"


def _memory(result: dict[str, Any]) -> str:
    measured = result["memory"][0]
    estimated = sum(part["bytes"] for part in result["arithmetic"] if part["where"] != "files")
    extra = measured["gathered"] + measured["other"]
    return f"{sum(measured.values()) - extra:,} / {estimated:,} (+{extra:,}) on {result['world']}"


def _collectives(result: dict[str, Any]) -> str:
    kinds = result["collectives"][0]["kinds"]
    return "; ".join(f"{kind} {entry['count']} x, {entry['bytes']:,} B" for kind, entry in kinds.items()) or "none"


def _expected_collectives(kinds: dict[str, int]) -> str:
    return "; ".join(f"{kind} {size:,} B" for kind, size in kinds.items()) or "none"
