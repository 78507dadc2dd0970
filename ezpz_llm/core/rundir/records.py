"""Types of run.json, and its reader and writer. The same type is written and read.

All members are optional: a run adds them over time, and some commands write only a few. Not imported by
`ezpz_llm.core.rundir`; see `ezpz_llm.core.base.records`.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from msgspec import Struct

from ezpz_llm.core.base import UserError, read_own, untrusted_input
from ezpz_llm.core.base.records import Bytes, Count, Epoch, Rank, Ranks, Size, Step, Whole, as_plain, as_record
from ezpz_llm.core.rundir.files import LOCK_WITHIN_S, RunDir, locked, write_json
from ezpz_llm.core.rundir.secrets import without_secrets
from ezpz_llm.core.rundir.stop import SIGNAL, Stop
from ezpz_llm.core.rundir.summary_record import Summary
from ezpz_llm.core.rundir.value_source_record import Sources


class Launch(Struct, frozen=True):
    """`launch` in run.json: the command and the ranks that launch started."""

    typed: list[str] | None = None
    argv: list[str] | None = None
    command: list[str] | None = None
    scheduler: str | None = None
    job_id: str | None = None
    hosts: list[str] | None = None
    ranks_per_host: list[Rank] | None = None
    launcher: str | None = None
    dialect: str | None = None
    site: str | None = None
    binding: dict[str, Any] | None = None
    notes: list[str] | None = None
    sources: dict[str, str] | None = None
    world_size: Ranks | None = None
    env: dict[str, str] | None = None
    started: Epoch | None = None

    @property
    def rank_hosts(self) -> list[str]:
        """Hostname of each rank; empty if unknown."""
        counts = zip(self.hosts or (), self.ranks_per_host or (), strict=False)
        return [host for host, count in counts for _ in range(count)]


class Exit(Struct, frozen=True):
    """`exit` in run.json: the run's exit code, and why it ended. The post-mortem can be rebuilt from it."""

    code: Whole | None = None
    cause: str | None = None
    kind: str | None = None
    rank: Whole | None = None
    ended: Epoch | None = None
    launcher_status: Whole | None = None
    stopped: Stop | None = None
    failed_before_stop: list[Whole] | None = None
    ended_before_stop: list[Whole] | None = None

    @property
    def is_interrupted(self) -> bool:
        """True if the run ended because launch received a signal."""
        return self.stopped is not None and self.stopped.kind == SIGNAL


class Device(Struct, frozen=True):
    """Device of a run."""

    type: str | None = None
    name: str | None = None
    cpus: Whole | None = None
    memory_bytes: Bytes | None = None


class Load(Struct, frozen=True):
    """Load average of rank 0's node, and its number of CPUs."""

    average: float
    cpus: Ranks


class Network(Struct):
    """Library of the collectives, and the network that it chose, as far as it logs it.

    `unused` lists faster network devices of the node, if the library fell back to TCP.
    """

    library: str = ""
    network: str = ""
    transport: str = ""
    provider: str = ""
    interface: str = ""
    unused: list[str] = []


class Environment(Struct, frozen=True):
    """`environment` in run.json: versions, nodes, device, load, and variables that affect speed or results."""

    versions: dict[str, str | None] = {}
    platform: str | None = None
    hosts: list[str] = []
    world_size: Ranks | None = None
    rank_source: str | None = None
    backend: str | None = None
    network: Network | None = None
    device: Device = Device()
    load: Load | None = None
    threads: Whole | None = None
    variables: dict[str, str] = {}


class Settings(Struct, frozen=True):
    """Members of `config` in run.json that other commands read. The others are the trainer's own."""

    steps: Step | None = None
    log_every: Count | None = None
    resume: str | None = None
    ds_config: str | None = None
    model: str | None = None
    corpus: str | None = None
    tokenizer: str | None = None
    text_key: str | None = None
    mask_documents: bool | None = None
    eval_tokens: Whole | None = None
    overfit_one_batch: bool | None = None
    seed: Whole | None = None
    init_from: str | None = None


class ModelSettings(Struct, frozen=True):
    """Members of `model` in run.json that other commands read; see `ezpz_llm.training.model.config.ModelConfig`."""

    block_size: Count | None = None
    dropout: float | None = None


