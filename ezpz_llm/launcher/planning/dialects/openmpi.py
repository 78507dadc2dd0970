"""mpiexec of Open MPI 4 and 5."""

from __future__ import annotations

import os

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.basics.addresses import is_local_node_among
from ezpz_llm.launcher.basics.hostlist import expand_numbers, fold_numbers
from ezpz_llm.launcher.basics.variables import PATH_VARIABLE
from ezpz_llm.launcher.planning.dialects.srun_devices import daemon_options
from ezpz_llm.launcher.planning.dialects.work import (
    MAX_INLINE_HOSTS,
    REMOTE_SHELL,
    Built,
    Work,
    validate_command,
)
from ezpz_llm.launcher.planning.logical_cores import logical_cores


def build_4(program: str, work: Work) -> Built:
    """Return a command line for Open MPI 4, which passes explicit cores, if any, in a rank file by `--rankfile`.

    If its mpiexec is called by an absolute path, Open MPI 4 prepends its own folder to the PATH of ranks. From
    /usr/bin, that hides the Python of a virtual environment, so the shim restores the PATH.
    """
    path = work.env.get("PATH", os.defpath)
    built = _build(program, work._replace(variables=[*work.variables, PATH_VARIABLE]), ("--rankfile", "{}"),
                   "OMPI_MCA_plm_slurm_args", "OMPI_MCA_plm_rsh_agent")
    return built._replace(env={**built.env, PATH_VARIABLE: (path, "Open MPI 4 prepends its own folder to PATH")})


def build_5(program: str, work: Work) -> Built:
    """Return a command line for Open MPI 5, which passes explicit cores, if any, in a rank file by `--map-by`.

    Without `--bind-to core`, OVERSUBSCRIBE would override the cores in the rank file.

    Raises:
        UserError: the path of the rank file contains a colon.
    """
    if ":" in str(work.node_list_path) and work.binding.cores:
        raise UserError(f"Open MPI 5 cannot read a rank file in {work.node_list_path.parent}, because ':' separates"
                        " its options", where="--run-dir", instead="a run directory without ':', or --bind none")
    mapping = ("--map-by", "rankfile:file={}:OVERSUBSCRIBE", "--bind-to", "core")
    return _build(program, work, mapping, "PRTE_MCA_plm_slurm_args", "PRTE_MCA_plm_ssh_agent")


def _build(program: str, work: Work, rank_file_options: tuple[str, ...], slurm_variable: str,
           remote_shell_variable: str) -> Built:
    """Build the command line with explicit slots and binding.

    By default, Open MPI derives slots from cores, and binds each of up to two ranks to a single core even if
    the rank runs several threads.
    """
    validate_command(program, work)
    # In a Slurm job, Open MPI does not find this node under a name that Slurm does not use, such as localhost.
    is_alone = work.here and not work.starts_daemons_by_srun
    ranks = tuple(("localhost", count) for _, count in work.placement.ranks) if is_alone else work.placement.ranks
    argv = [program, "-n", str(work.placement.world_size)]
    files = {}
    if len(ranks) > MAX_INLINE_HOSTS:
        files = work.node_list_file([f"{name} slots={count}" for name, count in ranks])
        argv += ["--hostfile", str(work.node_list_path)]
    else:
        argv += ["--host", ",".join(f"{name}:{count}" for name, count in ranks)]
    if work.binding.kind != "none" and work.binding.cores:
        rank_file = work.node_list_path.with_name("rankfile")
        files[rank_file] = _rank_file(ranks, work.binding.cores)
        argv += [word.format(rank_file) for word in rank_file_options]
    else:
        mapping = f"ppr:{work.placement.most}:node" if work.placement.uniform else "slot"
        argv += ["--map-by", f"{mapping}:OVERSUBSCRIBE", "--bind-to", "none"]
    env = {}
    if not work.here:
        # Ranks on other nodes get only the variables that are named.
        argv += [word for name in work.variables for word in ("-x", name)]
        if work.starts_daemons_by_srun:
            env[slurm_variable] = daemon_options(work)
        elif shell := work.remote_shell:
            env[remote_shell_variable] = (" ".join(shell), REMOTE_SHELL)
    if work.as_root:
        reason = "Open MPI requires it to run as root"
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": ("1", reason), "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": ("1", reason)}
    return Built((*argv, *work.site_options, *work.command), env, files)


def _rank_file(ranks: tuple[tuple[str, int], ...], cores: tuple[str, ...]) -> str:
    # Slots are hwloc's core numbers, not Linux CPU numbers. The nodes of a job are assumed to be alike. On a login
    # node, which is not part of the job, the numbers come from the site file and are core numbers already.
    core_of_cpu = logical_cores() if is_local_node_among([name for name, _ in ranks]) else {}
    slots = [fold_numbers(core_of_cpu.get(cpu, cpu) for cpu in expand_numbers(rank_cores)) for rank_cores in cores]
    lines = [f"{name} slot={slots[local_rank]}" for name, number in ranks for local_rank in range(number)]
    return "".join(f"rank {rank}={line}\n" for rank, line in enumerate(lines))
