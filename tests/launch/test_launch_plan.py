"""Plans: placement of ranks, launcher, and environment; nothing is started."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import captured_env, clean_env, cpu_seconds, launch
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.basics.devices import Devices
from ezpz_llm.launcher.jobs.option_parsing import parse
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation, Node
from ezpz_llm.launcher.planning.placement import Placement, RankTable, place_ranks
from ezpz_llm.launcher.planning.plan import LaunchPlan, build_plan
from ezpz_llm.launcher.planning.plan_text import opening_lines, summary
from ezpz_llm.launcher.planning.rank_binding import Binding

_NONE = Devices((), "none")
_FOUR = Devices(("0", "1", "2", "3"), "a mask")


def _allocation(*slots: int | None, limit: bool = False) -> Allocation:
    hosts = tuple(Node(f"n{number}", count) for number, count in enumerate(slots, start=1))
    return Allocation("pbs", "1", hosts, None, "the test", slots_are_a_limit=limit)


@pytest.mark.parametrize(("slots", "devices", "ranks", "per_host", "expected"), [
    ((None, None), _NONE, None, None, [1, 1]),
    ((None, None), _FOUR, None, None, [4, 4]),
    ((2, 2), _FOUR, None, None, [2, 2]),
    ((1, 2, 2), _NONE, None, None, [1, 2, 2]),
    ((None, None), _NONE, 4, None, [2, 2]),
    ((None, None), _FOUR, 4, None, [4]),
    ((None, None), _FOUR, 6, None, [4, 2]),
    ((None, None), _FOUR, 16, None, [8, 8]),
    ((2, 2), _NONE, 3, None, [2, 1]),
    ((None, None), _NONE, None, 3, [3, 3]),
    ((None, None), _NONE, 4, 3, [3, 1]),
    ((None, None, None), _NONE, 5, None, [2, 2, 1]),
])
def test_ranks_per_host(slots: tuple[int | None, ...], devices: Devices, ranks: int | None, per_host: int | None,
                        expected: list[int]) -> None:
    placement = place_ranks(_allocation(*slots), devices, ranks, per_host)
    assert [count for _, count in placement.ranks] == expected
    assert placement.source


def test_a_hostfiles_slots_are_a_limit() -> None:
    with pytest.raises(UserError, match="5 ranks, but the nodes have 4 slots"):
        place_ranks(_allocation(2, 2, limit=True), _NONE, 5, None)
    with pytest.raises(UserError, match="3 ranks for n1"):
        place_ranks(_allocation(2, 4, limit=True), _NONE, None, 3)
    with pytest.raises(UserError, match="do not fit"):
        place_ranks(_allocation(None, None), _NONE, 9, 4)
    # A node without slots gets the ranks that the other nodes cannot take.
    assert place_ranks(_allocation(2, None, limit=True), _NONE, 5, None).ranks == (("n1", 2), ("n2", 3))


def _programs(folder: Path, **bodies: str) -> str:
    """Return a PATH with only these scripts."""
    for name, body in bodies.items():
        script = folder / name
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(folder)


def _plan(words: str, env: dict[str, str]) -> LaunchPlan:
    return build_plan(parse(words.split()), env)


def test_inside_a_slurm_job_auto_is_srun(tmp_path: Path) -> None:
    path = _programs(tmp_path, srun="exit 1", mpiexec="echo HYDRA build details:")
    env = captured_env("slurm/env_sbatch_script.txt") | {"PATH": path}
    plan = _plan("python3 x.py", env)
    words = " ".join(plan.argv[1:plan.argv.index(sys.executable)])
    assert plan.launcher.kind == "srun"
    assert words.startswith("-N 2 -n 4 --ntasks-per-node 2 --distribution=block -c 1 ")
    assert words.endswith(" --nodelist n1,n2")
    assert plan.env["MASTER_ADDR"].value == "n1"
    assert plan.ranks_source == "slots of SLURM_JOB_NODELIST"
    assert [(place_ranks.rank, place_ranks.host, place_ranks.local_rank) for place_ranks in plan.ranks] == [
        (0, "n1", 0), (1, "n1", 1), (2, "n2", 0), (3, "n2", 1)]
    assert _plan("--launcher mpiexec python3 x.py", env).launcher.kind == "mpiexec"


def test_pbs_own_thread_count_is_no_choice_of_the_user(tmp_path: Path) -> None:
    # OMP_NUM_THREADS=2 was set by PBS; the captured job's nodes are not this machine.
    node_file = tmp_path / "5.login"
    node_file.write_text("localhost\nlocalhost\n")
    env = captured_env("pbs/env_job_sel2_nc2_mpi2.txt")
    env |= {"PATH": _programs(tmp_path, mpiexec="echo HYDRA build details:"), "PBS_NODEFILE": str(node_file)}
    plan = _plan("python3 x.py", env)
    assert plan.env["OMP_NUM_THREADS"].value == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert "OMP_NUM_THREADS" not in _plan("x", env | {"OMP_NUM_THREADS": "7"}).env


def test_without_mpiexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere" / "python3"))
    empty = _programs(tmp_path)
    for words in ("hostname", "-n 2 hostname"):
        plan = _plan(words, {"PATH": empty})
        assert "launcher   launch" in summary(plan)
        assert not re.search("direct|local,|launch itself", summary(plan))
        assert "started by launch\n" in opening_lines(plan, 200)
    (tmp_path / "two").write_text("n1\nn2\n")
    with pytest.raises(UserError, match="cannot start ranks on other nodes: mpiexec is not on PATH") as raised:
        _plan(f"--hostfile {tmp_path / 'two'} hostname", {"PATH": empty})
    assert "pip install mpich" in str(raised.value)
    path = _programs(tmp_path, torchrun="exit 1")
    plan = _plan("-n 2 hostname", {"PATH": path})
    assert plan.launcher.kind == "torchrun"
    assert "MASTER_ADDR" not in plan.env
    with pytest.raises(UserError, match="mpiexec is not on PATH"):
        _plan(f"--hostfile {tmp_path / 'two'} hostname", {"PATH": path})
    with pytest.raises(UserError, match="srun is not on PATH"):
        _plan("--launcher srun hostname", {"PATH": path})


def test_the_users_values_stay_and_an_outer_launchs_do_not(tmp_path: Path) -> None:
    env = {"PATH": _programs(tmp_path, mpiexec="echo HYDRA build details:"), "MASTER_ADDR": "localhost",
           "MASTER_PORT": "20007", "OMP_NUM_THREADS": "3"}
    plan = _plan("hostname", env)
    assert not {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"} & plan.env.keys()
    assert "using MASTER_ADDR=localhost, which is set in your environment" in plan.notes
    inner = _plan("hostname", env | {"EZPZ_LLM_RUN_ID": "outer"})
    assert inner.env["MASTER_ADDR"].value == "127.0.0.1"
    assert inner.env["EZPZ_LLM_RUN_ID"].value != "outer"


def test_a_rank_keeps_its_rank() -> None:
    plan = _plan("-n 8 python3 x.py", captured_env("mpi/env_mpich_rank2.txt"))
    assert plan.is_existing_rank
    assert plan.argv == ("python3", "x.py")
    assert "already rank 2 of 4" in plan.notes[0]
    assert "-n 8 is ignored" in plan.notes[0]


def test_a_rank_exported_for_another_program_is_left_aside(tmp_path: Path) -> None:
    """A rank exported by hand, as Kubernetes training operators do, also has MASTER_ADDR and MASTER_PORT."""
    env = {"PATH": _programs(tmp_path, mpiexec="echo HYDRA build details:")}
    for left in ({"WORLD_SIZE": "4"}, {"RANK": "7", "WORLD_SIZE": "9"}):
        plan = _plan("-n 2 python3 x.py", env | left)
        assert (len(plan.ranks), plan.is_existing_rank) == (2, False)
        assert any("it was not set by a launcher, and each rank gets its own value" in note for note in plan.notes)
    by_hand = env | {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "20007"}
    assert _plan("python3 x.py", by_hand).is_existing_rank
    with pytest.raises(UserError, match="this process is already rank 7 of 9"):
        _plan("-n 2 python3 x.py", by_hand)


def test_dry_run_starts_and_writes_nothing(tmp_path: Path) -> None:
    words = ("-n", "2", "python3", "-m", "ezpz_llm.train", "--steps", "nonsense", "a b", "$(x)")
    done = launch(tmp_path, "--dry-run", "--no-check", "--json", *words)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["argv"][-7:] == list(words[2:])
    assert [place_ranks["local_rank"] for place_ranks in plan["ranks"]] == [0, 1]
    assert plan["env"]["EZPZ_LLM_WORLD_SIZE"] == "2"
    assert plan["env"]["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 < int(plan["env"]["MASTER_PORT"]) < 32768
    assert len(plan["hosts"]) == 1
    assert plan["sources"]["ranks"] == "-n"
    assert Path(plan["run_dir"]).parent == tmp_path / "runs"
    text = launch(tmp_path, "--dry-run", *words).stdout
    for expected in ("scheduler  none", "launcher   ", "ranks      2 on 1 node", "EZPZ_LLM_WORLD_SIZE=2",
                     "local rank"):
        assert expected in text
    assert list(tmp_path.iterdir()) == []


def test_a_rank_is_looked_up_where_it_is_counted() -> None:
    placement = Placement((("n1", 3), ("n2", 1), ("n3", 2)), "test")
    table = RankTable(placement, Binding("list", cores=("0", "1", "2"), devices=("7", "6", "5")))
    assert [(place_ranks.rank, place_ranks.host, place_ranks.local_rank, place_ranks.cores,
             place_ranks.device) for place_ranks in table] == [
        (0, "n1", 0, "0", "7"), (1, "n1", 1, "1", "6"), (2, "n1", 2, "2", "5"), (3, "n2", 0, "0", "7"),
        (4, "n3", 0, "0", "7"), (5, "n3", 1, "1", "6")]
    assert [table[rank] for rank in range(len(table))] == list(table)
    assert (table[-1], table[2:4]) == (table[5], tuple(list(table)[2:4]))
    with pytest.raises(IndexError):
        table[6]


def test_wrapping_words_stand_before_the_command(tmp_path: Path) -> None:
    done = launch(tmp_path, "--tee", "all", "-n", "2", "--wrap", "env 'WRAPPED=a b'", sys.executable, "-c",
                  "import os; print(os.environ['WRAPPED'])")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] a b", "[1] a b"]


def test_dry_run_of_our_own_command_runs_its_check(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "ezpz_llm.train", "--corpus", "no-such-folder/")
    wrong = launch(tmp_path, "--dry-run", "--json", "-n", "2", *command)
    assert wrong.returncode == 2
    assert "no-such-folder" in wrong.stderr
    assert "launch: the command would not start: its own check failed" in wrong.stderr
    assert json.loads(wrong.stdout)["argv"][-2:] == ["--corpus", "no-such-folder/"], "the plan is printed"
    unchecked = launch(tmp_path, "--dry-run", "--no-check", "-n", "2", *command)
    assert (unchecked.returncode, unchecked.stderr) == (0, "")
    before = cpu_seconds()
    right = launch(tmp_path, "--dry-run", "-n", "2", *command[:3])
    took = cpu_seconds() - before
    assert (right.returncode, right.stderr) == (0, "")
    assert right.stdout.splitlines()[-1].lstrip().startswith("1 "), "the plan, and nothing of the check"
    assert took < scaled(1.2)
    assert not list(tmp_path.iterdir())


def test_notes_of_the_check_are_part_of_the_plan(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 1}}')
    words = ("-n", "2", sys.executable, "-m", "ezpz_llm.train", "--ds-config", "mine.json")
    start = "mine.json has no bf16 or fp16 block"
    text = launch(tmp_path, "--dry-run", *words).stdout
    assert [line.split()[0] for line in text.splitlines() if start in line] == ["note"]
    assert text.index(start) < text.index("environment changes")
    notes = json.loads(launch(tmp_path, "--dry-run", "--json", *words).stdout)["notes"]
    assert [note for note in notes if note.startswith(start)]
    assert launch(tmp_path, "--dry-run", "--explain", *words).stdout.count(start) == 1


def test_dry_run_imports_nothing_heavy(tmp_path: Path) -> None:
    """Dataclasses are slow to define, and import `inspect`; so what launch imports defines named tuples."""
    heavy = {"torch", "numpy", "mpi4py", "deepspeed", "psutil", "rich",
             "dataclasses", "inspect", "argparse", "hashlib"}
    program = "import sys; from ezpz_llm.launcher.running.command import main; main(['--dry-run', '-n', '2', " \
              f"'hostname']); print('HEAVY', {heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=clean_env(), capture_output=True,
                          text=True, timeout=scaled(60), check=True)
    assert "HEAVY set()" in done.stdout