class Data(Struct, frozen=True):
    """`data` in run.json: the run's token shards."""

    folder: str | None = None
    source: dict[str, Any] = {}
    """Corpus, with counts of its files, bytes and skipped documents, as in the manifest of the shards."""
    tokenizer: str | None = None
    vocab_size: Whole | None = None
    documents: Whole | None = None
    tokens: dict[str, Whole] = {}
    fingerprint: str | None = None


class Memory(Struct, frozen=True):
    """`memory` in run.json: bytes by kind, each on the rank that uses most of it.

    Attributes:
        expected: estimates, in device memory.
        elsewhere: estimates for CPU memory and files, for tensors that are not on the device.
        measured: omits temporarily unsharded parameters, and activations on devices without memory counters.
        host_peak: largest peak resident size of a process.
    """

    expected: dict[str, Size] = {}
    elsewhere: dict[str, Size] = {}
    measured: dict[str, Whole | None] = {}
    peak: Whole | None = None
    reserved: Whole | None = None
    host_peak: Whole | None = None


class CompiledGraphs(Struct, frozen=True):
    """`graphs` of `startup`: numbers of graphs compiled and loaded, summed over ranks."""

    compiled: Whole
    loaded: Whole


class Startup(Struct, frozen=True):
    """`startup` in run.json: seconds until the end of the first step, by part. `graphs` is for --compile only."""

    seconds: dict[str, float] = {}
    total_s: float = 0.0
    graphs: CompiledGraphs | None = None


class Rollback(Struct, frozen=True):
    """Member of `rollbacks` in run.json."""

    from_step: Step
    to_step: Step
    samples_passed_over: Whole
    why: str = ""


class CheckpointCost(Struct, frozen=True):
    """`checkpoints` in run.json: number, size, median seconds to write, and seconds that training waited."""

    written: Whole
    bytes: Bytes | None
    complete_after_s: float | None
    training_waited_s: float


class TrackerRun(Struct, frozen=True):
    """Member of `trackers` in run.json: the run in an experiment tracker."""

    online: bool
    run_id: str | None
    folder: str


class Submission(Struct, frozen=True):
    """`submit` in run.json: the jobs that submit queued.

    Attributes:
        launched_before: start of an earlier launch in this directory.
    """

    typed: list[str] = []
    scheduler: str | None = None
    site: str | None = None
    nodes: Whole | None = None
    time_s: Whole | None = None
    ranks: Whole | None = None
    script: str | None = None
    submitted: Epoch | None = None
    launched_before: Epoch | None = None
    jobs: list[str] = []


class Archive(Struct, frozen=True):
    """Archive of a part of the environment; see `ezpz_llm.launcher.running.staging.archive.Archive`."""

    path: str
    files: Whole
    bytes: Bytes
    is_new: bool


class Staging(Struct, frozen=True):
    """`staging` in run.json: the copy of the environment on each node."""

    folder: str
    way: str
    seconds: float
    archives: list[Archive]


Level = Literal["bad", "warn", "ok"]


class Finding(Struct, frozen=True):
    """Result of a check, and its remedy. A command fails if a finding has the level `bad`."""

    level: Level
    topic: str
    found: str
    instead: str = ""


class SmokeTest(Struct, frozen=True):
    """`test_dist` in run.json: the results of the smoke test."""

    fit: bool
    findings: list[Finding]
    held_out_loss: dict[str, float]
    reductions: list[dict[str, Any]]
    spread: dict[str, dict[str, float]]


class CertifyOutcome(Struct, frozen=True):
    """`certify` in run.json; certify.json has the results."""

    passed: bool
    command: str


