"""Parent of the ranks that launch starts on this node without mpiexec or torchrun. For launch only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from ezpz_llm.core.base import run_command
from ezpz_llm.launcher.basics.cleanup import die_with_parent
from ezpz_llm.launcher.basics.variables import LOCAL_RANK_VARIABLE


def main(argv: Sequence[str]) -> int:
    """Start `argv[0]` ranks of the command in `argv[1:]`. Return the first exit code that is not 0.

    launch ends the other ranks if a rank fails.
    """
    die_with_parent(signal.SIGTERM)
    ranks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    for rank in range(int(argv[0])):
        ranks.append(subprocess.Popen(argv[1:], env={**os.environ, LOCAL_RANK_VARIABLE: str(rank)}))
    codes = [rank.wait() for rank in ranks]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(run_command(main))
