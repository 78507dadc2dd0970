"""Errors of torch and DeepSpeed in a backward pass that a script can avoid, in the script's terms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ezpz_llm.core.base import UserError

_OF_FREED_VALUES = ("storage of size 0", "tensor a (0)", "tensor b (0)", "must be a matrix", "once_differentiable")
"""Parts of torch's errors for a second pass through parameters that fully_shard or ZeRO-3 has freed."""


@contextmanager
def explained_pass(layout: str) -> Iterator[None]:
    """Raise a UserError in place of an error of torch or DeepSpeed with a known cause in the script."""
    try:
        yield
    except AssertionError as error:
        if "active_backward_submodules" not in str(error):
            raise
        raise UserError("a module returns an object in which ZeRO-3 finds no tensor, such as a dataclass",
                        where=f"layout {layout}",
                        instead="a tensor, tuple, list or dict as its result, or fsdp2") from error
    except RuntimeError as error:
        if not any(text in str(error) for text in _OF_FREED_VALUES):
            raise
        raise UserError("the backward pass needs values that the layout frees after the first one: the loss has a "
                        "gradient of a gradient, or shares outputs with an earlier loss", where=f"layout {layout}",
                        instead="ddp, zero1 or zero2; or the sum of the losses") from error
