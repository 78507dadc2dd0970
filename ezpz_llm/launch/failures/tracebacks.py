"""Last exception of a program, read from the end of its output: Python's traceback (chained, grouped, or of a file
that does not parse), C++'s last words, faulthandler's report."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ezpz_llm.launch.failures.facts import Raised
from ezpz_llm.launch.failures.log_text import cut_line
from ezpz_llm.launch.failures.texts import find_text, shipped_texts, without_asides

NEAR_THE_END = 200
"""An uncaught exception is followed by no more lines than this (destructors and threads complain after it)."""
NEAR_THE_END_IF_CAUGHT = 10
"""Python ends with code 1 after an uncaught exception: one before any other code was printed by the program."""

_MESSAGE_LINES = 8
_HEADER = "Traceback (most recent call last):"
_GROUP_HEADER = "Exception Group " + _HEADER
_IN_GROUP = re.compile(r"^ *[|+] ?")
_CHAINED = ("The above exception was the direct cause of the following exception:",
            "During handling of the above exception, another exception occurred:")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:? ?")
_FRAME = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d{1,9})(?:,? in (?P<function>.+))?$')
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.<>]*)(?:: ?(?P<message>.*))?$")
_RAISED_ALONE = re.compile(r"(?:Error|Exception|Interrupt|Exit|Group|Iteration|Timeout|Warning)$")
_PARSE_ERROR = re.compile(r"^(?:SyntaxError|IndentationError|TabError): ")
_CPP = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']+)'"
                  r"|libc\+\+abi: terminating due to uncaught exception of type (?P<apple>[^:]+)(?:: (?P<what>.*))?"
                  r"|(?P<bare>terminate called (?:without an active exception|recursively))")
_FATAL = re.compile(r"^(?P<type>Fatal Python error): (?P<message>.*)$")
_BY_SIGNAL = ("Segmentation fault", "Bus error", "Floating point exception", "Illegal instruction", "Aborted")
"""What faulthandler calls the signals whose handler it is: where the program was, never why."""
_LOST_A_CHILD = ("EOFError", "BrokenPipeError", "ConnectionResetError", "ConnectionRefusedError")
"""What a process raises whose child has ended: the child's own error is the cause."""
_OF_ABORT = re.compile(
    # assert(), glog and LLVM, MPI, torch; of others the known texts of failures tell.
    r"Assertion [`'\"].* failed|Check failed: |LLVM ERROR: |Abort\(\d+\) on node|CUDA error: |NCCL error")
_NEAR_AN_ABORT = 20
_CPP_FRAME = re.compile(r"^\s*frame #(\d{1,9}): ")
_CPP_FRAMES = 3
_LOG_LINE = re.compile(r"^(?:\[|\d{4}-\d\d-\d\d|[WEIF]\d{4} |Exception ignored in|terminate called)")
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3\.\d+[/\\]|^<frozen ")


@dataclass(frozen=True)
class _Found:
    """One report in the text, on the lines [start, end)."""

    start: int
    end: int
    raised: Raised
    is_aside: bool = False
    is_last: bool = False
    """Nothing but its own stack follows it, which may be long: C++ ends the program there."""
    is_of_child: bool = False
    """A process that multiprocessing started has printed it."""


def last_exception(text: str, within: int = NEAR_THE_END) -> Raised | None:
    """The exception that the last lines of a program's output tell of, None where they tell of none.

    One that more than `within` lines follow is not taken to have ended the program. What a thread raised counts
    only where nothing else is there, what a destructor raised never does.
    """
    lines = [_RANK_PREFIX.sub("", cut_line(line).rpartition("\r")[2]) for line in text.rstrip().split("\n")]
    found = list(_all(lines))
    fault = next((one for one in reversed(found) if one.raised.message in _BY_SIGNAL), None)
    # The stacks of all threads follow a signal's report, and often there are hundreds of lines of them.
    if fault is None or fault.start < max((one.start for one in found if not one.is_aside), default=0):
        return _last(found, len(lines) - within)
    if fault.raised.message != "Aborted":
        return fault.raised
    said = _last([one for one in found if one.start < fault.start], fault.start - within)
    if said is None:
        said = Raised("", _before_an_abort(lines[max(0, fault.start - max(within, _NEAR_AN_ABORT)):fault.start]))
    return replace(said, where=said.where or fault.raised.where)


