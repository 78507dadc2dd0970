"""Reason why launch ended a run, kept in run.json and used by the shims (standard library only)."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    SignalName = str
else:
    SignalName = Literal[tuple(signal.Signals.__members__)]

SIGNAL = "signal"
"""Kind of a stop after launch received a signal."""


@dataclass(frozen=True)
class Stop:
    """Reason why launch ended a run.

    Attributes:
        kind: "signal" (launch received `signal`), "idle" (no sign of life), "rank" (a rank failed and its peers
            continued), "refused" (the launcher reported that it cannot start a rank) or "late" (a rank did not
            start in time).
        text: the reason in one line.
        ranks: the ranks that gave no sign of life.
    """

    kind: str
    text: str = ""
    signal: SignalName | None = None
    ranks: tuple[int, ...] = ()
