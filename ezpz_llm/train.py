"""Train a GPT with the layout that a ds_config describes: `launch python3 -m ezpz_llm.train`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ezpz_llm.core.base import run_command

if TYPE_CHECKING:
    from ezpz_llm.training.trainer.callbacks.callback import Callback


def train(argv: Sequence[str] | None = None, *, callbacks: Sequence[Callback] = ()) -> int:
    """Train with options of the command, and return its exit code. Every rank calls this.

    Args:
        argv: options; default: those of the script.
        callbacks: callbacks besides those of installed packages.
    """
    return run_command(lambda argv: main(argv, callbacks), argv)


def main(argv: Sequence[str], callbacks: Sequence[Callback] = ()) -> int:
    """Run the command and return its exit code."""
    from ezpz_llm.training.trainer.command import main as run  # here, because run_command reports a missing package

    return run(argv, callbacks)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
