"""Comparison of hostnames: decides which names refer to the same node.

A short name matches a full name with the same first label. Two different full names in one list are two nodes. As
in DNS, case and a final dot are ignored. Addresses match only themselves.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ezpz_llm.core.base import UserError

_DOTTED_NUMBERS = re.compile(r"\d+(\.\d+)+")


def normalize(name: str) -> str:
    """Return the canonical spelling of a hostname or address."""
    if is_address(name):
        try:
            return ipaddress.ip_address(name).compressed
        except ValueError:
            return name
    return name.rstrip(".").lower()


def is_address(name: str) -> bool:
    """Return True for an IPv4 or IPv6 address, which has no domain."""
    return ":" in name or (name[:1].isdigit() and _DOTTED_NUMBERS.fullmatch(name) is not None)


def first_label(name: str) -> str:
    """Return the part before the first dot; for an address, the whole address."""
    return name if is_address(name) else name.split(".", 1)[0]


def is_same_node(name: str, other: str) -> bool:
    """Return True if two names refer to the same node."""
    return bool(NodeNames([name]).find(other))


class NodeNames:
    """Index of the names in one source, such as an allocation or a log, for lookup by any spelling."""

    def __init__(self, names: Iterable[str]) -> None:
        self._positions: dict[str, int] = {}
        self._by_label: dict[str, list[int]] = {}
        for position, name in enumerate(map(normalize, names)):
            if self._positions.setdefault(name, position) == position:
                self._by_label.setdefault(first_label(name), []).append(position)

    def __contains__(self, name: str) -> bool:
        return bool(self.find(name))

    def find(self, name: str) -> list[int]:
        """Return the positions of the names that refer to the same node as `name`.

        There are several positions if `name` is short and matches several full names.
        """
        name = normalize(name)
        label = first_label(name)
        # A short name and a full name match by the first label.
        position = self._positions.get(name, self._positions.get(label))
        if position is not None:
            return [position]
        return self.with_label(label) if name == label else []

    def with_label(self, label: str) -> list[int]:
        """Return the positions of the names with this first label, in any domain."""
        return self._by_label.get(label, [])


def node_keys(names: Sequence[str], where: str | None = None) -> list[str]:
    """Return a key for each name of one list; names with equal keys are the same node.

    Raises:
        UserError: a short name that matches several full names.
    """
    names = list(map(normalize, names))
    full_names: dict[str, dict[str, None]] = {}
    for name in names:
        if (label := first_label(name)) != name:
            full_names.setdefault(label, {})[name] = None
    keys = []
    for name in names:
        matches = list(full_names.get(name, ()))
        if len(matches) > 1:
            raise ambiguous_name_error(name, matches, where)
        keys.append(matches[0] if matches else name)
    return keys


def ambiguous_name_error(name: str, matches: Sequence[str], where: str | None) -> UserError:
    """Return the error for a short name that matches several full names."""
    return UserError(f"the short hostname {name} matches {' and '.join(matches[:2])}", where=where,
                     instead="the full name")


def sum_by_node(counts: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Add up the counts of each node, in order of first appearance, under the first spelling.

    Raises:
        UserError: a short name that matches several full names.
    """
    spelling: dict[str, str] = {}
    sums: dict[str, int] = {}
    keys = node_keys([name for name, _ in counts])
    for key, (name, count) in zip(keys, counts, strict=True):
        first = spelling.setdefault(key, name)
        sums[first] = sums.get(first, 0) + count
    return sums


def count_repeats(names: Iterable[str]) -> dict[str, int]:
    """Count how often each node is named, in order of first appearance, under the first spelling.

    Raises:
        UserError: a short name that matches several full names.
    """
    return sum_by_node([(name, 1) for name in names])


class Matches(NamedTuple):
    """Positions of names in another source (None if missing), and the pairs of names whose domains differ."""

    places: tuple[int | None, ...]
    other_domains: tuple[tuple[str, str], ...]

    @property
    def are_all_found(self) -> bool:
        """True if every name has a position."""
        return None not in self.places

    def notes(self, source: str, known_source: str) -> tuple[str, ...]:
        """Return a note if some names match only without their domains."""
        if not self.other_domains:
            return ()
        name, other_name = self.other_domains[0]
        more = f" (and {len(self.other_domains) - 1} more)" if len(self.other_domains) > 1 else ""
        return (f"the domains differ: {source} has {name}, {known_source} has {other_name}{more}; launch treats"
                " them as the same node",)


def match_names(names: Sequence[str], known: Sequence[str]) -> Matches:
    """Find each of `names` among the names of another source.

    Two full names with the same first label and different domains match if no other name in either source has that
    label: each network of a cluster may have its own domain.
    """
    index = NodeNames(known)
    matches = [index.find(name) for name in names]
    places = [positions[0] if len(positions) == 1 else None for positions in matches]
    labels = Counter(first_label(name) for name in set(map(normalize, names)))
    other_domains = []
    for number, name in enumerate(names):
        label = first_label(normalize(name))
        if not matches[number] and labels[label] == 1 and len(alike := index.with_label(label)) == 1:
            places[number] = alike[0]
            other_domains.append((name, known[alike[0]]))
    return Matches(tuple(places), tuple(other_domains))


def match_same_nodes(names: Sequence[str], known: Sequence[str]) -> Matches | None:
    """Return the matches of two lists of the same nodes; None if a node is missing in either list."""
    matches = match_names(names, known)
    return matches if matches.are_all_found and match_names(known, names).are_all_found else None
