"""Types of the members that commands read from files of a run directory. The files may have more members.

All members of run.json and layout.json are optional: a run adds them over time, and some commands write only a few.
"""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from ezpz_llm.base import MAX_RANKS, MAX_SECONDS, MAX_STEPS, Epoch, Range

Ranks = Annotated[int, Range(1, MAX_RANKS)]
Step = Annotated[int, Range(0, MAX_STEPS)]


class Launch(TypedDict, total=False):
    """`launch` in run.json: the command and the ranks that launch started."""

    typed: list[str]
    argv: list[str]
    command: list[str]
    scheduler: str
    job_id: str | None
    hosts: list[str]
    ranks_per_host: list[Annotated[int, Range(0, MAX_RANKS)]]
    launcher: str
    dialect: str | None
    world_size: Ranks
    env: dict[str, str]
    started: Epoch


class Exit(TypedDict, total=False):
    """`exit` in run.json: the run's exit code, and why it ended."""

    code: int
    cause: str | None
    kind: str | None
    rank: int | None
    ended: Epoch
    launcher_status: int | None
    stopped: dict[str, Any] | None
    failed_before_stop: list[int] | None
    ended_before_stop: list[int] | None


class Device(TypedDict, total=False):
    """Device of a run."""

    type: str
    memory_bytes: int | None


class Load(TypedDict):
    """Load average of rank 0's node."""

    average: float
    cpus: Annotated[int, Range(1, MAX_RANKS)]


class Environment(TypedDict, total=False):
    """`environment` in run.json: world size, device and load."""

    world_size: Ranks
    device: Device
    load: Load


class Config(TypedDict, total=False):
    """`config` in run.json: the trainer's settings that other commands read."""

    steps: Step
    log_every: Annotated[int, Range(1, MAX_STEPS)]
    optimizer: str
    resume: str | None
    ds_config: str


class Record(TypedDict, total=False):
    """Content of run.json."""

    launch: Launch
    exit: Exit | None
    config: Config
    parameters: int
    precision: str | None
    sources: dict[str, str]
    model: dict[str, Any]
    environment: Environment | None
    summary: dict[str, Any] | None
    memory: dict[str, Any] | None
    data: dict[str, Any]
    submit: dict[str, Any]
    trackers: dict[str, Any]
    load_at_end: Load
    steps: Step
    stopped: str | None


class Batch(TypedDict, total=False):
    """`batch` in layout.json."""

    global_batch: Annotated[int, Range(1, MAX_STEPS)]
    micro_batch: Annotated[int, Range(1, MAX_STEPS)]
    accumulation: Annotated[int, Range(1, MAX_STEPS)]
    dp_size: Ranks


class Degrees(TypedDict, total=False):
    """`layout` in layout.json."""

    name: str
    tp: Ranks
    pp: Ranks
    sp: Ranks


class Resolved(TypedDict, total=False):
    """Content of layout.json."""

    layout: Degrees
    batch: Batch
    precision: str | None


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
    """Metadata that ezpz_llm adds to a trace; see engine/step_trace.py."""

    collectives: list[Call] | None
    links: list[Link] | None
    deepspeed: dict[str, _Logged] | None
    flops: _Flops | None
    transient_bytes: int
    buffer_bytes: int
    buffer_transient_bytes: int


class Memory(TypedDict):
    """`memory` in run.json, in bytes, for the rank that uses the most memory; see `Memory` of memory_watch.py."""

    expected: dict[str, float]
    elsewhere: dict[str, float]
    measured: dict[str, int | None]
    peak: int


class _Zero(TypedDict, total=False):
    stage: int
    reduce_bucket_size: float
    overlap_comm: bool | None
    contiguous_gradients: bool


class DeepSpeedGiven(TypedDict, total=False):
    """Content of deepspeed.json."""

    zero_optimization: _Zero | None


class StepTimes(TypedDict):
    """Content of profile/counterfactual-rankNNNN.json: step times with and without collectives, in seconds."""

    rank: Annotated[int, Range(0, MAX_RANKS)]
    real: list[float]
    stubbed: list[float]


PackageSeconds = dict[str, Annotated[float, Range(0, MAX_SECONDS)]]
"""Content of profile/host.json: seconds that Python spent in each package."""
