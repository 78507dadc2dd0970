"""Rank shim: output, failure records, and exit codes, which nothing may change."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from launch_runs import clean_env, launch, left_over, record
from slowness import scaled

from ezpz_llm.core.base.private_folders import make_private, new_secret, remove_private
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.node_folder import own_folders
from ezpz_llm.launcher.basics.variables import IN_COLOR, LIVE_LINE
from ezpz_llm.launcher.on_nodes.node.rank_reports import Gatherer
from ezpz_llm.launcher.on_nodes.shim.memory import find_kill_messages, read_count
from ezpz_llm.launcher.on_nodes.shim.output import Output

_NUMBER = itertools.count()
_CGROUPS = Path("/sys/fs/cgroup/memory")


def _script(folder: Path, text: str, name: str = "program.py") -> str:
    (folder / name).write_text("import os, signal, subprocess, sys, time\n"
                               'rank = int(os.environ["EZPZ_LLM_RANK"])\n' + text)
    return name


def _record(run_dir: Path, rank: int) -> dict:
    return json.loads((run_dir / f"errors/rank{rank:04d}.json").read_text())


def _shim(folder: Path, rank: int, size: int, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a single shim, as a launcher would start it."""
    for name in ("logs", "errors", "heartbeat", "control"):
        (folder / name).mkdir(exist_ok=True)
    variables = {"EZPZ_LLM_RUN_DIR": str(folder), "EZPZ_LLM_RUN_ID": f"test-{os.getpid()}-{next(_NUMBER)}",
                 "EZPZ_LLM_SECRET": new_secret(),
                 "EZPZ_LLM_WORLD_SIZE": str(size), "PMI_RANK": str(rank), "PMI_SIZE": str(size),
                 "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", **env}
    return subprocess.run([sys.executable, "-m", "ezpz_llm.launcher.on_nodes.shim", "--", *words],
                          env=clean_env(**variables), capture_output=True, text=True, timeout=scaled(60),
                          check=False)


def test_each_line_is_whole_and_says_whose_it_is(tmp_path: Path) -> None:
    program = _script(tmp_path, """
for number in range(400):
    os.write(1 + number % 2, f"<{rank} {number} {'x' * (number * 5 % 900)}>\\n".encode())
sys.stdout.buffer.write(b"\\xff not UTF-8\\r\\n 50%|##|\\r100%|####|\\nhalf a line")
sys.stdout.flush()
""")
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.launch", "-n", "3", "--tee", "all", "--run-dir", "r",
                           sys.executable, program], cwd=tmp_path, env=clean_env(), capture_output=True,
                          timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr
    out = done.stdout.splitlines() + [line for line in done.stderr.splitlines() if line.startswith(b"[")]
    assert all(re.match(rb"\[[012]\] ", line) for line in done.stdout.splitlines())
    for rank in range(3):
        mine = [line.partition(b"] ")[2] for line in out if line.startswith(b"[%d] " % rank)]
        numbered = sorted((line for line in mine if line.startswith(b"<")), key=lambda line: int(line.split()[1]))
        assert numbered == [f"<{rank} {number} {'x' * (number * 5 % 900)}>".encode() for number in range(400)]
        assert [line for line in mine if not line.startswith(b"<")] == [
            b"\xff not UTF-8", b" 50%|##|", b"100%|####|", b"half a line"]
        assert (tmp_path / f"r/logs/rank{rank:04d}.log").read_bytes().count(b"half a line") == 1


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    """Buffering the whole line copied it again with every read, and took a minute for 100 MB."""
    done = _shim(tmp_path, 1, 2, sys.executable, "-c", "print('x' * 20_000_000, end='')", EZPZ_LLM_TEE="all")
    lines = done.stdout.splitlines()
    assert {line[:4] for line in lines} == {"[1] "}
    assert sum(len(line) - 4 for line in lines) == 20_000_000
    assert {len(line) - 4 for line in lines[:-1]} == {65536}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[int]:
    handle = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield handle
    os.close(handle)


def _logged(handle: int, pieces: Iterable[bytes], *, is_colored: bool = False) -> bytes:
    """Return the log of a rank's output that is read in these pieces."""
    os.truncate(handle, 0)
    output = Output(0, handle, "none", is_colored=is_colored)
    for piece in pieces:
        output.write(1, piece)
    output.close()
    written = os.pread(handle, 1 << 20, 0)
    assert output.tail().encode() == written[-(1 << 17):]
    return written


