"""Watch a running job: phase, step, time left, loss, tokens/s, slowest rank, last output."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ezpz_llm.core.base import count_noun, escape_control_characters, print_lines, run_command
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.core.base.label_rows import align_rows
from ezpz_llm.core.base.shell_commands import to_typable
from ezpz_llm.core.rundir import ANY, RunDir, newest_run
from ezpz_llm.launcher.diagnosis.status import Status, read_status
from ezpz_llm.training.observe.terminal import terminal_width
from ezpz_llm.training.observe.throughput import format_duration, format_number

_INTERVAL_S = 2.0
_PLAIN_INTERVAL_S = 10.0
_RESTART_WITHIN_S = 120.0
_SILENT_AFTER_S = 30.0
_EXAMPLES = ("ezpz-llm watch  the newest run in runs/, until it ends",
             "ezpz-llm watch runs/gpt2 --once  print the state once",
             "ezpz-llm watch runs/gpt2 --json  one line of JSON per update, for scripts")


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or the exit code of the run if it failed.

    Raises:
        UserError: there is no such run, or its record cannot be read.
    """
    parser = CommandParser("watch", description=__doc__, shown=_EXAMPLES)
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR",
                        help="the run (default: the newest in runs/)")
    parser.add_argument("--once", action="store_true", help="print the state once and exit")
    parser.add_argument("--json", action="store_true", help="print each update as a line of JSON")
    options = parser.parse_args(argv)
    return _follow(lambda: _run_dir(options.run_dir), options.once, options.json)


def _run_dir(named: Path | None) -> RunDir:
    run_dir = RunDir(named.absolute()) if named else newest_run(Path("runs"), ANY, "ezpz-llm watch RUN_DIR")
    run_dir.check_exists()
    return run_dir


def _follow(find: Callable[[], RunDir], once: bool, as_json: bool) -> int:
    """Print updates until the run succeeds, or fails and is not restarted in time."""
    screen = _Screen(as_json)
    failed_since: float | None = None
    while True:
        run_dir = find()
        status = read_status(run_dir, _SILENT_AFTER_S)
        screen.show(run_dir, status, is_last=once or (status.state == "ended" and not status.code))
        if once:
            return 0
        has_ended = status.state in ("ended", "lost")
        if status.state == "ended" and not status.code:
            return 0
        now = time.monotonic()
        failed_since = (failed_since or now) if has_ended else None
        if failed_since is not None and now - failed_since > _RESTART_WITHIN_S:
            return status.code or 1
        if has_ended:
            screen.print_waiting(status)
        time.sleep(_INTERVAL_S)


class _Screen:
    """Output of `watch`: redrawn in place on a terminal, otherwise a line per change, at most every 10 s."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._redraws = not as_json and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._drawn = 0
        self._last: tuple[object, ...] | None = None
        self._printed_at = float("-inf")
        self._waits_for: str | None = None

    def show(self, run_dir: RunDir, status: Status, *, is_last: bool) -> None:
        """Print the state of the run."""
        if self._as_json:
            print_lines(json.dumps({"run_dir": str(run_dir.path), **status.as_json()}))
            return
        if self._redraws or is_last:
            text = escape_control_characters(format_block(run_dir, status, terminal_width()))
            up = f"\x1b[{self._drawn}F\x1b[J" if self._redraws and self._drawn else ""
            self._drawn = text.count("\n")
            print(up + text, end="", flush=True)
            return
        news = (status.run_id, status.state, status.phase, status.step)
        now = time.monotonic()
        is_new_state = self._last is None or news[:2] != self._last[:2]
        if news != self._last and (is_new_state or now - self._printed_at >= _PLAIN_INTERVAL_S):
            self._last, self._printed_at = news, now
            print_lines(format_line(status))

    def print_waiting(self, status: Status) -> None:
        """Print that watch is waiting for a restart, once per failed run."""
        if not self._as_json and status.run_id != self._waits_for:
            self._waits_for, self._drawn = status.run_id, 0
            print_lines(f"waiting {_RESTART_WITHIN_S:.0f} s for a restart (Ctrl-C to stop)")


def format_block(run_dir: RunDir, status: Status, width: int) -> str:
    """Format the state as labeled lines, omitting unknown values."""
    behind = status.slowest
    loss = "" if status.loss is None else f"{status.loss:.4f} at step {status.loss_step}" + (
        "" if status.val_loss is None else f", validation {status.val_loss:.4f}")
    speed = "" if status.tokens_per_second is None else f"{format_number(status.tokens_per_second)} tokens/s" + (
        "" if status.step_s is None else f", {status.step_s * 1e3:.1f} ms a step")
    rows = [
        ("run", str(run_dir.path)),
        ("state", _state(status)),
        ("step", _step(status)),
        ("loss", loss),
        ("speed", speed),
        ("slowest", "" if behind is None else
         f"rank {behind['rank']} on {behind['host']}, {count_noun(behind['steps_behind'], 'step')} behind"),
        ("silent", "" if not status.silent else
         f"ranks {', '.join(map(str, status.silent[:8]))} ({to_typable('ezpz-llm why')} shows their stacks)"),
        ("last output", (status.last_words or "")[:4 * width]),
    ]
    return align_rows(((label, text) for label, text in rows if text), width, 12)


def format_line(status: Status) -> str:
    """Format the state as one line, for a log."""
    loss = "" if status.loss is None else f"loss {status.loss:.4f}"
    speed = "" if status.tokens_per_second is None else f"{format_number(status.tokens_per_second)} tokens/s"
    behind = "" if status.slowest is None else f"rank {status.slowest['rank']} is behind"
    return "  ".join(filter(None, (time.strftime("%H:%M:%S"), _state(status), _step(status), loss, speed, behind)))


def _state(status: Status) -> str:
    elapsed = "" if status.elapsed_s is None else format_duration(status.elapsed_s)
    after = f" after {elapsed}" if elapsed else ""
    if status.state == "ended" and status.stopped:
        return f"stopped{after}: {status.stopped}"
    if status.state == "ended":
        return f"succeeded{after}" if not status.code else (
            f"failed{after} with code {status.code}: {status.cause} (details: {to_typable('ezpz-llm why')})")
    if status.state == "lost":
        return f"launch was killed before it recorded the exit (details: {to_typable('ezpz-llm why')})"
    phase = f", {status.phase}" if status.phase and status.phase != status.state else ""
    return f"{status.state}{phase}{f', for {elapsed}' if elapsed else ''}"


def _step(status: Status) -> str:
    if status.step is None:
        return ""
    if not status.steps:
        return f"step {status.step}"
    left = "" if status.left_s is None else f", {format_duration(status.left_s)} left"
    return f"{status.step} of {status.steps} ({status.step / status.steps:.0%}){left}"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
