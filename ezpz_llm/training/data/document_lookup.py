"""Find the documents that a step of a run read, from the run's records and the token shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET, Struct

from ezpz_llm.core.base import UserError
from ezpz_llm.core.base.records import Step, Whole, as_record
from ezpz_llm.core.rundir import RunDir, read_json, read_lines
from ezpz_llm.core.rundir.records import Data, RunRecord, read_record
from ezpz_llm.training.data.manifest import TRAIN
from ezpz_llm.training.data.megatron import read_index
from ezpz_llm.training.data.samples import as_mixture, stream_offsets
from ezpz_llm.training.data.shards import TokenData, TokenStream

_AT_ONCE = 1 << 22  # tokens
_TOKENS_OF_TEXT, _MAX_TEXT = 48, 60


@dataclass(frozen=True)
class Extract:
    """Part of a sample that comes from one document and one file.

    Attributes:
        sample: index of the sample in the run.
        corpus: the corpus as given to `prepare`.
        file: a shard of the training split.
        document: index of the document in that split, from 0.
        first, stop: the part is tokens [first, stop) of the file.
        text: first words of the document.
    """

    sample: int
    corpus: str
    file: str
    document: int
    first: int
    stop: int
    text: str


@dataclass(frozen=True)
class StepRead:
    """Samples [first, stop) of a step, and the parts of documents in them."""

    step: int
    first: int
    stop: int
    extracts: list[Extract]


def step_read(folder: Path, step: int) -> StepRead:
    """Return the samples and documents that a step of the run in `folder` read.

    Raises:
        UserError: `folder` is not a run of the trainer, the run has not reached the step, or its data is missing
            or has changed.
    """
    run_dir = RunDir(folder)
    run_dir.check_exists()
    record = read_record(run_dir)
    recorded, settings, block_size = record.data or Data(), record.settings, record.model_settings.block_size
    if recorded.folder is None or settings.seed is None or block_size is None:
        raise UserError("this run did not record its data", where=str(run_dir.record),
                        instead="pass the directory of a run of python3 -m ezpz_llm.train that reached its first "
                                "step")
    first, stop = _samples_of(run_dir, record, step, block_size)
    data = TokenData.open(Path(recorded.folder))
    if data.fingerprint != recorded.fingerprint:
        raise UserError("the tokens in this folder have changed since the run read them", where=recorded.folder,
                        instead=f"restore the original corpus: {settings.corpus}")
    return StepRead(step, first, stop, find_extracts(data, block_size, settings.seed, range(first, stop)))


def _samples_of(run_dir: RunDir, record: RunRecord, step: int, block_size: int) -> tuple[int, int]:
    """Return the samples [first, stop) of a step.

    Adds up the batch sizes in metrics.jsonl, since the batch size may change on resume.

    Raises:
        UserError: metrics.jsonl has no line for the step, or its first sample cannot be determined.
    """
    spans: dict[int, tuple[int, int]] = {}
    skipped, number, end = _skipped(record), 0, 0
    where = str(run_dir.metrics)
    for line in read_lines(run_dir.metrics):
        if spans and line["step"] != number + 1:
            raise UserError(f"there are no lines for steps {number + 1} to {line['step'] - 1}", where=where,
                            instead="use a run with a complete metrics.jsonl, which is needed to count the samples")
        number = line["step"]
        first = end + skipped.get(number - 1, 0)
        end = first + _samples(line, block_size, where)
        spans[number] = first, end
    if step not in spans:
        advice = f"pass a step from {min(spans)} to {max(spans)}" if spans else "wait for its first step"
        raise UserError(f"this run has no step {step}", where=where, instead=advice)
    first, end = spans[step]
    if record.settings.overfit_one_batch:
        return 0, end - first
    base = 0 if 1 in spans else None
    for number, consumed in _recorded_positions(run_dir, record):
        if number not in spans:
            continue
        total = spans[number][1]
        if base is not None and base + total != consumed:
            raise UserError(f"after step {number}, metrics.jsonl counts {base + total:,} samples, but the run "
                            f"recorded {consumed:,}: the block size changed during the run", where=where,
                            instead="use a run with a constant block size")
        base = consumed - total
    if base is None:
        raise UserError("this run continues another run and has not recorded its data position yet", where=where,
                        instead=f"wait until it ends or saves a checkpoint; its first step is {min(spans)}")
    return base + first, base + end


def _samples(line: dict[str, Any], block_size: int, where: str) -> int:
    """Return the number of samples in a step, from its throughput and time."""
    try:
        return round(line["tokens_per_second"] * line["step_time_s"] / block_size)
    except (KeyError, TypeError) as error:
        raise UserError(f"the line of step {line['step']} lacks tokens_per_second or step_time_s", where=where,
                        instead="use a run of python3 -m ezpz_llm.train, which writes both") from error


def _skipped(record: RunRecord) -> dict[int, int]:
    """Return the number of samples that rollbacks skipped, by the step that each rolled back to."""
    skipped: dict[int, int] = {}
    for rollback in record.rollbacks:
        # Drop earlier skips at or after `to_step`: this rollback's samples_passed_over includes them, or the
        # rollback undid them.
        skipped = {step: samples for step, samples in skipped.items() if step < rollback.to_step}
        skipped[rollback.to_step] = rollback.samples_passed_over
    return skipped


class _Position(Struct, frozen=True):
    """Members of a checkpoint's state.json."""

    step: Step
    consumed: Whole


