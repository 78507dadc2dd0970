"""Planning of a study: its sizes and points, each checked before anything starts."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.core.base import UserError, count_noun, parse_json
from ezpz_llm.core.base.records import as_record
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, has_secret
from ezpz_llm.launcher.basics.check_report import CheckReport
from ezpz_llm.launcher.jobs.node_selection import select_nodes
from ezpz_llm.launcher.jobs.option_parsing import parse as parse_launch, read_command, remove_options, value_of
from ezpz_llm.launcher.jobs.schedulers import QUICK, find_allocation, local, supplement
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation
from ezpz_llm.launcher.planning.plan import LaunchPlan, build_plan
from ezpz_llm.launcher.running.precheck import run_check
from ezpz_llm.launcher.submit.job import plan_job
from ezpz_llm.launcher.submit.options import parse as parse_submit
from ezpz_llm.training.layout.batch import option_of
from ezpz_llm.verify.scaling.measurement import MIN_STEPS, measured_steps
from ezpz_llm.verify.scaling.options import Options, is_own_script
from ezpz_llm.verify.scaling.study import Mode, Point, Study

THREADS_VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Size:
    """Size of a study.

    Attributes:
        label: part of the points' names: `n2` for two nodes, `r2` for two ranks on one node.
        launch: options for launch, including the number of ranks, so that the study can continue in a different
            allocation.
        threads: threads per rank; None if the user's OMP_NUM_THREADS or the later job sets them.
    """

    label: str
    nodes: int
    ranks: int
    launch: tuple[str, ...]
    threads: int | None


def find_sizes(options: Options, env: Mapping[str, str]) -> list[Size]:
    """Return the sizes in increasing order, for this allocation or for the jobs to submit.

    Raises:
        UserError: the allocation has too few nodes, or launch rejects the ranks.
    """
    if options.ranks and options.submit is not None:
        raise UserError("--submit does not support --ranks", where="--ranks, --submit",
                        instead="--nodes with --submit; for --ranks one allocation of one node is enough")
    if options.ranks:
        return [_single_node_size(ranks, options, env) for ranks in sorted(options.ranks)]
    if options.submit is not None:
        return [_job_size(nodes, options, env) for nodes in sorted(options.nodes)]
    return [_allocation_size(nodes, options, env) for nodes in sorted(options.nodes)]


def study_allocation(hosts: str | None, launch_words: tuple[str, ...], env: Mapping[str, str]) -> Allocation:
    """Return the allocation, reduced to the nodes that a study may use.

    Raises:
        UserError: this process is itself a rank that a launcher started.
    """
    launch = parse_launch((*launch_words, "true"))
    hosts_from = "--hostfile" if launch.hostfile else "--hosts" if hosts else None
    allocation = supplement(find_allocation(env, launch.scheduler, hosts_from), env, QUICK)
    if allocation.scheduler == local.STARTED:
        raise UserError("a study starts its own ranks, but this process is already a rank",
                        where=allocation.source,
                        instead="ezpz-llm scale … without launch, in the job's shell or script")
    return select_nodes(allocation, None, hosts, launch.hostfile)


def hosts_options(allocation: Allocation, hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Return launch's options that restrict it to `hosts`; empty if there is only this machine."""
    is_only_machine = allocation.scheduler == local.NAME and len(allocation.hosts) == 1
    return () if is_only_machine else ("--hosts", ",".join(hosts))


def _allocation_size(nodes: int, options: Options, env: Mapping[str, str]) -> Size:
    allocation = study_allocation(options.hosts, options.launch_words, env)
    if nodes > len(allocation.hosts):
        raise UserError(f"a point requires {nodes} nodes, but there are {len(allocation.hosts)}: "
                        f"{', '.join(host.name for host in allocation.hosts[:8])}", where=allocation.source,
                        instead=f"--nodes up to {len(allocation.hosts)}, a larger allocation, "
                                '--submit "--time 1:00:00", or --ranks 1,2 on one node')
    plan = _plan_launch(allocation, nodes, options.launch_words, options, env)
    return _make_size(f"n{nodes}", nodes, len(plan.ranks), options, plan)


