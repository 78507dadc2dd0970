"""Paths, atomic writes, and reads of the files in a run directory.

Files are replaced atomically and lines are appended in single writes, so that readers do not see incomplete ones.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, did_you_mean, is_one_line, make_private, untrusted_input

RUN_DIR_VARIABLE = "EZPZ_LLM_RUN_DIR"
"""Environment variable with the run directory. `launch` sets it for every rank."""

_PRIVATE = ("heartbeat", "errors", "control")
"""Folders with files that launch and the node agents trust: no access for other users, regardless of the umask."""
_FOLDERS = ("logs", "stacks", "collectives", "plots", "profile", "checkpoints")
_FOLDER_MODE = 0o755
"""Mode of a run directory and its other folders, before the umask.

The umask decides whether other users may read logs and metrics. They may never write, because launch would follow a
link that they put in place of a log."""


class _Inside:
    """Descriptor for the path of a file or folder in a run directory."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get__(self, run_dir: RunDir, kind: type[RunDir] | None = None) -> Path:
        return run_dir.path.joinpath(*self._names)


class RunDir:
    """Directory of a run.

    - `run.json`: the run's record
    - `metrics.jsonl`: one object per training step
    - `logs/`: one file per rank
    - `errors/`: one record per failed rank
    - `heartbeat/`: one report per node, or one file per rank if the node has no agent
    - `control/`: orders to the node agents
    - `stacks/`: stack traces of ranks
    - `collectives/`: records of the ranks' latest collectives
    """

    record = _Inside("run.json")
    metrics = _Inside("metrics.jsonl")
    plots = _Inside("plots")
    report = _Inside("report.html")
    """HTML report that a run writes when it ends."""
    profile = _Inside("profile")
    checkpoints = _Inside("checkpoints")
    offloaded = _Inside("nvme")
    """Tensors offloaded to files, with one folder per rank. Removed at the end of the run."""
    errors = _Inside("errors")
    job_script = _Inside("job.sh")
    """Job script, if the run was submitted."""
    layout = _Inside("layout.json")
    """Resolved layout (see training/engine/)."""
    deepspeed = _Inside("deepspeed.json")
    """The ds_config passed to DeepSpeed; absent with other engines."""
    collectives = _Inside("collectives")
    """Records of the ranks' latest collectives."""
    heartbeat = _Inside("heartbeat")
    """Reports of the nodes."""
    control = _Inside("control")
    """Orders to the node agents."""
    launcher_log = _Inside("logs", "launcher.log")
    """Standard error of the launcher and of rank 0."""
    post_mortem = _Inside("postmortem.txt")
    tokenizer = _Inside("tokenizer")
    """Copy of the tokenizer's files, if the tokenizer comes from another library."""

    def __init__(self, path: Path) -> None:
        if not is_one_line(str(path)):
            raise UserError("the name of the run directory has control characters", where=str(path),
                            instead="another name (--run-dir)")
        self.path = path

    def trace(self, rank: int) -> Path:
        """Return the path of a rank's trace."""
        return self.profile / f"trace-rank{rank:04d}.json.gz"

    def tracker(self, name: str) -> Path:
        """Return the folder of an experiment tracker."""
        return self.path / "trackers" / name

    def rank_log(self, rank: int) -> Path:
        """Return the path of a rank's output."""
        return self.path / "logs" / f"rank{rank:04d}.log"

    def rank_error(self, rank: int) -> Path:
        """Return the path of the record of the exception that ended a rank."""
        return self.errors / f"rank{rank:04d}.json"

    def rank_heartbeat(self, rank: int) -> Path:
        """Return the path of the file that a rank touches while it makes progress."""
        return self.heartbeat / f"rank{rank:04d}"

    def node_report(self, first_rank: int) -> Path:
        """Return the path of a node agent's report, numbered by the node's first rank, which is always unique."""
        return self.heartbeat / f"node{first_rank:04d}.json"

    def rank_stacks(self, rank: int) -> Path:
        """Return the path of a rank's most recent stack traces."""
        return self.path / "stacks" / f"rank{rank:04d}.txt"

    @property
    def preflight(self) -> RunDir:
        """Run directory of the preflight before this run."""
        return RunDir(self.path / "preflight")

    def check_exists(self) -> None:
        """Check that the directory exists.

        Raises:
            UserError: the directory does not exist.
        """
        if not self.path.is_dir():
            raise UserError("the run directory does not exist: it was removed, or never created",
                            where=str(self.path), instead=did_you_mean(self.path, "the directory of a run"))

    def claim(self) -> bool:
        """Create this directory exclusively, so that no other run can use its default name.

        Return False if another run created it in the same second. Ignores other errors; `create` will raise them.
        """
        try:
            self.path.mkdir(_FOLDER_MODE, parents=True)
        except OSError as error:
            return not isinstance(error, FileExistsError)
        return True

    def create(self) -> RunDir:
        """Create the directory and its folders. Keeps existing files, because a resumed run appends to them.

        Raises:
            UserError: the parent is not writable, or the path is a file.
        """
        try:
            self.path.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
            for folder in _FOLDERS:
                (self.path / folder).mkdir(_FOLDER_MODE, exist_ok=True)
            for folder in _PRIVATE:
                make_private(self.path / folder).close()
        except OSError as error:
            raise UserError(f"cannot create the run directory: {error.strerror}",
                            where=error.filename or str(self.path),
                            instead="--run-dir DIR with a writable directory") from error
        return self


