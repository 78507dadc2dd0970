"""Check a `launch` command, write a job script for it, and submit the script."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.core.base import run_command


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    from ezpz_llm.launcher.submit.command import main as run

    return run(argv)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
