"""Types of the members that commands read from traces and ds_configs. The files may have more members."""

from __future__ import annotations

from typing import Annotated, TypedDict

from ezpz_llm.core.base import MAX_RANKS, MAX_SECONDS, Range


class _Call(TypedDict):
    kind: str
    axes: str
    ranks: list[int]
    bytes: int


class Call(_Call, total=False):
    """Collective, send or receive in the step that was counted. `peer` is the other rank of a send or receive."""

    peer: int


class Link(TypedDict):
    """Measured rate from one node to another, in bytes/s."""

    sender: str
    receiver: str
    rate: float


class _Logged(TypedDict):
    count: int


class _Flops(TypedDict):
    deepspeed: float
    ours: Annotated[float, Range(1, 1e30)]


class _Traced(TypedDict):
    rank: Annotated[int, Range(0, MAX_RANKS)]
    device: str


class TraceNotes(_Traced, total=False):
    """Metadata that ezpz_llm adds to a trace; see training/engine/step_trace.py."""

    collectives: list[Call] | None
    links: list[Link] | None
    deepspeed: dict[str, _Logged] | None
    flops: _Flops | None
    transient_bytes: int
    buffer_bytes: int
    buffer_transient_bytes: int


class _Zero(TypedDict, total=False):
    stage: int
    reduce_bucket_size: float
    overlap_comm: bool | None
    contiguous_gradients: bool


class DeepSpeedGiven(TypedDict, total=False):
    """Content of deepspeed.json."""

    zero_optimization: _Zero | None


PackageSeconds = dict[str, Annotated[float, Range(0, MAX_SECONDS)]]
"""Content of profile/host.json: seconds that Python spent in each package."""
