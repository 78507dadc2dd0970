"""Run a training command at several sizes within an allocation, and report its scaling efficiency."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.core.base import run_command


def main(argv: Sequence[str]) -> int:
    """Run a study (`scale …`), or one of `scale report`, `scale compare` and `scale paper`."""
    if argv and argv[0] == "paper":
        from ezpz_llm.verify.scaling.paper import main as paper

        return paper(argv[1:])
    if argv and argv[0] in ("report", "compare"):
        from ezpz_llm.verify.scaling.study_report import compare_main, report_main

        return (report_main if argv[0] == "report" else compare_main)(argv[1:])
    from ezpz_llm.verify.scaling.command import main as study

    return study(argv)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
