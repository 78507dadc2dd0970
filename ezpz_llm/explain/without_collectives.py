"""The same steps with and without collectives, in turns: the direct measure of what communication costs.

    python3 -m ezpz_llm.explain.without_collectives [OPTIONS OF ezpz_llm.train]

This is what `explain --counterfactual` launches: the trainer for some hundred steps, of which nothing is saved.
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
# Nothing between steps, and no judgement of what is trained, which is worthless.
_FIXED = {"steps": _STEPS, "trace-steps": TRACED, "save-every": -1, "eval-every": 0, "eval-tokens": 1024,
          "sample-tokens": 0, "profile": "false", "hellaswag": "null", "track": "null", "resume": "null",
          "warmup-steps": 1, "decay-steps": _STEPS, "log-every": 10 ** 6, "spike-norm": 0, "spike-loss": 0,
          "bad-steps": 10 ** 6, "on-bad-steps": "stop"}

_TURN = 4
"""Steps between changes; the first of each pays for the change, and is not counted."""


class Turns:
    """Times the window's steps on this rank: `profile/counterfactual-rankNNNN.json`.

    Every rank leaves a barrier for each of them, so that none pays for what another did before.
    """

    def __init__(self, dist: Dist, window: Window) -> None:
        self._dist = dist
        self._window = window
        self._inside: ExitStack | None = None
        self._began = 0.0
        self._seconds: dict[str, list[float]] = {"real": [], "stubbed": []}

    def before_step(self, step: int) -> None:
        """Meet the other ranks; leave them again where it is the turn of steps without collectives."""
        if not self._window.first <= step <= self._window.last:
            return
        self._inside = ExitStack()
        self._dist.barrier()
        if self._is_stubbed(step):
            from ezpz_llm.dist.stubbed import stubbed_collectives

            self._inside.enter_context(stubbed_collectives())
        self._began = time.perf_counter()

    def after_step(self, step: int) -> None:
        """Note the step's time; collectives are real again."""
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
        """Collectives are real again, whatever ended the step."""
        if self._inside is not None:
            self._inside.close()
            self._inside = None

    def _is_stubbed(self, step: int) -> bool:
        return (step - self._window.first) // _TURN % 2 == 1


def main(argv: Sequence[str]) -> int:
    """Train as `argv` says, but for the options that are fixed; returns the exit code."""
    return train([*argv, *(f"--{name}={value}" for name, value in _FIXED.items())], TAKEN)


def train(argv: Sequence[str], taken: int) -> int:
    """Train, or with --check only find errors, without torch; returns the exit code. Of the steps before the last,
    `taken` are made in turns."""
    options = parse(argv)
    if options.check:
        check_run(options, options.world_size or 1)
        return 0
    from ezpz_llm.observe.profile import Window
    from ezpz_llm.trainer.run import run

    return run(options, lambda dist: [Turns(dist, Window(options.config.steps - taken - 1, taken))])


if __name__ == "__main__":
    raise SystemExit(run_command(main))
