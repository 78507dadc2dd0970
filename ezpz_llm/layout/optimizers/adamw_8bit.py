"""AdamW with moments in 8 bits, by bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861).

A block of 256 elements shares one scale; tensors with fewer than 4096 elements keep moments in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ezpz_llm.base import UserError
from ezpz_llm.layout.layout import Layout
from ezpz_llm.layout.optimizers import Optimizer

if TYPE_CHECKING:
    import torch

_BLOCK = 256
_MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}


class _AdamW8bit(Optimizer):

    def unsupported(self, layout: Layout) -> str | None:
        if layout.tp == layout.pp == 1:
            return None
        return ("with moments in 8 bits, copies of a parameter on tensor-parallel ranks or pipeline stages "
                "would come apart: a block's scale depends on its neighbours")

    def build(self, groups: list[dict[str, Any]], settings: dict[str, Any], fused: bool) -> torch.optim.Optimizer:
        import bitsandbytes

        # "meta": what ZeRO-3 shards has no values yet. DeepSpeed gives it some before the first step.
        kind = groups[0]["params"][0].device.type
        if kind not in ("cuda", "xpu", "cpu", "meta"):
            raise UserError(f"bitsandbytes has no 8-bit AdamW for {kind}", where=f"--optimizer {self.name}",
                            instead="--optimizer adamw")
        return bitsandbytes.optim.AdamW8bit(groups, **settings)

    def begin(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
        # It looks the parameter up among its group's, where DeepSpeed's stage 3 has it only while it steps it.
        kept, group["params"] = group["params"], [parameter]
        try:
            number = next(number for number, one in enumerate(optimizer.param_groups) if one is group)
            optimizer.init_state(group, parameter, number, 0)
        finally:
            group["params"] = kept

    def stored(self, optimizer: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Both moments: fp32 where the parameter is small, else the numbers of codes."""
        return {kind: optimizer.state[parameter][f"state{number}"] for kind, number in _MOMENTS.items()}

    @contextmanager
    def in_fp32(self, optimizer: Any, parameter: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
        """Copies of both moments; what was written to them is rounded when one leaves.

        Reading changes nothing. Written back as they were read, they are the same but for the last place of some.
        """
        from bitsandbytes import functional

        stored, state = self.stored(optimizer, parameter), optimizer.state[parameter]
        if "absmax1" not in state:
            yield stored
            return
        found = {kind: functional.dequantize_blockwise(stored[kind], absmax=state[f"absmax{number}"],
                                                       code=state[f"qmap{number}"], blocksize=_BLOCK)
                 for kind, number in _MOMENTS.items()}
        versions = {kind: tensor._version for kind, tensor in found.items()}
        yield found
        for kind, number in _MOMENTS.items():
            if found[kind]._version != versions[kind]:
                rounded, scales = _rounded(found[kind], state[f"qmap{number}"])
                stored[kind].copy_(rounded)
                state[f"absmax{number}"].copy_(scales)


def _rounded(values: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers (uint8) of the nearest codes, in the shape of `values`, and each block's scale.

    Unlike bitsandbytes' own rounding it gives back what was rounded before. The codes go from a little more than -1
    up to 1, so that a block's largest value tells its scale by its sign; where both signs have it, the negative one
    had been cut.
    """
    import torch

    flat = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % _BLOCK)).view(-1, _BLOCK)
    high, low = flat.amax(dim=1), flat.amin(dim=1)
    scales = torch.where(high > -low, high / codes[-1], low / codes[0] if codes[0] < 0 else high)
    between = (codes[1:] + codes[:-1]) / 2
    numbers = torch.bucketize(flat / scales.clamp(min=1e-38)[:, None], between, out_int32=True)
    return numbers.to(torch.uint8).flatten()[:values.numel()].view(values.shape), scales


ADAMW_8BIT = _AdamW8bit("adamw_8bit", "AdamW (moments in 8 bits)", {"exp_avg": 1, "exp_avg_sq": 1},
                        package="bitsandbytes", install="ezpz_llm[8bit]")