def _single_node_size(ranks: int, options: Options, env: Mapping[str, str]) -> Size:
    allocation = study_allocation(options.hosts, options.launch_words, env)
    launch_words = (*remove_options(options.launch_words, "--ppn"), "-n", str(ranks))
    return _make_size(f"r{ranks}", 1, ranks, options, _plan_launch(allocation, 1, launch_words, options, env))


def _job_size(nodes: int, options: Options, env: Mapping[str, str]) -> Size:
    job = plan_job(parse_submit(["--nodes", str(nodes), *(options.submit or ()), "--", "launch",
                                 *options.launch_words, *options.command]), env)
    return _make_size(f"n{nodes}", nodes, job.placement.world_size, options)


def _plan_launch(allocation: Allocation, nodes: int, launch_words: Sequence[str], options: Options,
                 env: Mapping[str, str]) -> LaunchPlan:
    """Return launch's plan on the first nodes of the allocation."""
    hosts = tuple(host.name for host in allocation.hosts[:nodes])
    arguments = (*launch_words, *hosts_options(allocation, hosts), *options.command)
    return build_plan(parse_launch(("--dry-run", *arguments)), env)


def _make_size(label: str, nodes: int, ranks: int, options: Options, plan: LaunchPlan | None = None) -> Size:
    per_node, remainder = divmod(ranks, nodes)
    arguments = (*options.launch_words, "-n", str(ranks))
    if not remainder:
        arguments = (*remove_options(arguments, "--ppn"), "--ppn", str(per_node))
    threads = plan.env.get(THREADS_VARIABLE) if plan else None
    return Size(label, nodes, ranks, arguments, int(threads.value) if threads else None)


LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "tp2", "pp2")
"""Layouts that `--what layouts` compares by default, without those that cannot run."""

MEASURING = {"--steps": "60", "--trace-steps": "5", "--profile": "false", "--save-every": "-1", "--eval-every": "0",
             "--eval-tokens": "4096", "--sample-tokens": "0"}
"""Default options of a point's command: few steps, some of them traced, without evaluations or saves in between.

Step times exclude the traced steps.
"""

_GLOBAL_BATCH, _MICRO_BATCH, _ACCUMULATION = map(option_of, ("global_batch", "micro_batch", "accumulation"))
_PARALLEL_CHECKS = 4
"""Concurrent checks: each starts a Python process of half a second."""


