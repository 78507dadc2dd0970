"""Causes of lost time in a run, ranked by the time that could be saved, with advice (imports no torch)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.version_rules import OVERLAP
from ezpz_llm.training.layout.deepspeed_versions import is_correct
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.memory import cast_per_rank, memory_per_rank, total
from ezpz_llm.training.layout.precision_recipes import AUTOCAST, RECIPES
from ezpz_llm.training.model.parameters import parameter_count
from ezpz_llm.verify.explain.split import HOST, IN_STEP, RankSplit, Split, slow_link
from ezpz_llm.verify.explain.trainer_run import Settings, TrainerRun

_MIN_BLAMED_SHARE = 0.6
"""Minimum share of all waiting that a rank must cause to be reported as slow."""
_MIN_EXCESS = 0.03
"""Minimum relative excess over the other ranks' median own time for a rank to be reported as slow."""
_PYTHON_SHARE = 0.5
"""Python is reported as the reason if more than this share of the excess is outside of operators."""
_MIN_BYTES = 1e4
"""Minimum mean buffer size in bytes for a data rate: smaller collectives are dominated by latency."""
_PHASES = ("data", "forward", "backward", "optimizer", "idle")

DATA_ADVICE = ("a faster file system for the shards, or a copy on each node's local disk",
               "ezpz-llm data prepare, if the corpus is text that is tokenized during training")


@dataclass(frozen=True)
class Cause:
    """Cause of lost time.

    `seconds` is the most time that could be saved, `share` its share of the run without set-up. `kind` is an
    identifier: slow_rank, slow_link, waiting, bubble, communication, data, host, optimizer, checkpoints,
    evaluation, sampling, logging; without traces also first_steps, pauses, drift, unsteady.
    """

    kind: str
    what: str
    seconds: float
    share: float
    advice: tuple[str, ...]


_Candidate = tuple[str, str, float, list[str]]
"""Kind, description, seconds (over the traced steps, or for causes between steps over the run), and advice."""


def rank_causes(split: Split | None, wall: Mapping[str, float], run: TrainerRun,
                deepspeed: Mapping[str, Any]) -> list[Cause]:
    """Return the causes, the most expensive first.

    Args:
        split: breakdown of the traced steps, or None if there are no traces.
        wall: wall time in seconds by activity: of the run or, if it has not ended, of the traced window.
        deepspeed: DeepSpeed's configuration, empty for other engines.
    """
    candidates = _causes_between_steps(wall, run.settings)
    if split is not None and (steps := sum(map(split.mean, IN_STEP))) > 0:
        scale = wall["training"] / steps
        candidates += [(kind, text, seconds * scale, advice)
                       for kind, text, seconds, advice in (*_waiting_causes(split, run),
                                                           *_step_causes(split, run, deepspeed))]
    return _ranked(candidates, wall)


def rank_causes_of_own_program(wall: Mapping[str, float], log_every: int | None) -> list[Cause]:
    """Return the causes between steps of a program other than the trainer, whose options do not apply.

    Args:
        wall: see `rank_causes`.
        log_every: value of `setup(log_every=…)`, or None if unknown.
    """
    return _ranked([
        ("checkpoints", "training waits for checkpoints", wall.get("checkpoints", 0.0),
         ["fewer checkpoints, or faster storage for them"]),
        ("evaluation", "evaluation", wall.get("evaluation", 0.0), ["fewer or smaller evaluations"]),
        ("logging", "writing log lines", wall.get("logging", 0.0),
         [f"setup(log_every=…) larger than {log_every}"] if log_every else [])], wall)


def _ranked(candidates: list[_Candidate], wall: Mapping[str, float]) -> list[Cause]:
    run_s = sum(seconds for name, seconds in wall.items() if name != "set-up")
    causes = [Cause(kind, text, seconds, seconds / run_s, tuple(advice))
              for kind, text, seconds, advice in candidates if seconds > 0]
    return sorted(causes, key=lambda cause: -cause.seconds)


def limit_to_run(causes: Sequence[Cause]) -> list[Cause]:
    """Limit the causes, the most expensive first, so that their shares add up to at most 100 %.

    Causes can overlap: a step that waits for data may also be a pause. Each keeps only the time that larger ones
    leave.
    """
    limited: list[Cause] = []
    left = 1.0
    for cause in causes:
        if (share := min(cause.share, left)) > 0:
            limited.append(replace(cause, share=share, seconds=cause.seconds * share / cause.share))
            left -= share
    assert sum(cause.share for cause in limited) <= 1 + 1e-9
    return limited


