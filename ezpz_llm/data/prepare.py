"""From a corpus to a folder of token shards, once: later calls, and other processes, use the same folder."""

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

from ezpz_llm.base import UserError, require_package
from ezpz_llm.data.atomic_dir import building
from ezpz_llm.data.corpora import Options, Request, cached_folder, make_request, prepared_folder
from ezpz_llm.data.downloads import say, writing
from ezpz_llm.data.foreign import ForeignShards, check_shards, find_foreign, index_shards
from ezpz_llm.data.formats import TEXT, find_format
from ezpz_llm.data.hub import LIBRARY
from ezpz_llm.data.manifest import COUNTS, FORMAT, MANIFEST, SHARD_TOKENS, TRAIN, VAL, read_manifest
from ezpz_llm.data.megatron import MegatronData, check_megatron, find_megatron, index_megatron
from ezpz_llm.data.mixture import find_mixture
from ezpz_llm.data.reader import check_documents
from ezpz_llm.data.samples import ValidationWindows, as_mixture, windows_per_epoch
from ezpz_llm.data.shards import BLOCK, TokenData, open_npy, shares
from ezpz_llm.data.tokenize_corpus import entropy, make
from ezpz_llm.data.tokenizer_files import copy_files, find_copy
from ezpz_llm.data.tokenizers import GPT2_VOCAB, Choice, check_entry, check_files, choose, describe
from ezpz_llm.rundir import write_json

# Below this a further process costs more to start than it saves.
_BYTES_PER_WORKER = 16 << 20
_MOST_WORKERS = 64
_FILES_CHECKED, _DOCUMENTS_CHECKED = 200, 20
"""Files that a check opens, and of which it reads documents, which is to take a second on any file system."""


def prepare(corpus: str, tokenizer: str | None = None, *, out: Path | None = None,
            val_fraction: float | None = None, val_tokens: int | None = None, shard_tokens: int = SHARD_TOKENS,
            workers: int | None = None, download: bool = False, progress: bool = True, text_key: str = TEXT,
            max_broken: int = 0) -> Path:
    """The folder of shards of `corpus`, made if it is not there yet. Safe against two at once.

    Args:
        corpus: "stdlib", "shakespeare", "fineweb-edu" or another data set (see `ezpz_llm.data.hub`); the path of a
            file of text, JSON lines, a JSON array or parquet, or of a folder of such; the path of a prepared
            folder, or of another program's shards, which are used as they are; or several of these with weights, as
            A=0.7,B=0.3.
        tokenizer: "bytes", "char", "gpt2", or a file or folder that has one (see `ezpz_llm.data.tokenizers`);
            default: "char" for shakespeare, "gpt2" for data sets, else "bytes".
        out: the folder to make; default: one in the cache.
        val_fraction: the last part of the token stream to validate on; default 0.1 for one file, 0.02 for many.
        val_tokens: or so many tokens at its beginning; default for data sets: 100 million, a shard.
        shard_tokens: tokens a shard file.
        workers: processes; default: one for each 16 MB, at most the cores this process may use.
        download: whether a data set may be fetched from the network.
        progress: whether to report on stderr.
        text_key: the member of a JSON object, or the column, that has a document's text.
        max_broken: how many documents that cannot be read may be left out; each is counted.

    Raises:
        UserError: nothing to read, text that cannot be read, a tokenizer that is not there, no room.
    """
    options = Options(tokenizer, val_fraction, val_tokens, shard_tokens, out, text_key, max_broken)
    if workers is not None and workers < 1:
        raise UserError(f"{workers} workers", where="--workers", instead="give 1 or more")
    if parts := find_mixture(corpus):
        _check_no_choice(corpus, replace(options, text_key=TEXT, max_broken=0))
        reading: dict[str, Any] = {"text_key": text_key, "max_broken": max_broken}
        prepared = [(prepare(part, tokenizer, workers=workers, download=download, progress=progress,
                             **({} if _is_prepared(part) else reading)), weight) for part, weight in parts]
        mixture, fingerprint = mixture_folder(prepared)
        return _made(mixture, fingerprint, progress,
                     lambda hidden: write_mixture(corpus, prepared, fingerprint, hidden))
    folder = _single(corpus, options, check=False, workers=workers, download=download, show=progress)
    assert folder is not None
    return folder


def check_corpus(corpus: str, tokenizer: str | None = None, block_size: int | None = None,
                 text_key: str = TEXT, max_broken: int = 0, *, decodes: bool = False) -> None:
    """Check that `prepare` would find what it needs, without doing it.

    Args:
        block_size: whether shards that are there already are enough for windows of that length, too.
        decodes: whether the tokenizer's own file is needed after tokens are there, too.

    Raises:
        UserError: as `prepare`, for all that shows without reading the whole text; a truncated shard; too few
            tokens.
    """
    parts = find_mixture(corpus) or [(corpus, 1.0)]
    if decodes and tokenizer == "gpt2":
        GPT2_VOCAB.find()
    asked = Options(tokenizer, text_key=text_key, max_broken=max_broken)
    folders = [_single(part, Options(tokenizer) if len(parts) > 1 and _is_prepared(part) else asked)
               for part, _ in parts]
    opened = [TokenData.open(folder) for folder in folders if folder]
    if len(opened) > 1:
        check_same_tokenizer(opened)
    for data in opened:
        if decodes:
            check_files(data.manifest["tokenizer"], data.folder)
        if block_size is not None:
            for stream in as_mixture(data.split(TRAIN)).streams:
                windows_per_epoch(len(stream), block_size)
            ValidationWindows(data.split(VAL), block_size)


