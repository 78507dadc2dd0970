"""Planted failures in runs of four ranks on two simulated nodes: check the post-mortem's headline and advice.

The failures are data, planted/*.toml (planted/README.md explains how to add one). The table in
benchmarks/results/planted_failures.md is written by

    python3 benchmarks/record.py planted-failures
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from launch_runs import launch, record
from places import ROOT, TESTS
from simcluster.cluster import Cluster

from ezpz_llm.core.base.untrusted_input import parse_toml

RESULTS = ROOT / "benchmarks/results/planted_failures.md"
BLIND = {f"{name}.toml": RESULTS.with_name(f"{name}_failures.json")
         for name in ("blind", "blind_second", "blind_third", "blind_fourth", "blind_fifth", "blind_sixth",
                      "blind_seventh")}
"""Files of failures that were new to the classifier, and the records of their first runs."""
_AT_ONCE = 4
_LIMIT_S = 300
"""Time limit of each wait: with forty busy processes on the machine, one run took 100 s."""
_BAR = 0.95
"""Required results: the cause is named in 57 of 60 failures, and the advice is never wrong."""
_PAIRS = (("n1", "n2"), ("n3", "n4"), ("n5", "n6"))
_ALONE = ("n7", "n8")

# Program of a rank; the failure's lines come last, so that tracebacks show them.
_PROGRAM = """
import ctypes, os, sys, time
rank, host = int(os.environ["EZPZ_LLM_RANK"]), os.uname().nodename
for step in range(5):
    print(f"step {step:4d} | loss {9 - step * .1:.3f} | {step * 31.7:.1f} tokens/s", flush=True)
open(os.path.join(os.environ["EZPZ_LLM_RUN_DIR"], f"up{rank}"), "w").close()
exec(compile(open("fails.py" if rank in %(who)r else "others.py").read(), "plant.py", "exec"))
"""
_ENDS = {"exit": "sys.stderr.flush(); os._exit({})", "abort": "ctypes.CDLL(None).abort()",
         "signal": "import signal; os.kill(os.getpid(), signal.{})"}


@dataclass(frozen=True)
class Plant:
    """A table of a file; planted/README.md explains its keys."""

    name: str
    file: str
    what: str
    who: tuple[int, ...]
    cause: tuple[str, ...]
    advice: str | None = None
    does: str = ""
    others: str = "time.sleep(3600)"
    prints: str = ""
    ends: str = "exit 1"
    source: str = ""
    options: tuple[str, ...] = ()
    second: str = ""
    under: str = "ssh"
    act: str = ""
    alone: bool = False
    memory: int = 0
    scorecard: bool = False
    default: bool = False
    missed: str = ""
    misadvised: str = ""

    def __post_init__(self) -> None:
        assert bool(self.prints) == bool(self.source), f"[{self.name}]: prints and source belong together"
        assert not (self.prints and self.does), f"[{self.name}]: either does or prints"

    def write(self, folder: Path) -> None:
        """Write the failure's programs into the folder of the run."""
        for name in ("lib", "scratch"):
            (folder / name).mkdir()
        (folder / "lib/made_up.py").touch()
        (folder / "program.py").write_text(_PROGRAM % {"who": self.who})
        (folder / "others.py").write_text(self.others)
        word, _, value = self.ends.partition(" ")
        said = f"sys.stderr.write({self.prints.lstrip()!r}); sys.stderr.flush()\n"
        (folder / "fails.py").write_text(self.does or said + _ENDS[word].format(value))


def _read(path: Path) -> list[Plant]:
    tables = parse_toml(path.read_text(), str(path))
    return [Plant(name, path.name, **{key: tuple(value) if isinstance(value, list) else value
                                      for key, value in table.items()}) for name, table in tables.items()]


_FILES = ("ours.toml", "others.toml", *BLIND)
PLANTS = [plant for name in _FILES for plant in _read(TESTS / "launch/planted" / name)]
_BLIND_ONES = {name: [plant for plant in PLANTS if plant.file == name] for name in BLIND}
_NO_ERROR = re.compile(r"  (?:log|try|\d+ ranks?|ranks?|no record|last lines)\b")


