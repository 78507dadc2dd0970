"""srun, inside a Slurm job."""

from __future__ import annotations

from ezpz_llm.launch.dialects.work import HOSTS_ON_THE_LINE, Built, Work


def build(program: str, work: Work) -> Built:
    """`-c` is always given: since 22.05 srun ignores the job's own, and each rank would get one core. A failing
    rank does not end its peers here, since launch does that itself, after a grace that lets them report."""
    ranks = work.placement.ranks
    argv = [program, "-N", str(len(ranks)), "-n", str(work.placement.world_size)]
    if work.placement.uniform:
        argv += ["--ntasks-per-node", str(work.placement.most)]
    argv += ["-c", str(work.cores_per_rank or 1), "--kill-on-bad-exit=0"]
    files = {}
    if len(ranks) > HOSTS_ON_THE_LINE:
        files[work.hosts_file] = "".join(f"{name}\n" for name, _ in ranks)
        # srun takes a list with a slash in it for a file's name.
        argv += ["--nodelist", str(work.hosts_file.absolute())]
    else:
        argv += ["--nodelist", ",".join(name for name, _ in ranks)]
    return Built((*argv, *work.command), files=files)
