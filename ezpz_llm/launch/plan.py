"""The plan of a launch: everything that will run, decided before anything does."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.launch.addresses import Meeting, find_meeting, is_here
from ezpz_llm.launch.allocation import Allocation
from ezpz_llm.launch.devices import Devices, core_ranges, usable_cores, visible_devices
from ezpz_llm.launch.dialects import choose
from ezpz_llm.launch.dialects.work import Built, Launcher, Work
from ezpz_llm.launch.narrow import narrow
from ezpz_llm.launch.options import Options
from ezpz_llm.launch.placement import Placement, place
from ezpz_llm.launch.ranks import find_rank
from ezpz_llm.launch.schedulers import PATIENT, QUICK, find_allocation, local, started, supplement
from ezpz_llm.launch.target import Target, read_command, run_dir_of
from ezpz_llm.launch.variables import (
    ENDS_AT_VARIABLE,
    FORWARDED,
    FORWARDED_PREFIXES,
    RUN_ID_VARIABLE,
    TEE_VARIABLE,
    WORLD_SIZE_VARIABLE,
)
from ezpz_llm.rundir.layout import RUN_DIR_VARIABLE, RunDir, default_run_dir


@dataclass(frozen=True)
class Setting:
    """One environment variable that launch sets, and why."""

    value: str
    source: str


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs. `cores` are those it may use, `device` the accelerator its local rank stands for; both
    None where they cannot be told from here."""

    rank: int
    host: str
    local_rank: int
    cores: str | None
    device: str | None


@dataclass(frozen=True)
class LaunchPlan:
    """What will run. `argv` ends in the user's own words; `env` are the changes to this environment."""

    argv: tuple[str, ...]
    env: Mapping[str, Setting]
    ranks: tuple[RankPlace, ...]
    hosts: tuple[str, ...]
    run_dir: RunDir
    run_id: str
    launcher: Launcher
    allocation: Allocation
    target: Target
    command: tuple[str, ...]
    files: Mapping[Path, str]
    ranks_source: str
    notes: tuple[str, ...]

    @property
    def is_started(self) -> bool:
        """Is this process a rank already, so that the command only has to be executed?"""
        return self.allocation.scheduler == started.NAME

    @property
    def command_line(self) -> str:
        """`argv` as one could type it."""
        return shlex.join(self.argv)


