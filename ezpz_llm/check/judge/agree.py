"""Do all hosts have the same software and environment?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ezpz_llm.check.judge.gathered import MPI, READY, Facts, Finding, Gathered, Level, differing, host_ranges

_MUST_AGREE = ("torch", "deepspeed", "ezpz_llm")
_LISTS = ("LD_LIBRARY_PATH", "PYTHONPATH", "LD_PRELOAD")
_MPI = "MPI library"
_LONG = 60
_UNSET = "unset"


def judge(gathered: Gathered) -> Iterator[Finding]:
    """Findings on versions and variables that differ, each folded to who differs from the majority."""
    places = _places(gathered)
    tables = {place: _versions(ranks) for place, ranks in places.items()}
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        # A host that could not be asked for its MPI is no host without one.
        values = {place: table.get(name, "none") for place, table in tables.items()
                  if name in table or name != _MPI}
        if text := differing(values):
            level: Level = "bad" if name in _MUST_AGREE or (name == "python" and _minors(values) > 1) else "warn"
            yield Finding(level, "versions", f"{name} differs: {text}",
                          "the same environment on every host: one on a shared file system, or launch --stage-env")
    variables = {place: ranks[0]["environment"] for place, ranks in places.items()}
    for name in sorted({name for values in variables.values() for name in values}):
        values = {place: found.get(name, _UNSET) for place, found in variables.items()}
        if len(set(values.values())) > 1:
            yield Finding("warn", "environment", f"{name} differs: {_difference(name, values)}",
                          "set it before launch, not in a start-up file of some hosts (~/.bashrc, modules)")


def _places(gathered: Gathered) -> dict[str, list[Facts]]:
    """Ranks by what is compared: hosts, or single ranks where the ranks of a host differ."""
    places: dict[str, list[Facts]] = {}
    for host, ranks in gathered.by_host().items():
        alike = all(one["versions"] == ranks[0]["versions"] and one["environment"] == ranks[0]["environment"]
                    for one in ranks)
        places |= {host: ranks} if alike else {f"rank {one['rank']} on {host}": [one] for one in ranks}
    return places


def _versions(ranks: Sequence[Facts]) -> Mapping[str, str]:
    found = dict(ranks[0]["versions"])
    # What torch itself said when it was imported beats what is written beside it.
    for stage, member, name in ((READY, "torch", "torch"), (MPI, "library", _MPI)):
        told = [answer[member] for one in ranks if member in (answer := one.get("stages", {}).get(stage, {}))]
        found |= {name: told[0]} if told else {}
    return found


def _minors(values: Mapping[str, str]) -> int:
    return len({version.rpartition(".")[0] for version in values.values()})


def _difference(name: str, values: Mapping[str, str]) -> str:
    """Of a list of folders only what is missing or more; of a long value only its beginning."""
    if name not in _LISTS:
        shown = differing({place: _short(value) for place, value in values.items()})
        return shown or "beyond what is shown"
    usual = Counter(values.values()).most_common(1)[0][0]
    changes: dict[str, list[str]] = {}
    for place, value in values.items():
        more = [part for part in _parts(value) if part not in _parts(usual)]
        less = [part for part in _parts(usual) if part not in _parts(value)]
        words = ([f"more: {' '.join(more)}"] if more else []) + ([f"lacks {' '.join(less)}"] if less else [])
        if value != usual:
            changes.setdefault(", ".join(words) or "another order", []).append(place)
    return "; ".join(f"{host_ranges(places)}: {_short(text, 2 * _LONG)}" for text, places in changes.items())


def _parts(value: str) -> list[str]:
    return [part for part in value.split(":") if part and value != _UNSET]


def _short(value: str, width: int = _LONG) -> str:
    return value if len(value) <= width else f"{value[:width - 1]}…"
