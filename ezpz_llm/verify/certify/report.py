"""Report of certify: verdict table, certify.json, and the table in benchmarks/results/certified.md (no torch)."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import structs

from ezpz_llm.core.base import UserError, group_by_key, print_lines
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import RunDir, write_atomic
from ezpz_llm.core.rundir.records import CertifyOutcome, Environment, update_record
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.observe.tables import table
from ezpz_llm.verify.certify import recipe, target_file, verdict
from ezpz_llm.verify.certify.cases import Skipped, Work, load_layout, omitted_cases
from ezpz_llm.verify.certify.local_launches import MIDDLE, read_reference_error, read_results
from ezpz_llm.verify.certify.records import (
    Basis,
    CaseResult,
    CertificateRecord,
    Machine,
    Refused,
    SkippedCase,
)

_COLUMNS = ("layout", "model", "ranks", "dtype", "loss / bound", "norm / bound", "worst gradient",
            "worst weights", "bound / decrease", "bound / movement", "verdict")
_WIDTH = 180


def all_passed(results: Sequence[CaseResult], skipped: Sequence[Skipped]) -> bool:
    """Return True if every requested case passed, except cases that no machine can run."""
    return bool(results) and all(result.passed for result in results) and all(skip.illegal for skip in skipped)


def _verdict_table(results: Sequence[CaseResult], *, rich: bool) -> str:
    """Format the verdict table, with one row per case.

    Differences of gradients and weights are in units of their bounds. Two columns show the sensitivity: the bound
    of the loss relative to its decrease, and the bound of weights relative to their movement (median over
    parameters).
    """
    return table("certify", _COLUMNS, [_row(result) for result in results], rich=rich, width=_WIDTH,
                 marked=[number for number, result in enumerate(results) if not result.passed])


def closing_text(results: Sequence[CaseResult], skipped: Sequence[Skipped],
                 refused: Refused | None = None) -> str:
    """Return the failures, skipped cases and overall verdict as text.

    Args:
        refused: reason why the single-process reference is unusable, from `read_reference_error`.
    """
    lines = [refused.why, f"    {refused.instead}"] if refused else []
    for result in results:
        if not result.passed:
            lines += [f"{result.title}:", *(f"    {line}" for line in result.failures)]
    reasons = group_by_key(((skip.case.layout, skip.reason, skip.illegal), skip.case.world) for skip in skipped)
    for (layout, reason, illegal), worlds in reasons.items():
        ranks = ", ".join(map(str, sorted(set(worlds))))
        lines.append(f"{'skipped' if illegal else 'MISSING'}: {layout} on {ranks} ranks: {reason}")
    symmetric = dict.fromkeys(name for result in results if result.reference is not None
                              for name in result.reference.zero_by_symmetry)
    if symmetric:
        lines.append(f"gradient is zero by symmetry, so only the losses were compared: {', '.join(symmetric)}")
    failed = sum(not result.passed for result in results)
    missing = sum(not skip.illegal for skip in skipped)
    compared = (f"{len(results) - failed} of {len(results)} case{'s' * (len(results) != 1)} passed: "
                "same results as a single process")
    lines.append(("no layout was compared" if refused and not results else compared)
                 + (f"; {missing} could not run" if missing else ""))
    return "\n".join(lines)


def basis(steps: int) -> Basis:
    """Return the recipe and the constants of the bounds, which all cases of a certificate share."""
    return Basis(
        recipe={"steps": steps, "seed_steps": recipe.SEED_STEPS, "accumulation": recipe.ACCUMULATION,
                "pipeline_accumulation": recipe.PIPELINE_ACCUMULATION, "clip": recipe.CLIP,
                "betas": recipe.BETAS, "eps": recipe.EPS, "weight_decay": recipe.WEIGHT_DECAY,
                "lr": [recipe.learning_rate(step, steps) for step in range(steps)],
                "seed": recipe.SEED, "data_seed": recipe.DATA_SEED,
                "shapes": {name: asdict(recipe.shape(name)) for name in recipe.ALL_MODELS}},
        bounds={"rounding": verdict.ROUNDING, "k": verdict.K, "C": verdict.C, "factor": verdict.FACTOR,
                "weight_factor": verdict.WEIGHT_FACTOR,
                "least_loss": verdict.MIN_LOSS})


def record(work: Work, results: Sequence[CaseResult], environment: Environment | None, command: str,
           seconds: float, refused: Refused | None = None) -> CertificateRecord:
    """Return the content of certify.json.

    Args:
        refused: reason why the single-process reference is unusable, from `read_reference_error`.
    """
    machine = environment or Environment()
    shared = basis(work.steps) if work.target is None else target_file.basis(work.target, work.steps)
    return CertificateRecord(
        **structs.asdict(shared), command=command, date=time.strftime("%Y-%m-%d"), seconds=round(seconds, 1),
        passed=refused is None and all_passed(results, work.skipped), refused=refused,
        environment=Machine(machine.versions, machine.platform, machine.device, machine.threads),
        skipped=[SkippedCase(**asdict(skip.case), reason=skip.reason, illegal=skip.illegal)
                 for skip in work.skipped],
        references={_reference(result, work): result.reference for result in results if result.reference},
        results=[structs.replace(result, by_parameter={}, reference=None) for result in results])


def _reference(result: CaseResult, work: Work) -> str:
    """Return the name of a result's reference. A target has a separate reference for each world size."""
    ranks = "" if work.target is None else f" for {result.world} ranks"
    return f"{result.model} {result.dtype}{ranks}"


