"""Checks of this machine for `ezpz-llm doctor`: its reservation, cores, memory, limits, disks and network."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ezpz_llm.base import UserError, cache_dir, counted
from ezpz_llm.check import software
from ezpz_llm.check.facts import host_facts, named_interfaces, numa_domains, room
from ezpz_llm.check.judge.gathered import Finding, format_bytes, judged
from ezpz_llm.check.judge.hosts import LEAST_MEMORY_A_RANK, LEAST_SHARED_MEMORY, LEAST_TEMPORARY
from ezpz_llm.launch.addresses import describe, is_loopback, missing_interface, own_interfaces, resolve
from ezpz_llm.launch.dialects import choose
from ezpz_llm.launch.hostlist import fold_numbers
from ezpz_llm.launch.schedulers import find_allocation, local
from ezpz_llm.launch.sites import find_site


def run_checks(env: Mapping[str, str]) -> list[Finding]:
    """All checks of this machine, in the order in which they are read; what is well has the level `ok`."""
    subjects = (software.software_checks, reservation_checks, machine_checks, network_checks, software.tool_checks)
    return [check for subject in subjects for check in subject(env)]


# The reservation: scheduler, job, launcher, site.
_COMMANDS = {"Slurm": ("sbatch", "srun"), "PBS": ("qsub", "qstat"), "Flux": ("flux",), "LSF": ("bsub", "bjobs")}


def reservation_checks(env: Mapping[str, str]) -> Iterator[Finding]:
    """The lines about where ranks would run."""
    yield available(env)
    try:
        allocation = find_allocation(env)
    except UserError as error:
        yield Finding("bad", "job", error.found, error.instead or "leave the job's shell and enter it again")
        return
    yield job(allocation.scheduler, allocation.job_id, len(allocation.hosts), allocation.ends_at)
    yield from (Finding("warn", "job", note, "see launch --dry-run hostname") for note in allocation.notes)
    yield site(env)
    yield launcher(env, allocation.scheduler)


def available(env: Mapping[str, str]) -> Finding:
    """Which scheduler's commands are here; that says nothing about being inside a job."""
    path = env.get("PATH", "")
    here = [f"{name} ({', '.join(found)})" for name, commands in _COMMANDS.items()
            if (found := [command for command in commands if shutil.which(command, path=path)])]
    return Finding("ok", "scheduler", " and ".join(here) or f"no commands of {', '.join(_COMMANDS)} on PATH")


def job(scheduler: str, job_id: str | None, hosts: int, ends_at: float | None) -> Finding:
    """The reservation that this shell stands in."""
    if job_id is None:
        inside = "not inside a job: launch uses this host alone" if scheduler == local.NAME else scheduler
        return Finding("ok", "job", inside)
    left = "" if ends_at is None else f", {max(0, ends_at - time.time()) / 60:.0f} min left"
    return Finding("ok", "job", f"inside {scheduler} job {job_id}: {counted(hosts, 'host')}{left}")


def site(env: Mapping[str, str]) -> Finding:
    """The machine, as far as it is known."""
    try:
        found = find_site(None, env)
    except UserError as error:
        return Finding("bad", "site", str(error.found), error.instead or f"mend {error.where}")
    return Finding("ok", "site", f"{found.name} ({found.source})")


def launcher(env: Mapping[str, str], scheduler: str) -> Finding:
    """What launch would start several ranks with."""
    try:
        found = choose("auto", scheduler, 2, env)
    except UserError as error:
        return Finding("bad", "launcher", error.found, error.instead or "")
    return Finding("ok", "launcher", f"{found.dialect} ({found.program}; {found.source})")


# The machine: cores, memory, limits, disks, the cache.
_LEAST_FILES = 4096
_LEAST_LOCKED = 2**26
_LONGEST_TMPDIR = 80
"""A UNIX socket's path ends at 107 characters, and programs put names of their own below the folder."""
_LEAST_CACHE, _GOOD_CACHE = 2**30, 10 * 2**30
_FABRICS = (Path("/dev/infiniband"), Path("/sys/class/cxi"), Path("/dev/hfi1_0"))
_REMOTE = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "panfs", "dvs")


def machine_checks(env: Mapping[str, str]) -> Iterator[Finding]:
    """The lines about the machine itself."""
    facts = host_facts()
    yield cores(facts["cores"], facts["host_cores"], numa_domains())
    memory = facts["memory"]
    yield enough("memory", memory["free"], memory["total"], LEAST_MEMORY_A_RANK, "end other processes")
    yield enough("/dev/shm", facts["shm"]["free"], facts["shm"]["total"], LEAST_SHARED_MEMORY,
                 "data loaders and NCCL die of SIGBUS without: docker --shm-size=8g, mount -o remount,size=…")
    yield from limits(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK),
                      any(path.exists() for path in _FABRICS))
    yield temporary(tempfile.gettempdir(), file_system(Path(tempfile.gettempdir())))
    yield cache(env)


