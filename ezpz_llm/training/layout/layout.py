"""Parallel layout, read from a ds_config, and its map of ranks to nodes (imports no torch)."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Literal, get_args

from ezpz_llm.core.base import UserError, as_dataclass, count_noun, unknown_name_error
from ezpz_llm.training.dist.degrees import AXES, Degrees
from ezpz_llm.training.layout.ds_config import OUR_BLOCK, DsConfig, check_our_keys
from ezpz_llm.training.layout.ds_config_overrides import translated_degrees
from ezpz_llm.training.model.partition import Partition

Engine = Literal["ddp", "fsdp2", "deepspeed"]
Offload = Literal["cpu", "nvme"]

DEGREE_NAMES = {"tp": "tensor-parallel", "pp": "pipeline-parallel", "sp": "sequence-parallel"}
_OUR_KEYS = ("engine", *DEGREE_NAMES, "partition", "tiled", "shard_within")
"""Keys of the block "ezpz_llm": options for which DeepSpeed has no key."""


@dataclass(frozen=True)
class ZeroOptions:
    """Options of a layout that change its process groups, bytes sent or memory; each is a row of knobs.KNOBS.

    Attributes:
        stage: ZeRO stage; None if DeepSpeed is not used.
        offload_optimizer: "cpu" for optimizer state and step in CPU memory, "nvme" for the state in files, or None.
        offload_param: likewise for the parameters of stage 3.
        tiled: linear layers to compute in tiles, as (name, tiles along the input, tiles along the output).
        hpz_partition_size: number of neighboring ranks that share a second copy of stage 3's parameters (hpZ of
            ZeRO++, Wang et al. 2023, arXiv:2306.10209); 1 for no copy.
        shard_within: number of neighboring ranks over which FSDP2 shards a whole model (hybrid sharding, Zhao et
            al. 2023, arXiv:2304.11277); None for all ranks.
    """

    stage: int | None = None
    offload_optimizer: Offload | None = None
    offload_param: Offload | None = None
    tiled: tuple[tuple[str, int, int], ...] = ()
    hpz_partition_size: int = 1
    shard_within: int | None = None

    @property
    def has_offload_or_tiles(self) -> bool:
        """True if the layout saves device memory at the cost of speed, also on a single rank."""
        return bool(self.offload_optimizer or self.offload_param or self.tiled)


@dataclass(frozen=True)
class Layout:
    """Parallel layout, compared by value without its name.

    The product of the degrees and the data-parallel size is the number of ranks. `partition` is the quantity
    that is balanced over pipeline stages.
    """

    name: str = field(compare=False)
    engine: Engine
    zero: ZeroOptions = ZeroOptions()
    tp: int = 1
    pp: int = 1
    sp: int = 1
    partition: Partition = "parameters"

    def dp_size(self, world_size: int) -> int:
        """Return the data-parallel size; the degrees must divide `world_size` (constraints.py)."""
        return world_size // (self.tp * self.pp * self.sp)

    def degrees(self, world_size: int) -> Degrees:
        """Return all degrees, including the data-parallel size."""
        return Degrees(self.dp_size(world_size), self.tp, self.pp, self.sp)

    def shard_stage(self) -> int:
        """Return the ZeRO stage with the same sharding: 3 for FSDP2, 0 for DDP."""
        return 3 if self.engine == "fsdp2" else self.zero.stage or 0

    def with_zero(self, **changes: Any) -> Layout:
        """Return a copy with some `ZeroOptions` replaced."""
        return replace(self, zero=replace(self.zero, **changes))

    def at_degrees(self, tp: int = 1, pp: int = 1, sp: int = 1) -> Layout:
        """Return a copy with these degrees."""
        return replace(self, tp=tp, pp=pp, sp=sp)

    def describe(self, world_size: int) -> str:
        """Return the name and, unless only data-parallel, the degrees, such as "3d: pp 2 x dp 2 x tp 2"."""
        if self.tp * self.pp * self.sp == 1:
            return self.name
        sizes = [(axis, getattr(self.degrees(world_size), axis)) for axis in AXES]
        return f"{self.name}: " + " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1 or axis == "dp")

    def as_record(self) -> dict[str, Any]:
        """Return the flat record for layout.json, with the stage as "zero_stage"."""
        record = asdict(self)
        options = record.pop("zero")
        return {"name": record.pop("name"), "engine": record.pop("engine"), "zero_stage": options.pop("stage"),
                **record, **options}

    @classmethod
    def from_record(cls, record: Any, where: str) -> Layout:
        """Read a record that `as_record` wrote, even in a release with fewer options.

        Raises:
            UserError: a field is missing, unknown, or has the wrong type.
        """
        if isinstance(record, dict):
            named = {"stage" if key == "zero_stage" else key: value for key, value in record.items()}
            options = {item.name for item in fields(ZeroOptions)}
            record = {**{key: named[key] for key in named if key not in options},
                      "zero": {key: named[key] for key in named if key in options}}
        return as_dataclass(cls, record, where)


def read_layout(config: DsConfig, *, tp: int | None = None, pp: int | None = None, sp: int | None = None,
                shard_within: int | None = None) -> Layout:
    """Read the layout of a ds_config; arguments other than None override it.

    constraints.py checks whether it can run.

    Raises:
        UserError: a key or value is invalid, or two values contradict each other.
    """
    check_our_keys(config, _OUR_KEYS)
    place = f"{OUR_BLOCK} in {config.path}"
    arguments = {"tp": tp, "pp": pp, "sp": sp}
    translated = translated_degrees(config)
    degrees = {}
    for name, value in arguments.items():
        where = place if value is None else f"--{name}"
        value = config.ours.get(name, translated.get(name, 1)) if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"the {DEGREE_NAMES[name]} degree {name} is {json.dumps(value)}", where=where,
                            instead="a whole number of at least 1")
        degrees[name] = value
    engine = _check_choice(config.ours.get("engine", "deepspeed"), "engine", get_args(Engine), place)
    partition = _check_choice(config.ours.get("partition", "parameters"), "partition", get_args(Partition), place)
    zero = config.values.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise UserError(f"zero_optimization.stage is {stage!r}", where=str(config.path), instead="0, 1, 2 or 3")
    group = zero.get("zero_hpz_partition_size", 1)
    # Keep a stage or option that the engine does not support: constraints.py reports it.
    options = ZeroOptions(stage if stage or engine == "deepspeed" else None, _offload_device(config, "optimizer"),
                          _offload_device(config, "param"), _parse_tiled(config.ours.get("tiled", {}), place),
                          1 if group == "auto" else max(group, 1), _shard_within(config, shard_within, place))
    return Layout(config.name, engine, options, partition=partition, **degrees)


def _shard_within(config: DsConfig, argument: int | None, place: str) -> int | None:
    value, where = (config.ours.get("shard_within"), place) if argument is None else (argument, "--shard-within")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 2):
        raise UserError(f"shard_within is {json.dumps(value)}", where=where,
                        instead="the number of ranks per node, 2 or more")
    return value


def _check_choice(value: Any, name: str, choices: tuple[str, ...], where: str) -> Any:
    if value not in choices:
        raise unknown_name_error(name, str(value), choices, where=where)
    return value


def _parse_tiled(block: Any, where: str) -> tuple[tuple[str, int, int], ...]:
    """Read {"mlp.c_fc": [1, 4]}: by name within a block, the number of tiles along input and output."""
    def is_pair(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)

    if not isinstance(block, dict) or not all(map(is_pair, block.values())):
        raise UserError(f"tiled is {json.dumps(block)}", where=where,
                        instead='{"mlp.c_fc": [1, 4]}: tiles along the input and along the output')
    return tuple((name, *value) for name, value in block.items())


def _offload_device(config: DsConfig, state: str) -> Offload | None:
    """Return the target of offload for `state`, "optimizer" or "param", in a ds_config."""
    zero = config.values.get("zero_optimization", {})
    key = f"offload_{state}"
    device = zero.get(key, {}).get("device", "none")
    if state == "optimizer" and zero.get("cpu_offload"):
        device = "cpu"
    if device in ("none", None):
        return None
    _check_choice(device, f"{key}.device", ("none", *get_args(Offload)), str(config.path))
    return device


Places = Sequence[tuple[str, int]]
"""Hostnames and their numbers of ranks, in rank order."""

_ROWS = 32
"""Maximum number of rows; longer maps omit the middle."""


def rank_map(layout: Layout, places: Places) -> str:
    """Return a table of each rank's coordinates and hostname."""
    ends = list(accumulate(count for _, count in places))
    degrees = layout.degrees(ends[-1])
    axes = [axis for axis in AXES if axis == "dp" or getattr(degrees, axis) > 1]
    ranks = range(ends[-1])
    omitted = len(ranks) - _ROWS
    shown = [*ranks[:_ROWS // 2], *ranks[-(_ROWS // 2):]] if omitted > 0 else ranks
    rows = [("rank", *axes, "host")]
    for rank in shown:
        place = degrees.coordinates(rank)
        hostname = places[bisect_right(ends, rank)][0]
        rows.append((str(rank), *(str(place[axis]) for axis in axes), hostname))
    if omitted > 0:
        rows.insert(1 + _ROWS // 2, (f"… {omitted} more", *[""] * (len(axes) + 1)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [("  " + "  ".join(map(str.ljust, row, widths))).rstrip() for row in rows]
    return "\n".join([f"ranks of {layout.describe(ends[-1])}", *lines])


def tp_crossing_warning(layout: Layout, places: Places, can_run: Callable[[int, int], bool]) -> str | None:
    """Return a warning with suggestions if a tensor-parallel group spans several nodes, else None.

    Tensor-parallel ranks communicate several times per layer, which is slow between nodes.

    Args:
        can_run: returns True if the run is legal for a world size and a tensor-parallel degree.
    """
    ends = list(accumulate(count for _, count in places))
    # Groups begin at multiples of tp, so a node boundary at any other rank splits a group.
    split = sorted({end // layout.tp for end in ends[:-1] if end % layout.tp})
    if not split:
        return None
    first, last = split[0] * layout.tp, split[0] * layout.tp + layout.tp - 1
    hostnames = [places[bisect_right(ends, rank)][0] for rank in (first, last)]
    subject = f"{count_noun(len(split), 'tensor-parallel group')} (tp {layout.tp})"
    predicate = "spans several nodes:" if len(split) == 1 else "span several nodes, such as"
    text = f"warning: {subject} {predicate} ranks {first} ({hostnames[0]}) to {last} ({hostnames[1]})"
    suggestions = _suggest_sizes(layout, places, can_run)
    return f"{text}\n  instead: {' or '.join(suggestions)}" if suggestions else text


def _suggest_sizes(layout: Layout, places: Places, can_run: Callable[[int, int], bool]) -> list[str]:
    """Return the nearest numbers of ranks per node that are multiples of tp, and the next smaller tp that fits."""
    below = max(count for _, count in places) // layout.tp * layout.tp
    ranks = [count for count in (below, below + layout.tp) if count and can_run(count * len(places), layout.tp)]
    world_size = sum(count for _, count in places)
    smaller = [tp for tp in range(layout.tp - 1, 0, -1) if layout.tp % tp == 0
               and all(count % tp == 0 for _, count in places) and can_run(world_size, tp)]
    return [*(f"launch --ppn {count}" for count in ranks), *(f"--tp {tp}" for tp in smaller[:1])]