def find_prepared(corpus: str, tokenizer: str | None = None, text_key: str = TEXT) -> Path | None:
    """The folder of shards of `corpus` if it is prepared; None for a mixture, unless its folder is named.

    Raises:
        UserError: as `check_corpus`.
    """
    return None if find_mixture(corpus) else _single(corpus, Options(tokenizer, text_key=text_key))


def _is_prepared(corpus: str) -> bool:
    return (prepared_folder(corpus) is not None or find_foreign(corpus, None) is not None
            or find_megatron(corpus, None) is not None)


def _single(corpus: str, options: Options, *, check: bool = True, workers: int | None = None,
            download: bool = False, show: bool = False) -> Path | None:
    """The folder of a corpus that is not mixed; with `check` none is made, and None stands for one to be made."""
    choice = None if options.tokenizer is None else choose(options.tokenizer)
    folder = prepared_folder(corpus)
    shards = None if folder else find_foreign(corpus, choice) or find_megatron(corpus, choice)
    if folder or shards:
        _check_no_choice(corpus, options)
    if shards:
        if check and not _finished(shards.index, shards.fingerprint):
            _check_shards(shards)
            return None
        folder = _made(shards.index, shards.fingerprint, show, lambda hidden: _index(shards, hidden, show))
    if folder:
        return _of_choice(folder, choice)
    request = _known(make_request(corpus, options))
    if not _ready(request, download, _FILES_CHECKED if check else None):
        if check:
            _check_place(request.folder)
            if not options.max_broken:
                check_documents(request.corpus, options.text_key, _DOCUMENTS_CHECKED)
            return None
        _made(request.folder, request.fingerprint, show,
              lambda hidden: make(request, hidden, workers or _default_workers(request), show))
    return request.folder


def _index(shards: ForeignShards | MegatronData, hidden: Path, show: bool) -> None:
    if isinstance(shards, MegatronData):
        index_megatron(shards, hidden, show)
    else:
        index_shards(shards, hidden, show)


def _check_shards(shards: ForeignShards | MegatronData) -> None:
    if isinstance(shards, MegatronData):
        check_megatron(shards)
    else:
        check_shards(shards)


def _check_place(folder: Path) -> None:
    """Can a folder be made there? Seen before any rank starts, not after seconds of one."""
    there = next(parent for parent in folder.parents if os.path.exists(parent))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise UserError(f"the corpus is to be prepared in {folder}, which cannot be made: {there} is "
                        f"{'not writable' if there.is_dir() else 'no folder'}", where="the cache",
                        instead="EZPZ_LLM_CACHE=DIR, a folder that all hosts share and that you can write to")


def _made(folder: Path, fingerprint: str, show: bool, make_in: Callable[[Path], None]) -> Path:
    """`folder`, complete; made by `make_in` in a hidden folder if need be."""
    def waiting() -> None:
        if show:
            say(f"waiting for another process that prepares {folder}")

    if not _finished(folder, fingerprint):
        with writing(folder), building(folder, lambda: _finished(folder, fingerprint), waiting) as hidden:
            if hidden is not None:
                make_in(hidden)
    return folder


def _check_no_choice(corpus: str, options: Options) -> None:
    if options != Options(options.tokenizer):
        raise UserError("this is prepared already, or made of what is: its place and its splits are what they are",
                        where=corpus, instead="leave --out, --val-fraction, --val-tokens, --shard-tokens, "
                                              "--text-key and --max-broken out")


def _of_choice(folder: Path, choice: Choice | None) -> Path:
    """A folder whose tokens are those of the tokenizer that was asked for."""
    entry = read_manifest(folder)["tokenizer"]
    check_entry(entry, str(folder / MANIFEST))
    if choice is not None and not choice.fits(entry):
        theirs = entry["name"] if choice.name != entry["name"] else describe(entry)
        raise UserError(f"this folder was prepared with the tokenizer {theirs}, not {choice.describe()}",
                        where=str(folder),
                        instead=f"leave --tokenizer out, or prepare the text with --tokenizer {choice.words}")
    return folder


def _known(request: Request) -> Request:
    """The request; of a given table of characters the one without, if that was prepared and has the same table."""
    if request.tokenizer.name != "char" or request.tokenizer.entry is None or request.options.out is not None:
        return request
    plain = replace(request, tokenizer=choose(request.tokenizer.name))
    same = (_finished(plain.folder, plain.fingerprint)
            and request.tokenizer.fits(read_manifest(plain.folder)["tokenizer"]))
    return plain if same else request


