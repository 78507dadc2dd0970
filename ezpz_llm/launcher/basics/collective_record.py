"""Record of the latest collectives of a rank, reduced from torch's flight recorder (standard library only).

The recorder's dump has about 300 bytes for each of thousands of calls. A record has the last calls of each group.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import as_dataclass, open_regular, parse_json
from ezpz_llm.core.rundir import RunDir

_CALLS_KEPT = 50
_MAX_BYTES = 1 << 24
_TIMEOUT_DUMP = "nccl_rank"
_RECORD = re.compile(r"rank(\d{1,7})\.json")
_DUMP = re.compile(_TIMEOUT_DUMP + r"(\d{1,7})")


@dataclass(frozen=True)
class Call:
    """Call of a collective.

    Attributes:
        number: the group's calls are counted from 1.
        inputs: dtypes and shapes, such as "Float 8x4".
        created: time of the call on the clock of its node, in ns.
    """

    number: int
    name: str
    inputs: str
    created: int

    def __str__(self) -> str:
        return f"{self.name}({self.inputs})"


@dataclass(frozen=True)
class GroupCalls:
    """Last calls in a process group, oldest first.

    Attributes:
        description: torch's description of the group.
        members: ranks of the group, if the backend lists them.
    """

    description: str
    members: tuple[int, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class CollectiveRecord:
    """Latest collectives of a rank.

    Attributes:
        token: token of the order to write the record; "" for a dump of NCCL.
        oldest: time of the oldest call that the recorder still had, or 0 if it had all calls.
        groups: calls by backend and torch's name of the group: a group may have a backend for each kind of device.
    """

    token: str = ""
    oldest: int = 0
    groups: dict[str, GroupCalls] = field(default_factory=dict)


def reduce_dumps(dumps: Sequence[dict[str, Any]], token: str, buffer_size: int) -> CollectiveRecord:
    """Reduce dumps of a rank's flight recorders to a record. Sends and receives are omitted.

    Args:
        buffer_size: number of calls that a recorder keeps.

    Raises:
        TypeError, ValueError, KeyError: a dump has another form.
    """
    calls: dict[str, list[Call]] = {}
    descriptions: dict[str, str] = {}
    members: dict[str, tuple[int, ...]] = {}
    oldest = 0
    for dump in dumps:
        entries = dump["entries"]
        if entries and len(entries) >= buffer_size:
            oldest = max(oldest, min(_integer(entry["time_created_ns"]) for entry in entries))
        for entry in entries:
            if entry["is_p2p"]:
                continue
            backend, _, operation = _text(entry["profiling_name"]).rpartition(":")
            name, description = (_text(value) for value in entry["process_group"])
            group = f"{backend} {name}"
            descriptions[group] = description
            inputs = ", ".join(f"{_text(kind)} {'x'.join(str(_integer(side)) for side in size) or 'scalar'}"
                               for size, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=False))
            calls.setdefault(group, []).append(Call(
                _integer(entry["collective_seq_id"]), operation, inputs, _integer(entry["time_created_ns"])))
        for group, config in dump.get("pg_config", {}).items():
            members[_text(group)] = tuple(map(int, re.findall(r"\d{1,7}", _text(config["ranks"]))))
    return CollectiveRecord(token, oldest, {
        group: GroupCalls(descriptions[group], members.get(group.partition(" ")[2], ()),
                          tuple(of_group[-_CALLS_KEPT:]))
        for group, of_group in calls.items()})


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of a text")
    return value


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{type(value).__name__} instead of an integer")
    return value


def record_path(run_dir: RunDir, rank: int) -> Path:
    """Return the path of a rank's record."""
    return run_dir.collectives / f"rank{rank:04d}.json"


def timeout_dump_prefix(run_dir: RunDir) -> str:
    """Return the prefix of the dumps that NCCL writes when a collective times out; it appends the rank."""
    return str(run_dir.collectives / _TIMEOUT_DUMP)


def to_json(record: CollectiveRecord) -> str:
    """Return the content of a record's file."""
    return json.dumps(asdict(record))


class _PlainUnpickler(pickle.Unpickler):
    """Reader of pickled numbers, texts, lists, and dictionaries."""

    def find_class(self, module: str, name: str) -> Any:
        """Reject every class and function: another user may have written the file."""
        raise pickle.UnpicklingError(f"{module}.{name} in a record of collectives")


def read_records(run_dir: RunDir, since: float, of_timeout: bool) -> dict[int, CollectiveRecord]:
    """Return the records of the latest order, or the dumps of a timeout, by rank.

    Damaged files, and those written before `since`, are skipped.
    """
    found = {}
    newest, token = 0.0, ""
    for rank, path in _files(run_dir, _DUMP if of_timeout else _RECORD):
        try:
            written = path.stat().st_mtime
            if written < since:
                continue
            with open_regular(path) as file:
                content = file.read(_MAX_BYTES)
            if of_timeout:
                record = reduce_dumps([_PlainUnpickler(io.BytesIO(content)).load()], "", 0)
            else:
                record = as_dataclass(CollectiveRecord, parse_json(content, str(path)), str(path))
        except Exception:  # unpickling and reading raise many types
            continue
        found[rank] = record
        if written > newest:
            newest, token = written, record.token
    return {rank: record for rank, record in found.items() if record.token == token}


def _files(run_dir: RunDir, name: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    try:
        paths = sorted(run_dir.collectives.iterdir())
    except OSError:
        return
    for path in paths:
        if match := name.fullmatch(path.name):
            yield int(match[1]), path
