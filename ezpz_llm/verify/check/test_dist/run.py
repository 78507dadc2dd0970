"""Health check on every rank: test all-reduces, train a small MLP, evaluate and report."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.core.base import count_noun, print_lines
from ezpz_llm.core.rundir import RunDir, append_line, write_atomic
from ezpz_llm.core.rundir.records import Environment, Finding, SmokeTest, update_record
from ezpz_llm.launcher.basics.variables import ENDING, RENDEZVOUS, STARTING, TRAINING
from ezpz_llm.training.dist import Dist, Heartbeat
from ezpz_llm.training.dist.agreement import all_gather, all_reduce, run_together
from ezpz_llm.training.dist.collective_values import KINDS, wrong_kinds
from ezpz_llm.training.dist.seeds import seed_for
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.build import build_engine
from ezpz_llm.training.layout.batch import Batch
from ezpz_llm.training.layout.resolve import Resolved
from ezpz_llm.training.observe import (
    PythonProfile,
    StepTimeline,
    profile_window,
    run_environment,
    series_plot,
    wants_color,
)
from ezpz_llm.training.observe.history import spread
from ezpz_llm.training.observe.tables import table
from ezpz_llm.training.observe.terminal import terminal_width
from ezpz_llm.verify.check.findings import findings_text, is_fit, verdict
from ezpz_llm.verify.check.test_dist.options import reject_used_directory
from ezpz_llm.verify.check.test_dist.reductions import ACROSS, SAME, Reduction, measure_reductions

_LEGEND = """
loss: mean squared error over all ranks' samples; sps: samples per second over all ranks;
dt: milliseconds of the iteration on rank 0, of which dtf: forward, dtb: backward"""


@dataclass(frozen=True)
class Metric:
    """Printed metric: a field of metrics.jsonl in another unit."""

    name: str
    key: str
    unit: str = ""
    scale: float = 1.0

    def values(self, lines: list[dict[str, Any]]) -> list[float | None]:
        """Return the value in each line, in the metric's unit; None for a non-finite loss."""
        return [None if line[self.key] is None else line[self.key] * self.scale for line in lines]


_METRICS = (Metric("loss", "loss"), Metric("sps", "samples_per_second"), Metric("dt", "step_time_s", "ms", 1e3),
            Metric("dtf", "forward_s", "ms", 1e3), Metric("dtb", "backward_s", "ms", 1e3))


def description(dist: Dist, resolved: Resolved, environment: Environment,
                import_seconds: dict[str, float]) -> str:
    """Return the description of the run that is printed at the start."""
    batch, versions, hosts = resolved.batch, environment.versions, environment.hosts
    names = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    rows = [
        ("ranks", f"{dist.world_size} on {len(hosts)} node{'s' * (len(hosts) > 1)} ({names}), "
                  f"from {dist.info.source}"),
        ("device", f"{dist.device.type}: {environment.device.name}, "
                   f"{environment.threads} threads per rank"),
        ("backend", dist.backend or "none (one rank)"),
        ("layout", f"{resolved.layout.name}, {resolved.precision}"),
        ("batch", f"{count_noun(batch.global_batch, 'sample')} ({batch.micro_batch} per rank x "
                  f"{count_noun(batch.accumulation, 'micro-step')} x {count_noun(batch.dp_size, 'rank')})"),
        ("model", f"MLP {'-'.join(map(str, _WIDTHS))}"),
        ("versions", ", ".join(f"{name} {versions[name]}"
                               for name in ("python", "torch", "deepspeed", "mpi4py", "ezpz_llm"))),
        ("imports", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in import_seconds.items())),
        ("run dir", str(dist.run_dir.path)),
        *(("note", note) for note in (*resolved.notes, *dist.info.notes)),
    ]
    return "\n" + "\n".join(f"{name:<10}{text}" for name, text in rows) + "\n"


def _reductions_table(results: list[Reduction]) -> str:
    """Return the table of all-reduces, one row per kind of group and size."""
    if not results:
        return "all-reduce: one rank, nothing to test"
    rows = []
    for result in results:
        sums = f"WRONG on ranks {', '.join(map(str, result.wrong_ranks))}" if result.wrong_ranks else "right"
        ranks = "-".join(map(str, result.slowest))
        rows.append((result.kind, str(result.groups), _binary(result.bytes), sums, f"{result.seconds * 1e3:.3f}",
                     f"{result.algorithm_gigabytes_per_second:.2f}", f"{result.bus_gigabytes_per_second:.2f}",
                     f"{ranks}: {result.slowest_bus_gigabytes_per_second:.2f}" if result.groups > 1 else ""))
    kinds = {result.kind for result in results}
    absent = {SAME: "no two ranks share a node", ACROSS: "all ranks are on one node"}
    drawn = table("All-reduce (algorithm GB/s = bytes / time; bus GB/s = 2(n-1)/n times that, for n ranks)",
                  ("between", "groups", "size", "sums", "ms", "algorithm", "bus", "slowest group"), rows)
    return drawn + "".join(f"  {kind}: not measured, because {reason}\n" for kind, reason in absent.items()
                           if kind not in kinds)


