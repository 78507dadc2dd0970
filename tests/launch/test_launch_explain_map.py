"""Map of a layout's ranks to nodes: printed by --explain, with a warning if it would be slow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from launch_runs import captured_env, clean_env, launch
from places import ROOT
from slowness import scaled

from ezpz_llm.launcher.basics.check_places import format_places, read_places
from ezpz_llm.launcher.basics.hostlist import expand_hostlist, fold_hostnames
from ezpz_llm.launcher.basics.variables import PLACES_VARIABLE
from ezpz_llm.training.dist.degrees import Degrees
from ezpz_llm.training.layout.layout import Layout, ZeroOptions, rank_map, tp_crossing_warning

TRAIN = ("python3", "-m", "ezpz_llm.train")


def explained(tmp_path: Path, *words: str, job: str = "slurm/env_sbatch_script.txt",
              **changes: str) -> subprocess.CompletedProcess[str]:
    """Run `launch --dry-run --explain WORDS` in a captured job of two nodes."""
    srun = tmp_path / "bin/srun"
    srun.parent.mkdir(exist_ok=True)
    srun.write_text("#!/bin/sh\nexit 1\n")
    srun.chmod(0o755)
    env = clean_env() | captured_env(job) | changes
    env["PATH"] = f"{srun.parent}:{clean_env()['PATH']}"
    return subprocess.run([sys.executable, "-m", "ezpz_llm.launch", "--dry-run", "--explain", *words],
                          cwd=tmp_path, env=env, capture_output=True, text=True, timeout=scaled(60),
                          stdin=subprocess.DEVNULL, check=False)


def test_the_map_of_a_slurm_job_of_two_hosts(tmp_path: Path) -> None:
    done = explained(tmp_path, "--ppn", "4", *TRAIN, "--ds-config", "3d", "--gradient-accumulation-steps", "8")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^ *layout +3d: pp 2 x dp 2 x tp 2  +command line$", done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.split("ranks of 3d: pp 2 x dp 2 x tp 2\n")[1] == """\
  rank  pp  dp  tp  host
  0     0   0   0   n1
  1     0   0   1   n1
  2     0   1   0   n1
  3     0   1   1   n1
  4     1   0   0   n2
  5     1   0   1   n2
  6     1   1   0   n2
  7     1   1   1   n2
