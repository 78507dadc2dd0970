"""Hydra: mpiexec of MPICH and of Intel MPI."""

from __future__ import annotations

from ezpz_llm.launcher.basics.hostlist import expand_numbers
from ezpz_llm.launcher.jobs.schedulers.slurm import EXTERNAL_LAUNCHER
from ezpz_llm.launcher.planning.dialects.srun_devices import daemon_options
from ezpz_llm.launcher.planning.dialects.work import (
    MAX_INLINE_HOSTS,
    REMOTE_SHELL,
    Built,
    Work,
    mask,
    validate_command,
)

_USER_VARIABLES = ("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP",
                   "I_MPI_HYDRA_BOOTSTRAP_EXEC")
"""Variables with which the user chooses how Hydra starts its proxies.

If one is set, launch passes no options for that, since ssh, for example, would reject srun's.
"""


def build_mpich(program: str, work: Work) -> Built:
    """Return a command line for MPICH, with one CPU set per local rank in `-bind-to user:`.

    MPICH binds nothing by default.
    """
    bind: tuple[str, ...] = ()
    if work.binding.kind != "none" and work.binding.cores:
        # "+" joins the CPUs of one rank. Only MPICH 5 also accepts ranges.
        sets = ("+".join(map(str, expand_numbers(cores))) for cores in work.binding.cores)
        bind = ("-bind-to", f"user:{','.join(sets)}")
    env = {}
    if _starts_by_srun(work):
        env["HYDRA_LAUNCHER_EXTRA_ARGS"] = daemon_options(work)
    elif shell := _remote_shell(work):
        bind = ("-launcher", "rsh", "-launcher-exec", shell[0], *bind)
        if shell[1:]:
            env["HYDRA_LAUNCHER_EXTRA_ARGS"] = (" ".join(shell[1:]), REMOTE_SHELL)
    env |= _without_srun_options(work, "HYDRA_LAUNCHER_EXTRA_ARGS", ("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP"))
    return _build(program, work, bind, env)


def build_intel(program: str, work: Work) -> Built:
    """Return a command line for Intel MPI, with one mask per local rank in I_MPI_PIN_DOMAIN.

    Intel MPI ignores `-bind-to user:`. By default it pins each rank to a part of the node that it chooses itself.
    """
    domains = [mask(cores) for cores in work.binding.cores] if work.binding.kind != "none" else []
    # Intel MPI rejects more domains than ranks on any node.
    if domains and work.placement.uniform:
        env = {"I_MPI_PIN_DOMAIN": (f"[{','.join(domains)}]", work.binding.source)}
    else:
        env = {"I_MPI_PIN": ("off", work.binding.source)}
    launcher: tuple[str, ...] = ()
    if _starts_by_srun(work):
        # Intel MPI's default is ssh even in a Slurm job, where nodes may not allow it.
        launcher = ("-bootstrap", "slurm")
        env["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = daemon_options(work)
    elif shell := _remote_shell(work):
        launcher = ("-bootstrap", "rsh", "-bootstrap-exec", shell[0])
        if shell[1:]:
            env["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = (" ".join(shell[1:]), REMOTE_SHELL)
    env |= _without_srun_options(work, "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS", ("I_MPI_HYDRA_BOOTSTRAP",))
    return _build(program, work, launcher, env)


def _starts_by_srun(work: Work) -> bool:
    return not work.here and work.starts_daemons_by_srun and not _is_users_choice(work)


def _remote_shell(work: Work) -> tuple[str, ...]:
    return () if _is_users_choice(work) else work.remote_shell


def _without_srun_options(work: Work, variable: str, launchers: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Clear the options that Slurm sets in a job for Hydra's srun, if the user chose ssh or another launcher."""
    chosen = next(filter(None, map(work.env.get, launchers)), "slurm")
    if chosen == "slurm" or work.env.get(variable) != EXTERNAL_LAUNCHER:
        return {}
    return {variable: ("", f"{chosen} would reject srun's option {EXTERNAL_LAUNCHER}")}


def _is_users_choice(work: Work) -> bool:
    return any(work.env.get(name) for name in _USER_VARIABLES)


def _build(program: str, work: Work, options: tuple[str, ...], env: dict[str, tuple[str, str]]) -> Built:
    """Build the command line with explicit ranks per node.

    Without them MPICH places ranks round-robin, and Intel MPI fills the first node.
    """
    validate_command(program, work)
    argv = [program, "-n", str(work.placement.world_size)]
    ranks = work.placement.ranks
    files = {}
    if work.placement.uniform:
        argv += ["-ppn", str(work.placement.most)]
        hosts = [name for name, _ in ranks]
    else:
        hosts = [f"{name}:{count}" for name, count in ranks]
    # Intel MPI accepts host:count only in a file.
    if len(hosts) > MAX_INLINE_HOSTS or not work.placement.uniform:
        files = work.node_list_file(hosts)
        argv += ["-f", str(work.node_list_path)]
    elif not work.here:
        argv += ["-hosts", ",".join(hosts)]
    else:
        # By default Hydra asks the scheduler for nodes, of which the first may not be this node.
        argv += ["-launcher", "fork", "-hosts", "localhost"]
    return Built((*argv, *options, "-genvall", *work.site_options, *work.command), env, files)
