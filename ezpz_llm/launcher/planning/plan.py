"""Plan of a launch: the command line, environment, ranks and files, decided before anything is started."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ezpz_llm.core.base import UserError, count_noun, user_path
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, RunDir, default_run_dir, redact_words, write_atomic
from ezpz_llm.launcher.basics.addresses import domain_notes, is_local_address
from ezpz_llm.launcher.basics.devices import usable_cores
from ezpz_llm.launcher.basics.hostlist import fold_numbers
from ezpz_llm.launcher.basics.master_variables import require_master_address, require_master_port
from ezpz_llm.launcher.basics.ranks import is_set_by_user
from ezpz_llm.launcher.jobs.nested_launcher import nested_launcher_notes
from ezpz_llm.launcher.jobs.node_selection import select_nodes
from ezpz_llm.launcher.jobs.option_parsing import Options, Target, program_file, read_command, run_dir_of
from ezpz_llm.launcher.jobs.schedulers import PATIENT, QUICK, find_allocation, local, rank_names, supplement
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation
from ezpz_llm.launcher.planning.assignment import Assignment, assign_ranks
from ezpz_llm.launcher.planning.binding.inputs import core_notes, device_notes, site_notes
from ezpz_llm.launcher.planning.container import RankContainer, choose_container
from ezpz_llm.launcher.planning.dialects.srun_mpi import mpi_settings
from ezpz_llm.launcher.planning.dialects.work import DIRECT, Built, Launcher, Work
from ezpz_llm.launcher.planning.environment import (
    RENDEZVOUS_VARIABLES,
    Setting,
    binding_settings,
    device_settings,
    extension_settings,
    forwarded_names,
    interface_settings,
    is_users_choice,
    node_settings,
    python_settings,
    rank_settings,
    rendezvous_settings,
    run_settings,
    site_settings,
    terminal_settings,
    variables_of_this_node,
)
from ezpz_llm.launcher.planning.placement import Placement, RankPlace, RankTable, devices_per_rank
from ezpz_llm.launcher.planning.rank_binding import Binding
from ezpz_llm.launcher.planning.rank_network import Network, find_network
from ezpz_llm.launcher.planning.sites import Site


class LaunchPlan(NamedTuple):
    """Everything that launch needs to start a run, and what it reports about it.

    Attributes:
        argv: command line of the launcher; ends with `command`.
        env: changes to the environment of this process.
        command: the user's command, prefixed by the words of the container and of --wrap.
        ranks_source: option, variable or file that determines the number of ranks.
        removed: variables of this process that hold only on this node, and are not passed to other nodes.
    """

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
    site: Site = Site()
    binding: Binding = Binding()
    container: RankContainer = RankContainer()
    removed: tuple[str, ...] = ()

    @property
    def is_existing_rank(self) -> bool:
        """True if this process is already a rank, so that launch only has to execute the command."""
        return self.allocation.scheduler == local.STARTED

    @property
    def command_line(self) -> str:
        """`argv` as a shell command line, with secrets removed."""
        return shlex.join(redact_words(self.argv))


def build_plan(options: Options, env: Mapping[str, str]) -> LaunchPlan:
    """Build the plan, without starting or writing anything.

    Raises:
        UserError: the options are invalid, or do not fit the environment or the installed software.
    """
    _reject_script(options)
    target = read_command(options.command)
    chosen = run_dir_of(target, options.run_dir)
    run_dir = RunDir(user_path(chosen).absolute()) if chosen else default_run_dir(target.name)
    allocation = _select_allocation(options, env)
    if allocation.scheduler == local.STARTED:
        return _plan_for_existing_rank(options, env, allocation, target, run_dir if chosen else None)
    ranks = assign_ranks(options, env, allocation)
    run_id = os.urandom(8).hex()
    network = find_network(options, env, ranks.site, ranks.hosts, run_id)
    settings = _make_settings(options, env, ranks, network, run_dir, run_id)
    # Ranks on this node alone inherit them.
    is_here = len(ranks.hosts) == 1 and is_local_address(ranks.hosts[0])
    of_this_node = {} if is_here else {name: value for name, value in variables_of_this_node(env).items()
                                       if name not in settings}
    settings |= node_settings(of_this_node)
    container = _choose_container(options, env, ranks, run_dir, settings)
    command = (*container.words, *options.wrap, *options.command)
    built = ranks.launcher.build(_describe_work(ranks, network, container, command, run_dir, settings, env))
    settings |= _launcher_settings(options, env, target, ranks.launcher, ranks.placement, built)
    return LaunchPlan(
        argv=built.argv,
        env=settings,
        ranks=RankTable(ranks.placement, ranks.binding),
        hosts=ranks.hosts,
        run_dir=run_dir,
        run_id=run_id,
        launcher=ranks.launcher,
        allocation=ranks.allocation,
        target=target,
        command=command,
        files=built.files,
        removed=tuple(of_this_node),
        ranks_source=ranks.placement.source,
        notes=(*_nested_launcher_notes(options, ranks.placement.world_size), *_notes(env, ranks, network)),
        site=ranks.site,
        binding=ranks.binding,
        container=container,
    )


def prepare_step(options: Options, **changes: Any) -> LaunchPlan:
    """Build the plan of another command and create its run directory and files.

    launch uses this for its own commands before the user's command, such as the preflight.

    Args:
        options: the user's options; --wrap and --container are ignored.
        changes: options that differ.
    """
    step = build_plan(options._replace(wrap=(), container="none", **changes), os.environ)
    step.run_dir.create()
    for path, content in step.files.items():
        write_atomic(path, content)
    return step


def _reject_script(options: Options) -> None:
    """Reject a command that starts with a Python script or module instead of a program.

    Raises:
        UserError: the first word ends in .py or is a module of ezpz_llm, and cannot be executed.
    """
    word, more = options.command[0], " …" if options.command[1:] else ""
    # --wrap may name an interpreter, and an image may have a program of this name.
    if options.wrap or options.container or shutil.which(word) is not None:
        return
    if word.startswith("ezpz_llm."):
        raise UserError(f"{word!r} is a Python module, not a program", where="the command to launch",
                        instead=f"launch [options] python3 -m {word}{more}")
    if word.endswith(".py"):
        if not Path(word).is_file():
            raise UserError(f"{word!r} is neither a program nor a file", where="the command to launch",
                            instead="launch [options] python3 SCRIPT, with the path of an existing script")
        raise UserError(f"{word!r} is a Python script, not a program", where="the command to launch",
                        instead=f"launch [options] python3 {shlex.quote(word)}{more}")


def _select_allocation(options: Options, env: Mapping[str, str]) -> Allocation:
    """Return the allocation, reduced to the nodes that the user selected."""
    hosts_from = "--hostfile" if options.hostfile else "--hosts" if options.hosts else None
    allocation = supplement(find_allocation(env, options.scheduler, hosts_from), env,
                            QUICK if options.dry_run else PATIENT)
    return select_nodes(allocation, options.nodes, options.hosts, options.hostfile)


def _plan_for_existing_rank(options: Options, env: Mapping[str, str], allocation: Allocation, target: Target,
                            run_dir: RunDir | None) -> LaunchPlan:
    """Build the plan for a process that is already a rank: it replaces itself with the command (exec)."""
    info = local.rank_here({**env, **rank_names()})
    if options.ranks not in (None, info.world_size) and is_set_by_user(env):
        raise UserError(f"-n {options.ranks}, but this process is already rank {info.rank} of {info.world_size}"
                        " (RANK, WORLD_SIZE)", where="the environment, with MASTER_ADDR and MASTER_PORT",
                        instead="unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT if they are leftovers, else omit -n")
    if is_set_by_user(env):
        require_master_address(env["MASTER_ADDR"])
        require_master_port(env["MASTER_PORT"])
    settings = rank_settings()
    if run_dir:
        settings[RUN_DIR_VARIABLE] = Setting(str(run_dir.path), "--run-dir")
    host = allocation.hosts[0].name
    note = f"already rank {info.rank} of {info.world_size} ({info.source}): running the command without a launcher"
    if options.ranks not in (None, info.world_size):
        note += f"; -n {options.ranks} is ignored"
    return LaunchPlan(
        argv=(*options.wrap, *options.command),
        env=settings,
        ranks=(RankPlace(info.rank, host, info.local_rank, fold_numbers(usable_cores())),),
        hosts=(host,),
        run_dir=run_dir or default_run_dir(target.name),
        run_id="",
        launcher=Launcher("none", DIRECT, "", info.source),
        allocation=allocation,
        target=target,
        command=(*options.wrap, *options.command),
        files={},
        ranks_source=info.source,
        notes=(note, *_nested_launcher_notes(options, info.world_size), *allocation.notes),
    )


def _make_settings(options: Options, env: Mapping[str, str], ranks: Assignment, network: Network, run_dir: RunDir,
                   run_id: str) -> dict[str, Setting]:
    """Return the changes to the environment of the ranks, without those of the launcher."""
    return {
        **run_settings(run_dir, run_id, ranks.placement, ranks.allocation, options, env),
        **(rendezvous_settings(network.rendezvous, env) if ranks.launcher.kind != "torchrun" else {}),
        **(interface_settings(network.interface, network.source, env) if len(ranks.hosts) > 1 else {}),
        **device_settings(ranks.devices),
        **binding_settings(ranks.binding, ranks.mask, ranks.site, env),
        **site_settings(ranks.site, options, env),
        **terminal_settings(options, env),
        **python_settings(env),
        **extension_settings(env),
    }


def _choose_container(options: Options, env: Mapping[str, str], ranks: Assignment, run_dir: RunDir,
                      variables: Iterable[str]) -> RankContainer:
    container = choose_container(options.container, ranks.site, ranks.launcher.kind, run_dir.path, variables, env)
    if container.image and options.stage_env:
        raise UserError(f"--stage-env cannot be used with the container {container.image}",
                        where="--stage-env", instead="omit --stage-env: an image is a single file already")
    return container


def _describe_work(ranks: Assignment, network: Network, container: RankContainer, command: tuple[str, ...],
                   run_dir: RunDir, settings: Mapping[str, Setting], env: Mapping[str, str]) -> Work:
    """Describe the ranks to start, independently of the launcher."""
    hosts, binding, launcher = ranks.hosts, ranks.binding, ranks.launcher
    devices_of = {host.name: host.devices for host in ranks.allocation.hosts}
    return Work(
        # If the whole step runs in the container, the image's Python must have this package.
        command=("python3" if container.step_options else sys.executable, "-m", "ezpz_llm.launcher.on_nodes.shim",
                 "--", *command),
        placement=ranks.placement,
        here=len(hosts) == 1 and is_local_address(hosts[0]),
        node_list_path=run_dir.path / "hostfile",
        cores_per_rank=binding.cpus_per_rank,
        variables=forwarded_names(env, settings),
        as_root=os.geteuid() == 0,
        scheduler=ranks.allocation.scheduler,
        cores_per_node=binding.cpus_per_host,
        binding=binding._replace(kind="none", cores=()) if binding.by_shim else binding,
        site_options=(*ranks.site.options.get(launcher.kind, ()), *container.step_options),
        master=(network.rendezvous.address, network.rendezvous.port),
        env=env,
        devices=tuple(devices_of[name] for name in hosts),
        devices_per_rank=devices_per_rank(ranks.allocation, ranks.placement),
    )


def _launcher_settings(options: Options, env: Mapping[str, str], target: Target, launcher: Launcher,
                       placement: Placement, built: Built) -> dict[str, Setting]:
    """Return the variables that the launcher needs, without those that the user set."""
    variables = dict(built.env)
    if target.module is None:
        variables |= mpi_settings(launcher.kind, built.argv, program_file(options.command, target),
                                  placement.world_size, env, QUICK if options.dry_run else PATIENT)
    return {name: Setting(*entry) for name, entry in variables.items() if not is_users_choice(name, env)}


def _nested_launcher_notes(options: Options, ranks: int) -> tuple[str, ...]:
    return (nested_launcher_notes(options.command, ranks)
            or nested_launcher_notes((*options.wrap, *options.command), ranks))


def _notes(env: Mapping[str, str], ranks: Assignment, network: Network) -> tuple[str, ...]:
    allocation, placement, binding = ranks.allocation, ranks.placement, ranks.binding
    return (*ranks.launcher.notes, *_placement_notes(env, allocation, placement, binding),
            *core_notes(allocation, placement, binding), *ranks.distance_notes,
            *device_notes(placement, ranks.devices, allocation),
            *site_notes(ranks.site, allocation, ranks.devices, env), *network.notes, *network.rendezvous.notes)


def _placement_notes(env: Mapping[str, str], allocation: Allocation, placement: Placement,
                     binding: Binding) -> tuple[str, ...]:
    notes = [*allocation.notes, *domain_notes([host.name for host in allocation.hosts], allocation.source)]
    notes += [f"using {name}={env[name]}, which is set in your environment" for name in RENDEZVOUS_VARIABLES
              if is_users_choice(name, env)]
    if binding.cpus_per_host is not None and placement.most > binding.cpus_per_host:
        notes.append(f"{placement.most} ranks share {count_noun(binding.cpus_per_host, 'CPU')} per node")
    unused = len(allocation.hosts) - len(placement.ranks)
    if unused:
        notes.append(f"{unused} of {len(allocation.hosts)} nodes get no rank")
    if allocation.scheduler == local.NAME and len(placement.ranks) > 1:
        notes.append("the run directory must be on a file system that all nodes share")
    return tuple(notes)
