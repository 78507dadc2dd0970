"""Causes of lost time in a run by the time they would give back, each with what to try (imports no torch)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.explain.split import HOST, IN_STEP, RankSplit, Split, slow_link
from ezpz_llm.layout.batch import Batch
from ezpz_llm.layout.layout import Layout
from ezpz_llm.layout.memory import cast_per_rank, memory_per_rank, total
from ezpz_llm.layout.optimizers import OptimizerName
from ezpz_llm.layout.precision_recipes import AUTOCAST, RECIPES
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.parameters import parameter_count

_CULPRIT = 0.6
"""The share of all waiting for other ranks that one of them has to cause to be named."""
_SLOWER = 0.03
"""Least time beyond the median that counts."""
_OUTSIDE = 0.5
_LEAST_BYTES = 1e4
"""Of smaller buffers the rate says nothing."""
_PHASES = ("data", "forward", "backward", "optimizer", "idle")

AGAINST_DATA = ("a faster file system for the shards, or a copy of them on each node's own disk",
                 "ezpz-llm data prepare, where the corpus is text that is read anew")


@dataclass(frozen=True)
class Cause:
    """`seconds` of the run, without its set-up, that would be saved at most, and `share` of it.

    `kind` is one word for machines: slow_rank, slow_link, waiting, bubble, communication, data, host, optimizer,
    checkpoints, evaluation, sampling, logging; without traces also first_steps, pauses, drift, unsteady.
    """

    kind: str
    what: str
    seconds: float
    share: float
    advice: tuple[str, ...]


Found = tuple[str, str, float, list[str]]
"""Kind, what it is, seconds of all traced steps, and advice."""


def rank_causes(split: Split | None, wall: Mapping[str, float], run: Mapping[str, Any],
                deepspeed: Mapping[str, Any]) -> list[Cause]:
    """The causes, the one that costs most first.

    Args:
        split: of the traced steps, None where none were.
        wall: seconds of the run by what they were spent on; where it has not ended, of the traced window.
        run: facts for advice, see `diagnosis.described`.
    """
    whole = sum(seconds for name, seconds in wall.items() if name != "set-up")
    found = _between(wall, run)
    if split is not None and (steps := sum(map(split.mean, IN_STEP))) > 0:
        scale = wall["training"] / steps
        found += [(kind, what, seconds * scale, advice)
                  for kind, what, seconds, advice in (*_waiting(split, run), *_within(split, run, deepspeed))]
    causes = [Cause(kind, what, seconds, seconds / whole, tuple(advice)) for kind, what, seconds, advice in found
              if seconds > 0]
    return sorted(causes, key=lambda cause: -cause.seconds)


def phase_causes(phases: Mapping[str, float], steps: int, wall: Mapping[str, float]) -> list[Cause]:
    """What rank 0's own clock tells without traces: waits for data.

    Args:
        phases: seconds a step.
        steps: how many there were.
        wall: see `rank_causes`.
    """
    whole = sum(seconds for name, seconds in wall.items() if name != "set-up")
    seconds = phases["data"] * steps
    if not (seconds > 0 and whole > 0):
        return []
    return [Cause("data", "waiting for data", seconds, seconds / whole, AGAINST_DATA)]


def _waiting(split: Split, run: Mapping[str, Any]) -> Iterator[Found]:
    """Waits for other ranks: one that is slow by itself, and the rest. Seconds are of all traced steps."""
    count = len(split.ranks)
    blamed = {rank.rank: sum(other.waited_for.get(rank.rank, 0.0) for other in split.ranks) / count
              for rank in split.ranks}
    waited = sum(blamed.values())
    slow = split.straggler
    others = [rank for rank in split.ranks if rank is not slow]
    saved = 0.0
    if others and waited:
        usual = statistics.median(rank.own_s for rank in others)
        if blamed[slow.rank] > _CULPRIT * waited and slow.own_s > (1 + _SLOWER) * usual:
            # However quick it became, the next one would still be waited for.
            saved = (slow.own_s - max(rank.own_s for rank in others)) * slow.steps
            what, advice = _slow_rank(slow, others)
            yield "slow_rank", what, saved, advice
    kind, what = (("bubble", "stages of the pipeline wait for each other") if run["layout"].pp > 1 else
                  ("waiting", "ranks wait for each other by turns, in collectives"))
    yield kind, what, max(0.0, waited - saved), against_waiting(run)


def _slow_rank(slow: RankSplit, others: list[RankSplit]) -> tuple[str, list[str]]:
    def excess(name: str) -> float:
        # In the median step: one that something held up must not decide where the rank is slow.
        return slow.usual(name) - statistics.median(rank.usual(name) for rank in others)

    by_phase = {phase: excess(phase) for phase in _PHASES}
    phase = max(by_phase, key=by_phase.__getitem__)
    more = by_phase[phase]
    text = (f"rank {slow.rank} on {slow.host or 'its host'} is slow: {more * 1e3:.1f} ms a step more in {phase} "
            "than the median of the others")
    outside = excess(HOST)
    if phase == "data":
        return text, ["its host's disk and file system, and what else reads there"]
    if outside > _OUTSIDE * more:
        return f"{text}, outside of operators", [
            f"what that rank does in Python there: its log, and py-spy dump on {slow.host or 'its host'}"]
    return text, [f"other processes, clocks and temperature of {slow.host or 'its host'}; launch --preflight "
                  "measures every host and device"]


def _within(split: Split, run: Mapping[str, Any],
            deepspeed: Mapping[str, Any]) -> Iterator[Found]:
    """Causes within steps other than computing and waiting."""
    count = len(split.ranks)
    by_label = {label: [one for _, one in members] for label, members in split.by_label.items()}
    slow = slow_link(split.ranks[0].notes.get("links") or ())
    lost = 0.0 if slow is None else 1 - slow.rate / slow.usual
    crossing = {label for label, members in by_label.items() if any(map(split.crosses_hosts, members))}
    moving = sum(one.seconds - one.waited_s for label in crossing for one in by_label[label]) / count
    if slow is not None:
        yield ("slow_link", f"{slow.what} {slow.rate / 1e6:.4g} MB/s, where the others have "
               f"{slow.usual / 1e6:.4g}: collectives between hosts wait for it", moving * lost,
               [f"launch --preflight, and a reservation without {slow.host}",
                f"the network interface that {slow.host} takes: launch --interface"])
    for label, members in by_label.items():
        seconds = sum(one.seconds - one.waited_s for one in members) / count * (1 - lost * (label in crossing))
        rates = [one.bytes / (one.in_flight_s - one.waited_s) for one in members if one.bytes is not None
                 and one.bytes > _LEAST_BYTES * one.count and one.in_flight_s > one.waited_s]
        rate = f", {statistics.median(rates) / 1e6:.4g} MB/s of buffers" if rates else ""
        yield ("communication", f"exposed {label}: moving the data{rate}", seconds,
               against_communication(label, dict(run), dict(deepspeed)))
    yield "data", "waiting for data", split.mean("data"), list(AGAINST_DATA)
    host = min(rank.host_s for rank in split.ranks)
    idle = min(rank.seconds["idle"] for rank in split.ranks)
    where = "Python between operators" if split.device == "cpu" else "the device waits for the host"
    yield ("host", where, host + idle,
           [*([] if compile_is_no_option(run) else ["--compile true"]),
            "a larger --micro-batch-size, so that operators take longer than their calls",
            "profile/host.html has the call tree"])
    layout = run["layout"]
    optimizer = split.mean("optimizer")
    if not layout.zero.stage and layout.engine != "fsdp2":
        yield ("optimizer", "every rank steps all parameters", optimizer * (1 - 1 / run["batch"].dp_size),
               against_optimizer(dict(run)))
    elif run["optimizer"] == "adamw_unfused" or layout.zero.offload_optimizer:
        yield "optimizer", "the optimizer's step", optimizer / 2, against_optimizer(dict(run))


def compile_is_no_option(run: Mapping[str, Any]) -> bool:
    """True if the run compiles its blocks already, or its layout cannot."""
    return bool(run["config"].get("compile")) or run["layout"].zero.stage == 3


def _between(wall: Mapping[str, float], run: Mapping[str, Any]) -> list[Found]:
    """Causes between steps."""
    config = run["config"]
    if run["model"] is None:  # another program's, which has no options of ours
        return [("checkpoints", "training waits for checkpoints", wall.get("checkpoints", 0.0),
                 ["fewer checkpoints, or faster storage for them"]),
                ("evaluation", "evaluation", wall.get("evaluation", 0.0), ["fewer or smaller evaluations"]),
                ("logging", "writing log lines", wall.get("logging", 0.0),
                 [f"setup(log_every=…) larger than {config['log_every']}"] if config.get("log_every") else [])]
    saving = [*([] if config.get("save_async", True) else ["--save-async true"]), "faster storage for --run-dir",
              *_less_often("--save-every", "checkpoint", config)]
    tokens = config.get("eval_tokens") or 0
    evaluating = [*_less_often("--eval-every", "evaluation", config),
                  f"a smaller --eval-tokens than {tokens:,}" if tokens else
                  "--eval-tokens N: a part of the validation split instead of all of it"]
    return [
        ("checkpoints", "training waits for checkpoints", wall.get("checkpoints", 0.0), saving),
        ("evaluation", "evaluation", wall.get("evaluation", 0.0), evaluating),
        ("sampling", "generating samples", wall.get("sampling", 0.0),
         [*_less_often("--sample-every", "sample", config), "a smaller --sample-tokens"]),
        ("logging", "writing log lines", wall.get("logging", 0.0), _less_often("--log-every", "log line", config)),
    ]


def _less_often(option: str, what: str, config: Mapping[str, Any]) -> list[str]:
    """Advice to do something at a larger interval, unless it is done at the end of the run alone."""
    every = config.get(option.removeprefix("--").replace("-", "_")) or 0
    if 0 < every < config.get("steps", every + 1):
        return [f"a larger {option} than {every}"]
    return [f"a longer run: the {what} after the last step is then a smaller share"]


# What to try against a cause, in the terms of the run's own layout.
_OF_ALL = 0.8
"""The share of a device's memory that a layout's states may take: activations and buffers need the rest."""


def against_communication(label: str, run: dict[str, Any], deepspeed: dict[str, Any]) -> list[str]:
    """Against exposed collectives of a kind and group.

    Args:
        label: such as "all_reduce (dp)".
        run: facts for advice, see `diagnosis.described`.
        deepspeed: what DeepSpeed was given, empty for other engines.
    """
    kind, _, group = label.partition(" (")
    axes = group.rstrip(")").split()
    layout: Layout = run["layout"]
    zero = deepspeed.get("zero_optimization") or {}
    if "tp" in axes and "dp" not in axes:
        return [f"--tp {layout.tp // 2}: fewer ranks share a layer" if layout.tp > 2 else "a layout without tp",
                "tensor-parallel ranks inside one node, where links are fastest"]
    if "pp" in axes:
        return [f"--gradient-accumulation-steps {2 * run['batch'].accumulation}: more micro batches on their way "
                "at once"]
    if "sp" in axes and "dp" not in axes:
        return ["a smaller --sp, if sequences fit"]
    found = []
    if layout.zero.stage == 3 and kind == "all_gather":
        found += _instead_of_gathering(run)
        found.append("a larger --micro-batch-size: parameters are gathered once for more tokens")
    elif layout.engine == "fsdp2" and kind == "all_gather":
        found.append("--ds-config zero2 keeps whole parameters, and gathers them once a step")
    if layout.zero.stage is not None and kind in ("reduce_scatter", "all_reduce", "reduce"):
        size = zero.get("reduce_bucket_size")
        can_overlap = _may_overlap(run["device"], layout)
        overlaps = can_overlap and zero.get("overlap_comm", layout.zero.stage == 3)
        if can_overlap and not overlaps:
            found.append('"overlap_comm": true in zero_optimization of the ds_config')
        # What is exposed of overlapped reductions is the last bucket's, which a larger one would make longer.
        if size and not overlaps and size < parameter_count(run["model"]):
            found.append(f'a larger "reduce_bucket_size" than {size:,}')
    if layout.zero.stage != 3:
        found.append(f"--gradient-accumulation-steps {2 * run['batch'].accumulation}: gradients are reduced once a "
                     "step, of more tokens")
    return found


def _may_overlap(device: str | None, layout: Layout) -> bool:
    """True if DeepSpeed can reduce gradients beside the backward pass; in a pipeline and in stage 0 it cannot."""
    has_streams = device is None or device not in DEVICES or DEVICES[device].overlaps
    return has_streams and bool(layout.zero.stage) and layout.pp == 1


def _instead_of_gathering(run: dict[str, Any]) -> list[str]:
    """True if ZeRO 2 would fit, by arithmetic."""
    layout: Layout = run["layout"]
    if layout.zero.offload_optimizer or layout.zero.offload_param or layout.zero.tiled:
        return []
    model: ModelConfig = run["model"]
    optimizer: OptimizerName = run["optimizer"]
    whole = layout.with_zero(stage=2)
    # With the copies that autocast would keep then, and keeps none of in stage 3.
    cast = cast_per_rank(whole, model).bytes if run["precision"] in AUTOCAST else 0
    precision = run["precision"] if run["precision"] in tuple(RECIPES) else "fp32"
    need = total(memory_per_rank(whole, model, run["world_size"], optimizer, precision), "device") + cast
    more = need - total(memory_per_rank(layout, model, run["world_size"], optimizer, precision), "device")
    there = run["memory_bytes"]
    if there is None:
        return [f"--ds-config zero2 gathers once a step; its states take {more / 1e9:.3g} GB more a rank"]
    if need > _OF_ALL * there:
        return [f"zero2 would not fit: its states take {need / 1e9:.3g} GB of {there / 1e9:.3g} GB"]
    return [f"--ds-config zero2 would fit: its states take {need / 1e9:.3g} GB of {there / 1e9:.3g} GB a rank"]


def against_optimizer(run: dict[str, Any]) -> list[str]:
    """Against a long optimizer phase."""
    layout: Layout = run["layout"]
    batch: Batch = run["batch"]
    found = []
    if not layout.zero.stage and batch.dp_size > 1 and layout.engine != "fsdp2":
        found.append(f"--ds-config zero1: each rank steps 1/{batch.dp_size} of the parameters")
    if run["optimizer"] == "adamw_unfused":
        found.append("--optimizer adamw, one fused kernel")
    if layout.zero.offload_optimizer:
        found.append("a layout that keeps the optimizer on the device, if it fits")
    return [*found, f"--gradient-accumulation-steps {2 * batch.accumulation}: fewer steps for as many tokens"]


def against_waiting(run: Mapping[str, Any]) -> list[str]:
    """Against ranks that wait for each other."""
    layout: Layout = run["layout"]
    if layout.pp > 1:
        return [f"--gradient-accumulation-steps {2 * run['batch'].accumulation}: a smaller share of each step "
                "fills and drains the pipeline",
                '"partition": "time" in the ds_config\'s ezpz_llm block, if stages differ']
    return ["cores of its own for each rank (launch --explain shows the binding)",
            "a larger --micro-batch-size: steps of more equal length"]
