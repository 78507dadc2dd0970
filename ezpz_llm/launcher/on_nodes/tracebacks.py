"""Parser for the last exception in a program's output.

Reads Python tracebacks (chained, exception groups, syntax errors), C++'s "terminate called" and faulthandler's
reports.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ezpz_llm.launcher.basics.log_text import BUILD_ERROR, ERROR_WORDS, cut_line
from ezpz_llm.launcher.on_nodes.known_failures import drop_non_errors, find_text, shipped_texts
from ezpz_llm.launcher.on_nodes.run_facts import Raised

MAX_LINES_AFTER = 200
"""Maximum number of lines after an uncaught exception, such as messages of destructors and threads."""
MAX_LINES_AFTER_IF_CAUGHT = 10
"""The same for exit codes other than 1, with which Python exits after an uncaught exception."""

_MESSAGE_LINES = 8
_MAX_BUILD_LINES = 1000
_MAX_INTERRUPTION = 3
_HEADER = "Traceback (most recent call last):"
_GROUP_HEADER = "Exception Group " + _HEADER
_IN_GROUP = re.compile(r"^ *[|+] ?")
_CHAINED = ("The above exception was the direct cause of the following exception:",
            "During handling of the above exception, another exception occurred:")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:? ?")
_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d{1,9})(?:,? in (?P<function>.+))?$')
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.<>]*)(?:: ?(?P<message>.*))?$")
_EXCEPTION_SUFFIX = re.compile(r"(?:Error|Exception|Interrupt|Exit|Group|Iteration|Timeout|Warning)$")
_PARSE_ERROR = re.compile(r"^(?:SyntaxError|IndentationError|TabError): ")
_CPP = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']+)'"
                  r"|libc\+\+abi: terminating due to uncaught exception of type (?P<apple>[^:]+)(?:: (?P<what>.*))?"
                  r"|(?P<bare>terminate called (?:without an active exception|recursively))")
_FATAL = re.compile(r"^(?P<type>Fatal Python error): (?P<message>.*)$")
_SIGNAL_NAMES = ("Segmentation fault", "Bus error", "Floating point exception", "Illegal instruction", "Aborted")
"""faulthandler's names of signals; its report shows where the program was, not why."""
_CHILD_LOST = ("EOFError", "BrokenPipeError", "ConnectionResetError", "ConnectionRefusedError")
"""Exceptions in a process whose child has ended; the child's own error is the cause."""
_WORKER_LOST = re.compile(r"DataLoader worker \(.*\) exited unexpectedly")
_SPAWNED_CHILD = re.compile(r'^  File ".*multiprocessing/(?:spawn|forkserver)\.py", line \d{1,9}, in spawn_main$')
_ABORT_REASON = re.compile(
    # assert(), glog, LLVM, MPI and torch; the known failure texts cover other libraries.
    r"Assertion [`'\"].* failed|Check failed: |LLVM ERROR: |Abort\(\d+\) on node|CUDA error: |NCCL error")
_NEAR_AN_ABORT = 20
_CPP_FRAME = re.compile(r"^\s*frame #(\d{1,9}): ")
_CPP_FRAMES = 3
_LOG_LINE = re.compile(r"^(?:\[|\d{4}-\d\d-\d\d|[WEIF]\d{4} |Exception ignored in|terminate called)")
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3\.\d+[/\\]|^<frozen ")


@dataclass(frozen=True)
class _Report:
    """Report of an exception, on the lines [start, end)."""

    start: int
    end: int
    raised: Raised
    is_secondary: bool = False
    """True for an exception in a thread or child process; used only if there is no other."""
    is_last: bool = False
    """True if C++ ended the program here, so that only its own, possibly long, stack follows."""
    is_of_child: bool = False
    """True if a child process of multiprocessing printed it."""


