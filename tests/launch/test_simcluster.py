"""The simulated cluster: all processes in it end, however the test ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from places import HELPERS
from simcluster.cluster import Cluster, missing
from slowness import scaled

_OWNER = """
import sys, time
from pathlib import Path
from simcluster.cluster import Cluster
with Cluster(Path(sys.argv[1]), nodes=2, slurm=False) as cluster:
    cluster.start("sleep", "600", node="n2")
    print((cluster.folder / "nodes/n2.up").read_text().strip(), flush=True)
    time.sleep(600)
"""


def _processes_in(namespace: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str((folder / "ns/uts").readlink()) == namespace:
                found.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return found


def _wait_until_empty(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + scaled(30)
    while what():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


@pytest.mark.cluster
def test_a_killed_test_run_leaves_nothing(tmp_path: Path) -> None:
    if (why := missing()) is not None:
        pytest.skip(why)
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, str(tmp_path / "sim")], cwd=HELPERS,
                             text=True, stdout=subprocess.PIPE)
    namespace = owner.stdout.readline().strip()
    assert any("sshd" in words for words in _processes_in(namespace))
    owner.kill()
    owner.communicate(timeout=scaled(120))
    _wait_until_empty(lambda: _processes_in(namespace))


def test_a_command_that_takes_too_long_is_ended_on_every_node(cluster: Cluster) -> None:
    with pytest.raises(AssertionError, match=r"did not end within \d+ s"):
        cluster.run("srun", "-N4", "sh", "-c", "sleep 600 & wait", timeout=2, WHOSE="too-long")
    _wait_until_empty(lambda: cluster.processes("WHOSE=too-long"))
    cluster.settle()
    assert cluster.run("squeue", "--noheader").stdout == ""


def test_commands_signals_and_power(host_cluster: Cluster, tmp_path: Path) -> None:
    done = host_cluster.run("sh", "-c", 'echo "$1"; hostname; pwd; exit 7', "-", "a b;c", node="n3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (7, f"a b;c\nn3\n{tmp_path}\n")
    assert host_cluster.run("ssh", "n2", "hostname").stdout == "n2\n"
    # With an explicit handler: Python installs none if the tests run with SIGINT ignored, as in a shell's
    # background.
    program = ("import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
               "print(1, flush=True); time.sleep(600)")
    sleeping = host_cluster.start(sys.executable, "-c", program, node="n1", WHOSE="sleeper")
    assert sleeping.stdout.readline() == "1\n"
    [(_, words)] = host_cluster.processes("WHOSE=sleeper")["n1"]
    assert words.startswith(sys.executable)
    sleeping.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in host_cluster.finish(sleeping, 20).stderr
    host_cluster.kill_node("n4")
    assert host_cluster.run("ssh", "-o", "ConnectTimeout=1", "n4", "hostname").returncode == 255
    host_cluster.boot_node("n4")
    assert host_cluster.run("ssh", "n4", "hostname").stdout == "n4\n"


def test_a_node_computes_no_faster_than_its_share_of_a_core(cluster: Cluster) -> None:
    busy = ("import time; end = time.time() + 1\nwhile time.time() < end: pass\nprint(time.process_time())")
    free = cluster.limit_cores("n2", 0.25)
    try:
        used = float(cluster.run("srun", "-w", "n2", sys.executable, "-c", busy).stdout)
    finally:
        free()
    assert 0.1 < used < 0.4
