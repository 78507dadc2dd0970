"""A run of somebody's own training script: set-up, recorded steps, and the closing files of a run directory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ezpz_llm.base import UserError, unknown
from ezpz_llm.dist import Dist, Heartbeat, Mesh
from ezpz_llm.dist.agree import together
from ezpz_llm.dist.setup import setup as set_up_rank
from ezpz_llm.launch.variables import ENDING, EVALUATING, RENDEZVOUS, SAVING, STARTING, TRAINING
from ezpz_llm.observe import (
    MetricsLog,
    StepTimeline,
    StepWork,
    Straggler,
    WallClock,
    final_text,
    plot_run,
    run_environment,
    summarise,
    wants_colour,
)
from ezpz_llm.observe.history import PHASES, History, finite, steady, whole_history
from ezpz_llm.observe.machine_load import load_now
from ezpz_llm.report.document import report_page
from ezpz_llm.report.runs import run_of
from ezpz_llm.rundir import read_record, write_atomic

if TYPE_CHECKING:
    from ezpz_llm.library.wrapping import Wrapped

BETWEEN = {"evaluation": EVALUATING, "checkpoints": SAVING}
"""Phases between two steps, which are left out of step times, with what the heartbeat says meanwhile."""
LOG_EVERY = 10


@dataclass
class Run:
    """One rank of a run. As a context manager it ends the run; after an exception it leaves the others alone."""

    dist: Dist
    timeline: StepTimeline
    heartbeat: Heartbeat
    clock: WallClock
    log_every: int = LOG_EVERY
    metrics: MetricsLog | None = None
    models: list[Wrapped] = field(default_factory=list)
    first_step: int = 0
    step: int = 0
    """The last step that was recorded, or that a checkpoint was loaded of."""
    _waiting: int = 0
    _began: float = 0.0

    @property
    def rank(self) -> int:
        """This process's number among all ranks, from 0."""
        return self.dist.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dist.world_size

    @property
    def local_rank(self) -> int:
        """The same among the ranks of this node."""
        return self.dist.info.local_rank

    @property
    def is_main(self) -> bool:
        """True if this is rank 0."""
        return self.dist.is_main

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        return self.dist.device

    @property
    def mesh(self) -> Mesh:
        """Process groups and coordinates of the ranks."""
        return self.dist.mesh

    @property
    def run_dir(self) -> Path:
        """Where the run writes; the same folder on every rank."""
        return self.dist.run_dir.path

    def begin_step(self) -> None:
        """Let the next step begin now."""
        self._began = time.perf_counter()
        self.timeline.begin_step()

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Count the time inside to a phase of the step; inside another phase, to that one."""
        with nullcontext() if self.timeline.is_inside else self.timeline.span(phase):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `ezpz_llm.phase`."""
        if name in PHASES:
            with self.span(name):
                yield
            return
        if name not in BETWEEN:
            raise unknown("phase", name, (*PHASES, *BETWEEN), where="ezpz_llm.phase")
        self.heartbeat.beat(BETWEEN[name], self.step)
        if not self.timeline.is_untouched:  # within a step, which then has it in "other"
            yield
            return
        with self.clock.span(name):
            yield
        self.begin_step()

    def record(self, step: int, loss: float | Tensor, tokens: int | None, lr: float | None,
               grad_norm: float | Tensor | None, figures: dict[str, float]) -> None:
        """See `ezpz_llm.record`."""
        if step <= self.step:
            raise UserError(f"step {step} is recorded after step {self.step}", where="ezpz_llm.record",
                            instead="steps that count up from 1, each once; after load_checkpoint from its step on")
        if self.metrics is None:
            self.metrics = self._open()
        self.timeline.end_step(step - self.step)
        self.clock.spans["training"] = self.clock.spans.get("training", 0.0) + time.perf_counter() - self._began
        if len(self.models) == 1:
            lr = self.models[0].lr if lr is None else lr
            grad_norm = self.models[0].grad_norm if grad_norm is None else grad_norm
        norm = float("nan") if grad_norm is None else grad_norm
        # The ranks that share a model have the same tokens, which count once.
        share = tokens if tokens is None else tokens / self.mesh.tp_size
        self.metrics.record(step, self._scalar(loss), self._scalar(norm), lr, tokens=share)
        if figures:
            self.metrics.record_task(step, **{name: value if finite(value) else None
                                              for name, value in figures.items()})
        self.step, self._waiting = step, self._waiting + 1
        self.heartbeat.beat(TRAINING, step)
        if self._waiting >= self.log_every or step == self.first_step + 1:
            self.flush()
        self.begin_step()

    def flush(self) -> None:
        """Write the lines that wait. Collective."""
        if self.metrics is not None:
            with self.clock.span("logging"):
                self.metrics.flush(self.timeline)
            self._waiting = 0

    def finish(self) -> None:
        """See `ezpz_llm.finish`."""
        self.heartbeat.beat(ENDING, self.step)
        self.flush()
        optional = self.dist.optional
        straggler = None if self.metrics is None else optional.attempt_together(
            "the comparison of ranks", self.metrics.straggler)
        if self.is_main and self.metrics is not None:
            optional.attempt("the summary", lambda: self._report(straggler))
        for lost in self.dist.side.close():
            print(f"warning: {lost}", file=sys.stderr, flush=True)
        self.dist.close()

    def _report(self, straggler: Straggler | None) -> None:
        """Print plots and the closing block, and put the summary into run.json."""
        run_dir, side = self.dist.run_dir, self.dist.side
        side.update_record(run_dir, steps=self.step,
                           config={**read_record(run_dir).get("config", {}), "steps": self.step})
        history = whole_history(run_dir, side)
        summary = summarise(run_dir, self._work(history), self.clock.split(), first_step=self.first_step,
                            straggler=straggler if straggler and straggler.seconds else None, history=history)
        charts = self.dist.optional.attempt("plotting", lambda: plot_run(
            run_dir, colour=wants_colour(), history=history, side=side, unit=""))
        if charts is not None:
            print("\n" + charts)
        side.update_record(run_dir, summary=summary and asdict(summary), load_at_end=load_now())
        side.attempt("report.html", lambda: write_atomic(run_dir.report, report_page([run_of(run_dir, history)])))
        if summary is not None:
            print(final_text(summary, run_dir), end="", flush=True)

    def _open(self) -> MetricsLog:
        """The log of a run that goes on after its checkpoint's step, else from the beginning."""
        self.first_step = self.step
        world_size = self.dist.world_size
        return together(self.dist, lambda: MetricsLog(
            self.dist.run_dir, self.dist, StepWork(0, 1, world_size, world_size, 0), total_steps=0,
            first_step=self.first_step, console=False))

    def _scalar(self, value: float | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float32, device=self.device).detach().mean()

    def _work(self, history: History) -> StepWork:
        """The work of a usual step: its tokens by what was recorded."""
        timed = steady(history)
        tokens = timed.column("tokens_per_second") * timed.column("step_time_s")
        known = tokens[np.isfinite(tokens)]
        return StepWork(1, 1, 1, self.world_size, round(float(np.median(known))) if len(known) else 0)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            finish()
        else:
            _forget()
            self.dist.__exit__(kind, error, trace)


