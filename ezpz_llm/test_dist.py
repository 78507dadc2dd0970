"""Check that an allocation is healthy: test every rank's all-reduces, and train a small MLP."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from ezpz_llm.core.base import run_command
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE
from ezpz_llm.launcher.basics.ranks import find_rank
from ezpz_llm.verify.check.test_dist.options import check, parser, reject_used_directory


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code. torch is not imported with --check."""
    began = time.perf_counter()
    options = parser().parse_args(argv)
    if options.check:
        check(options, options.world_size)
        if folder := options.run_dir or os.environ.get(RUN_DIR_VARIABLE):
            reject_used_directory(folder)
        return 0
    resolved = check(options, find_rank(os.environ).world_size)
    began_import = time.perf_counter()
    import torch  # noqa: F401 (its import is timed)

    import_seconds = {"torch": time.perf_counter() - began_import}
    from ezpz_llm.verify.check.test_dist.run import run

    return run(options, resolved, import_seconds, began)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