def phase_causes(phases: Mapping[str, float], steps: int, wall: Mapping[str, float]) -> list[Cause]:
    """Return the causes visible in rank 0's phase times, without traces. Currently only waiting for data.

    Args:
        phases: seconds per step.
        steps: number of steps.
        wall: see `rank_causes`.
    """
    run_s = sum(seconds for name, seconds in wall.items() if name != "set-up")
    seconds = phases["data"] * steps
    if not (seconds > 0 and run_s > 0):
        return []
    return [Cause("data", "waiting for data", seconds, seconds / run_s, DATA_ADVICE)]


def _waiting_causes(split: Split, run: TrainerRun) -> Iterator[_Candidate]:
    """Yield waiting for a slow rank, if there is one, and all other waiting. Seconds are over all traced steps."""
    count = len(split.ranks)
    waited_by_rank = {rank.rank: sum(waiter.waited_for.get(rank.rank, 0.0) for waiter in split.ranks) / count
                      for rank in split.ranks}
    waited = sum(waited_by_rank.values())
    slow = split.straggler
    other_ranks = [rank for rank in split.ranks if rank is not slow]
    saved = 0.0
    if other_ranks and waited:
        median_own_s = statistics.median(rank.own_s for rank in other_ranks)
        if waited_by_rank[slow.rank] > _MIN_BLAMED_SHARE * waited and slow.own_s > (1 + _MIN_EXCESS) * median_own_s:
            # Without the slow rank, the other ranks would still wait for the second slowest.
            saved = (slow.own_s - max(rank.own_s for rank in other_ranks)) * slow.steps
            description, advice = _describe_slow_rank(slow, other_ranks)
            yield "slow_rank", description, saved, advice
    kind, description = (("bubble", "pipeline stages wait for each other") if run.layout.pp > 1 else
                         ("waiting", "ranks wait for each other in collectives, without a single slow rank"))
    yield kind, description, max(0.0, waited - saved), _waiting_advice(run)


def _describe_slow_rank(slow: RankSplit, other_ranks: list[RankSplit]) -> tuple[str, list[str]]:
    def excess(name: str) -> float:
        # Median over steps, so that a single stalled step does not decide which phase is slow.
        return slow.median_s(name) - statistics.median(rank.median_s(name) for rank in other_ranks)

    by_phase = {phase: excess(phase) for phase in _PHASES}
    phase = max(by_phase, key=by_phase.__getitem__)
    more = by_phase[phase]
    node = slow.host or "its node"
    text = (f"rank {slow.rank} on {node} is slow: {more * 1e3:.1f} ms per step more in {phase} than the median of "
            "the others")
    outside = excess(HOST)
    if phase == "data":
        return text, [f"check the disk and file system of {node}, and other jobs that read from it"]
    if outside > _PYTHON_SHARE * more:
        return f"{text}, outside of operators", [
            f"check what the rank does in Python: its log, and py-spy dump on {node}"]
    return text, [f"check other processes, clocks and temperature on {node}; launch --preflight measures every "
                  "node and device"]


