"""The plan of a launch: everything that will run, decided before anything does."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.package_data import user_path
from ezpz_llm.launch.addresses import Rendezvous, find_rendezvous, is_here, own_interfaces
from ezpz_llm.launch.binding.choose import Binding
from ezpz_llm.launch.binding.inputs import bind_ranks, core_notes, device_notes, devices_of_hosts, site_notes
from ezpz_llm.launch.devices import usable_cores
from ezpz_llm.launch.dialects import choose
from ezpz_llm.launch.dialects.work import Built, Launcher, Work
from ezpz_llm.launch.environment import (
    RENDEZVOUS_VARIABLES,
    Setting,
    binding_settings,
    extension_settings,
    forwarded,
    interface_settings,
    is_users_choice,
    python_settings,
    rendezvous_settings,
    run_settings,
    site_settings,
)
from ezpz_llm.launch.host_selection import select_hosts
from ezpz_llm.launch.hostlist import fold_numbers
from ezpz_llm.launch.mpi_world import mpi_settings
from ezpz_llm.launch.option_parsing import Options, Target, program_file, read_command, run_dir_of
from ezpz_llm.launch.placement import Placement, RankPlace, RankTable, place
from ezpz_llm.launch.ranks import is_by_hand
from ezpz_llm.launch.schedulers import PATIENT, QUICK, find_allocation, local, supplement
from ezpz_llm.launch.schedulers.scheduler import Allocation
from ezpz_llm.launch.sites import Site, find_site
from ezpz_llm.rundir.files import RUN_DIR_VARIABLE, RunDir, default_run_dir, write_atomic
from ezpz_llm.rundir.secrets import redact_words


@dataclass(frozen=True)
class LaunchPlan:
    """What will run. `argv` ends in `command`: the user's own words, after those of --wrap. `env` are the changes
    to this environment."""

    argv: tuple[str, ...]
    env: Mapping[str, Setting]
    ranks: Sequence[RankPlace]
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
    site: Site = field(default_factory=Site)
    binding: Binding = field(default_factory=Binding)

    @property
    def is_started(self) -> bool:
        """Is this process a rank already, so that the command only has to be executed?"""
        return self.allocation.scheduler == local.STARTED

    @property
    def command_line(self) -> str:
        """`argv` as one could type it, but for secrets."""
        return shlex.join(redact_words(self.argv))


def build_plan(options: Options, env: Mapping[str, str]) -> LaunchPlan:
    """Decide everything; start and write nothing.

    Raises:
        UserError: any contradiction between what was typed, the environment and what is installed.
    """
    target = read_command(options.command)
    chosen = run_dir_of(target, options.run_dir)
    run_dir = RunDir(user_path(chosen).absolute()) if chosen else default_run_dir(target.name)
    hosts_from = "--hostfile" if options.hostfile else "--hosts" if options.hosts else None
    found = supplement(find_allocation(env, options.scheduler, hosts_from), env,
                       QUICK if options.dry_run else PATIENT)
    allocation = select_hosts(found, options.nodes, options.hosts, options.hostfile)
    if allocation.scheduler == local.STARTED:
        return _as_it_is(options, env, allocation, target, run_dir if chosen else None)
    site = find_site(options.site, env)
    is_host = any(is_here(host.name) for host in allocation.hosts)
    devices, allocation = devices_of_hosts(env, site, allocation, is_host)
    placement = place(allocation, devices, options.ranks, options.per_host)
    launcher = _choose(options, env, allocation, placement, site)
    binding, mask, distance_notes = bind_ranks(options.binding, site, allocation, placement, launcher, devices,
                                               is_host)
    hosts = tuple(name for name, _ in placement.ranks)
    interface, interface_source, interface_notes = _interface(options, site, hosts)
    run_id = os.urandom(8).hex()
    rendezvous = _find_rendezvous(env, options, site, interface, interface_source, hosts, run_id)
    settings = {
        **run_settings(run_dir, run_id, placement, allocation, options, env),
        **(rendezvous_settings(rendezvous, env) if launcher.kind != "torchrun" else {}),
        **(interface_settings(interface, interface_source, env) if len(hosts) > 1 else {}),
        **binding_settings(binding, mask, site, env),
        **site_settings(site, options, env),
        **python_settings(env),
        **extension_settings(env),
    }
    command = (*options.wrap, *options.command)
    work = Work(
        command=(sys.executable, "-m", "ezpz_llm.launch.shim", "--", *command),
        placement=placement,
        here=len(hosts) == 1 and is_here(hosts[0]),
        hosts_file=run_dir.path / "hostfile",
        cores_per_rank=binding.cpus_per_rank,
        variables=forwarded(env, settings),
        as_root=os.geteuid() == 0,
        scheduler=allocation.scheduler,
        cores_per_host=binding.cpus_per_host,
        binding=replace(binding, kind="none", cores=()) if binding.by_shim else binding,
        site_options=site.options.get(launcher.kind, ()),
        master=(rendezvous.address, rendezvous.port),
        env=env,
        devices_per_host=_same({host.devices for host in allocation.hosts}),
    )
    built: Built = launcher.build(launcher.program, work)
    of_launcher = dict(built.env)
    if target.module is None:
        of_launcher |= mpi_settings(launcher.kind, built.argv, program_file(options.command, target),
                                    placement.world_size, env, QUICK if options.dry_run else PATIENT)
    settings |= {name: Setting(*why) for name, why in of_launcher.items() if not is_users_choice(name, env)}
    return LaunchPlan(
        argv=built.argv,
        env=settings,
        ranks=RankTable(placement, binding),
        hosts=hosts,
        run_dir=run_dir,
        run_id=run_id,
        launcher=launcher,
        allocation=allocation,
        target=target,
        command=command,
        files=built.files,
        ranks_source=placement.source,
        notes=(*launcher.notes, *_notes(env, allocation, placement, binding),
               *core_notes(allocation, placement, binding), *distance_notes,
               *device_notes(placement, devices, allocation), *site_notes(site, allocation, devices, env),
               *interface_notes, *rendezvous.notes),
        site=site,
        binding=binding,
    )


def prepare_step(options: Options, **changes: Any) -> LaunchPlan:
    """The plan of another command, by `options` with these `changes`; its run directory and files are made.

    For what launch itself runs on the hosts before or after the user's command."""
    step = build_plan(replace(options, wrap=(), **changes), os.environ)
    step.run_dir.create()
    for path, content in step.files.items():
        write_atomic(path, content)
    return step


