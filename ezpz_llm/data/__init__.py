"""From text to token shards to samples: sample i is a pure function of (seed, i).

`prepare` turns a corpus into a folder of shards once; `TokenData` opens it; `Batches` and `validation_windows`
say which tokens a step takes. Nothing here knows of ranks beyond the (dp_rank, dp_size) it is given.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """The command `python3 -m ezpz_llm.data`; returns the exit code."""
    from ezpz_llm.data.commands import main

    return main(argv)
