"""Throughput of a run: work and rates of a step, progress lines, and the final summary."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ezpz_llm.core.base.label_rows import align_rows
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.summary_record import Bubble, Rates, Spread, Straggler, Summary
from ezpz_llm.launcher.basics.variables import LIVE_LINE
from ezpz_llm.training.observe.history import (
    OTHER,
    PHASES,
    History,
    finite_or_none,
    is_finite,
    last_loss,
    read_history,
    spread,
    steady_steps,
)
from ezpz_llm.training.observe.tables import percentages, table, table_text, wall_table
from ezpz_llm.training.observe.terminal import can_redraw, terminal_width

if TYPE_CHECKING:
    from ezpz_llm.training.observe.peaks import Ceiling, Peak


@dataclass(frozen=True)
class StepWork:
    """Work of one optimizer step on all ranks.

    Each of `dp_size` data-parallel ranks processes `accumulation` micro-batches of `micro_batch` sequences with
    `block_size` tokens. Tensor- and pipeline-parallel peers add devices but no tokens, so `world_size` may be
    larger than `dp_size`.
    """

    micro_batch: int
    accumulation: int
    dp_size: int
    world_size: int
    block_size: int
    flops_per_token: float | None = None
    peak: Peak | None = None
    causal_flops_per_token: float | None = None
    ceiling: Ceiling | None = None

    @property
    def sequences(self) -> int:
        """Sequences per step, over all ranks."""
        return self.micro_batch * self.accumulation * self.dp_size

    @property
    def tokens(self) -> int:
        """Tokens per step, over all ranks."""
        return self.sequences * self.block_size

    def rates(self, step_time_s: float, tokens: float | None = None) -> Rates:
        """Return the rates at a step time: totals over all ranks, and rates per device.

        Args:
            tokens: tokens of the step, if the number differs from `self.tokens`.
        """
        tokens = self.tokens if tokens is None else tokens
        if not tokens:
            return Rates()
        tokens_per_second = tokens / step_time_s
        per_device = tokens_per_second / self.world_size
        flops = None if self.flops_per_token is None else per_device * self.flops_per_token
        causal = None if self.causal_flops_per_token is None else per_device * self.causal_flops_per_token
        peak = None if self.peak is None else self.peak.flops
        ceiling = None if self.ceiling is None else self.ceiling.flops
        return Rates(tokens_per_second, per_device, flops, _share(flops, peak), _share(causal, peak),
                     _share(flops, ceiling))


def _share(flops: float | None, of: float | None) -> float | None:
    return None if flops is None or of is None else flops / of


def format_number(value: float) -> str:
    """Format a number with three digits and a unit, such as 23.2k or 1.04M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _or_empty(value: float | None) -> str:
    return "" if value is None else format_number(value)