class RunRecord(Struct, frozen=True):
    """Content of run.json."""

    launch: Launch | None = None
    exit: Exit | None = None
    submit: Submission | None = None
    staging: Staging | None = None

    config: dict[str, Any] | None = None
    """Settings of the trainer or of the user's script, by name."""
    sources: Sources | None = None
    model: dict[str, Any] | None = None
    """Settings of the model, by name."""
    parameters: Whole | None = None
    precision: str | None = None
    environment: Environment | None = None
    data: Data | None = None
    unigram_entropy: float | None = None
    flops_per_token: dict[str, Any] | None = None
    peak: dict[str, Any] | None = None
    ceiling: dict[str, Any] | None = None
    trackers: dict[str, TrackerRun] = {}
    callbacks: dict[str, str] = {}
    """Package of each added callback, by the callback's name."""

    startup: Startup | None = None
    checks: list[str] = []
    rollbacks: list[Rollback] = []
    steps: Step | None = None
    stopped: str | None = None
    samples_consumed: Whole | None = None
    sample_hash: str | None = None
    checkpoints: CheckpointCost | None = None
    val_tokens: Whole | None = None
    val_loss: float | None = None
    hellaswag: dict[str, Any] | None = None
    summary: Summary | None = None
    memory: Memory | None = None
    load_at_end: Load | None = None

    source: str | None = None
    """Weights that evaluate or generate read."""
    evaluation: dict[str, dict[str, Any]] = {}
    samples: list[str] = []
    sampling: dict[str, Any] | None = None
    import_seconds: dict[str, float] = {}
    test_dist: SmokeTest | None = None
    certify: CertifyOutcome | None = None

    @property
    def settings(self) -> Settings:
        """Members of `config` that other commands read; all None without `config`."""
        return as_record(Settings, self.config or {}, "run.json", "config")

    @property
    def model_settings(self) -> ModelSettings:
        """Members of `model` that other commands read; all None without `model`."""
        return as_record(ModelSettings, self.model or {}, "run.json", "model")

    @property
    def world_size(self) -> int | None:
        """Number of ranks."""
        return (self.environment or Environment()).world_size or (self.launch or Launch()).world_size


_OTHER = "use another run directory, or remove the file"


def read_record(run_dir: RunDir) -> RunRecord:
    """Return the current content of run.json, with all members missing if it does not exist.

    Raises:
        UserError: the file cannot be read, or is not a run record.
    """
    return _as_record(_read(run_dir), run_dir)


def read_own_record(run_dir: RunDir) -> RunRecord | None:
    """Return a run's record, or None if it is missing or another user may have written it.

    Raises:
        UserError: the file cannot be read, or is not a run record.
    """
    try:
        content = read_own(run_dir.record)
    except untrusted_input.NoFile:
        return None
    if content is None:
        return None
    return _as_record(_as_object(untrusted_input.parse_json(content, str(run_dir.record)), run_dir), run_dir)


def update_record(run_dir: RunDir, **members: Any) -> None:
    """Set members of `RunRecord` in run.json; those that another version wrote are kept. Secrets are redacted.

    Locks the run directory: launch writes before the ranks start and after they end, rank 0 in between, and submit
    may still be writing when its job starts.
    """
    if unknown := members.keys() - RunRecord.__struct_fields__:
        raise TypeError(f"run.json has no member {', '.join(sorted(unknown))}")
    with locked(run_dir.path, LOCK_WITHIN_S):
        content = {**_read(run_dir), **without_secrets(as_plain(members), os.environ)}
        _as_record(content, run_dir)
        write_json(run_dir.record, content)


def _read(run_dir: RunDir) -> dict[str, Any]:
    try:
        return _as_object(untrusted_input.read_json(run_dir.record), run_dir)
    except untrusted_input.NoFile:
        return {}
    except UserError as error:
        raise UserError(error.found, where=error.where, instead=_OTHER) from error


def _as_object(stored: Any, run_dir: RunDir) -> dict[str, Any]:
    if not isinstance(stored, dict):
        raise UserError("run.json is not a run record", where=str(run_dir.record), instead=_OTHER)
    return stored


def _as_record(stored: dict[str, Any], run_dir: RunDir) -> RunRecord:
    where = str(run_dir.record)
    try:
        record = as_record(RunRecord, stored, where)
        as_record(Settings, record.config or {}, where, "config")
        as_record(ModelSettings, record.model or {}, where, "model")
    except UserError as error:
        raise UserError(error.found, where=where,
                        instead="use the version of ezpz_llm that recorded the run, or train its"
                        " weights further: --init-from CHECKPOINT") from error
    return record
