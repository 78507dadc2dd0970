"""Build srun command lines inside a Slurm job."""

from __future__ import annotations

from pathlib import Path

from ezpz_llm.launcher.planning.dialects.srun_devices import rank_devices
from ezpz_llm.launcher.planning.dialects.work import MAX_INLINE_HOSTS, Built, Work, mask, validate_command


def build(program: str, work: Work) -> Built:
    """Return an srun command line that starts one step.

    Explicit options override the SLURM_* variables of a job script or an outer step, which srun reads as options.

    `-c`: since Slurm 22.05, srun ignores the job's --cpus-per-task and would give each rank one core. If the job's
    CPUs are unknown, the step gets all of them, and ranks are not bound.
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
    cores = ("-c", str(work.cores_per_rank)) if work.cores_per_rank else ()
    argv += [*cores, *_cpu_bind(work), *_overcommit(work), *rank_devices(work),
             "--overlap", "--export=ALL", "--wait=0", "--kill-on-bad-exit=0", "--input=0"]
    files: dict[Path, str] = {}
    if len(nodes) > MAX_INLINE_HOSTS:
        files = work.node_list_file(nodes)
        # srun reads a list that contains a slash as a file name.
        argv += ["--nodelist", str(work.node_list_path.absolute())]
    else:
        argv += ["--nodelist", ",".join(nodes)]
    return Built((*argv, *work.site_options, *work.command), files=files)


def _overcommit(work: Work) -> tuple[str, ...]:
    # Without it srun rejects more ranks than CPUs.
    return ("--overcommit",) if work.cores_per_node and work.placement.most > work.cores_per_node else ()


def _cpu_bind(work: Work) -> tuple[str, ...]:
    # Without --cpu-bind, a step inside a step would inherit the binding of the outer one (SLURM_CPU_BIND).
    if work.binding.kind == "list":
        return (f"--cpu-bind=mask_cpu:{','.join(map(mask, work.binding.cores))}",)
    return ("--cpu-bind=cores",) if work.binding.kind == "depth" else ("--cpu-bind=none",)