def _binary(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def _iteration_line(line: dict[str, Any]) -> str:
    """Return the line to print for an iteration."""
    loss, sps, dt, dtf, dtb = (metric.values([line])[0] for metric in _METRICS)
    return (f"iter={line['step']} loss={'nan' if loss is None else format(loss, '.5f')} sps={sps:.1f} dt={dt:.2f} "
            f"dtf={dtf:.2f} dtb={dtb:.2f}")


def _metric_spreads(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median and 10 % and 90 % quantiles of each metric but the loss, without first and last
    iteration."""
    return {metric.name: asdict(spread([value for value in metric.values(lines[1:-1]) if value is not None]))
            for metric in _METRICS if metric.name != "loss"}


def closing_text(run_dir: RunDir, lines: list[dict[str, Any]], held_out: tuple[float, float], profile: Path | None,
                 findings: list[Finding], world_size: int) -> str:
    """Return plots, the table of medians, paths of files, findings, and the verdict.

    Args:
        held_out: loss before and after training, on the same held-out samples.
    """
    width, color = terminal_width(), wants_color()
    parts = []
    # The first and last iterations have additional costs and would dominate the scale.
    x = [line["step"] for line in lines[1:-1]]
    for metric in _METRICS:
        y = metric.values(lines[1:-1])
        plain = series_plot(x, y, metric.name, "iter", metric.unit, width)
        write_atomic(run_dir.plots / f"{metric.name}.txt", plain)
        parts.append(series_plot(x, y, metric.name, "iter", metric.unit, width, color=True) if color else plain)
    rows = [(name, *(f"{points[point]:.2f}" for point in ("median", "low", "high")))
            for name, points in _metric_spreads(lines).items()]
    parts.append(table(f"Iterations 2 to {len(lines) - 1}", ("", "median", "10 %", "90 %"), rows, rich=color))
    parts += [f"loss      {held_out[0]:.5f} -> {held_out[1]:.5f} (on the same samples before and after)",
              f"profile   {profile}" if profile else "", f"run dir   {run_dir.path}", findings_text(findings),
              verdict("test_dist", findings, f"sums, weights, and loss of {count_noun(world_size, 'rank')}")]
    return "\n".join(filter(None, parts))


_WIDTHS = (128, 1024, 512, 256, 128, 128)
_HELD_OUT = 2**24 - 1  # no data-parallel rank has this number


class Mlp(nn.Module):
    """MLP with ReLU and the same initial weights on every rank, trained to learn a linear map.

    The forward pass returns the loss.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        # Seed only the initialization of this model and keep the state of the global generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(seed, "init") % 2**63)
            layers = [nn.Linear(a, b) for a, b in itertools.pairwise(_WIDTHS)]
        self.layers = nn.Sequential(*itertools.chain.from_iterable((layer, nn.ReLU()) for layer in layers[:-1]),
                                    layers[-1])

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the 0-d mean squared error for (B, 128) inputs and targets; predicting 0 gives about 1."""
        return nn.functional.mse_loss(self.layers(inputs).float(), targets)


class Samples:
    """Unlimited random (inputs, targets), different for each data-parallel rank."""

    def __init__(self, seed: int, dp_rank: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed_for(seed, "init", 1) % 2**63)
        self._map = torch.randn(_WIDTHS[0], _WIDTHS[-1], generator=generator) / _WIDTHS[0] ** 0.5
        self._generator = torch.Generator().manual_seed(seed_for(seed, "data", dp_rank) % 2**63)
        self._device = device

    def take(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the next `count` samples on the device, (count, 128) each."""
        inputs = torch.randn(count, _WIDTHS[0], generator=self._generator)
        return inputs.to(self._device), (inputs @ self._map).to(self._device)


def held_out(seed: int, device: torch.device) -> Samples:
    """Return samples that are the same on every rank and not used for training."""
    return Samples(seed, _HELD_OUT, device)


_FLUSH_EVERY = 10
_HELD_OUT_SAMPLES = 256
_MIN_LOSS_DECREASE = 0.01
"""Required relative decrease of the loss.

Ten iterations decrease it by four times as much, and evaluation on the same samples adds no noise.
"""

_AGREE = 1e-3
"""Relative tolerance of ranks' losses on the same samples; a larger difference means different weights."""

_ONE_RANK = "check the device and the links of that node (launch --preflight), or exclude it (launch --hosts)"
_ALL_RANKS = "find out whether the layout or the device is the cause: --ds-config ddp, --device cpu"


def train(engine: Engine, dist: Dist, heartbeat: Heartbeat, seed: int, steps: int, lr: float,
          profile: PythonProfile | None) -> list[dict[str, Any]]:
    """Train for `steps` iterations and return the lines of metrics.jsonl, with this rank's times."""
    timeline = StepTimeline(dist.device)
    samples, batch = Samples(seed, dist.mesh.dp_rank, dist.device), engine.batch
    lines: list[dict[str, Any]] = []
    losses: list[torch.Tensor] = []
    if dist.is_main:
        print_lines(_LEGEND)
    for step in range(steps):
        heartbeat.beat(TRAINING, step)
        if profile:
            profile.before_step(step)
        timeline.begin_step()
        loss, _ = engine.train_step(_micro_batches(samples, batch, timeline), lr, timeline.span)
        timeline.end_step()
        losses.append(loss)
        if profile:
            profile.after_step(step)
        if len(losses) == _FLUSH_EVERY or step == steps - 1:
            lines += _flush(losses, timeline, len(lines), batch.global_batch, dist)
            losses = []
    return lines


def _micro_batches(samples: Samples, batch: Batch, timeline: StepTimeline) -> Iterator[tuple[torch.Tensor, ...]]:
    for _ in range(batch.accumulation):
        with timeline.span("data"):
            inputs = samples.take(batch.micro_batch)
        yield inputs


def _flush(losses: list[torch.Tensor], timeline: StepTimeline, completed_steps: int, global_batch: int,
           dist: Dist) -> list[dict[str, Any]]:
    """Average the losses since the last flush over ranks; rank 0 writes and prints them. Collective."""
    means = all_reduce(dist, torch.stack(losses).double())
    lines = [{"step": step, "loss": mean if math.isfinite(mean) else None,
              "samples_per_second": global_batch / times.step_time_s, "step_time_s": times.step_time_s,
              **{f"{phase}_s": seconds for phase, seconds in times.phases.items()}}
             for step, (mean, times) in enumerate(zip((means / dist.world_size).tolist(), timeline.drain(),
                                                      strict=True), completed_steps + 1)]
    if dist.is_main:
        for line in lines:
            append_line(dist.run_dir.metrics, line)
            print_lines(_iteration_line(line))
    return lines


def held_out_loss(engine: Engine, dist: Dist, seed: int) -> float:
    """Return the loss on fixed samples, which are the same on every rank. Collective."""
    with engine.evaluating():
        return engine.module(*held_out(seed, dist.device).take(_HELD_OUT_SAMPLES)).item()


def _find_problems(dist: Dist, lines: list[dict[str, Any]], before: float, after: float,
                   wrong_groups: list[str], wrong_values: list[str]) -> list[Finding]:
    """Return the problems of all ranks; the same list on every rank. Collective.

    Args:
        before, after: this rank's `held_out_loss` before and after training.
        wrong_groups: kinds of groups in which this rank got wrong sums.
        wrong_values: kinds of collectives in which this rank got wrong values.
    """
    # Do not use an all-reduce, which may be broken.
    ranks = all_gather(dist, (dist.rank, after, wrong_groups, wrong_values))
    findings = [Finding("bad", "sums", f"rank {rank} got wrong sums in all-reduces ({', '.join(kinds)})", _ONE_RANK)
                for rank, _, kinds, _ in ranks if kinds]
    findings += [Finding("bad", "values", f"rank {rank} got wrong values: {', '.join(kinds)}", _ONE_RANK)
                 for rank, *_, kinds in ranks if kinds]
    reference = ranks[0][1]
    first_non_finite = next((line["step"] for line in lines if line["loss"] is None), None)
    if first_non_finite is not None:
        findings.append(Finding("bad", "loss", f"the loss is NaN or Inf from iteration {first_non_finite}",
                                _ALL_RANKS))
    elif not reference < before * (1 - _MIN_LOSS_DECREASE):
        findings.append(Finding("bad", "loss", f"the loss did not decrease: {before:.6g} before training, "
                                               f"{reference:.6g} after it, on the same samples", _ALL_RANKS))
    findings += [Finding("bad", "weights", f"rank {rank} has different weights than rank 0: losses of {loss:.6g} "
                                           f"and {reference:.6g} on the same samples", _ONE_RANK)
                 for rank, loss, *_ in ranks if not math.isclose(loss, reference, rel_tol=_AGREE)]
    return findings


TIMEOUT_S = 600.0
_MAX_ALL_TO_ALL = 256
"""Maximum ranks of an all-to-all, which connects all pairs. Layouts use it only among the ranks of a sequence."""
LR = 1e-3


def run(options: argparse.Namespace, resolved: Resolved, import_seconds: dict[str, float], began: float) -> int:
    """Test all-reduces and train. Return exit code 0 if no rank has a problem, else 1.

    Args:
        import_seconds: import times so far, to which DeepSpeed's is added.
        began: start of the command, by `time.perf_counter`.
    """
    heartbeat = Heartbeat(os.environ)
    heartbeat.beat(RENDEZVOUS)
    with setup(device=options.device, run_dir=options.run_dir, name="test_dist", timeout_s=TIMEOUT_S) as dist:
        print_lines(f"[{dist.device}][rank={dist.rank}/{dist.world_size - 1}][{dist.info.local_rank}]"
                    f"[{socket.gethostname()}]")
        heartbeat.beat(STARTING)
        run_together(dist, lambda: reject_used_directory(dist.run_dir.path), on_main=True)
        engine = _engine(resolved, dist, options.seed, import_seconds)
        environment = run_environment(dist)
        if dist.is_main:
            resolved.write(dist.run_dir, dist.side)
            update_record(dist.run_dir, environment=environment, import_seconds=import_seconds,
                          config={"ds_config": options.ds_config, "steps": options.steps, "seed": options.seed,
                                  "batch": asdict(resolved.batch), "device": options.device})
            print_lines(description(dist, resolved, environment, import_seconds))
        measured = measure_reductions(dist)
        kinds = tuple(kind for kind in KINDS if kind != "all-to-all" or dist.world_size <= _MAX_ALL_TO_ALL)
        wrong_values = wrong_kinds(torch.distributed.group.WORLD, dist.device, kinds)
        if dist.is_main:
            print_lines(_reductions_table(measured))
        profile = PythonProfile(dist.run_dir, profile_window(0, options.steps)) if dist.is_main else None
        before = held_out_loss(engine, dist, options.seed)
        lines = train(engine, dist, heartbeat, options.seed, options.steps, resolved.adam.get("lr", LR), profile)
        heartbeat.beat(ENDING, options.steps)
        after = held_out_loss(engine, dist, options.seed)
        wrong_groups = dict.fromkeys(result.kind for result in measured if dist.rank in result.wrong_ranks)
        findings = _find_problems(dist, lines, before, after, list(wrong_groups), wrong_values)
        if dist.is_main:
            update_record(dist.run_dir, test_dist=SmokeTest(
                fit=is_fit(findings), findings=findings,
                held_out_loss={"before": before, "after": after},
                reductions=[asdict(result) for result in measured], spread=_metric_spreads(lines)))
            print_lines(closing_text(dist.run_dir, lines, (before, after), profile and profile.path, findings,
                                     dist.world_size), keeps_colors=wants_color())
        elif not is_fit(findings):  # every rank exits with code 1, and its log shows why
            print_lines(findings_text(findings), end="")
        print_lines(f"[{dist.rank}] runtime={time.perf_counter() - began:.2f}s")
    return 0 if is_fit(findings) else 1


def _engine(resolved: Resolved, dist: Dist, seed: int, import_seconds: dict[str, float]) -> Engine:
    if resolved.layout.engine == "deepspeed":
        from ezpz_llm.training.engine.deepspeed_import import import_deepspeed

        start = time.perf_counter()
        import_deepspeed(dist.device.type)
        import_seconds["deepspeed"] = time.perf_counter() - start
    model, adam = Mlp(seed), resolved.adam
    return build_engine(model, resolved, dist, lr=adam.get("lr", LR), eps=adam.get("eps", 1e-8),
                        betas=(adam.get("beta1", 0.9), adam.get("beta2", 0.999)),
                        param_groups=[{"params": list(model.parameters()),
                                       "names": [name for name, _ in model.named_parameters()],
                                       "weight_decay": adam.get("weight_decay", 0.0)}])
