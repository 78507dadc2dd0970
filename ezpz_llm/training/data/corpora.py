"""Corpora, their files, and requests to prepare one. This module never downloads."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, cache_dir, did_you_mean, unknown_name_error, user_path
from ezpz_llm.training.data.downloads import PublicFile, reading
from ezpz_llm.training.data.folder_files import find_splits, odd_files
from ezpz_llm.training.data.formats import TEXT
from ezpz_llm.training.data.hub import NAMES, HubDataset, find_dataset
from ezpz_llm.training.data.manifest import FORMAT, MANIFEST, SHARD_TOKENS
from ezpz_llm.training.data.tokenizers import Choice, choose_tokenizer

SHAKESPEARE = PublicFile(
    what="tiny Shakespeare", folder="corpora", name="tinyshakespeare.txt", size=1_115_394,
    address="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    provide="python3 -m ezpz_llm.data prepare shakespeare --file FILE (or --download)",
)
CORPORA = ("stdlib", "shakespeare", *NAMES)
_ONE_FILE_VAL_FRACTION = 0.1
"""Default for tiny Shakespeare and any single file, as in nanoGPT's character-level run."""
MANY_FILES_VAL_FRACTION = 0.02
_DATASET_VAL_TOKENS = 100_000_000
"""Default for streamed data sets: one shard, the first, as in build-nanogpt's FineWeb-Edu."""
_FILES = "text, JSON lines or parquet"
_BY_CONTENT = "formats by content"
"""Part of a corpus's identity, so that shards from versions that detected formats by name are not reused."""
_SPECIAL_FILES = {stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a character device",
                  stat.S_ISBLK: "a block device", stat.S_ISDIR: "a link to a folder"}
_MAX_LISTED = 8
"""Files that a note lists."""
_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    """File of a corpus.

    Attributes:
        name: path relative to the corpus.
        special: kind of a file that is not regular, such as "a FIFO".
        is_validation: True if it is of the validation split, not of the training split.
    """

    path: Path
    name: str
    size: int
    mtime_ns: int
    special: str | None = None
    is_validation: bool = False


