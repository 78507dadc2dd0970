"""The sizes of a study: how many ranks each has, and the words that make launch start them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ezpz_llm.base.errors import UserError
from ezpz_llm.launch.host_selection import narrow
from ezpz_llm.launch.option_parsing import parse as parse_launch
from ezpz_llm.launch.plan import LaunchPlan, build_plan
from ezpz_llm.launch.schedulers import QUICK, find_allocation, local, started, supplement
from ezpz_llm.launch.schedulers.scheduler import Allocation
from ezpz_llm.scaling.options import Options, without
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
    if found.scheduler == started.NAME:
        raise UserError("a study starts its ranks itself, and this is one of a launch's already",
                        where=found.source,
                        instead="ezpz-llm scale … without launch, in the shell or script of the reservation")
    return narrow(found, None, hosts, launch.hostfile)


def carving(allocation: Allocation, hosts: tuple[str, ...]) -> tuple[str, ...]:
    """The words by which launch keeps to `hosts`; none where there is only this machine."""
    if allocation.scheduler == local.NAME and len(allocation.hosts) == 1:
        return ()
    return ("--hosts", ",".join(hosts))


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
    job = plan_job(parse_submit(["--nodes", str(nodes), *options.submit, "--", "launch", *options.launch_words,
                                 *options.command]), env)
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