def cores(own: list[int], all_of_them: list[int], domains: Mapping[str, list[int]]) -> Finding:
    """The cores that this process may use, and how they lie over NUMA domains."""
    touched = [name for name, members in domains.items() if set(members) & set(own)]
    found = f"{len(own)} of {len(all_of_them) or len(own)} ({fold_numbers(own)})"
    if len(domains) > 1:
        found += f", in {len(touched)} of {len(domains)} NUMA domains"
    return judged("cores", found,
                  (len(own) == 1 < len(all_of_them), "warn",
                   "this shell is bound to one core, and so is all it starts: srun -c, or taskset -p"))


def enough(name: str, free: int | None, total: int | None, least: int, instead: str) -> Finding:
    """Room of some kind, in bytes."""
    if free is None:
        return Finding("warn", name, "cannot be told")
    return judged(name, f"{format_bytes(free)} of {format_bytes(total)} free", (free < least, "warn", instead))


def limits(files: tuple[int, int], locked: tuple[int, int], has_fabric: bool) -> Iterator[Finding]:
    """What ulimit says: open files, and memory that may be locked (RDMA networks lock what they send).

    Args:
        files, locked: (soft, hard), as `resource.getrlimit` gives them.
    """
    unlimited = resource.RLIM_INFINITY
    # A soft limit can be raised up to the hard one.
    are_few = all(limit != unlimited and limit < _LEAST_FILES for limit in files)
    yield judged("limits", f"open files {_limit(files[0])} (up to {_limit(files[1])})",
                 (are_few, "warn", f"ask for a hard limit of {_LEAST_FILES} or more: many ranks, many sockets"))
    is_little = has_fabric and locked[0] != unlimited and locked[0] < _LEAST_LOCKED
    yield judged("limits", f"locked memory {'unlimited' if locked[0] == unlimited else format_bytes(locked[0])}",
                 (is_little, "warn", "ulimit -l unlimited: RDMA fails or falls back to TCP without"))


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def temporary(folder: str, kind: str) -> Finding:
    """The folder for temporary files: local, roomy, with a short name."""
    space = room(Path(folder))
    free, total = format_bytes(space["free"]), format_bytes(space["total"])
    found = f"{folder}, {kind or 'unknown file system'}, {free} of {total} free"
    return judged(
        "temporary", found,
        (len(folder) > _LONGEST_TMPDIR, "warn", "a shorter TMPDIR: sockets below it fail with 'path too long'"),
        (kind in _REMOTE, "warn", "a TMPDIR on the node's own disk or in memory: /tmp, /dev/shm"),
        (space["free"] is not None and space["free"] < LEAST_TEMPORARY, "warn", "make room there, or set TMPDIR"))


def file_system(folder: Path) -> str:
    """The kind of file system that `folder` is on; empty where it cannot be told."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    path = str(folder.resolve())
    under = [(where, kind) for _, where, kind, *_ in mounts
             if path == where or path.startswith(where.rstrip("/") + "/")]
    return max(under, key=lambda mount: len(mount[0]), default=("", ""))[1]


def cache(env: Mapping[str, str]) -> Finding:
    """The one folder outside run directories: can it be written, and is there room?"""
    folder = cache_dir(env)
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    space = room(there)
    found = f"{folder}, {file_system(there) or 'unknown file system'}, {format_bytes(space['free'])} free"
    free, can_write = space["free"], os.access(there, os.W_OK)
    room_instead = "make room, or EZPZ_LLM_CACHE=DIR: environments, token shards and built ops go there"
    return judged("cache", found + ", not writable" * (not can_write),
                  (not can_write, "bad", "EZPZ_LLM_CACHE=DIR names another place"),
                  (free is not None and free < _LEAST_CACHE, "bad", room_instead),
                  (free is not None and free < _GOOD_CACHE, "warn", room_instead))


# Interfaces, and what this host's own name means.
def network_checks(env: Mapping[str, str]) -> Iterator[Finding]:
    """The lines about the network."""
    own = own_interfaces()
    yield Finding("ok", "interfaces", describe(own))
    for variable, wanted in named_interfaces(env).items():
        if missing := missing_interface(variable, wanted, own):
            yield Finding("bad", "interfaces", f"{variable}={wanted}, but there is no {missing}",
                        f"{variable} with one of them, or unset it")
    yield host_name(socket.gethostname(), resolve(socket.gethostname()))


def host_name(name: str, address: str | None) -> Finding:
    """What the host's own name resolves to: ranks of other hosts that are sent there must find this one."""
    return judged("host name", f"{name} is {address}" if address else f"{name} does not resolve",
                  (address is None, "warn",
                   "runs on several hosts need launch --interface NAME, or an entry in /etc/hosts"),
                  (is_loopback(address or ""), "warn",
                   "runs on several hosts need launch --interface NAME: gloo would listen on the loopback"))
