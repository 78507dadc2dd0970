"""AdamW with 8-bit moments from bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861).

Blocks of 256 elements share a scale. Tensors with fewer than 4096 elements keep fp32 moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ezpz_llm.core.base import UserError
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.optimizers import Optimizer

if TYPE_CHECKING:
    import torch

_BLOCK = 256
_MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}


class _AdamW8bit(Optimizer):

    def unsupported_reason(self, layout: Layout) -> str | None:
        """Return the reason why a layout with tensor or pipeline parallelism is not supported, or None."""
        if layout.tp == layout.pp == 1:
            return None
        return ("8-bit moments of a parameter replicated over tensor-parallel ranks or pipeline stages would "
                "diverge, because a block's scale depends on neighboring elements")

    def build(self, groups: list[dict[str, Any]], settings: dict[str, Any], fused: bool) -> torch.optim.Optimizer:
        """Build the optimizer of bitsandbytes. `fused` is ignored: it has a single kernel."""
        import bitsandbytes

        # "meta": parameters that ZeRO-3 shards get values only before the first step.
        kind = groups[0]["params"][0].device.type
        if kind not in ("cuda", "xpu", "cpu", "meta"):
            raise UserError(f"bitsandbytes has no 8-bit AdamW for {kind}", where=f"--optimizer {self.name}",
                            instead="--optimizer adamw")
        return bitsandbytes.optim.AdamW8bit(groups, **settings)

    def init_state(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
        """Create zero-initialized moments for `parameter`."""
        # bitsandbytes looks the parameter up in its group, where DeepSpeed's stage 3 has it only during its step.
        parameters, group["params"] = group["params"], [parameter]
        try:
            number = next(number for number, other in enumerate(optimizer.param_groups) if other is group)
            optimizer.init_state(group, parameter, number, 0)
        finally:
            group["params"] = parameters

    def stored(self, optimizer: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return both moments: fp32 for small parameters, else uint8 indices of codes."""
        return {kind: optimizer.state[parameter][f"state{number}"] for kind, number in _MOMENTS.items()}

    @contextmanager
    def in_fp32(self, optimizer: Any, parameter: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
        """Yield fp32 copies of both moments; changes to them are rounded and stored at exit.

        Reading changes nothing. Writing unchanged values back may change the last bit of some.
        """
        from bitsandbytes import functional

        from ezpz_llm.training.dist.torch_internals import write_count

        stored, state = self.stored(optimizer, parameter), optimizer.state[parameter]
        if "absmax1" not in state:
            yield stored
            return
        moments = {kind: functional.dequantize_blockwise(stored[kind], absmax=state[f"absmax{number}"],
                                                         code=state[f"qmap{number}"], blocksize=_BLOCK)
                   for kind, number in _MOMENTS.items()}
        versions = {kind: write_count(tensor) for kind, tensor in moments.items()}
        yield moments
        for kind, number in _MOMENTS.items():
            if write_count(moments[kind]) != versions[kind]:
                rounded, scales = _rounded(moments[kind], state[f"qmap{number}"])
                stored[kind].copy_(rounded)
                state[f"absmax{number}"].copy_(scales)


def _rounded(values: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices (uint8) of the nearest codes, in the shape of `values`, and each block's scale.

    Unlike bitsandbytes' own rounding, this reproduces values that were rounded before. The codes range from
    slightly above -1 to 1, so the sign of a block's largest value determines its scale. If both signs have the
    largest value, the negative one had been clipped.
    """
    import torch

    flat = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % _BLOCK)).view(-1, _BLOCK)
    high, low = flat.amax(dim=1), flat.amin(dim=1)
    scales = torch.where(high > -low, high / codes[-1], low / codes[0] if codes[0] < 0 else high)
    between = (codes[1:] + codes[:-1]) / 2
    numbers = torch.bucketize(flat / scales.clamp(min=1e-38)[:, None], between, out_int32=True)
    return numbers.to(torch.uint8).flatten()[:values.numel()].view(values.shape), scales


_ADAMW_8BIT = _AdamW8bit("adamw_8bit", "AdamW (8-bit moments)", {"exp_avg": 1, "exp_avg_sq": 1},
                         package="bitsandbytes", install="ezpz_llm[8bit]")