def _recorded_positions(run_dir: RunDir, record: RunRecord) -> Iterator[tuple[int, int]]:
    """Yield pairs of a step and the total samples read by its end, from run.json and the checkpoints."""
    if record.samples_consumed is not None and record.steps is not None:
        yield record.steps, record.samples_consumed
    for path in sorted(run_dir.checkpoints.glob("step-*/state.json")):
        position = as_record(_Position, read_json(path), str(path))
        yield position.step, position.consumed


def find_extracts(data: TokenData, block_size: int, seed: int, samples: Sequence[int]) -> list[Extract]:
    """Return the parts of documents in the given samples, ordered by sample."""
    stream_indices, starts = stream_offsets(as_mixture(data.split(TRAIN)), block_size, seed, np.asarray(samples))
    result: list[Extract] = []
    for part, single in enumerate([folder for folder, _ in data.parts] or [data]):
        rows = np.flatnonzero(stream_indices == part)
        if rows.size:
            documents = _SplitDocuments(single, int(starts[rows].max()) + block_size + 1)
            result += [extract for row in rows.tolist() for extract in documents.within(
                samples[row], int(starts[row]), int(starts[row]) + block_size + 1)]
    return sorted(result, key=lambda extract: extract.sample)


class _SplitDocuments:
    """Documents of a folder's training split, up to token `stop`."""

    def __init__(self, data: TokenData, stop: int) -> None:
        stream = data.split(TRAIN)
        assert isinstance(stream, TokenStream)
        self._data, self._stream = data, stream
        # The text of the last document may extend beyond `stop`.
        self._document_starts = _document_starts(data, stream, min(stop + _TOKENS_OF_TEXT, len(stream)))
        shards = data.manifest.splits.train.shards
        self._files = [str(data.folder / shard.file) for shard in shards]
        self._file_starts = np.cumsum([0, *(shard.tokens for shard in shards)])

    def within(self, sample: int, start: int, stop: int) -> Iterator[Extract]:
        """Yield tokens [start, stop) of the split, in parts of one document and one file each."""
        while start < stop:
            document = int(np.searchsorted(self._document_starts, start, side="right")) - 1
            file = int(np.searchsorted(self._file_starts, start, side="right")) - 1
            begin = int(self._file_starts[file])
            end = min(stop, self._end(document), int(self._file_starts[file + 1]))
            yield Extract(sample, self._data.manifest.source.corpus, self._files[file], document,
                          start - begin, end - begin, self._text(document))
            start = end

    def _end(self, document: int) -> int:
        following = self._document_starts[document + 1:document + 2]
        return int(following[0]) if following.size else len(self._stream)

    def _text(self, document: int) -> str:
        """Return the first words of a document."""
        start = int(self._document_starts[document])
        tokens = self._stream[start:min(start + _TOKENS_OF_TEXT, self._end(document))]
        tokens = tokens[tokens != self._data.manifest.end_of_text]
        return " ".join(self._data.tokenizer.decode(tokens.astype(np.int64)).split())[:_MAX_TEXT]


def _document_starts(data: TokenData, stream: TokenStream, stop: int) -> np.ndarray:
    """Return an increasing int64 array of training documents' starts, at least up to token `stop`.

    Uses Megatron's index, or else end-of-text tokens, which precede each document (in nanoGPT's shards, they
    follow each document). Tokens before the first end-of-text token, which continue a validation document, count as
    one document. If the tokenizer has no end-of-text token, the split is one document.
    """
    if data.manifest.document_index is not UNSET:
        tokens = Path(data.manifest.splits.train.shards[0].file)
        return read_index(tokens, Path(data.manifest.document_index)).starts
    end = data.manifest.end_of_text
    if end is None:
        return np.zeros(1, np.int64)
    starts = np.concatenate([first + np.flatnonzero(stream[first:min(first + _AT_ONCE, stop)] == end)
                             for first in range(0, stop, _AT_ONCE)])
    if data.manifest.written_by == "nanoGPT":
        starts += 1
    return starts if starts.size and starts[0] == 0 else np.concatenate([np.zeros(1, np.int64), starts])


def describe_read(read: StepRead) -> str:
    """Return a table with a line per extract, grouped by corpus."""
    lines = [f"step {read.step}: samples {read.first:,} to {read.stop - 1:,}"]
    for corpus in dict.fromkeys(extract.corpus for extract in read.extracts):
        lines += ["", f"corpus {corpus}",
                  f"{'sample':>12} {'document':>12} {'tokens of the file':>27}  file and first words"]
        lines += [f"{extract.sample:>12,} {extract.document:>12,} "
                  f"{f'{extract.first:,} to {extract.stop - 1:,}':>27}  {Path(extract.file).name}  {extract.text}"
                  for extract in read.extracts if extract.corpus == corpus]
    return "\n".join(lines)
