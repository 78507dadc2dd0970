"""A node's report: what its agent writes into the run directory, and what launch and `why` read from there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ezpz_llm.base.private import make_private, read_records
from ezpz_llm.rundir.paths import RunDir

NODES_A_SECOND = 200
"""How many reports a second all agents together write: a shared file system often has one metadata server."""
LOOKS_A_SECOND = 2000
"""How often a second all agents together look for orders."""
KEEPALIVE_S = 10.0
"""A report without news is written again after this long, where the interval is a second; else ten intervals."""

RUNNING, STOPPING, RANKS_ENDED, ENDED = "running", "stopping", "ranks ended", "ended"
"""An agent's states. In the last two no process of any rank is left; in the last, nothing else of the run."""


@dataclass(frozen=True)
class RankReport:
    """One rank as its node sees it.

    `silent_s` are the seconds since its last heartbeat (None: it never gave one), `idle_s` those since it last
    used the processor or wrote to its log; both by the node's clock, at the time of the report. `ended` is its exit
    code, `lived_s` how long it then had run. `state` is the kernel's letter for its main process ("D": waiting for
    a device or a file system).
    """

    pid: int | None = None
    phase: str | None = None
    step: int | None = None
    silent_s: float | None = None
    idle_s: float = 0.0
    state: str | None = None
    ended: int | None = None
    lived_s: float | None = None


@dataclass(frozen=True)
class NodeReport:
    """All ranks of one node. `left` are processes of ranks that could not be ended; `slurm_step` is "JOB.STEP"
    where the ranks are tasks of one; `error` says what went wrong in the agent itself last; `mpi` that an MPI in
    the ranks is alone; `builds` are the extensions that ranks were seen to compile."""

    run_id: str
    host: str
    first_rank: int
    state: str
    interval_s: float
    ranks: Mapping[int, RankReport] = field(default_factory=dict)
    left: tuple[int, ...] = ()
    slurm_step: str | None = None
    error: str | None = None
    mpi: str | None = None
    builds: tuple[str, ...] = ()


def control_interval_s(nodes: int) -> float:
    """How often an agent looks for orders, which costs less than a report."""
    return max(1.0, nodes / LOOKS_A_SECOND)


def interval_s(nodes: int) -> float:
    """How often an agent gathers: once a second, less often on more nodes than a shared file system bears."""
    return max(1.0, nodes / NODES_A_SECOND)


def write_report(run_dir: RunDir, report: NodeReport) -> None:
    """Write it in place: half the file system's work of writing it beside and renaming. `read_reports` copes.

    Raises:
        OSError: the file system refuses.
    """
    # The run directory may have been removed, and made again by a checkpoint.
    with make_private(run_dir.heartbeat) as folder:
        folder.overwrite(run_dir.node_report(report.first_rank).name, json.dumps(asdict(report)).encode() + b"\n")


def read_reports(run_dir: RunDir, run_id: str) -> list[NodeReport]:
    """The latest report of each node of this run, in the order of their ranks; without one that is just being
    written, or that no agent of ours wrote."""
    found = read_records(NodeReport, run_dir.heartbeat, "node")
    return sorted((report for report in found if report.run_id == run_id), key=lambda report: report.first_rank)
