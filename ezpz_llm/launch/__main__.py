"""Start a program on every rank of the reservation."""

from __future__ import annotations

from ezpz_llm.base.errors import run_command
from ezpz_llm.launch.command import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(run_command(main))
