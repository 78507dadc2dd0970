"""Build srun command lines inside a Slurm job."""

from __future__ import annotations

from pathlib import Path

from ezpz_llm.launch.dialects.work import MAX_INLINE_HOSTS, Built, Work, mask, validate_command


def build(program: str, work: Work) -> Built:
    """Return an srun command line that starts one step.

    Explicit options override the SLURM_* variables of a job script or an outer step, which srun reads as options.

    `-c`: since Slurm 22.05, srun ignores the job's --cpus-per-task and would give each rank one core.
    `--overlap`: the step shares the job's resources, so that it can start inside an interactive step and beside
    other launches of the job.
    `--export=ALL`: without it, `sbatch --export=NONE` would also apply to steps.
    `--wait=0` and `--kill-on-bad-exit=0`: launch itself ends the peers of a failed rank, after a grace period in
    which they can report errors.
    `--input=0`: srun sends stdin to rank 0 only. By default it goes to all ranks, and blocks if some do not
    read it.
    The MPI plugin is left to the site (MpiDefault) or the user (SLURM_MPI_TYPE). launch does not need it to number
    the ranks.
    """
    validate_command(program, work)
    size = ("-n", str(work.placement.world_size))
    if work.placement.uniform:
        argv = [program, "-N", str(len(work.hosts)), *size, "--ntasks-per-node", str(work.placement.most),
                "--distribution=block"]
        nodes = list(work.hosts)
    else:
        # Unequal numbers of ranks require a list that names a node once per rank. srun 23.11 and newer reject -N
        # with it.
        argv = [program, *size, "--distribution=arbitrary"]
        nodes = [name for name, count in work.placement.ranks for _ in range(count)]
    argv += ["-c", str(work.cores_per_rank or 1), *_cpu_bind(work), *_overcommit(work), *_devices(work),
             "--overlap", "--export=ALL", "--wait=0", "--kill-on-bad-exit=0", "--input=0"]
    files: dict[Path, str] = {}
    if len(nodes) > MAX_INLINE_HOSTS:
        files = work.node_list_file(nodes)
        # srun reads a list that contains a slash as a file name.
        argv += ["--nodelist", str(work.node_list_path.absolute())]
    else:
        argv += ["--nodelist", ",".join(nodes)]
    return Built((*argv, *work.site_options, *work.command), files=files)


def _devices(work: Work) -> tuple[str, ...]:
    # State the devices per node: in a job with `-G 4` on two nodes, Slurm 22.05 gave an overlapping step one device
    # on the first node and two on the second.
    set_by_site = any("--gpu" in word for word in work.site_options)
    if set_by_site or not work.env.get("SLURM_GPUS") or not work.devices_per_host:
        return ()
    return (f"--gpus={work.devices_per_host * len(work.hosts)}", f"--gpus-per-node={work.devices_per_host}")


def _overcommit(work: Work) -> tuple[str, ...]:
    # Without it srun rejects more ranks than CPUs.
    return ("--overcommit",) if work.cores_per_node and work.placement.most > work.cores_per_node else ()


def _cpu_bind(work: Work) -> tuple[str, ...]:
    # Without --cpu-bind, a step inside a step would inherit the binding of the outer one (SLURM_CPU_BIND).
    if work.binding.kind == "list":
        return (f"--cpu-bind=mask_cpu:{','.join(map(mask, work.binding.cores))}",)
    return ("--cpu-bind=cores",) if work.binding.kind == "depth" else ("--cpu-bind=none",)
