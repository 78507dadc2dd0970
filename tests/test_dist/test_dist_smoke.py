"""Tests of test_dist under launch, torchrun, two hostnames and alone, and with injected faults."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist
from launch_runs import clean_env, launch
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist import Dist
from ezpz_llm.verify.check.test_dist.options import check, parser
from ezpz_llm.verify.check.test_dist.reductions import ACROSS, MAX_PAIRS, SAME, measure_reductions, pair_up

COMMAND = ["-m", "ezpz_llm.test_dist"]
ENV = {name: value for name, value in clean_env(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE").items()
       if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
PLOTS = {"loss.txt", "sps.txt", "dt.txt", "dtf.txt", "dtb.txt"}

# Rank 1's all-reduces do not change its tensor (it takes part with a copy, so that no rank hangs), and its loss
# after training differs.
FAULTY_RANK = """
import sys, torch, torch.distributed as dist
from ezpz_llm.core.base.errors import run_command
from ezpz_llm.verify.check.test_dist import run
from ezpz_llm.test_dist import main
original, measured = dist.all_reduce, run.held_out_loss
def faulty(tensor, *args, **kwargs):
    return original(tensor.clone() if dist.get_rank() == 1 else tensor, *args, **kwargs)
dist.all_reduce = faulty
run.held_out_loss = lambda engine, me, seed: measured(engine, me, seed) * (1 + 0.002 * me.rank)
raise SystemExit(run_command(main))
"""


def run(*command: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env={**ENV, **env}, capture_output=True, text=True,
                          timeout=scaled(120), check=False)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def iterations(text: str) -> list[dict[str, float]]:
    pattern = r"iter=(\d+) loss=([\d.]+) sps=([\d.]+) dt=([\d.]+) dtf=([\d.]+) dtb=([\d.]+)$"
    return [dict(zip(("iter", "loss", "sps", "dt", "dtf", "dtb"), map(float, values), strict=True))
            for values in re.findall(pattern, text, re.MULTILINE)]


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> RunDir:
    """Run 35 iterations of two ranks under DDP."""
    folder = tmp_path_factory.mktemp("launched")
    result = launch(folder, "-n", "2", "--run-dir", "out", sys.executable, *COMMAND, "--steps", "35",
                    timeout=120, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    assert result.returncode == 0, result.stdout + result.stderr
    return RunDir(folder / "out")


def test_output_of_two_ranks(launched):
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
        # sps includes the samples of both ranks.
        assert line["sps"] * line["dt"] / 1e3 == pytest.approx(128, rel=0.05)
    assert sum(line["loss"] for line in lines[-7:]) < 0.9 * sum(line["loss"] for line in lines[:7])
    for kind in ("all ranks", "same node"):
        for size in ("4 KiB", "4 MiB", "16 MiB"):
            assert re.search(rf"^  {kind} +1 +{size} +right +[\d.]+ +[\d.]+ +[\d.]+$", text, re.MULTILINE)
    assert "  across nodes: not measured, because all ranks are on one node" in text
    assert re.search(r"^imports +torch \d+\.\d\d s$", text, re.MULTILINE)
    assert "backend   gloo" in text
    assert text.rstrip().splitlines()[-1].startswith("[0] runtime=")


def test_files_of_two_ranks(launched):
    text = launched.rank_log(0).read_text()
    assert {path.name for path in launched.plots.iterdir()} == PLOTS
    for name in PLOTS:
        assert (launched.plots / name).read_text() in text
    assert "train" in (launched.profile / "host.txt").read_text()
    assert (launched.profile / "host.html").stat().st_size > 10_000
    written = list(read_lines(launched.metrics))
    assert [line["step"] for line in written] == list(range(1, 36))
    printed = [line["loss"] for line in iterations(text)]
    assert [line["loss"] for line in written] == pytest.approx(printed, abs=1e-5)
    record = read_record(launched)
    assert record.launch.world_size == 2
    assert record.exit.code == 0
    result = record.test_dist
    assert (result.fit, result.findings) == (True, [])
    assert "test_dist: fit (sums, weights, and loss of 2 ranks)" in text
    assert [reduction["kind"] for reduction in result.reductions] == ["all ranks"] * 3 + ["same node"] * 3
    assert [reduction["bytes"] for reduction in result.reductions] == [2**12, 2**22, 2**24] * 2
    for reduction in result.reductions:
        rate = reduction["algorithm_gigabytes_per_second"]
        assert reduction["wrong_ranks"] == []
        assert rate == pytest.approx(reduction["bytes"] / reduction["seconds"] / 1e9)
        assert reduction["bus_gigabytes_per_second"] == pytest.approx(rate)  # for groups of two
    assert set(result.spread) == {"sps", "dt", "dtf", "dtb"}
    assert record.config == {"ds_config": "ddp", "steps": 35, "seed": 0, "device": "auto", "batch": {
        "global_batch": 128, "micro_batch": 64, "accumulation": 1, "dp_size": 2}}
    assert record.environment.versions["torch"]
    assert record.import_seconds["torch"] > 0


@pytest.mark.full
def test_deepspeed_under_torchrun_gives_the_same_losses(launched, tmp_path):
    result = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *COMMAND,
                 "--steps", "12", "--ds-config", "zero3", "--run-dir", "out", folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    record = read_record(RunDir(tmp_path / "out"))
    assert record.environment.rank_source == "torchrun (RANK)"
    assert record.import_seconds.keys() == {"torch", "deepspeed"}
    assert json.loads((tmp_path / "out/layout.json").read_text())["layout"]["name"] == "zero3"
    ddp = [line["loss"] for line in read_lines(launched.metrics)][:12]
    assert [line["loss"] for line in iterations(result.stdout)] == pytest.approx(ddp, abs=2e-5)


@pytest.mark.full
def test_zero1_under_launch_gives_the_same_losses(launched, tmp_path):
    result = launch(tmp_path, "-n", "2", "--run-dir", "out", sys.executable, *COMMAND, "--ds-config", "zero1",
                    "--steps", "12", timeout=120, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "layout    zero1, fp32" in result.stdout
    ddp = [line["loss"] for line in read_lines(launched.metrics)][:12]
    written = list(read_lines(tmp_path / "out/metrics.jsonl"))
    assert [line["loss"] for line in written] == pytest.approx(ddp, abs=2e-5)


@pytest.mark.full
def test_one_process_skips_all_reduces(launched, tmp_path):
    result = run(sys.executable, *COMMAND, "--steps", "30", "--batch", "16", "--seed", "7", "--run-dir", "out",
                 folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all-reduce: one rank, nothing to test" in result.stdout
    assert f"[cpu][rank=0/0][0][{socket.gethostname()}]" in result.stdout
    assert read_record(RunDir(tmp_path / "out")).test_dist.reductions == []
    lines = iterations(result.stdout)
    assert [line["sps"] * line["dt"] / 1e3 for line in lines] == pytest.approx([16] * 30, rel=0.05)
    first_of_seed_0 = next(iter(read_lines(launched.metrics)))["loss"]
    assert abs(lines[0]["loss"] - first_of_seed_0) > 1e-4

    written = (tmp_path / "out/metrics.jsonl").read_bytes()
    for options in ([], ["--check"]):
        result = run(sys.executable, *COMMAND, "--run-dir", "out", *options, folder=tmp_path)
        assert result.returncode == 2
        assert "error: the run directory contains another run's metrics" in result.stderr
        assert "Traceback" not in result.stderr
    assert (tmp_path / "out/metrics.jsonl").read_bytes() == written


def test_a_run_directory_with_metrics_is_rejected_before_ranks_start(launched):
    written = launched.metrics.read_bytes()
    result = run(sys.executable, *COMMAND, "--run-dir", str(launched.path), "--check", folder=launched.path.parent)
    assert result.returncode == 2
    assert "error: the run directory contains another run's metrics" in result.stderr
    assert "Traceback" not in result.stderr
    assert launched.metrics.read_bytes() == written


def _has_uts() -> bool:
    unshare = shutil.which("unshare")
    return bool(unshare) and subprocess.run([unshare, "--uts", "true"], capture_output=True).returncode == 0


@pytest.mark.full
@pytest.mark.skipif(not _has_uts(), reason="no permission to set the hostname of a process")
def test_ranks_of_two_hostnames_are_paired_across_nodes(tmp_path):
    """The second of two ranks on one node has no partner on a node with one rank."""
    command = [sys.executable, *COMMAND, "--steps", "10", "--run-dir", "out"]
    result = run(shutil.which("mpiexec", path=ENV["PATH"]), "-n", "2", *command, ":",
                 "-n", "1", "unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh", *command,
                 folder=tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), GLOO_SOCKET_IFNAME="lo")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "[rank=2/2][2][elsewhere]" in result.stdout
    record = read_record(RunDir(tmp_path / "out"))
    by_kind = {reduction["kind"]: reduction for reduction in record.test_dist.reductions}
    assert set(by_kind) == {"all ranks", "same node", "across nodes"}
    assert by_kind["same node"]["slowest"] == [0, 1]
    assert by_kind["across nodes"]["slowest"] == [0, 2]
    for kind, factor in (("all ranks", 4 / 3), ("same node", 1), ("across nodes", 1)):
        rate = by_kind[kind]["algorithm_gigabytes_per_second"]
        assert by_kind[kind]["bus_gigabytes_per_second"] == pytest.approx(factor * rate)


@pytest.mark.full
def test_wrong_sums_or_weights_fail_the_run(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY_RANK)
    result = launch(tmp_path, "-n", "2", "--run-dir", "out", sys.executable, "faulty.py", "--steps", "10",
                    timeout=120, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    assert result.returncode == 1
    log = RunDir(tmp_path / "out").rank_log(0).read_text()
    assert "bad   sums: rank 1 got wrong sums in all-reduces (all ranks, same node)" in log
    assert log.count("WRONG on ranks 1") == 6  # three sizes of two kinds
    assert "bad   weights: rank 1 has different weights than rank 0: losses of " in log
    assert "bad   values: rank 1 got wrong values: all-reduce in fp32" in log
    assert "test_dist: unfit: 3 problems (" in log
    record = read_record(RunDir(tmp_path / "out")).test_dist
    assert record.fit is False
    assert [finding.topic for finding in record.findings] == ["sums", "values", "weights"]


@pytest.mark.full
def test_a_loss_that_does_not_decrease_fails_the_run(tmp_path):
    (tmp_path / "zero_lr.json").write_text(json.dumps({
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}}, "ezpz_llm": {"engine": "ddp"}}))
    result = run(sys.executable, *COMMAND, "--steps", "10", "--ds-config", "zero_lr.json", "--run-dir", "out",
                 folder=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "bad   loss: the loss did not decrease: 1.01" in result.stdout


@pytest.mark.parametrize(("options", "message"), [
    (["--ds-config", "zero7"], "unknown ds_config 'zero7'"),
    (["--ds-config", "tp2"], "layout tp2: dp 1 x tp 2 requires a GPT"),
    (["--steps", "3"], "--steps must be at least 10, but is 3"),
    (["--batch", "0"], "a micro-batch of 0 sequences"),
    (["--seed", "-1"], "seed -1 is out of range"),
    (["--device", "gpu"], "invalid choice: 'gpu'"),
    (["--step", "30"], "did you mean --steps"),
])
def test_invalid_options_are_rejected_before_ranks_start(options, message, tmp_path):
    result = launch(tmp_path, "-n", "2", sys.executable, *COMMAND, *options, timeout=120)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


def test_the_batch_of_a_ds_config_overrides_the_default(tmp_path):
    """The default of 64 becomes 50, which divides 100 samples on two ranks; --batch must divide them."""
    (tmp_path / "hundred.json").write_text(json.dumps({"train_batch_size": 100, "zero_optimization": {"stage": 1}}))
    arguments = ["--ds-config", str(tmp_path / "hundred.json")]
    batch = check(parser().parse_args(arguments), 2).batch
    assert (batch.global_batch, batch.micro_batch, batch.accumulation) == (100, 50, 1)
    assert check(parser().parse_args([*arguments, "--batch", "25"]), 2).batch.accumulation == 2
    with pytest.raises(UserError, match="a global batch of 100 sequences is not a multiple of micro-batch 64 x 2"):
        check(parser().parse_args([*arguments, "--batch", "64"]), 2)
    assert check(parser().parse_args([]), 2).batch.micro_batch == 64


def test_check_and_help_do_not_import_torch():
    for options in ("['--check', '--world-size', '4', '--ds-config', 'zero2']", "['--help']"):
        code = f"""
