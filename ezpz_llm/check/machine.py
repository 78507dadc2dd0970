"""Checks of this machine: cores, memory, limits, disks, the cache, network interfaces."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ezpz_llm.base.package_data import cache_dir
from ezpz_llm.check.facts.host import host_facts, numa_domains, room
from ezpz_llm.check.facts.network import named_interfaces
from ezpz_llm.check.judge.gathered import format_bytes
from ezpz_llm.check.judge.hosts import LEAST_MEMORY_A_RANK, LEAST_SHARED_MEMORY, LEAST_TEMPORARY
from ezpz_llm.check.reservation import Check
from ezpz_llm.launch.addresses import is_loopback, resolve
from ezpz_llm.launch.devices import core_ranges
from ezpz_llm.launch.interfaces import describe, missing_interface, own_interfaces

_LEAST_FILES = 4096
_LEAST_LOCKED = 2**26
_LONGEST_TMPDIR = 80
"""A UNIX socket's path ends at 107 characters, and programs put names of their own below the folder."""
_LEAST_CACHE, _GOOD_CACHE = 2**30, 10 * 2**30
_FABRICS = (Path("/dev/infiniband"), Path("/sys/class/cxi"), Path("/dev/hfi1_0"))
_REMOTE = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "panfs", "dvs")


def checks(env: Mapping[str, str]) -> Iterator[Check]:
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


def cores(own: list[int], all_of_them: list[int], domains: Mapping[str, list[int]]) -> Check:
    """The cores that this process may use, and how they lie over NUMA domains."""
    touched = [name for name, members in domains.items() if set(members) & set(own)]
    found = f"{len(own)} of {len(all_of_them) or len(own)} ({core_ranges(tuple(own))})"
    if len(domains) > 1:
        found += f", in {len(touched)} of {len(domains)} NUMA domains"
    if len(own) == 1 and len(all_of_them) > 1:
        return Check("warn", "cores", found,
                     "this shell is bound to one core, and so is all it starts: srun -c, or taskset -p")
    return Check("ok", "cores", found)


def enough(name: str, free: int | None, total: int | None, least: int, instead: str) -> Check:
    """Room of some kind, in bytes."""
    if free is None:
        return Check("warn", name, "cannot be told", "")
    found = f"{format_bytes(free)} of {format_bytes(total)} free"
    return Check("warn", name, found, instead) if free < least else Check("ok", name, found)


def limits(files: tuple[int, int], locked: tuple[int, int], has_fabric: bool) -> Iterator[Check]:
    """What ulimit says: open files, and memory that may be locked (RDMA networks lock what they send).

    Args:
        files, locked: (soft, hard), as `resource.getrlimit` gives them.
    """
    unlimited = resource.RLIM_INFINITY
    is_low = files[0] != unlimited and files[0] < _LEAST_FILES
    can_be_raised = files[1] == unlimited or files[1] >= _LEAST_FILES
    text = f"open files {_limit(files[0])} (up to {_limit(files[1])})"
    if is_low and not can_be_raised:
        yield Check("warn", "limits", text,
                    f"ask for a hard limit of {_LEAST_FILES} or more: many ranks, many sockets")
    else:
        yield Check("ok", "limits", text)
    text = f"locked memory {'unlimited' if locked[0] == unlimited else format_bytes(locked[0])}"
    if has_fabric and locked[0] != unlimited and locked[0] < _LEAST_LOCKED:
        yield Check("warn", "limits", text, "ulimit -l unlimited: RDMA fails or falls back to TCP without")
    else:
        yield Check("ok", "limits", text)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def temporary(folder: str, kind: str) -> Check:
    """The folder for temporary files: local, roomy, with a short name."""
    space = room(Path(folder))
    free, total = format_bytes(space["free"]), format_bytes(space["total"])
    found = f"{folder}, {kind or 'unknown file system'}, {free} of {total} free"
    if len(folder) > _LONGEST_TMPDIR:
        return Check("warn", "temporary", found, "a shorter TMPDIR: sockets below it fail with 'path too long'")
    if kind in _REMOTE:
        return Check("warn", "temporary", found, "a TMPDIR on the node's own disk or in memory: /tmp, /dev/shm")
    if space["free"] is not None and space["free"] < LEAST_TEMPORARY:
        return Check("warn", "temporary", found, "make room there, or set TMPDIR")
    return Check("ok", "temporary", found)


def file_system(folder: Path) -> str:
    """The kind of file system that `folder` is on; empty where it cannot be told."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    path = str(folder.resolve())
    under = [(where, kind) for _, where, kind, *_ in mounts
             if path == where or path.startswith(where.rstrip("/") + "/")]
    return max(under, key=lambda mount: len(mount[0]), default=("", ""))[1]


def cache(env: Mapping[str, str]) -> Check:
    """The one folder outside run directories: can it be written, and is there room?"""
    folder = cache_dir(env)
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    space = room(there)
    found = f"{folder}, {file_system(there) or 'unknown file system'}, {format_bytes(space['free'])} free"
    if not os.access(there, os.W_OK):
        return Check("bad", "cache", f"{found}, not writable", "EZPZ_LLM_CACHE=DIR names another place")
    if space["free"] is not None and space["free"] < _GOOD_CACHE:
        return Check("bad" if space["free"] < _LEAST_CACHE else "warn", "cache", found,
                     "make room, or EZPZ_LLM_CACHE=DIR: environments, token shards and built ops go there")
    return Check("ok", "cache", found)


# Interfaces, and what this host's own name means.
def network_checks(env: Mapping[str, str]) -> Iterator[Check]:
    """The lines about the network."""
    own = own_interfaces()
    yield Check("ok", "interfaces", describe(own))
    for variable, wanted in named_interfaces(env).items():
        if missing := missing_interface(variable, wanted, own):
            yield Check("bad", "interfaces", f"{variable}={wanted}, but there is no {missing}",
                        f"{variable} with one of them, or unset it")
    yield host_name(socket.gethostname(), resolve(socket.gethostname()))


def host_name(name: str, address: str | None) -> Check:
    """What the host's own name resolves to: ranks of other hosts that are sent there must find this one."""
    if address is None:
        return Check("warn", "host name", f"{name} does not resolve",
                     "runs on several hosts need launch --interface NAME, or an entry in /etc/hosts")
    if is_loopback(address):
        return Check("warn", "host name", f"{name} is {address} here",
                     "runs on several hosts need launch --interface NAME: gloo would listen on the loopback")
    return Check("ok", "host name", f"{name} is {address}")
