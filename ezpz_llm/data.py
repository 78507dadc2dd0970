"""Convert text to token shards, inspect and verify shards, list a step's documents, and install a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.core.base import run_command


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    from ezpz_llm.training.data.command import main as run

    return run(argv)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
