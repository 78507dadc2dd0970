"""The files of a run directory: their names, in one place; writing that is never seen half done (whole files, whole
lines), reading, and sweeping what killed runs left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, as_type, is_one_line, make_private, outside, read_own
from ezpz_llm.rundir.schemas import Record, Resolved
from ezpz_llm.rundir.secrets import without_secrets

RUN_DIR_VARIABLE = "EZPZ_LLM_RUN_DIR"
"""How `launch` tells every rank which run directory it made."""

_PRIVATE = ("heartbeat", "errors", "control")
"""What launch and the nodes believe: closed to all other users, whatever the umask."""
_FOLDERS = ("logs", "stacks", "plots", "profile", "checkpoints")
_FOLDER_MODE = 0o755
"""Of a run directory and its other folders, but for what the umask takes away: whether others may read logs and
metrics is the umask's to say, and nobody else may write there, since a link in the place of a log would be written
through."""


class _Inside:
    """A file or folder of a run directory, as an attribute of RunDir that is its path."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get__(self, run_dir: RunDir, kind: type[RunDir] | None = None) -> Path:
        return run_dir.path.joinpath(*self._names)


@dataclass(frozen=True)
class RunDir:
    """One run's directory.

    `run.json` is the run's record, `metrics.jsonl` has one object a training step, `logs/` one file a rank,
    `errors/` one record a failed rank, `heartbeat/` one report a node (one file a rank where launch did not start
    it), `control/` orders to the nodes, `stacks/` what ranks were doing when asked; `plots/`, `profile/` and
    `checkpoints/` hold what their names say.
    """

    path: Path

    record = _Inside("run.json")
    metrics = _Inside("metrics.jsonl")
    plots = _Inside("plots")
    report = _Inside("report.html")
    """The page that a run writes of itself at its end."""
    profile = _Inside("profile")
    checkpoints = _Inside("checkpoints")
    offloaded = _Inside("nvme")
    """What ranks keep in files instead of memory, a folder each, while the run lasts."""
    errors = _Inside("errors")
    job_script = _Inside("job.sh")
    """What the scheduler was given, where the run was submitted."""
    layout = _Inside("layout.json")
    """Our resolved layout (see engine/)."""
    deepspeed = _Inside("deepspeed.json")
    """Exactly what DeepSpeed was given; absent for an engine that is not DeepSpeed's."""
    heartbeat = _Inside("heartbeat")
    """Reports of the nodes."""
    control = _Inside("control")
    """Orders to the agents of the nodes."""
    launcher_log = _Inside("logs", "launcher.log")
    """What the launcher itself and rank 0 wrote to standard error."""
    post_mortem = _Inside("postmortem.txt")
    tokenizer = _Inside("tokenizer")
    """A copy of the tokenizer's files, where it is another library's."""

    def __post_init__(self) -> None:
        if not is_one_line(str(self.path)):
            raise UserError("the name of a run directory has control characters", where=str(self.path),
                            instead="another name (--run-dir)")

    def trace(self, rank: int) -> Path:
        """A rank's trace of some of its steps."""
        return self.profile / f"trace-rank{rank:04d}.json.gz"

    def counterfactual(self, rank: int) -> Path:
        """The times of a rank's steps with and without collectives."""
        return self.profile / f"counterfactual-rank{rank:04d}.json"

    def tracker(self, name: str) -> Path:
        """Where one of the trackers that the run feeds writes."""
        return self.path / "trackers" / name

    def rank_log(self, rank: int) -> Path:
        """What a rank printed."""
        return self.path / "logs" / f"rank{rank:04d}.log"

    def rank_error(self, rank: int) -> Path:
        """The exception that a rank ended with."""
        return self.errors / f"rank{rank:04d}.json"

    def rank_heartbeat(self, rank: int) -> Path:
        """The file that a rank touches while it makes progress."""
        return self.heartbeat / f"rank{rank:04d}"

    def node_report(self, first_rank: int) -> Path:
        """What the agent of one node gathers; numbered by the node's first rank, which is unique however ranks are
        placed."""
        return self.heartbeat / f"node{first_rank:04d}.json"

    def rank_stacks(self, rank: int) -> Path:
        """The stacks of a rank, written when they were last asked for."""
        return self.path / "stacks" / f"rank{rank:04d}.txt"

    @property
    def preflight(self) -> RunDir:
        """The run directory of the preflight that came before this run."""
        return RunDir(self.path / "preflight")

    def check_there(self) -> None:
        """
        Raises:
            UserError: there is no such folder (any more).
        """
        if not self.path.is_dir():
            raise UserError("there is no such folder: it was removed, or never made", where=str(self.path),
                            instead="the directory of a run")

    def claim(self) -> bool:
        """Make a default directory, which is to be one run's alone; false if another run, begun in the same second,
        has made it. What is wrong with the place is for `create` to say."""
        try:
            self.path.mkdir(_FOLDER_MODE, parents=True)
        except OSError as error:
            return not isinstance(error, FileExistsError)
        return True

    def create(self) -> RunDir:
        """Make the directory and its folders; existing ones are kept (a resumed run appends).

        Raises:
            UserError: the place is not writable, or a file stands there.
        """
        try:
            self.path.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
            for folder in _FOLDERS:
                (self.path / folder).mkdir(_FOLDER_MODE, exist_ok=True)
            for folder in _PRIVATE:
                make_private(self.path / folder).close()
        except OSError as error:
            raise UserError(f"cannot make the run directory: {error.strerror}",
                            where=error.filename or str(self.path),
                            instead="name a writable place with --run-dir DIR") from error
        return self


