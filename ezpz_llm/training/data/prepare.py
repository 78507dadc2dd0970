"""Convert a corpus to a folder of token shards once; later calls and other processes reuse the folder."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.core.base import UserError, require_package
from ezpz_llm.training.data.atomic_dir import build_folder
from ezpz_llm.training.data.corpora import Options, Request, cached_folder, make_request, prepared_folder
from ezpz_llm.training.data.document_separator import SeparatorAdvice, check_separator, document_separator
from ezpz_llm.training.data.downloads import print_to_stderr, writing
from ezpz_llm.training.data.external_shards import ExternalShards, check_shards, find_external_shards, index_shards
from ezpz_llm.training.data.formats import TEXT, find_format
from ezpz_llm.training.data.hub import LIBRARY
from ezpz_llm.training.data.manifest import (
    COUNTS,
    FORMAT,
    MANIFEST,
    SHARD_TOKENS,
    TRAIN,
    VAL,
    Manifest,
    Part,
    Source,
    Split,
    Splits,
    read_manifest,
)
from ezpz_llm.training.data.megatron import MegatronData, check_megatron, find_megatron, index_megatron
from ezpz_llm.training.data.mixture import find_mixture
from ezpz_llm.training.data.reader import check_documents
from ezpz_llm.training.data.samples import ValidationWindows, as_mixture, windows_per_epoch
from ezpz_llm.training.data.shards import BLOCK, TokenData, open_npy, samples_per_block
from ezpz_llm.training.data.tokenize_corpus import entropy, write_dataset
from ezpz_llm.training.data.tokenizer_files import copy_files, find_copy
from ezpz_llm.training.data.tokenizers import (
    GPT2_VOCAB,
    Choice,
    check_entry,
    check_files,
    choose_tokenizer,
    describe,
)

# Below this size, one more process costs more to start than it saves.
_BYTES_PER_WORKER = 16 << 20
_MAX_WORKERS = 64
_FILES_CHECKED, _DOCUMENTS_CHECKED = 200, 20
"""Number of files whose format, and whose first documents, --check reads: about a second on any file system."""


def prepare(corpus: str, tokenizer: str | None = None, *, out: Path | None = None,
            val_fraction: float | None = None, val_tokens: int | None = None, shard_tokens: int = SHARD_TOKENS,
            workers: int | None = None, download: bool = False, progress: bool = True, text_key: str = TEXT,
            max_broken: int = 0, special_tokens: bool = False) -> Path:
    """Return the folder of shards of `corpus`; create it if missing. Safe with concurrent processes.

    Args:
        corpus: "stdlib", "shakespeare", "fineweb-edu" or another data set (see `ezpz_llm.training.data.hub`); a
            path of a text, JSON lines, JSON array or parquet file, or of a folder of such files; a path of a
            prepared folder or of another program's shards, which are used in place; or several of these with
            weights, as A=0.7,B=0.3.
        tokenizer: "bytes", "char", "gpt2", or a tokenizer's file or folder (`ezpz_llm.training.data.tokenizers`);
            default: "char" for shakespeare, "gpt2" for data sets, else "bytes".
        out: output folder; default: a folder in the cache.
        val_fraction: fraction of the tokens to validate on, from the end of the stream; default: 0.1 for one file,
            0.02 for several.
        val_tokens: number of tokens to validate on, from the start of the stream; default for data sets:
            100 million, one shard.
        shard_tokens: tokens per shard file.
        workers: number of processes; default: one per 16 MB, at most one per available core.
        download: allow downloading a data set.
        progress: show progress on stderr.
        text_key: key of the text in a JSON object, or name of the text column.
        max_broken: maximum number of unreadable documents to skip; the manifest records them.
        special_tokens: encode special tokens in the text, such as <|im_start|>, as tokens, not as ordinary text.

    Raises:
        UserError: there is nothing to read, the text is unreadable, the tokenizer is missing, or the disk is full.
    """
    options = Options(tokenizer, val_fraction, val_tokens, shard_tokens, out, text_key, max_broken, special_tokens)
    if workers is not None and workers < 1:
        raise UserError(f"the number of workers is {workers}", where="--workers", instead="pass 1 or more")
    if parts := find_mixture(corpus):
        _check_default_options(corpus, replace(options, text_key=TEXT, max_broken=0, special_tokens=False))
        reading: dict[str, Any] = {"text_key": text_key, "max_broken": max_broken, "special_tokens": special_tokens}
        prepared = [(prepare(part, tokenizer, workers=workers, download=download, progress=progress,
                             **({} if _is_prepared(part) else reading)), weight) for part, weight in parts]
        mixture, fingerprint = _mixture_folder(prepared)
        return _ensure(mixture, fingerprint, progress,
                       lambda hidden: _write_mixture(corpus, prepared, fingerprint, hidden))
    folder = _single_folder(corpus, options, check=False, workers=workers, download=download, show=progress)
    assert folder is not None
    return folder


def check_corpus(corpus: str, tokenizer: str | None = None, block_size: int | None = None,
                 text_key: str = TEXT, max_broken: int = 0, *, decodes: bool = False,
                 separates: SeparatorAdvice | None = None) -> TokenData | None:
    """Check the inputs of `prepare` without preparing anything.

    Returns the tokens; None for a mixture of several corpora, or if they are not prepared yet.

    Args:
        block_size: also check that existing shards have enough tokens for windows of this length.
        decodes: also check the tokenizer's file, even if the tokens exist.
        separates: also check that an end-of-text token separates documents, except in shards of other programs that
            have no manifest yet. The error gives this advice.

    Raises:
        UserError: `prepare` would fail for a reason that can be found without reading the whole text, a shard is
            truncated, there are too few tokens, or documents are not separated.
    """
    parts = find_mixture(corpus) or [(corpus, 1.0)]
    if decodes and tokenizer == "gpt2":
        GPT2_VOCAB.find()
    options = Options(tokenizer, text_key=text_key, max_broken=max_broken)
    folders = [_single_folder(part, Options(tokenizer) if len(parts) > 1 and _is_prepared(part) else options)
               for part, _ in parts]
    opened = [TokenData.open(folder) for folder in folders if folder]
    if len(opened) > 1:
        _check_same_tokenizer(opened)
    for (part, _), folder in zip(parts, folders, strict=True):
        if separates and folder is None and not _is_prepared(part):
            check_separator(part, tokenizer, separates)
    for data in opened:
        if separates:
            document_separator(data, separates)
        if decodes:
            check_files(data.manifest.tokenizer, data.folder)
        if block_size is not None:
            for stream in as_mixture(data.split(TRAIN)).streams:
                windows_per_epoch(len(stream), block_size)
            ValidationWindows(data.split(VAL), block_size)
    return opened[0] if opened and len(parts) == 1 else None


def find_prepared(corpus: str, tokenizer: str | None = None, text_key: str = TEXT) -> Path | None:
    """Return the folder of shards of `corpus` if it is prepared.

    Returns None for a mixture, unless `corpus` is the folder of a mixture.

    Raises:
        UserError: for the reasons given in `check_corpus`.
    """
    return None if find_mixture(corpus) else _single_folder(corpus, Options(tokenizer, text_key=text_key))


def _is_prepared(corpus: str) -> bool:
    return (prepared_folder(corpus) is not None or find_external_shards(corpus, None) is not None
            or find_megatron(corpus, None) is not None)


def _single_folder(corpus: str, options: Options, *, check: bool = True, workers: int | None = None,
                   download: bool = False, show: bool = False) -> Path | None:
    """Return the folder of a single corpus; with `check`, None if `prepare` would have to create it."""
    choice = None if options.tokenizer is None else choose_tokenizer(options.tokenizer)
    folder = prepared_folder(corpus)
    shards = None if folder else find_external_shards(corpus, choice) or find_megatron(corpus, choice)
    if folder or shards:
        _check_default_options(corpus, options)
    if shards:
        if check and not _is_finished(shards.index, shards.fingerprint):
            _check_shards(shards)
            return None
        folder = _ensure(shards.index, shards.fingerprint, show, lambda hidden: _index(shards, hidden, show))
    if folder:
        return _check_tokenizer(folder, choice)
    request = _reuse_plain_char(make_request(corpus, options))
    if not _check_ready(request, download, _FILES_CHECKED if check else None):
        if check:
            _check_writable(request.folder)
            if not options.max_broken:
                check_documents(request.corpus, options.text_key, _DOCUMENTS_CHECKED)
            return None
        _ensure(request.folder, request.fingerprint, show,
                lambda hidden: write_dataset(request, hidden, workers or _default_workers(request), show))
    return request.folder


def _index(shards: ExternalShards | MegatronData, hidden: Path, show: bool) -> None:
    if isinstance(shards, MegatronData):
        index_megatron(shards, hidden, show)
    else:
        index_shards(shards, hidden, show)


def _check_shards(shards: ExternalShards | MegatronData) -> None:
    if isinstance(shards, MegatronData):
        check_megatron(shards)
    else:
        check_shards(shards)


def _check_writable(folder: Path) -> None:
    """Check before any rank starts that `folder` can be created."""
    parent = next(parent for parent in folder.parents if os.path.exists(parent))
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise UserError(f"cannot create {folder} for the prepared corpus: {parent} is "
                        f"{'not writable' if parent.is_dir() else 'not a folder'}", where="the cache",
                        instead="set EZPZ_LLM_CACHE=DIR to a writable folder that all nodes share")


def _ensure(folder: Path, fingerprint: str, show: bool, create_in: Callable[[Path], None]) -> Path:
    """Return `folder` once it is complete; if necessary, `create_in` creates its content in a hidden folder."""
    def on_wait() -> None:
        if show:
            print_to_stderr(f"waiting for another process that is preparing {folder}")

    if not _is_finished(folder, fingerprint):
        with writing(folder), build_folder(folder, lambda: _is_finished(folder, fingerprint), on_wait) as hidden:
            if hidden is not None:
                create_in(hidden)
    return folder


def _check_default_options(corpus: str, options: Options) -> None:
    if options != Options(options.tokenizer):
        raise UserError("this corpus is a mixture or already prepared; its folder and splits cannot be changed",
                        where=corpus, instead="omit --out, --val-fraction, --val-tokens, --shard-tokens, "
                                              "--text-key, --max-broken and --special-tokens")


def _check_tokenizer(folder: Path, choice: Choice | None) -> Path:
    """Check that the requested tokenizer made the tokens in `folder`, and return `folder`."""
    entry = read_manifest(folder).tokenizer
    check_entry(entry, str(folder / MANIFEST))
    if choice is not None and not choice.fits(entry):
        name = entry.name if choice.name != entry.name else describe(entry)
        raise UserError(f"this folder was prepared with the tokenizer {name}, not {choice.describe()}",
                        where=str(folder),
                        instead=f"omit --tokenizer, or prepare the text with --tokenizer {choice.words}")
    return folder


def _reuse_plain_char(request: Request) -> Request:
    """Return the request, or the same for "char" without a table if its shards exist and have the given table."""
    if request.tokenizer.name != "char" or request.tokenizer.entry is None or request.options.out is not None:
        return request
    plain = replace(request, tokenizer=choose_tokenizer(request.tokenizer.name))
    same = (_is_finished(plain.folder, plain.fingerprint)
            and request.tokenizer.fits(read_manifest(plain.folder).tokenizer))
    return plain if same else request


def _is_finished(folder: Path, fingerprint: str) -> bool:
    """Return True if the folder is complete; raise UserError if it contains other files or shards."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    state = "this folder contains other files"
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if manifest.request == fingerprint:
            check_entry(manifest.tokenizer, str(folder / MANIFEST))
            return True
        state = ("this folder contains other shards: the corpus, tokenizer or split differs, or the corpus files "
                 "have changed")
    raise UserError(state, where=str(folder), instead="pass another folder with --out, or remove this one first")


