"""`flux run`, inside a Flux instance.

Source: https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man1/flux-run.html and
man7/flux-shell-options.html (flux-core 0.88).
"""

from __future__ import annotations

from ezpz_llm.base import UserError
from ezpz_llm.launch.dialects.work import Built, Work, refuse_unspeakable
from ezpz_llm.launch.hostlist import fold_hosts


def build(program: str, work: Work) -> Built:
    """One job of the instance, on whole hosts (`--exclusive`): ranks may be more than cores, and see all devices.

    `exit-timeout=none`: by itself Flux ends the others 30 s after the first rank has ended; launch does that.
    `gpu-affinity=off`: each rank takes its device by its local rank, as under other launchers; peers stay visible.
    `--input=0`: unread input would block the others.

    Raises:
        UserError: ranks a host that Flux does not deal so: evenly, and one more on the first hosts.
    """
    refuse_unspeakable(program, work)
    nodes, counts = len(work.hosts), [count for _, count in work.placement.ranks]
    argv = [program, "run", f"--nodes={nodes}"]
    if work.placement.uniform:
        argv += [f"--tasks-per-node={work.placement.most}"]
    else:
        share, more = divmod(work.placement.world_size, nodes)
        if counts != [share + 1] * more + [share] * (nodes - more):
            raise UserError(f"Flux deals ranks to hosts evenly, and these hosts would get {counts[:8]}",
                            where=work.placement.source, instead="--ppn, with the same number for every host")
        argv += [f"--ntasks={work.placement.world_size}"]
    argv += ["--exclusive", f"--requires=hosts:{fold_hosts(work.hosts)}", *_affinity(work),
             "-o", "gpu-affinity=off", "-o", "exit-timeout=none", "--input=0"]
    return Built((*argv, *work.site_options, *work.command))


def _affinity(work: Work) -> tuple[str, ...]:
    # By itself it keeps a rank to the cores of the job, which are all of the host's.
    how = f"map:{';'.join(work.binding.cores)}" if work.binding.kind == "list" else "off"
    return ("-o", f"cpu-affinity={how}")
