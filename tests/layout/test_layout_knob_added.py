"""New layout option in a copy of the package: two changed files, from the ds_config to the engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env, need_mpiexec
from places import ROOT
from slowness import scaled

from ezpz_llm.base.package_data import data_dir

KEY = "stage3_use_all_reduce_for_fetch_params"
_LAYOUT = {
    "    shard_within: int | None = None\n": "    fetches_by_all_reduce: bool = False\n",
    "_shard_within(config, shard_within, place)": f', zero.get("{KEY}", False)'}
"""Additions to layout.py by the text that they follow: a field of `ZeroOptions`, and its value from a ds_config."""
_KNOB = f'''

def check_fetches_by_all_reduce(case: LayoutCheck) -> RuleResults:
    """Require ZeRO stage 3 for fetches by all-reduce."""
    if case.layout.zero.fetches_by_all_reduce and case.layout.zero.stage != 3:
        yield Problem("{KEY} needs ZeRO stage 3", ("stage", "{KEY}"), ("stage",))


def _reduce_parameters(volume: Mapping[str, int], layout: Layout, micro_steps: int, peers: int) -> dict[str, int]:
    if not layout.zero.fetches_by_all_reduce:
        return dict(volume)
    return {{"all_reduce": volume["all_gather"], "reduce_scatter": volume["reduce_scatter"]}}


KNOBS = (*KNOBS, Knob("fetches_by_all_reduce", "zero_optimization.{KEY}", "stage 3", (check_fetches_by_all_reduce,),
                      traffic_text="all-reduces of parameters", traffic=_reduce_parameters, certified=False))
'''


@pytest.fixture(name="env")
def _env(tmp_path: Path) -> dict[str, str]:
    """Environment with a copy of the package that has the new option, and with ds_configs that set it."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "ezpz_llm", copy / "ezpz_llm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("ds_configs", "launchers", "jobs"):
        (copy / name).symlink_to(data_dir(name))
    layout, knobs = copy / "ezpz_llm/layout/layout.py", copy / "ezpz_llm/layout/knobs.py"
    text = layout.read_text()
    for before, added in _LAYOUT.items():
        assert text.count(before) == 1
        text = text.replace(before, before + added)
    layout.write_text(text)
    knobs.write_text(knobs.read_text() + _KNOB)
    for stage in (2, 3):
        values = {"zero_optimization": {"stage": stage, KEY: True}}
        (tmp_path / f"mine{stage}.json").write_text(json.dumps(values))
    return clean_env(PYTHONPATH=str(copy), OMP_NUM_THREADS="1")


def _run(cwd: Path, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, text=True, capture_output=True,
                          timeout=scaled(400), check=False)


def test_new_option_has_its_rule_its_line_in_the_plan_and_its_row(tmp_path: Path, env: dict[str, str]) -> None:
    check = ["-m", "ezpz_llm.train", "--check", "--device", "cpu", "--world-size", "2", "--ds-config"]
    plan = _run(tmp_path, env, *check, "mine3.json")
    assert plan.returncode == 0, plan.stderr
    assert f"{KEY} True" in plan.stdout
    assert f"note: uncertified: {KEY} True of mine3.json" in plan.stdout
    rejected = _run(tmp_path, env, *check, "mine2.json")
    assert rejected.returncode == 2
    assert f"error: {KEY} needs ZeRO stage 3\n  where:   stage from mine2.json, {KEY} from mine2.json\n" \
        '  instead: "stage": 3\n' in rejected.stderr
    row = _run(tmp_path, env, "-c", "from ezpz_llm.layout import knobs; print(*knobs.knob_rows()[-1], sep=' | ')")
    assert row.stdout == f"`zero_optimization.{KEY}` | stage 3 |  | all-reduces of parameters | no\n"


@pytest.mark.full
def test_new_option_reaches_the_engine_and_can_be_certified(tmp_path: Path, env: dict[str, str]) -> None:
    need_mpiexec()
    done = _run(tmp_path, env, "-m", "ezpz_llm.certify", "--layouts", "mine3.json,zero3", "--world", "2", "--model",
                "tiny-gpt2", "--dtype", "fp32", "--steps", "3", "--json", "all.json", "--run-dir", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    mine, zero3 = json.loads((tmp_path / "all.json").read_text())["results"]
    assert (mine["passed"], mine["losses"]) == (True, zero3["losses"])
    assert mine["textbook"]["all_reduce"] == zero3["textbook"]["all_gather"]
    reduced, gathered = (result["collectives"][0]["kinds"] for result in (mine, zero3))
    assert "all_reduce" not in gathered
    assert reduced["all_reduce"]["bytes"] == gathered["all_gather"]["bytes"] - reduced["all_gather"]["bytes"] > 0
