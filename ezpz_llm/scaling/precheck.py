"""Sizes and points of a study, each point checked before anything starts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.base import UserError, as_dataclass, counted, parse_json
from ezpz_llm.launch.host_selection import select_hosts
from ezpz_llm.launch.option_parsing import parse as parse_launch, read_command, value_of, without
from ezpz_llm.launch.plan import LaunchPlan, build_plan
from ezpz_llm.launch.precheck import CheckReport, run_check
from ezpz_llm.launch.schedulers import QUICK, find_allocation, local, supplement
from ezpz_llm.launch.schedulers.scheduler import Allocation
from ezpz_llm.rundir import RUN_DIR_VARIABLE, has_secret
from ezpz_llm.scaling.options import Options, is_own_script
from ezpz_llm.scaling.study import Mode, Point, Study
from ezpz_llm.submit.job import plan_job
from ezpz_llm.submit.options import parse as parse_submit

THREADS_VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Size:
    """One size of a study.

    `label` names it in points' names (`n2`: two nodes; `r2`: two ranks of one host); `launch` are the words for
    launch, which say the ranks outright, so that a study means the same wherever it goes on; `threads` how many
    launch gives each rank, None where the user's OMP_NUM_THREADS or the later job says it.
    """

    label: str
    nodes: int
    ranks: int
    launch: tuple[str, ...]
    threads: int | None


def find_sizes(options: Options, env: Mapping[str, str]) -> list[Size]:
    """The sizes from small to large, for the reservation here, or for the jobs that are to be submitted.

    Raises:
        UserError: more nodes than the reservation has, or ranks that launch would not start.
    """
    if options.ranks and options.submit is not None:
        raise UserError("sizes of one host, and a job for each", where="--ranks, --submit",
                        instead="--nodes with --submit; for --ranks one reservation of one node is enough")
    if options.ranks:
        return [_on_one_host(ranks, options, env) for ranks in sorted(options.ranks)]
    if options.submit is not None:
        return [_in_a_job(nodes, options, env) for nodes in sorted(options.nodes)]
    return [_in_reservation(nodes, options, env) for nodes in sorted(options.nodes)]


def reservation(hosts: str | None, launch_words: tuple[str, ...], env: Mapping[str, str]) -> Allocation:
    """The hosts that a study may use.

    Raises:
        UserError: this process is one of a launch's ranks.
    """
    launch = parse_launch((*launch_words, "true"))
    hosts_from = "--hostfile" if launch.hostfile else "--hosts" if hosts else None
    found = supplement(find_allocation(env, launch.scheduler, hosts_from), env, QUICK)
    if found.scheduler == local.STARTED:
        raise UserError("a study starts its ranks itself, and this is one of a launch's already",
                        where=found.source,
                        instead="ezpz-llm scale … without launch, in the shell or script of the reservation")
    return select_hosts(found, None, hosts, launch.hostfile)


def carving(allocation: Allocation, hosts: tuple[str, ...]) -> tuple[str, ...]:
    """The words by which launch keeps to `hosts`; none where there is only this machine."""
    is_all = allocation.scheduler == local.NAME and len(allocation.hosts) == 1
    return () if is_all else ("--hosts", ",".join(hosts))


def _in_reservation(nodes: int, options: Options, env: Mapping[str, str]) -> Size:
    allocation = reservation(options.hosts, options.launch_words, env)
    if nodes > len(allocation.hosts):
        raise UserError(f"a point of {nodes} nodes, and there are {len(allocation.hosts)}: "
                        f"{', '.join(host.name for host in allocation.hosts[:8])}", where=allocation.source,
                        instead=f"--nodes up to {len(allocation.hosts)}, a larger reservation, "
                                '--submit "--time 1:00:00", or --ranks 1,2 on one host')
    hosts = tuple(host.name for host in allocation.hosts[:nodes])
    words = (*options.launch_words, *carving(allocation, hosts), *options.command)
    plan = build_plan(parse_launch(("--dry-run", *words)), env)
    return _sized(f"n{nodes}", nodes, len(plan.ranks), options, _threads(plan))


def _in_a_job(nodes: int, options: Options, env: Mapping[str, str]) -> Size:
    job = plan_job(parse_submit(["--nodes", str(nodes), *(options.submit or ()), "--", "launch",
                                 *options.launch_words, *options.command]), env)
    return _sized(f"n{nodes}", nodes, job.placement.world_size, options)


def _on_one_host(ranks: int, options: Options, env: Mapping[str, str]) -> Size:
    allocation = reservation(options.hosts, options.launch_words, env)
    words = (*without(options.launch_words, "--ppn"), *carving(allocation, (allocation.hosts[0].name,)), "-n",
             str(ranks), *options.command)
    plan = build_plan(parse_launch(("--dry-run", *words)), env)
    return _sized(f"r{ranks}", 1, ranks, options, _threads(plan))


def _threads(plan: LaunchPlan) -> int | None:
    setting = plan.env.get(THREADS_VARIABLE)
    return int(setting.value) if setting else None


def _sized(label: str, nodes: int, ranks: int, options: Options, threads: int | None = None) -> Size:
    per_host, rest = divmod(ranks, nodes)
    words = (*options.launch_words, "-n", str(ranks))
    if not rest:
        words = (*without(words, "--ppn"), "--ppn", str(per_host))
    return Size(label, nodes, ranks, words, threads)


LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "tp2", "pp2")
"""Layouts that `--what layouts` compares if none are named, as far as they can run."""

MEASURING = {"--steps": "60", "--trace-steps": "5", "--profile": "false", "--save-every": "-1", "--eval-every": "0",
             "--eval-tokens": "4096", "--sample-tokens": "0"}
"""Options that a study adds to the command if it does not set them: few steps, some of them traced, and nothing
between them. The times leave the traced ones out."""

_GLOBAL_BATCH, _MICRO_BATCH, _ACCUMULATION = (
    ("--global-batch-size", "--global-batch"), ("--micro-batch-size", "--micro-batch"),
    ("--gradient-accumulation-steps", "--accumulation"))
"""The options of a batch, each with its old name."""
_AT_ONCE = 4
"""Checks at the same time: each is a Python of half a second."""


@dataclass(frozen=True)
class _Wanted:
    """A point that is still to be checked."""

    mode: Mode
    layout: str
    size: Size
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """The point in files and tables: mode, layout and size."""
        return f"{self.mode}-{self.layout}-{self.size.label}"

    @property
    def what(self) -> str:
        """The point in messages."""
        return f"point {self.name}, on {self.size.ranks} rank{'s' * (self.size.ranks > 1)}"


def plan_study(options: Options, env: Mapping[str, str], directory: Path, typed: Sequence[str]) -> Study:
    """The study that was asked for; nothing is written.

    Raises:
        UserError: a size that is not to be had, a layout or batch that cannot run on one of the sizes.
    """
    for words in (options.command, options.launch_words):
        if has_secret(words, env):
            raise UserError("the command has a secret in it, which the study's files would keep",
                            where="the command after --", instead="set it in the environment")
    sizes = find_sizes(options, env)
    if is_own_script(options.command):
        return _study_of_a_script(options, sizes, directory, typed)
    commands, notes = _commands(options, sizes, directory)
    if options.what == "layouts" and len(commands) < 2:
        raise UserError(f"one layout ({', '.join(commands)}) is not a comparison", where="--what layouts",
                        instead="--ds-config zero1,zero3, or none, also in the command, for all that can run")
    mode = options.mode or ("strong" if options.what == "layouts" else "weak")
    wanted: list[_Wanted] = []
    if mode in ("weak", "both"):
        for layout, command in commands.items():
            wanted += _weak(layout, command, sizes, directory)
    if mode in ("strong", "both"):
        found, note = _strong(commands, sizes, directory)
        wanted, notes = wanted + found, [*notes, note]
    points = _checked(wanted, directory)
    return Study(what=options.what, mode=mode, unit="nodes" if options.nodes else "ranks", repeats=options.repeats,
                 seed=options.seed, typed=tuple(typed), directory=str(directory), hosts=options.hosts,
                 threads=sizes[-1].threads,
                 points=points, notes=tuple(notes))


def _study_of_a_script(options: Options, sizes: Sequence[Size], directory: Path, typed: Sequence[str]) -> Study:
    """The study of a script of the user's own, which takes no options of ours. A rank's step counts as a sequence:
    how many tokens that has is in the script's own lines.
    """
    name = re.sub(r"\W", "-", read_command(options.command).name)
    points = tuple(Point(f"weak-{name}-{size.label}", "weak", name, size.nodes, size.ranks, size.ranks, 1, 1,
                         size.launch, options.command) for size in sizes)
    return Study(what=options.what, mode="weak", unit="nodes" if options.nodes else "ranks",
                 repeats=options.repeats, seed=options.seed, typed=tuple(typed), directory=str(directory),
                 hosts=options.hosts, threads=sizes[-1].threads, points=points,
                 notes=(f"a step of a rank of {name} is one sequence here, of as many tokens as it records",))


def _commands(options: Options, sizes: Sequence[Size],
              directory: Path) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """The command under each layout, by the layout's name; and what was left out."""
    command = options.command
    for option, value in MEASURING.items():
        if value_of(command, option) is None:
            command += (option, value)
    if options.what == "layouts" and not options.ds_configs and value_of(command, "--ds-config") is None:
        return _that_can_run(command, sizes[0].ranks, directory)
    if not options.ds_configs:
        return {ask(command, sizes[0].ranks, directory, "the command").layout: command}, []
    commands = {Path(name).stem: (*command, "--ds-config", name) for name in options.ds_configs}
    if len(commands) < len(options.ds_configs):
        raise UserError("two layouts have the same name", where=f"--ds-config {','.join(options.ds_configs)}",
                        instead="files with names of their own")
    return commands, []