"""
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_a_warning_for_groups_across_nodes_suggests_a_layout_without_them(tmp_path: Path) -> None:
    done = explained(tmp_path, "--ppn", "3", *TRAIN, "--ds-config", "tp2")
    assert done.returncode == 0
    assert done.stderr == ("warning: 1 tensor-parallel group (tp 2) spans several nodes: ranks 2 (n1) to 3 (n2)\n"
                           "  instead: launch --ppn 2 or launch --ppn 4 or --tp 1\n")
    assert explained(tmp_path, "--ppn", "4", *TRAIN, "--ds-config", "tp2").stderr == ""
    assert explained(tmp_path, "--ppn", "3", *TRAIN, "--ds-config", "tp2", "--tp", "1").stderr == ""


def test_the_page_shows_what_is_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/layouts.md").read_text()
    shown = re.findall(r"\$ launch --dry-run --explain (.*)\n((?:(?!\$|```).*\n)*)", page)
    assert len(shown) == 2
    for words, lines in shown:
        done = explained(tmp_path, *words.split())
        said = (done.stdout + done.stderr).splitlines()
        assert all(line.strip() == "…" or line in said for line in lines.splitlines()), lines


def test_a_pbs_job_and_a_group_as_large_as_the_job(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\nn2\n")
    done = explained(tmp_path, *TRAIN, "--ds-config", "tp2_zero1", "--tp", "4",
                     job="pbs/env_job_sel2_nc2_mpi2.txt", PBS_NODEFILE=str(nodes), MASTER_ADDR="n1")
    assert done.returncode == 0, done.stderr
    assert "spans several nodes: ranks 0 (n1) to 3 (n2)\n  instead: launch --ppn 4 or --tp 2" in done.stderr
    assert "  2     0   2   n2\n" in done.stdout


def test_a_mistake_ends_it_with_code_2(tmp_path: Path) -> None:
    done = explained(tmp_path, "--ppn", "4", *TRAIN, "--ds-config", "zero3", "--pp", "2")
    assert done.returncode == 2
    assert "instead: --ds-config pp2 or --pp 1" in done.stderr
    assert "ranks of" not in done.stdout


def test_other_programs_have_nothing_to_explain(tmp_path: Path) -> None:
    done = explained(tmp_path, "hostname")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().endswith("-")  # the rank table comes last


@pytest.mark.full
def test_a_run_draws_it_and_says_its_degrees(tmp_path: Path) -> None:
    done = launch(tmp_path, "--explain", "-n", "2", "--run-dir", "run", *TRAIN, "--ds-config", "tp2", "--steps",
                  "1", "--eval-tokens", "256", "--sample-tokens", "0", "--save-every", "-1", "--precision", "fp32",
                  OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", timeout=120)
    assert done.returncode == 0, done.stderr
    rows = r"  rank  dp  tp  host\n  0     0   0   (\S+)\n  1     0   1   \1\n"
    assert re.search(r"ranks of tp2: dp 1 x tp 2\n" + rows, done.stderr)
    assert "\nlayout     tp2: dp 1 x tp 2, fp32, on 2 cpu ranks\n" in done.stdout


@settings(deadline=None)
@given(st.lists(st.from_regex(r"[a-z]{1,2}[0-9]{0,3}(-[a-z]{0,1}[0-9]{0,2}[a-z])?", fullmatch=True), min_size=1,
                max_size=12), st.data())
def test_node_lists_are_folded_and_parsed(hosts: list[str], data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 3), min_size=len(hosts), max_size=len(hosts)))
    places = list(zip(hosts, counts, strict=True))
    assert read_places({PLACES_VARIABLE: format_places(places)}) == places


@pytest.mark.parametrize(("hosts", "short"), [
    (["n1", "n2", "n3", "n7"], "n[1-3],n7"),
    (["n08", "n09", "n10"], "n[08-10]"),
    (["n9", "n10"], "n[9-10]"),
    (["n1", "n01"], "n1,n01"),
    (["gpu1-ib", "gpu2-ib"], "gpu[1-2]-ib"),
    (["n2", "n1"], "n2,n1"),
    (["login", "login"], "login,login"),
])
def test_short_forms(hosts: list[str], short: str) -> None:
    assert fold_hostnames(hosts) == short
    assert expand_hostlist(short) == hosts


def test_ten_thousand_hosts_are_a_short_line() -> None:
    places = [(f"nid{number:06d}", 12) for number in range(10_000)]
    assert format_places(places) == "nid[000000-009999] 12(x10000)"
    layout = Layout("3d", "deepspeed", ZeroOptions(1), tp=4, pp=2)
    drawn = rank_map(layout, places).splitlines()
    assert len(drawn) == 35
    assert drawn[-1].split() == ["119999", "1", "14999", "3", "nid009999"]
    assert "… 119968 more" in drawn[18]


def test_every_group_that_crosses_is_counted() -> None:
    layout = Layout("x", "deepspeed", ZeroOptions(1), tp=4, sp=2)
    uneven = [("a", 4), ("b", 2), ("c", 1), ("d", 9)]
    degrees = Degrees.of_world(16, tp=4, sp=2)
    host_of = [host for host, count in uneven for _ in range(count)]
    split = {tuple(degrees.peers(rank, "tp")) for rank in range(16)
             if len({host_of[peer] for peer in degrees.peers(rank, "tp")}) > 1}
    text = tp_crossing_warning(layout, uneven, lambda world_size, tp: world_size % (tp * 2) == 0)
    assert f"{len(split)} tensor-parallel group{'s' * (len(split) > 1)} (tp 4) span" in text
    assert "nodes: ranks 4 (b) to 7 (d)" in text
    assert text.endswith("instead: launch --ppn 8 or launch --ppn 12 or --tp 1")
    assert tp_crossing_warning(layout, [("a", 8), ("b", 4), ("c", 4)], lambda *_: True) is None
    assert "\n" not in tp_crossing_warning(layout, uneven, lambda *_: False)
