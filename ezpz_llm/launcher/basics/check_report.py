"""Data that launch and the check of a command exchange: the nodes of the ranks, and the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ezpz_llm.core.base import UserError, count_noun
from ezpz_llm.launcher.basics.hostlist import expand_counts, expand_hostlist, fold_counts, fold_hostnames
from ezpz_llm.launcher.basics.variables import PLACES_VARIABLE


@dataclass(frozen=True)
class CheckReport:
    """Result of a training command's check: the one JSON object that `--check --json` prints.

    Attributes:
        layout, precision: names. They and the batch sizes are None if the run cannot start or is already complete.
        global_batch, micro_batch: batch sizes of a step in sequences.
        accumulation: number of micro-batches per step.
        explanation: every decision with its source, as `--check` without --json prints it.
        warnings: lines that `--check` without --json prints to standard error.
        error, where, instead: reason why the run cannot start, as in `UserError`.
    """

    layout: str | None = None
    precision: str | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    explanation: str = ""
    warnings: tuple[str, ...] = ()
    error: str | None = None
    where: str | None = None
    instead: str | None = None


def format_places(places: Sequence[tuple[str, int]]) -> str:
    """Return nodes and ranks per node as text for `read_places`."""
    return f"{fold_hostnames([host for host, _ in places])} {fold_counts([count for _, count in places])}"


def read_places(env: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the nodes and ranks per node that launch passed to the check; empty if launch did not start it.

    Raises:
        UserError: the value of the variable is invalid.
    """
    if not (text := env.get(PLACES_VARIABLE)):
        return []
    hosts, _, counts = text.rpartition(" ")
    names, ranks = expand_hostlist(hosts), expand_counts(counts)
    if len(names) != len(ranks):
        raise UserError(f"{count_noun(len(names), 'node')}, but {count_noun(len(ranks), 'rank count')}",
                        where=PLACES_VARIABLE)
    return list(zip(names, ranks, strict=True))