def _before_an_abort(lines: Sequence[str]) -> str:
    """The last line that says why abort() is called."""
    for number, line in enumerate(reversed(without_asides(lines))):
        if _OF_ABORT.search(line) or (number < _NEAR_AN_ABORT and find_text(shipped_texts(), [line])):
            return line.strip()
    return "abort() was called"


def last_words(text: str, most: int) -> list[str]:
    """The last lines of a program's output; of C++'s stack only the head, and of the stacks that faulthandler adds
    only that of the thread which the signal met."""
    lines = [line for line in text.splitlines()
             if not (frame := _CPP_FRAME.match(line)) or int(frame[1]) < _CPP_FRAMES]
    start = next((number for number in reversed(range(len(lines))) if _FATAL.match(lines[number])), None)
    if start is None:
        return lines[-most:]
    after = range(start, len(lines))
    begin = next((number for number in after if lines[number].startswith("Current thread")), len(lines))
    end = next((number for number in after if number > begin and not lines[number].strip()), len(lines))
    frames = lines[begin:end][:most // 2]
    return [*lines[:start + 1][-(most - len(frames)):], *frames]


def before_the_report(lines: Sequence[str]) -> Sequence[str]:
    """The lines before faulthandler's last report; all of them where there is none."""
    start = next((number for number in reversed(range(len(lines))) if _FATAL.match(lines[number])), len(lines))
    return lines[:start]


def _last(found: Sequence[_Found], after: int) -> Raised | None:
    """Of the reports that do not end before the line `after`, the one that begins last."""
    near = [one for one in found if one.end >= after or one.is_last]
    own = [one for one in near if not one.is_aside]
    if not near:
        return None
    last = max(own or near, key=lambda one: one.start)
    children = [one.raised for one in found if one.is_of_child and one.end <= last.start]
    if children and last.raised.type in _LOST_A_CHILD and not last.raised.caused_by:
        return replace(last.raised, caused_by=children[-1].caused_by or children[-1].line)
    return last.raised


def _all(lines: Sequence[str]) -> Iterator[_Found]:
    yield from _tracebacks(lines)
    for number, line in enumerate(lines):
        if _GROUP_HEADER in line:
            yield from _group(lines, number)
        elif _PARSE_ERROR.match(line):
            yield from _parse_error(lines, number)
        elif fatal := _FATAL.match(line):
            yield _fatal(lines, number, fatal)
        elif cpp := _CPP.search(line):
            yield _cpp(lines, number, cpp)


def _tracebacks(lines: Sequence[str]) -> Iterator[_Found]:
    before: _Found | None = None
    for number, line in enumerate(lines):
        if _HEADER not in line or "Exception Group" in line or line.lstrip().startswith("|"):
            continue
        found = _traceback(lines, number)
        if found is None:
            continue
        lead = [text for text in lines[max(0, number - 3):number] if text.strip()]
        if before is not None and lead and lead[-1].strip() in _CHAINED:
            first = before.raised.caused_by or before.raised.line
            found = replace(found, raised=replace(found.raised, caused_by=first), is_aside=before.is_aside)
        elif lead and lead[-1].startswith("Exception ignored in"):
            continue
        elif lead and lead[-1].startswith(("Exception in thread", "Process ")):
            found = replace(found, is_aside=True, is_of_child=lead[-1].startswith("Process "))
        yield found
        before = found


def _traceback(lines: Sequence[str], start: int) -> _Found | None:
    end = start + 1
    while end < len(lines) and (lines[end].startswith("  ") or not lines[end] or _is_wrapped(lines, end)):
        if lines[end].strip() == _HEADER:
            # The next one begins where this one should name its exception.
            return None
        end += 1
    if end == len(lines):
        return None
    frames = _frames(lines[start + 1:end])
    name, message, after = _exception(lines, end)
    return _Found(start, after, Raised(name, message, _own(frames[::-1])))


def _is_wrapped(lines: Sequence[str], number: int) -> bool:
    """Is this the rest of a frame's line, which a terminal or rich broke at its width? More frames follow it."""
    return (number + 1 < len(lines) and lines[number + 1].startswith("  ") and ":" not in lines[number]
            and _EXCEPTION.match(lines[number]) is not None and _RAISED_ALONE.search(lines[number]) is None)


def _exception(lines: Sequence[str], start: int) -> tuple[str, str, int]:
    """Type, message and the line after it, from the line that names the exception."""
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
    return name, "\n".join(message), end


def _group(lines: Sequence[str], start: int) -> Iterator[_Found]:
    """An ExceptionGroup: its own line and the first line of each exception in it."""
    body = []
    for line in lines[start + 1:]:
        # A group within the group is read by itself.
        if not _IN_GROUP.match(line) or _GROUP_HEADER in line:
            break
        body.append(_IN_GROUP.sub("", line))
    heads = ((number, head) for number, line in enumerate(body) if (head := _EXCEPTION.match(line)))
    top, head = next(heads, (0, None))
    if head is None:
        return
    frames = _frames(body)
    parts = [line for line in body[top + 1:] if re.match(r"^[A-Za-z_][\w.]*: ", line)]
    message = (head["message"] or "") + "".join(f"\n{part}" for part in parts[:_MESSAGE_LINES])
    yield _Found(start, start + 1 + len(body), Raised(head["type"], message, _own(frames[::-1])))


def _parse_error(lines: Sequence[str], number: int) -> Iterator[_Found]:
    """The report of a script that does not parse has no header: a file, its line, a caret, the error."""
    for back in range(number - 1, max(-1, number - 5), -1):
        if match := _FRAME.match(lines[back]):
            name, message, end = _exception(lines, number)
            yield _Found(back, end, Raised(name, message, f"{match['file']}:{match['line']}"))
            return


def _fatal(lines: Sequence[str], start: int, match: re.Match[str]) -> _Found:
    """faulthandler's report; its frames are innermost first."""
    own = itertools.takewhile(lambda number: not lines[number].startswith("Fatal Python error"),
                              range(start + 1, len(lines)))
    end = next((number for number in own if lines[number].startswith("Current thread")), start)
    frames = []
    for line in lines[end + 1:]:
        if not _FRAME.match(line):
            break
        frames += _frames([line])
    return _Found(start, end + 1 + len(frames), Raised(match["type"], match["message"], _own(frames)))


def _cpp(lines: Sequence[str], start: int, match: re.Match[str]) -> _Found:
    if match["bare"]:
        return _Found(start, start + 1, Raised("std::terminate", match["bare"]), is_last=True)
    if match["apple"]:
        return _Found(start, start + 1, Raised(match["apple"], match["what"] or ""), is_last=True)
    what = lines[start + 1] if start + 1 < len(lines) else ""
    if not what.lstrip().startswith("what():"):
        return _Found(start, start + 1, Raised(match["type"], ""), is_last=True)
    message = what.partition("what():")[2].strip()
    return _Found(start, start + 2, Raised(match["type"], message), is_last=True)


def _frames(lines: Sequence[str]) -> list[re.Match[str]]:
    return [match for line in lines if (match := _FRAME.match(line))]


def _own(innermost_first: Sequence[re.Match[str]]) -> str | None:
    """The innermost frame of code that is neither installed nor Python's; else the innermost."""
    own = [frame for frame in innermost_first if not _LIBRARY.search(frame["file"])]
    return next((f"{frame['file']}:{frame['line']}" + (f" in {frame['function']}" if frame["function"] else "")
                 for frame in (*own, *innermost_first)), None)