@dataclass(frozen=True)
class Seen:
    """The post-mortem of a run, and the names of its two nodes."""

    text: str
    hosts: tuple[str, str]

    @property
    def headline(self) -> str:
        """The first line of the post-mortem, and the line of the error below it."""
        lines = self.text.splitlines()
        has_error = len(lines) > 1 and re.match(r"  [^| ]", lines[1]) and not _NO_ERROR.match(lines[1])
        return "\n".join(lines[:2] if has_error else lines[:1])

    @property
    def advised(self) -> str:
        return next((line[7:] for line in self.text.splitlines() if line.startswith("  try: ")), "")

    def fits(self, pattern: str, text: str) -> bool:
        for word, host in zip(("FIRST", "SECOND"), self.hosts, strict=True):
            pattern = pattern.replace(word, host)
        return re.search(pattern, text) is not None

    def names(self, plant: Plant) -> bool:
        return all(self.fits(pattern, self.headline) for pattern in plant.cause)

    def advice(self, plant: Plant) -> str:
        """Rating of the advice: right, absent or wrong."""
        if not self.advised:
            return "absent"
        return "right" if plant.advice is not None and self.fits(plant.advice, self.advised) else "wrong"


def _play(cluster: Cluster, folder: Path, plant: Plant, pairs: Queue[tuple[str, str]],
          alone: Queue[tuple[str, str]]) -> Seen:
    """Run a failure on two nodes of the simulated cluster."""
    plant.write(folder)
    queue = alone if plant.alone or plant.under != "ssh" else pairs
    hosts = queue.get()
    with contextlib.ExitStack() as undo:
        undo.callback(queue.put, hosts)
        if plant.memory:
            try:
                undo.callback(cluster.limit_memory(hosts[1], plant.memory))
            except OSError as error:
                pytest.skip(f"no memory cgroup can be made here: {error}")
        if plant.second:
            line = plant.second.replace("{prefix}", sys.prefix)
            done = cluster.run("sh", "-ec", line, node=hosts[1], cwd=folder)
            assert done.returncode == 0, done.stderr
            undo.callback(cluster.run, "sh", "-c", f"cd {folder} && umount -l {line.split()[-1]}", node=hosts[1])
        return Seen(_ended(cluster, folder, plant, hosts, undo), hosts)


def _ended(cluster: Cluster, folder: Path, plant: Plant, hosts: tuple[str, str], undo: contextlib.ExitStack) -> str:
    words = ["launch", "--launcher", "srun" if plant.under != "ssh" else "mpiexec", "--run-dir", "run",
             *plant.options, "python3", "program.py"]
    if plant.under == "ssh":
        words[1:1] = ["--hosts", ",".join(hosts), "--ppn", "2"]
    reservation = ["-N2", "--ntasks-per-node=2", "-t5", "-w", ",".join(hosts)]
    if plant.under == "sbatch":
        # The script survives a cancelled job's first signal, like a script that saves results.
        (folder / "job.sh").write_text(f"#!/bin/bash\n#SBATCH -o job.txt\ntrap : TERM\n{' '.join(words)}\n")
        cluster.run("sbatch", *reservation, "job.sh", cwd=folder)
        running = None
    else:
        running = cluster.start(*(["salloc", *reservation] if plant.under == "salloc" else []), *words, cwd=folder,
                                OMP_NUM_THREADS="1")
    post_mortem = folder / "run/postmortem.txt"
    if plant.act:
        _wait_for(lambda: len(list(folder.glob("run/up*"))) == 4, "the ranks")
        _act(cluster, folder, plant, hosts, running, undo)
    if running is not None:
        said = cluster.finish(running, _LIMIT_S).stderr
        if plant.act == "kill-launch":
            _wait_for(lambda: cluster.processes(record(folder / "run")["launch"]["env"]["EZPZ_LLM_RUN_ID"]) == {},
                      "the end of all processes")
            return cluster.run("ezpz-llm", "why", "run", cwd=folder).stdout.partition("\n")[2]
        assert post_mortem.exists(), said
    else:
        _wait_for(post_mortem.exists, "the post-mortem")
        time.sleep(0.2)
    return post_mortem.read_text()


