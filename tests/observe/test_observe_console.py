"""Console output of a run at common terminal widths: golden files, optional columns, and remaining time."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest
from golden import check_golden
from slowness import scaled

from ezpz_llm.core.base.label_rows import align_rows
from ezpz_llm.core.rundir import RunDir, append_line
from ezpz_llm.launcher.basics.variables import LIVE_LINE
from ezpz_llm.training.checkpoint import NotWrittenError
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.observe import StepWork, final_text, series_plot, summarize
from ezpz_llm.training.observe.throughput import Progress, format_duration
from ezpz_llm.training.trainer import checkpoint_saves
from ezpz_llm.training.trainer.first_screen import expected_end, precision_words

WORK = StepWork(micro_batch=4, accumulation=1, dp_size=2, world_size=2, block_size=256)


def run_lines(steps: int) -> list[dict]:
    """Return the lines of a run with a decreasing loss and a validation at the end."""
    lines = []
    for step in range(1, steps + 1):
        rates = WORK.rates(0.0565)
        lines.append({"step": step, "loss": 1.5 + 4 * math.exp(-step / 60), "lr": 1e-3, "grad_norm": 0.7,
                      "step_time_s": 0.0565, "tokens_per_second": rates.tokens_per_second,
                      "tokens_per_second_per_device": rates.tokens_per_second_per_device, "data_s": 0.0004,
                      "forward_s": 0.017, "backward_s": 0.0315, "optimizer_s": 0.0071, "other_s": 0.0005,
                      **({"val_loss": 1.6734, "val_tokens": 65536} if step == steps else {})})
    return lines


def console(width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_ascii: bool) -> str:
    """Return the first lines, progress, plot, and summary of a simulated run."""
    lines, seconds = run_lines(200), iter(range(0, 100_000, 600))
    print(align_rows([("model", "tiny-gpt2: 867,072 parameters (4 layers, 4 heads, width 128)"),
                      ("batch", "8 x 256 = 2,048 tokens per step (4 sequences per rank)")], width), end="")
    progress = Progress(200, WORK, width, clock=lambda: float(next(seconds)))
    for first in range(0, 200, 50):
        progress.show(lines[first:first + 50])
    print(series_plot([line["step"] for line in lines], [line["loss"] for line in lines], "loss", "step",
                      "nats/token", width, 12, is_ascii=is_ascii), end="")
    run_dir = RunDir(tmp_path / "run").create()
    run_dir.report.touch()
    for line in lines:
        append_line(run_dir.metrics, line)
    summary = summarize(run_dir, WORK, {"set-up": 8.0, "training": 133.0, "evaluation": 6.5}, unigram_entropy=3.2)
    assert summary is not None
    print(final_text(summary, run_dir, run_dir.profile / "host.html", 1_184_000_000, width), end="")
    return capsys.readouterr().out.replace(str(run_dir.path), "runs/train-20261124-001200")


@pytest.mark.parametrize(("width", "is_ascii"), [(60, False), (80, False), (200, False), (80, True)])
def test_console_output_matches_the_golden_file(width, is_ascii, tmp_path, capsys):
    text = console(width, tmp_path, capsys, is_ascii=is_ascii)
    check_golden(f"console_{width}{'_ascii' if is_ascii else ''}.txt", text)
    assert "\x1b" not in text
    assert text.isascii() == is_ascii
    table = [line for line in text.splitlines() if "/200 " in line]
    assert len(table) == 4
    assert all(len(line) <= width for line in text.splitlines())


def test_remaining_time_is_estimated_from_all_elapsed_time(capsys):
    """Evaluations and checkpoints are included. The estimate restarts after a rollback."""
    now = iter([0.0, 10.0, 110.0, 120.0, 130.0])
    progress = Progress(100, WORK, 200, clock=lambda: next(now))
    lines = run_lines(100)
    for last in (10, 60, 40, 50):  # the run is rolled back to step 30 after step 60
        progress.show(lines[last - 1:last])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows[0][-1] == "0:10", "a single line gives no rate"
    assert rows[1][-1] == "1:20", "40 steps at 2 s each"
    assert rows[2][-1] == "2:00", "the rate after the rollback is unknown"
    assert rows[3][-1] == "0:50"


def ticks(seconds: float, steps: int, capsys: pytest.CaptureFixture[str], width: int, *, is_live: bool) -> str:
    """Return the output between two lines, for a step time in seconds."""
    now = iter([0.0, *(seconds * step for step in range(1, steps + 1))])
    progress = Progress(1500, WORK, width, clock=lambda: next(now), is_live=is_live)
    for step in range(1, steps + 1):
        progress.tick(step)
    progress.erase()
    return capsys.readouterr().out


@pytest.mark.parametrize(("width", "shown"), [
    (60, "   3/1500    0%  elapsed 0:12  left 1:39:48  512 tok/s"), (30, "   3/1500    0%  elapsed 0:12"),
    (200, "   3/1500    0%  elapsed 0:12  left 1:39:48  512 tok/s")])
def test_terminal_has_one_line_that_is_rewritten(width, shown, capsys):
    text = ticks(4, 3, capsys, width, is_live=True)
    lines = text.split("\r")
    assert lines[1] == f"{LIVE_LINE}{shown}"
    assert lines[2:] == [LIVE_LINE, ""], "finally the line is empty"
    assert "\n" not in text


def test_live_line_is_erased_before_a_warning(capsys):
    """A checkpoint cannot be written in a step between two progress lines."""
    now = iter([0.0, 4.0, 8.0])
    progress = Progress(1500, WORK, 80, clock=lambda: next(now), is_live=True)
    progress.tick(1)
    progress.tick(2)
    session = SimpleNamespace(dist=SimpleNamespace(is_main=True), config=SimpleNamespace(steps=1500), step=2,
                              stop=None, metrics=SimpleNamespace(erase_live_line=progress.erase),
                              checkpoints=SimpleNamespace(error=None))

    def fail() -> None:
        raise NotWrittenError("no space left")

    checkpoint_saves._attempt(session, fail)
    shown = capsys.readouterr()
    assert "no space left" in shown.err
    assert shown.out.endswith("\x1b[2K\r"), "the live line is erased before the warning"


def in_a_terminal(folder: Path, program: str, **env: str) -> bytes:
    """Launch a program on one rank in a terminal with 60 columns, and return the terminal's input."""
    console, terminal = pty.openpty()
    fcntl.ioctl(console, termios.TIOCSWINSZ, struct.pack("4H", 24, 60, 0, 0))
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": ":".join(sys.path), "COLUMNS": "", **env}
    run = subprocess.Popen([sys.executable, "-m", "ezpz_llm.launch", "--run-dir", str(folder / "run"), "-n", "1",
                            sys.executable, "-c", program], stdout=terminal, stderr=subprocess.DEVNULL, env=env)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: all processes have closed the terminal
        while data := os.read(console, 4096):
            shown += data
    os.close(console)
    assert run.wait(scaled(60)) == 0
    return shown


