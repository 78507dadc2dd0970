"""Trackers get the numbers of metrics.jsonl, write only to the run directory, and cannot block or end a run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

import pytest
from slowness import scaled
from tracker_files import mlflow_curves, tensorboard_curves, wandb_curves

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.observe import trackers
from ezpz_llm.training.observe.trackers import Choice, Tracking, parse_trackers

NEEDS = {"tensorboard": ["tensorboard"], "wandb": ["wandb"], "mlflow": ["mlflow", "sqlalchemy", "alembic"]}
INSTALLED = [name for name, packages in NEEDS.items() if all(map(find_spec, packages))]
TRAIN = ["--n-layer", "1", "--n-embd", "32", "--block-size", "32", "--micro-batch-size", "1", "--eval-tokens",
         "256", "--sample-tokens", "0", "--log-every", "5", "--eval-every", "5", "--profile", "false"]


class Listener:
    """Proxy that records requests and rejects them."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.requests: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                self.requests.append(connection.recv(200).split(b"\r\n")[0])
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


def train(run_dir, home, listener, *options):
    home.mkdir(exist_ok=True)
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    unwanted = ("WANDB_", "MLFLOW_", "CI", "NO_PROXY", "no_proxy", "PYTEST_", "XDG_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    cache = os.environ.get("EZPZ_LLM_CACHE", os.path.expanduser("~/.cache/ezpz_llm"))
    env.update(dict.fromkeys(names, listener.url), HOME=str(home), EZPZ_LLM_CACHE=cache, OMP_NUM_THREADS="1",
               OMP_WAIT_POLICY="PASSIVE", WANDB_API_KEY="0" * 40, WANDB_INIT_TIMEOUT="8")
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", str(run_dir), sys.executable, "-m",
               "ezpz_llm.train", *TRAIN, *options]
    return subprocess.run(command, env=env, cwd=home, capture_output=True, text=True,
                          timeout=scaled(250), check=False)


@pytest.mark.full
@pytest.mark.skipif(not INSTALLED, reason="no tracker is installed")
def test_every_tracker_has_the_numbers_and_writes_only_to_the_run_directory(tmp_path):
    """Two attempts: 10 steps with a checkpoint after step 5, then from there to step 15."""
    run_dir, listener, track = RunDir(tmp_path / "run"), Listener(), ["--track", ",".join(INSTALLED)]
    first = train(run_dir.path, tmp_path / "home", listener, "--steps", "10", "--save-every", "5", *track)
    assert first.returncode == 0, first.stdout + first.stderr
    named = read_record(run_dir).trackers
    from_the_fifth = ["--resume", str(run_dir.path / "checkpoints" / "step-00000005"), "--save-every", "-1"]
    again = train(run_dir.path, tmp_path / "home", listener, "--steps", "15", *from_the_fifth, *track)
    assert again.returncode == 0, again.stdout + again.stderr
    assert read_record(run_dir).trackers == named, "the second attempt continues the same run of each tracker"

    written = {}
    for line in read_lines(run_dir.metrics):
        for name in line.keys() - {"step"}:
            written.setdefault(name, {})[line["step"]] = line[name]
    assert sorted(written["loss"]) == list(range(1, 16))
    assert sorted(written["val_loss"]) == [5, 10, 15]
    readers = {"tensorboard": tensorboard_curves, "wandb": wandb_curves,
               "mlflow": lambda folder: mlflow_curves(folder, named["mlflow"].run_id)}
    for tracker in INSTALLED:
        curves = readers[tracker](run_dir.tracker(tracker))
        for name, values in written.items():
            # TensorBoard stores 32-bit floats. For repeated steps, each tracker shows the second attempt.
            assert curves[name] == pytest.approx(values, rel=1e-6), (tracker, name)

    outside = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert outside == [], "all files are in the run directory"
    assert listener.requests == [], "no request is sent"


