"""`metrics.jsonl`: one object a step, written behind the training so that no step waits for a number.

A line has `step` (from 1), `loss` (nats a token, mean over the step's tokens), `lr`, `grad_norm` (before clipping),
`step_time_s`, `tokens_per_second`, `tokens_per_second_per_device`, `data_s`, `forward_s`, `backward_s`,
`optimizer_s`, `other_s` (rank 0's, adding up to the step time); `mfu` where the device's peak is known; `val_loss`,
`val_tokens`, `hellaswag_acc` and `hellaswag_acc_norm` on steps that evaluated so; on steps that are flushed at once
`lr_G`, `grad_norm_G` and `update_ratio_G` (norm of the update over norm of the parameters) of the groups G
`decayed` and `others`; `skipped` on steps that changed nothing. A loss or norm that is not finite is null, since
JSON has no NaN.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ezpz_llm.observe.history import finite, trim_history
from ezpz_llm.observe.throughput import Progress, StepWork
from ezpz_llm.observe.timeline import Bubble, StepTimeline, StepTimes, Straggler, pipeline_bubble, slowest_rank
from ezpz_llm.observe.trackers import Tracking
from ezpz_llm.rundir import RunDir

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist


class Measured(Protocol):
    """Numbers of one step of which each rank has a part, `sums`; the line gets what their totals mean."""

    sums: torch.Tensor

    def describe(self, totals: list[Any], grad_norm: float | None) -> dict[str, float]:
        """The members of a step's line that follow from the sums over all ranks."""


@dataclass
class _Step:
    """A finished step that waits to be written: `values` has this rank's loss and norm, `figures` the rest."""

    lr: float
    values: torch.Tensor
    measured: Measured | None
    figures: dict[str, float | None] = field(default_factory=dict)


