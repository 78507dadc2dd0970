"""Names of the files in a run directory, in one place."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.base.errors import UserError, is_one_line
from ezpz_llm.base.private import make_private

RUN_DIR_VARIABLE = "EZPZ_LLM_RUN_DIR"
"""How `launch` tells every rank which run directory it made."""

_PRIVATE = ("heartbeat", "errors", "control")
"""What launch and the nodes believe: closed to all other users, whatever the umask."""
_FOLDERS = ("logs", "stacks", "plots", "profile", "checkpoints")
_MODE = 0o755
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
        return self.path / "logs" / f"rank{rank:04d}.log"

    def rank_error(self, rank: int) -> Path:
        return self.errors / f"rank{rank:04d}.json"

    def rank_heartbeat(self, rank: int) -> Path:
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

    def create(self) -> RunDir:
        """Make the directory and its folders; existing ones are kept (a resumed run appends).

        Raises:
            UserError: the place is not writable, or a file stands there.
        """
        try:
            self.path.mkdir(_MODE, parents=True, exist_ok=True)
            for folder in _FOLDERS:
                (self.path / folder).mkdir(_MODE, exist_ok=True)
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


def newest_run(folder: Path, instead: str) -> RunDir:
    """The run in `folder` whose record was written last.

    Raises:
        UserError: there is none; it says to type `instead`.
    """
    records = sorted(folder.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    if not records:
        raise UserError(f"no run in {folder}/", where=os.getcwd(), instead=instead)
    return RunDir(records[-1].parent.absolute())
