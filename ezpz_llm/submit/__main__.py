"""Write a job script around a `launch` command, check it, and queue it."""

from __future__ import annotations

from ezpz_llm.base.errors import run_command
from ezpz_llm.submit.command import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(run_command(main))
