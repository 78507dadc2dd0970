"""Run a plan: start it, watch it, pass signals on, end all of it, and say how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ezpz_llm.base import UserError, shown
from ezpz_llm.base.shell_commands import typable
from ezpz_llm.launch.cleanup import die_with_parent, end_marked, start_janitor
from ezpz_llm.launch.failures.differences import as_compared
from ezpz_llm.launch.failures.facts import Postmortem, RunFacts, Stop, read_failures
from ezpz_llm.launch.failures.postmortem import bare_postmortem, postmortem_of
from ezpz_llm.launch.hostlist import rank_ranges
from ezpz_llm.launch.liveness import Arrivals, HeartbeatMonitor, RankLife, judge
from ezpz_llm.launch.node import folder as node_folder
from ezpz_llm.launch.node.messages import StopOrder, order_signal, order_stop, take_stacks
from ezpz_llm.launch.plan import LaunchPlan
from ezpz_llm.launch.relay import Relay, are_one_place, say, say_unless_it_waits, warn
from ezpz_llm.launch.schedulers import scheduler_here
from ezpz_llm.launch.teardown import Teardown
from ezpz_llm.launch.variables import RANKS_OWN, TEE_VARIABLE, TORCHS_OWN
from ezpz_llm.rundir import hide, secret_values, write_atomic

PEER_GRACE_S = 3.0
"""How long the peers of a failed rank may go on, so that they can say what they saw."""
KILL_AFTER_S = 5.0
"""From SIGTERM to SIGKILL where we end a run ourselves."""
ASKED_KILL_AFTER_S = 10.0
"""The same where launch itself was told to end: ranks may be saving their work."""

_SAVES_AT_SIGTERM = ("ezpz_llm.train",)
_OF_AN_OUTER_RANK = {*RANKS_OWN, *TORCHS_OWN}
"""Of a run of one rank that launch stands in, or left in the shell. The next mpiexec or srun replaces an MPI's own
variables; those that torch reads would pass for the ranks' own."""

_CONSOLE_S = 3.0
"""How long the console may take to show the rest of a run that was ended."""
_POLL_S = 0.1
_LOOK_S = 5.0
_ORPHAN_GRACE_S = 1.0
_NODE_SILENT_S = 60.0
_ONE_HAS_ENDED_S = 30.0
_STACKS_WITHIN_S = 15.0
_MOST_STACKS = 8
_LOST: set[str] = set()


def run(plan: LaunchPlan, idle_limit_s: float | None, limit_s: float | None = None,
        keep: Callable[[Postmortem], None] = lambda postmortem: None, tell: Callable[[], bool] = lambda: True,
        start_limit_s: float | None = None) -> Postmortem:
    """Run the plan to its end. Afterwards none of its processes is left on any node that can be reached.

    Args:
        idle_limit_s: how long a rank may be without a sign of life; None for ever.
        start_limit_s: the same for a rank's start.
        limit_s: the end of a check that comes before the user's program; it gets no standard input either.
        keep: writes down how it ended, before anything of that is printed: a console can hold us up for ever.
        tell: asked at a bad end whether its post-mortem is to be printed.

    Raises:
        UserError: the launcher itself cannot be started.
    """
    signals = Signals()
    with signals.listening():
        janitor = start_janitor(plan.run_id, _ORPHAN_GRACE_S,
                                lambda: order_stop(plan.run_dir, StopOrder(plan.run_id, _ORPHAN_GRACE_S, "")))
        try:
            launcher = _start(plan, None if limit_s is None else subprocess.DEVNULL)
            outcome = _Watch(plan, launcher, signals, idle_limit_s, limit_s, start_limit_s).to_the_end(keep, tell)
        finally:
            left = end_marked(plan.run_id)
            node_folder.remove(plan.run_id)
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
        return subprocess.Popen(plan.argv, env=env, start_new_session=True, stdin=stdin, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, preexec_fn=lambda: die_with_parent(signal.SIGTERM))
    except OSError as error:
        raise UserError(f"cannot start {plan.argv[0]}: {error.strerror}", where=plan.launcher.source,
                        instead="choose another --launcher") from error