@dataclass(frozen=True)
class _Candidate:
    """A point before its check."""

    mode: Mode
    layout: str
    size: Size
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the point in files and tables: mode, layout and size."""
        return f"{self.mode}-{self.layout}-{self.size.label}"


def plan_study(options: Options, env: Mapping[str, str], directory: Path, typed: Sequence[str]) -> Study:
    """Plan and check a study, without writing files.

    Raises:
        UserError: a size is not available, or a layout or batch cannot run at one of the sizes.
    """
    for arguments in (options.command, options.launch_words):
        if has_secret(arguments, env):
            raise UserError("the command contains a secret, which the study's files would store",
                            where="the command after --", instead="set it in the environment")
    sizes = find_sizes(options, env)
    plan_points = _points_of_script if is_own_script(options.command) else _points_of_trainer
    points, notes = plan_points(options, sizes, directory)
    return Study(unit="nodes" if options.nodes else "ranks", repeats=options.repeats, seed=options.seed,
                 typed=tuple(typed), directory=str(directory), hosts=options.hosts, threads=sizes[-1].threads,
                 points=points, notes=tuple(notes))


def _points_of_trainer(options: Options, sizes: Sequence[Size],
                       directory: Path) -> tuple[tuple[Point, ...], list[str]]:
    commands, notes = _commands(options, sizes, directory)
    if options.what == "layouts" and len(commands) < 2:
        raise UserError(f"a comparison requires two layouts, not only {', '.join(commands)}",
                        where="--what layouts",
                        instead="--ds-config zero1,zero3, or omit --ds-config to compare all layouts that can run")
    mode = options.mode or ("strong" if options.what == "layouts" else "weak")
    candidates: list[_Candidate] = []
    if mode in ("weak", "both"):
        for layout, command in commands.items():
            candidates += _weak_candidates(layout, command, sizes, directory)
    if mode in ("strong", "both"):
        strong, note = _strong_candidates(commands, sizes, directory)
        candidates, notes = candidates + strong, [*notes, note]
    return _check_candidates(candidates, directory), notes


def _points_of_script(options: Options, sizes: Sequence[Size],
                      _directory: Path) -> tuple[tuple[Point, ...], list[str]]:
    """Return the points of a user's script, which does not support the trainer's options.

    Each rank's part of a step is recorded as one sequence. The script's own records contain its number of tokens.
    """
    name = re.sub(r"\W", "-", read_command(options.command).name)
    points = tuple(Point(f"weak-{name}-{size.label}", "weak", name, size.nodes, size.ranks, size.ranks, 1, 1,
                         size.launch, options.command) for size in sizes)
    return points, [f"the tables show a step of one rank of {name} as one sequence; its records contain the number "
                    "of tokens"]


def _commands(options: Options, sizes: Sequence[Size],
              directory: Path) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return the command for each layout by the layout's name, and notes on omitted layouts."""
    command = options.command
    for option, value in MEASURING.items():
        if value_of(command, option) is None:
            command += (option, value)
    _check_steps(command)
    if options.what == "layouts" and not options.ds_configs and value_of(command, "--ds-config") is None:
        return _runnable_commands(command, sizes[0].ranks, directory)
    if not options.ds_configs:
        first, last = (check_command(command, size.ranks, directory,
                                     f"the command on {count_noun(size.ranks, 'rank')}").layout
                       for size in (sizes[0], sizes[-1]))
        if first != last:  # a single rank has another default layout
            command += ("--ds-config", last)
        return {last: command}, []
    commands = {Path(name).stem: (*command, "--ds-config", name) for name in options.ds_configs}
    if len(commands) < len(options.ds_configs):
        raise UserError("two layouts have the same name", where=f"--ds-config {','.join(options.ds_configs)}",
                        instead="files with different names")
    return commands, []


def _check_steps(command: Sequence[str]) -> None:
    """Check that a run has enough steady steps for its measurement.

    Raises:
        UserError: it has too few. Every run of the study would fail.
    """
    steps, trace_steps = (value_of(command, option) or "" for option in ("--steps", "--trace-steps"))
    if not (steps.isdecimal() and trace_steps.isdecimal()):
        return  # the command's own check names the value
    count = partial(measured_steps, trace_steps=int(trace_steps),
                    has_profile=value_of(command, "--profile") != "false")
    if (found := count(int(steps))) < MIN_STEPS:
        enough = next(more for more in itertools.count(int(steps)) if count(more) >= MIN_STEPS)
        raise UserError(f"{steps} steps, {trace_steps} of them traced, leave {found} to measure, but a measurement "
                        f"needs {MIN_STEPS}", where=f"--steps {steps} --trace-steps {trace_steps}",
                        instead=f"--steps {enough} or more")


def _runnable_commands(command: tuple[str, ...], ranks: int,
                       directory: Path) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    commands, notes = {}, []
    for layout in LAYOUTS:
        candidate = (*command, "--ds-config", layout)
        try:
            check_command(candidate, ranks, directory, layout)
        except UserError as error:
            notes.append(f"omitted: {error.found}")
        else:
            commands[layout] = candidate
    if not commands:
        raise UserError("; ".join(notes), where="--what layouts",
                        instead="--ds-config with layouts that can run here")
    return commands, notes