def _that_can_run(command: tuple[str, ...], ranks: int,
                  directory: Path) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    commands, notes = {}, []
    for layout in LAYOUTS:
        words = (*command, "--ds-config", layout)
        try:
            ask(words, ranks, directory, layout)
        except UserError as error:
            notes.append(f"left out: {error.found}")
        else:
            commands[layout] = words
    if not commands:
        raise UserError("; ".join(notes), where="--what layouts",
                        instead="--ds-config with layouts that can run here")
    return commands, notes


def _weak(layout: str, command: tuple[str, ...], sizes: Sequence[Size], directory: Path) -> list[_Wanted]:
    """Each rank takes at every size what it takes at the smallest."""
    base = ask(command, sizes[0].ranks, directory, f"weak-{layout}-{sizes[0].label}")
    words = (*without(command, *_GLOBAL_BATCH, *_MICRO_BATCH, *_ACCUMULATION),
             _MICRO_BATCH[0], str(base.micro_batch), _ACCUMULATION[0], str(base.accumulation))
    return [_Wanted("weak", layout, size, words) for size in sizes]


def _strong(commands: Mapping[str, tuple[str, ...]], sizes: Sequence[Size],
            directory: Path) -> tuple[list[_Wanted], str]:
    """The command's global batch at every size; where it names none, what the largest size takes by itself."""
    first = next(iter(commands.values()))
    typed = value_of(first, *_GLOBAL_BATCH)
    if typed is not None and value_of(first, *_ACCUMULATION) is not None:
        raise UserError("accumulation is what a strong study solves",
                        where="--gradient-accumulation-steps in the command",
                        instead="leave it out, or give --micro-batch-size in its place")
    if typed is not None:
        global_batch, note = typed, f"strong: every step has {typed} sequences, as the command says"
    else:
        most = [ask(command, sizes[-1].ranks, directory, f"strong-{layout}-{sizes[-1].label}")
                for layout, command in commands.items()]
        global_batch = str(max(answer.global_batch for answer in most))
        note = (f"strong: every step has {global_batch} sequences, the default of "
                f"{counted(sizes[-1].ranks, 'rank')}; --global-batch-size in the command gives another number")
    return [_Wanted("strong", layout, size, (*without(command, *_GLOBAL_BATCH, *_ACCUMULATION),
                                             _GLOBAL_BATCH[0], global_batch))
            for layout, command in commands.items() for size in sizes], note


