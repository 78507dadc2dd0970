"""Optimizers of the table in `ezpz_llm.layout.optimizers`, built: torch's AdamW, and bitsandbytes' in 8 bits.

Optional packages are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ezpz_llm.base.errors import UserError
from ezpz_llm.layout.optimizers import OPTIMIZERS


def _adamw_8bit(groups: list[dict[str, Any]], settings: dict[str, Any], fused: bool) -> torch.optim.Optimizer:
    """AdamW with 8-bit moments, by bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861).

    A block of 256 elements shares one scale; tensors with fewer than 4096 elements keep moments in fp32.

    Raises:
        UserError: bitsandbytes has no such step for the device.
    """
    import bitsandbytes

    kind = groups[0]["params"][0].device.type
    if kind not in ("cuda", "xpu", "cpu"):
        raise UserError(f"bitsandbytes has no 8-bit AdamW for {kind}", where="--optimizer adamw_8bit",
                        instead="--optimizer adamw")
    return bitsandbytes.optim.AdamW8bit(groups, **settings)


BUILD: dict[str, Callable[[list[dict[str, Any]], dict[str, Any], bool], torch.optim.Optimizer]] = {
    "adamw": lambda groups, settings, fused: torch.optim.AdamW(groups, fused=fused, **settings),
    "adamw_unfused": lambda groups, settings, fused: torch.optim.AdamW(groups, fused=False, **settings),
    "adamw_8bit": _adamw_8bit,
}
"""Parameter groups, settings and whether a fused kernel is wanted, to the optimizer of each row."""


def make_optimizer(groups: list[dict[str, Any]], settings: dict[str, Any], name: str = "adamw",
                   fused: bool = True) -> torch.optim.Optimizer:
    """Build an optimizer of the table.

    Args:
        settings: lr, betas and eps.
        fused: False where a fused kernel must not be used.

    Raises:
        UserError: it does not run on the device of the parameters.
    """
    optimizer = BUILD[name](groups, settings, fused)
    optimizer.ezpz_name = name
    return optimizer


def state_kinds(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The kinds of state that an optimizer has, by the table; Adam's for one that was not made here."""
    return tuple(OPTIMIZERS[getattr(optimizer, "ezpz_name", "adamw")].state)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step, for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


# The state of the 8-bit optimizer.
_BLOCK = 256
_MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}


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
def dequantized_moments(optimizer: Any, group: dict[str, Any],
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
