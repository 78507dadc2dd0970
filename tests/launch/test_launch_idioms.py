"""Shell idioms around `launch` and how they end.

In every case the ranks have saved their work, run.json records the end, and postmortem.txt exists.
"""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch_runs import LONG, SAVES, clean_env, left_over, record
from simcluster.cluster import Cluster
from slowness import scaled

from ezpz_llm.launcher.basics.processes import is_alive, started_at
from ezpz_llm.training.checkpoint.manifest import complete_checkpoints

# Writes its process id to a file, whatever the shell puts around it.
_LAUNCH = "sh -c 'echo $$ > pid.new && mv pid.new pid && exec \"$@\"' - {words}"

IDIOMS = {
    "plain": "{launch}",
    "tee": "{launch} | tee log",
    "tee of both": "{launch} 2>&1 | tee log",
    "head": "{launch} | head -1",
    "head of both": "{launch} 2>&1 | head -1",
    "nohup": "nohup {launch} > log 2>&1 & wait",
    "timeout": "timeout 100 {launch} 2>&1 | tee log",
}


def _wait_for(condition: Callable[[], object], what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + scaled(timeout)
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.05)


@dataclass
class Typed:
    """A command line that contains launch, run by a shell."""

    folder: Path
    shell: subprocess.Popen[bytes]
    launch: int
    began: int

    def is_over(self) -> bool:
        return not is_alive(self.launch, self.began)


