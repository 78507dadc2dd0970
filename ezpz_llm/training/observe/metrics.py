"""`metrics.jsonl`: one object per step, written without synchronizing the device.

Fields of a line:

- `step` (from 1), `loss` (nats per token, mean over the step's tokens), `lr`, `grad_norm` (before clipping)
- `step_time_s`, and its parts `data_s`, `forward_s`, `backward_s`, `optimizer_s`, `other_s` (of rank 0)
- `tokens_per_second`, `tokens_per_second_per_device` if the number of tokens is known
- `mfu` if the device's peak is known
- `val_loss`, `val_tokens`, `hellaswag_acc`, `hellaswag_acc_norm` on steps with such an evaluation
- `lr_G`, `grad_norm_G`, `update_ratio_G` (norm of the update / norm of the parameters) for the groups G `decayed`
  and `others`, on the first step and every `--log-every` steps. On ranks with more than 2^28 weights,
  `update_ratio_G` is an estimate from evenly spaced rows.
- `skipped` on steps without a parameter update
- metrics of callbacks, under their own names

A non-finite loss or norm is null, since JSON does not allow NaN.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ezpz_llm.core.base import print_lines
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.summary_record import Bubble, Straggler
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_gather_number, all_reduce
from ezpz_llm.training.observe.history import check_no_history, is_finite, steady_steps, trim_history
from ezpz_llm.training.observe.step_timeline import StepTimeline, StepTimes
from ezpz_llm.training.observe.throughput import Progress, StepWork
from ezpz_llm.training.observe.trackers import Tracking


class Measured(Protocol):
    """Measurements of one step that need a sum over all ranks of the tensor `sums`."""

    sums: torch.Tensor

    def describe(self, totals: list[Any], grad_norm: float | None) -> dict[str, float]:
        """Return the fields of the step's line, computed from the sums over all ranks."""


@dataclass
class _Step:
    """Finished step that waits to be written. `values` has this rank's loss, gradient norm, and number of tokens (0
    unless `has_tokens`); `figures` has other fields of the line."""

    lr: float | None
    values: torch.Tensor
    measured: Measured | None
    has_tokens: bool = False
    figures: dict[str, float | torch.Tensor | None] = field(default_factory=dict)


