"""`exit` in run.json: made from a post-mortem, and read for another one."""

from __future__ import annotations

from ezpz_llm.core.base import UserError, epoch
from ezpz_llm.core.rundir.records import Exit, RunRecord
from ezpz_llm.launcher.basics.variables import ENDS_AT_VARIABLE
from ezpz_llm.launcher.on_nodes.run_facts import Postmortem, RunFacts

NOT_STARTED = "not_started"
"""Kind of the exit of a run that launch did not start."""


def exit_record(postmortem: Postmortem) -> Exit:
    """Return the exit from which the post-mortem can be rebuilt."""
    facts = postmortem.facts
    failed, ended = (None if ranks is None else sorted(ranks)
                     for ranks in (facts.failed_before_stop, facts.ended_before_stop))
    return Exit(code=postmortem.code, cause=postmortem.cause, kind=postmortem.kind, rank=postmortem.rank,
                ended=facts.ended, launcher_status=facts.launcher_status, stopped=facts.stopped,
                failed_before_stop=failed, ended_before_stop=ended)


def not_started_record(code: int, cause: str, ended: float) -> Exit:
    """Return the exit of a run that launch did not start."""
    return Exit(code=code, cause=cause, kind=NOT_STARTED, ended=ended)


def facts_from(record: RunRecord, last_sign: float) -> RunFacts:
    """Read the facts from run.json.

    If launch was killed before it recorded the exit, the run's end is `last_sign`, its last sign of life.

    Raises:
        UserError: the numbers of ranks and nodes are missing or contradict each other.
    """
    launch, ended = record.launch, record.exit or Exit()
    if launch is None or launch.world_size is None:
        raise UserError("run.json has no launch record")
    hosts, counts = launch.hosts or [], launch.ranks_per_host or []
    if len(hosts) != len(counts) or sum(counts) != launch.world_size:
        raise UserError(f"run.json has world_size {launch.world_size}, but {sum(counts)} ranks on {len(hosts)}"
                        " nodes")
    failed, succeeded = (None if ranks is None else frozenset(ranks)
                         for ranks in (ended.failed_before_stop, ended.ended_before_stop))
    ends_at = (launch.env or {}).get(ENDS_AT_VARIABLE)
    return RunFacts(
        world_size=launch.world_size, hosts=tuple(launch.rank_hosts), launcher=launch.launcher or "",
        launcher_status=ended.launcher_status, ended=last_sign if ended.ended is None else ended.ended,
        stopped=ended.stopped, failed_before_stop=failed, ended_before_stop=succeeded,
        ends_at=epoch(ends_at.partition(".")[0]) if ends_at else None, started=launch.started,
        scheduler=launch.scheduler or "", job_id=launch.job_id)
