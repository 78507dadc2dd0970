"""jsrun of IBM's Job Step Manager, in LSF jobs on machines such as Summit and Sierra.

Sources: https://docs.olcf.ornl.gov/systems/summit_user_guide.html#job-launcher-jsrun and
https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=SSWRJV_10.1.0/jsm/jsrun.html
"""

from __future__ import annotations

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.jobs.schedulers.lsf import LsfScheduler
from ezpz_llm.launcher.planning.dialects.work import Built, Work, validate_command


def build(program: str, work: Work) -> Built:
    """Return a jsrun command line with one resource set per node, containing all of its cores and devices.

    Each rank sees all devices and selects one by its local rank. The rank shim binds ranks to cores. jsrun uses
    the job's nodes in order. An explicit resource file could name other nodes but, according to Summit's
    guide, does not work.

    Raises:
        UserError: nodes have unequal numbers of ranks, or are not the first nodes of the job.
    """
    validate_command(program, work)
    if not work.placement.uniform:
        raise UserError("jsrun requires the same number of ranks on every node", where=work.placement.source,
                        instead="--ppn, with the same number for every node")
    job = LsfScheduler().detect(work.env)
    first = tuple(host.name for host in job.hosts[:len(work.hosts)]) if job else ()
    if first != work.hosts:
        raise UserError("jsrun starts ranks only on the first nodes of the job, which are "
                        f"{', '.join(first[:4]) or 'unknown'}", where=work.placement.source,
                        instead="--nodes K for the first K nodes")
    sets, ranks = str(len(work.hosts)), str(work.placement.most)
    return Built((program, "--nrs", sets, "--rs_per_host", "1", "--tasks_per_rs", ranks, "--cpu_per_rs", "ALL_CPUS",
                  "--gpu_per_rs", "ALL_GPUS", "--launch_distribution", "packed",
                  "--bind", "none", *work.site_options, *work.command))