@dataclass(frozen=True)
class Corpus:
    """Ordered, non-empty files of a corpus, those for validation last; or a data set to stream.

    Attributes:
        name: short name, usable as a folder name.
        words: its name as a command-line argument: a known name or an absolute path.
        identity: JSON values that identify its content.
        val_fraction: default fraction to validate on; None if `val_tokens` is set, or there are validation files.
        val_tokens: default number of tokens to validate on.
        tokenizer: default tokenizer.
        python: version of Python, for stdlib.
        plain: True if each file is one text document, regardless of its content.
        notes: notes for the user on skipped files and on files that may not be meant as training text.
        dataset: the data set, whose files are not known in advance.
    """

    name: str
    words: str
    files: tuple[SourceFile, ...]
    identity: list[Any]
    val_fraction: float | None
    tokenizer: str
    python: str | None = None
    val_tokens: int | None = None
    dataset: HubDataset | None = None
    plain: bool = False
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files; 0 if unknown."""
        return sum(file.size for file in self.files)

    @property
    def is_remote(self) -> bool:
        """True if reading it needs the network."""
        return self.dataset is not None and not self.dataset.is_local


def prepared_folder(corpus: str) -> Path | None:
    """Return the folder of shards that `corpus` names, or None."""
    if corpus in CORPORA:
        return None
    path = user_path(corpus).absolute()
    return path if os.path.isfile(path / MANIFEST) else None


def find_corpus(corpus: str) -> Corpus:
    """Return the corpus with that name, or at that path.

    Raises:
        UserError: unknown name, missing path, nothing to read, or tiny Shakespeare is not installed.
    """
    if corpus == "stdlib":
        return _stdlib_corpus()
    if corpus == "shakespeare":
        path = SHAKESPEARE.find()
        return Corpus("shakespeare", "shakespeare", (_source_file(path, path.name),), [SHAKESPEARE.sha256],
                      _ONE_FILE_VAL_FRACTION, "char", plain=True)
    if dataset := find_dataset(corpus):
        return _dataset_corpus(dataset)
    path = user_path(corpus).absolute()
    if not os.path.exists(path):  # also False if the name is too long for a path
        if path.suffix or os.sep in corpus:
            kinds = f"pass a {_FILES} file, a folder, or one of " + ", ".join(CORPORA)
            raise UserError("no such corpus file or folder", where=str(path), instead=did_you_mean(path, kinds))
        raise unknown_name_error("corpus", corpus, CORPORA, or_path=True,
                                 where=f"neither a known name nor a file in {Path.cwd()}")
    return _path_corpus(path)


def _path_corpus(path: Path) -> Corpus:
    if path.is_dir():
        sources = [_source_file(file, file.relative_to(path).as_posix()) for file in _walk(path, with_links=True)]
    else:
        sources = [_source_file(path, path.name)]
        if sources[0].special:
            raise UserError(f"the corpus is {sources[0].special}, which can be read only once", where=str(path),
                            instead="copy its content to a file and pass the file's path")
    files = tuple(file for file in sources if file.size and not file.special)
    splits = find_splits([file.name for file in files])
    tests = [name for name, split in splits.items() if split == "test"]
    validation = [name for name, split in splits.items() if split == "validation"]
    files = tuple(sorted((replace(file, is_validation=splits.get(file.name) == "validation") for file in files
                          if splits.get(file.name) != "test"), key=lambda file: file.is_validation))
    if not files:
        state = "the file is empty" if path.is_file() else "the folder contains no non-empty files"
        raise UserError(f"nothing to read: {state}", where=str(path),
                        instead=f"pass a {_FILES} file, or a folder of such files")
    return Corpus(
        name=path.stem, words=str(path), files=files,
        identity=[_BY_CONTENT, str(path), [[file.name, file.size, file.mtime_ns] for file in files]],
        val_fraction=None if validation else
        MANY_FILES_VAL_FRACTION if path.is_dir() else _ONE_FILE_VAL_FRACTION, tokenizer="bytes",
        notes=tuple(_file_notes(sources, files, tests, validation)),
    )


def _file_notes(sources: Sequence[SourceFile], files: Sequence[SourceFile], tests: Sequence[str],
                validation: Sequence[str]) -> Iterator[str]:
    """Yield notes on the files of a folder."""
    for file in sources:
        if file.special:
            yield f"skipping {file.path} ({file.special}): not a regular file"
    for words, names in (("skipping the test split", tests), ("the validation split is", validation),
                         ("files that are read as text like the others; move them out of the folder if they should "
                          "not be", list(odd_files([file.name for file in files])) if len(sources) > 1 else [])):
        if names:
            yield f"{words}: {', '.join(names[:_MAX_LISTED])}{', …' * (len(names) > _MAX_LISTED)}"


def _dataset_corpus(dataset: HubDataset) -> Corpus:
    identity: list[Any] = ["data set", dataset.name, dataset.config, dataset.revision]
    if dataset.is_local:
        identity.append([[file.name, file.size, file.mtime_ns] for file in _path_corpus(Path(dataset.name)).files])
    name = "-".join(filter(None, (Path(dataset.name).name, dataset.config)))
    return Corpus(name, dataset.words, (), identity, None, "gpt2", val_tokens=_DATASET_VAL_TOKENS, dataset=dataset)


def _stdlib_corpus() -> Corpus:
    """Return the sources of the standard library, which differ between Python versions and builds."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (file for file in _walk(root, _NOT_STDLIB) if file.suffix == ".py")
    files = tuple(source for file in paths
                  if (source := _source_file(file, file.relative_to(root).as_posix())).size)
    if not files:
        raise UserError("this Python has no standard library sources (.py files)", where=str(root),
                        instead="pass a text file or folder: --corpus PATH")
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return Corpus("stdlib", "stdlib", files, [python, [[file.name, file.size] for file in files]],
                  MANY_FILES_VAL_FRACTION, "bytes", python, plain=True)


def _walk(root: Path, excluded: frozenset[str] | set[str] = frozenset(), with_links: bool = False) -> list[Path]:
    """Return the non-hidden files in non-hidden folders under `root`, sorted; follow no links to folders.

    Args:
        with_links: also return the links to folders.
    """
    paths = []

    def reject(error: OSError) -> None:
        with reading(Path(error.filename)):
            raise error

    for folder, folders, files in os.walk(root, onerror=reject):
        folders[:] = [name for name in folders if name not in excluded and not name.startswith(".")]
        links = [name for name in folders if with_links and os.path.islink(os.path.join(folder, name))]
        paths += [Path(folder, name) for name in (*files, *links) if not name.startswith(".")]
    return sorted(paths)


def _source_file(path: Path, name: str) -> SourceFile:
    with reading(path):
        stats = path.stat()
    special = next((kind for is_kind, kind in _SPECIAL_FILES.items() if is_kind(stats.st_mode)), None)
    return SourceFile(path, name, stats.st_size, stats.st_mtime_ns, special)


_LONGEST_NAME = 100