def test_live_line_reaches_launchs_terminal_but_no_log(tmp_path):
    program = ("import time; from ezpz_llm.training.observe.throughput import Progress, StepWork; "
               "now = iter([0.0, 4.0, 8.0, 12.0]); p = Progress(1500, StepWork(4, 1, 2, 2, 256), "
               "clock=lambda: next(now)); [p.tick(step) for step in (1, 2, 3)]; time.sleep(0.3); p.erase(); "
               "print('end')")
    shown = in_a_terminal(tmp_path, program)
    assert b"\x1b[2K   3/1500    0%  elapsed 0:12  left 1:39:48" in shown
    log = (tmp_path / "run" / "logs" / "rank0000.log").read_bytes()
    assert b"end\n" in log
    assert b"\x1b" not in log
    assert b"elapsed" not in log


@pytest.mark.parametrize("has_colour", [True, False])
def test_colors_reach_launchs_terminal_but_no_log(tmp_path, has_colour):
    program = ("from ezpz_llm.training.observe import series_plot, wants_color; "
               "print(series_plot([1, 2, 3], [3, 2, 1], 'loss', 'step', '', color=wants_color()))")
    shown = in_a_terminal(tmp_path, program, NO_COLOR="" if has_colour else "1")
    assert (b"\x1b[" in shown) == has_colour
    assert b"loss" in shown
    log = (tmp_path / "run" / "logs" / "rank0000.log").read_text()
    assert "loss" in log
    assert "\x1b" not in log


