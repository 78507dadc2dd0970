"""Open MPI 4 and 5."""

from __future__ import annotations

from ezpz_llm.launch.dialects.work import HOSTS_ON_THE_LINE, Built, Work


def build(program: str, work: Work) -> Built:
    """Our own count of ranks a host decides, not the slots that Open MPI would derive from cores; nor does it
    bind, since it would put each of two ranks on one core whatever their threads."""
    ranks = work.placement.ranks
    argv = [program, "-n", str(work.placement.world_size)]
    files = {}
    if len(ranks) > HOSTS_ON_THE_LINE:
        files[work.hosts_file] = "".join(f"{name} slots={count}\n" for name, count in ranks)
        argv += ["--hostfile", str(work.hosts_file)]
    else:
        names = [("localhost", count) for _, count in ranks] if work.here else ranks
        argv += ["--host", ",".join(f"{name}:{count}" for name, count in names)]
    mapping = f"ppr:{work.placement.most}:node" if work.placement.uniform else "slot"
    argv += ["--map-by", f"{mapping}:OVERSUBSCRIBE", "--bind-to", "none"]
    if not work.here:
        # Ranks on other hosts get none of this environment but what is named.
        argv += [word for name in work.variables for word in ("-x", name)]
    env = {}
    if work.as_root:
        why = "Open MPI refuses root without it"
        env = {"OMPI_ALLOW_RUN_AS_ROOT": ("1", why), "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": ("1", why)}
    return Built((*argv, *work.command), env, files)
