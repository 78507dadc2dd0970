"""A plan made real: start it, watch it, end all of it, and say how it ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ezpz_llm.errors import UserError
from ezpz_llm.launch.ending import Ending, warn
from ezpz_llm.launch.failures import Account, RunFacts, Stop, account, read_failures
from ezpz_llm.launch.leftovers import die_with_parent, end_marked, start_janitor
from ezpz_llm.launch.life import RankLife, SignsOfLife, judge
from ezpz_llm.launch.node.folder import node_dir
from ezpz_llm.launch.node.orders import StopOrder, order_signal, order_stop, take_stacks
from ezpz_llm.launch.plan import LaunchPlan
from ezpz_llm.launch.relay import Relay
from ezpz_llm.launch.signals import Signals
from ezpz_llm.launch.variables import RANKS_OWN, TORCHRUNS_OWN

PEER_GRACE_S = 3.0
"""How long the peers of a failed rank may go on, so that they can say what they saw."""
KILL_AFTER_S = 5.0
"""From SIGTERM to SIGKILL where we end a run ourselves."""
ASKED_KILL_AFTER_S = 10.0
"""The same where launch itself was told to end: ranks may be saving their work."""

_OF_AN_OUTER_RANK = {*RANKS_OWN, *TORCHRUNS_OWN}
"""Of a run of one rank that launch stands in. The next mpiexec or srun replaces an MPI's own variables; those
of torchrun would pass for the ranks' own."""

_POLL_S = 0.1
_LOOK_S = 5.0
_ORPHAN_GRACE_S = 1.0
_NODE_SILENT_S = 60.0
_STACKS_WITHIN_S = 15.0
_MOST_STACKS = 8


def run(plan: LaunchPlan, idle_limit_s: float | None, limit_s: float | None = None,
        tell: Callable[[], bool] = lambda: True) -> Account:
    """Run the plan to its end. Afterwards none of its processes is left on any node that can be reached.

    Args:
        limit_s: the end of a check that comes before the user's program; it gets no standard input either.
        tell: asked at a bad end whether its account is to be printed.

    Raises:
        UserError: the launcher itself cannot be started.
    """
    signals = Signals()
    with signals.listening():
        janitor = start_janitor(plan.run_id, _ORPHAN_GRACE_S,
                                lambda: order_stop(plan.run_dir, StopOrder(plan.run_id, _ORPHAN_GRACE_S, "")))
        try:
            launcher = _start(plan, None if limit_s is None else subprocess.DEVNULL)
            outcome = _Watch(plan, launcher, signals, idle_limit_s, limit_s).to_the_end(tell)
        finally:
            left = end_marked(plan.run_id)
            shutil.rmtree(node_dir(plan.run_id), ignore_errors=True)
            janitor.dismiss()
    if left:
        warn(f"processes {left} of this run cannot be ended")
    return outcome


def _start(plan: LaunchPlan, stdin: int | None) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name not in _OF_AN_OUTER_RANK}
    env |= {name: setting.value for name, setting in plan.env.items()}
    sys.stdout.flush()
    try:
        # A session of its own keeps the terminal's Ctrl-C to launch, which then ends the run in order.
        return subprocess.Popen(plan.argv, env=env, start_new_session=True, stdin=stdin,
                                stderr=subprocess.PIPE, preexec_fn=lambda: die_with_parent(signal.SIGTERM))
    except OSError as error:
        raise UserError(f"cannot start {plan.argv[0]}: {error.strerror}", where=plan.launcher.source,
                        instead="choose another --launcher") from error


