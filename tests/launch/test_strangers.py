"""What one user of a node may do to another who types `launch` there: nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from strangers import Strangers, User

from ezpz_llm.base.private import derived, new_secret


def test_the_two_are_two_and_have_no_power(strangers: Strangers) -> None:
    victim, attacker = strangers.victim, strangers.attacker
    assert victim.run("id", "-u").stdout.split() == [str(victim.uid)]
    assert attacker.run("id", "-u").stdout.split() == [str(attacker.uid)]
    assert victim.run("sh", "-c", "umask 077; echo thesis > precious; pwd").stdout == f"{victim.home}\n"
    assert "Permission denied" in attacker.run("cat", victim.home / "precious").stderr
    assert attacker.run("sh", "-c", f"echo x > {victim.home}/new").returncode
    assert attacker.run("ls", victim.home).stdout == "precious\n"
    powers = attacker.run("grep", "Cap", "/proc/self/status").stdout.split()[1::2]
    assert powers == ["0" * 16] * 5
    sleeper = victim.start("sleep", "60")
    assert attacker.run("sh", "-c", f"kill {sleeper.pid}").returncode
    victim.end_all()
    assert sleeper.wait(timeout=10)
    assert attacker.run("touch", strangers.shared / "theirs").returncode == 0
    assert victim.run("rm", "-f", strangers.shared / "theirs").returncode
    assert victim.run("python3", "-c", "import sys; print(sys.prefix)", HOME=os.devnull).returncode == 0


_LEAVE_ONE = """
from strangers import two_users
with two_users() as both:
    print(both.shared.parent, both.attacker.start("sleep", "300").pid, flush=True)
    input()
"""


def test_nobody_stays_when_the_tests_are_killed(strangers: Strangers) -> None:
    holder = subprocess.Popen([sys.executable, "-c", _LEAVE_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    folder, pid = holder.stdout.readline().split()
    holder.kill()
    holder.communicate()
    until = time.monotonic() + 10
    while is_there := Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    shutil.rmtree(folder)
    assert not is_there


def test_the_victim_can_launch(strangers: Strangers) -> None:
    done = strangers.victim.launch("-n", "2", "--tee", "all", "id", "-u")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {strangers.victim.uid}" for rank in (0, 1)]


_OVERWRITE = """
import glob, json, os, sys
uid, home, precious = sys.argv[1:]
print("ready", flush=True)
def plant(folder):
    for name in ("agent", "run", "wake", *(f"rank000{rank}{end}" for rank in (0, 1)
                                           for end in ("", ".shim", ".ended", ".log", ".stacks"))):
        try:
            os.symlink(precious, f"{folder}/{name}")
        except OSError:
            pass
while True:
    words = set()
    for record in glob.glob(f"{home}/*/run.json") + glob.glob(f"{home}/runs/*/run.json"):
        try:
            words |= {str(value) for value in json.load(open(record))["launch"]["env"].values()}
        except (OSError, ValueError, KeyError):
            pass
    for word in words - {""}:
        folder = f"/dev/shm/ezpz_llm-node-{uid}-{word}"
        try:
            os.mkdir(folder)
            os.chmod(folder, 0o777)
        except OSError:
            pass
    for folder in glob.glob(f"/dev/shm/ezpz_llm-node-{uid}-*"):
        plant(folder)
"""
"""Takes every word of a run's record for the name of its folder on the node, and puts links into all it finds."""

_PLANT = """
import os, sys
folder, precious = sys.argv[1:]
os.mkdir(folder)
os.chmod(folder, 0o777)
for name in ("agent", "run", "wake", "rank0000.shim", "rank0001", "rank0001.log"):
    os.symlink(precious, f"{folder}/{name}")
"""
_WITH_A_KNOWN_SECRET = """
import sys
import ezpz_llm.launch.environment as environment
environment.new_secret = lambda: sys.argv[1]
from ezpz_llm.launch.__main__ import main
sys.exit(main(sys.argv[2:]))
"""