class _Watch:
    """One running launcher."""

    def __init__(self, plan: LaunchPlan, launcher: subprocess.Popen[bytes], signals: Signals,
                 idle_limit_s: float | None, limit_s: float | None, start_limit_s: float | None) -> None:
        self.plan = plan
        self.launcher = launcher
        self.signals = signals
        self.idle_limit_s = idle_limit_s
        self.limit_s = limit_s
        self.started = time.monotonic()
        self.relay = Relay(launcher, plan.run_dir)
        hosts = {place.rank: place.host for place in plan.ranks}
        self.life = HeartbeatMonitor(plan.run_dir, plan.run_id, hosts, self.started)
        self.arrivals = Arrivals(hosts, plan.run_dir, start_limit_s)
        self.teardown = Teardown(plan, launcher, self.life)
        self.warned: set[str] = set()
        self.first_ended_at: float | None = None
        self.has_noted = False

    def to_the_end(self, keep: Callable[[Postmortem], None], tell: Callable[[], bool]) -> Postmortem:
        """Wait for the end or bring it about, and report it: first in files, then on the console."""
        stopped = self._wait()
        failed = ended_well = None
        if stopped is not None:
            self.relay.hold_nobody_up()
            with _survived("which ranks had ended before"):
                self.life.look(time.monotonic())
                codes = self._codes()
                failed = frozenset(one.rank for one in read_failures(self.plan.run_dir, self.plan.run_id))
                failed |= {rank for rank, code in codes.items() if code}
                ended_well = frozenset(rank for rank, code in codes.items() if code == 0)
            asked = len(self.signals.to_stop)
            if asked:
                say_unless_it_waits(("\n" if self.relay.is_within_a_line else "")
                                    + _stopping(self.signals.to_stop[0], is_saving=self._saves_when_asked()))
            self.teardown.stop(ASKED_KILL_AFTER_S if asked else KILL_AFTER_S,
                               lambda: len(self.signals.to_stop) > asked, stopped.kind == "idle",
                               self.signals.to_stop[0].name if asked else "")
        ended_at = time.time()
        self.teardown.clear()
        self.relay.settle()
        if stopped is not None and stopped.kind == "signal" and (scheduler := scheduler_here(os.environ)):
            since = time.time() - time.monotonic() + self.started
            self.relay.keep(scheduler.cancellations(os.environ, since))
        facts = RunFacts(
            world_size=len(self.plan.ranks), hosts=tuple(place.host for place in self.plan.ranks),
            launcher=self.plan.launcher.kind, launcher_status=self.launcher.returncode, ended=ended_at,
            stopped=stopped, failed_before_stop=failed, ended_before_stop=ended_well,
            ends_at=self.plan.allocation.ends_at)
        try:
            given = {name: setting.value for name, setting in self.plan.env.items()}
            ended = postmortem_of(self.plan.run_dir, facts, given)
        except Exception as error:
            _lost("the post-mortem", error)
            ended = bare_postmortem(self.plan.run_dir, self.plan.run_id, facts)
        if ended.text:
            with contextlib.suppress(OSError):
                # In any locale, and with names that are no text.
                text = hide(ended.text, secret_values(os.environ))
                write_atomic(self.plan.run_dir.post_mortem, f"{text}\n".encode(errors="backslashreplace"))
        keep(ended)
        if self._console_has_taken_all(stopped):
            self._warn_of_mpi()
            if ended.text and tell():
                say(("\n" if self.relay.is_within_a_line else "")
                    + (ended.brief if self._has_shown(ended.lines_of) else ended.text))
        return ended

    def _saves_when_asked(self) -> bool:
        """True of a training that has come to its steps."""
        return self.plan.target.module in _SAVES_AT_SIGTERM and any(
            one.step is not None for report in self.life.nodes for one in report.ranks.values())

    def _has_shown(self, rank: int | None) -> bool:
        """Has the reader of our words just read the rank's output, too?"""
        tee = self.plan.env[TEE_VARIABLE].value
        return are_one_place(1, 2) and (tee == "all" or (tee == "0" and rank == 0))

    def _console_has_taken_all(self, stopped: Stop | None) -> bool:
        """Wait for a slow reader (`| less`), but not where launch is told to end."""
        told, deadline = len(self.signals.to_stop), time.monotonic() + _CONSOLE_S
        return self.relay.finish(lambda: len(self.signals.to_stop) > told
                                 or (stopped is not None and time.monotonic() > deadline))

    def _wait(self) -> Stop | None:
        """None once the launcher has ended by itself; else why it has to be stopped."""
        failed_at: float | None = None
        look_at = self.started
        while self.launcher.poll() is None:
            now = time.monotonic()
            if self.signals.to_stop:
                return _by_signal(self.signals.to_stop[0])
            while self.signals.to_forward:
                with contextlib.suppress(OSError):
                    order_signal(self.plan.run_dir, self.plan.run_id, self.signals.to_forward.pop(0))
            with _survived("a look at the ranks' records"):
                if failed_at is None and self._has_failed():
                    failed_at = now
            if failed_at is not None and now - failed_at > PEER_GRACE_S:
                return Stop("rank", "a rank failed")
            if failed_at is None and (stop := self._await_ranks(now)) is not None:
                return stop
            if self.limit_s is not None and now - self.started > self.limit_s:
                return Stop("idle", f"not ready after {self.limit_s:g} s; it is ended")
            if now >= look_at:
                look_at = now + self._look_every_s()
                with _survived("a look at the nodes' reports"):
                    if (silence := self._look(now)) is not None:
                        return silence
            time.sleep(_POLL_S)
        return _by_signal(self.signals.to_stop[0]) if self.signals.to_stop else None

    def _has_failed(self) -> bool:
        """A record says so, or a node, whose report may reach us before the record does."""
        return bool(read_failures(self.plan.run_dir, self.plan.run_id)) or any(
            one.ended for report in self.life.nodes for one in report.ranks.values())

    def _await_ranks(self, now: float) -> Stop | None:
        waited_s = self.life.waited_s(now)
        stop = self.arrivals.verdict(self.life.missing, waited_s)
        if stop is not None:
            # The last look may be some seconds old.
            self.life.look(now)
            stop = self.arrivals.verdict(self.life.missing, waited_s)
        return stop

    def _codes(self) -> dict[int, int]:
        """Of the ranks that have ended."""
        return {rank: one.ended for report in self.life.nodes for rank, one in report.ranks.items()
                if one.ended is not None}

    def _look_every_s(self) -> float:
        wanted_s = _LOOK_S if self.idle_limit_s is None else min(1.0, self.idle_limit_s / 4)
        return max(wanted_s, self.life.interval_s / 2)

    def _look(self, now: float) -> Stop | None:
        self.life.look(now)
        if (news := self.arrivals.news(self.life.missing, self.life.waited_s(now))) is not None:
            warn(news)
        self._warn_of_nodes(now)
        self._note_who_ended(now)
        ranks = self.life.ranks(now)
        for one in ranks:
            if one.state == "T" and one.idle_s > _ONE_HAS_ENDED_S:
                self._warn_once(f"stopped {one.rank}", str(one))
        if self.idle_limit_s is None:
            return None
        limit_s = self.life.limit_s(self.idle_limit_s)
        silent = judge(ranks, limit_s)
        if not silent:
            return None
        told = as_compared(silent, ranks, self._tell(silent, ranks, limit_s))
        return Stop("idle", f"no sign of life for {limit_s:g} s: {told}; the run is ended",
                    ranks=tuple(sorted(one.rank for one in silent)))

    def _warn_of_nodes(self, now: float) -> None:
        for report, age in self.life.silent_nodes(now, _NODE_SILENT_S):
            self._warn_once(report.host,
                            f"{report.host} has not reported for {age:.0f} s, other nodes have: it may be down")
        for report in self.life.nodes:
            if report.error is not None:
                self._warn_once(f"{report.host} {report.error}",
                                f"the agent on {report.host} met an error: {report.error.strip().splitlines()[-1]}")
            for name in report.builds:
                self._warn_once(name, f"ranks on {report.host} compile {name} on its first use, which can take"
                                      " minutes")
        self._warn_of_mpi()

    def _warn_once(self, of: str, text: str) -> None:
        if of not in self.warned:
            self.warned.add(of)
            warn(text)

    def _warn_of_mpi(self) -> None:
        """Our own commands do not talk by MPI, and what other programs are wrong about is the same on all nodes."""
        lonely = next((report.mpi for report in self.life.nodes if report.mpi is not None), None)
        if lonely is not None and self.plan.target.module is None:
            self._warn_once("mpi", lonely)

    def _note_who_ended(self, now: float) -> None:
        """Ranks may end one after the other; where others wait for one that has, nobody else would say so."""
        ended = sorted(self._codes())
        if not ended or len(ended) == len(self.plan.ranks):
            return
        self.first_ended_at = self.first_ended_at or now
        if not self.has_noted and now - self.first_ended_at >= _ONE_HAS_ENDED_S:
            self.has_noted = True
            left = len(self.plan.ranks) - len(ended)
            say(f"launch: {rank_ranges(ended)} {'has' if len(ended) == 1 else 'have'} ended with code 0 more than"
                f" {_ONE_HAS_ENDED_S:.0f} s ago; {left} still run{'s' if left == 1 else ''}"
                f" ({typable(f'ezpz-llm why {self.plan.run_dir.path}')} tells what they do)")

    def _tell(self, silent: list[RankLife], ranks: list[RankLife], limit_s: float) -> dict[int, Path]:
        """Have the stacks taken, of one rank that goes on too, and say where they are. Returns the files."""
        quiet = {one.rank for one in silent}
        speaking = [one for one in ranks if one.rank not in quiet and one.quiet_s < limit_s][:1]
        wanted = [one.rank for one in (*silent[:_MOST_STACKS], *speaking) if not one.node_is_silent]
        found: dict[int, Path] = {}
        with contextlib.suppress(OSError):
            found = take_stacks(self.plan.run_dir, self.plan.run_id, wanted,
                                _STACKS_WITHIN_S + self.life.interval_s)
        lines = [f"launch: no sign of life for {limit_s:g} s:",
                 *(f"  {one}; {_its_stack(one, found)}" for one in silent[:_MOST_STACKS])]
        if len(silent) > _MOST_STACKS:
            lines.append(f"  and {len(silent) - _MOST_STACKS} more ranks")
        lines += [f"  for comparison, {one}; {_its_stack(one, found)}" for one in speaking]
        say("\n".join(lines))
        return found


