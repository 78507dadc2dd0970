"""Hydra: mpiexec of MPICH and of Intel MPI."""

from __future__ import annotations

from ezpz_llm.launch.dialects.work import HOSTS_ON_THE_LINE, Built, Work


def build(program: str, work: Work) -> Built:
    """Ranks a host are always stated: without them MPICH deals ranks round, Intel MPI fills the first host."""
    argv = [program, "-n", str(work.placement.world_size)]
    ranks = work.placement.ranks
    files = {}
    if work.placement.uniform:
        argv += ["-ppn", str(work.placement.most)]
        hosts = [name for name, _ in ranks]
    else:
        hosts = [f"{name}:{count}" for name, count in ranks]
    # Intel MPI reads host:count in a file only.
    if len(hosts) > HOSTS_ON_THE_LINE or not work.placement.uniform:
        files[work.hosts_file] = "".join(f"{host}\n" for host in hosts)
        argv += ["-f", str(work.hosts_file)]
    elif not work.here:
        argv += ["-hosts", ",".join(hosts)]
    return Built((*argv, "-genvall", *work.command), files=files)