def test_erased_lines_cost_no_time(log: int) -> None:
    """A search for the end from each beginning delayed the rank by 12 s for 64 KiB of them."""
    for line in (b"\x1b[2K" * 16384, LIVE_LINE.encode() * 5461, b"\x1b[2K" * 16383 + b"\r"):
        began = time.process_time()
        assert _logged(log, [line]) == line
        assert time.process_time() - began < scaled(0.1)


def test_the_log_has_all_that_a_program_wrote_but_for_our_own_live_lines(log: int) -> None:
    """The result does not depend on how the output is split into reads."""
    theirs = b"0%\r\x1b[2K 50%\r\x1b[2K\x1b[1K\r100%\r\ndone\x1b[2K\rx\x1b"
    live = f"{LIVE_LINE} 3/1500  0%\r".encode()
    unfinished = f"{LIVE_LINE} 4/1500\nTraceback\r".encode()
    mixed = b"a\n" + live + live + b"b\n" + theirs + live + unfinished
    lasting = b"a\nb\n" + theirs + unfinished
    assert _logged(log, [theirs]) == theirs
    for size in (1, 2, 3, 5, 7, 11, 13, len(mixed)):
        assert _logged(log, [mixed[at:at + size] for at in range(0, len(mixed), size)]) == lasting, size


def test_the_log_has_no_colours_where_the_terminal_has_them(log: int) -> None:
    shown = b"\x1b[38;5;2mloss\x1b[0m 5.1\x1b[K\n\x1b[1;31m" + f"{LIVE_LINE} 3/9\r".encode() + b"\x1b[mend\x1b[3"
    for size in (1, 2, 3, 5, 7, len(shown)):
        pieces = [shown[at:at + size] for at in range(0, len(shown), size)]
        assert _logged(log, pieces, is_colored=True) == b"loss 5.1\x1b[K\nend\x1b[3", size
        assert _logged(log, pieces) == shown.replace(f"{LIVE_LINE} 3/9\r".encode(), b""), size


