"""Run a training command on several sizes of a reservation, and say how it scales."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.errors import run_command


def main(argv: Sequence[str]) -> int:
    """The command; its first word may be that of another one of studies."""
    from ezpz_llm.scaling.command import main as study

    return study(argv)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
