"""Which host or link is slow, by comparison with the others only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

from ezpz_llm.check.judge.gathered import (
    COMPUTE,
    LINK,
    NODE,
    READY,
    Finding,
    Gathered,
    Level,
    collected,
    format_rate,
    rank_ranges,
    stage_name,
)

SLOW, VERY_SLOW = 2.0, 5.0
"""Times slower than the median: worth a word, and not worth a start."""
_SPREADS = 3.0
_MAD_TO_DEVIATION = 1.4826
Key = TypeVar("Key", bound=Hashable)


def judge(gathered: Gathered) -> Iterator[Finding]:
    """Findings on the speed of ranks, of reductions on a host and between hosts, and on those that failed."""
    yield from _failed(gathered)
    yield from _compute(gathered)
    yield from _nodes(gathered)
    yield from _links(gathered)


def outliers(rates: Mapping[Key, float]) -> dict[Key, float]:
    """Who is slow, and how many times slower than the median.

    On a logarithmic scale, since load makes rates differ by factors: at least SLOW times below the median, and
    three robust standard deviations (1.4826 x the median absolute deviation, which outliers do not move). So two
    values name nobody, and neither does noise that spreads all values.
    """
    if not rates:
        return {}
    # What did not move at all within the time is slower than any number.
    logs = {key: math.log(max(rate, 1e-9)) for key, rate in rates.items()}
    middle = statistics.median(logs.values())
    spread = _MAD_TO_DEVIATION * statistics.median(abs(value - middle) for value in logs.values())
    least = max(math.log(SLOW), _SPREADS * spread)
    return {key: math.exp(middle - value) for key, value in logs.items() if middle - value > least}


def _level(times: float) -> Level:
    return "bad" if times >= VERY_SLOW else "warn"


def _compute(gathered: Gathered) -> Iterator[Finding]:
    rates = {facts["rank"]: answer["flops_per_second"] for facts, answer in gathered.measured(COMPUTE)}
    slow = outliers(rates)
    if not slow:
        return
    usual = format_rate(statistics.median(rates.values()), "FLOP/s")
    hosts = {facts["rank"]: facts["host"] for facts in gathered.told}
    for host, numbers in collected((hosts[rank], rank) for rank in slow).items():
        all_of_it = all(facts["rank"] in slow for facts in gathered.by_host()[host])
        who = host if all_of_it else f"{rank_ranges(numbers)} on {host}"
        worst = max(numbers, key=slow.__getitem__)
        verb = "is" if all_of_it or len(numbers) == 1 else "are"
        yield Finding(_level(slow[worst]), "speed",
                      f"{who} {verb} slow: {slow[worst]:.1f} times slower in a matrix product than the median rank "
                      f"({format_rate(rates[worst], 'FLOP/s')}, median {usual})",
                      f"look for other processes, heat or a power limit on {host} (top, nvidia-smi -q -d "
                      "PERFORMANCE), or leave it out with launch --hosts")


def _nodes(gathered: Gathered) -> Iterator[Finding]:
    rates: dict[str, float] = {}
    for facts, answer in gathered.measured(NODE):
        rates[facts["host"]] = min(answer["bytes_per_second"], rates.get(facts["host"], math.inf))
    for host, times in outliers(rates).items():
        yield Finding(_level(times), "links",
                      f"all-reduces among the ranks of {host} are {times:.1f} times slower than on the median host "
                      f"({format_rate(rates[host], 'B/s')})",
                      "look at the links between its devices (nvidia-smi topo -m, nvlink -s), or leave it out")


def link_rates(gathered: Gathered) -> dict[str, float]:
    """The bandwidth of each host to its neighbours, bytes a second.

    Of its two neighbours the better one counts: a host with a bad link is slow with both, its neighbours only with
    it. Of the ranks of a host the slowest counts.
    """
    rounds: dict[tuple[str, str], float] = {}
    for facts in gathered.told:
        for stage, answer in facts.get("stages", {}).items():
            if stage.startswith(LINK) and "bytes_per_second" in answer:
                key = (facts["host"], stage)
                rounds[key] = min(answer["bytes_per_second"], rounds.get(key, math.inf))
    best: dict[str, float] = {}
    for (host, _), rate in rounds.items():
        best[host] = max(rate, best.get(host, 0.0))
    return best


def _links(gathered: Gathered) -> Iterator[Finding]:
    rates = link_rates(gathered)
    if not rates:
        return
    usual = format_rate(statistics.median(rates.values()), "B/s")
    for host, times in outliers(rates).items():
        yield Finding(_level(times), "links",
                      f"the link of {host} is slow: all-reduces with its neighbours are {times:.1f} times slower "
                      f"than on the median host ({format_rate(rates[host], 'B/s')}, median {usual})",
                      f"look at the network adapter of {host} (ethtool, ip -s link), or leave it out with "
                      "launch --hosts")


def _failed(gathered: Gathered) -> Iterator[Finding]:
    for stage in (READY, COMPUTE, NODE):
        errors = [((facts["host"], facts["stages"][stage]["error"]), facts["rank"]) for facts in gathered.told
                  if "error" in facts.get("stages", {}).get(stage, {})]
        for (host, error), numbers in collected(errors).items():
            yield Finding("bad", "torch" if stage == READY else "links",
                          f"{rank_ranges(numbers)} on {host} failed in {stage_name(stage)}: {error}",
                          "the same command on that host alone shows more: python3 -m ezpz_llm.test_dist")
    yield from _failed_links(gathered)


def _failed_links(gathered: Gathered) -> Iterator[Finding]:
    """Hosts whose every link failed; where both ends of one have no other that works, both are named."""
    worked = set(link_rates(gathered))
    failed: dict[str, str] = {}
    for facts in gathered.told:
        for stage, answer in facts.get("stages", {}).items():
            if stage.startswith(LINK) and "error" in answer and facts["host"] not in worked:
                failed.setdefault(facts["host"], answer["error"])
    for host, error in failed.items():
        yield Finding("bad", "links", f"all-reduces between {host} and its neighbours fail: {error}",
                      "the interface that ranks talk on has to reach every host: launch --interface NAME")