@contextlib.contextmanager
def _survived(what: str) -> Iterator[None]:
    """Whatever programs have written into the run directory, launch watches on, ends all of the run and returns its
    exit code: what was lost on the way is said once."""
    try:
        yield
    except Exception as error:
        _lost(what, error)


def _lost(what: str, error: Exception) -> None:
    if what not in _LOST:
        _LOST.add(what)
        warn(f"{what} is lost: {type(error).__name__}: {shown(str(error))}")


def _its_stack(one: RankLife, found: dict[int, Path]) -> str:
    return f"its stack: {found[one.rank]}" if one.rank in found else "its stack could not be had"


_SENT_BY = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "its terminal was closed, or the ssh to it was lost",
            signal.SIGTERM: "a cancelled or expired job, timeout or kill"}


def _by_signal(number: signal.Signals) -> Stop:
    return Stop("signal", f"launch was sent {number.name} ({_SENT_BY[number]}); the run is ended", number.name)


def _stopping(number: signal.Signals, *, is_saving: bool) -> str:
    """The answer to a signal, before its consequences."""
    what = "stopping after this step, saving" if is_saving else "stopping all ranks by SIGTERM"
    again = "; press ^C again to stop now" if number == signal.SIGINT else ""
    return f"launch: {number.name}: {what} (within {ASKED_KILL_AFTER_S:.0f} s){again}"


# The signals that launch was sent.
_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FORWARD = (signal.SIGUSR1, signal.SIGUSR2)
INTERRUPTED = tuple(128 + number for number in _STOP)
"""The exit codes of a run that launch was told to end."""
_ONE_ORDER_S = 0.3
"""timeout(1) and schedulers signal a process and then its group: that is one order, not an impatient second one."""


class Signals:
    """Notes what comes: signals to stop, in order, and those that are the ranks' to understand."""

    def __init__(self) -> None:
        self.to_stop: list[signal.Signals] = []
        self.to_forward: list[signal.Signals] = []
        self._noted_at = float("-inf")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note the signals that launch is sent, instead of ending by them."""
        # nohup's wish is kept. A shell's `launch … &` ignores Ctrl-C, but not a SIGINT meant for launch alone.
        heard = [number for number in (*_STOP, *_FORWARD)
                 if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if number in _FORWARD:
            self.to_forward.append(signal.Signals(number))
        elif number not in self.to_stop[-1:] or now - self._noted_at > _ONE_ORDER_S:
            self._noted_at = now
            self.to_stop.append(signal.Signals(number))
