"""srun, inside a Slurm job."""

from __future__ import annotations

from pathlib import Path

from ezpz_llm.launch.dialects.work import HOSTS_ON_THE_LINE, Built, Work, mask, refuse_unspeakable


def build(program: str, work: Work) -> Built:
    """One step. Whatever a job script or an outer step left in SLURM_* variables that srun reads as options is
    overridden by words of our own:

    `-c` is always given: since 22.05 srun ignores the job's own, and each rank would get one core.
    `--overlap`: the step shares the job's resources with others, so that it starts inside an interactive step and
    beside other launches of the job. `--export=ALL`: `sbatch --export=NONE` holds for steps too.
    `--wait=0` and `--kill-on-bad-exit=0`: ranks that ended do not end their peers here, since launch does that
    itself, after a grace that lets them report. `--input=0`: only rank 0 reads, and unread input would block.
    The MPI plug-in stays the site's (MpiDefault) or the user's (SLURM_MPI_TYPE): ranks are numbered without it.
    """
    refuse_unspeakable(program, work)
    argv = [program, "-N", str(len(work.hosts)), "-n", str(work.placement.world_size)]
    if work.placement.uniform:
        argv += ["--ntasks-per-node", str(work.placement.most), "--distribution=block"]
        words = list(work.hosts)
    else:
        # Only a list that names a host once a rank places unequal numbers of ranks.
        argv += ["--distribution=arbitrary"]
        words = [name for name, count in work.placement.ranks for _ in range(count)]
    argv += ["-c", str(work.cores_per_rank or 1), *_cpu_bind(work), *_crowded(work), *_devices(work), "--overlap",
             "--export=ALL", "--wait=0", "--kill-on-bad-exit=0", "--input=0"]
    files: dict[Path, str] = {}
    if len(words) > HOSTS_ON_THE_LINE:
        files = work.file_of_hosts(words)
        # srun takes a list with a slash in it for a file's name.
        argv += ["--nodelist", str(work.hosts_file.absolute())]
    else:
        argv += ["--nodelist", ",".join(words)]
    return Built((*argv, *work.site_options, *work.command), files=files)


def _devices(work: Work) -> tuple[str, ...]:
    # Of a job's `-G 4` on two hosts, an overlapping step saw one device on the first and two on the second (22.05).
    is_spoken = any("--gpu" in word for word in work.site_options)
    if is_spoken or not work.env.get("SLURM_GPUS") or not work.devices_per_host:
        return ()
    return (f"--gpus={work.devices_per_host * len(work.hosts)}", f"--gpus-per-node={work.devices_per_host}")


def _crowded(work: Work) -> tuple[str, ...]:
    # More ranks than CPUs are refused unless one asks for it.
    return ("--overcommit",) if work.cores_per_host and work.placement.most > work.cores_per_host else ()


def _cpu_bind(work: Work) -> tuple[str, ...]:
    # Unsaid, a step inside a step would inherit the outer one's cores (SLURM_CPU_BIND).
    if work.binding.kind == "list":
        return (f"--cpu-bind=mask_cpu:{','.join(map(mask, work.binding.cores))}",)
    return ("--cpu-bind=cores",) if work.binding.kind == "depth" else ("--cpu-bind=none",)