# The one run of this process, which the calls of the library speak of.
_CURRENT: list[Run] = []


def current(call: str) -> Run:
    """The run of this process.

    Raises:
        UserError: there is none yet, or no longer.
    """
    if not _CURRENT:
        raise UserError("there is no run in this process", where=f"ezpz_llm.{call}",
                        instead="call ezpz_llm.setup() before it, and finish() after all steps")
    return _CURRENT[0]


def _forget() -> None:
    _CURRENT.clear()


def setup(*, device: str | None = None, run_dir: str | Path | None = None, name: str | None = None,
          log_every: int = LOG_EVERY) -> Run:
    """Make this process a rank of whatever started it (launch, torchrun, srun, mpiexec), or of nothing. Collective.

    It replaces `init_process_group`, of which it makes the same process group; one that is there already is used.
    A second call gives the same run.

    Args:
        device: "cuda", "xpu", "mps" or "cpu"; the best there is by default.
        run_dir: where the run writes; by default launch's run directory, else runs/NAME-STAMP.
        name: of such a directory; by default the script's, or "notebook".
        log_every: lines of metrics.jsonl that are reduced over ranks and written at once.

    Raises:
        UserError: broken rank variables, no device, a run directory that another run writes to, and the like.
    """
    if _CURRENT:
        return _CURRENT[0]
    if log_every < 1:
        raise UserError(f"log_every is {log_every}", where="ezpz_llm.setup", instead="1 or more")
    clock, heartbeat = WallClock(), Heartbeat(os.environ)
    heartbeat.beat(RENDEZVOUS)
    with clock.span("set-up"):
        dist = set_up_rank(device=device, run_dir=None if run_dir is None else Path(run_dir),
                           name=name or _name_of(Path(sys.argv[0]).stem), keeps_memory=False)
        environment = run_environment(dist)
        if dist.is_main:
            dist.side.update_record(dist.run_dir, environment=environment, config={"log_every": log_every})
    heartbeat.beat(STARTING)
    run = Run(dist, StepTimeline(dist.device), heartbeat, clock, log_every)
    run.begin_step()
    _CURRENT.append(run)
    return run


def _name_of(program: str) -> str:
    """The name of a run of this program."""
    return "notebook" if program == "ipykernel_launcher" else program or "run"


def phase(name: str) -> AbstractContextManager[None]:
    """Count the time inside to a part of the step, or to what comes between two steps.

    Args:
        name: "data", "forward", "backward" or "optimizer" of the step in progress (a wrapped model times the last
            three by itself); "evaluation" or "checkpoints" between `record` and the next batch, which no step time
            has in it then.

    Raises:
        UserError: another name, or no run.
    """
    return current("phase").phase(name)


def record(step: int, *, loss: float | Tensor, tokens: int | None = None, lr: float | None = None,
           grad_norm: float | Tensor | None = None, **figures: float) -> None:
    """Put a finished step on a line of metrics.jsonl, with its time since the call before. Collective.

    Nothing waits for the loss, which stays on its device: every `log_every` calls all ranks reduce what they have.

    Args:
        step: from 1, rising. Where only every k-th step is recorded, times are means over k steps.
        loss: of this rank; the line has the mean over ranks.
        tokens: of this rank's step, or its samples where they are no tokens. Rates are of all ranks together.
        lr, grad_norm: a single wrapped model gives its own by default.
        figures: other members of the line, rank 0's: val_loss and what you like.

    Raises:
        UserError: no run, a step that is recorded already, or a run directory with another run's steps.
    """
    current("record").record(step, loss, tokens, lr, grad_norm, figures)


def finish() -> None:
    """Write what waits, draw and print loss and throughput, and leave the process group that `setup` made.

    Collective. run.json, plots/ and report.html are complete after it.

    Raises:
        UserError: no run.
    """
    run = current("finish")
    _forget()
    run.finish()
