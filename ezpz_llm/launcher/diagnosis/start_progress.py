"""Progress of a start: what the ranks do until the first step."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.core.base import group_by_key
from ezpz_llm.launcher.basics.hostlist import rank_ranges
from ezpz_llm.launcher.basics.variables import BUILDING, COMPILING, LOADING, RENDEZVOUS, STARTING
from ezpz_llm.launcher.diagnosis.liveness import RankLife

_IMPORTING = "importing packages"
_PHASES = (_IMPORTING, RENDEZVOUS, LOADING, BUILDING, STARTING, COMPILING)
"""Phases until the first step, in order."""
_FIRST_S, _EVERY_S = 30.0, 30.0


class StartProgress:
    """Messages about a start that takes long: which ranks are in which phase."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S
        self._is_over = False
        self._last = ""

    def message(self, ranks: Sequence[RankLife], waited_s: float) -> str | None:
        """Return a message, at most every 30 s and only after a change; None after a rank's first step.

        Args:
            ranks: the ranks that have not ended, as far as nodes report them.
            waited_s: seconds since the start.
        """
        phases = [(life.phase or _IMPORTING, life.rank) for life in ranks]
        if any(phase not in _PHASES for phase, _ in phases):
            self._is_over = True
        if self._is_over or not phases or waited_s < self._next_s:
            return None
        groups = group_by_key(sorted(phases, key=lambda entry: (_PHASES.index(entry[0]), entry[1])))
        text = ", ".join(f"{rank_ranges(numbers)}: {phase}" for phase, numbers in groups.items())
        if len(groups) == 1:
            text = f"all {len(ranks)} ranks: {next(iter(groups))}"
        if text == self._last:
            return None
        self._last, self._next_s = text, waited_s + _EVERY_S
        return f"no step after {waited_s:.0f} s; {text}"