def _weak_candidates(layout: str, command: tuple[str, ...], sizes: Sequence[Size],
                     directory: Path) -> list[_Candidate]:
    """Return the weak-scaling points, all with the batch per rank of the smallest size."""
    base = check_command(command, sizes[0].ranks, directory, f"weak-{layout}-{sizes[0].label}")
    fixed_batch = (*remove_options(command, _GLOBAL_BATCH, _MICRO_BATCH, _ACCUMULATION),
                   _MICRO_BATCH, str(base.micro_batch), _ACCUMULATION, str(base.accumulation))
    return [_Candidate("weak", layout, size, fixed_batch) for size in sizes]


def _strong_candidates(commands: Mapping[str, tuple[str, ...]], sizes: Sequence[Size],
                       directory: Path) -> tuple[list[_Candidate], str]:
    """Return the strong-scaling points and a note on the global batch.

    The global batch is the one in the command, else the default at the largest size.
    """
    first = next(iter(commands.values()))
    typed = value_of(first, _GLOBAL_BATCH)
    if typed is not None and value_of(first, _ACCUMULATION) is not None:
        raise UserError("a strong-scaling study computes the accumulation steps itself",
                        where="--gradient-accumulation-steps in the command",
                        instead="leave it out, or pass --micro-batch-size instead")
    if typed is not None:
        global_batch, note = typed, f"strong: the global batch is {typed} sequences, from the command"
    else:
        largest = [check_command(command, sizes[-1].ranks, directory, f"strong-{layout}-{sizes[-1].label}")
                   for layout, command in commands.items()]
        global_batch = str(max(answer.global_batch for answer in largest))
        note = (f"strong: the global batch is {global_batch} sequences, the default of "
                f"{count_noun(sizes[-1].ranks, 'rank')}; add --global-batch-size to the command to change it")
    return [_Candidate("strong", layout, size, (*remove_options(command, _GLOBAL_BATCH, _ACCUMULATION),
                                                _GLOBAL_BATCH, global_batch))
            for layout, command in commands.items() for size in sizes], note


def _check_candidates(candidates: Sequence[_Candidate], directory: Path) -> tuple[Point, ...]:
    def check(candidate: _Candidate) -> CheckedBatch:
        ranks = candidate.size.ranks
        return check_command(candidate.command, ranks, directory,
                             f"point {candidate.name} on {count_noun(ranks, 'rank')}")

    with ThreadPoolExecutor(_PARALLEL_CHECKS) as pool:
        answers = list(pool.map(check, candidates))
    return tuple(Point(candidate.name, candidate.mode, candidate.layout, candidate.size.nodes,
                       candidate.size.ranks, answer.global_batch, answer.micro_batch, answer.accumulation,
                       candidate.size.launch, candidate.command)
                 for candidate, answer in zip(candidates, answers, strict=True))


class CheckedBatch(NamedTuple):
    """Layout and batch, in sequences, of a command that passed its check."""

    layout: str
    global_batch: int
    micro_batch: int
    accumulation: int


def check_command(command: Sequence[str], ranks: int, directory: Path, what: str) -> CheckedBatch:
    """Check `command` for a number of ranks with its `--check --json`, without starting ranks or importing torch.

    Args:
        what: name of the command in error messages.

    Raises:
        UserError: the check fails. The message contains the check's error.
    """
    env = {name: value for name, value in os.environ.items() if name != RUN_DIR_VARIABLE}
    process = run_check(command, ranks, env, "--json", cwd=directory, what=f"the check of {what}")
    try:
        report = as_record(CheckReport, parse_json(process.stdout, what), what)
    except UserError as error:  # it crashed before it could print a report
        raise UserError(f"{what} cannot run: {(process.stderr or process.stdout).strip()}") from error
    if process.returncode or report.layout is None:
        raise UserError(f"{what} cannot run: {report.error or report.explanation}", where=report.where,
                        instead=report.instead)
    return CheckedBatch(report.layout, report.global_batch or 0, report.micro_batch or 0, report.accumulation or 0)
