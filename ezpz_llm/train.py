"""`launch python3 -m ezpz_llm.train`: train a GPT on text under the layout that a ds_config selects."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.errors import run_command
from ezpz_llm.trainer.options import dump, parse
from ezpz_llm.trainer.plan import check_run


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code. torch is imported only once there is something to train."""
    options = parse(argv)
    if options.print_config:
        print(dump(options.config), end="")
        return 0
    if options.check:
        check_run(options, options.world_size or 1)
        return 0
    from ezpz_llm.trainer.run import run

    return run(options)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
