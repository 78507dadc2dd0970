"""Ranks that are still to come: who they are, and whether the launcher says that they cannot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ezpz_llm.launch.failures import Stop
from ezpz_llm.launch.failures.log_patterns import ENDED, NOT_STARTED, WRONG_WORLD, LogMatch, read_matches
from ezpz_llm.launch.failures.ranks import fold_places
from ezpz_llm.rundir.paths import RunDir

NAMED_AFTER_S = 60.0
"""Ranks that have not come by then are named."""
_AGAIN_AFTER_S = 30.0
"""Ranks of a large run come one by one: those that are left are named no more often than this."""
_WORDS_AFTER_S = 2.0
"""From the launcher's words to the end of the run: a rank may be on its way, or more hosts may be named."""
_MOST_BYTES = 1 << 18
"""Rank 0's standard error is in the launcher's log too: what a chatty program says is no longer read."""


class Arrivals:
    """Follows the start of one run, whose agents report the ranks that have come (HeartbeatMonitor.missing).

    Args:
        hosts: of each rank that is to come.
        limit_s: how long ranks may take to come; None for ever.
        named_after_s: when those that have not come are named for the first time.
    """

    def __init__(self, hosts: Mapping[int, str], run_dir: RunDir, limit_s: float | None,
                 named_after_s: float = NAMED_AFTER_S) -> None:
        self._world_size = len(hosts)
        self._log = run_dir.launcher_log
        self._log_of_rank_0 = run_dir.rank_log(0)
        self._limit_s = limit_s
        self._named_after_s = named_after_s
        self._named: frozenset[int] = frozenset()
        self._name_at = named_after_s
        self._read_bytes = 0
        self._refused: LogMatch | None = None
        self._refused_at_s = 0.0

    def news(self, missing: Mapping[int, str], waited_s: float) -> str | None:
        """What is to be told of the ranks in `missing` after `waited_s` seconds; None if nothing is new."""
        if not missing and self._named:
            self._named = frozenset()
            return f"all {self._world_size} ranks have started, the last after {waited_s:.0f} s"
        if not missing or waited_s < self._name_at or self._named == missing.keys():
            return None
        self._named, self._name_at = frozenset(missing), waited_s + _AGAIN_AFTER_S
        ended = f"; the run is ended after {self._limit_s:.0f} s (--timeout-start)" if self._limit_s else ""
        return (f"{len(missing)} of {self._world_size} ranks have not started after {waited_s:.0f} s: "
                f"{fold_places(missing)}{ended}")

    def verdict(self, missing: Mapping[int, str], waited_s: float) -> Stop | None:
        """Why the run is to be ended: a rank in `missing` cannot start, as the launcher says, or took too long."""
        if not missing:
            return None
        if self._refused is None and (refused := self._refusal(missing)):
            self._refused, self._refused_at_s = refused, waited_s
        if self._refused is not None and waited_s - self._refused_at_s > _WORDS_AFTER_S:
            return Stop("refused", f"{self._refused.text}; {fold_places(missing)} cannot start; the run is ended")
        if self._limit_s is not None and waited_s > self._limit_s:
            return Stop("late", f"{fold_places(missing)} did not start within {self._limit_s:g} s"
                                " (--timeout-start); the run is ended")
        return None

    def _refusal(self, missing: Mapping[int, str]) -> LogMatch | None:
        """The launcher's words about a rank that has not come; of ranks that have come their records tell. Rank 0's
        standard error is in the same log, and in its own."""
        try:
            if self._log.stat().st_size == self._read_bytes or self._read_bytes >= _MOST_BYTES:
                return None
        except OSError:
            return None
        text = _head(self._log)
        self._read_bytes = len(text)
        own = " ".join(_head(self._log_of_rank_0).decode(errors="replace").split())
        said = [one for one in read_matches(text.decode(errors="replace")) if one.text not in own]
        plain = [one for one in said if one.kind in (NOT_STARTED, WRONG_WORLD)]
        ended = [one for one in said if one.kind == ENDED and missing.keys() & set(one.ranks)]
        return next(iter((*plain, *ended)), None)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return b""
