"""Faults on simulated nodes with real Slurm, each with its expected message and exit code.

After each fault, no process of the run may be left on any node. The observed results are written to
benchmarks/results/faults.md by

    python3 benchmarks/record.py faults
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from launch_runs import record
from places import HELPERS, ROOT
from simcluster.cluster import Cluster, Command

from ezpz_llm.launcher.basics.hostlist import expand_hostlist

RESULTS = ROOT / "benchmarks/results/faults.md"
EVIDENCE = ROOT / "docs/evidence/failure_tests.md"
FAIL = f"{sys.executable} {HELPERS / 'fault_ranks.py'}"
TEST_DIST = "python3 -m ezpz_llm.test_dist --device cpu"
_AT_ONCE = 4
_LIMIT_S = 140
_HOLDERS = r"salloc |bash job.sh|/bin/bash \S*/slurm_script"
_RESERVATION = "-N2 --ntasks-per-node=2 -t5"


@dataclass(frozen=True)
class Fault:
    """A fault under a launcher, and its expected outcome.

    Attributes:
        words: arguments of `launch`.
        says: expected messages, of which the page shows the first. FIRST and LAST are the run's two nodes, and …
            matches any text.
        where: launch runs in an `salloc` shell on the login node, in a `batch` script on the first node, or on the
            `login` node without a reservation.
        clears_memory: False if Slurm kills the whole step at once, including the agents, whose folders are then
            removed by the next run.
    """

    name: str
    launcher: str
    words: str
    code: int
    says: tuple[str, ...]
    act: Callable[[Scene], None] | None = None
    before: Callable[[Scene], None] | None = None
    where: str = "salloc"
    env: tuple[tuple[str, str], ...] = ()
    gone_within_s: float = 5.0
    clears_memory: bool = True

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.launcher


@dataclass(frozen=True)
class Seen:
    code: int
    text: str
    hosts: tuple[str, ...]
    seconds: float
    left: dict[str, list[str]]


class Scene:
    """A running job on two nodes with two ranks each."""

    def __init__(self, cluster: Cluster, folder: Path, fault: Fault) -> None:
        self.cluster, self.folder, self.fault = cluster, folder, fault
        self.undo = contextlib.ExitStack()

    def play(self) -> Seen:
        with self.undo:
            self.command = self._start()
            try:
                self._prepare()
                began = time.monotonic()
                _open(self.folder / "ready")
                if self.fault.act:
                    self.fault.act(self)
                wait_for((self.folder / "code").exists, _LIMIT_S, "the end of launch")
                seconds = time.monotonic() - began
                left = self._left()
            finally:
                self._finish()
            code, text = (self.folder / "code").read_text(), (self.folder / "said.txt").read_text()
            return Seen(int(code), text, tuple(self.hosts), seconds, left)

    def _start(self) -> Command:
        launch = ["launch", "--launcher", self.fault.launcher, "--run-dir", "run", *self.fault.words.split()]
        # The reservation starts before launch and outlives it, so that only launch can end the run's processes.
        (self.folder / "job.sh").write_text(f"""#!/bin/bash
