"""A plan made real: start it, watch it, end all of it, and say how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from ezpz_llm.errors import UserError
from ezpz_llm.launch.failures import Account, RunFacts, Stop, account, read_failures
from ezpz_llm.launch.leftovers import die_with_parent, end_marked, start_janitor
from ezpz_llm.launch.life import SignsOfLife
from ezpz_llm.launch.plan import LaunchPlan

PEER_GRACE_S = 3.0
"""How long the peers of a failed rank may go on, so that they can say what they saw."""
KILL_AFTER_S = 5.0
"""From SIGTERM to SIGKILL where we end a run ourselves."""
ASKED_KILL_AFTER_S = 10.0
"""The same where launch itself was told to end: ranks may be saving their work."""

_POLL_S = 0.1
_ORPHAN_GRACE_S = 1.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Signals:
    """The signals to stop that launch was sent, in order."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        # nohup's wish is kept. A shell's `launch … &` ignores Ctrl-C, but not a SIGINT meant for launch alone.
        heard = [number for number in _STOP_SIGNALS
                 if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.received.append(signal.Signals(number))


def run(plan: LaunchPlan, idle_limit_s: float | None) -> Account:
    """Run the plan to its end. Afterwards none of its processes is left on this host.

    Raises:
        UserError: the launcher itself cannot be started.
    """
    signals = _Signals()
    with signals.listening():
        janitor = start_janitor(plan.run_id, _ORPHAN_GRACE_S)
        try:
            launcher = _start(plan)
            outcome = _Watch(plan, launcher, signals, idle_limit_s).to_the_end()
        finally:
            left = end_marked(plan.run_id)
            janitor.dismiss()
    if left:
        print(f"launch: warning: processes {left} of this run cannot be ended", file=sys.stderr, flush=True)
    return outcome


def _start(plan: LaunchPlan) -> subprocess.Popen[bytes]:
    env = {**os.environ, **{name: setting.value for name, setting in plan.env.items()}}
    sys.stdout.flush()
    try:
        # A session of its own keeps the terminal's Ctrl-C to launch, which then ends the run in order.
        return subprocess.Popen(plan.argv, env=env, start_new_session=True,
                                preexec_fn=lambda: die_with_parent(signal.SIGTERM))
    except OSError as error:
        raise UserError(f"cannot start {plan.argv[0]}: {error.strerror}", where=plan.launcher.source,
                        instead="choose another --launcher") from error


class _Watch:
    """One running launcher."""

    def __init__(self, plan: LaunchPlan, launcher: subprocess.Popen[bytes], signals: _Signals,
                 idle_limit_s: float | None) -> None:
        self.plan = plan
        self.launcher = launcher
        self.signals = signals
        self.idle_limit_s = idle_limit_s
        self.life = SignsOfLife(plan.run_dir, plan.run_id, launcher.pid, time.monotonic())

    def to_the_end(self) -> Account:
        """Wait for the end or bring it about, and account for it."""
        stopped = self._wait()
        before = None
        if stopped is not None:
            before = frozenset(failure.rank for failure in read_failures(self.plan.run_dir))
            self._stop(ASKED_KILL_AFTER_S if self.signals.received else KILL_AFTER_S)
        ended = account(self.plan.run_dir, RunFacts(
            world_size=len(self.plan.ranks), hosts=tuple(place.host for place in self.plan.ranks),
            launcher=self.plan.launcher.kind, launcher_status=self.launcher.returncode, ended=time.time(),
            stopped=stopped, failed_before_stop=before, ends_at=self.plan.allocation.ends_at))
        if ended.text:
            print(ended.text, file=sys.stderr, flush=True)
        return ended

    def _wait(self) -> Stop | None:
        """None once the launcher has ended by itself; else why it has to be stopped."""
        failed_at: float | None = None
        look_again = time.monotonic()
        while self.launcher.poll() is None:
            now = time.monotonic()
            if self.signals.received:
                return _by_signal(self.signals.received[0])
            if failed_at is None and any(self.plan.run_dir.errors.glob("rank*.json")):
                failed_at = now
            if failed_at is not None and now - failed_at > PEER_GRACE_S:
                return Stop("rank", "a rank failed")
            if self.idle_limit_s is not None and now >= look_again:
                look_again = now + min(1.0, self.idle_limit_s / 4)
                if self.life.silent_for(now) > self.idle_limit_s:
                    return Stop("idle", f"no sign of life for {self.idle_limit_s:g} s:"
                                        f" {self.life.most_silent()}; the run is ended")
            time.sleep(_POLL_S)
        return _by_signal(self.signals.received[0]) if self.signals.received else None

    def _stop(self, kill_after_s: float) -> None:
        asked = len(self.signals.received)
        deadline = time.monotonic() + kill_after_s
        with contextlib.suppress(ProcessLookupError):
            self.launcher.terminate()
        # A second Ctrl-C does not wait.
        while self.launcher.poll() is None and time.monotonic() < deadline and len(self.signals.received) == asked:
            time.sleep(_POLL_S)
        if self.launcher.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.launcher.pid, signal.SIGKILL)
            self.launcher.wait()


def _by_signal(number: signal.Signals) -> Stop:
    return Stop("signal", f"launch was sent {number.name}; the run is ended", number.name)
