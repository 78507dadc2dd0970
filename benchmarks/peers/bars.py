"""Required and measured results of the comparison: ratios of runs in the same round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peers.programs import EAGER_PEERS
from peers.summary import spread

Rounds = dict[str, list[dict[str, Any]]]
Row = dict[str, Any]
_OURS = ("ours", "ours-compiled")
_VERDICT = ("at_least", "at_most", "passed")


def bars(work: str, rounds: Rounds) -> list[Row]:
    """Return the rows that the work's programs allow: name, ratio with its spread over rounds, and requirement."""
    if work.startswith("tiny"):
        rows = [*_speed(rounds, None), *_perfect(rounds, None), *_shards(rounds), *_memory(rounds), *_zero(rounds)]
        return [{key: value for key, value in row.items() if key not in _VERDICT} for row in rows]
    if work == "ddp":
        return _ddp(rounds)
    if work == "zero":
        return _zero(rounds)
    if work == "memory":
        return _memory(rounds)
    large = work == "cpu-50304"
    return [*_speed(rounds, 1.25 if large else 1.1), *_perfect(rounds, 0.65 if large else None), *_shards(rounds),
            *(_memory(rounds) if large else ())]


def _row(name: str, ratios: list[float], least: float | None = None, most: float | None = None) -> Row:
    row = {"name": name, **spread(ratios)}
    if least is not None:
        row.update(at_least=least, passed=row["median"] >= least)
    if most is not None:
        row.update(at_most=most, passed=row["median"] <= most)
    return row


def _paired(rounds: Rounds, one: str, other: str, value: Callable[[dict[str, Any]], float]) -> list[float]:
    """Return the ratio of two programs in each round."""
    return [value(a) / value(b) for a, b in zip(rounds[one], rounds[other], strict=True)]


def _rate(run: dict[str, Any]) -> float:
    return run["tokens_per_cpu_second"]


def _wall(run: dict[str, Any]) -> float:
    return run["step_s"]


def _peak(run: dict[str, Any]) -> float:
    return run["peak_bytes"]


def _over_start(run: dict[str, Any]) -> float:
    return run["peak_bytes"] - run["start_bytes"]


def _speed(rounds: Rounds, least: float | None) -> list[Row]:
    rows = []
    peers = [peer for peer in EAGER_PEERS if rounds.get(peer)]
    best = max(peers, key=lambda peer: spread([_rate(run) for run in rounds[peer]])["median"], default=None)
    for ours in (name for name in _OURS if rounds.get(name)):
        if best:
            rows.append(_row(f"{ours} / best eager peer ({best}), tokens a CPU-second",
                             _paired(rounds, ours, best, _rate), least))
        if rounds.get("build-nanogpt-compiled"):
            rows.append(_row(f"{ours} / build-nanogpt-compiled, tokens a CPU-second",
                             _paired(rounds, ours, "build-nanogpt-compiled", _rate),
                             1.0 if least == 1.25 else None))
    return rows


def _perfect(rounds: Rounds, least: float | None) -> list[Row]:
    """Return the time of the model FLOPs (both counts) at the matmul peak, relative to the step time."""
    rows = []
    for ours in (name for name in _OURS if rounds.get(name) and rounds.get("ceiling")):
        for count, words in (("flops_per_token", ""), ("flops_per_token_causal", ", causal count")):
            pairs = list(zip(rounds[ours], rounds["ceiling"], strict=True))
            for unit, rate, ceiling in (("wall time", "tokens_per_second", "flops"),
                                        ("processor time", "tokens_per_cpu_second", "flops_per_cpu_second")):
                rows.append(_row(f"perfect run / {ours}, {unit}{words}",
                                 [run[count] * run[rate] / top[ceiling] for run, top in pairs],
                                 least if unit == "wall time" and not words else None))
    return rows


def _shards(rounds: Rounds) -> list[Row]:
    if not (rounds.get("shards") and rounds.get("ours")):
        return []
    return [_row("tokens read from shards / consumed, one process",
                 _paired(rounds, "shards", "ours", lambda run: run["tokens_per_second"]), 50.0)]


def _memory(rounds: Rounds) -> list[Row]:
    rows = []
    for ours in _OURS:
        for peer in ("build-nanogpt", "build-nanogpt-compiled"):
            if rounds.get(ours) and rounds.get(peer) and ours.endswith("compiled") == peer.endswith("compiled"):
                rows.append(_row(f"{ours} / {peer}, most memory", _paired(rounds, ours, peer, _peak), most=0.6))
                rows.append(_row(f"{ours} / {peer}, most memory beyond libraries",
                                 _paired(rounds, ours, peer, _over_start)))
    return rows


def _ddp(rounds: Rounds) -> list[Row]:
    pairs = (("ours-ddp-2", "ours", 0.95), ("ours-ddp-2", "ours-1-thread", None),
             ("plain-bf16-ddp-2", "plain-bf16", None), ("ours-ddp-2", "plain-bf16-ddp-2", None))
    return [_row(f"{one} / {other}, tokens a CPU-second", _paired(rounds, one, other, _rate), least)
            for one, other, least in pairs if rounds.get(one) and rounds.get(other)]


def _zero(rounds: Rounds) -> list[Row]:
    """Return the throughput relative to ddp's, and relative to the bound set by the layout's collectives."""
    rows = []
    if not rounds.get("ours-ddp-2"):
        return rows
    for layout, stretch in (("zero1", 0.85), ("zero2", 0.80), ("zero3", 0.65)):
        runs = rounds.get(f"ours-{layout}-2")
        if not runs:
            continue
        rows.append(_row(f"{layout} / ddp, speed (a stretch)",
                         _paired(rounds, "ours-ddp-2", f"ours-{layout}-2", _wall), stretch))
        shares = []
        for ddp, run in zip(rounds["ours-ddp-2"], runs, strict=True):
            stubbed = spread(ddp["collectives"]["stubbed_s"])["median"]
            shares.append((stubbed + run["collectives"]["seconds"]) / _wall(run))
        rows.append(_row(f"{layout} / what its collectives allow, speed", shares, 1.0))
    return rows


def bar_line(row: Row) -> str:
    """Format a row of the table."""
    requirement = (f"  asked: >= {row['at_least']:g}" if "at_least" in row else
                   f"  asked: <= {row['at_most']:g}" if "at_most" in row else "")
    verdict = "" if "passed" not in row else "  reached" if row["passed"] else "  MISSED"
    return f"{row['name']:<66}{row['median']:8.3f}  ({row['least']:.3f} to {row['most']:.3f}){requirement}{verdict}"
