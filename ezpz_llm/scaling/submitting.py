"""One job a point, queued by `ezpz-llm submit`; each runs the repeats of its point."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.errors import UserError
from ezpz_llm.scaling.study import Point, Study


def submit_points(study: Study, folder: Path, points: Sequence[Point], words: Sequence[str]) -> None:
    """Queue the points' jobs.

    Args:
        words: the user's options for submit, such as --time and --account.

    Raises:
        UserError: submit refused one; those before it are queued.
    """
    for number, point in enumerate(points):
        command = [sys.executable, "-m", "ezpz_llm.submit", *words, "--nodes", str(point.nodes),
                   "--name", point.name, "--run-dir", str(folder / "points" / point.name / "job"), "--",
                   "ezpz-llm", "scale", "--study", str(folder), "--point", point.name]
        print(f"{point.name}:", flush=True)
        done = subprocess.run(command, cwd=study.directory, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise UserError(f"the job of {point.name} was not queued, {number} before it were", exit_code=1,
                            where="ezpz-llm submit, above",
                            instead=f"ezpz-llm scale --study {folder} --point "
                                    f'{",".join(one.name for one in points[number:])} --submit "…" once that is '
                                    "mended")
