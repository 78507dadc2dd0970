"""Comparison of the ranks' records of their latest collectives: the first one in which they differ (no torch)."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ezpz_llm.core.base import group_by_key, open_regular
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.hostlist import rank_ranges

_MAX_BYTES = 1 << 26
_MAX_RANKS_READ = 4096
_SAME_SIZES = ("all_reduce", "allreduce", "broadcast", "_broadcast", "reduce", "_reduce", "all_gather",
               "_all_gather")
"""Beginnings of the names of collectives whose inputs have the same sizes on all ranks."""
_WORLD = "default_pg"
"""torch's description of the group of all ranks."""


@dataclass(frozen=True)
class _Call:
    """A rank's call of a collective: `number` counts the calls in its group, from 1."""

    number: int
    name: str
    sizes: str
    created: int

    @property
    def comparable(self) -> tuple[str, str]:
        """Name and sizes, as far as they must be equal on all ranks of the group."""
        return self.name, self.sizes if self.name.startswith(_SAME_SIZES) else ""

    def __str__(self) -> str:
        return f"{self.name}({self.sizes})"


_Calls = dict[str, dict[int, _Call]]
"""A rank's calls by group and number."""


@dataclass(frozen=True)
class _Record:
    """A rank's record.

    Attributes:
        names: torch's description of each group.
        members: ranks of each group, if the backend lists them.
    """

    calls: _Calls
    names: Mapping[str, str]
    members: Mapping[str, frozenset[int]]


class _PlainUnpickler(pickle.Unpickler):
    """Reader of pickled numbers, texts, lists, and dictionaries. Another user may have written the file."""

    def find_class(self, module: str, name: str) -> Any:
        """Reject every class and function."""
        raise pickle.UnpicklingError(f"{module}.{name} in a record of collectives")


def describe_difference(run_dir: RunDir, since: float = 0.0) -> str | None:
    """Describe the first collective in which the ranks' records differ, or the last one if they agree.

    Args:
        since: ignore records of an earlier time.

    Returns:
        None if fewer than two ranks have a record.
    """
    records = dict(_read_records(run_dir, since))
    if len(records) < 2:
        return None
    groups = sorted({group for record in records.values() for group in record.calls})
    differences = [found for group in groups if (found := _first_difference(group, records)) is not None]
    if differences:
        return min(differences)[1]
    calls = [call for record in records.values() for by_number in record.calls.values()
             for call in by_number.values()]
    if not calls:
        return None
    last = max(calls, key=lambda call: call.created)
    return f"the collectives of {rank_ranges(records)} agree; the last one is {last}"


def _first_difference(group: str, records: Mapping[int, _Record]) -> tuple[int, str] | None:
    """Return the time and description of the first difference in a group, or None if its ranks agree."""
    of_rank = {rank: records[rank].calls.get(group, {}) for rank in _members(group, records)}
    called = [calls for calls in of_rank.values() if calls]
    if len(of_rank) < 2 or not called:
        return None
    # A record has only the latest calls, so that older ones may be missing on some ranks.
    first = max(min(calls) for calls in called)
    last = max(max(calls) for calls in called)
    for number in range(first, last + 1):
        present = {rank: calls[number] for rank, calls in of_rank.items() if number in calls}
        kinds = group_by_key((call.comparable, rank) for rank, call in present.items())
        if len(present) == len(of_rank) and len(kinds) == 1:
            continue
        if not present:
            continue
        created = min(call.created for call in present.values())
        what = f"collective {number} of {_describe_group(group, records, of_rank)}"
        if len(kinds) > 1:
            calls_of = "; ".join(f"{rank_ranges(ranks)}: {present[ranks[0]]}" for ranks in kinds.values())
            return created, f"ranks differ in {what}: {calls_of}"
        missing = sorted(of_rank.keys() - present.keys())
        return created, (f"{rank_ranges(missing)} did not call {what}, {next(iter(present.values()))}, which "
                         f"{rank_ranges(present)} called")
    return None


def _members(group: str, records: Mapping[int, _Record]) -> list[int]:
    """Return the ranks of a group that have a record."""
    listed = frozenset().union(*(record.members.get(group, frozenset()) for record in records.values()))
    is_world = any(record.names.get(group) == _WORLD for record in records.values())
    return sorted(rank for rank in records if is_world or rank in listed or group in records[rank].calls)


def _describe_group(group: str, records: Mapping[int, _Record], ranks: Iterable[int]) -> str:
    is_world = any(record.names.get(group) == _WORLD for record in records.values())
    return "all ranks" if is_world else f"the group of {rank_ranges(ranks)}"


def _read_records(run_dir: RunDir, since: float) -> Iterator[tuple[int, _Record]]:
    """Yield the ranks with a valid record. Damaged ones are skipped."""
    with contextlib.suppress(OSError):
        for path in sorted(run_dir.collectives.iterdir())[:_MAX_RANKS_READ]:
            number = path.name.removeprefix("rank")
            if not (number.isascii() and number.isdigit()):
                continue
            with contextlib.suppress(Exception):  # unpickling and reading raise many types
                if path.stat().st_mtime >= since:
                    with open_regular(path) as file:
                        data = _PlainUnpickler(io.BytesIO(file.read(_MAX_BYTES))).load()
                    yield int(number), _parse(data)


def _parse(data: Any) -> _Record:
    calls: _Calls = {}
    names: dict[str, str] = {}
    for entry in data["entries"]:
        if entry["is_p2p"]:
            continue
        group, names_of = (str(text) for text in entry["process_group"])
        names[group] = names_of
        number = int(entry["collective_seq_id"])
        sizes = ", ".join(f"{kind} {'x'.join(map(str, size)) or 'scalar'}"
                          for size, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=False))
        name = str(entry["profiling_name"]).rpartition(":")[2]
        calls.setdefault(group, {})[number] = _Call(number, name, sizes, int(entry["time_created_ns"]))
    members = {str(group): frozenset(map(int, re.findall(r"\d+", str(config["ranks"]))))
               for group, config in data.get("pg_config", {}).items()}
    return _Record(calls, names, members)
