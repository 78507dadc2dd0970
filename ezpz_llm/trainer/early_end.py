"""Early end of a run, because the reservation ends or a signal arrives. All ranks agree on the step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp

from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import reduce
from ezpz_llm.launch.node.messages import stop_ordered
from ezpz_llm.launch.variables import ENDS_AT_VARIABLE, RUN_ID_VARIABLE

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_ASK_EVERY_S = 2.0
_LEAST_RESERVE_S = 20.0
_FIRST_SAVE_S = 120.0
"""Assumed seconds per checkpoint before one has been measured, at most a tenth of the remaining time."""


def _reason(name: str) -> str:
    return "interrupted by Ctrl-C (SIGINT)" if name == signal.SIGINT.name else f"{name} was received"


@dataclass(frozen=True)
class Agreed:
    """Decision of all ranks: the reason to end here (None to continue), and whether any rank is still writing."""

    ends: str | None
    busy: bool


class EarlyEnd:
    """Asks after every step whether the run ends there.

    Ranks may see a signal, or the same moment, at different steps. So what one wants is agreed on in a collective
    that all ranks enter at the same step, about every two seconds; nothing is ever done inside a signal handler.
    """

    def __init__(self, dist: Dist, env: Mapping[str, str]) -> None:
        self._dist = dist
        ends_at = env.get(ENDS_AT_VARIABLE)
        self._ends_at = float(ends_at) if ends_at else None
        self._signal = 0
        left = self._ends_at - time.time() if self._ends_at else 0.0
        self._save_s = min(_FIRST_SAVE_S, max(0.0, left) / 10)
        self._asked_at, self._ask_after = time.monotonic(), 0
        # A clock that is set meanwhile makes no reservation shorter.
        self._over_at = self._asked_at + left
        # Unknown before the first question: a resumed run begins at any step.
        self._asked_after: int | None = None
        self._longest_gap_s = 0.0

    def listen(self) -> EarlyEnd:
        """From here on SIGTERM, SIGUSR1 and Ctrl-C end the run at a step boundary; they are the process's last
        handlers."""
        for number in SIGNALS:
            # A shell's `… &` ignores Ctrl-C, which is meant for the program in the foreground.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
        if number == signal.SIGINT and self._dist.is_main:
            # Python's own buffer may be in use by what this handler interrupts.
            os.write(2, b"\nstopping after this step, saving; press ^C again to stop now\n")

    def saved(self, seconds: float) -> None:
        """A checkpoint was written in so many seconds: that much has to be left before the end."""
        self._save_s = seconds

    def rolled_back(self) -> None:
        """Ask again after the next step: a rollback has taken the run to an earlier one."""
        self._ask_after, self._asked_after = 0, None

    def agreed(self, step: int, busy: bool = False) -> Agreed | None:
        """Agree after `step` on ending; None after most steps, at which the ranks do not communicate. Collective.

        Args:
            busy: this rank is still writing a checkpoint.
        """
        if step < self._ask_after:
            return None
        now = time.monotonic()
        gap = now - self._asked_at
        self._longest_gap_s = max(self._longest_gap_s, gap)
        step_s = gap / (1 if self._asked_after is None else step - self._asked_after)
        wish = torch.tensor([float(self._signal), float(self._is_over()), float(busy), step_s])
        number, over, anyone_busy, slowest_step_s = reduce(self._dist, wish, ReduceOp.MAX).tolist()
        self._asked_at, self._asked_after = now, step
        self._ask_after = step + max(1, int(_ASK_EVERY_S / max(slowest_step_s, 1e-6)))
        why = None
        if number:
            why = _reason(signal.Signals(int(number)).name if (sent := self._sent_to_launch()) is None else sent)
        elif over:
            why = f"the reservation ends at {time.strftime('%H:%M:%S', time.localtime(self._ends_at))}"
        return Agreed(why, bool(anyone_busy))

    def _sent_to_launch(self) -> str | None:
        """The signal that launch was sent, which ends its ranks by SIGTERM whatever it was; only rank 0 looks."""
        run_id = os.environ.get(RUN_ID_VARIABLE)
        if run_id is None or not self._dist.is_main:
            return None
        stop = stop_ordered(self._dist.run_dir, run_id)
        return stop.received or None if stop is not None else None

    def _is_over(self) -> bool:
        if self._ends_at is None:
            return False
        # The next question may come as late as the latest so far (an evaluation in between).
        reserve = _LEAST_RESERVE_S + 2 * self._save_s + self._longest_gap_s
        return time.monotonic() + reserve > self._over_at