@pytest.mark.parametrize(("rank", "logged"), [(0, "loss\n"), (1, "\x1b[31mloss\x1b[0m\n")])
def test_only_the_rank_that_the_terminal_shows_has_a_log_without_colours(tmp_path: Path, rank: int,
                                                                         logged: str) -> None:
    done = _shim(tmp_path, rank, 2, sys.executable, "-c", "print('\\x1b[31mloss\\x1b[0m')",
                 EZPZ_LLM_TERMINAL=f"80{IN_COLOR}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"logs/rank{rank:04d}.log").read_text() == logged


def test_a_log_ends_at_its_limit_with_the_last_words(tmp_path: Path) -> None:
    program = "import sys; sys.stdout.write('begin ' + 'x' * 3_000_000); sys.stdout.write('the end'); sys.exit(7)"
    done = _shim(tmp_path, 0, 2, sys.executable, "-c", program, EZPZ_LLM_LOG_BYTES="1000")
    assert (done.returncode, len(done.stdout)) == (7, 3_000_013)
    assert done.stderr.count("rank 0's log has reached its limit of 1000 bytes (EZPZ_LLM_LOG_BYTES)") == 1
    log = (tmp_path / "logs/rank0000.log").read_text()
    begin, last = log.split("\nlaunch: rank 0's log has reached its limit of 1000 bytes (EZPZ_LLM_LOG_BYTES)\n")
    assert begin == "begin " + "x" * 994
    left_out = re.match(r"\nlaunch: (\d+) bytes omitted here\n", last)
    assert last.endswith("xthe end")
    last = last[left_out.end():]
    assert len(last) == 1 << 17
    assert int(left_out[1]) == 3_000_013 - 1000 - len(last)
    # A log that fits within the limit is complete.
    assert _shim(tmp_path, 1, 2, sys.executable, "-c", program, EZPZ_LLM_LOG_BYTES="3000013").returncode == 7
    assert (tmp_path / "logs/rank0001.log").stat().st_size == 3_000_013


def test_a_log_at_its_limit_does_not_make_its_rank_look_idle(tmp_path: Path, monkeypatch) -> None:
    """For a rank that uses no processor time, output is the only sign of life."""
    monkeypatch.setattr("ezpz_llm.launcher.on_nodes.shim.output._TOUCH_S", 0.0)
    (tmp_path / "r/logs").mkdir(parents=True)
    run_dir, log = RunDir(tmp_path / "r"), os.open(tmp_path / "r/logs/rank0000.log", os.O_WRONLY | os.O_CREAT)
    with make_private(tmp_path / "node") as folder:
        folder.write("rank0000.shim", f"{os.getpid()} 1".encode())
        output, gatherer = Output(0, log, "none", max_bytes=4), Gatherer(folder, run_dir)
        output.write(1, b"more than four")
        assert gatherer.update([])[1]
        assert not gatherer.update([])[1]
        time.sleep(0.05)
        output.write(1, b"tick")
        assert gatherer.update([])[1]
    os.close(log)


def test_an_invalid_log_limit_is_reported(tmp_path: Path) -> None:
    done = launch(tmp_path, "-n", "1", "--run-dir", "s", "yes", EZPZ_LLM_LOG_BYTES="10 GB")
    assert done.returncode == 2
    assert "EZPZ_LLM_LOG_BYTES is '10 GB'" in done.stderr


def test_the_shims_own_words_begin_a_line(full_disk: Path) -> None:
    program = "import os; os.write(2, b'loading '); os.write(2, b'.' * 100_000)"
    done = _shim(full_disk, 0, 2, sys.executable, "-c", program)
    assert "\nlaunch: rank 0 continues without its log: No space left on device\n" in done.stderr


def test_nothing_on_the_console(tmp_path: Path) -> None:
    program = _script(tmp_path, "print('out', rank)\nprint('err', rank, file=sys.stderr)\nsys.exit(rank)\n")
    done = launch(tmp_path, "-n", "2", "--tee", "none", "--run-dir", "r", sys.executable, program)
    assert (done.returncode, done.stdout) == (1, "")
    assert "err 0" not in done.stderr
    assert "| err 1" in done.stderr
    # One pipe for both streams preserves their order.
    assert (tmp_path / "r/logs/rank0000.log").read_text() == "out 0\nerr 0\n"


def test_what_a_record_holds(tmp_path: Path) -> None:
    """Records of six failures in one launch: code, signal, exception, and the exception's location."""
    program = _script(tmp_path, """
open(os.environ["EZPZ_LLM_HEARTBEAT"], "w").write("training 17\\n")
def step():
    if rank == 0: raise ValueError("bad number " + os.environ["HF_TOKEN"])
    if rank == 1: os.kill(os.getpid(), signal.SIGSEGV)
    if rank == 2: os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3: os.kill(os.getpid(), signal.SIGABRT)
    if rank == 4:
        sys.stderr.buffer.write(b"\\xfe\\xff no UTF-8\\n")
        sys.exit(7)
    raise BaseExceptionGroup("many", [ValueError("a")]) if sys.version_info > (3, 11) else ValueError("a")
step()
""")
    done = launch(tmp_path, "-n", "6", "--run-dir", "r", sys.executable, program, "--hf-token", "tok-123456",
                  HF_TOKEN="hf_0123456789")
    records = [_record(tmp_path / "r", rank) for rank in range(6)]
    assert [record["exit_code"] for record in records] == [1, 139, 137, 134, 7, 1]
    assert [record["signal"] for record in records] == [None, "SIGSEGV", "SIGKILL", "SIGABRT", None, None]
    assert [record["exception"] and record["exception"]["type"] for record in records[:5]] == [
        "ValueError", "Fatal Python error", None, "", None]
    assert records[3]["exception"]["message"] == "abort() was called"
    assert records[0]["exception"]["where"].endswith("program.py:6 in step")
    assert records[1]["exception"]["where"].endswith("program.py:7 in step")
    assert records[1]["exception"]["message"] == "Segmentation fault"
    assert records[5]["exception"]["message"].endswith("a")
    assert {(record["phase"], record["step"]) for record in records} == {("training", 17)}
    assert {record["host"] for record in records} == {os.uname().nodename}
    assert {record["ended_by"] for record in records} == {None}
    assert done.returncode in {record["exit_code"] for record in records}
    # The program printed its secret, so its log has it, but nothing that launch writes does.
    assert (tmp_path / "r/logs/rank0004.log").read_bytes() == b"\xfe\xff no UTF-8\n"
    assert records[4]["tail"] == ["\ufffd\ufffd no UTF-8"]
    for path in (*tmp_path.glob("r/*.json"), *tmp_path.glob("r/errors/*"), *tmp_path.glob("r/*.txt")):
        text = path.read_text()
        assert "hf_0123456789" not in text, path
        assert "tok-123456" not in text, path
    assert "tok-123456" not in done.stderr
    assert "hf_0123456789" not in done.stderr.partition("launch: rank")[2]
    assert record(tmp_path / "r")["launch"]["typed"][-2:] == ["--hf-token", "[redacted]"]
    assert left_over(tmp_path / "r") == {}


def test_large_worlds_keep_their_logs_on_the_node(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    words = (sys.executable, "-c", "import sys; print('here', flush=True); sys.exit(int(sys.argv[1]))")
    log = run_dir / "logs/rank0005.log"
    assert _shim(run_dir, 5, 256, *words, "0").returncode == 0
    assert log.read_text() == "here\n"
    log.unlink()
    assert _shim(run_dir, 5, 257, *words, "0").returncode == 0
    assert not log.exists()
    assert _shim(run_dir, 5, 257, *words, "7").returncode == 7
    assert log.read_text() == "here\n"
    assert _record(run_dir, 5)["tail"] == ["here"]
    log.unlink()
    (run_dir / "control/logs").write_text("3,5-9")
    assert _shim(run_dir, 5, 257, *words, "0").returncode == 0
    assert log.read_text() == "here\n"
    assert _shim(run_dir, 0, 257, *words, "0").stdout == "here\n"
    assert (run_dir / "logs/rank0000.log").read_text() == "here\n"
    for folder, run_id, _ in own_folders():
        if run_id.startswith(f"test-{os.getpid()}-"):
            remove_private(folder.path)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=64", "none", str(folder)],
                          capture_output=True, text=True, timeout=scaled(120), check=False)
    if made.returncode:
        pytest.skip(f"cannot mount a small file system here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], timeout=scaled(120), check=True)


def test_a_full_disk_changes_no_exit_code(full_disk: Path) -> None:
    program = "import sys; print('x' * 200_000); print('the end', file=sys.stderr); sys.exit(7)"
    done = _shim(full_disk, 1, 2, sys.executable, "-c", program)
    assert done.returncode == 7, done.stderr
    assert "rank 1 continues without its log: No space left on device" in done.stderr
    assert "rank 1 ended with code 7, but its record or log could not be written" in done.stderr
    assert list((full_disk / "errors").iterdir()) == []
    assert "Traceback" not in done.stderr
    well = _shim(full_disk, 1, 2, sys.executable, "-c", "print('y' * 100_000)")
    assert well.returncode == 0, well.stderr


_FILL_AND_FAIL = """
while not os.path.exists("r/heartbeat/node0000.json") or not os.path.getsize("r/heartbeat/node0000.json"):
    time.sleep(0.02)
with open(f"ballast{rank}", "wb", buffering=0) as file:
    size = 4096
    while size:
        try:
            file.write(b"x" * size)
        except OSError:
            size //= 2
sys.exit("error: the model is too large\\n  instead: --n-layer 2")
"""


def test_a_full_disk_keeps_the_error_that_all_ranks_raise(full_disk: Path) -> None:
    program = _script(full_disk, _FILL_AND_FAIL)
    done = launch(full_disk, "-n", "2", "--run-dir", "r", sys.executable, program)
    assert done.returncode == 1, done.stderr
    assert list((full_disk / "r/errors").iterdir()) == []
    cause = done.stderr[done.stderr.index(" failed: "):]
    assert "error: the model is too large" in cause
    assert "no output" not in cause
    assert "rank 0: the same" in cause or "rank 1: the same" in cause


_HOG = """
if rank == 1:
    kept = []
    while True:
        kept.append(bytearray(8 << 20))
        kept[-1][::4096] = b"x" * 2048
time.sleep(60)
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """Create a memory cgroup with a limit of 300 MiB."""
    group = _CGROUPS / f"ezpz_llm-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"cannot make a memory cgroup (v1) here: {error}")
    yield group
    deadline = time.monotonic() + scaled(10)
    while time.monotonic() < deadline:
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def test_the_out_of_memory_killer_is_named(tmp_path: Path, small_cgroup: Path) -> None:
    program = _script(tmp_path, _HOG)
    # A shell that enters the cgroup and becomes launch.
    inside = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(small_cgroup / "cgroup.procs"), sys.executable)
    done = subprocess.run([*inside, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", "r", sys.executable, program],
                          cwd=tmp_path, env=clean_env(), capture_output=True, text=True,
                          timeout=scaled(90), check=False)
    assert done.returncode == 137, done.stderr
    assert "rank 1 on" in done.stderr
    assert "out-of-memory killer" in done.stderr
    assert "try: use fewer ranks per node" in done.stderr
    evidence = _record(tmp_path / "r", 1)["oom_killed"]
    assert f"Killed process {_record(tmp_path / 'r', 1)['pid']} (python" in evidence or "oom_kill in" in evidence
    # If the kernel log cannot be read, only the counter shows it.
    asked = subprocess.run([*inside, "-c", """
import subprocess, sys, time
from ezpz_llm.launcher.on_nodes.shim.memory import count_kills, find_oom_evidence
before = count_kills()
print(find_oom_evidence(before, (), time.monotonic(), is_killed=False))
subprocess.run([sys.executable, "-c", "x = b'x' * (600 << 20)"])
print(find_oom_evidence(before, (), time.monotonic(), is_killed=False))
"""], capture_output=True, text=True, timeout=scaled(60), check=True)
    none, reason = asked.stdout.splitlines()
    assert none == "None"
    assert re.fullmatch(r"the out-of-memory killer ended a process: oom_kill in "
                        rf"{small_cgroup}/memory.oom_control rose from \d+ to \d+", reason)


def test_the_kernels_words(tmp_path: Path) -> None:
    """Parse cgroup v2's file and messages of kernels since 4.x, written by hand after documentation and sources."""
    events = tmp_path / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n")
    assert read_count(events) == 2
    assert read_count(tmp_path / "none") is None
    assert find_kill_messages([
        "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,task=python3,pid=71,uid=0",
        "Memory cgroup out of memory: Killed process 71 (python3) total-vm:217316kB, anon-rss:65280kB",
        "[12345.678901] Out of memory: Killed process 72 (python3) total-vm:1kB, anon-rss:1kB, UID:0",
        "Memory cgroup out of memory: Kill process 73 (python3) score 1000 or sacrifice child",
    ]).keys() == {71, 72, 73}


def test_it_starts_quickly() -> None:
    """Shims start on thousands of nodes at once, and read their imports from a shared file system."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-c",
                           "import ezpz_llm.launcher.on_nodes.shim.__main__"],
                          capture_output=True, text=True, timeout=scaled(60), check=True)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()[1:]}
    assert not modules & {"torch", "numpy", "asyncio", "logging", "argparse", "ssl", "multiprocessing", "tempfile"}
    assert not {name for name in modules
                if name.startswith(("ezpz_llm.launcher.diagnosis", "ezpz_llm.launcher.planning.plan"))}
    assert len(modules) < 170


def test_a_signal_to_the_shim_is_not_a_failure(tmp_path: Path) -> None:
    """The record names who ended the rank if its shim got the signal, but not if only the rank did."""
    program = _script(tmp_path, """
open(os.path.join(os.environ["EZPZ_LLM_RUN_DIR"], "up"), "w").close()
if sys.argv[1] == "itself": os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
""")
    done = _shim(tmp_path, 1, 2, sys.executable, str(tmp_path / program), "itself")
    assert done.returncode == 143
    assert (_record(tmp_path, 1)["signal"], _record(tmp_path, 1)["ended_by"]) == ("SIGTERM", None)
    (tmp_path / "up").unlink()
    env = clean_env(EZPZ_LLM_RUN_DIR=str(tmp_path), EZPZ_LLM_RUN_ID=f"test-{os.getpid()}-told", PMI_RANK="1",
                    EZPZ_LLM_SECRET=new_secret(), EZPZ_LLM_WORLD_SIZE="2", PMI_SIZE="2", MPI_LOCALRANKID="1",
                    MPI_LOCALNRANKS="2")
    shim = subprocess.Popen([sys.executable, "-m", "ezpz_llm.launcher.on_nodes.shim", "--", sys.executable,
                             str(tmp_path / program), "waits"], env=env)
    deadline = time.monotonic() + scaled(30)
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    shim.send_signal(signal.SIGTERM)
    assert shim.wait(scaled(30)) == 143
    assert _record(tmp_path, 1)["ended_by"] == "SIGTERM"
    for folder, run_id, _ in own_folders():
        if run_id.startswith(f"test-{os.getpid()}-"):
            remove_private(folder.path)


def test_last_words_outlive_a_shim_that_is_killed(tmp_path: Path) -> None:
    """On MPI_Abort some launchers kill every shim at once, just after the rank has written its message."""
    program = _script(tmp_path, """
os.write(1, b"first\\n")
os.kill(os.getppid(), signal.SIGSTOP)
os.write(1, b"last words\\n")
os.write(2, b"of standard error\\n")
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60)
""")
    assert _shim(tmp_path, 0, 1, sys.executable, str(tmp_path / program)).returncode == -signal.SIGKILL
    log, deadline = tmp_path / "logs/rank0000.log", time.monotonic() + scaled(30)
    while b"standard error" not in log.read_bytes():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    assert sorted(log.read_text().splitlines()) == ["first", "last words", "of standard error"]
    for folder, run_id, _ in own_folders():
        if run_id.startswith(f"test-{os.getpid()}-"):
            remove_private(folder.path)
