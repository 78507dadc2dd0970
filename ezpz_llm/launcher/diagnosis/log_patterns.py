"""Messages of launchers and schedulers about a run's end, in the launcher's log.

Only patterns of the run's own launcher and scheduler are used, and only messages that fit its job, nodes and time.
The patterns of schedulers are in launcher/jobs/schedulers/. Those of MPICH, Intel MPI, Open MPI and torchrun are
from captured output, those of PALS from messages in public issues.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from ezpz_llm.launcher.basics.hostlist import expand_numbers
from ezpz_llm.launcher.basics.hostnames import NodeNames
from ezpz_llm.launcher.basics.log_kinds import ABORTED, ENDED, NODE_FAILED, NOT_STARTED, SSH, WRONG_WORLD
from ezpz_llm.launcher.basics.log_text import cut_lines
from ezpz_llm.launcher.jobs.schedulers import schedulers
from ezpz_llm.launcher.jobs.schedulers.scheduler import parse_local_time
from ezpz_llm.launcher.on_nodes.run_facts import RunFacts


@dataclass(frozen=True)
class LogMatch:
    """Message of a launcher or scheduler that a pattern matched.

    Attributes:
        source: the program that printed it.
        host, ranks: the node and the ranks that the message names.
        code: an exit code, or 128 + a signal's number.
        job, step, time: the job, the step (JOB.STEP) and the time in epoch seconds that the message names.
        reporter: the node whose daemon printed the message.
    """

    source: str
    kind: str
    text: str
    host: str | None = None
    ranks: tuple[int, ...] = ()
    code: int | None = None
    job: str | None = None
    step: str | None = None
    time: float | None = None
    reporter: str | None = None


def _pattern(source: str, kind: str, pattern: str) -> tuple[str, str, re.Pattern[str]]:
    return source, kind, re.compile(pattern, re.MULTILINE)


_SHIM_PATTERNS = (
    # Printed by shims that fail before their rank starts.
    _pattern("the shim", WRONG_WORLD, r"^error: launch started \d+ ranks, but this process is rank .*"),
    _pattern("Python", NOT_STARTED, r"^\S+: (?:Error while finding module specification for 'ezpz_llm\.\S+"
                                    r"|No module named '?ezpz_llm\b).*"),
    _pattern("the shim", NOT_STARTED, r"^error: rank (?P<ranks>\d+) on (?P<host>\S+) cannot write its log: .*"),
)
_MPI_ABORT_PATTERNS = (
    _pattern("MPI", ABORTED, r"application called MPI_Abort\([^,\n]+, (?P<code>\d+)\) - process (?P<ranks>\d+)"),
    _pattern("MPI", ABORTED, r"MPI_ABORT was invoked on rank (?P<ranks>\d+) (?:.|\n){,1000}?"
                             r"with errorcode (?P<code>\d+)"),
)
_MPIEXEC_PATTERNS = (
    _pattern("PALS", ENDED, r"^(?P<host>\S+): rank (?P<ranks>\d+) (?:exited with code (?P<code>\d+)"
                            r"|died from signal (?P<number>\d+))"),
    _pattern("PALS", NODE_FAILED, r"^(?P<host>\S+): shepherd died from signal \d+"),
    _pattern("PALS", NODE_FAILED, r"^ping failed on (?P<host>[^:\s]+): .*"),
    _pattern("PALS", NODE_FAILED, r"^ping RPC timeout from (?P<host>\S+) after .*"),
    _pattern("PALS", NOT_STARTED, r"^launch failed on (?P<host>[^:\s]+): .*"),
    _pattern("MPICH", ENDED, r"^=   PID \d+ RUNNING AT (?P<host>\S+)\n=   EXIT CODE: \d+\n(?:=.*\n){,20}"
                             r"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*\(signal (?P<number>\d+)\)"),
    _pattern("Intel MPI", ENDED, r"^=   RANK (?P<ranks>\d+) PID \d+ RUNNING AT (?P<host>\S+)\n"
                                 r"=   KILLED BY SIGNAL: (?P<number>\d+)"),
    _pattern("Open MPI", ENDED, r"noticed that process rank (?P<ranks>\d+) with PID \d+ on node (?P<host>\S+)"
                                r" exited on\s+signal (?P<number>\d+)"),
    _pattern("Open MPI", ENDED, r"Process name: \[\S+?,(?P<ranks>\d+)\]\n *Exit code: +(?P<code>\d+)"),
    _pattern("Open MPI", NODE_FAILED, r"(?:ORTE|PRTE) has lost communication with a remote daemon"
                                      r"(?:.|\n){,1000}?[Rr]emote host(?:name)?: +(?P<host>\S+)"),
    _pattern(SSH, NOT_STARTED, r"^ssh: (?:connect to host|Could not resolve hostname) (?P<host>[^:\s]+).*"),
    _pattern(SSH, NOT_STARTED, r"^(?:\S+@)?(?P<host>[^:@\s]+): Permission denied \([a-z,-]+\)\."),
    _pattern(SSH, NOT_STARTED, r"^(?:No \S+ host key is known for (?P<host>\S+) and you have requested strict"
                               r" checking\.\s+)?Host key verification failed\."),
    _pattern(SSH, NOT_STARTED, r"^Connection (?:closed|reset) by (?P<host>\S+) port \d+"),
    _pattern(SSH, NOT_STARTED, r"^Received disconnect from (?P<host>\S+) port \d+:.*"),
    _pattern("mpiexec", NOT_STARTED, r"^(?:\[proxy[^@\]\n]*@(?P<host>[^\]\n]+)\] .*)?execvp error on file .*"),
    _pattern("mpiexec", NOT_STARTED, r"was unable to launch the specified application"),
    _pattern("mpiexec", NOT_STARTED, r"^.*\b(?:hydra_pmi_proxy|hydra_bstrap_proxy|orted|prted): (?:No such file or"
                                     r" directory|(?:[Cc]ommand )?not found|Permission denied).*"),
)
_TORCHRUN_PATTERNS = (
    _pattern("torchrun", ENDED, r"Root Cause \(first observed failure\):(?:.|\n){,1000}?  host +: (?P<host>\S+)\n"
                                r"  rank +: (?P<ranks>\d+) .*\n  exitcode +: (?:-(?P<number>\d+)|(?P<code>\d+))"),
)

_SIGNALS = {"Hangup": 1, "Interrupt": 2, "Quit": 3, "Illegal instruction": 4, "Aborted": 6, "Bus error": 7,
            "Floating point exception": 8, "Killed": 9, "Segmentation fault": 11, "Broken pipe": 13,
            "Terminated": 15}

_MAX_DIGITS = 9
"""Longer numbers cannot be exit codes."""
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
_TIME_SLACK_S = 60.0
"""Allowance for different clocks. A message about an earlier attempt of a requeued job is older."""


@cache
def _patterns(launcher: str, scheduler: str) -> tuple[tuple[str, str, re.Pattern[str]], ...]:
    """Return the patterns of what a launcher (`Launcher.kind`) and a scheduler (`Scheduler.NAME`) print."""
    of_schedulers = [_pattern(author.TITLE, *row) for author in schedulers().values()
                     if scheduler == author.NAME or ((step := author.step_launcher()) and step.program == launcher)
                     for row in author.PATTERNS]
    of_launcher = {"mpiexec": _MPIEXEC_PATTERNS, "torchrun": (*_TORCHRUN_PATTERNS, *_MPIEXEC_PATTERNS)}
    return (*of_schedulers, *_SHIM_PATTERNS, *_MPI_ABORT_PATTERNS, *of_launcher.get(launcher, ()))


def read_messages(text: str, facts: RunFacts) -> list[LogMatch]:
    """Return the known messages about this run in its launcher's log, in order and without duplicates."""
    return [match for match in _find(text, _patterns(facts.launcher, facts.scheduler)) if _fits(match, facts)]