@dataclass(frozen=True)
class Options:
    """Options for preparing a corpus; None selects the corpus's default.

    Attributes:
        tokenizer: "bytes", "char", "gpt2", a file or a folder; see `ezpz_llm.training.data.tokenizers`.
        val_fraction: fraction of the tokens to validate on, from the end of the stream.
        val_tokens: number of tokens to validate on, from the start of the stream.
        shard_tokens: tokens per shard file.
        out: output folder; None for a folder in the cache.
        text_key: key of the text in a JSON object, or name of the text column.
        max_broken: maximum number of broken documents to skip.
        special_tokens: encode special tokens in the text as tokens, not as ordinary text.
    """

    tokenizer: str | None = None
    val_fraction: float | None = None
    val_tokens: int | None = None
    shard_tokens: int = SHARD_TOKENS
    out: Path | None = None
    text_key: str = TEXT
    max_broken: int = 0
    special_tokens: bool = False


@dataclass(frozen=True)
class Request:
    """Validated request to prepare a corpus. Equal requests for unchanged files have equal fingerprints.

    `max_broken` is not part of the fingerprint: existing shards were accepted when they were created, and their
    manifest records how many documents were skipped.
    """

    corpus: Corpus
    tokenizer: Choice
    options: Options
    """Options with the corpus's defaults filled in."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the shards."""
        options = self.options
        val_tokens = [options.val_tokens, "tokens at the beginning"]
        val = options.val_fraction if options.val_tokens is None else val_tokens
        values = [FORMAT, self.corpus.name, self.corpus.identity, self.tokenizer.name, val, options.shard_tokens]
        if self.tokenizer.table is not None:
            values.append(self.tokenizer.table)
        if options.text_key != TEXT:
            values.append(["text key", options.text_key])
        if options.special_tokens:
            values.append("special tokens")
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    @property
    def validates_on_files(self) -> bool:
        """True if the validation split consists of the corpus's validation files."""
        return self.options.val_fraction is None and self.options.val_tokens is None

    @property
    def folder(self) -> Path:
        """Folder of the shards: `out`, or a folder in the cache."""
        if self.options.out is not None:
            return self.options.out
        return cached_folder(f"{self.corpus.name}-{self.tokenizer.name}", self.fingerprint)

    @property
    def command(self) -> str:
        """Command that creates these shards, without --out."""
        val = ([] if self.validates_on_files else
               ["--val-fraction", str(self.options.val_fraction)] if self.options.val_tokens is None
               else ["--val-tokens", str(self.options.val_tokens)])
        arguments = ["python3", "-m", "ezpz_llm.data", "prepare", self.corpus.words,
                     "--tokenizer", self.tokenizer.words, *val, "--shard-tokens", str(self.options.shard_tokens),
                     *(["--text-key", self.options.text_key] if self.options.text_key != TEXT else []),
                     *(["--max-broken", str(self.options.max_broken)] if self.options.max_broken else []),
                     *(["--special-tokens", "true"] if self.options.special_tokens else [])]
        return shlex.join([*arguments, "--download"] if self.corpus.is_remote else arguments)


def cached_folder(name: str, fingerprint: str) -> Path:
    """Return the folder in the cache for shards called `name`."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") or "corpus"
    # File systems limit names to 255 bytes, and the hidden folder's name is longer than this one.
    return cache_dir() / "shards" / f"{plain[:_LONGEST_NAME]}-{fingerprint[:12]}"


def make_request(corpus: str, options: Options) -> Request:
    """Validate `options` and return the request for `corpus`.

    Raises:
        UserError: unknown corpus or tokenizer, or an option is out of range.
    """
    tokenizer = None if options.tokenizer is None else choose_tokenizer(options.tokenizer)
    source = find_corpus(corpus)
    fraction, val_tokens = options.val_fraction, options.val_tokens
    for is_invalid, message, where, instead in (
            (fraction is not None and val_tokens is not None, "two validation splits are requested",
             "--val-fraction and --val-tokens", "pass only one of them"),
            (not 0 <= (fraction or 0) < 1, f"a validation fraction of {fraction} is out of range", "--val-fraction",
             "pass a number in [0, 1)"),
            ((val_tokens or 0) < 0, f"{val_tokens} validation tokens were requested", "--val-tokens",
             "pass 0 or more"),
            (options.max_broken < 0, f"the limit is {options.max_broken} broken documents", "--max-broken",
             "pass 0 or more"),
            (not options.text_key, "the text key is empty", "--text-key", "pass a key or column, such as content"),
            (options.shard_tokens < 1, f"the number of tokens per shard is {options.shard_tokens}",
             "--shard-tokens", "pass 1 or more")):
        if is_invalid:
            raise UserError(message, where=where, instead=instead)
    if fraction is None and val_tokens is None:
        fraction, val_tokens = source.val_fraction, source.val_tokens
    out = options.out and options.out.expanduser().absolute()
    return Request(source, tokenizer or choose_tokenizer(source.tokenizer),
                   replace(options, val_fraction=fraction, val_tokens=val_tokens, out=out))