def default_run_dir(name: str, parent: Path | None = None, now: float | None = None) -> RunDir:
    """Return a new path `runs/<name>-<stamp>` in `parent` (default: the working directory).

    A second run within the same second gets the suffix -1, and so on.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    base = (parent or Path.cwd()) / "runs" / f"{name}-{stamp}"
    path, attempt = base, 0
    while os.path.lexists(path):
        attempt += 1
        path = base.with_name(f"{base.name}-{attempt}")
    return RunDir(path)


_MODE = 0o644
"""Mode of new files, before the umask: other users may never write the records."""


def write_atomic(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Replace `path` with `content` atomically: readers see the old or the new file, never part of it.

    Raises:
        OSError: the file cannot be written, for example on a full disk; an old file is unchanged.
    """
    content = content.encode() if isinstance(content, str) else content
    parts = [content] if isinstance(content, bytes) else content
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        with open(temporary, "xb", opener=private_opener) as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_file(path: Path, content: bytes | str, option: str | None = None) -> None:
    """Write an output file of a command atomically.

    Args:
        option: the option that names the file, whose folder must exist. If None, a missing folder is created.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        if option is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path.name}: {error.strerror}",
                        where=f"{option} {path}" if option else str(path.parent),
                        instead="a file in an existing folder that is writable and has space") from error


def private_opener(path: str, flags: int) -> int:
    """Open a file that no other user may write (an `opener` for `open`). Links are not followed.

    Raises:
        OSError: also for a device, and for a pipe, where a write would wait for a reader.
    """
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, _MODE)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "a pipe or a device, not a regular file", path)
    return handle


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(path, json_text(value))


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raises the errors of `untrusted_input.open_regular`."""
    import hashlib  # loads OpenSSL, which launch does not need

    digest = hashlib.sha256()
    with untrusted_input.open_regular(path) as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def json_text(value: Any) -> str:
    """Return `value` as indented JSON."""
    return json.dumps(value, indent=2, default=str) + "\n"


def append_line(path: Path, value: Any) -> None:
    """Append `value` as a line of JSON; see `append_lines`."""
    append_lines(path, [value])


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Append each value as a line of JSON, in a single write, so that several writers do not mix their lines.

    Raises:
        OSError: the write failed, for example on a full disk; nothing was appended.
    """
    lines = "".join(f"{json.dumps(value, default=str)}\n" for value in values).encode()
    handle = private_opener(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        written = os.write(handle, lines)
        if written < len(lines):
            # A partial line would be joined to the next one.
            os.ftruncate(handle, os.fstat(handle).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or None if it does not exist.

    Raises:
        UserError: the file is damaged, or cannot be read.
    """
    try:
        return untrusted_input.read_json(path)
    except untrusted_input.NoFile:
        return None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file. Yields nothing if it is missing; skips a truncated last line.

    Raises:
        UserError: any other line is damaged.
    """
    try:
        yield from untrusted_input.read_json_lines(path)
    except untrusted_input.NoFile:
        return


_INCOMPLETE = (".step-*.partial", ".step-*.removed")


def remove_incomplete_checkpoints(checkpoints: Path) -> None:
    """Remove incomplete checkpoints, which a killed run was writing or removing.

    Only the process that owns the run directory may call this, since no other process then writes checkpoints.
    """
    for pattern in _INCOMPLETE:
        for incomplete in checkpoints.glob(pattern):
            shutil.rmtree(incomplete, ignore_errors=True)


LOCK_WITHIN_S, _LOCK_POLL_S = 1.0, 0.01


@contextlib.contextmanager
def locked(folder: Path, within_s: float) -> Iterator[bool]:
    """Lock `folder` against other processes that call `locked`, if the file system supports locks.

    Yields False, without the lock, if another process did not release it within `within_s` seconds.
    """
    handle, deadline = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + within_s
    try:
        while not (is_locked := _lock(handle)) and time.monotonic() < deadline:
            time.sleep(_LOCK_POLL_S)
        yield is_locked
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True