_MEDDLE = """
import glob, os, sys, time
run, precious = sys.argv[1:]
print("ready", flush=True)
until = time.monotonic() + 60
while time.monotonic() < until:
    try:
        run_id = __import__("json").load(open(f"{run}/run.json"))["launch"]["env"]["EZPZ_LLM_RUN_ID"]
    except (OSError, ValueError, KeyError):
        run_id = ""
    stop = '{"run_id": "%s", "grace_s": 0, "launch_host": ""}' % run_id
    failure = ('{"rank": 1, "host": "x", "pid": 1, "exit_code": 7, "signal": null, "ended": 1, "duration_s": 1,'
               ' "launch": "%s"}' % run_id)
    for name, text in (("control/stop", stop), ("errors/rank0001.json", failure), ("run.json", "{"),
                       ("control/owner-000099", "{}"), ("logs/rank0001.log", ""), ("heartbeat/node0001.json", "")):
        for act in (lambda: open(f"{run}/{name}", "w").write(text), lambda: os.unlink(f"{run}/{name}"),
                    lambda: os.symlink(precious, f"{run}/{name}"), lambda: os.rename(f"{run}/control", f"{run}/c")):
            try:
                act()
                print("did", name, flush=True)
            except OSError:
                pass
"""


def _precious(user: User) -> Path:
    path = user.home / "precious"
    assert user.run("sh", "-c", "umask 077; printf thesis > precious").returncode == 0
    return path


@pytest.mark.parametrize("tries", [3, pytest.param(100, marks=(pytest.mark.slow, pytest.mark.timeout(1800)))])
def test_nobody_overwrites_files_through_the_folder_on_the_node(strangers: Strangers, tries: int) -> None:
    victim, attacker = strangers.victim, strangers.attacker
    precious = _precious(victim)
    attack = attacker.start(sys.executable, "-c", _OVERWRITE, str(victim.uid), victim.home, precious)
    assert attack.stdout.readline() == "ready\n"
    for _ in range(tries):
        done = victim.launch("-n", "2", "true")
        assert (done.returncode, precious.read_text()) == (0, "thesis"), done.stderr
        assert "no folder in memory" not in done.stderr
    assert attack.poll() is None


def test_even_a_folder_whose_name_was_known_before_does_no_harm(strangers: Strangers) -> None:
    """Its owner is looked at, and the run goes on without it."""
    victim, attacker = strangers.victim, strangers.attacker
    precious, secret = _precious(victim), new_secret()
    name = derived(bytes.fromhex(secret), "node folder", os.uname().nodename)[:32]
    folder = Path(f"/dev/shm/ezpz_llm-node-{victim.uid}-{name}")
    assert attacker.python(_PLANT, folder, precious).returncode == 0
    try:
        done = victim.python(_WITH_A_KNOWN_SECRET, secret, "-n", "2", "--tee", "all", "echo", "well")
        assert (done.returncode, precious.read_text()) == (0, "thesis"), done.stderr
        assert sorted(done.stdout.splitlines()) == ["[0] well", "[1] well"]
        assert f"it belongs to another user (uid {attacker.uid}) at {folder}" in done.stderr
    finally:
        attacker.run("rm", "-r", folder)


@pytest.mark.parametrize("umask", ["000", "002", "022"])
def test_nobody_writes_into_a_run_directory_whatever_the_umask(strangers: Strangers, umask: str) -> None:
    victim, attacker = strangers.victim, strangers.attacker
    precious = _precious(victim)
    attack = attacker.start(sys.executable, "-c", _MEDDLE, victim.home / "r", precious)
    assert attack.stdout.readline() == "ready\n"
    done = victim.run("sh", "-c", f'umask {umask}; exec "$@"', "sh", sys.executable, "-m", "ezpz_llm.launch", "-n",
                      "2", "--run-dir", "r", "sleep", "2")
    assert (done.returncode, precious.read_text()) == (0, "thesis"), done.stderr
    attacker.end_all()
    assert attack.stdout.read() == ""
    open_to_others = [str(path) for path in (victim.home / "r", *(victim.home / "r").rglob("*"))
                      if path.stat().st_mode & 0o022]
    assert open_to_others == []
    for name in ("control", "heartbeat", "errors"):
        assert (victim.home / "r" / name).stat().st_mode & 0o777 == 0o700
    assert attacker.run("cat", "r/run.json", cwd=victim.home).returncode == 0
    assert all(set(one.stat().st_mode & 0o077 for one in (victim.home / "r" / name).iterdir()) <= {0}
               for name in ("control", "heartbeat", "errors"))


