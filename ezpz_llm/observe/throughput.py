"""Throughput: the work of a step, its rates, and the progress line printed while a run trains."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ezpz_llm.observe.peaks import Ceiling, Peak


@dataclass(frozen=True)
class Rates:
    """Work of one step, to turn its time into rates.

    `flops_per_second_per_device` are the model's FLOPs, all products of the attention counted; `mfu` is their
    fraction of the stated peak, None where there is none, `mfu_causal` the same with only the products that the
    causal mask leaves, and `ceiling_share` their fraction of what matrix products alone reached on the device.
    """

    tokens_per_second: float
    tokens_per_second_per_device: float
    flops_per_second_per_device: float | None
    mfu: float | None
    mfu_causal: float | None
    ceiling_share: float | None


@dataclass(frozen=True)
class StepWork:
    """The work of one optimizer step of the whole run.

    `micro_batch` sequences of `block_size` tokens on each of `dp_size` data-parallel ranks, `accumulation` times.
    Tensor- and pipeline-parallel peers add devices, no tokens, so `world_size` may be larger than `dp_size`.
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
        """Sequences of a step, of all ranks."""
        return self.micro_batch * self.accumulation * self.dp_size

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all ranks."""
        return self.sequences * self.block_size

    def rates(self, step_time_s: float) -> Rates:
        """Rates at `step_time_s` seconds a step, over all ranks unless the name says otherwise."""
        tokens_per_second = self.tokens / step_time_s
        per_device = tokens_per_second / self.world_size
        flops = None if self.flops_per_token is None else per_device * self.flops_per_token
        causal = None if self.causal_flops_per_token is None else per_device * self.causal_flops_per_token
        peak = None if self.peak is None else self.peak.flops
        ceiling = None if self.ceiling is None else self.ceiling.flops
        return Rates(tokens_per_second, per_device, flops, _share(flops, peak), _share(causal, peak),
                     _share(flops, ceiling))


def _share(flops: float | None, of: float | None) -> float | None:
    return None if flops is None or of is None else flops / of


def short_number(value: float) -> str:
    """Three digits and a unit: 23.2k, 1.04M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


class Progress:
    """Prints one aligned line for the last step of a flush and for every step that evaluated.

    Loss, learning rate and norm are that step's; the time is the median since the previous line, and the rates are
    those of that median.
    """

    def __init__(self, total_steps: int, work: StepWork) -> None:
        self._total_steps = total_steps
        self._work = work
        self._step_width = max(len("step"), 2 * len(str(total_steps)) + 1)
        self._times: list[float] = []
        self._legend_shown = False

    def show(self, lines: Sequence[dict[str, Any]]) -> None:
        """Print what the metrics lines of a flush have to say."""
        for line in lines:
            self._times.append(line["step_time_s"])
            if line is lines[-1] or "val_loss" in line:
                columns = self._columns(line)
                if not self._legend_shown:
                    self._legend_shown = True
                    print("  ".join(name.rjust(width) for name, width, _ in columns), flush=True)
                print("  ".join(cell.rjust(width) for _, width, cell in columns).rstrip(), flush=True)
                self._times.clear()

    def _columns(self, line: dict[str, Any]) -> list[tuple[str, int, str]]:
        """Name, width and text of each column."""
        seconds = statistics.median(self._times)
        rates = self._work.rates(seconds)
        mfu = "" if rates.mfu is None else f"{rates.mfu:.1%}" if rates.mfu <= 1 else "error"
        return [
            ("step", self._step_width, f"{line['step']}/{self._total_steps}"),
            ("loss", 8, _fixed(line["loss"], 8, 4)),
            ("lr", 8, f"{line['lr']:.2e}"),
            ("grad norm", 9, _fixed(line["grad_norm"], 9, 3)),
            ("ms/step", 8, f"{seconds * 1e3:.1f}"),
            ("tok/s", 7, short_number(rates.tokens_per_second)),
            ("tok/s/dev", 9, short_number(rates.tokens_per_second_per_device)),
            *([("MFU", 6, mfu)] if self._work.peak is not None else []),
            ("val loss", 8, _fixed(line["val_loss"], 8, 4) if "val_loss" in line else ""),
        ]


def _fixed(value: float | None, width: int, digits: int) -> str:
    if value is None:
        return "inf/nan"
    # A value too large for its column (an exploding norm) keeps its order of magnitude instead of its decimals.
    text = f"{value:.{digits}f}"
    return text if len(text) <= width else f"{value:.2e}"
