"""Suggestions for a layout that cannot run: single values to change to make it legal (imports no torch).

The search varies the values that the failed rule names and keeps a case only if every rule passes, so that each
suggestion in an error message runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any

from ezpz_llm.core.base import UserError
from ezpz_llm.training.layout import ds_config
from ezpz_llm.training.layout.constraints import validate
from ezpz_llm.training.layout.knobs import KNOBS, LayoutCheck, Problem
from ezpz_llm.training.layout.layout import DEGREE_NAMES, Engine, Layout, ZeroOptions, read_layout

_STAGES = (1, 0, 2, 3)


def validate_or_suggest(case: LayoutCheck, origins: Mapping[str, str]) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout to run and the notes about it.

    Args:
        origins: source of each value, by the names that problems use.

    Raises:
        UserError: the layout cannot run, or its batch sizes contradict each other.
    """
    layout, notes, problem = validate(case)
    if problem is None:
        return layout, notes
    where = ", ".join(f"{name} from {origins[name]}" for name in problem.names if name in origins)
    instead = [as_cli_flags(case, choice) for choice in alternatives(case, problem)]
    raise UserError(problem.message, where=where or None,
                    instead=" or ".join(instead) or "fewer ranks, or another model or batch")


def is_legal(case: LayoutCheck) -> bool:
    """Return True if a case runs unchanged, including its batch."""
    try:
        layout, _, problem = validate(case)
        if problem is None and case.batch is not None:
            case.batch(case.layout.dp_size(case.world_size))
    except UserError:
        return False
    return problem is None and layout == case.layout


def alternatives(case: LayoutCheck, problem: Problem) -> list[LayoutCheck]:
    """Return legal cases that differ in one of the problem's knobs; if there are none, the data-parallel case."""
    cases = [varied for knob in problem.knobs for near in _VARY[knob](case) for varied in _first_legal(near)]
    unique = [varied for position, varied in enumerate(cases) if varied not in cases[:position]]
    return unique or _first_legal([replace(case, layout=case.layout.at_degrees())])


def as_cli_flags(case: LayoutCheck, choice: LayoutCheck) -> str:
    """Return the options or edits that turn `case` into `choice`."""
    parts = []
    current, suggested = case.layout, choice.layout
    if current.at_degrees() == suggested.at_degrees():
        parts += [f"--{name} {getattr(suggested, name)}" for name in DEGREE_NAMES
                  if getattr(current, name) != getattr(suggested, name)]
    elif current.with_zero(shard_within=None) == suggested.with_zero(shard_within=None):
        size = suggested.zero.shard_within
        parts.append("no shard_within" if size is None else f"--shard-within {size}")
    elif case.shipped:
        parts.append(selection(suggested) or "")
    else:
        parts += _edits(current, suggested)
    if choice.world_size != case.world_size:
        parts.append(f"{choice.world_size} ranks")
    if case.model is not None and choice.model is not None:
        parts += [f"--{name.replace('_', '-')} {getattr(choice.model, name)}"
                  for name in ("n_layer", "block_size", "vocab_multiple")
                  if getattr(choice.model, name) != getattr(case.model, name)]
    return " ".join(parts)


def selection(layout: Layout) -> str | None:
    """Return the options that select a layout, such as `--ds-config zero1 --tp 4`.

    Returns None if no options select it.
    """
    named = [other for other in shipped_layouts() if other.at_degrees() == layout.at_degrees()]
    if not named and layout.zero.shard_within is not None:
        options = selection(layout.with_zero(shard_within=None))
        return options and f"{options} --shard-within {layout.zero.shard_within}"
    if not named:
        return None
    flags = [[f"--{name} {getattr(layout, name)}" for name in DEGREE_NAMES
              if getattr(layout, name) != getattr(other, name)] for other in named]
    # Prefer explicit degrees over a named layout whose degrees would be overridden. Of the equal pp2_tp2 and 3d,
    # prefer the more descriptive name, which is the last.
    best = min(reversed(range(len(named))), key=lambda i: (bool(flags[i]), named[i].tp * named[i].pp * named[i].sp))
    return " ".join([f"--ds-config {named[best].name}", *flags[best]])


@cache
def shipped_layouts() -> tuple[Layout, ...]:
    """Return the layouts of the ds_configs that come with the package."""
    return tuple(read_layout(ds_config.load(name)) for name in ds_config.names())