def _act(cluster: Cluster, folder: Path, plant: Plant, hosts: tuple[str, str],
         running: subprocess.Popen[str] | None, undo: contextlib.ExitStack) -> None:
    job = record(folder / "run")["launch"]["job_id"]
    if plant.act == "kill-launch":
        assert running is not None
        running.send_signal(signal.SIGKILL)
    elif plant.act == "power-off":
        cluster.kill_node(hosts[1])
        undo.callback(cluster.boot_node, hosts[1])
    else:
        words = ("scancel", str(job)) if plant.act == "scancel" else (
            "scontrol", "update", f"JobId={job}", "EndTime=now+5")
        done = cluster.run(*words)
        assert done.returncode == 0, done.stderr


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {_LIMIT_S} s"
        time.sleep(0.1)


def _params(plants: list[Plant]) -> list:
    return [pytest.param(plant, id=plant.name) for plant in plants]


@pytest.fixture(scope="module")
def played(wide_cluster: Cluster, request: pytest.FixtureRequest,
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Seen]]]:
    """Run all selected failures, several at a time."""
    wanted = [item.callspec.params["plant"]  # type: ignore[attr-defined]
              for item in request.session.items
              if item.path == request.path and "played" in getattr(item, "fixturenames", ())
              and "plant" in getattr(getattr(item, "callspec", None), "params", {})]
    pairs: Queue[tuple[str, str]] = Queue()
    for pair in _PAIRS:
        pairs.put(pair)
    alone: Queue[tuple[str, str]] = Queue()
    alone.put(_ALONE)
    # Failures that need the only pair of nodes start first, in their own pool, since they run one by one.
    lone, many = ([one for one in wanted if (one.alone or one.under != "ssh") is is_alone]
                  for is_alone in (True, False))
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(_AT_ONCE - 1) as rest:
        yield {plant.name: pool.submit(_play, wide_cluster, tmp_path_factory.mktemp("plant"), plant, pairs, alone)
               for pool, plants in ((first, lone), (rest, many)) for plant in plants}
        for pool in (first, rest):
            pool.shutdown(cancel_futures=True)


_SEEN: dict[str, Seen] = {}


@pytest.mark.full
@pytest.mark.parametrize("plant", _params(PLANTS))
def test_planted(played: dict[str, Future[Seen]], plant: Plant) -> None:
    seen = played[plant.name].result(timeout=4 * _LIMIT_S)
    print(seen.text)
    _SEEN[plant.name] = seen
    assert (seen.advice(plant) == "wrong") is bool(plant.misadvised), seen.text
    assert seen.names(plant) is not bool(plant.missed), seen.text


@pytest.mark.parametrize("plant", _params([plant for plant in PLANTS if plant.default]))
def test_planted_on_one_host(tmp_path: Path, plant: Plant) -> None:
    """Run a few failures without a cluster."""
    plant.write(tmp_path)
    done = launch(tmp_path, "-n", "4", "--run-dir", "run", *plant.options, sys.executable, "program.py")
    assert done.returncode != 0
    host = os.uname().nodename
    seen = Seen((tmp_path / "run/postmortem.txt").read_text(), (host, host))
    assert seen.names(plant), seen.text
    assert seen.advice(plant) == ("right" if plant.advice else "absent"), seen.text


@pytest.mark.full
def test_the_bar(recording: bool) -> None:
    """Check all but the blind failures, whose first result is kept (planted/README.md), and write the tables."""
    plants = [plant for plant in PLANTS if plant.file not in BLIND]
    score = _score(plants)
    if recording:
        for file in BLIND:
            _note_the_blind(file)
        RESULTS.write_text(_results(plants))
    assert score["named"] >= _BAR * len(plants)
    assert score["advice"]["wrong"] == 0


@pytest.mark.full
@pytest.mark.parametrize("file", BLIND)
def test_the_blind_ones_since_they_were_seen(recording: bool, file: str) -> None:
    """All of these are named by now, which does not predict the result on new failures."""
    score = _score(_BLIND_ONES[file])
    if recording:
        _note_the_blind(file)
    assert score["named"] == score["advice"]["right"] == len(_BLIND_ONES[file])


def _note_the_blind(file: str) -> None:
    """Record the score of a file's failures; the first call also records the answers, as the first run."""
    score = {"date": str(datetime.now(timezone.utc).date()), "score": _score(_BLIND_ONES[file])}
    if BLIND[file].exists():
        results = json.loads(BLIND[file].read_text()) | {"after_they_were_seen": score}
    else:
        results = score | {"rows": {plant.name: _answers(plant, _SEEN[plant.name]) for plant in _BLIND_ONES[file]}}
    BLIND[file].write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")


