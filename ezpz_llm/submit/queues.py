"""Choice of a site's queue for a job, by the limits that its file names."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.base import UserError, counted
from ezpz_llm.launch.schedulers.scheduler import clock_with_days
from ezpz_llm.launch.sites import Limit, Site


def choose_queue(site: Site, wanted: str | None, nodes: int, time_s: int, jobs: int) -> str | None:
    """The queue that the user `wanted`; else the site's own, if its limits take a job of so many nodes and seconds,
    `jobs` times; else the first of its queues that does. A queue without limits takes every job.

    Raises:
        UserError: the queue that was wanted, or each of the site's, does not take it; with the broken limit.
    """
    queues = list(dict.fromkeys([*filter(None, [site.job.queue]), *(limit.queue for limit in site.job.limits)]))
    taking = [queue for queue in queues if _takes(site, queue, nodes, time_s, jobs)]
    if wanted is None:
        if taking or not queues:
            return taking[0] if taking else None
        raise UserError(f"no queue of {site.name} takes {_job(nodes, time_s, jobs)}: "
                        + "; ".join(f"{queue} {_broken(site, queue, nodes, time_s, jobs)}" for queue in queues),
                        where=f"the limits in the file of site {site.name}",
                        instead="--nodes, --time or --chain within them, or a --queue that the file does not name")
    if wanted in queues and wanted not in taking:
        others = f"--queue {' or '.join(taking)}, or " if taking else ""
        raise UserError(f"queue {wanted} of {site.name} does not take {_job(nodes, time_s, jobs)}: it "
                        + _broken(site, wanted, nodes, time_s, jobs),
                        where=f"the limits in the file of site {site.name}",
                        instead=f"{others}--nodes, --time or --chain within them")
    return wanted


def _takes(site: Site, queue: str, nodes: int, time_s: int, jobs: int) -> bool:
    rows = _rows(site, queue)
    return not rows or any(not _breaks(limit, nodes, time_s, jobs) for limit in rows)


def _broken(site: Site, queue: str, nodes: int, time_s: int, jobs: int) -> str:
    """What each row of the queue says against the job; of several rows, those for so many nodes count."""
    rows = _rows(site, queue)
    fitting = [limit for limit in rows if not _breaks(limit, nodes, 0, 0)] or rows
    return ", or ".join(dict.fromkeys(" and ".join(_breaks(limit, nodes, time_s, jobs)) for limit in fitting))


def _rows(site: Site, queue: str) -> list[Limit]:
    return [limit for limit in site.job.limits if limit.queue == queue]


def _breaks(limit: Limit, nodes: int, time_s: int, jobs: int) -> Sequence[str]:
    broken = []
    if limit.nodes and not limit.nodes[0] <= nodes <= limit.nodes[1]:
        broken.append(f"takes {limit.nodes[0]} to {limit.nodes[1]} nodes")
    if limit.hours is not None and time_s > limit.hours * 3600:
        broken.append(f"takes {clock_with_days(int(limit.hours * 3600))} at most")
    if limit.jobs is not None and jobs > limit.jobs:
        broken.append(f"takes {counted(limit.jobs, 'job')} of a user at a time")
    return broken


def _job(nodes: int, time_s: int, jobs: int) -> str:
    times = f", {jobs} times" if jobs > 1 else ""
    return f"{counted(nodes, 'node')} for {clock_with_days(time_s)}{times}"