#SBATCH {_RESERVATION} -o out.txt
trap : TERM
echo "$SLURM_JOB_NODELIST" > nodes
read < ready
{' '.join(launch)} &> said.txt
echo $? > code.new && mv code.new code
read < checked
""")
        for gate in ("ready", "checked"):
            os.mkfifo(self.folder / gate)
        words = {"salloc": ["salloc", *_RESERVATION.split(), "bash", "job.sh"], "batch": ["sbatch", "job.sh"],
                 "login": ["bash", "job.sh"]}[self.fault.where]
        return self.cluster.start(*words, cwd=self.folder, OMP_NUM_THREADS="1", **dict(self.fault.env))

    def _prepare(self) -> None:
        nodes = self.folder / "nodes"
        wait_for(lambda: nodes.exists() and nodes.read_text().endswith("\n"), _LIMIT_S, "a reservation")
        self.hosts = expand_hostlist(nodes.read_text().strip())
        if self.fault.before:
            self.fault.before(self)

    def _finish(self) -> None:
        """Release the reservation."""
        for gate in ("ready", "checked"):
            _open(self.folder / gate)
        self.cluster.finish(self.command, timeout=60)

    def _left(self) -> dict[str, list[str]]:
        """Return the run's remaining processes and folders by node, after the time allowed for cleanup."""
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self._marked(), self.fault.gone_within_s, "the end of all processes")
        return self._marked()

    def _marked(self) -> dict[str, list[str]]:
        """Return the command's processes and folders by node, except the processes that hold the reservation."""
        remaining = {node: [words for _, words in pids if not re.match(_HOLDERS, words)]
                     for node, pids in self.cluster.processes(self.command.token).items()}
        for node in self.hosts if self.fault.clears_memory else ():
            remaining[node] = remaining.get(node, []) + self._folders(node)
        return {node: left for node, left in remaining.items() if left}

    def _folders(self, node: str) -> list[str]:
        """Return the run's folders in the node's /dev/shm."""
        if not (self.folder / "run/run.json").exists():
            return []
        run_id = self.launched["env"]["EZPZ_LLM_RUN_ID"]
        return self.cluster.in_memory(node, run_id)

    @property
    def launched(self) -> dict:
        return record(self.folder / "run")["launch"]

    def wait_until_up(self) -> None:
        """Wait until all four ranks have started."""
        def are_up() -> bool:
            assert not (self.folder / "code").exists(), "it ended before its ranks were up"
            return len(list((self.folder / "run").glob("up*"))) == 4
        wait_for(are_up, 60, "the ranks' start")


def _open(gate: Path) -> None:
    """Release a script that waits on `gate`, if there is one."""
    with contextlib.suppress(OSError):
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


def power_off(scene: Scene) -> None:
    scene.wait_until_up()
    scene.cluster.kill_node(scene.hosts[1])
    scene.undo.callback(scene.cluster.boot_node, scene.hosts[1])


def end_the_time(scene: Scene) -> None:
    scene.wait_until_up()
    changed = scene.cluster.run("scontrol", "update", f"JobId={scene.launched['job_id']}", "EndTime=now+5")
    assert changed.returncode == 0, changed.stderr


def send(number: signal.Signals) -> Callable[[Scene], None]:
    """Return an action that sends a signal to launch itself, a child of the shell."""
    def act(scene: Scene) -> None:
        scene.wait_until_up()
        [launch] = [pid for pid, _ in scene.cluster.processes(scene.command.token)["login"]
                    if _name(_parent(pid)) == "bash" and _name(pid) != "bash"]
        os.kill(launch, number)
    return act


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def take_the_port(scene: Scene) -> None:
    """Listen on MASTER_PORT on the first node."""
    hold = f"import socket, time; held = socket.create_server(('', {_PORT})); print(1, flush=True); time.sleep(600)"
    holder = scene.cluster.start(sys.executable, "-c", hold, node=scene.hosts[0])
    scene.undo.callback(holder.communicate)
    scene.undo.callback(scene.cluster.kill, holder)
    assert holder.stdout.readline() == "1\n"


def limit_memory(scene: Scene) -> None:
    """Limit the second node's memory to 400 MB."""
    try:
        scene.undo.callback(scene.cluster.limit_memory(scene.hosts[1], 400 << 20))
    except OSError as error:
        pytest.skip(f"cannot create a memory cgroup: {error}")


def name_a_host_that_is_not_there(scene: Scene) -> None:
    (scene.folder / "hosts").write_text("n1 slots=2\n10.77.0.99 slots=2\n")


_PORT = 24680

_MPI = ("srun", "mpiexec")
_ALL = (*_MPI, "torchrun")


def _under(launchers: tuple[str, ...], name: str, words: str, code: int, *says: str, **more: Any) -> list[Fault]:
    return [Fault(name, launcher, words, code, says, **more) for launcher in launchers]


