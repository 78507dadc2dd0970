"""Two unprivileged users of one machine, for tests of the isolation between users.

They share everything that users of a node share: /tmp, /dev/shm, /proc, ports. Each has a home that the other can
read, like project and scratch folders. If the tests run as root, they are two user ids without capabilities; else
two ids in a user namespace. If the Python environment or this checkout is below a folder that is closed to others
(/root), their mount namespace replaces that folder with an empty one that only contains the needed paths.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch_runs import clean_env, finished
from places import ROOT
from slowness import scaled

_ENTER = 'cd "$1" && shift && exec "$@"'
_PREPARE_S = 60
WITHIN_S = 150.0
"""Default timeout of a command; starting processes is slow on a busy machine."""


@dataclass(frozen=True)
class User:
    """Unprivileged user. `enter` is the command prefix that switches to this user."""

    name: str
    uid: int
    home: Path
    enter: tuple[str, ...]

    def start(self, *words: str | Path, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
        """Start a command in a clean environment, with this Python first on PATH and this checkout importable."""
        own = {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name, "PYTHONPATH": str(ROOT),
               "EZPZ_LLM_CACHE": str(self.home / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        into = ("sh", "-c", _ENTER, "sh", str(cwd or self.home))
        return subprocess.Popen([*self.enter, *into, *map(str, words)], env=clean_env(**{**own, **env}), cwd="/",
                                text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, start_new_session=True)

    def run(self, *words: str | Path, timeout: float = WITHIN_S, cwd: Path | None = None,
            **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return finished(self.start(*words, cwd=cwd, **env), words, timeout, self.end_all)

    def python(self, code: str, *words: str | Path, timeout: float = WITHIN_S,
               **env: str) -> subprocess.CompletedProcess[str]:
        """Run Python code with `words` as its arguments."""
        return self.run(sys.executable, "-c", code, *words, timeout=timeout, **env)

    def launch(self, *words: str | Path, timeout: float = WITHIN_S, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `launch WORDS` to its end."""
        return self.run(sys.executable, "-m", "ezpz_llm.launch", *words, timeout=timeout, **env)

    def end_all(self) -> None:
        """Kill every process of this user. No other user of this machine has the same id."""
        # Run as that user, so that the kernel limits kill to the user's processes.
        subprocess.run([*self.enter, "sh", "-c", "kill -9 -1"], capture_output=True,
                       timeout=scaled(120), check=False)


@dataclass(frozen=True)
class Strangers:
    """Two users of the same machine: `victim` runs launch, `attacker` interferes.

    `shared` is a folder of root's that both can write to, like /tmp.
    """

    victim: User
    attacker: User
    shared: Path


@contextlib.contextmanager
def two_users() -> Iterator[Strangers]:
    """Create the two users, or skip the test with the reason."""
    is_root = os.geteuid() == 0
    # Ids unique to this process, so that concurrent test runs do not kill each other's processes.
    first = 30_000 + os.getpid() % 10_000 * 2 if is_root else 1001
    become = () if is_root else ("--user",)
    folder = Path(tempfile.mkdtemp(prefix="strangers-", dir="/tmp"))
    folder.chmod(0o755)
    with contextlib.ExitStack() as until_the_end:
        until_the_end.callback(shutil.rmtree, folder, ignore_errors=True)
        holder = _namespace(folder, is_root)
        until_the_end.callback(_end, holder)
        users = []
        for uid, name in enumerate(("victim", "attacker"), first):
            enter = ("nsenter", f"--target={holder.pid}", "--mount", *become, "setpriv", f"--reuid={uid}",
                     f"--regid={uid}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all",
                     # Without it, an attacker whose test was killed would keep running.
                     "--pdeathsig=KILL", "--")
            users.append(User(name, uid, folder / name, enter))
        shared = folder / "shared"
        homes = (f"mkdir -m 755 {user.home} && chown {user.uid}:{user.uid} {user.home}" for user in users)
        _as_their_root(holder, is_root, " && ".join((*homes, f"mkdir -m 1777 {shared}")))
        for user in users:
            until_the_end.callback(_remove_files, holder, is_root, user)
            until_the_end.callback(user.end_all)
        if (attempt := users[0].python("import ezpz_llm.launcher.running.command", timeout=_PREPARE_S)).returncode:
            pytest.skip(f"another user cannot use this Python environment: {attempt.stderr.strip()[-300:]}")
        yield Strangers(users[0], users[1], shared)


def _namespace(folder: Path, is_root: bool) -> subprocess.Popen[str]:
    """Start the process that holds the users' mount namespace (and user namespace)."""
    words = ["unshare", "--mount", "--propagation=private"]
    if not is_root:
        words += ["--user", "--map-root-user", "--map-auto"]
    holder = subprocess.Popen([*words, "sh", "-ec", f"{_opened(folder / 'held')}\necho ready\nexec cat"], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if holder.stdout.readline() != "ready\n":
        _, err = holder.communicate()
        pytest.skip(f"cannot create two users on this machine: {err.strip()[-300:]}")
    return holder


def _opened(held: Path) -> str:
    """Return a shell script that opens the needed paths below closed folders to other users.

    Each closed folder is covered by an empty one that only contains the needed paths.
    """
    lines = [f"mkdir {held}"]
    needed = _needed()
    closed = {top: [path for path in needed if path.is_relative_to(top)]
              for top in {_closed_top(path) for path in needed} - {None}}
    for number, (top, paths) in enumerate(closed.items()):
        for index, path in enumerate(paths):
            place = held / f"{number}.{index}"
            lines += [f"mkdir {place}", f"mount --bind '{path}' {place}"]
        lines += [f"mount -t tmpfs -o mode=755 tmpfs '{top}'"]
        for index, path in enumerate(paths):
            lines += [f"mkdir -p '{path}'", f"mount --move {held}/{number}.{index} '{path}'"]
    return "\n".join(lines)


def _needed() -> list[Path]:
    """Return the folders of this Python environment, of links to its Python, and of the checkout; none nested."""
    folders = {Path(sys.prefix), Path(sys.base_prefix), Path(os.path.realpath(sys.executable)).parents[1], ROOT,
               *(Path(entry) for entry in sys.path if os.path.isabs(entry) and os.path.isdir(entry))}
    program = Path(sys.executable)
    while program.is_symlink():
        program = program.parent / program.readlink()
        folders.add(program.parent)
    folders |= {path.resolve() for path in folders}
    return sorted(path for path in folders if not any(other in path.parents for other in folders))


def _closed_top(path: Path) -> Path | None:
    """Return the topmost folder on the way to `path` that others cannot enter."""
    return next((folder for folder in reversed((path, *path.parents)) if not folder.stat().st_mode & stat.S_IXOTH),
                None)


def _as_their_root(holder: subprocess.Popen[str], is_root: bool, script: str) -> None:
    words = ["nsenter", f"--target={holder.pid}", "--mount", *(() if is_root else ("--user",))]
    subprocess.run([*words, "sh", "-c", script], check=True, capture_output=True, timeout=scaled(_PREPARE_S))


def _remove_files(holder: subprocess.Popen[str], is_root: bool, user: User) -> None:
    with contextlib.suppress(subprocess.SubprocessError):
        _as_their_root(holder, is_root, f"rm -rf {user.home}; find /dev/shm -maxdepth 1 -user {user.uid} "
                                          "-exec rm -rf {} +")


def _end(holder: subprocess.Popen[str]) -> None:
    holder.communicate()
