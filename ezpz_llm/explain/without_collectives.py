"""Trainer that alternates between steps with and without collectives, to measure the cost of communication.

    python3 -m ezpz_llm.explain.without_collectives [OPTIONS OF ezpz_llm.train]

`explain --counterfactual` launches this module. It trains for about a hundred steps and saves no checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ezpz_llm.base import run_command
from ezpz_llm.trainer.options import parse
from ezpz_llm.trainer.plan import check_run

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist
    from ezpz_llm.observe.profile import Window

TRACED, TAKEN = 24, 64
_STEPS = TRACED + TAKEN + 16
# Nothing runs between steps, and loss spikes and bad steps are ignored, since the trained weights are useless.
_FIXED = {"steps": _STEPS, "trace-steps": TRACED, "save-every": -1, "eval-every": 0, "eval-tokens": 1024,
          "sample-tokens": 0, "profile": "false", "hellaswag": "null", "track": "null", "resume": "null",
          "warmup-steps": 1, "decay-steps": _STEPS, "log-every": 10 ** 6, "spike-norm": 0, "spike-loss": 0,
          "bad-steps": 10 ** 6, "on-bad-steps": "stop"}

_TURN = 4
"""Steps per turn, with or without collectives. The first step of a turn is not counted."""


class Turns:
    """Step hook that measures the step times of this rank and writes `profile/counterfactual-rankNNNN.json`.

    A barrier precedes each step, so that delays of other ranks do not carry over.
    """

    def __init__(self, dist: Dist, window: Window) -> None:
        self._dist = dist
        self._window = window
        self._inside: ExitStack | None = None
        self._began = 0.0
        self._seconds: dict[str, list[float]] = {"real": [], "stubbed": []}

    def before_step(self, step: int) -> None:
        """Wait for the other ranks, and replace collectives by stubs if it is the turn of steps without them."""
        if not self._window.first <= step <= self._window.last:
            return
        self._inside = ExitStack()
        self._dist.barrier()
        if self._is_stubbed(step):
            from ezpz_llm.dist.stubbed_collectives import stubbed_collectives

            self._inside.enter_context(stubbed_collectives())
        self._began = time.perf_counter()

    def after_step(self, step: int) -> None:
        """Record the step's time and restore collectives."""
        if self._inside is None:
            return
        seconds = time.perf_counter() - self._began
        if (step - self._window.first) % _TURN:
            self._seconds["stubbed" if self._is_stubbed(step) else "real"].append(seconds)
        self.close()
        if step == self._window.last:
            self._dist.side.write_json(self._dist.run_dir.counterfactual(self._dist.rank),
                                       {"rank": self._dist.rank, **self._seconds})

    def close(self) -> None:
        """Restore collectives, also after an error in the step."""
        if self._inside is not None:
            self._inside.close()
            self._inside = None

    def _is_stubbed(self, step: int) -> bool:
        return (step - self._window.first) // _TURN % 2 == 1


def main(argv: Sequence[str]) -> int:
    """Train with the options in `argv`, some of which are overridden; return the exit code."""
    return train([*argv, *(f"--{name}={value}" for name, value in _FIXED.items())], TAKEN)


def train(argv: Sequence[str], taken: int) -> int:
    """Train, or with --check only validate the options without torch; return the exit code.

    The last `taken` steps before the final one alternate between steps with and without collectives.
    """

    options = parse(argv)
    if options.check:
        check_run(options, options.world_size or 1)
        return 0
    from ezpz_llm.observe.profile import Window
    from ezpz_llm.trainer.run import run

    return run(options, lambda dist: [Turns(dist, Window(options.config.steps - taken - 1, taken))])


if __name__ == "__main__":
    raise SystemExit(run_command(main))
