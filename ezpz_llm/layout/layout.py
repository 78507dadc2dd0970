"""How a model is spread over ranks, as a value, and what a ds_config says of it (imports no torch)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ezpz_llm.base.errors import UserError, unknown
from ezpz_llm.dist.degrees import AXES, Degrees
from ezpz_llm.layout.ds_config import OUR_BLOCK, DsConfig
from ezpz_llm.layout.ds_config_overrides import translated_degrees
from ezpz_llm.model.partition import Partition

Engine = Literal["ddp", "fsdp2", "deepspeed"]
Offload = Literal["cpu", "nvme"]

DEGREE_NAMES = {"tp": "tensor-parallel", "pp": "pipeline-parallel", "sp": "sequence-parallel"}


@dataclass(frozen=True)
class Layout:
    """One parallel layout.

    `zero_stage` is None where DeepSpeed is not used. `offload_optimizer` is "cpu" where the optimizer's state and
    its step live in host memory, "nvme" where the state lies in files, else None; `offload_param` likewise for
    stage 3's parameters. Degrees multiply with the data-parallel size to the number of ranks. `partition` is what
    a pipeline's stages have equally much of. `tiled` names linear layers that are cut into tiles, (name, in, out).
    """

    name: str
    engine: Engine
    zero_stage: int | None = None
    tp: int = 1
    pp: int = 1
    sp: int = 1
    partition: Partition = "parameters"
    tiled: tuple[tuple[str, int, int], ...] = ()
    offload_optimizer: Offload | None = None
    offload_param: Offload | None = None

    def dp_size(self, world_size: int) -> int:
        """The number of ranks that each see their own samples; the degrees divide `world_size` (see legal.py)."""
        return world_size // (self.tp * self.pp * self.sp)

    def describe(self, world_size: int) -> str:
        """The name, with all degrees where one besides the data-parallel is above 1: "3d: pp 2 x dp 2 x tp 2"."""
        if self.tp * self.pp * self.sp == 1:
            return self.name
        degrees = Degrees(self.dp_size(world_size), self.tp, self.pp, self.sp)
        sizes = [(axis, getattr(degrees, axis)) for axis in AXES]
        return f"{self.name}: " + " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1 or axis == "dp")


def read_layout(config: DsConfig, *, tp: int | None = None, pp: int | None = None,
                sp: int | None = None) -> Layout:
    """The layout of a ds_config, with some of its degrees replaced. It may be one that cannot run: see legal.py.

    Raises:
        UserError: a value that is none, or two that contradict each other.
    """
    place = f"{OUR_BLOCK} in {config.path}"
    given = {"tp": tp, "pp": pp, "sp": sp}
    theirs = translated_degrees(config)
    degrees = {}
    for name, value in given.items():
        where = place if value is None else f"--{name}"
        value = config.ours.get(name, theirs.get(name, 1)) if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"the {DEGREE_NAMES[name]} degree {name} is {json.dumps(value)}", where=where,
                            instead="a whole number of at least 1")
        degrees[name] = value
    engine = _choice(config.ours.get("engine", "deepspeed"), "engine", get_args(Engine), place)
    partition = _choice(config.ours.get("partition", "parameters"), "partition", get_args(Partition), place)
    zero = config.values.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise UserError(f"zero_optimization.stage is {stage!r}", where=str(config.path), instead="0, 1, 2 or 3")
    tiled = _tiled(config.ours.get("tiled", {}), place)
    # A stage that the engine has not is kept, for legal.py to find.
    kept = stage if stage or engine == "deepspeed" else None
    return Layout(config.name, engine, kept, partition=partition, tiled=tiled,
                  offload_optimizer=_offload(config, "optimizer"), offload_param=_offload(config, "param"),
                  **degrees)


def _choice(value: Any, name: str, known: tuple[str, ...], where: str) -> Any:
    if value not in known:
        raise unknown(name, str(value), known, where=where)
    return value


def _tiled(block: Any, where: str) -> tuple[tuple[str, int, int], ...]:
    """{"mlp.c_fc": [1, 4]}: by name within a block, the number of tiles along the input and along the output."""
    def is_pair(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)

    if not isinstance(block, dict) or not all(map(is_pair, block.values())):
        raise UserError(f"tiled is {json.dumps(block)}", where=where,
                        instead='{"mlp.c_fc": [1, 4]}: tiles along the input and along the output')
    return tuple((name, *value) for name, value in block.items())


def _offload(config: DsConfig, what: str) -> Offload | None:
    """Where a ds_config puts the optimizer's state, or the parameters."""
    zero = config.values.get("zero_optimization", {})
    key = f"offload_{what}"
    device = zero.get(key, {}).get("device", "none")
    if what == "optimizer" and zero.get("cpu_offload"):
        device = "cpu"
    if device in ("none", None):
        return None
    _choice(device, f"{key}.device", ("none", *get_args(Offload)), str(config.path))
    return device
