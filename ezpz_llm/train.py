"""Train a GPT with the layout that a ds_config describes: `launch python3 -m ezpz_llm.train`."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.base import run_command


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    from ezpz_llm.trainer.command import main as run  # here, because run_command reports a missing package

    return run(argv)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
