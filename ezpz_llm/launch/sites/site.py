"""A site: what a launch and a job must know of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Job:
    """What job scripts need. `directives` are whole lines ("#PBS -l select={nodes}:system=polaris") in which submit
    replaces {nodes}, {time}, {account}, {queue}, {reservation} and {devices}; a directive of submit's own about the
    same subject gives way to them. `queue` is taken where the user names none. `setup` are shell lines before
    the run, such as module loads."""

    directives: tuple[str, ...] = ()
    queue: str | None = None
    setup: tuple[str, ...] = ()


@dataclass(frozen=True)
class Site:
    """Facts of a machine; every default means "nothing special".

    Args:
        name: the file's name without `.toml`.
        source: who said that this is the site: an option, a variable, a guess and what it rests on.
        scheduler: "pbs" or "slurm".
        launcher: "mpiexec" or "srun", what `--launcher auto` becomes in a job.
        dialect: of an mpiexec whose version text is not recognised; "pals".
        devices_per_host: accelerators that ranks see on a host.
        cores: the cores of each NUMA domain ("0-51", "52-103"), those that ranks may be bound to.
        sockets: how many the domains of `cores` are evenly on.
        threads_per_core: how many CPUs the site's launcher counts for one core.
        reserved_cores: cores that belong to the system ("0,52").
        binding: "list" (each rank's cores spelled out), "depth" (a number of cores a rank), "none", "auto".
        device_domains: for each device the domain it is attached to, by position in `cores`; ranks get cores, or
            under "depth" devices, so that both are in one domain.
        interface: of the network that ranks meet and talk on ("hsn0"; several joined by commas).
        master_suffix: what turns a host's short name into one on that network.
        network: what the communication library should report to have chosen.
        env: variables set for ranks unless the user set them.
        options: more words for a launcher, by its name.
        notes: about the file: keys in it that are no longer read.
        stage: how an environment is copied to each host: "sbcast" or "mpi".
    """

    name: str = "generic"
    source: str = "no site named or recognised"
    description: str = ""
    scheduler: str | None = None
    launcher: str | None = None
    dialect: str | None = None
    devices_per_host: int | None = None
    cores: tuple[str, ...] = ()
    sockets: int = 1
    threads_per_core: int = 1
    reserved_cores: str = ""
    binding: str = "auto"
    device_domains: tuple[int, ...] = ()
    interface: str | None = None
    master_suffix: str | None = None
    network: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    job: Job = field(default_factory=Job)
    stage: str | None = None
    notes: tuple[str, ...] = ()
