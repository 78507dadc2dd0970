"""Open MPI 4 and 5."""

from __future__ import annotations

from ezpz_llm.launch.addresses import is_among
from ezpz_llm.launch.dialects.work import (
    HOSTS_ON_THE_LINE,
    REMOTE_SHELL,
    SRUN_OVERLAP,
    Built,
    Work,
    logical_cores,
    refuse_unspeakable,
)
from ezpz_llm.launch.hostlist import expand_numbers, fold_numbers


def build_4(program: str, work: Work) -> Built:
    """Open MPI 4: a rank file in `--rankfile`."""
    return _build(program, work, ("--rankfile", "{}"), "OMPI_MCA_plm_slurm_args", "OMPI_MCA_plm_rsh_agent")


def build_5(program: str, work: Work) -> Built:
    """Open MPI 5: a rank file as a way of mapping. Without `--bind-to core`, OVERSUBSCRIBE would undo its cores."""
    mapping = ("--map-by", "rankfile:file={}:OVERSUBSCRIBE", "--bind-to", "core")
    return _build(program, work, mapping, "PRTE_MCA_plm_slurm_args", "PRTE_MCA_plm_ssh_agent")


def _build(program: str, work: Work, rank_file_words: tuple[str, ...], slurm_words: str, agent: str) -> Built:
    """Our own count of ranks a host decides, not the slots that Open MPI would derive from cores; nor does it
    bind by itself, since it would put each of two ranks on one core whatever their threads."""
    refuse_unspeakable(program, work)
    # A host of a Slurm job is not found in it by another name.
    is_alone = work.here and not work.starts_daemons_by_srun
    ranks = tuple(("localhost", count) for _, count in work.placement.ranks) if is_alone else work.placement.ranks
    argv = [program, "-n", str(work.placement.world_size)]
    files = {}
    if len(ranks) > HOSTS_ON_THE_LINE:
        files = work.file_of_hosts([f"{name} slots={count}" for name, count in ranks])
        argv += ["--hostfile", str(work.hosts_file)]
    else:
        argv += ["--host", ",".join(f"{name}:{count}" for name, count in ranks)]
    if work.binding.kind != "none" and work.binding.cores:
        rank_file = work.hosts_file.with_name("rankfile")
        files[rank_file] = _rank_file(ranks, work.binding.cores)
        argv += [word.format(rank_file) for word in rank_file_words]
    else:
        mapping = f"ppr:{work.placement.most}:node" if work.placement.uniform else "slot"
        argv += ["--map-by", f"{mapping}:OVERSUBSCRIBE", "--bind-to", "none"]
    env = {}
    if not work.here:
        # Ranks on other hosts get none of this environment but what is named.
        argv += [word for name in work.variables for word in ("-x", name)]
        if work.starts_daemons_by_srun:
            env[slurm_words] = SRUN_OVERLAP
        elif shell := work.remote_shell:
            env[agent] = (" ".join(shell), REMOTE_SHELL)
    if work.as_root:
        why = "Open MPI refuses root without it"
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": ("1", why), "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": ("1", why)}
    return Built((*argv, *work.site_options, *work.command), env, files)


def _rank_file(ranks: tuple[tuple[str, int], ...], cores: tuple[str, ...]) -> str:
    # Its slots are cores by hwloc's count, not CPUs by the system's; hosts of a reservation are taken to be alike.
    # A login node is none of them: there the numbers are the site's, which are cores already.
    count = logical_cores() if is_among([name for name, _ in ranks]) else {}
    slots = [fold_numbers(count.get(number, number) for number in expand_numbers(own)) for own in cores]
    places = [f"{name} slot={slots[local_rank]}" for name, number in ranks for local_rank in range(number)]
    return "".join(f"rank {rank}={place}\n" for rank, place in enumerate(places))