class _Watch:
    """One running launcher."""

    def __init__(self, plan: LaunchPlan, launcher: subprocess.Popen[bytes], signals: Signals,
                 idle_limit_s: float | None, limit_s: float | None) -> None:
        self.plan = plan
        self.launcher = launcher
        self.signals = signals
        self.idle_limit_s = idle_limit_s
        self.limit_s = limit_s
        self.started = time.monotonic()
        self.relay = Relay(launcher, plan.run_dir)
        self.life = SignsOfLife(plan.run_dir, plan.run_id, {place.rank: place.host for place in plan.ranks},
                                self.started)
        self.ending = Ending(plan, launcher, self.life)
        self.warned: set[str] = set()

    def to_the_end(self, tell: Callable[[], bool]) -> Account:
        """Wait for the end or bring it about, and account for it."""
        stopped = self._wait()
        before = None
        if stopped is not None:
            before = frozenset(failure.rank for failure in read_failures(self.plan.run_dir))
            asked = len(self.signals.to_stop)
            self.ending.stop(ASKED_KILL_AFTER_S if asked else KILL_AFTER_S,
                             lambda: len(self.signals.to_stop) > asked)
        ended_at = time.time()
        self.ending.clear()
        self.relay.finish()
        ended = account(self.plan.run_dir, RunFacts(
            world_size=len(self.plan.ranks), hosts=tuple(place.host for place in self.plan.ranks),
            launcher=self.plan.launcher.kind, launcher_status=self.launcher.returncode, ended=ended_at,
            stopped=stopped, failed_before_stop=before, ends_at=self.plan.allocation.ends_at))
        if ended.text:
            if tell():
                print(ended.text, file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                # In any locale, and with names that are no text.
                self.plan.run_dir.post_mortem.write_text(f"{ended.text}\n", encoding="utf-8",
                                                         errors="backslashreplace")
        return ended

    def _wait(self) -> Stop | None:
        """None once the launcher has ended by itself; else why it has to be stopped."""
        failed_at: float | None = None
        look_at = self.started
        while self.launcher.poll() is None:
            now = time.monotonic()
            if self.signals.to_stop:
                return _by_signal(self.signals.to_stop[0])
            self._forward_signals()
            if failed_at is None and self._has_failed():
                failed_at = now
            if failed_at is not None and now - failed_at > PEER_GRACE_S:
                return Stop("rank", "a rank failed")
            if self.limit_s is not None and now - self.started > self.limit_s:
                return Stop("idle", f"not ready after {self.limit_s:g} s; it is ended")
            if now >= look_at:
                look_at = now + self._look_every_s()
                if (silence := self._look(now)) is not None:
                    return silence
            time.sleep(_POLL_S)
        return _by_signal(self.signals.to_stop[0]) if self.signals.to_stop else None

    def _forward_signals(self) -> None:
        for number in self.signals.take_forwarded():
            with contextlib.suppress(OSError):
                order_signal(self.plan.run_dir, self.plan.run_id, number)

    def _has_failed(self) -> bool:
        """A record says so, or a node, whose report may reach us before the record does."""
        return any(self.plan.run_dir.errors.glob("rank*.json")) or any(
            one.ended for report in self.life.nodes for one in report.ranks.values())

    def _look_every_s(self) -> float:
        wanted_s = _LOOK_S if self.idle_limit_s is None else min(1.0, self.idle_limit_s / 4)
        return max(wanted_s, self.life.interval_s / 2)

    def _look(self, now: float) -> Stop | None:
        self.life.look(now)
        self._warn_of_nodes(now)
        if self.idle_limit_s is None:
            return None
        limit_s = self.life.limit_s(self.idle_limit_s)
        ranks = self.life.ranks(now)
        silent = judge(ranks, limit_s)
        if not silent:
            return None
        self._tell(silent, ranks, limit_s)
        more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
        return Stop("idle", f"no sign of life for {limit_s:g} s: {silent[0]}{more}; the run is ended")

    def _warn_of_nodes(self, now: float) -> None:
        for report, age in self.life.silent_nodes(now, _NODE_SILENT_S):
            if report.host not in self.warned:
                self.warned.add(report.host)
                warn(f"{report.host} has not reported for {age:.0f} s, other nodes have: it may be down")
        for report in self.life.nodes:
            if report.error is not None and f"{report.host} {report.error}" not in self.warned:
                self.warned.add(f"{report.host} {report.error}")
                warn(f"the agent on {report.host} has given up: {report.error.splitlines()[-1]}")

    def _tell(self, silent: list[RankLife], ranks: list[RankLife], limit_s: float) -> None:
        """Have the stacks taken, of one rank that goes on too, and say where they are."""
        quiet = {one.rank for one in silent}
        speaking = [one for one in ranks if one.rank not in quiet and one.quiet_s < limit_s][:1]
        wanted = [one.rank for one in (*silent[:_MOST_STACKS], *speaking) if not one.node_is_silent]
        found: dict[int, Path] = {}
        with contextlib.suppress(OSError):
            found = take_stacks(self.plan.run_dir, self.plan.run_id, wanted,
                                _STACKS_WITHIN_S + self.life.interval_s)
        lines = [f"launch: no sign of life for {limit_s:g} s:"]
        for one in silent[:_MOST_STACKS]:
            lines.append(f"  {one}; {_its_stack(one, found)}")
        if len(silent) > _MOST_STACKS:
            lines.append(f"  and {len(silent) - _MOST_STACKS} more ranks")
        lines += [f"  for comparison, {one}; {_its_stack(one, found)}" for one in speaking]
        print(*lines, sep="\n", file=sys.stderr, flush=True)


def _its_stack(one: RankLife, found: dict[int, Path]) -> str:
    return f"its stack: {found[one.rank]}" if one.rank in found else "its stack could not be had"


def _by_signal(number: signal.Signals) -> Stop:
    return Stop("signal", f"launch was sent {number.name}; the run is ended", number.name)