def as_json(certificate: CertificateRecord) -> str:
    """Format a record as JSON with one line per result, since a matrix has hundreds. NaN and Inf become null."""
    content = _finite(as_plain(certificate))
    lines = ",\n    ".join(map(json.dumps, content.pop("results")))
    return f'{json.dumps(content, indent=2)[:-2]},\n  "results": [\n    {lines}\n  ]\n}}\n'


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(result: CaseResult) -> tuple[str, ...]:
    worst, sight = result.worst, result.reference.sight if result.reference else {}
    name = result.layout + (f" +{result.fault}" if result.fault else "")
    return (name, result.model, str(result.world), result.dtype,
            *(f"{_number(worst[kind].value)} / {_number(worst[kind].bound)}" if kind in worst else "-"
              for kind in ("loss", "norm")),
            *(f"{_number(worst[kind].ratio, '.2f')} {_short(worst[kind].what)}" if kind in worst else "-"
              for kind in ("gradient", "weight")),
            *(_number(sight[quantity], ".2g") if sight else "-" for quantity in ("loss", "weights")),
            "passed" if result.passed else "FAILED")


def _number(value: float | None, form: str = ".1e") -> str:
    return "-" if value is None else format(value, form)


def _short(label: str) -> str:
    return label.partition(" of ")[2].removeprefix("transformer.")


def conclude(work: Work, options: Namespace, argv: Sequence[str], began: float, run_dir: RunDir,
             environment: Environment | None) -> int:
    """Print and write the outcome, and return the exit code. Call on one rank only."""
    outcome, refused = read_results(run_dir.path), read_reference_error(run_dir.path)
    shutil.rmtree(run_dir.path / MIDDLE, ignore_errors=True)
    command = shlex.join(["ezpz-llm", "certify", *argv])
    certificate = record(work, outcome, environment, command, time.perf_counter() - began, refused)
    for path in (run_dir.path / "certify.json", *([options.json] if options.json else [])):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), as_json(certificate))
    update_record(run_dir, certify=CertifyOutcome(passed=certificate.passed, command=command))
    if outcome:
        color = sys.stdout.isatty()
        print_lines(_verdict_table(outcome, rich=color), keeps_colors=color)
    print_lines(closing_text(outcome, work.skipped, refused))
    if work.target is None:
        print_lines(omitted_cases(work))
    print_lines(f"{certificate.seconds:.0f} s; all numbers: {run_dir.path / 'certify.json'}")
    if options.write_docs and refused is None:
        write_docs(certificate)
    return 0 if certificate.passed else 1


BEGIN, END = "<!-- certified: written by certify --write-docs -->", "<!-- certified: end -->"
_PAGE = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "certified.md"
_HEADER = ("layout", "supports", "certified", "memory per rank, measured / estimated",
           "collectives per rank and step", "collectives expected from papers")
_EXTRA_WORLD = 8


def write_docs(certificate: CertificateRecord, page: Path = _PAGE) -> None:
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