class MetricsLog:
    """Writer of metrics.jsonl that collects each step's loss and gradient norm on the device until a flush.

    All ranks must call `record`, `flush`, `straggler`, and `bubble` at the same steps; rank 0 writes. `flush` is
    `reduce` followed by `write`, and `record_task` can add to the last line between them. `latest` is the last
    reduced line. A run that resumes after
    `first_step` appends to the existing lines, after `trim_history` has dropped later ones.

    Args:
        work: work of one step, for the rates.
        total_steps: last step of the run, for the progress line.
        flush_every: `due` is True at multiples of this number, and after the first step for early feedback.
        console: print the progress line on rank 0.
        tracking: trackers that also receive the lines of each flush, on rank 0.

    Raises:
        UserError: on rank 0, if a new run starts in a directory with another run's metrics.
    """

    def __init__(self, run_dir: RunDir, dist: Dist, work: StepWork, *, total_steps: int, first_step: int = 0,
                 flush_every: int = 50, console: bool = True,
                 tracking: Tracking | None = None) -> None:
        self._run_dir = run_dir
        self._dist = dist
        self.work = work
        self._first_step = first_step
        self._flush_every = flush_every
        self._pending: dict[int, _Step] = {}
        self._reduced: list[dict[str, Any]] = []
        self.latest: dict[str, Any] = {}
        # Seconds of each step on this rank: data + forward; data + forward + backward; all before the optimizer.
        self._before_collectives, self._busy, self._span = array("d"), array("d"), array("d")
        self._progress = Progress(total_steps, work) if console and dist.is_main else None
        self._tracking = tracking
        self._impossible_mfu = False
        if dist.is_main:
            if first_step == 0:
                check_no_history(run_dir)
            trim_history(run_dir, first_step)

    def record(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float | None,
               measured: Measured | None = None, tokens: float | None = None) -> None:
        """Record a finished step's local mean loss and global gradient norm.

        Both are 0-d tensors, copied on the device without synchronizing it.

        Args:
            measured: other measurements of this step, on all ranks.
            tokens: number of tokens of this rank, if it differs from `work`.
        """
        norm = grad_norm.detach().to(loss.device, non_blocking=True)
        values = torch.stack((loss.detach().float(), norm.float(), torch.full_like(norm, tokens or 0).float()))
        self._pending[step] = _Step(lr, values, measured, has_tokens=tokens is not None)

    def record_validation(self, step: int, val_loss: float, val_tokens: int) -> None:
        """Add a validation result to the line of `step`.

        Raises:
            ValueError: the step was not recorded, or its line has been written.
        """
        self.record_task(step, val_tokens=val_tokens, val_loss=val_loss if is_finite(val_loss) else None)

    def record_task(self, step: int, **figures: float | torch.Tensor | None) -> None:
        """Add other results to the line of `step`. Tensors (0-d) are read when the line is reduced.

        Raises:
            ValueError: the step was not recorded, or its line has been written.
        """
        if step in self._pending:
            self._pending[step].figures.update(figures)
        elif self._reduced and self._reduced[-1]["step"] == step:
            self._reduced[-1].update(_as_numbers(figures))
        else:
            raise ValueError(f"step {step} has no line that is waiting to be written")

    @property
    def due(self) -> bool:
        """True if the log should be flushed after the last recorded step."""
        return bool(self._pending) and self.is_due(max(self._pending))

    def is_due(self, step: int) -> bool:
        """Return True if the log should be flushed after `step`."""
        return step % self._flush_every == 0 or step == self._first_step + 1

    def tick(self, step: int) -> None:
        """Print the progress on rank 0, unless it was printed recently."""
        if self._progress:
            self._progress.tick(step)

    def erase_live_line(self) -> None:
        """Erase the live line before other output is printed."""
        if self._progress:
            self._progress.erase()

    def rewind(self, step: int) -> None:
        """Drop the lines after `step`, before the run continues from there."""
        self._first_step = step
        if self._dist.is_main:
            self._dist.side.attempt("metrics.jsonl without the steps to be repeated",
                                    lambda: trim_history(self._run_dir, step))
        if self._tracking:
            self._tracking.rewind(step)

    def flush(self, timeline: StepTimeline) -> None:
        """Reduce, write, and print the steps recorded since the last flush. Collective.

        Raises:
            ValueError: the timeline did not time exactly the recorded steps.
        """
        self.reduce(timeline)
        self.write()

    def reduce(self, timeline: StepTimeline,
               observe: Callable[[list[dict[str, Any]]], None] | None = None) -> None:
        """Reduce the steps recorded since the last flush, and write all lines but the last. Collective.

        Args:
            observe: called with the lines on every rank before they are written, and may add to them. Losses and
                norms are equal on all ranks; times are the rank's own.

        Raises:
            ValueError: the timeline did not time exactly the recorded steps.
        """
        times = timeline.drain()
        if len(times) != len(self._pending):
            raise ValueError(f"{len(self._pending)} steps were recorded, {len(times)} were timed")
        if not self._pending:
            return
        lines = [self._line(step, recorded, values, step_times) for (step, recorded), values, step_times
                 in zip(self._pending.items(), self._reduce(), times, strict=True)]
        self._add_measured(lines)
        for step_times in times:
            phases = step_times.phases
            self._before_collectives.append(phases["data"] + phases["forward"])
            self._busy.append(phases["data"] + phases["forward"] + phases["backward"])
            self._span.append(step_times.step_time_s - phases["optimizer"])
        self._pending, self._reduced, self.latest = {}, lines, lines[-1]
        if observe is not None:
            observe(lines)
            for line in lines:
                line.update(_as_numbers(line))
        if self._dist.is_main and lines[:-1]:
            self._dist.side.append(self._run_dir.metrics, lines[:-1])

    def write(self) -> None:
        """Write the last reduced line, and pass all reduced lines to the trackers and the console."""
        lines, self._reduced = self._reduced, []
        if not lines or not self._dist.is_main:
            return
        self._dist.side.append(self._run_dir.metrics, lines[-1:])
        if self._tracking:
            self._tracking.write(lines)
        if self._progress:
            self._progress.show(lines)
        first_non_finite = next((line["step"] for line in lines if not is_finite(line["loss"])), None)
        if first_non_finite is not None:
            print_lines(f"warning: the loss is not finite from step {first_non_finite} on")

    def close(self, failed: bool) -> None:
        """Write all queued lines to the trackers and close them; see `Tracking.close`."""
        if self._tracking:
            self._tracking.close(failed)

    def _add_measured(self, lines: list[dict[str, Any]]) -> None:
        """Add the other measurements to the lines of their steps, summed over ranks in one collective."""
        measured = {step: recorded.measured for step, recorded in self._pending.items()
                    if recorded.measured is not None}
        if not measured:
            return
        sums = all_reduce(self._dist, torch.stack([measurements.sums for measurements in measured.values()]))
        by_step = {line["step"]: line for line in lines}
        for (step, measurements), values in zip(measured.items(), sums.tolist(), strict=True):
            by_step[step].update(measurements.describe(values, by_step[step]["grad_norm"]))

    def straggler(self) -> Straggler | None:
        """Return the rank with the most time in data and forward, over steady steps; None for a single rank.

        Collective.
        """
        if self._dist.world_size == 1 or not self._before_collectives:
            return None
        seconds = all_gather_number(self._dist, statistics.median(steady_steps(self._before_collectives)))
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        return Straggler(slowest, seconds[slowest], statistics.median(seconds))

    def bubble(self) -> Bubble | None:
        """Return the idle fractions of the pipeline stages, from medians over steady steps. Collective.

        The first stage finishes its backward passes last, so its time up to the optimizer is the pipeline's time.
        The times of the other stages do not show their idle time: they wait in the optimizer phase, for the sum of
        gradients or their norm.
        """
        mesh = self._dist.mesh
        if mesh.pp_size == 1 or not self._busy:
            return None
        sums = torch.zeros(mesh.pp_size + 1)
        sums[mesh.pp_rank] = statistics.median(steady_steps(self._busy))
        if mesh.pp_rank == 0:
            sums[-1] = statistics.median(steady_steps(self._span))
        *stages, pipeline_s = all_reduce(self._dist, sums).tolist()
        return Bubble(tuple(1 - seconds / pipeline_s for seconds in stages),
                      (mesh.pp_size - 1) / (self.work.accumulation + mesh.pp_size - 1))

    def _reduce(self) -> list[list[float]]:
        """Return (loss, gradient norm, tokens) of every pending step, averaged over all ranks in one collective.

        Tensor-parallel peers have equal values, and the values of pipeline- and sequence-parallel peers average to
        the loss. Sums are in double precision, where sums of fp32 values are exact, and so independent of the order
        in which a backend adds.
        """
        stacked = torch.stack([recorded.values for recorded in self._pending.values()])
        if self._dist.world_size == 1:
            return stacked.tolist()
        return (all_reduce(self._dist, stacked.double()) / self._dist.world_size).tolist()

    def _line(self, step: int, recorded: _Step, values: list[float], times: StepTimes) -> dict[str, Any]:
        loss, grad_norm, tokens = values
        rates = self.work.rates(times.step_time_s, tokens * self.work.world_size if recorded.has_tokens else None)
        line: dict[str, Any] = {
            "step": step,
            "loss": loss if is_finite(loss) else None,
            "lr": recorded.lr,
            "grad_norm": grad_norm if is_finite(grad_norm) else None,
            "step_time_s": times.step_time_s,
            **({} if rates.tokens_per_second is None else {
                "tokens_per_second": rates.tokens_per_second,
                "tokens_per_second_per_device": rates.tokens_per_second_per_device}),
            **{f"{phase}_s": seconds for phase, seconds in times.phases.items()},
        }
        if rates.mfu is not None:
            self._add_mfu(line, rates.mfu)
        return {**line, **_as_numbers(recorded.figures)}

    def _add_mfu(self, line: dict[str, Any], mfu: float) -> None:
        """Add the MFU to a line. An MFU above 1 must be wrong: it is omitted and reported once."""
        if mfu <= 1:
            line["mfu"] = mfu
        elif not self._impossible_mfu and self._dist.is_main and self.work.peak is not None:
            self._impossible_mfu = True
            peak = self.work.peak
            print_lines(f"error: step {line['step']} has an MFU of {mfu:.2f}, which is impossible. The step time, "
                        f"the {self.work.flops_per_token:.4g} FLOPs per token, or the peak of {peak.flops:.4g} "
                        f"FLOP/s ({peak.precision}, {peak.device}) is wrong. Omitting mfu for such steps")


def _as_numbers(figures: Mapping[str, float | torch.Tensor | None]) -> dict[str, float | None]:
    """Return figures as numbers for JSON, in which NaN and Inf are None. Waits for tensors on a device."""
    numbers = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in figures.items()}
    return {name: value if is_finite(value) else None for name, value in numbers.items()}
