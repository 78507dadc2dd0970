"""test_dist as a user runs it: under launch, torchrun, two hosts, alone; and with planted faults."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env, launch

from ezpz_llm.rundir import RunDir, read_lines, read_record
from ezpz_llm.test_dist.reductions import ACROSS, MOST_PAIRS, SAME, pair_up

COMMAND = ["-m", "ezpz_llm.test_dist"]
ENV = {name: value for name, value in clean_env(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE").items()
       if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
PLOTS = {"loss.txt", "sps.txt", "dt.txt", "dtf.txt", "dtb.txt"}

# Rank 1's all-reduces leave its tensor as it was (it still takes part, so that nobody waits), and its loss after
# the training is not the others'.
DEAF = """
import sys, torch, torch.distributed as dist
from ezpz_llm.errors import run_command
from ezpz_llm.test_dist import run
from ezpz_llm.test_dist.__main__ import main
original, measured = dist.all_reduce, run.held_out_loss
def deaf(tensor, *args, **kwargs):
    return original(tensor.clone() if dist.get_rank() == 1 else tensor, *args, **kwargs)
dist.all_reduce = deaf
run.held_out_loss = lambda engine, me: measured(engine, me) * (1 + 0.002 * me.rank)
raise SystemExit(run_command(main))
"""


def run(*words: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, env={**ENV, **env}, capture_output=True, text=True, timeout=120,
                          check=False)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def iterations(text: str) -> list[dict[str, float]]:
    pattern = r"iter=(\d+) loss=([\d.]+) sps=([\d.]+) dt=([\d.]+) dtf=([\d.]+) dtb=([\d.]+)$"
    return [dict(zip(("iter", "loss", "sps", "dt", "dtf", "dtb"), map(float, found), strict=True))
            for found in re.findall(pattern, text, re.MULTILINE)]


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> RunDir:
    """35 iterations of two ranks under DDP."""
    folder = tmp_path_factory.mktemp("launched")
    done = launch(folder, "-n", "2", "--run-dir", "out", sys.executable, *COMMAND, "--steps", "35",
                  timeout=120, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    assert done.returncode == 0, done.stdout + done.stderr
    return RunDir(folder / "out")


def test_what_two_ranks_print(launched):
    for rank in (0, 1):
        log = launched.rank_log(rank).read_text()
        assert f"[cpu][rank={rank}/1][{rank}][{socket.gethostname()}]" in log
        assert re.search(rf"^\[{rank}\] runtime=\d+\.\d\ds$", log, re.MULTILINE)
    assert "iter=" not in launched.rank_log(1).read_text()

    text = launched.rank_log(0).read_text()
    lines = iterations(text)
    assert [line["iter"] for line in lines] == list(range(1, 36))
    for line in lines:
        assert line["dtf"] + line["dtb"] <= line["dt"] + 0.02
        # Samples of both ranks count.
        assert line["sps"] * line["dt"] / 1e3 == pytest.approx(128, rel=0.05)
    assert sum(line["loss"] for line in lines[-7:]) < 0.9 * sum(line["loss"] for line in lines[:7])
    assert re.search(r"^  all ranks +1 +right +[\d.]+ +[\d.]+$", text, re.MULTILINE)
    assert re.search(r"^  same node +1 +right +[\d.]+ +[\d.]+$", text, re.MULTILINE)
    assert re.search(r"^  across nodes +0 +all ranks are on one node$", text, re.MULTILINE)
    assert re.search(r"^imports +torch \d+\.\d\d s$", text, re.MULTILINE)
    assert "backend   gloo" in text
    assert text.rstrip().splitlines()[-1].startswith("[0] runtime=")


def test_what_two_ranks_leave_behind(launched):
    text = launched.rank_log(0).read_text()
    assert {path.name for path in launched.plots.iterdir()} == PLOTS
    for name in PLOTS:
        assert (launched.plots / name).read_text() in text
    assert "train" in (launched.profile / "host.txt").read_text()
    assert (launched.profile / "host.html").stat().st_size > 10_000
    written = list(read_lines(launched.metrics))
    assert [line["step"] for line in written] == list(range(1, 36))
    assert [line["loss"] for line in written] == pytest.approx([one["loss"] for one in iterations(text)], abs=1e-5)
    record = read_record(launched)
    assert record["launch"]["world_size"] == 2
    assert record["exit"]["code"] == 0
    result = record["test_dist"]
    assert (result["healthy"], result["reasons"], result["steps"]) == (True, [], 35)
    assert [one["kind"] for one in result["reductions"]] == ["all ranks", "same node"]
    assert set(result["spread"]) == {"sps", "dt", "dtf", "dtb"}
    assert record["environment"]["versions"]["torch"]
    assert record["import_seconds"]["torch"] > 0


def test_deepspeed_under_torchrun_gives_the_same_losses(launched, tmp_path):
    done = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *COMMAND,
               "--steps", "12", "--ds-config", "zero3", "--run-dir", "out", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(RunDir(tmp_path / "out"))
    assert record["environment"]["rank_source"] == "torchrun (RANK)"
    assert record["import_seconds"].keys() == {"torch", "deepspeed"}
    assert json.loads((tmp_path / "out/layout.json").read_text())["layout"]["name"] == "zero3"
    ddp = [line["loss"] for line in read_lines(launched.metrics)][:12]
    assert [line["loss"] for line in iterations(done.stdout)] == pytest.approx(ddp, abs=2e-5)


def test_one_process_has_nothing_to_reduce(tmp_path):
    done = run(sys.executable, *COMMAND, "--steps", "10", "--run-dir", "out", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all-reduce: one rank, nothing to test" in done.stdout
    assert f"[cpu][rank=0/0][0][{socket.gethostname()}]" in done.stdout
    assert read_record(RunDir(tmp_path / "out"))["test_dist"]["reductions"] == []

    written = (tmp_path / "out/metrics.jsonl").read_bytes()
    for check in ([], ["--check"]):
        done = run(sys.executable, *COMMAND, "--run-dir", "out", *check, folder=tmp_path)
        assert done.returncode == 2
        assert "error: the run directory holds another run's metrics" in done.stderr
        assert "Traceback" not in done.stderr
    assert (tmp_path / "out/metrics.jsonl").read_bytes() == written


def _has_uts() -> bool:
    unshare = shutil.which("unshare")
    return bool(unshare) and subprocess.run([unshare, "--uts", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _has_uts(), reason="no right to give a process another host name")
def test_ranks_of_two_host_names_are_paired_across(tmp_path):
    """Two and one rank; the odd one out of the first host has no partner on the second."""
    words = [sys.executable, *COMMAND, "--steps", "10", "--run-dir", "out"]
    done = run(shutil.which("mpiexec", path=ENV["PATH"]), "-n", "2", *words, ":",
               "-n", "1", "unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh", *words,
               folder=tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rank=2/2][2][elsewhere]" in done.stdout
    found = {one["kind"]: one for one in read_record(RunDir(tmp_path / "out"))["test_dist"]["reductions"]}
    assert set(found) == {"all ranks", "same node", "across nodes"}
    assert found["same node"]["slowest"] == [0, 1]
    assert found["across nodes"]["slowest"] == [0, 2]
    assert all(one["gigabytes_per_second"] > 0 for one in found.values())


def test_a_rank_with_wrong_sums_or_weights_fails_the_run(tmp_path):
    (tmp_path / "deaf.py").write_text(DEAF)
    done = launch(tmp_path, "-n", "2", "--run-dir", "out", sys.executable, "deaf.py", "--steps", "10",
                  timeout=120, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    assert done.returncode == 1
    log = RunDir(tmp_path / "out").rank_log(0).read_text()
    assert "error: rank 1 got wrong sums in all-reduces (all ranks, same node)" in log
    assert "WRONG on ranks 1" in log
    assert "error: rank 1 has other weights than rank 0: a loss of " in log
    assert "healthy: " not in log
    assert read_record(RunDir(tmp_path / "out"))["test_dist"]["healthy"] is False


def test_a_loss_that_does_not_fall_fails_the_run(tmp_path):
    (tmp_path / "still.json").write_text(json.dumps({
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}}, "ezpz_llm": {"engine": "torch"}}))
    done = run(sys.executable, *COMMAND, "--steps", "10", "--ds-config", "still.json", "--run-dir", "out",
               folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: the loss did not fall: 1.01" in done.stdout


@pytest.mark.parametrize(("options", "found"), [
    (["--ds-config", "zero7"], "unknown ds_config 'zero7'"),
    (["--steps", "3"], "3 iterations are too few"),
    (["--device", "gpu"], "invalid choice: 'gpu'"),
    (["--step", "30"], "unrecognized arguments: --step"),
])
def test_a_mistake_is_found_before_any_rank_starts(options, found, tmp_path):
    done = launch(tmp_path, "-n", "2", sys.executable, *COMMAND, *options, timeout=20)
    assert done.returncode == 2
    assert found in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_check_and_the_help_import_no_torch():
    for options in ("['--check', '--world-size', '4', '--ds-config', 'zero2']", "['--help']"):
        code = f"""
import sys
from ezpz_llm.test_dist.__main__ import main
try:
    print('code', main({options}))
finally:
    print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=ENV,
                              check=False)
        assert done.returncode == 0
        assert done.stderr.split() == ["False", "False"]


def test_pairs():
    assert pair_up(["a"] * 5) == {SAME: [(0, 1), (2, 3)], ACROSS: []}
    assert pair_up(["a", "a", "b", "b"]) == {SAME: [(0, 1), (2, 3)], ACROSS: [(0, 2), (1, 3)]}
    assert pair_up(["a", "b", "c", "d", "e"]) == {SAME: [], ACROSS: [(0, 1), (2, 3)]}
    assert pair_up(["a", "b", "a", "b"])[SAME] == [(0, 2), (1, 3)]  # ranks dealt round the hosts
    many = pair_up([f"n{rank // 8}" for rank in range(1024)])
    for pairs in many.values():
        assert len(pairs) == MOST_PAIRS
        assert len({rank for pair in pairs for rank in pair}) == 2 * MOST_PAIRS
    assert (many[SAME][0], many[SAME][-1]) == ((0, 1), (1022, 1023))