@pytest.mark.full
@pytest.mark.skipif("wandb" not in INSTALLED, reason="wandb is not installed")
def test_unreachable_server_in_online_mode_is_a_user_error(tmp_path):
    listener = Listener()
    run = train(tmp_path / "run", tmp_path / "home", listener, "--steps", "2", "--track", "wandb:online")
    assert listener.requests, "the tracker uses the proxy"
    assert run.returncode == 2, run.stdout + run.stderr
    assert "wandb cannot be opened" in run.stderr
    assert "--track wandb to write only to the run directory" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(("text", "found", "instead"), [
    ("tensorbord", "unknown tracker 'tensorbord'", "tensorboard"),
    ("tensorboard:online", "no online mode", "--track tensorboard"),
    ("mlflow:online", "MLFLOW_TRACKING_URI", "--track mlflow"),
    ("wandb:offline", "'offline'", "wandb:online"),
    ("tensorboard, tensorboard", "named twice", "tensorboard"),
])
def test_invalid_track_options_are_rejected(text, found, instead):
    with pytest.raises(UserError, match=found) as error:
        parse_trackers(text, {})
    assert instead in error.value.instead


def test_missing_tracker_error_names_its_extra(monkeypatch):
    monkeypatch.setattr("ezpz_llm.training.observe.trackers.find_spec", lambda name: None)
    with pytest.raises(UserError, match="requires mlflow and sqlalchemy and alembic") as error:
        parse_trackers("mlflow", {})
    assert error.value.instead == "pip install 'ezpz_llm[mlflow]'"
    assert parse_trackers(None, {}) == parse_trackers("", {}) == ()


class Stubborn:
    """Tracker that blocks every row until it is released, and then fails at step 3."""

    run_id = None

    def __init__(self) -> None:
        self.release, self.steps, self.ended = threading.Event(), [], None

    def write(self, rows):
        self.release.wait(scaled(30))
        self.steps += [row.step for row in rows]
        if 3 in self.steps:
            raise OSError("the disk is full")

    def rewind(self, step):
        self.steps = [kept for kept in self.steps if kept <= step]

    def close(self, failed):
        self.ended = failed


def test_slow_tracker_does_not_block_and_failing_tracker_is_dropped(tmp_path, monkeypatch, capsys):
    slow, steady = Stubborn(), Stubborn()
    steady.write = lambda rows: steady.steps.extend(row.step for row in rows)
    monkeypatch.setattr(trackers, "_open_tracker",
                        lambda choice, arguments: {"wandb": slow, "mlflow": steady}[choice.name])
    run_dir = RunDir(tmp_path / "run").create()
    tracking = Tracking([Choice("wandb", False), Choice("mlflow", False)])
    tracking.open(run_dir, 0)
    begin = time.monotonic()
    for step in (1, 3, 5):
        tracking.write([{"step": step, "loss": 1.0}, {"step": step + 1, "loss": None}])
    tracking.rewind(5)
    assert time.monotonic() - begin < scaled(15), "it waited for the tracker"
    assert slow.steps == []
    slow.release.set()
    tracking.close(failed=True)
    assert slow.steps == [1, 2, 3, 4], "dropped after it failed"
    assert steady.steps == [1, 2, 3, 4, 5]
    assert (slow.ended, steady.ended) == (None, True)
    printed = capsys.readouterr().out
    assert ("warning: wandb failed (OSError: the disk is full) and receives no more metrics; metrics.jsonl has all "
            "of them") in printed


def test_times_and_values_of_a_flush():
    lines = [{"step": 1, "loss": None, "step_time_s": 2.0},
             {"step": 2, "loss": 3.5, "step_time_s": 0.5, "lr_of": {"decay": 1e-3}, "note": "x", "flag": True}]
    rows = trackers._rows(lines, now=100.0)
    assert [(row.step, row.time) for row in rows] == [(1, 99.5), (2, 100.0)]
    assert rows[0].values == {"step_time_s": 2.0}
    assert rows[1].values == {"loss": 3.5, "step_time_s": 0.5, "lr_of.decay": 1e-3, "flag": 1.0}
