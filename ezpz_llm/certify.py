"""Check that parallel layouts compute the same results as a single process."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.core.base import run_command


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    from ezpz_llm.verify.certify.command import main as run  # here, because run_command reports a missing package

    return run(argv)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