class MetricsLog:
    """Collects every step's loss and norm on the device; `flush` reduces them over ranks and writes the lines.

    All ranks hold one and call `record`, `flush` and `straggler` at the same steps; rank 0 writes. A run that goes
    on after `first_step` appends to its directory's lines, of which later ones are dropped first (trim_history).

    Args:
        work: what one step is, for the rates.
        total_steps: the run's last step, for the progress line.
        flush_every: `due` is true at multiples of it, and after the first step so that a user sees it at once.
        console: print the progress line on rank 0.
        tracking: takes the lines of each flush too, on rank 0.

    Raises:
        UserError: on rank 0, a new run in a directory with another run's metrics.
    """

    def __init__(self, run_dir: RunDir, dist: Dist, work: StepWork, *, total_steps: int, first_step: int = 0,
                 flush_every: int = 50, console: bool = True,
                 tracking: Tracking | None = None) -> None:
        self._run_dir = run_dir
        self._dist = dist
        self._work = work
        self._first_step = first_step
        self._flush_every = flush_every
        self._pending: dict[int, _Step] = {}
        # Of each of this rank's steps: in data and forward; in backward besides; and until the optimizer's phase.
        self._before_collectives, self._busy, self._span = array("d"), array("d"), array("d")
        self._progress = Progress(total_steps, work) if console and dist.is_main else None
        self._tracking = tracking
        self._impossible_mfu = False
        if dist.is_main:
            trim_history(run_dir, first_step)

    def record(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float,
               measured: Measured | None = None) -> None:
        """Keep a finished step's local mean loss and global norm (0-d tensors, copied on the device, not read).

        Args:
            measured: what else was found on all ranks in this step.
        """
        norm = grad_norm.detach().to(loss.device, non_blocking=True)
        self._pending[step] = _Step(lr, torch.stack((loss.detach().float(), norm.float())), measured)

    def record_validation(self, step: int, val_loss: float, val_tokens: int) -> None:
        """Put a validation result on the line of `step`.

        Raises:
            ValueError: the step was not recorded, or its line is written already.
        """
        if step not in self._pending:
            raise ValueError(f"validation of step {step}, which is not waiting to be written")
        self.record_task(step, val_tokens=val_tokens, val_loss=val_loss if finite(val_loss) else None)

    def record_task(self, step: int, **figures: float | None) -> None:
        """Put further results of an evaluation on the line of `step`, which is recorded and not yet written."""
        self._pending[step].figures.update(figures)

    @property
    def due(self) -> bool:
        """True if the last recorded step is one to flush after."""
        return bool(self._pending) and self.is_due(max(self._pending))

    def is_due(self, step: int) -> bool:
        """True if `step` is one to flush after."""
        return step % self._flush_every == 0 or step == self._first_step + 1

    def go_back(self, step: int) -> None:
        """The run goes on after an earlier `step`: later lines are dropped."""
        self._first_step = step
        if self._dist.is_main:
            self._dist.side.attempt("metrics.jsonl without the steps that come again",
                                    lambda: trim_history(self._run_dir, step))
        if self._tracking:
            self._tracking.go_back(step)

    def flush(self, timeline: StepTimeline, look: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Reduce, write and show what was recorded since the last flush. A collective: every rank calls it.

        Args:
            look: is given every line, on every rank, before it is written, and may add to it. Losses and norms are
                the same on all ranks, times are each rank's own.

        Raises:
            ValueError: the timeline did not time exactly the recorded steps.
        """
        times = timeline.drain()
        if len(times) != len(self._pending):
            raise ValueError(f"{len(self._pending)} steps were recorded, {len(times)} were timed")
        if not self._pending:
            return
        lines = [self._line(step, recorded, loss, norm, time) for (step, recorded), (loss, norm), time
                 in zip(self._pending.items(), self._reduce(), times, strict=True)]
        self._add_measured(lines)
        for line in lines if look else ():
            look(line)
        for time in times:
            phases = time.phases
            self._before_collectives.append(phases["data"] + phases["forward"])
            self._busy.append(phases["data"] + phases["forward"] + phases["backward"])
            self._span.append(time.step_time_s - phases["optimizer"])
        self._pending = {}
        if not self._dist.is_main:
            return
        self._dist.side.append(self._run_dir.metrics, lines)
        if self._tracking:
            self._tracking.write(lines)
        if self._progress:
            self._progress.show(lines)
        first_bad = next((line["step"] for line in lines if not finite(line["loss"])), None)
        if first_bad is not None:
            print(f"warning: the loss is not finite from step {first_bad} on", flush=True)

    def _add_measured(self, lines: list[dict[str, Any]]) -> None:
        """Put what was measured besides on the lines of its steps, summed over ranks in one collective."""
        measured = {step: one.measured for step, one in self._pending.items() if one.measured is not None}
        if not measured:
            return
        sums = torch.stack([found.sums for found in measured.values()])
        if self._dist.world_size > 1:
            torch.distributed.all_reduce(sums)
        by_step = {line["step"]: line for line in lines}
        for (step, found), values in zip(measured.items(), sums.tolist(), strict=True):
            by_step[step].update(found.describe(values, by_step[step]["grad_norm"]))

    def straggler(self) -> Straggler | None:
        """The slowest rank; None for one rank. A collective."""
        return slowest_rank(self._dist, self._before_collectives)

    def bubble(self) -> Bubble | None:
        """Idle time of the pipeline's stages; None without a pipeline. A collective."""
        return pipeline_bubble(self._dist, self._busy, self._span, self._work.accumulation)

    def _reduce(self) -> list[list[float]]:
        """(loss, norm) of every pending step, averaged over ranks in one collective.

        The mean is over all ranks: tensor-parallel peers hold equal values, and what pipeline and sequence-parallel
        peers hold are parts that average to the loss. Sums are in double precision, where a sum of floats is exact
        and so does not depend on the order in which a backend adds.
        """
        stacked = torch.stack([recorded.values for recorded in self._pending.values()])
        if self._dist.world_size == 1:
            return stacked.tolist()
        stacked = stacked.double()
        torch.distributed.all_reduce(stacked)
        return (stacked / self._dist.world_size).tolist()

    def _line(self, step: int, recorded: _Step, loss: float, grad_norm: float, times: StepTimes) -> dict[str, Any]:
        rates = self._work.rates(times.step_time_s)
        line: dict[str, Any] = {
            "step": step,
            "loss": loss if finite(loss) else None,
            "lr": recorded.lr,
            "grad_norm": grad_norm if finite(grad_norm) else None,
            "step_time_s": times.step_time_s,
            "tokens_per_second": rates.tokens_per_second,
            "tokens_per_second_per_device": rates.tokens_per_second_per_device,
            **{f"{phase}_s": seconds for phase, seconds in times.phases.items()},
        }
        if rates.mfu is not None:
            self._add_mfu(line, rates.mfu)
        return {**line, **recorded.figures}

    def _add_mfu(self, line: dict[str, Any], mfu: float) -> None:
        """An MFU above 1 is left out and reported once: some part of it must be wrong."""
        if mfu <= 1:
            line["mfu"] = mfu
        elif not self._impossible_mfu and self._dist.is_main and self._work.peak is not None:
            self._impossible_mfu = True
            peak = self._work.peak
            print(f"error: step {line['step']} gives an MFU of {mfu:.2f}, which cannot be: the step time, the "
                  f"{self._work.flops_per_token:.4g} FLOPs a token or the peak of {peak.flops:.4g} FLOP/s "
                  f"({peak.precision}, {peak.device}) is wrong; such steps get no mfu", flush=True)