# Faults that wait for Slurm come first, since they take longest.
FAULTS = [
    *_under(_MPI, "the time limit strikes", f"{FAIL} sleep", 143,
            "launch: the time limit was reached: … DUE TO TIME LIMIT", act=end_the_time, where="batch"),
    *_under(("srun",), "a node is switched off", f"{FAIL} sleep", 143,
            "launch: LAST (ranks 2-3): a node failed: srun: error: Node failure on LAST", "leave LAST out",
            act=power_off),
    *_under(("mpiexec",), "a node is switched off", f"{FAIL} sleep", 255,
            "launch: ranks 2-3 on LAST: gone without a record", "leave LAST out", act=power_off),
    *_under(_ALL, "a rank raises", f"{FAIL} raise", 1, "launch: rank 3 on LAST failed: exit code 1",
            "ValueError: bad shape", "fault_ranks.py:… in <module>"),
    *_under(_ALL, "a rank raises, the others resist SIGTERM", f"{FAIL} resist-raise", 1,
            "launch: rank 3 on LAST failed: exit code 1"),
    *_under(_ALL, "a rank is killed", f"{FAIL} kill", 137, "launch: rank 3 on LAST failed: signal SIGKILL"),
    *_under(("srun",), "a rank uses too much memory", f"{FAIL} hog", 137,
            "launch: rank 3 on LAST failed: killed by the kernel's out-of-memory killer: signal SIGKILL",
            before=limit_memory),
    *_under(_ALL, "a rank does not come to a collective", f"--idle-timeout 30 {FAIL} hang", 124,
            "launch: no sign of life for 30 s: rank 3 on LAST: training, step 3, silent for …; launch ended the"
            " run",
            "its stack: …/stacks/rank0003.txt"),
    *_under(_MPI, "a program without heartbeats is idle", f"--idle-timeout 3 {FAIL} sleep", 124,
            "launch: no sign of life for 3 s: rank … on …: before its first heartbeat"),
    *_under(("srun",), "MASTER_PORT is taken on another host", TEST_DIST, 2,
            "error: rank 0 cannot listen on port 24680 of FIRST: Address already in use: pid … (…python…), "
            "owned by root",
            before=take_the_port, env=(("MASTER_PORT", str(_PORT)),)),
    *_under(("srun",), "MASTER_PORT is taken on this host", TEST_DIST, 2,
            "error: MASTER_PORT=24680 cannot be used on FIRST: …: pid … (…python…), owned by root",
            before=take_the_port, env=(("MASTER_PORT", str(_PORT)),), where="batch"),
    *_under(_MPI, "hosts lack the interface", TEST_DIST, 2,
            "error: rank … must use interface eth9, but … has only lo (127.0.0.1), eth0",
            env=(("GLOO_SOCKET_IFNAME", "eth9"),)),
    *_under(("mpiexec",), "this host lacks the interface", f"--interface eth9 {TEST_DIST}", 2,
            "error: no interface 'eth9' on FIRST, which has lo (127.0.0.1), eth0", where="batch"),
    *_under(("mpiexec",), "a host of the hostfile cannot be reached", f"--hostfile hosts {FAIL} sleep", 3,
            "launch: 10.77.0.99: …", before=name_a_host_that_is_not_there, where="login"),
    *_under(_MPI, "the program does not exist", "no-such-program", 127, "launch: cannot run 'no-such-program'"),
    *_under(_ALL, "launch is killed, the ranks resist SIGTERM", f"{FAIL} resist", 137, act=send(signal.SIGKILL),
            gone_within_s=20, clears_memory=False),
    *_under(_ALL, "Ctrl-C, the ranks resist SIGTERM", f"{FAIL} resist", 130,
            "launch: launch received SIGINT (Ctrl-C) and ended the run", act=send(signal.SIGINT)),
]


BY_DEFAULT = (
    ("the time limit strikes", "srun"), ("a node is switched off", "mpiexec"), ("a rank raises", "mpiexec"),
    ("a rank raises, the others resist SIGTERM", "srun"), ("a rank is killed", "torchrun"),
    ("a rank uses too much memory", "srun"), ("MASTER_PORT is taken on this host", "srun"),
    ("this host lacks the interface", "mpiexec"), ("a host of the hostfile cannot be reached", "mpiexec"),
    ("the program does not exist", "srun"), ("launch is killed, the ranks resist SIGTERM", "mpiexec"),
    ("Ctrl-C, the ranks resist SIGTERM", "srun"))