def last_exception(text: str, within: int = MAX_LINES_AFTER) -> Raised | None:
    """Return the exception that ended a program, from the last lines of its output; None if there is none.

    An exception followed by more than `within` lines did not end the program. Exceptions in threads and
    child processes are used only if there is no other; exceptions in destructors are ignored.
    """
    lines = [_RANK_PREFIX.sub("", cut_line(line).rpartition("\r")[2]) for line in text.rstrip().split("\n")]
    reports = list(_find_reports(lines))
    fault = next((report for report in reversed(reports) if report.raised.message in _SIGNAL_NAMES), None)
    # The stacks of all threads follow a signal's report, often hundreds of lines.
    last = max((report.start for report in reports if not report.is_secondary), default=0)
    if fault is None or fault.start < last:
        return _last_raised(reports, len(lines) - within)
    if fault.raised.message != "Aborted":
        return fault.raised
    raised = _last_raised([report for report in reports if report.start < fault.start], fault.start - within)
    if raised is None:
        raised = Raised("", _abort_reason(lines[max(0, fault.start - max(within, _NEAR_AN_ABORT)):fault.start]))
    return replace(raised, where=raised.where or fault.raised.where)


def last_exception_in_thread(text: str) -> Raised | None:
    """Return the exception of a thread or child process that ends a program's output; None if there is none.

    A stack that faulthandler printed after it, when the program was ended, is ignored.
    """
    lines = lines_before_fault_report([_RANK_PREFIX.sub("", line) for line in text.rstrip().split("\n")])
    last = max(_find_reports(lines), key=lambda report: report.start, default=None)
    if last is None or not last.is_secondary or len(lines) - last.end > MAX_LINES_AFTER_IF_CAUGHT:
        return None
    return last.raised


def _abort_reason(lines: Sequence[str]) -> str:
    """Return the last line that explains why abort() was called."""
    for number, line in enumerate(reversed(drop_non_errors(lines))):
        if _ABORT_REASON.search(line) or (number < _NEAR_AN_ABORT and find_text(shipped_texts(), [line])):
            return line.strip()
    return next((line.strip() for line in reversed(drop_non_errors(lines)[-_NEAR_AN_ABORT:])
                 if ERROR_WORDS.search(line)), "abort() was called")


