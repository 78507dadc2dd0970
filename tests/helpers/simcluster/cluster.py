"""Simulated cluster (simcluster.sh) for tests: real Slurm and sshd on nodes made of Linux namespaces."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from launch_runs import clean_env
from slowness import scaled

_SCRIPT = Path(__file__).with_name("simcluster.sh")
_PROGRAMS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2"}
_SLURM_PROGRAMS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm", "munged": "munge"}
_SSHD_PROGRAMS = {"sshd": "openssh-server", "ssh-keygen": "openssh-client"}
_CGROUPS = Path("/sys/fs/cgroup")
_COMMAND_VARIABLE = "SIMCLUSTER_COMMAND"
_UP_TIMEOUT_S = 90
_BEGIN_TIMEOUT_S = 20


@functools.cache
def missing() -> str | None:
    """Return the reason why this machine cannot simulate a cluster, or None."""
    if os.geteuid():
        return "a simulated cluster needs root"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    for program, package in {**_PROGRAMS, **_SLURM_PROGRAMS, **_SSHD_PROGRAMS}.items():
        if shutil.which(program, path=path) is None:
            return f"no {program}: apt-get install {package}"
    attempt = subprocess.run(["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc",
                              "sh", "-c", "mount -t tmpfs tmpfs /dev/shm && ip link add br0 type bridge"],
                             capture_output=True, text=True, timeout=30, check=False)
    if attempt.returncode:
        return f"cannot create namespaces for simulated nodes: {attempt.stderr.strip()}"
    return None


class Command(subprocess.Popen):
    """A command inside the cluster. Signals go to the command itself, not to the nsenter wrappers around it."""

    token: str

    def send_signal(self, sig: int) -> None:
        inner = self._inner()
        if inner is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(inner, sig)

    def _inner(self) -> int | None:
        """Wait for the command to start. Return its process id on this machine, or None if it has ended."""
        deadline = time.monotonic() + scaled(_BEGIN_TIMEOUT_S)
        while self.poll() is None and time.monotonic() < deadline:
            pid: int | None = self.pid
            while pid is not None and _is_wrapper(pid):
                children = _read(Path(f"/proc/{pid}/task/{pid}/children")).split()
                pid = int(children[0]) if children else None
            if pid is not None:
                return pid
            time.sleep(0.01)
        return None


class Cluster:
    """A simulated cluster, started by `with Cluster(folder)`. It ends with the block, or if this process dies.

    Args:
        folder: empty or absent; holds the cluster's configuration and logs (`log/`).
        nodes: named n1, n2 …; the login node is `login`.
        slots: CPUs per node in Slurm's configuration.
        gpus: simulated devices per node, which only exist as variables.
        slurm, sshd: daemons to run on the nodes.
        mpi: Slurm's MpiDefault.
        net: the first three parts of the nodes' addresses.
        node_tmp: give each node a local disk at /local.
    """

    def __init__(self, folder: Path, nodes: int = 4, slots: int = 2, gpus: int = 0, *, slurm: bool = True,
                 mpi: str = "pmi2", sshd: bool = True, net: str = "10.77.0", node_tmp: bool = False) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.slurm = slurm
        self._settings = {"SIM_NODES": str(nodes), "SIM_SLOTS": str(slots), "SIM_GPUS": str(gpus), "SIM_NET": net,
                          "SIM_SLURM": str(int(slurm)), "SIM_SSHD": str(int(sshd)), "SIM_MPI": mpi,
                          "SIM_NODE_TMP": str(int(node_tmp)), "SIM_PREFIX": "n"}
        self._dead: set[str] = set()

    def __enter__(self) -> Cluster:
        # However this process ends, the pipe closes, which ends the cluster.
        lifeline, self._lifeline = os.pipe()
        try:
            done = subprocess.run(["bash", str(_SCRIPT), "up", str(self.folder)], pass_fds=[lifeline],
                                  env=clean_env(**self._settings, SIM_LIFELINE=str(lifeline)), capture_output=True,
                                  text=True, timeout=scaled(_UP_TIMEOUT_S), check=False)
            if done.returncode:
                raise RuntimeError(f"the simulated cluster has not started: {done.stderr}")
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._script("down")
        finally:
            os.close(self._lifeline)

    def start(self, *words: str | Path, node: str | None = None, cwd: Path | None = None,
              stdin: int | None = subprocess.DEVNULL, **env: str) -> Command:
        """Start a command on the login node or on `node`, in a clean environment with this Python first on PATH."""
        place = ["exec"] if node is None else ["on", node]
        token = uuid.uuid4().hex
        started = Command(["bash", str(_SCRIPT), *place, str(self.folder), "--", *map(str, words)], cwd=cwd or "/",
                          env=clean_env(OMP_WAIT_POLICY="PASSIVE", **env, **{_COMMAND_VARIABLE: token}), text=True,
                          errors="replace", stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.token = token
        return started

    def run(self, *words: str | Path, node: str | None = None, cwd: Path | None = None, timeout: float = 60,
            **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end.

        Raises:
            AssertionError: it did not end within `timeout` seconds (scaled by the machine's slowness); everything
                that it had started is killed.
        """
        started = self.start(*words, node=node, cwd=cwd, **env)
        return self.finish(started, timeout)

    def finish(self, started: Command, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Wait for a command of `start`, with the timeout of `run`."""
        timeout = scaled(timeout)
        try:
            out, err = started.communicate(timeout=timeout)
        except BaseException as error:
            self.kill(started)
            out, err = started.communicate(timeout=scaled(30))
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise AssertionError(f"{started.args[4:]} did not end within {timeout:.0f} s\n{out}\n{err}") from None
        return subprocess.CompletedProcess(started.args, started.returncode, out, err)

    def batch(self, *words: str | Path, cwd: Path, timeout: float = 60) -> list[str]:
        """Run `sbatch WORDS` and return the job's (or its array tasks') final states: COMPLETED, TIMEOUT, …

        Raises:
            AssertionError: sbatch failed, or the job has not ended within `timeout` seconds.
        """
        sent = self.run("sbatch", "--parsable", *words, cwd=cwd)
        assert sent.returncode == 0, sent.stderr
        deadline = time.monotonic() + scaled(timeout)
        while True:
            # sbatch --wait would poll at intervals that grow to 30 s.
            lines = self._inside("scontrol", "--oneliner", "show", "job", sent.stdout.strip()).splitlines()
            states = [line.partition("JobState=")[2].split(maxsplit=1)[0] for line in lines]
            if states and not {"PENDING", "RUNNING", "COMPLETING"} & set(states):
                return states
            assert time.monotonic() < deadline, f"the job has not ended in time: {lines}"
            time.sleep(0.2)

    def kill(self, started: Command) -> None:
        """End all processes that a command started, on every node, and its Slurm jobs."""
        own = [pid for pids in self.processes(started.token).values() for pid, _ in pids]
        jobs = {word for pid in own for word in _read(Path(f"/proc/{pid}/environ")).split("\0")
                if word.startswith("SLURM_JOB_ID=")}
        if jobs:
            self._inside("scancel", "--full", *(word.partition("=")[2] for word in jobs))
        # SIGTERM first: salloc and srun leave their job behind if they are killed.
        _send(own, signal.SIGTERM)
        deadline = time.monotonic() + 5
        while self.processes(started.token) and time.monotonic() < deadline:
            time.sleep(0.1)
        _send([pid for pids in self.processes(started.token).values() for pid, _ in pids], signal.SIGKILL)

    def limit_memory(self, node: str, size: int) -> Callable[[], None]:
        """Limit all of a node's processes, present and future, to `size` bytes of memory.

        Returns:
            A function that removes the limit.

        Raises:
            OSError: this machine does not permit it.
        """
        return self._limit(node, "memory", {"memory.limit_in_bytes": size}, {"memory.max": size})

    def limit_cores(self, node: str, cores: float) -> Callable[[], None]:
        """Limit a node to the processor time of `cores` cores, in periods of 10 ms. Otherwise as `limit_memory`.

        Nodes then compute concurrently, as long as they have no more cores in total than the machine.
        """
        period = 10_000
        quota = round(cores * period)
        return self._limit(node, "cpu", {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota},
                           {"cpu.max": f"{quota} {period}"})

    def _limit(self, node: str, controller: str, first: Mapping[str, object],
               second: Mapping[str, object]) -> Callable[[], None]:
        """Move a node's processes into a control group with these settings, of version 1 or 2."""
        base, settings = _CGROUPS / controller, first
        if not base.is_dir():
            base, settings = _CGROUPS, second
            (base / "cgroup.subtree_control").write_text(f"+{controller}")
        group = base / f"simcluster-{uuid.uuid4().hex[:8]}"
        group.mkdir()

        def end() -> None:
            _move(_read(group / "cgroup.procs").split(), base)
            group.rmdir()

        try:
            for name, value in settings.items():
                (group / name).write_text(str(value))
            _move([folder.name for folder in self._on(self._namespace(node))], group)
        except OSError:
            end()
            raise
        return end

    def shape(self, rate: str | None, *nodes: str) -> None:
        """Limit the links of `nodes` (default: all) to a rate such as "200mbit" in each direction; None removes it.

        tbf counts the headers of segments, as a real link does, which leaves about 95.6 % of the rate for data.
        """
        act = ["replace" if rate else "del"]
        how = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms"] if rate else ["root"]
        for name in nodes or self.nodes:
            for device, node in (("eth0", name), (f"v{name}", None)):
                done = self.run("tc", "qdisc", *act, "dev", device, *how, node=node)
                assert done.returncode == 0, done.stderr

    def processes(self, marker: str) -> dict[str, list[tuple[int, str]]]:
        """Return the living processes with `marker` (a run's id) in their environment, by node.

        Each is a process id on this machine and a command line.
        """
        homes = {self._namespace(node): node for node in (*self.nodes, "login")}
        processes: dict[str, list[tuple[int, str]]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if marker.encode() not in (folder / "environ").read_bytes():
                    continue
            except OSError:
                continue
            node, words = homes.get(_link(folder / "ns/uts")), _read(folder / "cmdline").replace("\0", " ")
            if node is not None and not words.startswith("nsenter "):
                processes.setdefault(node, []).append((int(folder.name), words))
        return processes

    def in_memory(self, node: str, run_id: str) -> list[str]:
        """Return the names of a run's folders in the node's /dev/shm; empty if the node is off."""
        for folder in self._on(self._namespace(node)):
            with contextlib.suppress(OSError):
                memory = folder / "root/dev/shm"
                return [name for name in os.listdir(memory) if run_id in _read(memory / name / "run")]
        return []

    def kill_node(self, name: str) -> None:
        """Power a node off: its ranks, daemons and network disappear at once."""
        namespace = self._namespace(name)
        self._dead.add(name)
        self._script("kill-node", name)
        deadline = time.monotonic() + scaled(10)
        while list(self._on(namespace)):
            assert time.monotonic() < deadline, f"{name} does not die"
            time.sleep(0.05)

    def boot_node(self, name: str, timeout: float = 60) -> None:
        """Power a node on again, and wait until Slurm considers it idle."""
        self._script("boot-node", name)
        self._dead.discard(name)
        deadline = time.monotonic() + scaled(timeout)
        while self.slurm and self._inside("sinfo", "-h", "-p", "debug", "-n", name, "-o", "%T").strip() != "idle":
            assert time.monotonic() < deadline, f"{name} is not idle in time after it was switched on"
            time.sleep(0.2)

    def settle(self, timeout: float = 60) -> None:
        """Cancel remaining Slurm jobs and power on nodes that are off, until all nodes are idle."""
        for name in sorted(self._dead):
            self._script("boot-node", name)
            self._dead.discard(name)
        if not self.slurm:
            return
        deadline = time.monotonic() + scaled(timeout)
        query = "squeue --noheader --format %i; sinfo --noheader --partition debug --format '%T %D'"
        wanted = f"idle {len(self.nodes)}"
        while (seen := self.run("bash", "-c", query, timeout=30).stdout.strip()) != wanted:
            if time.monotonic() > deadline:
                raise AssertionError(f"nodes are not idle in time: {seen}")
            self._cancel_jobs()
            time.sleep(0.3)

    def _cancel_jobs(self) -> None:
        jobs = self._inside("squeue", "--noheader", "--format", "%i").split()
        if jobs:
            self._inside("scancel", "--full", *jobs)

    def _inside(self, *words: str) -> str:
        return subprocess.run(["bash", str(_SCRIPT), "exec", str(self.folder), "--", *words], cwd="/",
                              env=clean_env(), capture_output=True, text=True,
                              timeout=scaled(30), check=False).stdout

    def _script(self, verb: str, *node: str) -> None:
        subprocess.run(["bash", str(_SCRIPT), verb, *node, str(self.folder)], env=clean_env(), capture_output=True,
                       timeout=scaled(60), check=True)

    def _on(self, namespace: str) -> Iterator[Path]:
        """Return the folders in /proc of a node's processes."""
        return (folder for folder in Path("/proc").glob("[0-9]*") if _link(folder / "ns/uts") == namespace)

    def _namespace(self, node: str) -> str:
        if node == "login":
            return _link(Path("/proc", (self.folder / "head.pid").read_text().strip(), "ns/uts"))
        return _read(self.folder / f"nodes/{node}.up").strip()


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _move(pids: Iterable[str], group: Path) -> None:
    for pid in pids:
        # A process that has just ended cannot be moved.
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(pid)


def _is_wrapper(pid: int) -> bool:
    words = _read(Path(f"/proc/{pid}/cmdline")).split("\0")
    return words[0] == "nsenter" or str(_SCRIPT) in words[:2]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