def test_log_has_a_plain_line_every_30_s_during_long_steps(capsys):
    text = ticks(12, 8, capsys, 80, is_live=False)
    assert [line.split()[0] for line in text.splitlines()] == ["3/1500", "6/1500"]
    assert text.splitlines()[1] == "   6/1500    0%  elapsed 1:12  left 4:58:48  171 tok/s"
    assert "\r" not in text
    assert "\x1b" not in text


def test_short_steps_print_no_progress_in_a_log(capsys):
    assert ticks(0.05, 400, capsys, 80, is_live=False) == ""


@pytest.mark.parametrize(("env", "is_terminal", "width"), [
    ({"TERM": "xterm", "COLUMNS": ""}, False, 80), ({"TERM": "xterm", "EZPZ_LLM_TERMINAL": "123"}, True, 123),
    ({"EZPZ_LLM_TERMINAL": "123", "COLUMNS": "60"}, True, 60), ({"EZPZ_LLM_TERMINAL": ""}, False, 80),
    ({"EZPZ_LLM_TERMINAL": "123", "EZPZ_LLM_RANK": "1"}, False, 80)])
def test_rank_gets_its_terminal_from_launch(env, is_terminal, width):
    code = ("from ezpz_llm.training.observe.terminal import can_redraw, terminal_width; "
            "print(can_redraw(), terminal_width())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=scaled(60), check=True,
                          stdin=subprocess.DEVNULL, env={"PYTHONPATH": ":".join(sys.path), **env})
    assert done.stdout.split() == [str(is_terminal), str(width)]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (201, "3:21"), (3731, "1:02:11"),
                                               (86400 * 2 + 3 * 3600 + 15 * 60, "2d 03:15")])
def test_format_of_durations(seconds, text):
    assert format_duration(seconds) == text


def test_expected_end_has_a_clock_time_and_a_step_time():
    assert "in 57:59 (2.32 s per step" in expected_end(1500, 2.3196, 0.0, 80)
    assert "(58.6 ms per step" in expected_end(1500, 0.0586, 0.0, 80)


@pytest.mark.parametrize(("precision", "reduced", "words"), [
    ("bf16_autocast", "fp32", "bf16_autocast"), ("fp32", "fp32", "fp32"),
    ("bf16", "fp32", "bf16, gradients accumulated/reduced in fp32"),
    ("bf16", "bf16", "bf16, gradients accumulated in fp32, reduced in bf16")])
def test_first_screen_shows_the_gradient_precision(precision, reduced, words):
    resolved = resolve(Request("zero1", world_size=8, precision=precision, reduce_dtype=reduced))
    assert precision_words(resolved) == words
    lines = align_rows([("layout", f"zero1, {words}, on 8 cuda ranks")], 80).splitlines()
    assert len(lines) == (1 if reduced == "fp32" else 2)


@pytest.mark.full
def test_piped_run_in_the_c_locale_prints_ascii_without_escapes(tmp_path):
    env = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
    small = ["--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--block-size", "64", "--eval-tokens", "512",
             "--sample-tokens", "0", "--profile", "false", "--save-every", "-1"]
    command = [sys.executable, "-m", "ezpz_llm.train", "--run-dir", "run", "--steps", "2", *small]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, timeout=scaled(150), check=False)
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
    text = done.stdout.decode()
    assert "loss (nats/token) over step" in text
    assert text.isascii(), sorted({letter for letter in text if not letter.isascii()})
