"""How a command tells its user what went wrong: what was found, where, and what to type instead.

Every room may import this module; it imports only the standard library.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence

EXIT_USAGE = 2
"""A usage or configuration error."""
EXIT_PREFLIGHT = 3
"""A check of the machine failed before any rank started."""
EXIT_IDLE = 124
"""The watchdog ended a hang (the code that timeout(1) uses)."""


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
            lines.append(f"  instead: {self.instead}")
        return "\n".join(lines)


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` of the known words that begin with `word` or look most like it, best first; may be empty."""
    # Imported here: every command imports this module, and few of them fail.
    import difflib

    known = list(known)
    begin = [name for name in known if len(word) > 2 and name.startswith(word)]
    alike = difflib.get_close_matches(word, known, n=count, cutoff=0.5)
    return [*begin, *(name for name in alike if name not in begin)][:count]


def unknown(kind: str, word: str, known: Iterable[str], where: str | None = None) -> UserError:
    """The error for a name that is not one of `known`, offering the nearest (or all, if none is near)."""
    known = sorted(known)
    near = nearest(word, known)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return UserError(f"unknown {kind} {word!r}", where=where, instead=hint)


def run_command(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a command's `main(argv)` and turn a user's mistake into a message and an exit code.

    Returns the exit code; any other exception passes through with its traceback, since it is our fault.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a locale cannot show is shown by its number, as standard error does: it ends no command.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return main(sys.argv[1:] if argv is None else argv) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            full = UserError(os.strerror(error.errno), where=error.filename or "a file that is being written",
                             instead="make room, or name another place (--run-dir, EZPZ_LLM_CACHE)")
            print(f"error: {full}", file=sys.stderr, flush=True)
            return 1
        if not isinstance(error, BrokenPipeError):
            if not _has_working_directory():
                print("error: the working directory does not exist any more\n  instead: cd to another place",
                      file=sys.stderr, flush=True)
                return EXIT_USAGE
            raise
        # The reader of our output has gone (`… | head`): what is left to flush has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
