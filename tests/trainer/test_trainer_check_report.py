"""Warnings of the pre-launch check, which a run does not print a second time."""

from __future__ import annotations

from pathlib import Path

import pytest

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import update_record
from ezpz_llm.launcher.basics.variables import RUN_ID_VARIABLE
from ezpz_llm.training.trainer.check_report import memory_warning, was_checked_by_launch
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import plan_run

GB = 10**9


def test_model_states_that_exceed_the_nodes_memory_are_a_warning() -> None:
    """A parameter of Llama 3 8B needs 16 bytes and, with a gradient bucket on each rank, a little more."""
    def check(node_gb: int, *argv: str, ranks: int = 2) -> str | None:
        plan = plan_run(parse(["--model", "llama3-8b", "--device", "cpu", *argv]), 2 * ranks)
        return memory_warning(plan, ranks, node_gb * GB)

    text = check(24, "--ds-config", "zero3") or ""
    assert text.startswith("warning: the weights, gradients and optimizer states of 2 ranks need ")
    assert "GB on this node, which has 24 GB" in text
    assert check(160, "--ds-config", "zero3") is None
    assert check(160, "--ds-config", "ddp") is not None


@pytest.mark.parametrize(("typed", "env", "checked"), [
    ("launch -n 2 python3 -m ezpz_llm.train --lr 1", {RUN_ID_VARIABLE: "1"}, True),
    ("launch --no-check python3 -m ezpz_llm.train", {RUN_ID_VARIABLE: "1"}, False),
    ("launch python3 mine.py", {RUN_ID_VARIABLE: "1"}, False),
    ("launch python3 -m ezpz_llm.train", {}, False)])
def test_warnings_of_launchs_check_are_not_repeated(tmp_path: Path, typed: str, env: dict[str, str],
                                                    checked: bool) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    assert not was_checked_by_launch(run_dir, env)
    update_record(run_dir, launch={"typed": typed.split(), "env": {}})
    assert was_checked_by_launch(run_dir, env) is checked
