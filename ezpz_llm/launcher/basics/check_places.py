"""Nodes of the ranks, as launch passes them to the check of a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ezpz_llm.core.base import UserError, count_noun
from ezpz_llm.launcher.basics.hostlist import expand_counts, expand_hostlist, fold_counts, fold_hostnames
from ezpz_llm.launcher.basics.variables import PLACES_VARIABLE


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
