"""Types of certify's files: references, results of cases (cells.jsonl), and certify.json (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from ezpz_llm.core.base.records import Rank, Ranks, Whole
from ezpz_llm.core.rundir.layout_record import Batch
from ezpz_llm.core.rundir.records import Device


class Refused(Struct, frozen=True):
    """Reason why the single-process reference is unusable, and its fix."""

    why: str
    instead: str


class Noise(Struct, frozen=True):
    """Baseline noise: differences between single-process runs that sum in another order, by quantity."""

    loss: float
    norm: list[float]
    gradient: dict[str, float]
    weight: dict[str, float]


class LargestRatio(Struct, frozen=True):
    """Comparison with the largest ratio to its bound, and the number of comparisons."""

    what: str
    ratio: float | None
    compared: Whole


class ReferenceNumbers(Struct, frozen=True):
    """Content of reference.json; see `ezpz_llm.verify.certify.reference.Reference`."""

    losses: list[float]
    norms: list[float]
    held_out: float
    texts: list[list[int]]
    noise: Noise
    symmetric: dict[str, float]
    one_process: dict[str, LargestRatio]


class TargetProperties(Struct, frozen=True):
    """Properties of a target that all layouts need.

    `clip` is the gradient clip. After the first step, the optimizer state `gradient_state` is the clipped gradient
    times `gradient_factor`. `parameters` is the number of parameters, `drops` is True if the module had
    dropout before `fresh_module` disabled it, `batches` are the samples of each micro-batch, and `statistics` is
    the baseline noise by running statistic.
    """

    clip: float
    gradient_state: str
    gradient_factor: float
    parameters: Whole
    drops: bool
    batches: dict[int, list[str]]
    statistics: dict[str, float]


class Worst(Struct, frozen=True):
    """Comparison of a kind with the largest ratio, and the number of comparisons."""

    what: str
    value: float | None
    bound: float | None
    detail: str
    ratio: float | None
    compared: Whole


class SummaryNoise(Struct, frozen=True):
    """Noise of the loss, and of the gradient norm at each step."""

    loss: float | None
    norm: Sequence[float | None]


class ReferenceSummary(Struct, frozen=True):
    """Numbers of a reference in certify.json, null if not finite; `sight` is from `verdict.sensitivity`."""

    losses: Sequence[float | None]
    held_out: float | None
    norms: Sequence[float | None]
    noise: SummaryNoise
    zero_by_symmetry: Mapping[str, float | None]
    sight: dict[str, float | None] = {}
    one_process: dict[str, LargestRatio] = {}


class KindTraffic(Struct, frozen=True, omit_defaults=True):
    """Number and bytes of a kind of collective, in all groups and by the size of the group."""

    count: Whole
    bytes: Whole
    groups: dict[str, KindTraffic] = {}


class RankCollectives(Struct, frozen=True):
    """Collectives of ranks that issue the same ones, by kind."""

    ranks: list[Rank]
    kinds: dict[str, KindTraffic]


class MemoryPart(Struct, frozen=True):
    """Calculated memory of a kind of state; see `ezpz_llm.training.layout.memory.Part`."""

    kind: str
    where: str
    bytes: Whole


class CaseResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of a case: a line of cells.jsonl. Numbers that are not finite are null in certify.json.

    Attributes:
        failures: one line per kind of finding that failed.
        by_parameter: value and bound of each parameter, by kind.
        collectives, memory: measured, by rank.
        arithmetic, textbook: calculated memory, and traffic as in `case.published_traffic`.
        resumed_from: the layout that saved the loaded checkpoint.
        one_process: for a shared fault, the comparison with the step definition.
    """

    layout: str
    world: Ranks
    model: str
    dtype: str
    fault: str | None
    passed: bool
    failures: list[str]
    kinds: list[str]
    worst: dict[str, Worst]
    losses: list[float | None] = []
    held_out: float | None = None
    norms: list[float | None] = []
    reference: ReferenceSummary | None = None
    by_parameter: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    batch: Batch | None = None
    parameters: Whole | None = None
    collectives: list[RankCollectives] = []
    memory: list[dict[str, Whole]] = []
    arithmetic: list[MemoryPart] = []
    textbook: dict[str, Whole] | None = None
    clip: float | None = None
    resumed_from: str | None = None
    one_process: dict[str, LargestRatio] = {}
    seconds: float

    @property
    def title(self) -> str:
        """Title for a line of output."""
        fault = f" with {self.fault}" if self.fault else ""
        return f"{self.layout} {self.model} {self.dtype} on {self.world} ranks{fault}"

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Layout, model, precision and number of ranks."""
        return self.layout, self.model, self.dtype, self.world


class SkippedCase(Struct, frozen=True):
    """Case that cannot run; see `ezpz_llm.verify.certify.cases.Skipped`."""

    layout: str
    world: Ranks
    model: str
    dtype: str
    fault: str | None
    reason: str
    illegal: bool


class Machine(Struct, frozen=True):
    """Members of `environment` of run.json that affect a certificate."""

    versions: dict[str, str | None] = {}
    platform: str | None = None
    device: Device = Device()
    threads: Whole | None = None

    def versions_text(self) -> str:
        """Return the versions of torch, DeepSpeed and Python."""
        return ", ".join(f"{name} {self.versions[name]}" for name in ("torch", "deepspeed", "python")
                         if name in self.versions)


class TargetRecord(Struct, frozen=True, kw_only=True):
    """File of a target: its name, its function, and its hash."""

    path: str
    function: str = ""
    sha256: str


class Basis(Struct, frozen=True, kw_only=True):
    """Recipe and constants of the bounds, which all cases of a certificate share. They are only written."""

    target: TargetRecord | UnsetType = UNSET
    recipe: dict[str, Any] = {}
    bounds: dict[str, Any] = {}


class CertificateRecord(Basis, frozen=True, kw_only=True):
    """Content of certify.json. The numbers of each parameter are only in cells.jsonl."""

    command: Annotated[str, Meta(max_length=20_000)]
    date: str
    seconds: float = 0.0
    passed: bool
    refused: Refused | None = None
    environment: Machine
    skipped: list[SkippedCase] = []
    references: dict[str, ReferenceSummary] = {}
    results: list[CaseResult]