def _step_causes(split: Split, run: TrainerRun,
                 deepspeed: Mapping[str, Any]) -> Iterator[_Candidate]:
    """Yield causes within steps: slow links, data transfer, data, Python, and the optimizer."""
    count = len(split.ranks)
    by_label = {label: [exposed for _, exposed in members] for label, members in split.by_label.items()}
    slow = slow_link(split.ranks[0].notes.get("links") or ())
    lost = 0.0 if slow is None else 1 - slow.rate / slow.median_rate
    crossing = {label for label, members in by_label.items() if any(map(split.crosses_nodes, members))}
    moving = sum(exposed.seconds - exposed.waited_s for label in crossing for exposed in by_label[label]) / count
    if slow is not None:
        yield ("slow_link", f"{slow.what} {slow.rate / 1e6:.4g} MB/s, the other nodes "
               f"{slow.median_rate / 1e6:.4g} MB/s; this slows down collectives between nodes", moving * lost,
               [f"launch --preflight, and an allocation without {slow.host}",
                f"check which network interface {slow.host} uses: launch --interface"])
    for label, members in by_label.items():
        seconds = sum(each.seconds - each.waited_s for each in members) / count * (1 - lost * (label in crossing))
        rates = [each.bytes / (each.in_flight_s - each.waited_s) for each in members if each.bytes is not None
                 and each.bytes > _MIN_BYTES * each.count and each.in_flight_s > each.waited_s]
        rate = f", {statistics.median(rates) / 1e6:.4g} MB/s of buffers" if rates else ""
        yield ("communication", f"exposed {label}: data transfer{rate}", seconds,
               _communication_advice(label, run, dict(deepspeed)))
    yield "data", "waiting for data", split.mean("data"), list(DATA_ADVICE)
    python_s = min(rank.cpu_s for rank in split.ranks)
    idle = min(rank.seconds["idle"] for rank in split.ranks)
    where = "Python between operators" if split.device == "cpu" else "the device waits for the CPU"
    shards_nothing = run.layout.zero.stage and run.batch.dp_size == 1 and not run.layout.zero.offload_optimizer
    yield ("host", where, python_s + idle,
           [*(["--ds-config ddp, which makes fewer Python calls per step"] if shards_nothing else []),
            *([] if is_compile_unavailable(run) else ["--compile true"]),
            "a larger --micro-batch-size, so that operators take longer than their Python calls",
            "profile/host.html shows the Python call tree"])
    layout = run.layout
    optimizer = split.mean("optimizer")
    if not layout.zero.stage and layout.engine != "fsdp2":
        yield ("optimizer", "every rank updates all parameters", optimizer * (1 - 1 / run.batch.dp_size),
               _optimizer_advice(run))
    elif run.settings.optimizer == "adamw_unfused" or layout.zero.offload_optimizer:
        yield "optimizer", "the optimizer step", optimizer / 2, _optimizer_advice(run)


def is_compile_unavailable(run: TrainerRun) -> bool:
    """Return True if the run already uses --compile, or its layout (ZeRO 3) does not support it."""
    return bool(run.settings.compile) or run.layout.zero.stage == 3


def _causes_between_steps(wall: Mapping[str, float], settings: Settings) -> list[_Candidate]:
    """Return causes between steps: checkpoints, evaluation, sampling, and logging."""
    saving = [*([] if settings.save_async else ["--save-async true"]), "faster storage for --run-dir",
              *_interval_advice("--save-every", settings.save_every, "checkpoint", settings.steps)]
    tokens = settings.eval_tokens or 0
    evaluating = [*_interval_advice("--eval-every", settings.eval_every, "evaluation", settings.steps),
                  f"--eval-tokens below {tokens:,}" if tokens else
                  "--eval-tokens N, to evaluate only a part of the validation split"]
    return [
        ("checkpoints", "training waits for checkpoints", wall.get("checkpoints", 0.0), saving),
        ("evaluation", "evaluation", wall.get("evaluation", 0.0), evaluating),
        ("sampling", "generating samples", wall.get("sampling", 0.0),
         [*_interval_advice("--sample-every", settings.sample_every, "sample", settings.steps),
          "a smaller --sample-tokens"]),
        ("logging", "writing log lines", wall.get("logging", 0.0),
         _interval_advice("--log-every", settings.log_every, "log line", settings.steps)),
    ]


def _interval_advice(option: str, every: int, event: str, steps: int | None) -> list[str]:
    """Advise a larger interval, or a longer run if the interval is at least the number of steps."""
    if every > 0 and (steps is None or every < steps):
        return [f"{option} above {every}"]
    return [f"a longer run, in which the {event} after the last step is a smaller share"]


_MAX_MEMORY_SHARE = 0.8
"""Maximum share of a device's memory for model states: activations and buffers need the rest."""


