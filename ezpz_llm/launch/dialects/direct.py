"""A single rank, without any launcher."""

from __future__ import annotations

from ezpz_llm.launch.dialects.work import Built, Work


def build(program: str, work: Work) -> Built:
    """The command itself."""
    return Built(work.command)