def _edits(current: Layout, suggested: Layout) -> list[str]:
    """Return the changes to a user's own ds_config."""
    edits = []
    if suggested.engine != current.engine:
        edits.append(f'"engine": "{suggested.engine}"')
    if (suggested.zero.stage or 0) != (current.zero.stage or 0):
        edits.append(f'"stage": {suggested.zero.stage or 0}')
    for knob in KNOBS[1:]:
        value = getattr(suggested.zero, knob.field)
        if value != getattr(current.zero, knob.field):
            edits.append(f'"{knob.name}": {json.dumps(value)}' if knob.is_set(suggested) else f"no {knob.name}")
    edits += [f"--{name} {getattr(suggested, name)}" for name in DEGREE_NAMES
              if getattr(suggested, name) != getattr(current, name)]
    return [" and ".join(edits)]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _vary_degree(name: str, case: LayoutCheck) -> list[Iterable[LayoutCheck]]:
    """Return the cases with smaller and with larger degrees, nearest first.

    As in all `_vary_` functions, the first legal case of each list is suggested.
    """
    value, sizes = getattr(case.layout, name), _divisors(case.world_size)
    below, above = [size for size in reversed(sizes) if size < value], [size for size in sizes if size > value]
    return [(_with(case, **{name: size}) for size in side) for side in (below, above)]


def _vary_ranks(case: LayoutCheck) -> list[Iterable[LayoutCheck]]:
    """Return the cases with fewer and with more ranks, nearest first."""
    unit = case.layout.tp * case.layout.pp * case.layout.sp
    below = case.world_size - case.world_size % unit
    return [(replace(case, world_size=size) for size in side)
            for side in (range(below, 0, -unit), range(below + unit, below + 9 * unit, unit))]


def _vary_stage(case: LayoutCheck) -> list[Iterable[LayoutCheck]]:
    """Return the cases with other stages of the same engine, nearest first."""
    stages = _near_stages(case.layout) if case.layout.engine == "deepspeed" else [None]
    return _with_engine(case, case.layout.engine, stages)


def _near_stages(layout: Layout) -> list[int]:
    requested = 3 if layout.engine == "fsdp2" else layout.zero.stage or 0
    return sorted(_STAGES, key=lambda stage: abs(stage - requested))


def _with_engine(case: LayoutCheck, engine: Engine, stages: Sequence[int | None]) -> list[Iterable[LayoutCheck]]:
    """Return the cases with an engine's stages, first with the other ZeRO options unchanged, then without them."""
    return [[_with_zero(_with(start, engine=engine), stage=stage)
             for start in (case, replace(case, layout=_with_stage_only(case.layout))) for stage in stages]]


def _with_stage_only(layout: Layout) -> Layout:
    """Return the layout without ZeRO options other than its stage."""
    return replace(layout, zero=ZeroOptions(layout.zero.stage))


def _vary_group(field: str, case: LayoutCheck) -> list[Iterable[LayoutCheck]]:
    """Return the nearest legal group sizes, two below and one above; if there are none, no groups."""
    value, default = getattr(case.layout.zero, field), getattr(ZeroOptions(), field)
    varied = {size: [_with_zero(case, **{field: size})] for size in _divisors(case.world_size)}
    legal = [size for size in varied if size > 1 and _first_legal(varied[size])]
    near = [*[size for size in legal if size < value][-2:], *[size for size in legal if size > value][:1]]
    return [varied[size] for size in near] or [[_with_zero(case, **{field: default})]]


def _vary_model(name: str, case: LayoutCheck) -> list[Iterable[LayoutCheck]]:
    """Return the cases with models whose `name` fits the degrees."""
    layout, model = case.layout, case.model
    if model is None:
        return []
    value = getattr(model, name)
    sizes = {"n_layer": (layout.pp,),
             "vocab_multiple": (math.lcm(value, layout.tp),),
             "block_size": (value - value % layout.sp, value - value % layout.sp + layout.sp)}[name]
    return [[replace(case, model=replace(model, **{name: size}))] for size in sizes if size]


def _with(case: LayoutCheck, **changes: Any) -> LayoutCheck:
    return replace(case, layout=replace(case.layout, **changes))


def _with_zero(case: LayoutCheck, **changes: Any) -> LayoutCheck:
    return replace(case, layout=case.layout.with_zero(**changes))


def _first_legal(cases: Iterable[LayoutCheck]) -> list[LayoutCheck]:
    """Return the first legal case that options or edits of the user's own file can select, in a list, if any."""
    return list(islice((case for case in cases
                        if (not case.shipped or selection(case.layout) is not None) and is_legal(case)), 1))


_VARY: dict[str, Callable[[LayoutCheck], list[Iterable[LayoutCheck]]]] = {
    "ranks": _vary_ranks,
    **{name: partial(_vary_degree, name) for name in DEGREE_NAMES},
    "stage": _vary_stage,
    # DeepSpeed, in the stage that is most similar to the requested engine.
    "engine": lambda case: _with_engine(case, "deepspeed", _near_stages(case.layout)),
    "tiled": lambda case: [[_with_zero(case, tiled=())]],
    "offload": lambda case: [[_with_zero(case, offload_param=None),
                              _with_zero(case, offload_param=None, offload_optimizer=None)]],
    "hpz": partial(_vary_group, "hpz_partition_size"),
    "shard_within": partial(_vary_group, "shard_within"),
    **{name: partial(_vary_model, name) for name in ("n_layer", "block_size", "vocab_multiple")},
}