def _checked(wanted: Sequence[_Wanted], directory: Path) -> tuple[Point, ...]:
    def asked(one: _Wanted) -> Answer:
        return ask(one.command, one.size.ranks, directory, one.what)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(asked, wanted))
    return tuple(Point(one.name, one.mode, one.layout, one.size.nodes, one.size.ranks, answer.global_batch,
                       answer.micro_batch, answer.accumulation, one.size.launch, one.command)
                 for one, answer in zip(wanted, answers, strict=True))


class Answer(NamedTuple):
    """What a command that can run takes: the layout's name, and its batch in sequences."""

    layout: str
    global_batch: int
    micro_batch: int
    accumulation: int


def ask(command: Sequence[str], ranks: int, directory: Path, what: str) -> Answer:
    """Check `command` for so many ranks with its own `--check --json`. Starts no rank and imports no torch.

    Args:
        what: names the command in the message.

    Raises:
        UserError: the check fails; its own words are passed on.
    """
    env = {name: value for name, value in os.environ.items() if name != RUN_DIR_VARIABLE}
    done = run_check(command, ranks, env, "--json", cwd=directory, what=f"the check of {what}")
    try:
        report = as_dataclass(CheckReport, parse_json(done.stdout, what), what)
    except UserError as error:  # it ended before it could say anything
        raise UserError(f"{what} cannot run: {(done.stderr or done.stdout).strip()}") from error
    if done.returncode or report.layout is None:
        raise UserError(f"{what} cannot run: {report.error or report.explanation}", where=report.where,
                        instead=report.instead)
    return Answer(report.layout, report.global_batch or 0, report.micro_batch or 0, report.accumulation or 0)
