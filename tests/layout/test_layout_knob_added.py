"""New layout options in a copy of the package, from the ds_config to the engine.

A key of DeepSpeed needs changes in two files. A key of the block "ezpz_llm" also needs an engine that uses it.
"""

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

from ezpz_llm.core.base.package_data import data_dir

KEY = "stage3_use_all_reduce_for_fetch_params"
_ADDED = {
    "training/layout/layout.py": {
        '"tiled", "shard_within"': ', "stays_gathered"',
        "    shard_within: int | None = None\n":
            "    fetches_by_all_reduce: bool = False\n    stays_gathered: bool = False\n",
        "_shard_within(config, shard_within, place)":
            f', zero.get("{KEY}", False), config.ours.get("stays_gathered", False)'},
    "training/engine/fsdp2_engine.py": {
        "fully_shard(block, mesh=mesh, mp_policy=policy":
            ", reshard_after_forward=not resolved.layout.zero.stays_gathered"},
}
"""Additions to files by the text that they follow: the key, the fields, their values, and their use."""
_KNOBS = f'''

def check_fetches_by_all_reduce(case: LayoutCheck) -> RuleResults:
    """Require ZeRO stage 3 for fetches by all-reduce."""
    if case.layout.zero.fetches_by_all_reduce and case.layout.zero.stage != 3:
        yield Problem("{KEY} needs ZeRO stage 3", ("stage", "{KEY}"), ("stage",))


def _reduce_parameters(volume: Mapping[str, int], layout: Layout, micro_steps: int, peers: int) -> dict[str, int]:
    if not layout.zero.fetches_by_all_reduce:
        return dict(volume)
    return {{"all_reduce": volume["all_gather"], "reduce_scatter": volume["reduce_scatter"]}}


def check_stays_gathered(case: LayoutCheck) -> RuleResults:
    """Require fsdp2 for parameters that stay gathered."""
    if case.layout.zero.stays_gathered and case.layout.engine != "fsdp2":
        yield Problem("stays_gathered needs fsdp2", ("engine", "stays_gathered"), ("engine",))


def _keep_gathered(states: Mapping[Kind, StoredState], layout: Layout, total: int,
                   peers: int) -> dict[Kind, StoredState]:
    kept = {{"secondary": StoredState("device", 4, total)}} if layout.zero.stays_gathered else {{}}
    return {{**states, **kept}}


def _gather_once(volume: Mapping[str, int], layout: Layout, micro_steps: int, peers: int) -> dict[str, int]:
    return {{**volume, "all_gather": volume["all_gather"] // 2}} if layout.zero.stays_gathered else dict(volume)


KNOBS = (*KNOBS, Knob("fetches_by_all_reduce", "zero_optimization.{KEY}", "stage 3", (check_fetches_by_all_reduce,),
                      traffic_text="all-reduces of parameters", traffic=_reduce_parameters, certified=False),
         Knob("stays_gathered", "ezpz_llm.stays_gathered", "`fsdp2`", (check_stays_gathered,), "whole parameters",
              _keep_gathered, "one all-gather per micro-batch", _gather_once, certified=False))
'''
_DS_CONFIGS = {"fetched": {"zero_optimization": {"stage": 3, KEY: True}},
               "unfetched": {"zero_optimization": {"stage": 2, KEY: True}},
               "kept": {"ezpz_llm": {"engine": "fsdp2", "stays_gathered": True}},
               "unkept": {"ezpz_llm": {"engine": "ddp", "stays_gathered": True}}}


@pytest.fixture(name="env")
def _env(tmp_path: Path) -> dict[str, str]:
    """Environment with a copy of the package that has the new options, and with ds_configs that set them."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "ezpz_llm", copy / "ezpz_llm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("ds_configs", "launchers", "jobs"):
        (copy / name).symlink_to(data_dir(name))
    for name, additions in _ADDED.items():
        path = copy / "ezpz_llm" / name
        text = path.read_text()
        for before, added in additions.items():
            assert text.count(before) == 1
            text = text.replace(before, before + added)
        path.write_text(text)
    with (copy / "ezpz_llm/training/layout/knobs.py").open("a") as file:
        file.write(_KNOBS)
    for name, values in _DS_CONFIGS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    return clean_env(PYTHONPATH=str(copy), OMP_NUM_THREADS="1")


def _run(cwd: Path, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, text=True, capture_output=True,
                          timeout=scaled(400), check=False)


def _check(cwd: Path, env: dict[str, str], ds_config: str) -> subprocess.CompletedProcess[str]:
    return _run(cwd, env, "-m", "ezpz_llm.train", "--check", "--device", "cpu", "--world-size", "2", "--ds-config",
                ds_config)


def test_new_options_have_rules_lines_in_the_plan_and_rows(tmp_path: Path, env: dict[str, str]) -> None:
    for name, key in (("fetched", KEY), ("kept", "stays_gathered")):
        plan = _check(tmp_path, env, f"{name}.json")
        assert plan.returncode == 0, plan.stderr
        assert any(line.split() == [key, "True", f"{name}.json"] for line in plan.stdout.splitlines())
        assert f"note: uncertified: {key} True of {name}.json" in plan.stdout
    rejected = _check(tmp_path, env, "unfetched.json")
    assert rejected.returncode == 2
    assert rejected.stderr.startswith(
        f"error: {KEY} needs ZeRO stage 3\n  where:   stage from unfetched.json, {KEY} from unfetched.json\n"
        '  instead: "stage": 3\n')
    assert _check(tmp_path, env, "unkept.json").stderr.startswith("error: stays_gathered needs fsdp2\n")
    rows = _run(tmp_path, env, "-c", "from ezpz_llm.training.layout.knobs import knob_rows\n"
                "for row in knob_rows()[-2:]: print(*row, sep=' | ')")
    assert rows.stdout.splitlines() == [
        f"`zero_optimization.{KEY}` | stage 3 |  | all-reduces of parameters | no",
        "`ezpz_llm.stays_gathered` | `fsdp2` | whole parameters | one all-gather per micro-batch | no"]


@pytest.mark.full
def test_new_options_reach_the_engines_and_can_be_certified(tmp_path: Path, env: dict[str, str]) -> None:
    need_mpiexec()
    done = _run(tmp_path, env, "-m", "ezpz_llm.certify", "--layouts", "fetched.json,zero3,kept.json,fsdp2",
                "--world", "2", "--model", "tiny-gpt2", "--dtype", "fp32", "--steps", "3", "--json", "all.json",
                "--run-dir", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "all.json").read_text())["results"]
    assert all(result["passed"] for result in results)
    fetched, zero3, kept, fsdp2 = results
    assert (fetched["losses"], kept["losses"]) == (zero3["losses"], fsdp2["losses"])
    assert fetched["textbook"]["all_reduce"] == zero3["textbook"]["all_gather"]
    assert kept["textbook"]["all_gather"] == fsdp2["textbook"]["all_gather"] // 2
    assert kept["arithmetic"][-1] == {"kind": "secondary", "where": "device", "bytes": 4 * kept["parameters"]}
    sent, sent3, sent_kept, sent_fsdp2 = (result["collectives"][0]["kinds"] for result in results)
    assert "all_reduce" not in sent3
    assert sent["all_reduce"]["bytes"] == sent3["all_gather"]["bytes"] - sent["all_gather"]["bytes"] > 0
    assert sent_kept["all_gather"]["bytes"] < 0.6 * sent_fsdp2["all_gather"]["bytes"]
