"""User errors as messages (the problem, its location, what to type instead), and immediate exit of a rank.

Every package may import this module. It imports only the standard library, the version, and `base.shell_commands`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import importlib.util
import io
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, TextIO

from ezpz_llm.core.base.shell_commands import to_typable_text
from ezpz_llm.core.base.version import __version__

_COLOR = re.compile(r"\x1b\[[0-9;:]*m")
# Control characters except tab, newline, and DEL (terminals ignore DEL). C1 is included because 0x9b starts an
# escape sequence. Also line and paragraph separators, marks that change the text direction, and surrogates, which
# cannot be encoded.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x80-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_control_characters(text: str) -> str:
    """Remove colors from a text and escape control and invisible characters: `\\x1b]0;title\\x07`.

    Use it for error messages and for any text from another process, node, or file. Keeps newlines and tabs.
    """
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], _COLOR.sub("", text))


def print_lines(text: object, *, keeps_colors: bool = False, end: str = "\n", file: TextIO | None = None) -> None:
    """Print text whose parts may come from files, nodes, or processes of others, with control characters escaped.

    All output of this package goes through this function, except for lines that are redrawn.

    Args:
        keeps_colors: keep color codes, for text whose untrusted parts are escaped already.
    """
    parts = re.split(f"({_COLOR.pattern})", str(text)) if keeps_colors else [str(text)]
    print("".join(part if position % 2 else escape_control_characters(part) for position, part in enumerate(parts)),
          end=end, file=file, flush=True)


def error_text(error: BaseException) -> str:
    """Return the type and message of an exception on one line. An exception of other code may have no message."""
    try:
        message = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        message = ""
    return " ".join(f"{type(error).__name__}: {message}".split()).removesuffix(":")


def is_one_line(text: str) -> bool:
    """Return True if a text has no control characters. Newlines and tabs count as control characters."""
    return not any(character < " " or "\x7f" <= character < "\xa0" for character in text)


def require_package(name: str, purpose: str, extra: str, where: str | None = None) -> None:
    """Check that an optional package is installed, without importing it.

    Args:
        purpose: feature that requires the package, such as "reading parquet".
        extra: extra of ezpz_llm that installs the package.

    Raises:
        UserError: the package is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise UserError(f"{purpose} requires {name}, which is not installed", where=where,
                        instead=f"pip install 'ezpz_llm[{extra}]'")


def import_package(name: str, purpose: str, extra: str, where: str | None = None) -> Any:
    """Import and return an optional package or one of its modules. For the arguments see `require_package`.

    Raises:
        UserError: the package cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{purpose} requires {name.partition('.')[0]}, which cannot be imported ({error})",
                        where=where, instead=f"pip install 'ezpz_llm[{extra}]'") from error


TRAIN_PACKAGES = ("torch", "deepspeed", "numpy", "mpi4py", "tiktoken", "pyinstrument", "jsonargparse",
                  "safetensors")
"""Packages that `pip install ezpz_llm` leaves out, and `pip install 'ezpz_llm[train]'` installs."""

EXIT_USAGE = 2
"""Exit code of a usage or configuration error."""
EXIT_PREFLIGHT = 3
"""Exit code if a preflight check failed, or no rank could be started."""
EXIT_IDLE = 124
"""Exit code if the watchdog stopped a hanging run (the same as timeout(1))."""

_EXIT_HANDLERS_S = 5.0
_MAX_SIBLINGS = 1000
_MAX_COMPARED = 100
"""Maximum number of characters of a word that are compared with known words: difflib takes quadratic time."""
_ends_at_once = False


class UserError(Exception):
    """Error that the user can fix.

    Args:
        found: the problem, in one sentence that contains the offending value.
        where: file, option, or variable that the value came from.
        instead: what to type or change.
        exit_code: exit status of the process, never 0.
    """

    def __init__(self, found: str, *, where: str | None = None, instead: str | None = None,
                 exit_code: int = EXIT_USAGE) -> None:
        super().__init__(found)
        self.found = found
        self.where = where
        self.instead = instead
        self.exit_code = exit_code if exit_code % 256 else EXIT_USAGE

    def __str__(self) -> str:
        lines = [self.found]
        if self.where:
            lines.append(f"  where:   {self.where}")
        if self.instead:
            lines.append(f"  instead: {to_typable_text(self.instead)}")
        # Parts of the message may come from files, nodes, and processes of other users.
        return escape_control_characters("\n".join(lines))


def version_text() -> str:
    """Return the text of `--version`: version, location of the installation, and Python version."""
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return f"ezpz_llm {__version__} from {folder} (Python {sys.version.split()[0]})"


def nearest_names(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` known words that begin with `word` or are most similar to it, best first."""
    # Imported here because every command imports this module, and few of them fail.
    import difflib

    known, word = list(known), word[:_MAX_COMPARED]
    completions = [name for name in known if len(word) > 2 and name.startswith(word)]
    similar = difflib.get_close_matches(word, known, n=count, cutoff=0.5)
    return [*completions, *(name for name in similar if name not in completions)][:count]


def did_you_mean(path: str | os.PathLike[str], otherwise: str | None = None) -> str | None:
    """Return a hint for a missing path or one of another kind: the nearest names beside it, else `otherwise`."""
    folder, name = os.path.split(os.path.normpath(path))
    with contextlib.suppress(OSError, ValueError), os.scandir(folder or ".") as entries:
        others = [entry.name for entry in itertools.islice(entries, _MAX_SIBLINGS) if entry.name != name]
        if near := nearest_names(name, others):
            return f"did you mean {' or '.join(os.path.join(folder, other) for other in near)}?"
    return otherwise