def default_run_dir(name: str, parent: Path | None = None, now: float | None = None) -> RunDir:
    """`runs/<name>-<stamp>` under `parent` (default: the working directory), not yet existing.

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


# Writing that is never seen half done: whole files, whole lines; and sweeping what killed runs left.
_MODE = 0o644
"""Of a new file, but for what the umask takes away: nobody else writes our records."""


def write_atomic(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Replace `path` by `content` in one step: a reader sees the old file or the new one, never a part.

    Raises:
        OSError: nothing was changed (a full disk leaves the old file as it was).
    """
    content = content.encode() if isinstance(content, str) else content
    parts = [content] if isinstance(content, bytes) else content
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        with open(temporary, "xb", opener=ours) as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_file(path: Path, content: bytes | str, option: str | None = None) -> None:
    """Write one file that a user asked for, whole or not at all.

    Args:
        option: the one that names this very file. Its folder has to be there; without an option it is made.

    Raises:
        UserError: says why not.
    """
    try:
        if option is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path.name}: {error.strerror}",
                        where=f"{option} {path}" if option else str(path.parent),
                        instead="a file in a folder that exists and is yours, or room there") from error


def ours(path: str, flags: int) -> int:
    """An `opener` of `open` for a file that nobody else may write; a link is not followed.

    Raises:
        OSError: also for a pipe, whose writer would wait for a reader, and for a device.
    """
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, _MODE)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", path)
    return handle


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, in one step."""
    write_atomic(path, json_text(value))


def hash_file(path: Path) -> str:
    """The sha256 of a file, as hex. Raises as `outside.open_regular`."""
    digest = hashlib.sha256()
    with outside.open_regular(path) as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def json_text(value: Any) -> str:
    """`value` as indented JSON."""
    return json.dumps(value, indent=2, default=str) + "\n"


def append_line(path: Path, value: Any) -> None:
    """Append `value` as one line of JSON; see append_lines."""
    append_lines(path, [value])


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Append each value as a line of JSON, all in one write, so that lines of several writers do not mix.

    Raises:
        OSError: nothing was appended (a full disk).
    """
    lines = "".join(f"{json.dumps(value, default=str)}\n" for value in values).encode()
    handle = ours(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        written = os.write(handle, lines)
        if written < len(lines):
            # The next line must not be joined to a part of these.
            os.ftruncate(handle, os.fstat(handle).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    """What a JSON file holds; None where there is none.

    Raises:
        UserError: it is damaged, or cannot be read.
    """
    try:
        return outside.read_json(path)
    except outside.NoFile:
        return None


def read_layout(path: Path) -> dict[str, Any] | None:
    """What layout.json holds; None where there is none. Raises as `read_json`, and for wrong types."""
    stored = read_json(path)
    return None if stored is None else as_type(Resolved, stored, str(path))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, none where there is no file; a last line cut short by a crash is left out.

    Raises:
        UserError: another line is damaged.
    """
    try:
        yield from outside.read_json_lines(path)
    except outside.NoFile:
        return


# What killed runs leave half written in a run directory. Only its owner may sweep it: nobody else writes there.
_HALF = (".step-*.partial", ".step-*.removed")


def sweep_checkpoints(checkpoints: Path) -> None:
    """Remove checkpoints that were never completed, or not removed to their end."""
    for pattern in _HALF:
        for left in checkpoints.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


# `run.json`: what ran, with what, where, and what came out. Secrets are redacted on the way in.
_LOCK_WITHIN_S, _LOCK_POLL_S = 1.0, 0.01
_OTHER = "another run directory, or remove the file"


def read_record(run_dir: RunDir) -> dict[str, Any]:
    """The record as it stands; empty where there is none yet.

    Raises:
        UserError: it cannot be read, or is not what we write there.
    """
    try:
        record = outside.read_json(run_dir.record)
    except outside.NoFile:
        return {}
    except UserError as error:
        raise UserError(error.found, where=error.where, instead=_OTHER) from error
    return _as_record(record, run_dir)


def own_record(run_dir: RunDir) -> dict[str, Any] | None:
    """The record of a run of the reader's own; None where another user may have written it, or there is none.

    Raises:
        UserError: as `read_record`.
    """
    try:
        content = read_own(run_dir.record)
    except outside.NoFile:
        return None
    return None if content is None else _as_record(outside.parse_json(content, str(run_dir.record)), run_dir)


def is_interrupted(ended: Mapping[str, Any]) -> bool:
    """True of an `exit` in run.json if the run ended because launch was sent a signal."""
    return (ended.get("stopped") or {}).get("kind") == "signal"


def _as_record(stored: Any, run_dir: RunDir) -> dict[str, Any]:
    if not isinstance(stored, dict):
        raise UserError("run.json is not a run's record", where=str(run_dir.record), instead=_OTHER)
    return as_type(Record, stored, str(run_dir.record))


def update_record(run_dir: RunDir, **members: Any) -> None:
    """Set top-level members of run.json. `launch` writes before and after, rank 0 between; `submit` may still be
    writing when its job begins."""
    with locked(run_dir.path, _LOCK_WITHIN_S):
        write_json(run_dir.record, {**read_record(run_dir), **without_secrets(members, os.environ)})


@contextlib.contextmanager
def locked(folder: Path, within_s: float) -> Iterator[bool]:
    """Keep other processes that ask for it out of `folder` meanwhile, where the file system has locks; false where
    one of them did not let go of it in time."""
    handle, deadline = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + within_s
    try:
        while not (is_ours := _lock(handle)) and time.monotonic() < deadline:
            time.sleep(_LOCK_POLL_S)
        yield is_ours
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True
