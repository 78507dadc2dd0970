"""`flux run`, inside a Flux instance.

Source: https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man1/flux-run.html and
man7/flux-shell-options.html (flux-core 0.88).
"""

from __future__ import annotations

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.basics.hostlist import fold_hostnames
from ezpz_llm.launcher.planning.dialects.work import Built, Work, validate_command


def build(program: str, work: Work) -> Built:
    """Return a `flux run` command line: one job of the instance on whole nodes.

    `--exclusive`: there may be more ranks than cores, and ranks see all devices.
    `exit-timeout=none`: by default Flux ends the other ranks 30 s after the first has ended; launch does that.
    `gpu-affinity=off`: each rank selects its device by local rank, as under other launchers; all stay visible.
    `--input=0`: only rank 0 reads stdin, because unread input would block the other ranks.

    Raises:
        UserError: Flux cannot place the ranks: it spreads them evenly, with the remainder on the first nodes.
    """
    validate_command(program, work)
    nodes, counts = len(work.hosts), [count for _, count in work.placement.ranks]
    argv = [program, "run", f"--nodes={nodes}"]
    if work.placement.uniform:
        argv += [f"--tasks-per-node={work.placement.most}"]
    else:
        share, more = divmod(work.placement.world_size, nodes)
        if counts != [share + 1] * more + [share] * (nodes - more):
            raise UserError(f"Flux spreads ranks over nodes evenly and cannot place {counts[:8]} ranks per node",
                            where=work.placement.source, instead="--ppn, with the same number for every node")
        argv += [f"--ntasks={work.placement.world_size}"]
    argv += ["--exclusive", f"--requires=hosts:{fold_hostnames(work.hosts)}", *_affinity(work),
             "-o", "gpu-affinity=off", "-o", "exit-timeout=none", "--input=0"]
    return Built((*argv, *work.site_options, *work.command))


def _affinity(work: Work) -> tuple[str, ...]:
    # With "off", a rank may use all cores of the job, which are all cores of the node.
    how = f"map:{';'.join(work.binding.cores)}" if work.binding.kind == "list" else "off"
    return ("-o", f"cpu-affinity={how}")