def _answers(plant: Plant, seen: Seen) -> dict[str, Any]:
    return {"what": plant.what, "source": plant.source, "hosts": seen.hosts,
            "headline": _without_folders(seen.headline),
            "advice": seen.advised and _without_folders(seen.advised), "named": seen.names(plant),
            "advice_verdict": seen.advice(plant)}


def _score(plants: list[Plant]) -> dict[str, Any]:
    if not _SEEN.keys() >= {plant.name for plant in plants}:
        pytest.skip("not all were played")
    advice = [_SEEN[plant.name].advice(plant) for plant in plants]
    return {"failures": len(plants), "named": sum(_SEEN[plant.name].names(plant) for plant in plants),
            "advice": {word: advice.count(word) for word in ("right", "absent", "wrong")}}


def _results(played: list[Plant]) -> str:
    lines = [_HEAD.format(day=datetime.now(timezone.utc).date(), score=_counted(_score(played)))]
    for title, plants in (
            ("First scorecard", [plant for plant in played if plant.scorecard]),
            ("More of our own", [plant for plant in played if not plant.scorecard and plant.file == "ours.toml"]),
            ("By another author", [plant for plant in played if plant.file != "ours.toml"]),
            *((f"Blind: {file}", _BLIND_ONES[file]) for file in BLIND)):
        lines.append(f"\n## {title}\n")
        if (first_run := BLIND.get(plants[0].file)) is not None:
            scores = json.loads(first_run.read_text())
            lines.append(_BLIND.format(first=_counted(scores["score"]), record=first_run.relative_to(ROOT),
                                       seen=_counted(scores.get("after_they_were_seen", scores)["score"])))
        lines += ["| failure | headline | cause named | advice | source of the message |", "|---|---|---|---|---|"]
        lines += [_row(plant, _SEEN[plant.name]) for plant in plants]
    return "\n".join(lines) + "\n"


def _counted(score: dict[str, Any]) -> str:
    advice = ", ".join(f"{count} {word}" for word, count in score["advice"].items())
    return f"{score['failures']} failures, cause named in {score['named']}, advice {advice}"


def _without_folders(text: str) -> str:
    """Shorten the paths of this machine: of the environment, and of the test's folder."""
    for path in (os.path.dirname(sys.prefix), sys.prefix):
        text = text.replace(path, "…")
    text = re.sub(r"/\S*/(plant\.py|run\b|scratch|lib)", r"…/\1", text)
    # A headline may cut a path, even in the middle of a name.
    return re.sub(r"(?<!\S)/\S*…", "…", text)


def _row(plant: Plant, seen: Seen) -> str:
    def cell(text: str) -> str:
        return re.sub(r"\s*\n\s*", "; ", _without_folders(text)).replace("|", "\\|").replace("<", "&lt;")

    headline = cell(seen.headline.removeprefix("launch: "))
    is_named = "yes" if seen.names(plant) else f"no: {plant.missed}"
    advice = seen.advice(plant) + (f": {cell(seen.advised)}" if seen.advised else "")
    words = f"[source]({plant.source})" if plant.source else "the process"
    return f"| {plant.what} | {headline} | {is_named} | {advice} | {words} |"


_HEAD = """# Planted failures

Recorded on {day} by `python3 benchmarks/record.py planted-failures`. Each row is a run of four ranks on two
simulated nodes, in which one thing fails. The headline is the first line of the post-mortem and the line of the
error below it. Real processes fail in all runs. Messages that only a device or a network prints are copied from the
linked page, by a process that then ends as the real one does. `tests/launch/planted/README.md` explains how to add
a failure.

The author of "By another author" had not read the classifier. The first run, which was blind, was not recorded.
Texts for several of these failures (CXI, UCX, RoCE, damaged safetensors, device files of oneCCL, DeepSpeed's check
of CUDA, hidden modules, clocks, incomplete JSON, unequal shapes) were added to `texts.toml` later, some word for
word. So that table shows what is covered now, not how well an unknown failure is named.

Total: {score}.
"""

_BLIND = """The author did not know the classifier. The expected answers were committed before the first run. These
failures do not count in the total.

- First run, blind: {first} (`{record}`).
- After texts for the missed failures were added: {seen}.

Only the first line measures how well unknown failures are named.
"""