def _certified_table(certificate: CertificateRecord) -> str:
    """Return the table for the docs as Markdown, after an explanation of its numbers."""
    results = [result for result in certificate.results if not result.fault]
    layouts = {*(result.layout for result in results), *(skip.layout for skip in certificate.skipped)}
    named = certificate.environment.versions_text()
    passed = sum(result.passed for result in results)
    about = (
        f"`{certificate.command}`, {certificate.date}, {named}: {passed} of {len(results)} cases passed in "
        f"{certificate.seconds / 60:.0f} minutes. Memory and collectives are measured with certify's "
        f"{recipe.LLAMA} in fp32, on rank 0 of the largest certified world. Memory is the peak of parameters, "
        "gradients and optimizer state (with DeepSpeed's copy of its partition) during a step. After the plus sign "
        "are full parameters that stage 3 has gathered or keeps, buckets, and other buffers. Collectives count the "
        "bytes of full buffers; the last column is what the papers give for the same step. DeepSpeed's buckets and "
        "thresholds are scaled down with the model.")

    rows = [_HEADER, ("---",) * len(_HEADER), *(_docs_row(name, results, certificate) for name in sorted(layouts))]
    lines = [*textwrap.wrap(about, 116, break_long_words=False, break_on_hyphens=False), "",
             *(f"| {' | '.join(row)} |" for row in rows), "", *_sensitivity_table(certificate)]
    return "\n".join(lines)


def _sensitivity_table(certificate: CertificateRecord) -> list[str]:
    """Format the sensitivity table: the bounds relative to the decrease of the loss and the movement of weights."""
    sights = {name: reference.sight for name, reference in certificate.references.items() if reference.sight}
    if not sights:
        return []
    rows = [("reference", "loss: bound / decrease", "weights: bound / movement, median", "largest"), ("---",) * 4,
            *((name, *(_number(sight[quantity], ".2g") for quantity in ("loss", "weights", "weights_largest")))
              for name, sight in sights.items())]
    return [*(f"| {' | '.join(row)} |" for row in rows), ""]


def _docs_row(name: str, results: list[CaseResult], certificate: CertificateRecord) -> tuple[str, ...]:
    layout_results = [result for result in results if result.layout == name]
    shown = [result for result in layout_results
             if result.dtype == "fp32" and result.model == recipe.LLAMA and result.worst]
    best = max(shown, key=lambda result: result.world, default=None)
    return (f"`{name}`", _supported_axes(name), _certified_cell(name, layout_results, certificate),
            *(("-", "-", "-") if best is None else
              (_memory(best), _collectives(best), _expected_collectives(best.textbook or {}))))


def _supported_axes(name: str) -> str:
    """Return the axes (dp, tp, pp, sp) that can have degree 2 in a layout whose ds_config leaves them at 1."""
    layout, shape = load_layout(name), recipe.shape(recipe.GPT2)
    axes = ["dp"]
    for axis in ("tp", "pp", "sp"):
        if getattr(layout, axis) > 1:
            continue
        degree: dict[str, Any] = {axis: 2}
        try:
            resolve(Request(name, world_size=_EXTRA_WORLD, global_batch=shape.global_batch,
                            accumulation=1 if axis == "sp" else 2, precision="fp32", device="cpu",
                            model=shape.config, **degree))
        except UserError:
            continue
        axes.append(axis)
    return ", ".join(axes)


def _certified_cell(name: str, results: list[CaseResult], certificate: CertificateRecord) -> str:
    if not results:
        reason = next((skip.reason for skip in certificate.skipped if skip.layout == name), "not run")
        return f"no: {reason}"
    failed = [result for result in results if not result.passed]
    if failed:
        return f"**no**: {len(failed)} of {len(results)} failed"
    worlds = ", ".join(str(world) for world in sorted({result.world for result in results}))
    dtypes = ", ".join(sorted({result.dtype for result in results}, reverse=True))
    return f"{certificate.date}: {worlds} ranks; {dtypes}"


def _memory(result: CaseResult) -> str:
    measured = result.memory[0]
    estimated = sum(part.bytes for part in result.arithmetic if part.where != "files")
    extra = measured["gathered"] + measured["other"]
    return f"{sum(measured.values()) - extra:,} / {estimated:,} (+{extra:,}) on {result.world}"


def _collectives(result: CaseResult) -> str:
    kinds = result.collectives[0].kinds
    return "; ".join(f"{kind} {entry.count} x, {entry.bytes:,} B" for kind, entry in kinds.items()) or "none"


def _expected_collectives(kinds: dict[str, int]) -> str:
    return "; ".join(f"{kind} {size:,} B" for kind, size in kinds.items()) or "none"
