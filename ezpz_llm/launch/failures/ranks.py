"""Sets of ranks in few words."""

from __future__ import annotations

from collections.abc import Iterable


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


def unfold(text: str) -> set[int]:
    """"0-2,5" as {0, 1, 2, 5}.

    Raises:
        ValueError: it is no such list.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
