"""Checks of this machine for `ezpz-llm doctor`: job, cores, memory, limits, disks and network."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ezpz_llm.core.base import UserError, cache_dir, count_noun
from ezpz_llm.core.rundir.records import Finding
from ezpz_llm.launcher.basics.addresses import format_interfaces, is_loopback, list_interfaces
from ezpz_llm.launcher.basics.hostlist import fold_numbers
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.launcher.jobs.schedulers import find_allocation, local, schedulers
from ezpz_llm.launcher.planning.dialects import choose_launcher
from ezpz_llm.launcher.planning.sites import find_site
from ezpz_llm.verify.check.doctor import software
from ezpz_llm.verify.check.findings import first_problem
from ezpz_llm.verify.check.node_facts import file_system_space, gather_facts, numa_domains
from ezpz_llm.verify.check.preflight.rules.gathered import Gathered, format_bytes
from ezpz_llm.verify.check.preflight.rules.network import missing_interfaces
from ezpz_llm.verify.check.preflight.rules.nodes import MIN_MEMORY_PER_RANK, MIN_SHARED_MEMORY, MIN_TEMPORARY_SPACE


def run_checks(env: Mapping[str, str]) -> list[Finding]:
    """Run all checks of this machine. Returns findings in display order, with level `ok` for passed checks."""
    subjects = (software.software_checks, job_checks, _machine_checks, software.tool_checks)
    return [check for subject in subjects for check in subject(env)]


def job_checks(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings for scheduler, job, site and launcher."""
    yield schedulers_finding(env)
    try:
        allocation = find_allocation(env)
    except UserError as error:
        yield Finding("bad", "job", error.found, error.instead or "exit the job's shell and enter it again")
        return
    yield job_finding(allocation.scheduler, allocation.job_id, len(allocation.hosts), allocation.ends_at)
    yield from (Finding("warn", "job", note, "see launch --dry-run hostname") for note in allocation.notes)
    yield site_finding(env)
    yield _launcher_finding(env, allocation.scheduler)


def schedulers_finding(env: Mapping[str, str]) -> Finding:
    """Report the schedulers whose commands are on PATH, whether or not inside a job."""
    path = env.get("PATH", "")
    commands = {scheduler.TITLE: scheduler.COMMANDS for scheduler in schedulers().values() if scheduler.COMMANDS}
    available = [f"{title} ({', '.join(present)})" for title, names in commands.items()
                 if (present := [name for name in names if shutil.which(name, path=path)])]
    return Finding("ok", "scheduler", " and ".join(available) or f"no commands of {', '.join(commands)} on PATH")


def job_finding(scheduler: str, job_id: str | None, hosts: int, ends_at: float | None) -> Finding:
    """Report the job in which this shell runs."""
    if job_id is None:
        text = "not inside a job: launch uses only this node" if scheduler == local.NAME else scheduler
        return Finding("ok", "job", text)
    remaining = "" if ends_at is None else f", {max(0, ends_at - time.time()) / 60:.0f} min left"
    return Finding("ok", "job", f"inside {scheduler} job {job_id}: {count_noun(hosts, 'node')}{remaining}")


def site_finding(env: Mapping[str, str]) -> Finding:
    """Report the site file of this machine."""
    try:
        this_site = find_site(None, env)
    except UserError as error:
        return Finding("bad", "site", str(error.found), error.instead or f"fix {error.where}")
    return Finding("ok", "site", f"{this_site.name} ({this_site.source})")


def _launcher_finding(env: Mapping[str, str], scheduler: str) -> Finding:
    """Report the launcher that launch would use for several ranks."""
    try:
        choice = choose_launcher("auto", scheduler, 2, env)
    except UserError as error:
        return Finding("bad", "launcher", error.found, error.instead or "")
    return Finding("ok", "launcher", f"{choice.title} ({choice.program}; {choice.source})")


_MIN_FILES = 4096
_MIN_LOCKED = 2**26
_MAX_TMPDIR_LENGTH = 80
"""Maximum length of TMPDIR, since the path of a UNIX socket in it has at most 107 characters."""
_MIN_CACHE, _GOOD_CACHE = 2**30, 10 * 2**30
_FABRICS = (Path("/dev/infiniband"), Path("/sys/class/cxi"), Path("/dev/hfi1_0"))
_REMOTE = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "panfs", "dvs")


