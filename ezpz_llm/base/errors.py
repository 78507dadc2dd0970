"""Errors of a user as messages: what was found, where, and what to type instead; and the end of a process whose
process groups must not be waited for.

Every room may import this module; it imports the standard library alone, our version, and what cleans text.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import importlib.util
import io
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from ezpz_llm import __version__
from ezpz_llm.base.shell_commands import typable_text

# Text that comes from outside, made safe for a terminal.
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
# Control characters but tab, newline and DEL, which terminals pass over; with C1, where 0x9b begins a sequence by
# itself; line and paragraph separators; marks that turn the direction of writing; halves of surrogate pairs, which
# no encoding writes.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x80-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def cleaned(text: str) -> str:
    """`text` without colours, and with each other character that a terminal would obey, or not show, as its escape:
    `\\x1b]0;title\\x07`.

    For error messages and all that another process, host or file said. Newlines and tabs stay.
    """
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], _COLOUR.sub("", text))


def show(text: str) -> None:
    """Print lines that hold words from outside, and no escape sequences of ours."""
    print(cleaned(text), flush=True)


def is_one_line(text: str) -> bool:
    """Has it no control characters at all?"""
    return not any(character < " " or "\x7f" <= character < "\xa0" for character in text)


def require_package(name: str, purpose: str, extra: str, where: str | None = None) -> None:
    """Refuse what takes an optional package that is not installed; it is looked for, and not imported.

    Args:
        purpose: what takes it, such as "reading parquet".
        extra: the extra of ezpz_llm that installs it.

    Raises:
        UserError: it is not there.
    """
    if importlib.util.find_spec(name) is None:
        raise UserError(f"{purpose} takes {name}, which is not installed", where=where,
                        instead=f"pip install 'ezpz_llm[{extra}]'")


def import_package(name: str, purpose: str, extra: str, where: str | None = None) -> Any:
    """Import an optional package, or a module of it, and return it; see `require_package`.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{purpose} takes {name.partition('.')[0]}, which is not installed, or not whole ({error})",
                        where=where, instead=f"pip install 'ezpz_llm[{extra}]'") from error


EXIT_USAGE = 2
"""A usage or configuration error."""
EXIT_PREFLIGHT = 3
"""A check of the machine failed before any rank started, or the machine could not start one."""
EXIT_IDLE = 124
"""The watchdog ended a hang (the code that timeout(1) uses)."""

_EXIT_HANDLERS_S = 5.0
_LONGEST_COMPARED = 100
"""Characters of a word that is compared with those known, which takes quadratic time."""
_ends_at_once = False


class UserError(Exception):
    """A mistake that the user can mend.

    Args:
        found: what is wrong, in one sentence, with the offending value in it.
        where: the file, option or variable the value came from.
        instead: what to type or change.
        exit_code: the process's exit status, never 0.
    """

    def __init__(self, found: str, *, where: str | None = None, instead: str | None = None,
                 exit_code: int = EXIT_USAGE) -> None:
        super().__init__(found)
        self.found = found
        self.where = where
        self.instead = instead
        self.exit_code = exit_code

    def __str__(self) -> str:
        lines = [self.found]
        if self.where:
            lines.append(f"  where:   {self.where}")
        if self.instead:
            lines.append(f"  instead: {typable_text(self.instead)}")
        # Names and words in it may come from files, hosts and processes of others.
        return cleaned("\n".join(lines))


def version_text() -> str:
    """Return the text of `--version`: the version and the installation that ran."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return f"ezpz_llm {__version__} from {folder} (Python {sys.version.split()[0]})"


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` of the known words that begin with `word` or look most like it, best first; may be empty."""
    # Imported here: every command imports this module, and few of them fail.
    import difflib

    known, word = list(known), word[:_LONGEST_COMPARED]
    begin = [name for name in known if len(word) > 2 and name.startswith(word)]
    alike = difflib.get_close_matches(word, known, n=count, cutoff=0.5)
    return [*begin, *(name for name in alike if name not in begin)][:count]


def unknown(kind: str, word: str, known: Iterable[str], where: str | None = None) -> UserError:
    """The error for a name that is not one of `known`, offering the nearest (or all, if none is near)."""
    known = sorted(known)
    near = nearest(word, known)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return UserError(f"unknown {kind} {word!r}", where=where, instead=hint)


def end_at_once_when_shown() -> None:
    """From now on the process ends as soon as its exception is printed, with nothing of the interpreter's clean-up.

    For a rank that leaves process groups behind: what frees them (NCCL's destructors, MPI_Finalize) waits for ranks
    that are in the middle of a collective, and the launcher learns of a failure only when the process has ended.
    """
    global _ends_at_once
    if _ends_at_once:
        return
    _ends_at_once = True
    show = sys.excepthook

    def show_and_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        _end(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = show_and_end


def _end(code: int) -> None:
    """End the process now, after what registered for its exit has had a few seconds."""
    late = threading.Timer(_EXIT_HANDLERS_S, os._exit, [code])
    late.daemon = True
    late.start()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def run_command(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a command's `main(argv)` and turn a user's mistake into a message and an exit code.

    Returns the exit code; any other exception passes through with its traceback, since it is our fault. After
    `end_at_once_when_shown` it does not return.
    """
    try:
        code = _run(main, argv)
    except SystemExit as error:
        if not _ends_at_once:
            raise
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    if _ends_at_once:
        _end(code)
    return code


_INSTEAD = {
    errno.ENAMETOOLONG: "a path of at most 4095 bytes, each name in it of at most 255",
    errno.EMFILE: "ulimit -n 65536 before the command",
    errno.ENFILE: "wait until other programs on this node have ended, or raise fs.file-max",
}
"""Advice by errno, for errors that any file operation can raise."""
_LONGEST_NAME = 80


def _run(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a locale cannot show is shown by its number, as standard error does: it ends no command.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return main(sys.argv[1:] if argv is None else argv) or 0
    except UserError as error:
        _tell(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            full = UserError(os.strerror(error.errno), where=error.filename or "a file that is being written",
                             instead="make room, or name another place (--run-dir, EZPZ_LLM_CACHE)")
            _tell(str(full))
            return 1
        if error.errno in _INSTEAD:
            named = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
            _tell(str(UserError(os.strerror(error.errno), instead=_INSTEAD[error.errno],
                                where=named if len(named) <= _LONGEST_NAME else f"{named[:_LONGEST_NAME]}…")))
            return EXIT_USAGE
        if not isinstance(error, BrokenPipeError):
            if not _has_working_directory():
                _tell("the working directory does not exist any more\n  instead: cd to another place")
                return EXIT_USAGE
            raise
        # The reader of our output has gone (`… | head`): what is left to flush has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _tell(error: str) -> None:
    try:
        print(f"error: {error}", file=sys.stderr, flush=True)
    except OSError:
        # Nobody reads it: the exit code is what it is all the same, also after Python's own last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