import sys
from ezpz_llm.test_dist import main
try:
    print('code', main({options}))
finally:
    print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)
"""
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                                timeout=scaled(120), env=ENV, check=False)
        assert result.returncode == 0
        assert result.stderr.split() == ["False", "False"]


@pytest.mark.parametrize("ranks_a_node", [1, 7, 8, 56])
def test_a_doubled_own_value_is_a_wrong_sum(ranks_a_node, monkeypatch):
    """The test includes pairs at several distances, and both ranks of a pair."""
    world = 2 * ranks_a_node

    def gather(into: list, value: object, group: object) -> None:
        into[:] = [f"n{rank // ranks_a_node}" for rank in range(world)] if isinstance(value, str) else [value]

    monkeypatch.setattr(torch_dist, "all_gather_object", gather)
    monkeypatch.setattr(torch_dist, "new_group", tuple)
    monkeypatch.setattr(torch_dist, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(torch_dist, "all_reduce", lambda values, group: values.mul_(2))
    for rank in (0, ranks_a_node):
        alone = Dist(RankInfo(rank, world, 0, ranks_a_node, 0, "test"), torch.device("cpu"), "gloo", None, None)
        across = [reduction for reduction in measure_reductions(alone) if reduction.kind == ACROSS]
        assert len(across) == 3
        assert all(reduction.wrong_ranks for reduction in across)


def test_pair_up():
    assert pair_up(["a"] * 5) == {SAME: [(0, 1), (2, 3)], ACROSS: []}
    assert pair_up(["a", "a", "b", "b"]) == {SAME: [(0, 1), (2, 3)], ACROSS: [(0, 2), (1, 3)]}
    assert pair_up(["a", "b", "c", "d", "e"]) == {SAME: [], ACROSS: [(0, 1), (2, 3)]}
    assert pair_up(["a", "b", "a", "b"])[SAME] == [(0, 2), (1, 3)]  # ranks assigned to nodes in turn
    many = pair_up([f"n{rank // 8}" for rank in range(1024)])
    for pairs in many.values():
        assert len(pairs) == MAX_PAIRS
        assert len({rank for pair in pairs for rank in pair}) == 2 * MAX_PAIRS
    assert (many[SAME][0], many[SAME][-1]) == ((0, 1), (1022, 1023))