"""Faults played by default: each way in which launch detects a fault, and each launcher."""


def _cases() -> list:
    return [pytest.param(fault, id=f"{fault.name} ({fault.launcher})".replace(" ", "-"),
                         marks=() if fault.key in BY_DEFAULT else pytest.mark.full) for fault in FAULTS]


@pytest.fixture(scope="module")
def played(wide_cluster: Cluster, request: pytest.FixtureRequest,
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Future[Seen]]]:
    """Play all selected faults, several at a time, each on its own nodes."""
    wanted = [item.callspec.params["fault"]  # type: ignore[attr-defined]
              for item in request.session.items
              if item.path == request.path and "fault" in getattr(getattr(item, "callspec", None), "params", {})]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield {fault.key: pool.submit(Scene(wide_cluster, tmp_path_factory.mktemp("fault"), fault).play)
               for fault in wanted}
        pool.shutdown(cancel_futures=True)


_SEEN: dict[tuple[str, str], Seen] = {}


def _pattern(expected: str, hosts: tuple[str, ...]) -> str:
    if hosts:
        expected = expected.replace("FIRST", hosts[0]).replace("LAST", hosts[-1])
    return ".*?".join(re.escape(part) for part in expected.split("…"))


@pytest.mark.parametrize("fault", _cases())
def test_fault(played: dict[tuple[str, str], Future[Seen]], fault: Fault) -> None:
    seen = played[fault.key].result(timeout=2 * _LIMIT_S)
    print(f"{seen.code} after {seen.seconds:.1f} s on {seen.hosts}\n{seen.text}")
    _SEEN[fault.key] = seen
    for expected in fault.says:
        assert re.search(_pattern(expected, seen.hosts), seen.text), f"{expected}\n{seen.text}"
    assert seen.code == fault.code, seen.text
    assert 'ezpz_llm/launcher/' not in re.sub(r"(?m)^  \\|.*", "", seen.text), seen.text
    assert seen.left == {}


_FOLDERS = re.compile(r"/\S*/")
_HEAD = """# Faults injected on a simulated cluster

Recorded by `python3 benchmarks/record.py faults`. Each run has two ranks on each of two simulated nodes, with real
Slurm, MPICH, and torch. Seconds are from the start of launch to its exit, with several runs at a time on two cores.
No process of a run was left on any node while its reservation still existed. The expected messages are in
`tests/launch/test_cluster_faults.py`.

| fault | launcher | exit code | message | seconds | date |
|---|---|---|---|---|---|
"""


def _row(fault: Fault, seen: Seen) -> str:
    message = ""
    if fault.says:
        pattern = re.compile(_pattern(fault.says[0], seen.hosts))
        message = next((line.strip() for line in seen.text.splitlines() if pattern.search(line)), "")
    cells = [*fault.key, str(seen.code), _FOLDERS.sub("…/", message), f"{seen.seconds:.1f}",
             datetime.now(timezone.utc).date().isoformat()]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def test_the_results_list_these_faults(recording: bool) -> None:
    """Every fault was recorded with its exit code. `test_fault` compares the messages, which may be older there."""
    if recording:
        assert list(_SEEN) == [fault.key for fault in FAULTS]
        RESULTS.write_text(_HEAD + "".join(_row(fault, _SEEN[fault.key]) for fault in FAULTS))
    rows = [line.strip("| ").split(" | ") for line in RESULTS.read_text().splitlines() if line.startswith("| ")][1:]
    assert [tuple(row[:3]) for row in rows] == [(*fault.key, str(fault.code)) for fault in FAULTS]
    text = EVIDENCE.read_text()
    assert f"{len({fault.name for fault in FAULTS})} faults in {len(FAULTS)} runs" in " ".join(text.split())