def format_duration(seconds: float) -> str:
    """Format a duration as minutes and seconds, with hours or days if needed: 0:07, 3:21, 1:02:11, 2d 03:15."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60 % 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


_LIVE_EVERY_S = 1.0
_PLAIN_EVERY_S = 30.0
_RECENT_STEPS = 20
"""Number of most recent steps from which the live line estimates speed and remaining time."""


class Progress:
    """Printer of one aligned line per flush, for its last step, and per step with an evaluation.

    Loss, learning rate, and gradient norm are those of the step. The step time is the median since the previous
    line, and the rates use this median. The remaining time is estimated from all time since the first line,
    including evaluations and checkpoints, and is therefore empty on the first line.

    Args:
        width: width of the terminal in columns. The least important columns are omitted if they do not fit.
        clock: monotonic clock in seconds.
        is_live: show a live line between two regular lines (default: if stdout is a terminal).
    """

    _OPTIONAL_COLUMNS = ("tok/s/dev", "lr", "grad norm", "MFU", "elapsed", "tok/s")
    """Columns that are omitted on a narrow terminal, in this order."""

    def __init__(self, total_steps: int, work: StepWork, width: int | None = None,
                 clock: Callable[[], float] = time.monotonic, is_live: bool | None = None) -> None:
        self._total_steps = total_steps
        self._work = work
        self._step_width = max(len("step"), 2 * len(str(total_steps)) + 1)
        self._times: list[float] = []
        self._legend_shown = False
        self._width = terminal_width() if width is None else width
        self._clock = clock
        self._began = clock()
        self._first: tuple[int, float] | None = None
        self._last_step = 0
        self._redraws = can_redraw() if is_live is None else is_live
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)
        self._shown_at = self._began
        self._is_live_line_shown = False

    def tick(self, step: int) -> None:
        """Print the progress between two regular lines: every second on a terminal, every 30 s in a log.

        Uses the clock of this process, without synchronizing the device.
        """
        now = self._clock()
        if self._recent and step <= self._recent[-1][0]:
            self._recent.clear()
        self._recent.append((step, now))
        if len(self._recent) < 2 or now - self._shown_at < (_LIVE_EVERY_S if self._redraws else _PLAIN_EVERY_S):
            return
        self._shown_at = now
        first, since = self._recent[0]
        step_s = (now - since) / (step - first)
        rate = self._work.rates(step_s).tokens_per_second
        text = (f"{step}/{self._total_steps}".rjust(self._step_width)
                + f"  {step / self._total_steps:4.0%}  elapsed {format_duration(now - self._began)}"
                f"  left {format_duration(step_s * (self._total_steps - step))}"
                + (f"  {format_number(rate)} tok/s" if rate is not None else ""))
        if self._redraws:
            print(f"{LIVE_LINE}{text[:self._width - 1]}\r", end="", flush=True)
            self._is_live_line_shown = True
        else:
            print(text, flush=True)

    def erase(self) -> None:
        """Erase the live line before other output is printed."""
        if self._is_live_line_shown:
            self._is_live_line_shown = False
            print(f"{LIVE_LINE}\r", end="", flush=True)

    def show(self, lines: Sequence[dict[str, Any]]) -> None:
        """Print the progress lines of the steps that were just flushed."""
        self.erase()
        for line in lines:
            self._times.append(line["step_time_s"])
            if line is lines[-1] or "val_loss" in line:
                columns = self._fit_columns(self._columns(line))
                if not self._legend_shown:
                    self._legend_shown = True
                    print("  ".join(name.rjust(width) for name, width, _ in columns), flush=True)
                print("  ".join(cell.rjust(width) for _, width, cell in columns).rstrip(), flush=True)
                self._times.clear()

    def _fit_columns(self, columns: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
        for name in self._OPTIONAL_COLUMNS:
            if sum(width + 2 for _, width, _ in columns) - 2 <= self._width:
                break
            columns = [column for column in columns if column[0] != name]
        return columns

    def _left_s(self, step: int, now: float) -> float | None:
        """Estimate the seconds to the last step; None on the first line. The estimate restarts after a rollback."""
        was_rewound, self._last_step = step <= self._last_step, step
        if self._first is None or was_rewound:
            self._first = (step, now)
            return None
        first_step, since = self._first
        return (now - since) / (step - first_step) * (self._total_steps - step)

    def _columns(self, line: dict[str, Any]) -> list[tuple[str, int, str]]:
        """Return the name, width, and text of each column."""
        seconds, now = statistics.median(self._times), self._clock()
        self._shown_at = now
        left_s = self._left_s(line["step"], now)
        rates = self._work.rates(seconds)
        mfu = "" if rates.mfu is None else f"{rates.mfu:.1%}" if rates.mfu <= 1 else "error"
        return [
            ("step", self._step_width, f"{line['step']}/{self._total_steps}"),
            ("done", 4, f"{line['step'] / self._total_steps:.0%}"),
            ("loss", 8, _fixed(line["loss"], 8, 4)),
            ("lr", 8, f"{line['lr']:.2e}"),
            ("grad norm", 9, _fixed(line["grad_norm"], 9, 3)),
            ("ms/step", 8, f"{seconds * 1e3:.1f}"),
            ("tok/s", 7, _or_empty(rates.tokens_per_second)),
            ("tok/s/dev", 9, _or_empty(rates.tokens_per_second_per_device)),
            *([("MFU", 6, mfu)] if self._work.peak is not None else []),
            ("elapsed", 8, format_duration(now - self._began)),
            ("left", 8, "" if left_s is None else format_duration(left_s)),
            ("val loss", 8, _fixed(line["val_loss"], 8, 4) if "val_loss" in line else ""),
        ]


def _fixed(value: float | None, width: int, digits: int) -> str:
    if value is None:
        return "inf/nan"
    # Scientific notation for a value too large for its column, such as an exploding gradient norm.
    text = f"{value:.{digits}f}"
    return text if len(text) <= width else f"{value:.2e}"


_EVALUATION_LIMIT = 0.2
"""Fraction of wall time in evaluation above which the summary warns."""
_MIN_STEPS_TO_LEARN = 20  # steps; a shorter run may end during warm-up

_COMMUNICATION = ("  The phases do not separate communication: it is in backward and optimizer, and in forward\n"
                  "  if layers are sharded.\n")


def summarize(run_dir: RunDir, work: StepWork, wall: Mapping[str, float], *, first_step: int = 0,
              unigram_entropy: float | None = None, straggler: Straggler | None = None,
              bubble: Bubble | None = None, history: History | None = None) -> Summary | None:
    """Summarize the steps after `first_step` in metrics.jsonl; return None if there are none.

    Args:
        wall: breakdown of the run's wall time in seconds.
        unigram_entropy: unigram entropy of the corpus in nats per token.
        straggler, bubble: see MetricsLog.
        history: lines of the run, if they have been read.
    """
    history = read_history(run_dir) if history is None else history
    rows = history.select(step > first_step for step in history.steps)
    if not len(rows):
        return None
    timed = steady_steps(rows)
    step_times = timed.column("step_time_s")
    phases = {phase: timed.column(f"{phase}_s") for phase in (*PHASES, OTHER)}
    step_time = spread(step_times)
    # A NaN validation loss is stored as null. Its number of tokens shows that the evaluation took place.
    evaluated = rows.select(math.isfinite(tokens) or math.isfinite(loss) for tokens, loss
                            in zip(rows.column("val_tokens"), rows.column("val_loss"), strict=True))
    return Summary(
        first_step=first_step,
        steps=rows.steps[-1],
        timed_steps=len(timed),
        skipped_steps=sum(value > 0 for value in rows.column("skipped")),
        first_loss=finite_or_none(history.column("loss")[0]),
        last_loss=last_loss(rows),
        val_loss=finite_or_none(evaluated.column("val_loss")[-1]) if len(evaluated) else None,
        val_step=evaluated.steps[-1] if len(evaluated) else None,
        unigram_entropy=unigram_entropy,
        step_time=step_time,
        phase_s={phase: spread(seconds) for phase, seconds in phases.items()},
        phase_share={phase: sum(seconds) / sum(step_times) for phase, seconds in phases.items()},
        **asdict(work.rates(step_time.median)),
        wall=dict(wall),
        straggler=straggler,
        bubble=bubble,
    )


def breakdown_tables(summary: Summary, world_size: int, *, rich: bool = False) -> str:
    """Return two tables: the step-time breakdown and the wall-time breakdown."""
    rows = [[phase, *_milliseconds(summary.phase_s[phase]), share] for phase, share
            in zip(summary.phase_share, percentages(list(summary.phase_share.values())), strict=True)]
    text = table(f"Step-time breakdown (rank 0, {summary.timed_steps} steady steps)",
                 ("phase", "median ms", "10 %", "90 %", "share"), rows,
                 footer=("step", *_milliseconds(summary.step_time), "100.0 %"), rich=rich)
    if world_size > 1:
        text += _COMMUNICATION
    if summary.straggler is not None:
        slow = summary.straggler
        text += (f"  Slowest: rank {slow.rank}, {slow.seconds * 1e3:.1f} ms per step in data and forward "
                 f"(median of all ranks: {slow.median_s * 1e3:.1f} ms).\n")
    if summary.bubble is not None:
        text += _bubble(summary.bubble)
    return text + "\n" + table_text(wall_table("Wall-time breakdown", summary.wall), rich=rich)


def _bubble(bubble: Bubble) -> str:
    stages = ", ".join(f"{idle:.1%}" for idle in bubble.idle)
    return (f"  Pipeline stages idle (in other, or waiting in optimizer): {stages}; {bubble.mean:.1%} on average.\n"
            f"  (p-1)/(m+p-1) is {bubble.expected:.1%}; increase --gradient-accumulation-steps to reduce it.\n")


def final_text(summary: Summary, run_dir: RunDir, profile: Path | None = None,
               peak_bytes: int | None = None, width: int | None = None) -> str:
    """Return the summary of a run in about a dozen lines: losses, throughput, time, memory, and files.

    Args:
        profile: path of the HTML page of the Python profile, if there is one.
        peak_bytes: highest peak memory of a rank.
        width: width of the terminal in columns.
    """
    median, low, high = _milliseconds(summary.step_time)
    mfu, flops = summary.mfu, summary.flops_per_second_per_device
    shares = ", ".join(f"{share:.0%} {name}" for name, share in _largest(summary.phase_share))
    wall = sum(summary.wall.values())
    wall_shares = ", ".join(f"{seconds / wall:.0%} {name}" for name, seconds in _largest(summary.wall))
    # There is no page without matplotlib.
    files = [*([run_dir.report.name] if run_dir.report.exists() else []), run_dir.metrics.name,
             f"{run_dir.plots.name}/", *([str(profile.relative_to(run_dir.path))] if profile else [])]
    lines = {
        "training loss": f"{_loss(summary.first_loss)} at first, {_loss(summary.last_loss)} at the end "
                         f"(step {summary.steps})",
        "validation loss": _validation(summary) if summary.val_step is not None else "",
        "skipped steps": f"{summary.skipped_steps} (no parameter update)" if summary.skipped_steps else "",
        "step time": f"{median} ms median; {low} to {high} ms for the middle 80 %",
        "step breakdown": shares,
        "tokens/s": "" if summary.tokens_per_second is None else (
            f"{_or_empty(summary.tokens_per_second)}, "
            f"{_or_empty(summary.tokens_per_second_per_device)} per device"),
        "MFU": "" if mfu is None or mfu > 1 else f"{mfu:.1%} of the vendor's peak" + (
            "" if summary.mfu_causal is None else f"; {summary.mfu_causal:.1%} with causal attention counted"),
        "FLOP/s": "" if flops is None else f"{format_number(flops)} per device" + (
            "" if summary.ceiling_share is None or summary.ceiling_share > 1 else
            f", {summary.ceiling_share:.1%} of the matmul peak measured here"),
        "peak memory": "" if peak_bytes is None else f"{peak_bytes / 1e9:.2f} GB (maximum over ranks)",
        "run time": f"{format_duration(wall)}: {wall_shares}",
        "files": ", ".join(files), "in": str(run_dir.path)}
    text = align_rows(((name, value) for name, value in lines.items() if value),
                      terminal_width() if width is None else width, 16)
    return text + "".join(f"warning: {warning}\n" for warning in _warnings(summary))


def _warnings(summary: Summary) -> list[str]:
    """Warnings about implausible or unfavorable numbers."""
    warnings = []
    evaluation = summary.wall.get("evaluation", 0.0) / max(sum(summary.wall.values()), 1e-9)
    if evaluation > _EVALUATION_LIMIT:
        warnings.append(f"evaluation took {evaluation:.0%} of the wall time (increase --eval-every or decrease "
                        "--eval-tokens)")
    if summary.mfu is not None and summary.mfu > 1:
        warnings.append(f"an MFU of {summary.mfu:.2f} is impossible: the step time, the FLOP count, or the peak "
                        "is wrong")
    if summary.ceiling_share is not None and summary.ceiling_share > 1:
        warnings.append("measured matmul peak is unreliable (machine was busy)")
    if summary.steps >= _MIN_STEPS_TO_LEARN and not (is_finite(summary.first_loss) and is_finite(summary.last_loss)
                                               and summary.last_loss < summary.first_loss):
        warnings.append("the loss did not decrease: the throughput of this run is not meaningful")
    return warnings


def _largest(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the parts in descending order, without parts that would be printed as 0 %."""
    whole = sum(parts.values())
    return sorted(((name, part) for name, part in parts.items() if part > 0.005 * whole), key=lambda item: -item[1])


def _validation(summary: Summary) -> str:
    text = f"{_loss(summary.val_loss)} (step {summary.val_step})"
    if summary.unigram_entropy and is_finite(summary.val_loss):
        text += f"; token frequencies alone give {summary.unigram_entropy:.4f}"
    return text


def _loss(value: float | None) -> str:
    return f"{value:.4f}" if is_finite(value) else "not finite"


def _milliseconds(values: Spread) -> tuple[str, str, str]:
    return f"{values.median * 1e3:.1f}", f"{values.low * 1e3:.1f}", f"{values.high * 1e3:.1f}"
