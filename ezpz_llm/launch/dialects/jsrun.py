"""jsrun, of IBM's Job Step Manager, in LSF's jobs on Summit, Sierra and their like.

Sources: https://docs.olcf.ornl.gov/systems/summit_user_guide.html#job-launcher-jsrun and
https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=SSWRJV_10.1.0/jsm/jsrun.html
"""

from __future__ import annotations

from ezpz_llm.base import UserError
from ezpz_llm.launch.dialects.work import Built, Work, refuse_unspeakable
from ezpz_llm.launch.schedulers import lsf


def build(program: str, work: Work) -> Built:
    """One resource set a host, with all its cores and devices: each rank sees all devices, and takes the one of its
    local rank. jsrun takes the hosts of the job in their order; an explicit resource file, which could name others,
    is said by Summit's guide not to work. Cores are the shim's: each rank keeps to its own.

    Raises:
        UserError: unequal numbers of ranks a host, or hosts that are not the job's first ones.
    """
    refuse_unspeakable(program, work)
    if not work.placement.uniform:
        raise UserError("jsrun gives every host equally many ranks", where=work.placement.source,
                        instead="--ppn, with the same number for every host")
    job = lsf.detect(work.env)
    first = tuple(host.name for host in job.hosts[:len(work.hosts)]) if job else ()
    if first != work.hosts:
        raise UserError("jsrun starts ranks on the first hosts of the job, and these are "
                        f"{', '.join(first[:4]) or 'not known'}", where=work.placement.source,
                        instead="--nodes K for the first K hosts")
    sets, ranks = str(len(work.hosts)), str(work.placement.most)
    return Built((program, "--nrs", sets, "--rs_per_host", "1", "--tasks_per_rs", ranks, "--cpu_per_rs", "ALL_CPUS",
                  "--gpu_per_rs", "ALL_GPUS", "--launch_distribution", "packed",
                  "--bind", "none", *work.site_options, *work.command))
