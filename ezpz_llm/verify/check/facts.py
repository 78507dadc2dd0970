"""Facts and measurements of ranks: types of the messages between ranks and of preflight.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from msgspec import Struct

from ezpz_llm.core.base.records import Bytes, Rank, Ranks, Whole

StoreLocation = str | tuple[str, Whole]
"""Location of a store: a file, or an address and a port."""


class Device(Struct, frozen=True, omit_defaults=True):
    """Device that torch selected. `identity` is None if ranks may share the device."""

    kind: str
    identity: str | None
    name: str | None = None
    free: Bytes | None = None
    total: Bytes | None = None


class Answer(Struct, frozen=True, omit_defaults=True, tag_field="type", tag=str.lower):
    """Result of a stage, with the name of its type."""


class Ready(Answer, frozen=True):
    """Device and version of torch. Rank 0 also creates the store for all ranks."""

    device: Device
    torch: str
    store: StoreLocation | None = None


class Compute(Answer, frozen=True):
    """Speed of a matmul."""

    flops_per_second: float


class Reduction(Answer, frozen=True):
    """Bus bandwidth of an all-reduce, gloo's interfaces, and the kinds of collectives with wrong values."""

    bytes_per_second: float
    interfaces: list[str] = []
    wrong_kinds: list[str] = []


class Network(Answer, frozen=True):
    """Network that NCCL or oneCCL logged. Members are empty if they were not logged.

    `network` is `mpi` for oneCCL over MPI, which does not know the network that MPI uses.
    """

    library: str = ""
    network: str = ""
    transport: str = ""
    provider: str = ""
    interface: str = ""


class Mpi(Answer, frozen=True):
    """Rank, world size and library of MPI."""

    rank: Whole
    size: Whole
    library: str = ""


class Failed(Answer, frozen=True):
    """Reason why a stage has no result."""

    error: str


Measurement = Ready | Compute | Reduction | Network | Mpi | Failed
A = TypeVar("A", bound=Answer)


def find_answer(answers: Mapping[str, Answer], kind: type[A]) -> A | None:
    """Return the first answer of a kind; None if there is none."""
    return next((answer for answer in answers.values() if isinstance(answer, kind)), None)


class ConnectedRank(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Rank that connected to rank 0, and its measurements by stage."""

    rank: Whole
    host: str
    stages: dict[str, Measurement]
    clock: tuple[float, float] | None = None
    """Offset to rank 0's clock and its uncertainty, in seconds."""
    lost_in: str | None = None
    """Stage in which the connection ended."""
    stuck_in: str | None = None
    """Stage to which the rank did not reply."""


class Space(Struct, frozen=True, omit_defaults=True):
    """Bytes of memory, or of a folder's file system; None if the folder does not exist."""

    total: Bytes | None
    free: Bytes | None
    path: str = ""


class Devices(Struct, frozen=True):
    """Accelerators that are visible according to the mask or the driver; their number according to the driver."""

    ids: list[str]
    source: str
    installed: Whole


class Master(Struct, frozen=True):
    """MASTER_ADDR, MASTER_PORT, and the address to which MASTER_ADDR resolves on this node."""

    address: str
    port: str | None
    resolves_to: str | None


class Route(Struct, frozen=True):
    """Interface and address of this node from which packets to MASTER_ADDR are sent."""

    interface: str | None
    address: str | None


class Facts(ConnectedRank, frozen=True, kw_only=True):
    """Rank that sent its facts. `environment` and `versions` should be the same on all nodes."""

    world_size: Ranks
    local_rank: Rank
    local_size: Ranks
    node_rank: Rank
    rank_source: str
    rank_notes: list[str]
    boot_id: str
    pid: Whole
    cores: list[Whole]
    host_cores: list[Whole]
    memory: Space
    shm: Space
    tmp: Space
    interfaces: dict[str, list[str]]
    named_interfaces: dict[str, str]
    """Interfaces by the variable that names them."""
    name_resolves_to: str | None
    master: Master | None = None
    route: Route | None = None
    environment: dict[str, str]
    masks: dict[str, str]
    devices: Devices
    versions: dict[str, str]

    @property
    def device(self) -> Device | None:
        """Device that torch selected; None if unknown."""
        ready = find_answer(self.stages, Ready)
        return ready.device if ready else None