def read_abort(text: str, rank: int) -> list[LogMatch]:
    """Return the messages of MPI_Abort in the log of the rank that called it."""
    return [match for match in _find(text, _MPI_ABORT_PATTERNS) if rank in match.ranks]


def _find(text: str, patterns: Iterable[tuple[str, str, re.Pattern[str]]]) -> list[LogMatch]:
    text = cut_lines(text)
    matches = [(match.start(), _log_match(source, kind, match)) for source, kind, pattern in patterns
               for match in pattern.finditer(text)]
    in_order = [match for _, match in sorted(matches, key=lambda pair: pair[0]) if match is not None]
    return list(dict.fromkeys(in_order))


def _fits(match: LogMatch, facts: RunFacts) -> bool:
    """Return True if a message does not name another job, step or node, or a time outside the run."""
    if match.job is not None and facts.job_id is not None and match.job != facts.job_id:
        return False
    if match.step is not None and facts.steps and match.step not in facts.steps:
        return False
    # A launcher's or ssh's name of a node may be an alias or a gateway.
    if any(match.source == scheduler.TITLE for scheduler in schedulers().values()):
        nodes = NodeNames(facts.hosts)
        if any(name not in nodes for name in (match.host, match.reporter) if name is not None):
            return False
    if match.time is None or facts.started is None or facts.ended < facts.started:  # a clock that was set back
        return True
    return facts.started - _TIME_SLACK_S <= match.time <= facts.ended + _TIME_SLACK_S


def _log_match(source: str, kind: str, match: re.Match[str]) -> LogMatch | None:
    groups = match.groupdict()
    if any(len(groups.get(name) or "") > _MAX_DIGITS for name in ("code", "number")):
        return None
    code = int(groups["code"]) if groups.get("code") else None
    if groups.get("number"):
        code = 128 + int(groups["number"])
    if groups.get("signal"):
        if groups["signal"] not in _SIGNALS:
            return None
        code = 128 + _SIGNALS[groups["signal"]]
    try:
        ranks = expand_numbers(groups["ranks"]) if groups.get("ranks") else ()
    except ValueError:
        return None
    return LogMatch(source, kind, " ".join(match.group().split()), groups.get("host"), ranks, code,
                    groups.get("job"), groups.get("step"), parse_local_time(groups.get("time") or "", _TIME_FORMAT),
                    groups.get("reporter"))
