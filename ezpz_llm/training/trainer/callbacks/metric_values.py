"""Checks of the metrics that callbacks log (imports no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from ezpz_llm.core.base import is_one_line, shorten_value
from ezpz_llm.core.base.schema import MAX_INTEGER
from ezpz_llm.training.observe.history import ON_EACH_LINE, ON_SOME_LINES

RESERVED_METRICS = frozenset(("step", *ON_EACH_LINE, *ON_SOME_LINES))
"""Metrics of the trainer, which callbacks cannot replace."""
_MAX_NAME = 100


def check_metric(name: Any, value: Any) -> None:
    """Check a metric that a callback logs: a number, a 0-d tensor, or None.

    Raises:
        ValueError: the name or the value is invalid.
    """
    if not isinstance(name, str) or not name or not is_one_line(name) or len(name) > _MAX_NAME:
        raise ValueError(f"the metric's name is {shorten_value(name)}, but must be a string of one line, up to "
                         f"{_MAX_NAME} characters")
    if isinstance(value, Real):
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"{name} has more than 64 bits")
        _ = float(value)  # OverflowError for a fraction beyond the floats
        return
    if value is None:
        return
    if not callable(getattr(value, "numel", None)):
        raise ValueError(f"{name} is {shorten_value(value)}, but must be a number or a tensor of one element")
    if value.numel() != 1:
        raise ValueError(f"{name} has {value.numel()} elements, not one")
    if value.is_complex() or value.is_meta:
        raise ValueError(f"{name} is a complex or a meta tensor, but must be a real number")


class GuardedLines:
    """Lines of metrics.jsonl while a callback may add to them.

    Raises:
        ValueError: `check` found a changed metric of the trainer, or an invalid new one.
    """

    def __init__(self, lines: Sequence[dict[str, Any]]) -> None:
        self._lines = lines
        self._before = [dict(line) for line in lines]

    def check(self) -> None:
        """Check the changes of a callback."""
        for before, line in zip(self._before, self._lines, strict=True):
            for name in before.keys() | line.keys():
                if name in line and name in before and line[name] is before[name]:
                    continue
                if name in RESERVED_METRICS:
                    raise ValueError(f"{name} is a metric of the trainer, and must not be changed")
                if name in line:
                    check_metric(name, line[name])
