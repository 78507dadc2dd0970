"""The one place that says what a step's work is and what a rate means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ezpz_llm.observe.peaks import Ceiling, Peak


@dataclass(frozen=True)
class Rates:
    """Work of one step, to turn its time into rates.

    `flops_per_second_per_device` are the model's FLOPs, all products of the attention counted; `mfu` is their
    fraction of the stated peak, None where there is none, `mfu_causal` the same with only the products that the
    causal mask leaves, and `ceiling_share` their fraction of what matrix products alone reached on the device.
    """

    sequences_per_second: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    flops_per_second_per_device: float | None = None
    mfu: float | None = None
    mfu_causal: float | None = None
    ceiling_share: float | None = None


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
        return self.micro_batch * self.accumulation * self.dp_size

    @property
    def tokens(self) -> int:
        return self.sequences * self.block_size

    def rates(self, step_time_s: float) -> Rates:
        """Rates at `step_time_s` seconds a step, over all ranks unless the name says otherwise."""
        tokens_per_second = self.tokens / step_time_s
        per_device = tokens_per_second / self.world_size
        flops = None if self.flops_per_token is None else per_device * self.flops_per_token
        causal = None if self.causal_flops_per_token is None else per_device * self.causal_flops_per_token
        peak = None if self.peak is None else self.peak.flops
        ceiling = None if self.ceiling is None else self.ceiling.flops
        return Rates(self.sequences / step_time_s, tokens_per_second, per_device, flops, _share(flops, peak),
                     _share(causal, peak), _share(flops, ceiling))


def _share(flops: float | None, of: float | None) -> float | None:
    return None if flops is None or of is None else flops / of