def last_output_lines(text: str, max_lines: int) -> list[str]:
    """Return the last lines of a program's output, with shortened stacks.

    C++ stacks are shortened to three frames, faulthandler's report to the thread that received the signal.
    """
    lines = [line for line in text.splitlines()
             if not (frame := _CPP_FRAME.match(line)) or int(frame[1]) < _CPP_FRAMES]
    start = next((number for number in reversed(range(len(lines))) if _FATAL.match(lines[number])), None)
    if start is None:
        return lines[-max_lines:]
    after = range(start, len(lines))
    begin = next((number for number in after if lines[number].startswith("Current thread")), len(lines))
    end = next((number for number in after if number > begin and not lines[number].strip()), len(lines))
    frames = lines[begin:end][:max_lines // 2]
    return [*lines[:start + 1][-(max_lines - len(frames)):], *frames]


def innermost_call(lines: Sequence[str], error: str) -> str:
    """Return "FILE:LINE in FUNCTION" of the last frame above the line `error`; "" if there is none."""
    end = max((number for number, line in enumerate(lines) if _RANK_PREFIX.sub("", line) == error), default=0)
    frames = _match_frames([_RANK_PREFIX.sub("", line) for line in lines[:end]])
    return "{file}:{line} in {function}".format(**frames[-1].groupdict()) if frames else ""


def lines_before_fault_report(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines before faulthandler's last report on a signal, or all lines if there is none."""
    start = next((number for number in reversed(range(len(lines)))
                  if (fatal := _FATAL.match(lines[number])) and fatal["message"] in _SIGNAL_NAMES), len(lines))
    return lines[:start]


def _last_raised(reports: Sequence[_Report], after: int) -> Raised | None:
    """Return the exception of the last report that does not end before the line `after`."""
    near = [report for report in reports if report.end >= after or report.is_last]
    main = [report for report in near if not report.is_secondary]
    if not near:
        return None
    last = max(main or near, key=lambda report: report.start)
    children = [report.raised for report in reports if report.is_of_child and report.end <= last.start]
    has_lost_child = ((last.raised.type in _CHILD_LOST and not last.raised.caused_by)
                      or _WORKER_LOST.match(last.raised.message))
    if children and has_lost_child:
        return replace(last.raised, caused_by=children[-1].caused_by or children[-1].line)
    return last.raised


def _find_reports(lines: Sequence[str]) -> Iterator[_Report]:
    yield from _find_tracebacks(lines)
    for number, line in enumerate(lines):
        if _GROUP_HEADER in line:
            yield from _parse_group(lines, number)
        elif _PARSE_ERROR.match(line):
            yield from _parse_error(lines, number)
        elif fatal := _FATAL.match(line):
            yield _parse_fatal(lines, number, fatal)
        elif cpp := _CPP.search(line):
            yield _parse_cpp(lines, number, cpp)


def _find_tracebacks(lines: Sequence[str]) -> Iterator[_Report]:
    previous: _Report | None = None
    for number, line in enumerate(lines):
        if _HEADER not in line or "Exception Group" in line or line.lstrip().startswith("|"):
            continue
        report = _parse_traceback(lines, number)
        if report is None:
            continue
        lead = [text for text in lines[max(0, number - 3):number] if text.strip()]
        if lead and lead[-1].strip() in _CHAINED:
            if previous is None:
                first = _exception_without_header(lines[:number])
            else:
                first = previous.raised.caused_by or previous.raised.line
                report = replace(report, is_secondary=previous.is_secondary)
            report = replace(report, raised=replace(report.raised, caused_by=first))
        elif lead and lead[-1].startswith("Exception ignored in"):
            continue
        elif lead and lead[-1].startswith(("Exception in thread", "Process ")):
            report = replace(report, is_secondary=True, is_of_child=lead[-1].startswith("Process "))
        elif any(_SPAWNED_CHILD.match(text) for text in lines[number + 1:number + 4]):
            report = replace(report, is_secondary=True, is_of_child=True)
        yield report
        previous = report


def _exception_without_header(lines: Sequence[str]) -> str | None:
    """Return the last exception in `lines` if the header of its traceback is missing, as in a shortened log."""
    last_frame = max((number for number, line in enumerate(lines) if _FRAME.match(line)), default=len(lines))
    after = range(last_frame + 1, len(lines))
    start = next((number for number in after if not lines[number].startswith(" ")), None)
    if start is None:
        return None
    name, message, _ = _parse_exception(lines, start)
    return Raised(name, message).line


def _parse_traceback(lines: Sequence[str], start: int) -> _Report | None:
    end = start + 1
    while end < len(lines) and (lines[end].startswith("  ") or not lines[end] or _FRAME.match(lines[end])
                                or _is_wrapped(lines, end) or _is_interruption(lines, end)):
        if lines[end].strip() == _HEADER:
            # The next traceback begins where this one should name its exception.
            return None
        end += 1
    if end == len(lines):
        return None
    frames = _match_frames(lines[start + 1:end])
    name, message, after = _parse_exception(lines, end)
    return _Report(start, after, Raised(name, message, _user_frame(frames[::-1])))


def _is_wrapped(lines: Sequence[str], number: int) -> bool:
    """Return True if a terminal or rich wrapped a frame's line here; more frames follow."""
    return (number + 1 < len(lines) and lines[number + 1].startswith("  ") and ":" not in lines[number]
            and _EXCEPTION.match(lines[number]) is not None and _EXCEPTION_SUFFIX.search(lines[number]) is None)


def _is_interruption(lines: Sequence[str], number: int) -> bool:
    """Return True if a line interrupts a traceback, such as another process's output or an ellipsis."""
    if (exception := _EXCEPTION.match(lines[number])) and exception["message"] is not None:
        return False
    following = lines[number + 1:number + 1 + _MAX_INTERRUPTION]
    return any(map(_FRAME.match, itertools.takewhile(lambda line: _HEADER not in line, following)))


def _parse_exception(lines: Sequence[str], start: int) -> tuple[str, str, int]:
    """Return the type and message of the exception named in line `start`, and the number of the next line."""
    match = _EXCEPTION.match(lines[start])
    name, first = (match["type"], match["message"] or "") if match else ("", lines[start])
    message, end = [first] if first else [], start + 1
    if not first and end < len(lines) and match and lines[start].rstrip().endswith(":"):
        # The message begins with a line break.
        while end < len(lines) and not lines[end].strip():
            end += 1
    while (end < len(lines) and lines[end].strip() and len(message) < _MESSAGE_LINES
           and _HEADER not in lines[end] and not _LOG_LINE.match(lines[end])):
        message.append(lines[end].rstrip())
        end += 1
    if len(message) == _MESSAGE_LINES:
        output = itertools.takewhile(str.strip, lines[end:end + _MAX_BUILD_LINES])
        message += itertools.islice((line.rstrip() for line in output if BUILD_ERROR.match(line)), 1)
    return name, "\n".join(message), end


def _parse_group(lines: Sequence[str], start: int) -> Iterator[_Report]:
    """Parse an ExceptionGroup: its own line and the first line of each exception in it."""
    body = []
    for line in lines[start + 1:]:
        # Nested groups are parsed separately.
        if not _IN_GROUP.match(line) or _GROUP_HEADER in line:
            break
        body.append(_IN_GROUP.sub("", line))
    heads = ((number, head) for number, line in enumerate(body) if (head := _EXCEPTION.match(line)))
    top, head = next(heads, (0, None))
    if head is None:
        return
    frames = _match_frames(body)
    parts = [line for line in body[top + 1:] if re.match(r"^[A-Za-z_][\w.]*: ", line)]
    message = (head["message"] or "") + "".join(f"\n{part}" for part in parts[:_MESSAGE_LINES])
    yield _Report(start, start + 1 + len(body), Raised(head["type"], message, _user_frame(frames[::-1])))


def _parse_error(lines: Sequence[str], number: int) -> Iterator[_Report]:
    """Parse a syntax error, whose report has no header: a file, its line, a caret, the error."""
    for back in range(number - 1, max(-1, number - 5), -1):
        if match := _FRAME.match(lines[back]):
            name, message, end = _parse_exception(lines, number)
            yield _Report(back, end, Raised(name, message, f"{match['file']}:{match['line']}"))
            return


def _parse_fatal(lines: Sequence[str], start: int, match: re.Match[str]) -> _Report:
    """Parse a faulthandler report, whose frames are innermost first."""
    report = itertools.takewhile(lambda number: not lines[number].startswith("Fatal Python error"),
                                 range(start + 1, len(lines)))
    end = next((number for number in report if lines[number].startswith("Current thread")), start)
    frames = []
    for line in lines[end + 1:]:
        if not _FRAME.match(line):
            break
        frames += _match_frames([line])
    return _Report(start, end + 1 + len(frames), Raised(match["type"], match["message"], _user_frame(frames)))


def _parse_cpp(lines: Sequence[str], start: int, match: re.Match[str]) -> _Report:
    if match["bare"]:
        return _Report(start, start + 1, Raised("std::terminate", match["bare"]), is_last=True)
    if match["apple"]:
        return _Report(start, start + 1, Raised(match["apple"], match["what"] or ""), is_last=True)
    next_line = lines[start + 1] if start + 1 < len(lines) else ""
    if not next_line.lstrip().startswith("what():"):
        return _Report(start, start + 1, Raised(match["type"], ""), is_last=True)
    message = next_line.partition("what():")[2].strip()
    return _Report(start, start + 2, Raised(match["type"], message), is_last=True)


def _match_frames(lines: Sequence[str]) -> list[re.Match[str]]:
    return [match for line in lines if (match := _FRAME.match(line))]


def is_user_code(file: str) -> bool:
    """Return True for a file outside of installed packages and the standard library."""
    return _LIBRARY.search(file) is None


def _user_frame(innermost_first: Sequence[re.Match[str]]) -> str | None:
    """Return the innermost frame outside installed packages and the standard library, else the innermost."""
    user = [frame for frame in innermost_first if is_user_code(frame["file"])]
    return next((f"{frame['file']}:{frame['line']}" + (f" in {frame['function']}" if frame["function"] else "")
                 for frame in (*user, *innermost_first)), None)
