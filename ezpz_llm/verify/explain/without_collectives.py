"""Trainer that alternates between steps with and without collectives, to measure the cost of communication.

    python3 -m ezpz_llm.verify.explain.without_collectives [OPTIONS OF ezpz_llm.train]

`explain --counterfactual` launches this module. It trains for about a hundred steps and saves no checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ezpz_llm.core.base import run_command
from ezpz_llm.training.trainer.callbacks.callback import Callback, CallbackContext
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import check_run

if TYPE_CHECKING:
    from ezpz_llm.training.observe.profile_windows import Window

_TRACED, MEASURED = 24, 64
"""Number of traced steps, and of steps that alternate between with and without collectives."""
_STEPS = _TRACED + MEASURED + 16
# Turn off all work between steps. Ignore loss spikes and bad steps, since the trained weights are useless.
_OVERRIDES = {"steps": _STEPS, "trace-steps": _TRACED, "save-every": -1, "eval-every": 0, "eval-tokens": 1024,
              "sample-tokens": 0, "profile": "false", "hellaswag": "null", "track": "null", "resume": "null",
              "warmup-steps": 1, "decay-steps": _STEPS, "log-every": 10 ** 6, "spike-norm": 0, "spike-loss": 0,
              "bad-steps": 10 ** 6, "on-bad-steps": "stop"}

_GROUP_STEPS = 4
"""Number of consecutive steps with, then without collectives. The first step of each group is not recorded."""


class _AlternatingSteps(Callback):
    """Callback that measures the step times of this rank and writes `profile/counterfactual-rankNNNN.json`.

    A barrier precedes each step, so that delays of other ranks in the step before are not measured.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._inside: ExitStack | None = None
        self._began = 0.0
        self._seconds: dict[str, list[float]] = {"real": [], "stubbed": []}

    def on_step_begin(self, context: CallbackContext) -> None:
        """Wait for the other ranks, and replace collectives by stubs if this is a step without collectives."""
        step = context.step
        if not self._window.first <= step <= self._window.last:
            return
        self._inside = ExitStack()
        context.dist.barrier()
        if self._is_stubbed(step):
            from ezpz_llm.training.dist.stubbed_collectives import stubbed_collectives

            self._inside.enter_context(stubbed_collectives())
        self._began = time.perf_counter()

    def on_step_end(self, context: CallbackContext) -> None:
        """Record the step's time and restore collectives."""
        if self._inside is None:
            return
        seconds, step, dist = time.perf_counter() - self._began, context.step - 1, context.dist
        if (step - self._window.first) % _GROUP_STEPS:
            self._seconds["stubbed" if self._is_stubbed(step) else "real"].append(seconds)
        self._restore()
        if step == self._window.last:
            dist.side.write_json(dist.run_dir.counterfactual(dist.rank), {"rank": dist.rank, **self._seconds})

    def on_train_end(self, context: CallbackContext) -> None:
        """Restore collectives."""
        self._restore()

    def _restore(self) -> None:
        if self._inside is not None:
            self._inside.close()
            self._inside = None

    def _is_stubbed(self, step: int) -> bool:
        return (step - self._window.first) // _GROUP_STEPS % 2 == 1


def main(argv: Sequence[str]) -> int:
    """Train with the options in `argv`, some of which are overridden; return the exit code."""
    return train([*argv, *(f"--{name}={value}" for name, value in _OVERRIDES.items())], MEASURED)


def train(argv: Sequence[str], measured: int) -> int:
    """Train, or with --check only validate the options without torch; return the exit code.

    The last `measured` steps before the final step alternate between groups of steps with and without collectives.
    """
    options = parse(argv)
    if options.check:
        check_run(options, options.world_size or 1)
        return 0
    from ezpz_llm.training.observe.profile_windows import Window
    from ezpz_llm.training.trainer.run import run

    window = Window(options.config.steps - measured - 1, measured)
    return run(options, [_AlternatingSteps(window)])


if __name__ == "__main__":
    raise SystemExit(run_command(main))
