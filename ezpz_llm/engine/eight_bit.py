"""AdamW with its moments in 8 bits, by bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861).

A block of 256 elements shares one scale; tensors with fewer than 4096 elements keep moments in fp32. What is
optional is imported where it is used.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from ezpz_llm.base.errors import UserError
from ezpz_llm.layout.layout import Layout

if TYPE_CHECKING:
    import torch

Optimizer = Literal["adamw", "adamw_unfused", "adamw_8bit"]
"""AdamW in one fused kernel; an operation at a time; and with moments in 8 bits."""

_BLOCK = 256
_MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}


def check_optimizer(optimizer: Optimizer, layout: Layout) -> None:
    """Refuse an optimizer that a layout cannot have, or that is not installed (imports no torch).

    Raises:
        UserError: says why.
    """
    where, instead = f"--optimizer {optimizer}", "--optimizer adamw"
    if optimizer != "adamw" and layout.zero.offload_optimizer is not None:
        raise UserError("offloaded state is stepped by DeepSpeed's own AdamW on the host", where=where,
                        instead=f"{instead}, or a layout without offload")
    if optimizer != "adamw_8bit":
        return
    if layout.tp > 1 or layout.pp > 1:
        raise UserError("with moments in 8 bits, copies of a parameter on tensor-parallel ranks or pipeline stages "
                        "would come apart: a block's scale depends on its neighbours", where=where, instead=instead)
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("bitsandbytes is not installed", where=where,
                        instead=f"pip install 'ezpz_llm[8bit]', or {instead}")


def make_adamw_8bit(groups: list[dict[str, Any]], adam: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer.

    Raises:
        UserError: bitsandbytes has no such step for the device.
    """
    import bitsandbytes

    kind = groups[0]["params"][0].device.type
    if kind not in ("cuda", "xpu", "cpu"):
        raise UserError(f"bitsandbytes has no 8-bit AdamW for {kind}", where="--optimizer adamw_8bit",
                        instead="--optimizer adamw")
    return bitsandbytes.optim.AdamW8bit(groups, **adam)


def has_eight_bits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether moments may be in 8 bits."""
    return hasattr(optimizer, "name2qmap")


def codes(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is stored of both moments, in the parameter's shape: fp32 where it is small, else 8 bits."""
    state = optimizer.state[parameter]
    if not state:
        _begin(optimizer, group, parameter)
    return {kind: state[f"state{number}"] for kind, number in _MOMENTS.items()}


@contextmanager
def moments_at_hand(optimizer: Any, group: dict[str, Any],
                    parameter: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    """Both moments in the parameter's shape and in fp32; what was written to them is rounded when one leaves.

    Reading changes nothing. Written back as they were read, they are the same but for the last place of some.
    """
    from bitsandbytes import functional

    stored = codes(optimizer, group, parameter)
    state = optimizer.state[parameter]
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


def _begin(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
    """Make the moments that the first step would make, zero."""
    # It looks the parameter up among its group's, where DeepSpeed's stage 3 has it only while it steps it.
    kept, group["params"] = group["params"], [parameter]
    try:
        number = next(number for number, one in enumerate(optimizer.param_groups) if one is group)
        optimizer.init_state(group, parameter, number, 0)
    finally:
        group["params"] = kept
