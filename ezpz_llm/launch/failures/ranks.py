"""Sets of ranks in few words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ezpz_llm.base.schema import MOST_RANKS

_HOSTS_SHOWN = 8


def fold(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


def named(ranks: Iterable[int]) -> str:
    """"rank 3" or "ranks 0-2,5"."""
    ranks = list(ranks)
    return f"rank{'' if len(ranks) == 1 else 's'} {fold(ranks)}"


def fold_places(hosts: Mapping[int, str]) -> str:
    """{2: "n2", 3: "n2", 6: "n4"} as "ranks 2-3 on n2, rank 6 on n4"; of many hosts the first ones."""
    by_host: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        by_host.setdefault(host, []).append(rank)
    shown = [f"{named(ranks)} on {host}" for host, ranks in list(by_host.items())[:_HOSTS_SHOWN]]
    if len(by_host) > _HOSTS_SHOWN:
        rest = [rank for ranks in list(by_host.values())[_HOSTS_SHOWN:] for rank in ranks]
        shown.append(f"{named(rest)} on {len(by_host) - _HOSTS_SHOWN} more hosts")
    return ", ".join(shown)


def unfold(text: str) -> set[int]:
    """"0-2,5" as {0, 1, 2, 5}.

    Raises:
        ValueError: it is no such list.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        ranks = range(int(first), int(last or first) + 1)
        if len(ranks) > MOST_RANKS or ranks.stop > MOST_RANKS:
            raise ValueError(f"more ranks than {MOST_RANKS:,}")
        found.update(ranks)
    return found