def _check_ready(request: Request, download: bool, max_files: int | None) -> bool:
    """Return True if the folder is complete; otherwise check the inputs and return False.

    Args:
        max_files: number of files whose format is checked; None for all.
    """
    if _is_finished(request.folder, request.fingerprint):
        return True
    if request.tokenizer.name == "gpt2" and request.tokenizer.file is None:
        GPT2_VOCAB.find()
    for file in () if request.corpus.plain else request.corpus.files[:max_files]:
        find_format(file.path)
    if request.corpus.dataset is not None:
        require_package(*LIBRARY)
        if request.corpus.is_remote and not download:
            raise UserError(f"{request.corpus.words} is not prepared on this machine", where=str(request.folder),
                            instead=f"prepare it once on a machine with internet access: {request.command}")
    return False


def _default_workers(request: Request) -> int:
    cores = min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
    if request.corpus.dataset is not None:
        return cores
    return max(1, min(cores, request.corpus.size // _BYTES_PER_WORKER))


def _mixture_folder(parts: Sequence[tuple[Path, float]]) -> tuple[Path, str]:
    """Return the folder in the cache for a mixture of prepared folders, and its fingerprint."""
    values = [[str(folder), TokenData.open(folder).fingerprint, weight] for folder, weight in parts]
    fingerprint = hashlib.sha256(json.dumps([FORMAT, "mixture", values]).encode()).hexdigest()
    return cached_folder("mixture", fingerprint), fingerprint


def _write_mixture(words: str, parts: Sequence[tuple[Path, float]], fingerprint: str, folder: Path) -> None:
    """Write the manifest of a mixture to `folder`.

    Raises:
        UserError: the parts have different tokenizers.
    """
    opened = [TokenData.open(part) for part, _ in parts]
    _check_same_tokenizer(opened)
    weights = [weight for _, weight in parts]
    counts_per_block = samples_per_block([str(part) for part, _ in parts], weights)
    histogram = np.zeros(opened[0].vocab_size)
    for data, count in zip(opened, counts_per_block, strict=True):
        if not (data.folder / COUNTS).is_file():
            raise UserError(f"this folder has no {COUNTS}", where=str(data.folder),
                            instead="remove it and prepare it again")
        again = "remove the folder and prepare it again"
        counts = open_npy(data.folder / COUNTS, "array of counts", again)
        if counts.dtype != np.int64 or counts.shape != histogram.shape:
            raise UserError(f"these counts are {counts.dtype} {counts.shape}; expected int64 {histogram.shape}",
                            where=str(data.folder / COUNTS), instead=again)
        histogram += counts / counts.sum() * count / BLOCK
    manifests = [data.manifest for data in opened]
    first = manifests[0]
    if first.tokenizer.kind is not None:
        copy_files(find_copy(opened[0].folder, first.tokenizer), folder)
    Manifest(
        request=fingerprint,
        command=shlex.join(["python3", "-m", "ezpz_llm.data", "prepare", words]),
        source=Source(words, sum(manifest.source.files for manifest in manifests),
                      sum(manifest.source.bytes for manifest in manifests)),
        parts=[Part(str(part), weight) for part, weight in parts],
        tokenizer=first.tokenizer,
        vocab_size=first.vocab_size,
        end_of_text=first.end_of_text,
        dtype=first.dtype,
        documents=sum(manifest.documents for manifest in manifests),
        tokens=sum(manifest.tokens for manifest in manifests),
        unigram_entropy=entropy(histogram),
        splits=Splits(Split(sum(manifest.splits.train.tokens for manifest in manifests), []),
                      Split(sum(manifest.splits.val.tokens for manifest in manifests), [])),
    ).write(folder)


def _check_same_tokenizer(parts: Sequence[TokenData]) -> None:
    """Check that the parts can be mixed.

    Raises:
        UserError: the parts have different tokenizers, or one of them is a mixture.
    """
    first = parts[0]
    for data in parts:
        if data.parts:
            raise UserError("a mixture cannot be part of another mixture", where=str(data.folder),
                            instead="pass its parts, each with a weight")
        if not data.manifest.tokenizer.has_same_ids(first.manifest.tokenizer):
            names = [part.manifest.tokenizer.name for part in (first, data)]
            both = f"{names[0]} and {names[1]}" if names[0] != names[1] else f"two different {names[0]} tables"
            raise UserError(f"the parts of a mixture must have the same tokenizer; these have {both}",
                            where=f"{first.folder} and {data.folder}",
                            instead="prepare them with the same tokenizer: --tokenizer bytes, or gpt2")