def build_plan(options: Options, env: Mapping[str, str]) -> LaunchPlan:
    """Decide everything; start and write nothing.

    Raises:
        UserError: any contradiction between what was typed, the environment and what is installed.
    """
    target = read_command(options.command)
    chosen = run_dir_of(target, options.run_dir)
    run_dir = RunDir(chosen.expanduser().absolute()) if chosen else default_run_dir(target.name)
    found = supplement(find_allocation(env, options.scheduler), env, QUICK if options.dry_run else PATIENT)
    allocation = narrow(found, options.nodes, options.hosts, options.hostfile)
    if allocation.scheduler == started.NAME:
        return _as_it_is(options, env, allocation, target, run_dir if chosen else None)
    devices = visible_devices(env)
    placement = place(allocation, devices, options.ranks, options.per_host)
    launcher = choose(options.launcher, allocation.scheduler, placement.world_size, env)
    hosts = tuple(name for name, _ in placement.ranks)
    cores_per_host = _cores_per_host(allocation, placement)
    cores = max(1, cores_per_host // placement.most) if cores_per_host else None
    command = (*options.wrap, *options.command)
    run_id = os.urandom(8).hex()
    meeting = _find_meeting(env, options, allocation, hosts, run_dir)
    settings = _settings(env, allocation, placement, launcher, run_dir, run_id, cores, meeting)
    settings |= _for_records(options, env)
    work = Work(
        command=(sys.executable, "-m", "ezpz_llm.launch.shim", "--", *command),
        placement=placement,
        here=len(hosts) == 1 and is_here(hosts[0]),
        hosts_file=run_dir.path / "hostfile",
        cores_per_rank=cores,
        variables=_forwarded(env, settings),
        as_root=os.geteuid() == 0,
        scheduler=allocation.scheduler,
        cores_per_host=cores_per_host,
        master=(meeting.address, meeting.port),
    )
    built: Built = launcher.build(launcher.program, work)
    settings |= {name: Setting(value, source) for name, (value, source) in built.env.items()
                 if not _is_users_choice(name, env)}
    return LaunchPlan(
        argv=built.argv,
        env=settings,
        ranks=_rank_table(placement, devices),
        hosts=hosts,
        run_dir=run_dir,
        run_id=run_id,
        launcher=launcher,
        allocation=allocation,
        target=target,
        command=command,
        files=built.files,
        ranks_source=placement.source,
        notes=(*launcher.notes, *_notes(env, allocation, hosts), *meeting.notes),
    )


def _as_it_is(options: Options, env: Mapping[str, str], allocation: Allocation, target: Target,
              run_dir: RunDir | None) -> LaunchPlan:
    """The plan where this process is a rank already: its command, executed in its place."""
    info = find_rank(env)
    settings = {RUN_DIR_VARIABLE: Setting(str(run_dir.path), "--run-dir")} if run_dir else {}
    host = allocation.hosts[0].name
    note = f"already rank {info.rank} of {info.world_size} ({info.source}): the command runs as it is"
    if options.ranks not in (None, info.world_size):
        note += f", and -n {options.ranks} says nothing here"
    return LaunchPlan(
        argv=(*options.wrap, *options.command),
        env=settings,
        ranks=(RankPlace(info.rank, host, info.local_rank, core_ranges(usable_cores()), None),),
        hosts=(host,),
        run_dir=run_dir or default_run_dir(target.name),
        run_id="",
        launcher=Launcher("none", "none", "", info.source, lambda program, work: Built(work.command)),
        allocation=allocation,
        target=target,
        command=(*options.wrap, *options.command),
        files={},
        ranks_source=info.source,
        notes=(note, *info.notes),
    )


def _cores_per_host(allocation: Allocation, placement: Placement) -> int | None:
    if allocation.cores_per_host is None and any(is_here(name) for name, _ in placement.ranks):
        # Hosts of one reservation are taken to be alike.
        return len(usable_cores())
    return allocation.cores_per_host


def _settings(env: Mapping[str, str], allocation: Allocation, placement: Placement, launcher: Launcher,
              run_dir: RunDir, run_id: str, cores: int | None, meeting: Meeting) -> dict[str, Setting]:
    settings = {
        RUN_DIR_VARIABLE: Setting(str(run_dir.path), "launch"),
        RUN_ID_VARIABLE: Setting(run_id, "launch"),
        WORLD_SIZE_VARIABLE: Setting(str(placement.world_size), placement.source),
    }
    if allocation.ends_at is not None:
        settings[ENDS_AT_VARIABLE] = Setting(f"{allocation.ends_at:.0f}", allocation.scheduler)
    if allocation.step_id is not None:
        # Without it, the steps of srun, and of an mpiexec that starts its helpers by srun, would wait for ever.
        settings["SLURM_OVERLAP"] = Setting("1", f"this shell is step {allocation.step_id} itself: it has to share")
    if launcher.kind != "torchrun":
        settings |= _meeting_settings(env, meeting)
    if cores is not None and not _is_users_choice("OMP_NUM_THREADS", env):
        settings["OMP_NUM_THREADS"] = Setting(str(cores), f"cores for each of {placement.most} rank(s) on a host")
    if "PYTHONUNBUFFERED" not in env:
        settings["PYTHONUNBUFFERED"] = Setting("1", "launch: lines appear as they are printed")
    return settings


def _for_records(options: Options, env: Mapping[str, str]) -> dict[str, Setting]:
    settings = {TEE_VARIABLE: Setting(options.tee, "--tee")}
    if "PYTHONFAULTHANDLER" not in env:
        settings["PYTHONFAULTHANDLER"] = Setting("1", "launch: a crash below Python tells where Python was")
    return settings


def _find_meeting(env: Mapping[str, str], options: Options, allocation: Allocation, hosts: tuple[str, ...],
                  run_dir: RunDir) -> Meeting:
    own = {name: env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if _is_users_choice(name, env)}
    return find_meeting(hosts, f"{allocation.job_id} {allocation.step_id} {run_dir.path}",
                        interface=options.interface, address=own.get("MASTER_ADDR"), port=own.get("MASTER_PORT"))


def _meeting_settings(env: Mapping[str, str], meeting: Meeting) -> dict[str, Setting]:
    settings = {"MASTER_ADDR": Setting(meeting.address, meeting.address_source),
                "MASTER_PORT": Setting(str(meeting.port), meeting.port_source)}
    return {name: setting for name, setting in settings.items() if not _is_users_choice(name, env)}


def _is_users_choice(name: str, env: Mapping[str, str]) -> bool:
    if not env.get(name):
        return False
    # PBS exports the job's own number of cores as OMP_NUM_THREADS; a launch inside a rank of another one would
    # inherit what that one set.
    by_pbs = name == "OMP_NUM_THREADS" and bool(env.get("PBS_JOBID")) and env[name] == env.get("NCPUS")
    return not by_pbs and RUN_ID_VARIABLE not in env


def _forwarded(env: Mapping[str, str], settings: Mapping[str, Setting]) -> tuple[str, ...]:
    wanted = [name for name in env if name in FORWARDED or name.startswith(FORWARDED_PREFIXES)]
    return tuple(sorted({*wanted, *settings, *({"MASTER_ADDR", "MASTER_PORT"} & env.keys())}))


def _rank_table(placement: Placement, devices: Devices) -> tuple[RankPlace, ...]:
    own_cores = core_ranges(usable_cores())
    table: list[RankPlace] = []
    for host, count in placement.ranks:
        cores = own_cores if is_here(host) else None
        for local_rank in range(count):
            table.append(RankPlace(len(table), host, local_rank, cores, _device(devices, local_rank)))
    return tuple(table)


def _device(devices: Devices, local_rank: int) -> str | None:
    if len(devices.ids) == 1:
        return devices.ids[0]
    return devices.ids[local_rank] if local_rank < len(devices.ids) else None


def _notes(env: Mapping[str, str], allocation: Allocation, hosts: tuple[str, ...]) -> tuple[str, ...]:
    notes = list(allocation.notes)
    notes += [f"{name}={env[name]} is yours and stays" for name in ("MASTER_ADDR", "MASTER_PORT")
              if _is_users_choice(name, env)]
    unused = len(allocation.hosts) - len(hosts)
    if unused:
        notes.append(f"{unused} of {len(allocation.hosts)} hosts get no rank")
    if allocation.scheduler == local.NAME and len(hosts) > 1:
        notes.append("the run directory must be on a file system that all hosts share")
    return tuple(notes)
