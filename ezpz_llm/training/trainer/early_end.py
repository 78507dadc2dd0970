"""Early end of a run when the allocation ends or a signal arrives. All ranks agree on the step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp

from ezpz_llm.launcher.basics.messages import read_stop_order
from ezpz_llm.launcher.basics.variables import ENDS_AT_VARIABLE, RUN_ID_VARIABLE
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_reduce

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_AGREE_EVERY_S = 2.0
_MIN_RESERVED_S = 20.0
_FIRST_SAVE_S = 120.0
"""Assumed seconds per checkpoint until the first is measured, at most a tenth of the remaining time."""


def _reason(name: str) -> str:
    return "interrupted by Ctrl-C (SIGINT)" if name == signal.SIGINT.name else f"{name} was received"


@dataclass(frozen=True)
class Agreed:
    """Decision of all ranks: the reason to end here (None to continue), and whether any rank is still writing."""

    reason: str | None
    busy: bool


class EarlyEnd:
    """Collective decision, after a step, to end the run early.

    Ranks may receive a signal, or reach the time limit, at different steps. So they agree in a collective that all
    ranks enter after the same step, about every two seconds. The signal handler only records the signal.
    """

    def __init__(self, dist: Dist, env: Mapping[str, str]) -> None:
        self._dist = dist
        ends_at = env.get(ENDS_AT_VARIABLE)
        self._ends_at = float(ends_at) if ends_at else None
        self._signal = 0
        left = self._ends_at - time.time() if self._ends_at else 0.0
        self._save_s = min(_FIRST_SAVE_S, max(0.0, left) / 10)
        self._agreed_at, self._agree_after = time.monotonic(), 0
        # On the monotonic clock: setting the system clock must not change the time left.
        self._ends_at_monotonic = self._agreed_at + left
        # None before the first agreement, since a resumed run may begin at any step.
        self._agreed_after: int | None = None
        self._longest_gap_s = 0.0

    def listen(self) -> EarlyEnd:
        """Install handlers that end the run at a step boundary on SIGTERM, SIGUSR1 and Ctrl-C; they are never
        removed."""
        for number in SIGNALS:
            # In a background job (`… &`) the shell ignores SIGINT, since Ctrl-C is meant for the foreground job.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle_signal)
        return self

    def _handle_signal(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
        if number == signal.SIGINT and self._dist.is_main:
            # print() is not reentrant: this handler may have interrupted it.
            os.write(2, b"\nsaving and stopping after this step; press ^C again to stop now\n")

    def saved(self, seconds: float) -> None:
        """Record the seconds that the last checkpoint took, to reserve twice that time before the end."""
        self._save_s = seconds

    def rolled_back(self) -> None:
        """Agree after the next step, since a rollback has decreased the step number."""
        self._agree_after, self._agreed_after = 0, None

    def agree(self, step: int, busy: bool = False) -> Agreed | None:
        """Agree on whether to end after `step`. Collective.

        Args:
            busy: this rank is still writing a checkpoint.

        Returns:
            None after most steps, since the ranks do not communicate then.
        """
        if step < self._agree_after:
            return None
        now = time.monotonic()
        gap = now - self._agreed_at
        self._longest_gap_s = max(self._longest_gap_s, gap)
        step_s = gap / (1 if self._agreed_after is None else step - self._agreed_after)
        status = torch.tensor([float(self._signal), float(self._must_end()), float(busy), step_s])
        number, must_end, anyone_busy, slowest_step_s = all_reduce(self._dist, status, ReduceOp.MAX).tolist()
        self._agreed_at, self._agreed_after = now, step
        self._agree_after = step + max(1, int(_AGREE_EVERY_S / max(slowest_step_s, 1e-6)))
        reason = None
        if number:
            reason = _reason(signal.Signals(int(number)).name if (sent := self._sent_to_launch()) is None else sent)
        elif must_end:
            reason = f"the allocation ends at {time.strftime('%H:%M:%S', time.localtime(self._ends_at))}"
        return Agreed(reason, bool(anyone_busy))

    def _sent_to_launch(self) -> str | None:
        """Return the signal that launch received; launch forwards every signal as SIGTERM. None on all ranks but
        rank 0."""
        run_id = os.environ.get(RUN_ID_VARIABLE)
        if run_id is None or not self._dist.is_main:
            return None
        stop = read_stop_order(self._dist.run_dir, run_id)
        return stop.received or None if stop is not None else None

    def _must_end(self) -> bool:
        if self._ends_at is None:
            return False
        # The next agreement may be as far away as the longest gap so far, for example because of an evaluation.
        reserved_s = _MIN_RESERVED_S + 2 * self._save_s + self._longest_gap_s
        return time.monotonic() + reserved_s > self._ends_at_monotonic