def _communication_advice(label: str, run: TrainerRun, deepspeed: dict[str, Any]) -> list[str]:
    """Return advice for exposed collectives of a kind and group.

    Args:
        label: kind and group, for example "all_reduce (dp)".
        deepspeed: DeepSpeed's configuration, empty for other engines.
    """
    kind, _, group = label.partition(" (")
    axes = group.rstrip(")").split()
    layout = run.layout
    zero = deepspeed.get("zero_optimization") or {}
    if "tp" in axes and "dp" not in axes:
        return [f"--tp {layout.tp // 2}, so that fewer ranks share a layer" if layout.tp > 2 else
                "a layout without tp",
                "tensor-parallel ranks within one node, where links are fastest"]
    if "pp" in axes:
        return [f"--gradient-accumulation-steps {2 * run.batch.accumulation}, for more micro-batches in flight"]
    if "sp" in axes and "dp" not in axes:
        return ["a smaller --sp, if sequences fit in memory"]
    advice = []
    if layout.zero.stage == 3 and kind == "all_gather":
        advice += _zero2_advice(run)
        advice.append("a larger --micro-batch-size, so that each gather of parameters serves more tokens")
    elif layout.engine == "fsdp2" and kind == "all_gather":
        advice.append("--ds-config zero2, which keeps full parameters and gathers them once per step")
    if layout.zero.stage is not None and kind in ("reduce_scatter", "all_reduce", "reduce"):
        size = zero.get("reduce_bucket_size")
        can_overlap = _can_overlap(run.device.type, layout)
        overlaps = can_overlap and zero.get("overlap_comm", layout.zero.stage == 3)
        if can_overlap and not overlaps and (layout.zero.stage == 3 or is_correct(OVERLAP)):
            advice.append('"overlap_comm": true in zero_optimization of the ds_config')
        # With overlap, only the reduction of the last bucket is exposed, and a larger bucket would prolong it.
        if size and not overlaps and size < parameter_count(run.model):
            advice.append(f'"reduce_bucket_size" above {size:,}')
    if layout.zero.stage != 3:
        advice.append(f"--gradient-accumulation-steps {2 * run.batch.accumulation}, so that each reduction of "
                      "gradients serves more tokens")
    return advice


def _can_overlap(device: str | None, layout: Layout) -> bool:
    """Return True if DeepSpeed can overlap the reduction of gradients with the backward pass.

    It cannot in a pipeline, in stage 0, or on a device without concurrent streams.
    """
    has_streams = device is None or device not in DEVICES or DEVICES[device].overlaps
    return has_streams and bool(layout.zero.stage) and layout.pp == 1


def _zero2_advice(run: TrainerRun) -> list[str]:
    """Return advice that says whether ZeRO 2 fits in memory; none for layouts with offload or tiles."""
    layout = run.layout
    if layout.zero.has_offload_or_tiles:
        return []
    model = run.model
    optimizer = run.settings.optimizer
    zero2 = layout.with_zero(stage=2)
    # Unlike in stage 3, autocast also caches converted weights in stage 2.
    cast = cast_per_rank(zero2, model).bytes if run.precision in AUTOCAST else 0
    precision = run.precision if run.precision in tuple(RECIPES) else "fp32"
    need = total(memory_per_rank(zero2, model, run.world_size, optimizer, precision), "device") + cast
    more = need - total(memory_per_rank(layout, model, run.world_size, optimizer, precision), "device")
    memory = run.device.memory_bytes
    if memory is None:
        return [f"--ds-config zero2 gathers once per step; its states need {more / 1e9:.3g} GB more per rank"]
    if need > _MAX_MEMORY_SHARE * memory:
        return [f"zero2 would not fit: its states need {need / 1e9:.3g} GB of {memory / 1e9:.3g} GB per rank"]
    return [f"--ds-config zero2 would fit: its states need {need / 1e9:.3g} GB of {memory / 1e9:.3g} GB per rank"]


def _optimizer_advice(run: TrainerRun) -> list[str]:
    """Return advice for a long optimizer phase."""
    layout = run.layout
    batch = run.batch
    advice = []
    if not layout.zero.stage and batch.dp_size > 1 and layout.engine != "fsdp2":
        advice.append(f"--ds-config zero1: each rank updates 1/{batch.dp_size} of the parameters")
    if run.settings.optimizer == "adamw_unfused":
        advice.append("--optimizer adamw, one fused kernel")
    if layout.zero.offload_optimizer:
        advice.append("a layout that keeps the optimizer on the device, if it fits")
    return [*advice, f"--gradient-accumulation-steps {2 * batch.accumulation}: fewer steps for as many tokens"]


def _waiting_advice(run: TrainerRun) -> list[str]:
    """Return advice for ranks that wait for each other."""
    layout = run.layout
    if layout.pp > 1:
        return [f"--gradient-accumulation-steps {2 * run.batch.accumulation}, so that filling and draining the "
                "pipeline is a smaller share of each step",
                '"partition": "time" in the ds_config\'s ezpz_llm block, if stages differ']
    return ["separate CPU cores for each rank (launch --explain shows the binding)",
            "a larger --micro-batch-size, for less variation between steps"]