def _same(values: set[int | None]) -> int | None:
    return next(iter(values)) if len(values) == 1 else None


def _as_it_is(options: Options, env: Mapping[str, str], allocation: Allocation, target: Target,
              run_dir: RunDir | None) -> LaunchPlan:
    """The plan where this process is a rank already: its command, executed in its place."""
    info = local.rank_here(env)
    if options.ranks not in (None, info.world_size) and is_by_hand(env):
        raise UserError(f"-n {options.ranks}, but RANK={info.rank} and WORLD_SIZE={info.world_size} make this"
                        " process a rank already", where="the environment, with MASTER_ADDR and MASTER_PORT",
                        instead="unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT if they are leftovers; else no -n")
    settings = {RUN_DIR_VARIABLE: Setting(str(run_dir.path), "--run-dir")} if run_dir else {}
    host = allocation.hosts[0].name
    note = f"already rank {info.rank} of {info.world_size} ({info.source}): the command runs as it is"
    if options.ranks not in (None, info.world_size):
        note += f", and -n {options.ranks} says nothing here"
    return LaunchPlan(
        argv=(*options.wrap, *options.command),
        env=settings,
        ranks=(RankPlace(info.rank, host, info.local_rank, fold_numbers(usable_cores())),),
        hosts=(host,),
        run_dir=run_dir or default_run_dir(target.name),
        run_id="",
        launcher=Launcher("none", "none", "", info.source, lambda program, work: Built(work.command)),
        allocation=allocation,
        target=target,
        command=(*options.wrap, *options.command),
        files={},
        ranks_source=info.source,
        notes=(note, *allocation.notes),
    )


def _choose(options: Options, env: Mapping[str, str], allocation: Allocation, placement: Placement,
            site: Site) -> Launcher:
    of_site = site.launcher if options.launcher == "auto" and allocation.scheduler == site.scheduler else None
    found = choose(of_site or options.launcher, allocation.scheduler, placement.world_size, env, site.dialect)
    return replace(found, source=f"site {site.name}") if of_site else found


def _interface(options: Options, site: Site, hosts: tuple[str, ...]) -> tuple[str | None, str, tuple[str, ...]]:
    """The names of the interfaces to use, by whose word, and a note where the site's are not here."""
    if options.interface or not site.interface:
        return options.interface, "--interface", ()
    if is_here(hosts[0]) and own_interfaces().keys().isdisjoint(site.interface.split(",")):
        return None, "", (f"{hosts[0]} has no interface {site.interface}, which site {site.name} names",)
    return site.interface, f"site {site.name}", ()


def _find_rendezvous(env: Mapping[str, str], options: Options, site: Site, interface: str | None, source: str,
                     hosts: tuple[str, ...], run_id: str) -> Rendezvous:
    own = {name: env[name] for name in RENDEZVOUS_VARIABLES if is_users_choice(name, env)}
    # A site's name for the host says more than the address of its interface.
    is_named = bool(site.master_suffix) and not options.interface
    # By the id of this launch: whoever could tell the port beforehand could take it.
    return find_rendezvous(hosts, run_id, interface=None if is_named else interface,
                        interface_source=source, suffix=site.master_suffix,
                        address=own.get("MASTER_ADDR"), port=own.get("MASTER_PORT"))


def _notes(env: Mapping[str, str], allocation: Allocation, placement: Placement,
           binding: Binding) -> tuple[str, ...]:
    notes = list(allocation.notes)
    notes += [f"{name}={env[name]} is yours and stays" for name in RENDEZVOUS_VARIABLES
              if is_users_choice(name, env)]
    if binding.cpus_per_host is not None and placement.most > binding.cpus_per_host:
        notes.append(f"{placement.most} ranks share {binding.cpus_per_host} CPU(s) of a host")
    unused = len(allocation.hosts) - len(placement.ranks)
    if unused:
        notes.append(f"{unused} of {len(allocation.hosts)} hosts get no rank")
    if allocation.scheduler == local.NAME and len(placement.ranks) > 1:
        notes.append("the run directory must be on a file system that all hosts share")
    return tuple(notes)
