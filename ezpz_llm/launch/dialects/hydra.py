"""Hydra: mpiexec of MPICH and of Intel MPI."""

from __future__ import annotations

from ezpz_llm.launch.dialects.work import (
    HOSTS_ON_THE_LINE,
    REMOTE_SHELL,
    SRUN_OVERLAP,
    Built,
    Work,
    mask,
    refuse_unspeakable,
)
from ezpz_llm.launch.hostlist import expand_numbers

_USERS_OWN = ("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP",
              "I_MPI_HYDRA_BOOTSTRAP_EXEC")
"""By these a user says how proxies are started (ssh would not take srun's options)."""


def build_mpich(program: str, work: Work) -> Built:
    """MPICH: binding in `-bind-to user:`, one set of CPUs a local rank; it binds to nothing by itself."""
    bind: tuple[str, ...] = ()
    if work.binding.kind != "none" and work.binding.cores:
        # "+" joins the CPUs of one rank; only MPICH 5 reads ranges too.
        sets = ("+".join(map(str, expand_numbers(cores))) for cores in work.binding.cores)
        bind = ("-bind-to", f"user:{','.join(sets)}")
    env = {}
    if _starts_by_srun(work):
        env["HYDRA_LAUNCHER_EXTRA_ARGS"] = SRUN_OVERLAP
    elif shell := _remote_shell(work):
        bind = ("-launcher", "rsh", "-launcher-exec", shell[0], *bind)
        if shell[1:]:
            env["HYDRA_LAUNCHER_EXTRA_ARGS"] = (" ".join(shell[1:]), REMOTE_SHELL)
    return _build(program, work, bind, env)


def build_intel(program: str, work: Work) -> Built:
    """Intel MPI: binding in I_MPI_PIN_DOMAIN, one mask a local rank. It ignores `-bind-to user:`, and by itself
    it pins each rank to a share of the host of its own reckoning."""
    domains = [mask(cores) for cores in work.binding.cores] if work.binding.kind != "none" else []
    # It refuses more domains than a host has ranks, for each host.
    if domains and work.placement.uniform:
        env = {"I_MPI_PIN_DOMAIN": (f"[{','.join(domains)}]", work.binding.source)}
    else:
        env = {"I_MPI_PIN": ("off", work.binding.source)}
    launcher: tuple[str, ...] = ()
    if _starts_by_srun(work):
        # Its own choice is ssh even inside a Slurm job, where hosts need not allow it.
        launcher = ("-bootstrap", "slurm")
        env["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = SRUN_OVERLAP
    elif shell := _remote_shell(work):
        launcher = ("-bootstrap", "rsh", "-bootstrap-exec", shell[0])
        if shell[1:]:
            env["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = (" ".join(shell[1:]), REMOTE_SHELL)
    return _build(program, work, launcher, env)


def _starts_by_srun(work: Work) -> bool:
    return not work.here and work.starts_daemons_by_srun and not _is_users_choice(work)


def _remote_shell(work: Work) -> tuple[str, ...]:
    return () if _is_users_choice(work) else work.remote_shell


def _is_users_choice(work: Work) -> bool:
    return any(work.env.get(name) for name in _USERS_OWN)


def _build(program: str, work: Work, options: tuple[str, ...], env: dict[str, tuple[str, str]]) -> Built:
    """Ranks a host are always stated: without them MPICH deals ranks round, Intel MPI fills the first host."""
    refuse_unspeakable(program, work)
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
        files = work.file_of_hosts(hosts)
        argv += ["-f", str(work.hosts_file)]
    elif not work.here:
        argv += ["-hosts", ",".join(hosts)]
    else:
        # It would ask the scheduler, whose first host need not be this one.
        argv += ["-launcher", "fork", "-hosts", "localhost"]
    return Built((*argv, *options, "-genvall", *work.site_options, *work.command), env, files)