def unknown_name_error(kind: str, word: str, known: Iterable[str], where: str | None = None, *,
                       or_path: bool = False) -> UserError:
    """Return the error for an unknown name. It suggests the most similar known names, or else lists all of them.

    Args:
        or_path: the word may also be a path; suggest the most similar ones if no known name is similar.
    """
    known = sorted(known)
    near = nearest_names(word, known)
    hint: str | None = f"known: {', '.join(known)}"
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif or_path:
        hint = did_you_mean(word, hint)
    return UserError(f"unknown {kind} {word!r}", where=where, instead=hint)


def exit_after_uncaught_exception() -> None:
    """Make the process exit without the interpreter's clean-up once an uncaught exception is printed.

    Used by ranks with live process groups: the clean-up (NCCL's destructors, MPI_Finalize) would wait for ranks
    that are still in a collective, and the launcher notices a failure only when the process has exited. From then
    on, `run_command` skips the clean-up, too.
    """
    global _ends_at_once
    if _ends_at_once:
        return
    _ends_at_once = True
    print_exception = sys.excepthook

    def print_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print_exception(kind, error, trace)
        _exit_now(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = print_and_exit


def _exit_now(code: int) -> None:
    """Exit without the interpreter's clean-up. Registered exit handlers have 5 s to finish."""
    deadline = threading.Timer(_EXIT_HANDLERS_S, os._exit, [code])
    deadline.daemon = True
    deadline.start()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def run_command(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a command's `main(argv)`, print a `UserError` as a message, and return the exit code.

    System errors that the user can fix, such as a full disk, are printed as messages, too. Other exceptions
    are bugs and keep their traceback. Does not return after `exit_after_uncaught_exception`: the process exits.
    """
    try:
        code = _run(main, argv)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code % 256 == 0 and (place := _place_of_other_code(error)) is not None:
            # A plug-in, a callback, or a library must not make an unfinished command look successful.
            _print_error(str(UserError(f"the command was ended by sys.exit({error.code})", where=place,
                                       instead="remove that call, or the package that contains it")))
            code = 1
        elif not _ends_at_once:
            raise
    if _ends_at_once:
        _exit_now(code)
    return code


_REMEDIES = {
    errno.EACCES: "a file or folder that you may read or write: ls -ld shows its owner and mode",
    errno.EPERM: "a file or folder that you own",
    errno.EROFS: "another location (--run-dir, EZPZ_LLM_CACHE): this file system is read-only",
    errno.ELOOP: "a file instead of a symbolic link: ls -l shows where it points",
    errno.ENAMETOOLONG: "a path of at most 4095 bytes, with names of at most 255 bytes",
    errno.EFBIG: "run ulimit -f unlimited before the command",
    errno.EMFILE: "run ulimit -n 65536 before the command",
    errno.ENFILE: "wait until other programs on this node have ended, or raise fs.file-max",
}
"""Remedy by errno, for errors that any file operation can raise."""
_MAX_SHOWN_PATH = 80


def _open_closed_streams() -> None:
    """Open closed standard streams (`>&-`) as /dev/null: otherwise the next open file becomes the stream."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _run(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None) -> int:
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape characters that the locale cannot encode, as stderr does, so that printing never raises.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return main(sys.argv[1:] if argv is None else argv) or 0
    except UserError as error:
        _print_error(str(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in TRAIN_PACKAGES:
            raise
        _print_error(str(UserError(f"this command requires {error.name}, which is not installed",
                                   where=sys.executable, instead="pip install 'ezpz_llm[train]'")))
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    except UnicodeDecodeError as error:
        if (path := _damaged_metadata(error)) is None:
            raise
        _print_error(str(UserError(f"the metadata of an installed package is not UTF-8 ({error.reason})",
                                   where=path, instead="reinstall that package, or remove the folder")))
        return EXIT_USAGE
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            full = UserError(os.strerror(error.errno), where=error.filename or "an output file",
                             instead="free some space, or choose another location (--run-dir, EZPZ_LLM_CACHE)")
            _print_error(str(full))
            return 1
        if error.errno in _REMEDIES:
            path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
            shown = path if len(path) <= _MAX_SHOWN_PATH else f"{path[:_MAX_SHOWN_PATH]}…"
            _print_error(str(UserError(os.strerror(error.errno), where=shown, instead=_REMEDIES[error.errno])))
            return EXIT_USAGE
        if not isinstance(error, BrokenPipeError):
            if not _has_working_directory():
                _print_error("the working directory no longer exists\n  instead: cd to another directory")
                return EXIT_USAGE
            raise
        # The reader of our output has exited (`… | head`), so the interpreter's last flush would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _damaged_metadata(error: UnicodeDecodeError) -> str | None:
    """Return the file of a package that importlib.metadata could not read, which `import torch` does, or None."""
    trace = error.__traceback__
    while trace is not None:
        variables = trace.tb_frame.f_locals
        if trace.tb_frame.f_globals.get("__name__") == "importlib.metadata" and "filename" in variables:
            return os.path.join(str(getattr(variables["self"], "_path", "")), variables["filename"])
        trace = trace.tb_next
    return None


def _place_of_other_code(error: SystemExit) -> str | None:
    """Return the file and line that raised SystemExit; None for this package, and for argparse's --help."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    if trace is None or name in ("argparse", "__main__") or str(name).partition(".")[0] == "ezpz_llm":
        return None
    return f"{trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}"


def _print_error(error: str) -> None:
    try:
        print(f"error: {error}", file=sys.stderr, flush=True)
    except OSError:
        # The reader of stderr has exited. Keep the exit code, which Python's last flush would change.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