def test_what_was_planted_in_a_folder_that_stood_open_is_not_believed(strangers: Strangers) -> None:
    """As those were under umask 000 before; with the run's id known, as where the next run repeats it."""
    victim, attacker = strangers.victim, strangers.attacker
    precious = _precious(victim)
    assert victim.run("sh", "-c", "umask 000; mkdir -p r/control r/errors r/heartbeat").returncode == 0
    plant = """
import os, sys
run, precious = sys.argv[1:]
for name in ("control/owner-000099", "errors/rank0001.json", "control/stop", "heartbeat/node0000.json"):
    os.umask(0)
    open(f"{run}/{name}", "w").write("{}")
for name in ("control/logs", "errors/rank0000.json", "heartbeat/rank0000", "control/owner-000001"):
    os.symlink(precious, f"{run}/{name}")
"""
    assert attacker.python(plant, victim.home / "r", precious).returncode == 0
    done = victim.launch("-n", "2", "--run-dir", "r", "sh", "-c", "exit 3")
    assert (done.returncode, precious.read_text()) == (3, "thesis"), done.stderr
    done = victim.launch("-n", "2", "--run-dir", "r", "true")
    assert (done.returncode, precious.read_text()) == (0, "thesis"), done.stderr


def test_a_run_directory_of_another_user_is_refused(strangers: Strangers) -> None:
    victim, attacker = strangers.victim, strangers.attacker
    assert attacker.run("mkdir", "-p", "r/control").returncode == 0
    assert attacker.run("chmod", "-R", "777", "r").returncode == 0
    done = victim.launch("-n", "2", "--run-dir", attacker.home / "r", "true")
    assert done.returncode == 2
    assert f"cannot make the run directory: it belongs to another user (uid {attacker.uid})" in done.stderr
    assert str(attacker.home / "r/control") in done.stderr
    assert "Traceback" not in done.stderr


def test_the_secret_is_in_no_file_and_on_no_command_line(strangers: Strangers) -> None:
    """Of a run in which every rank prints what it and other users can see."""
    victim, attacker = strangers.victim, strangers.attacker
    running = victim.start(sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", "r", "--tee", "none",
                           "sh", "-c", 'printf %s "$EZPZ_LLM_SECRET" > "$HOME/secret"; sleep 60')
    secret = victim.home / "secret"
    _wait_for(lambda: secret.is_file() and len(secret.read_text()) == 64)
    word = secret.read_text()
    seen = attacker.run("sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null; ls -R /dev/shm")
    assert "ezpz_llm.launch.shim" in seen.stdout
    assert word not in seen.stdout
    assert "EZPZ_LLM_SECRET=" not in seen.stdout
    files = [path for path in (victim.home / "r").rglob("*") if path.is_file()]
    assert victim.home / "r/run.json" in files
    assert [str(path) for path in files if word.encode() in path.read_bytes()] == []
    running.terminate()
    running.communicate(timeout=60)
    assert [str(path) for path in (victim.home / "r").rglob("*")
            if path.is_file() and word.encode() in path.read_bytes()] == []


def test_why_tells_another_user_what_he_may_know(strangers: Strangers) -> None:
    victim, attacker = strangers.victim, strangers.attacker
    assert victim.launch("-n", "2", "--run-dir", "r", "sh", "-c", "exit 3").returncode == 3
    done = attacker.run(sys.executable, "-m", "ezpz_llm.why", victim.home / "r")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert f"{victim.home}/r/errors: Permission denied: its records are left out" in done.stderr
    assert "with code 3" in done.stdout
    done = victim.run(sys.executable, "-m", "ezpz_llm.why", "r")
    assert (done.returncode, done.stderr) == (0, "")


def _wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
