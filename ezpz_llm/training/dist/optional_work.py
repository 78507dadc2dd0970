"""Optional work of a run, such as samples, benchmarks, and plots, whose failure is only a warning."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ezpz_llm.core.base import UserError, print_lines

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

_LEAVE_WITHIN_S = 30.0
"""Time limit for all ranks to leave a failed action. Ranks that fail in the same way leave within milliseconds, but
a rank that waits in a collective never leaves."""
_PAUSE_S = 0.01


@dataclass
class OptionalWork:
    """Runner of work that may fail without ending the run.

    Ranks report through `store`, not through a collective, because a failed rank does not know in which collective
    the other ranks wait. Without a store, the failure of a collective action ends the run.
    """

    rank: int = 0
    world_size: int = 1
    store: Store | None = None
    within_s: float = _LEAVE_WITHIN_S
    _count: int = 0

    def attempt(self, what: str, action: Callable[[], T]) -> T | None:
        """Return the result of an action without collectives, or None with a warning if it fails.

        Args:
            what: description of the action, which begins the warning: "the sample after step 6".
        """
        try:
            return action()
        except Exception as error:  # plotting, profiling and tokenizing packages raise their own types
            _warn(what, error)
            return None

    def attempt_together(self, what: str, action: Callable[[], T]) -> T | None:
        """Return the result of a collective action, or None with a warning if it fails. Every rank calls it.

        Raises:
            Exception: the action failed on this rank, and another rank still waits in one of its collectives, or
                there is no store to find out. The ranks are then out of step, and the run must end.
        """
        if self.world_size == 1:
            return self.attempt(what, action)
        if self.store is None:
            return action()
        self._count += 1
        key = f"optional/{self._count}"
        try:
            result = action()
        except Exception as error:
            first = self.store.compare_set(f"{key}/first", "", str(self.rank)).decode() == str(self.rank)
            if self.rank == 0:
                self.store.set(f"{key}/main", "failed")
            if not self._wait_until_all_left(self.store, key):
                raise
            # Print one warning, on rank 0 if it failed, since the console shows rank 0's output.
            if self.rank == 0 or (first and not self.store.check([f"{key}/main"])):
                _warn(what, error)
            return None
        self.store.add(f"{key}/out", 1)
        return result

    def try_together(self, action: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Return the result of a collective action, or its exception on this rank. Every rank calls it.

        After an exception, waits until every rank has left the action, so that the ranks can communicate again.

        Raises:
            Exception: the action failed on this rank, and another rank still waits in one of its collectives, or
                there is no store to find out. The ranks are then out of step, and the run must end.
        """
        if self.world_size > 1 and self.store is None:
            return action(), None
        self._count += 1
        key = f"optional/{self._count}"
        try:
            result = action()
        except Exception as error:
            if self.store is not None and not self._wait_until_all_left(self.store, key):
                raise
            return None, error
        if self.store is not None:
            self.store.add(f"{key}/out", 1)
        return result, None

    def _wait_until_all_left(self, store: Store, key: str) -> bool:
        """Report that this rank has left the action, and wait until every rank has."""
        out = store.add(f"{key}/out", 1)
        deadline = time.monotonic() + self.within_s
        while out < self.world_size:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
            out = store.add(f"{key}/out", 0)
        return True


def _warn(what: str, error: Exception) -> None:
    reason = error.found if isinstance(error, UserError) else f"{type(error).__name__}: {error}".rstrip(": ")
    print_lines(f"warning: {what} failed: {' '.join(reason.split())}; the run continues", file=sys.stderr)
