"""Choice of a queue for a job, from the limits in the site file."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.core.base import UserError, count_noun
from ezpz_llm.launcher.jobs.schedulers.scheduler import clock_with_days
from ezpz_llm.launcher.planning.sites import Limit, Site


def choose_queue(site: Site, wanted: str | None, nodes: int, time_s: int, jobs: int) -> str | None:
    """Return `wanted`, else the first queue that accepts the job, the site's default first.

    Return None if the site file names no queue. A queue without limits accepts every job.

    Args:
        nodes: nodes of each job.
        time_s: wall time of each job.
        jobs: number of jobs in the chain.

    Raises:
        UserError: the queue `wanted`, or every queue of the site, does not accept the job. The message
            names the exceeded limits.
    """
    queues = list(dict.fromkeys([*filter(None, [site.job.queue]), *(limit.queue for limit in site.job.limits)]))
    accepting = [queue for queue in queues if _accepts(site, queue, nodes, time_s, jobs)]
    if wanted is None:
        if accepting or not queues:
            return accepting[0] if accepting else None
        raise UserError(f"no queue of {site.name} accepts {_job(nodes, time_s, jobs)}: "
                        + "; ".join(f"{queue} {_describe_exceeded(site, queue, nodes, time_s, jobs)}"
                                    for queue in queues),
                        where=f"the limits in the file of site {site.name}",
                        instead="--nodes, --time or --chain within the limits, or a --queue that the file does not"
                                " name")
    if wanted in queues and wanted not in accepting:
        alternatives = f"--queue {' or '.join(accepting)}, or " if accepting else ""
        raise UserError(f"queue {wanted} of {site.name} does not accept {_job(nodes, time_s, jobs)}: it "
                        + _describe_exceeded(site, wanted, nodes, time_s, jobs),
                        where=f"the limits in the file of site {site.name}",
                        instead=f"{alternatives}--nodes, --time or --chain within the limits")
    return wanted


def _accepts(site: Site, queue: str, nodes: int, time_s: int, jobs: int) -> bool:
    limits = _limits_of(site, queue)
    return not limits or any(not _exceeded_limits(limit, nodes, time_s, jobs) for limit in limits)


def _describe_exceeded(site: Site, queue: str, nodes: int, time_s: int, jobs: int) -> str:
    """Describe the limits of the queue that the job exceeds, preferring limits that its number of nodes fits."""
    limits = _limits_of(site, queue)
    fitting = [limit for limit in limits if not _exceeded_limits(limit, nodes, 0, 0)] or limits
    return ", or ".join(dict.fromkeys(" and ".join(_exceeded_limits(limit, nodes, time_s, jobs))
                                      for limit in fitting))


def _limits_of(site: Site, queue: str) -> list[Limit]:
    return [limit for limit in site.job.limits if limit.queue == queue]


def _exceeded_limits(limit: Limit, nodes: int, time_s: int, jobs: int) -> Sequence[str]:
    exceeded = []
    if limit.nodes and not limit.nodes[0] <= nodes <= limit.nodes[1]:
        exceeded.append(f"accepts {limit.nodes[0]} to {limit.nodes[1]} nodes")
    if limit.hours is not None and time_s > limit.hours * 3600:
        exceeded.append(f"accepts at most {clock_with_days(int(limit.hours * 3600))} of wall time")
    if limit.jobs is not None and jobs > limit.jobs:
        exceeded.append(f"accepts at most {count_noun(limit.jobs, 'job')} per user at a time")
    return exceeded


def _job(nodes: int, time_s: int, jobs: int) -> str:
    size = f"{count_noun(nodes, 'node')} for {clock_with_days(time_s)}"
    return f"{jobs} jobs of {size} each" if jobs > 1 else size
