"""Many ranks and hosts in few words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ezpz_llm.launch.devices import core_ranges

_NAMED = 6


def hosts(names: Iterable[str]) -> str:
    """`n[1-3],login` for n1, n2, n3, login: Slurm's own way, in the order of first appearance."""
    groups: dict[tuple[str, int, str], list[int]] = {}
    for name in dict.fromkeys(names):
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        # Names without a number stand for themselves.
        prefix, digits, suffix = match.groups() if match else (name, "", "")
        groups.setdefault((prefix, len(digits), suffix), []).append(int(digits or 0))
    words = []
    for (prefix, width, suffix), numbers in groups.items():
        if not width or len(numbers) == 1:
            words.append(f"{prefix}{numbers[0]:0{width}d}{suffix}" if width else prefix)
            continue
        words.append(f"{prefix}[{_ranges(sorted(numbers), width)}]{suffix}")
    shown = words[:_NAMED]
    return ",".join(shown) + (f" and {len(words) - _NAMED} more" if len(words) > _NAMED else "")


def _ranges(numbers: Sequence[int], width: int) -> str:
    padded = (part.split("-") for part in core_ranges(tuple(numbers)).split(","))
    return ",".join("-".join(end.zfill(width) for end in part) for part in padded)


def ranks(numbers: Iterable[int]) -> str:
    """`rank 3` or `ranks 0-3,8`."""
    ordered = tuple(sorted(set(numbers)))
    return f"rank{'s' * (len(ordered) > 1)} {core_ranges(ordered)}"


def differing(values: Mapping[str, str]) -> str | None:
    """`n3: 2.11, all others 2.13` for the value of each host; None where all agree.

    Without a majority every value is given with its hosts.
    """
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return None
    usual, most = counts[0]
    if most <= len(values) / 2:
        return "; ".join(f"{hosts(_with(values, value))}: {value}" for value, _ in counts)
    odd = [f"{hosts(_with(values, value))}: {value}" for value, _ in counts[1:]]
    return f"{'; '.join(odd)}, {'all others' if most > 1 else 'the other'} {usual}"


def _with(values: Mapping[str, str], wanted: str) -> list[str]:
    return [name for name, value in values.items() if value == wanted]


def size(count: float | None) -> str:
    """Bytes as `3.2 GiB`."""
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def rate(value: float, unit: str) -> str:
    """A rate with its prefix: `3.1 GB/s`, `250 MFLOP/s`."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"