@contextlib.contextmanager
def _typed(folder: Path, line: str, *words: str, **streams: object) -> Iterator[Typed]:
    words = words or (sys.executable, "saves.py")
    (folder / "saves.py").write_text(SAVES)
    command = shlex.join([sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", "r", *words])
    shell = subprocess.Popen(["bash", "-c", line.format(launch=_LAUNCH.format(words=command))], cwd=folder,
                             env=clean_env(OMP_NUM_THREADS="1"), **{
                                 "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL,
                                 "stderr": subprocess.DEVNULL, "start_new_session": True, **streams})
    try:
        _wait_for((folder / "pid").exists, "launch's start")
        pid = int((folder / "pid").read_text())
        typed = Typed(folder, shell, pid, started_at(pid))
        yield typed
        _wait_for(typed.is_over, "launch's end")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def _are_up(folder: Path) -> bool:
    return all((folder / f"r/up{rank}").exists() for rank in (0, 1))


def _check(folder: Path, code: int, cause: str) -> None:
    saved = sorted(path.name for path in (folder / "r").glob("saved*"))
    assert saved == ["saved0", "saved1"]
    ended = record(folder / "r")["exit"]
    assert (ended["code"], cause in ended["cause"]) == (code, True), ended
    assert cause in (folder / "r/postmortem.txt").read_text()
    assert left_over(folder / "r") == {}


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_a_signal_to_all_that_was_typed(tmp_path: Path, idiom: str, number: signal.Signals) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole foreground group, so tee ends before launch."""
    with _typed(tmp_path, IDIOMS[idiom]) as typed:
        _wait_for(lambda: _are_up(tmp_path), "the ranks' start")
        os.killpg(os.getpgid(typed.launch), number)
    _check(tmp_path, 128 + number, f"launch received {number.name}")


@pytest.mark.parametrize("idiom", ["plain", "tee of both", "head"])
def test_a_terminal_that_is_closed(tmp_path: Path, idiom: str) -> None:
    """A lost ssh connection or `tmux kill-session` sends SIGHUP, and every write fails with EIO."""
    ours, theirs = pty.openpty()

    def in_terminal() -> None:
        os.setsid()
        # The first terminal that a session leader opens becomes its controlling terminal.
        os.close(os.open(os.ttyname(0), os.O_RDWR))

    is_closing = threading.Event()
    reader = threading.Thread(target=_read_all, args=(ours, is_closing), daemon=True)
    words = (sys.executable, "saves.py", "with a checkpoint")
    with _typed(tmp_path, IDIOMS[idiom], *words, stdin=theirs, stdout=theirs, stderr=theirs,
                start_new_session=False, preexec_fn=in_terminal):
        os.close(theirs)
        reader.start()
        _wait_for(lambda: _are_up(tmp_path), "the ranks' start")
        is_closing.set()
        reader.join(5)
        os.close(ours)
    _check(tmp_path, 129, "launch received SIGHUP (the terminal was closed")
    said = subprocess.run([sys.executable, "-m", "ezpz_llm.why", "r"], cwd=tmp_path, env=clean_env(),
                          capture_output=True, text=True, timeout=scaled(60), check=True).stdout
    assert "SIGHUP" in said
    assert "killed" not in said
    assert f"resume: launch --run-dir {tmp_path / 'r'} " in said.splitlines()[-1]


def _read_all(terminal: int, is_closing: threading.Event) -> None:
    """Read like a terminal until it is closed."""
    os.set_blocking(terminal, False)
    while not is_closing.is_set():
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 65536)
        time.sleep(0.01)


@pytest.mark.full
def test_the_trainers_checkpoint(tmp_path: Path) -> None:
    """Run the real trainer, with a typical command line."""
    with _typed(tmp_path, IDIOMS["tee of both"], sys.executable, "-m", "ezpz_llm.train", *LONG) as typed:
        _wait_for(lambda: (tmp_path / "r/metrics.jsonl").exists(), "the first steps", 120)
        os.killpg(os.getpgid(typed.launch), signal.SIGINT)
    [saved] = complete_checkpoints(tmp_path / "r/checkpoints")
    assert record(tmp_path / "r")["exit"]["code"] == 130
    words = (tmp_path / "r/postmortem.txt").read_text().splitlines()
    assert words[0].startswith("launch: launch received SIGINT (Ctrl-C)")
    assert words[-1].endswith(f"--resume {tmp_path / 'r'}")
    assert f"stopped after step {int(saved.name.removeprefix('step-'))} of" in "\n".join(words)


def test_time_runs_out(tmp_path: Path) -> None:
    """timeout signals launch and then its whole group. The second signal must not be treated as a second Ctrl-C."""
    with _typed(tmp_path, f"timeout {scaled(5):.0f} {{launch}} 2>&1 | tee log"):
        pass
    assert _are_up(tmp_path)
    _check(tmp_path, 143, "launch received SIGTERM")


def test_only_a_second_ctrl_c_is_urgent(tmp_path: Path) -> None:
    """A shell that ends after its terminal sends SIGHUP again, and systemd sends SIGTERM, then SIGHUP."""
    with _typed(tmp_path, IDIOMS["plain"]) as typed:
        _wait_for(lambda: _are_up(tmp_path), "the ranks' start")
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError):
                os.kill(typed.launch, number)
            time.sleep(0.4)  # ranks save 0.5 s after SIGTERM
    _check(tmp_path, 129, "launch received SIGHUP")


def test_a_reader_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text("for number in range(50000): print(number)\n")
    with _typed(tmp_path, "{launch} 2> said | head -1 > first; echo ${{PIPESTATUS[0]}} > code", sys.executable,
                "talks.py") as typed:
        # The shell writes `code` after launch has ended, and leaving the block kills the shell.
        typed.shell.wait(scaled(60))
    assert (tmp_path / "first").read_text() == "0\n"
    assert (tmp_path / "code").read_text() == "0\n"
    assert (tmp_path / "r/logs/rank0000.log").read_text().endswith("\n49999\n")
    assert record(tmp_path / "r")["exit"]["code"] == 0
    assert "launch: the reader of standard output has exited; the run continues" in (tmp_path / "said").read_text()


@pytest.mark.full
def test_a_stopped_reader(tmp_path: Path) -> None:
    """Ranks block on output to a stopped reader (`| less`, Ctrl-S); ending the run does not block."""
    read, write = os.pipe()
    (tmp_path / "talks.py").write_text(SAVES.replace("time.sleep(0.02)", "").replace('"step"', '"step" * 2000'))
    with _typed(tmp_path, "{launch}", sys.executable, "talks.py", stdout=write, stderr=write) as typed:
        os.close(write)
        _wait_for(lambda: _are_up(tmp_path), "the ranks' start")
        log, size = tmp_path / "r/logs/rank0000.log", -1
        while size != (size := log.stat().st_size):
            time.sleep(1)
        os.kill(typed.launch, signal.SIGTERM)
    os.close(read)
    _check(tmp_path, 143, "launch received SIGTERM")


def test_a_slow_reader_gets_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text("import os\nfor number in range(3000): os.write(1, b'%0999d\\n' % number)\n")
    with _typed(tmp_path, "{launch} | (sleep 4; cat) > got", sys.executable, "talks.py") as typed:
        typed.shell.wait(scaled(60))
    assert (tmp_path / "got").read_text() == "".join(f"{number:0999d}\n" for number in range(3000))


@pytest.mark.full
def test_what_the_console_has_shown_is_not_shown_again(tmp_path: Path) -> None:
    """In a job's output file, the rank's last lines are directly above the post-mortem."""
    (tmp_path / "fails.py").write_text("""
import os, time
if os.environ["EZPZ_LLM_RANK"] == "1":
    time.sleep(60)
print("about to fail", flush=True)
raise ValueError("bad")
""")
    with _typed(tmp_path, "{launch} > out 2>&1", sys.executable, "fails.py"):
        pass
    out = (tmp_path / "out").read_text()
    assert out.count("about to fail") == 1
    assert "exit code 1" in out
    assert "ValueError: bad  (" in out
    assert (tmp_path / "r/postmortem.txt").read_text().count("about to fail") == 1


@pytest.mark.parametrize(("command", "last"), [
    (("hostname",), "[1] {host}"),
    # More than fits on a screen.
    (("seq", "65"), "launch: 1 other rank wrote to {logs} (--tee all shows it here)"),
    (("head", "-c", "20000", "/dev/zero"), "launch: 1 other rank wrote to {logs} (--tee all shows it here)"),
])
def test_other_ranks_that_wrote_are_shown_or_named(tmp_path: Path, command: tuple[str, ...], last: str) -> None:
    """`launch hostname` prints rank 0's line on standard output, and those of the other ranks afterwards."""
    with _typed(tmp_path, "{launch} > out 2> said", *command):
        pass
    assert (tmp_path / "out").read_text() == subprocess.check_output(command, text=True)
    named, end = (tmp_path / "said").read_text().splitlines()[-2:]
    assert named == last.format(host=os.uname().nodename, logs=tmp_path / "r/logs")
    assert end.startswith("launch: exit code 0 after ")


def test_a_cancelled_job(cluster: Cluster, tmp_path: Path) -> None:
    """scancel signals all processes of a batch job, including tee, and its message is only in the job's output.

    In an salloc shell it only signals the ranks.
    """
    typed = "launch -n 2 --run-dir r python3 saves.py"
    folders = {name: tmp_path / name.replace(" ", "-") for name in (*IDIOMS, "salloc")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "saves.py").write_text(SAVES)
        if name in IDIOMS:
            line = IDIOMS[name].format(launch=typed)
            (folder / "job.sh").write_text(f"#!/bin/bash\n#SBATCH -n1 -t5 -o out.txt\n{line}\n")
            assert cluster.run("sbatch", "job.sh", cwd=folder).returncode == 0
    shell = cluster.start("salloc", "-n1", "-t5", *typed.split(), cwd=folders["salloc"])
    for folder in folders.values():
        _wait_for(lambda folder=folder: _are_up(folder), "the ranks' start", 120)
    cluster.run("scancel", "--user=root")
    for folder in folders.values():
        _wait_for(lambda folder=folder: record(folder / "r")["exit"] is not None, "the end on file")
        _check(folder, 143, "was canceled: ")
        assert record(folder / "r")["exit"]["kind"] == "cancelled"
    cluster.finish(shell)


def test_a_terminal_talks_to_rank_0(tmp_path: Path) -> None:
    """Input reaches the rank, and a prompt appears at once, as needed for `python3 -i` and breakpoint()."""
    ours, theirs = pty.openpty()
    said = b""

    def wait_for(words: bytes) -> None:
        nonlocal said
        deadline = time.monotonic() + scaled(60)
        while words not in said:
            assert time.monotonic() < deadline, said
            if select.select([ours], [], [], 1)[0]:
                said += os.read(ours, 4096)

    (tmp_path / "asks.py").write_text("x = 41\nbreakpoint()\nprint('after')\n")
    with _typed(tmp_path, "{launch}", sys.executable, "asks.py", stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        wait_for(b"(Pdb) ")
        os.write(ours, b"p x + 1\n")
        wait_for(b"42\r\n(Pdb) ")
        os.write(ours, b"q\n")
        wait_for(b"BdbQuit")
    os.close(ours)