def _finished(folder: Path, fingerprint: str) -> bool:
    """True if the folder stands complete; UserError if something else is in its place."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    found = "something else is here"
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if manifest["request"] == fingerprint:
            check_entry(manifest["tokenizer"], str(folder / MANIFEST))
            return True
        found = "other shards are here: of another corpus, tokenizer or split, or of files that have changed"
    raise UserError(found, where=str(folder), instead="name another folder with --out, or remove this one first")


def _ready(request: Request, download: bool, most: int | None) -> bool:
    """True if there is nothing to do; else that what the work needs is there is made sure of.

    Args:
        most: of how many files the formats are looked at; None for all.
    """
    if _finished(request.folder, request.fingerprint):
        return True
    if request.tokenizer.name == "gpt2" and request.tokenizer.file is None:
        GPT2_VOCAB.find()
    for file in () if request.corpus.plain else request.corpus.files[:most]:
        find_format(file.path)
    if request.corpus.dataset is not None:
        require_package(*LIBRARY)
        if request.corpus.is_remote and not download:
            raise UserError(f"{request.corpus.words} is not prepared on this machine", where=str(request.folder),
                            instead=f"prepare it once, where there is internet: {request.command}")
    return False


def _default_workers(request: Request) -> int:
    cores = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    if request.corpus.dataset is not None:
        return cores
    return max(1, min(cores, request.corpus.size // _BYTES_PER_WORKER))


# A folder of the cache whose manifest names the parts of a mixture and their weights.
def mixture_folder(parts: Sequence[tuple[Path, float]]) -> tuple[Path, str]:
    """The folder of the cache for a mixture of prepared folders, and its fingerprint."""
    known = [[str(folder), TokenData.open(folder).fingerprint, weight] for folder, weight in parts]
    fingerprint = hashlib.sha256(json.dumps([FORMAT, "mixture", known]).encode()).hexdigest()
    return cached_folder("mixture", fingerprint), fingerprint


def write_mixture(words: str, parts: Sequence[tuple[Path, float]], fingerprint: str, folder: Path) -> None:
    """Write the manifest of a mixture into `folder`.

    Raises:
        UserError: the parts' tokens are not of one tokenizer.
    """
    opened = [TokenData.open(part) for part, _ in parts]
    check_same_tokenizer(opened)
    weights = [weight for _, weight in parts]
    counted = shares([str(part) for part, _ in parts], weights)
    histogram = np.zeros(opened[0].vocab_size)
    for data, count in zip(opened, counted, strict=True):
        if not (data.folder / COUNTS).is_file():
            raise UserError("this folder was prepared by a version that did not count its tokens",
                            where=str(data.folder), instead="remove it, and prepare it again")
        again = "remove the folder, and prepare it again"
        counts = open_npy(data.folder / COUNTS, "array of counts", again)
        if counts.dtype != np.int64 or counts.shape != histogram.shape:
            raise UserError(f"these counts are {counts.dtype} {counts.shape}, of {histogram.size:,} tokens",
                            where=str(data.folder / COUNTS), instead=again)
        histogram += counts / counts.sum() * count / BLOCK
    manifests = [data.manifest for data in opened]
    first = manifests[0]
    if "kind" in first["tokenizer"]:
        copy_files(find_copy(opened[0].folder, first["tokenizer"]), folder)
    write_json(folder / MANIFEST, {
        "format": FORMAT,
        "request": fingerprint,
        "command": shlex.join(["python3", "-m", "ezpz_llm.data", "prepare", words]),
        "source": {"corpus": words, **{key: sum(one["source"][key] for one in manifests)
                                       for key in ("files", "bytes")}},
        "parts": [{"folder": str(part), "weight": weight} for part, weight in parts],
        **{key: first[key] for key in ("tokenizer", "vocab_size", "end_of_text", "dtype")},
        **{key: sum(one[key] for one in manifests) for key in ("documents", "tokens")},
        "unigram_entropy": entropy(histogram),
        "splits": {name: {"tokens": sum(one["splits"][name]["tokens"] for one in manifests), "shards": []}
                   for name in first["splits"]},
    })


def check_same_tokenizer(parts: Sequence[TokenData]) -> None:
    """That the parts can be mixed.

    Raises:
        UserError: their ids mean different text, or one of them is a mixture itself.
    """
    first = parts[0]
    for data in parts:
        if data.parts:
            raise UserError("a mixture cannot be part of another", where=str(data.folder),
                            instead="name its parts, each with its weight")
        if data.manifest["tokenizer"]["fingerprint"] != first.manifest["tokenizer"]["fingerprint"]:
            names = [part.manifest["tokenizer"]["name"] for part in (first, data)]
            which = f"{names[0]} and {names[1]}" if names[0] != names[1] else f"two different tables of {names[0]}"
            raise UserError(f"the parts of a mixture must have one tokenizer; these have {which}",
                            where=f"{first.folder} and {data.folder}",
                            instead="prepare them with the same one: --tokenizer bytes, or gpt2")