def _machine_checks(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings for cores, memory, limits, temporary folder, cache, interfaces and hostname."""
    facts = gather_facts(RankInfo(0, 1, 0, 1, 0, "doctor"), env)
    memory, shm = facts.memory, facts.shm
    yield check_cores(facts.cores, facts.host_cores, numa_domains())
    yield check_free_space("memory", memory.free, memory.total, MIN_MEMORY_PER_RANK, "end other processes")
    yield check_free_space("/dev/shm", shm.free, shm.total, MIN_SHARED_MEMORY,
                           "SIGBUS kills data loaders and NCCL; docker --shm-size=8g or mount -o remount,size=…")
    yield from check_limits(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK),
                      any(path.exists() for path in _FABRICS))
    yield check_temporary_folder(tempfile.gettempdir(), file_system(Path(tempfile.gettempdir())))
    yield _check_cache(env)
    yield Finding("ok", "interfaces", format_interfaces(list_interfaces()))
    yield from missing_interfaces(Gathered(1, [facts]))
    yield check_hostname(facts.host, facts.name_resolves_to)


def check_cores(own: list[int], online: list[int], domains: Mapping[str, list[int]]) -> Finding:
    """Check the cores that this process may use and report their NUMA domains."""
    own_domains = [name for name, members in domains.items() if set(members) & set(own)]
    text = f"{len(own)} of {len(online) or len(own)} ({fold_numbers(own)})"
    if len(domains) > 1:
        text += f", in {len(own_domains)} of {len(domains)} NUMA domains"
    return first_problem("cores", text,
                         (len(own) == 1 < len(online), "warn",
                          "this shell and its programs are bound to one core; use srun -c or taskset -p"))


def check_free_space(name: str, free: int | None, total: int | None, least: int, instead: str) -> Finding:
    """Check that at least `least` bytes are free."""
    if free is None:
        return Finding("warn", name, "unknown")
    return first_problem(name, f"{format_bytes(free)} of {format_bytes(total)} free",
                         (free < least, "warn", instead))


def check_limits(files: tuple[int, int], locked: tuple[int, int], has_fabric: bool) -> Iterator[Finding]:
    """Check the limits of open files, and of locked memory, which RDMA networks need for their buffers.

    Args:
        files, locked: (soft, hard) limits of `resource.getrlimit`.
        has_fabric: the node has an RDMA network.
    """
    unlimited = resource.RLIM_INFINITY
    # A soft limit can be raised up to the hard one.
    is_low = all(limit != unlimited and limit < _MIN_FILES for limit in files)
    yield first_problem("limits", f"open files {_limit(files[0])} (up to {_limit(files[1])})",
                        (is_low, "warn",
                         f"request a hard limit of {_MIN_FILES} or more: many ranks need many sockets"))
    is_little = has_fabric and locked[0] != unlimited and locked[0] < _MIN_LOCKED
    yield first_problem("limits",
                        f"locked memory {'unlimited' if locked[0] == unlimited else format_bytes(locked[0])}",
                        (is_little, "warn", "set ulimit -l unlimited, or RDMA fails or falls back to TCP"))


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_temporary_folder(folder: str, kind: str) -> Finding:
    """Check that the temporary folder is on a local disk with free space and has a short path."""
    space = file_system_space(Path(folder))
    free, total = format_bytes(space.free), format_bytes(space.total)
    text = f"{folder}, {kind or 'unknown file system'}, {free} of {total} free"
    return first_problem(
        "temporary", text,
        (len(folder) > _MAX_TMPDIR_LENGTH, "warn",
         "set a shorter TMPDIR, or sockets below it fail with 'path too long'"),
        (kind in _REMOTE, "warn", "set TMPDIR to a local disk of the node or to memory: /tmp, /dev/shm"),
        (space.free is not None and space.free < MIN_TEMPORARY_SPACE, "warn",
         "free space there, or set TMPDIR"))


def file_system(folder: Path) -> str:
    """Return the type of the file system of `folder`; empty if unknown."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    path = str(folder.resolve())
    under = [(where, kind) for _, where, kind, *_ in mounts
             if path == where or path.startswith(where.rstrip("/") + "/")]
    return max(under, key=lambda mount: len(mount[0]), default=("", ""))[1]


def _check_cache(env: Mapping[str, str]) -> Finding:
    """Check that the cache is writable and has free space."""
    folder = cache_dir(env)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free, can_write = file_system_space(existing).free, os.access(existing, os.W_OK)
    text = f"{folder}, {file_system(existing) or 'unknown file system'}, {format_bytes(free)} free"
    instead = "free space, or set EZPZ_LLM_CACHE=DIR: it holds environments, token shards and built ops"
    return first_problem("cache", text + ", not writable" * (not can_write),
                         (not can_write, "bad", "set EZPZ_LLM_CACHE=DIR to another folder"),
                         (free is not None and free < _MIN_CACHE, "bad", instead),
                         (free is not None and free < _GOOD_CACHE, "warn", instead))


def check_hostname(name: str, address: str | None) -> Finding:
    """Check that the hostname resolves to an address other than the loopback address."""
    return first_problem("host name", f"{name} is {address}" if address else f"{name} does not resolve",
                         (address is None, "warn",
                          "for runs on several nodes, pass launch --interface NAME or add an entry to /etc/hosts"),
                         (is_loopback(address or ""), "warn",
                          "for runs on several nodes, pass launch --interface NAME: gloo would listen on the "
                          "loopback"))
