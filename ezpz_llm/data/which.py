"""Documents that a step of a run read: from the run's own records to places in files of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.base import UserError
from ezpz_llm.data.manifest import TRAIN
from ezpz_llm.data.megatron import read_index
from ezpz_llm.data.samples import as_mixture, places
from ezpz_llm.data.shards import TokenData, TokenStream
from ezpz_llm.rundir import RunDir, read_json, read_lines, read_record

_AT_ONCE = 1 << 22  # tokens
_TOKENS_OF_TEXT, _MOST_TEXT = 48, 60


@dataclass(frozen=True)
class Extract:
    """What a sample has of one document, within one file.

    Attributes:
        sample: its number in the run.
        corpus: what was prepared.
        file: a shard of the training split.
        document: its number in that split, from 0.
        first, stop: tokens [first, stop) of the file's.
        text: the first words of the document.
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
    """The samples [first, stop) of a step, and what they have of documents."""

    step: int
    first: int
    stop: int
    extracts: list[Extract]


def step_read(folder: Path, step: int) -> StepRead:
    """What a step of the run in `folder` read.

    Raises:
        UserError: no run of the trainer, a step that it has not reached, or data that is gone or has changed.
    """
    run_dir = RunDir(folder)
    run_dir.check_there()
    record = read_record(run_dir)
    known = record.get("data", {})
    config, model = record.get("config", {}), record.get("model", {})
    try:
        shards, fingerprint = Path(known["folder"]), known["fingerprint"]
        seed, block_size = int(config["seed"]), int(model["block_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError("this run did not record its data", where=str(run_dir.record),
                        instead="the directory of a run of python3 -m ezpz_llm.train that began its first step",
                        ) from error
    first, stop = samples_of(run_dir, record, step, block_size)
    data = TokenData.open(shards)
    if data.fingerprint != fingerprint:
        raise UserError("the tokens in the run's folder of shards are others than those that it read",
                        where=str(shards), instead=f"its corpus, {config.get('corpus')}, as it was")
    return StepRead(step, first, stop, extracts(data, block_size, seed, range(first, stop)))


def samples_of(run_dir: RunDir, record: dict[str, Any], step: int, block_size: int) -> tuple[int, int]:
    """The samples [first, stop) of a step, by the lines of metrics.jsonl: a resumed run may have another batch.

    Raises:
        UserError: the step has no line, or where it began is not known.
    """
    spans: dict[int, tuple[int, int]] = {}
    skipped, number, end = _skipped(record), 0, 0
    where = str(run_dir.metrics)
    for line in read_lines(run_dir.metrics):
        if spans and line["step"] != number + 1:
            raise UserError(f"steps {number + 1} to {line['step'] - 1} have no line", where=where,
                            instead="a run whose metrics.jsonl is whole: each step's samples follow the last one's")
        number = line["step"]
        first = end + skipped.get(number - 1, 0)
        end = first + _samples(line, block_size, where)
        spans[number] = first, end
    if step not in spans:
        has = f"steps {min(spans)} to {max(spans)}" if spans else "no step yet"
        raise UserError(f"this run has no step {step}", where=where, instead=f"one that it has made: it has {has}")
    first, end = spans[step]
    if record["config"].get("overfit_one_batch"):
        return 0, end - first
    base = 0 if 1 in spans else None
    for number, consumed in _known(run_dir, record):
        if number not in spans:
            continue
        read = spans[number][1]
        if base is not None and base + read != consumed:
            raise UserError(f"after step {number} this run had read {base + read:,} samples by its lines, and "
                            f"{consumed:,} by its record: the block size was another for a while", where=where,
                            instead="a run that kept its block size")
        base = consumed - read
    if base is None:
        raise UserError("this run went on from another, and has not yet recorded how many samples that had read",
                        where=where, instead=f"wait for its end or a checkpoint; it began with step {min(spans)}")
    return base + first, base + end


def _samples(line: dict[str, Any], block_size: int, where: str) -> int:
    """The samples of a line's step, whose tokens are a rate by a time."""
    try:
        return round(line["tokens_per_second"] * line["step_time_s"] / block_size)
    except (KeyError, TypeError) as error:
        raise UserError(f"the line of step {line['step']} has no tokens_per_second and step_time_s", where=where,
                        instead="a run of python3 -m ezpz_llm.train, whose lines have them") from error


def _skipped(record: dict[str, Any]) -> dict[int, int]:
    """How many samples a run left out after which step, when it went back to a checkpoint."""
    skipped: dict[int, int] = {}
    for rollback in record.get("rollbacks", []):
        # What it had left out before, after that step, is counted again or was undone.
        skipped = {step: samples for step, samples in skipped.items() if step < rollback["to_step"]}
        skipped[rollback["to_step"]] = rollback["samples_passed_over"]
    return skipped


def _known(run_dir: RunDir, record: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Steps of which the run recorded how many samples had been read after them."""
    if "samples_consumed" in record:
        yield record["steps"], record["samples_consumed"]
    for path in sorted(run_dir.checkpoints.glob("step-*/state.json")):
        state = read_json(path)
        yield state["step"], state["consumed"]


# From samples to documents.
def extracts(data: TokenData, block_size: int, seed: int, samples: Sequence[int]) -> list[Extract]:
    """What samples of a run have of documents, in the samples' order."""
    which, starts = places(as_mixture(data.split(TRAIN)), block_size, seed, np.asarray(samples))
    found: list[Extract] = []
    for part, single in enumerate([one for one, _ in data.parts] or [data]):
        rows = np.flatnonzero(which == part)
        if rows.size:
            documents = Documents(single, int(starts[rows].max()) + block_size + 1)
            found += [extract for row in rows.tolist() for extract in documents.within(
                samples[row], int(starts[row]), int(starts[row]) + block_size + 1)]
    return sorted(found, key=lambda extract: extract.sample)


class Documents:
    """The documents of a folder's training split, as far as its token `stop`."""

    def __init__(self, data: TokenData, stop: int) -> None:
        stream = data.split(TRAIN)
        assert isinstance(stream, TokenStream)
        self._data, self._stream = data, stream
        # With the text of the last one, which may end in it.
        self._starts = first_tokens(data, stream, min(stop + _TOKENS_OF_TEXT, len(stream)))
        shards = data.manifest["splits"][TRAIN]["shards"]
        self._files = [str(data.folder / shard["file"]) for shard in shards]
        self._begins = np.cumsum([0, *(shard["tokens"] for shard in shards)])

    def within(self, sample: int, start: int, stop: int) -> Iterator[Extract]:
        """Tokens [start, stop) of the split, in parts that each lie in one document and one file."""
        while start < stop:
            document = int(np.searchsorted(self._starts, start, side="right")) - 1
            file = int(np.searchsorted(self._begins, start, side="right")) - 1
            begin, end = int(self._begins[file]), min(stop, self._end(document), int(self._begins[file + 1]))
            yield Extract(sample, self._data.manifest["source"]["corpus"], self._files[file], document,
                          start - begin, end - begin, self._text(document))
            start = end

    def _end(self, document: int) -> int:
        following = self._starts[document + 1:document + 2]
        return int(following[0]) if following.size else len(self._stream)

    def _text(self, document: int) -> str:
        """The first words of a document."""
        start = int(self._starts[document])
        tokens = self._stream[start:min(start + _TOKENS_OF_TEXT, self._end(document))]
        tokens = tokens[tokens != self._data.manifest["end_of_text"]]
        return " ".join(self._data.tokenizer.decode(tokens.astype(np.int64)).split())[:_MOST_TEXT]


def first_tokens(data: TokenData, stream: TokenStream, stop: int) -> np.ndarray:
    """Where the training split's documents begin, as far as its token `stop`, int64, rising.

    By Megatron's index, else by end-of-text tokens, which stand before a document, and after it in nanoGPT's
    shards. Tokens before the first one are the end of a document that validation has, and count as one; where no
    token ends a text, all are one.
    """
    if "document_index" in data.manifest:
        tokens = Path(data.manifest["splits"][TRAIN]["shards"][0]["file"])
        return read_index(tokens, Path(data.manifest["document_index"])).starts
    end = data.manifest["end_of_text"]
    if end is None:
        return np.zeros(1, np.int64)
    found = np.concatenate([first + np.flatnonzero(stream[first:min(first + _AT_ONCE, stop)] == end)
                            for first in range(0, stop, _AT_ONCE)])
    if data.manifest.get("written_by") == "nanoGPT":
        found += 1
    return found if found.size and found[0] == 0 else np.concatenate([np.zeros(1, np.int64), found])


def described(read: StepRead) -> str:
    """A line for each extract, under the name of its corpus."""
    lines = [f"step {read.step}: samples {read.first:,} to {read.stop - 1:,}"]
    for corpus in dict.fromkeys(extract.corpus for extract in read.extracts):
        lines += ["", f"corpus {corpus}",
                  f"{'sample':>12} {'document':>12} {'tokens of the file':>27}  file and first words"]
        lines += [f"{one.sample:>12,} {one.document:>12,} {f'{one.first:,} to {one.stop - 1:,}':>27}  "
                  f"{Path(one.file).name}  {one.text}" for one in read.extracts if one.corpus == corpus]
    return "\n".join(lines)
