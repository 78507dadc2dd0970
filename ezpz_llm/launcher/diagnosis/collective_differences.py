"""First collective in which hanging ranks differ, from their records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ezpz_llm.core.base import group_by_key
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.collective_record import Call, CollectiveRecord, read_records
from ezpz_llm.launcher.basics.hostlist import rank_ranges

_SAME_SIZES = ("all_reduce", "allreduce", "broadcast", "_broadcast", "reduce", "_reduce", "all_gather",
               "_all_gather")
"""Beginnings of the names of collectives whose inputs have the same sizes on all ranks."""
_WORLD = "default_pg"
"""torch's description of the group of all ranks."""

_Records = Mapping[int, CollectiveRecord]


@dataclass(frozen=True)
class _Difference:
    """First difference in a group.

    Attributes:
        created: time of the collective.
        missing: ranks that did not call it; empty if the ranks called different collectives.
        waiting: ranks that called it.
    """

    text: str
    created: int
    missing: frozenset[int]
    waiting: frozenset[int]


def describe_difference(run_dir: RunDir, world_size: int, since: float = 0.0, *,
                        of_timeout: bool = False) -> str | None:
    """Describe the first collective in which hanging ranks differ, or the last one if they agree.

    Call only for ranks that hang: at any moment, some ranks of a healthy run have called a collective and others
    have not.

    Args:
        since: ignore records of an earlier time.
        of_timeout: use the dumps that NCCL writes when a collective times out.

    Returns:
        None if no rank has a record.
    """
    records = read_records(run_dir, since, of_timeout)
    last_calls = [group.calls[-1] for record in records.values() for group in record.groups.values() if group.calls]
    if not last_calls:
        return None
    groups = sorted({name for record in records.values() for name in record.groups})
    differences = [difference for name in groups if (difference := _first_difference(name, records)) is not None]
    if differences:
        return _find_cause(differences).text
    if missing := [rank for rank in range(world_size) if rank not in records]:
        return (f"{rank_ranges(missing)} wrote no record of collectives; those of {rank_ranges(records)} agree")
    return f"all ranks called the same collectives, the last one {max(last_calls, key=lambda call: call.created)}"


def _find_cause(differences: Sequence[_Difference]) -> _Difference:
    """Return the difference that explains the others.

    It is one in which ranks called different collectives, else one whose missing ranks wait in no other group. Time
    is not enough: other ranks may reach their next collective earlier.
    """
    waiting = frozenset().union(*(difference.waiting for difference in differences))
    causes = [difference for difference in differences if not difference.missing & waiting]
    return min(causes or differences, key=lambda difference: (bool(difference.missing), difference.created))


def _first_difference(name: str, records: _Records) -> _Difference | None:
    """Return the first difference in a group, or None if its ranks agree."""
    calls = {rank: {call.number: call for call in records[rank].groups[name].calls}
             for rank in records if name in records[rank].groups}
    calls = {rank: by_number for rank, by_number in calls.items() if by_number}
    if not calls:
        return None
    absent = _members_without_calls(name, records, calls)
    what = f"of {_describe_group(name, records, [*calls, *absent])}"
    # A record has only the last calls, so compare those that all ranks have.
    for number in range(max(map(min, calls.values())), min(map(max, calls.values())) + 1):
        of_number = {rank: by_number[number] for rank, by_number in calls.items() if number in by_number}
        kinds = group_by_key((_comparable(call), rank) for rank, call in of_number.items())
        if len(kinds) > 1:
            different = "; ".join(f"{rank_ranges(ranks)}: {of_number[ranks[0]]}" for ranks in kinds.values())
            return _Difference(f"ranks differ in collective {number} {what}: {different}",
                               min(call.created for call in of_number.values()), frozenset(), frozenset(of_number))
    last = {**{rank: max(by_number) for rank, by_number in calls.items()}, **dict.fromkeys(absent, 0)}
    number = min(last.values()) + 1
    if number > max(last.values()):
        return None
    missing = sorted(rank for rank in last if last[rank] < number)
    called = sorted(rank for rank in last if last[rank] >= number)
    call = next((calls[rank][number] for rank in called if number in calls[rank]), None)
    created = call.created if call is not None else min(min(calls[rank].items())[1].created for rank in called)
    text = (f"{rank_ranges(missing)} did not call collective {number} {what}, "
            f"{'' if call is None else f'{call}, '}which {rank_ranges(called)} called")
    return _Difference(text, created, frozenset(missing), frozenset(called))


def _comparable(call: Call) -> tuple[str, str]:
    """Return name and sizes of a call, as far as they must be equal on all ranks of the group."""
    return call.name, call.inputs if call.name.startswith(_SAME_SIZES) else ""


def _members_without_calls(name: str, records: _Records, calls: Mapping[int, Mapping[int, Call]]) -> list[int]:
    """Return the members of a group that have a record but never called one of its collectives.

    A rank whose recorder has dropped calls as old as the group's last one may have called it.
    """
    listed = {rank for record in records.values() if name in record.groups for rank in record.groups[name].members}
    members = records if _is_world(name, records) else listed
    newest = max(by_number[max(by_number)].created for by_number in calls.values())
    return sorted(rank for rank in members if rank in records and rank not in calls
                  and records[rank].oldest < newest)


def _is_world(name: str, records: _Records) -> bool:
    return any(record.groups[name].description == _WORLD for record in records.values() if name in record.groups)


def _describe_group(name: str, records: _Records, ranks: Iterable[int]) -> str:
    return "all ranks" if _is_world(name, records) else f"the group of {rank_ranges(ranks)}"
