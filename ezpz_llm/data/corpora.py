"""Corpora (which files they are made of) and requests to prepare one. Nothing here downloads anything."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import stat
import sysconfig
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, cache_dir, unknown, user_path
from ezpz_llm.data.downloads import PublicFile, reading
from ezpz_llm.data.formats import TEXT
from ezpz_llm.data.hub import NAMES, HubDataset, find_dataset
from ezpz_llm.data.manifest import FORMAT, MANIFEST, SHARD_TOKENS
from ezpz_llm.data.tokenizers import Choice, choose

SHAKESPEARE = PublicFile(
    what="tiny Shakespeare", folder="corpora", name="tinyshakespeare.txt", size=1_115_394,
    address="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    provide="python3 -m ezpz_llm.data prepare shakespeare --file FILE (or --download)",
)
CORPORA = ("stdlib", "shakespeare", *NAMES)
ONE_FILE_VAL_FRACTION = 0.1
"""Tiny Shakespeare or any one file: the split of nanoGPT's character-level run."""
MANY_FILES_VAL_FRACTION = 0.02
DATASET_VAL_TOKENS = 100_000_000
"""The first shard of a streamed data set: build-nanogpt's validation shard of FineWeb-Edu."""
_FILES = "text, JSON lines or parquet"
_BY_CONTENT = "formats by content"
"""Part of a corpus's identity: shards that were made when names alone told the format are others."""
_NO_FILES = {stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a character device",
             stat.S_ISBLK: "a block device"}
_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus: its path, its name within the corpus, its size in bytes, its time stamp.

    `special` says what it is if it is no file, such as a FIFO.
    """

    path: Path
    name: str
    size: int
    mtime_ns: int
    special: str | None = None


@dataclass(frozen=True)
class Corpus:
    """The files of a corpus, in order, none of them empty; or a data set to stream.

    Attributes:
        name: short name, good for a folder's name.
        words: how a command names it: a known name or an absolute path.
        identity: what tells this content from any other, as JSON values.
        val_fraction, val_tokens, tokenizer: defaults; the one or the other of the first two.
        facts: what else the manifest records of the source.
        plain: whether each file is one document of text, whatever it looks like.
        left_out: what lies among the files and is none, such as a FIFO, in words.
        dataset: the data set, which has no files that are known beforehand.
    """

    name: str
    words: str
    files: tuple[SourceFile, ...]
    identity: list[Any]
    val_fraction: float | None
    tokenizer: str
    facts: dict[str, str] = field(default_factory=dict)
    val_tokens: int | None = None
    dataset: HubDataset | None = None
    plain: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes over all files; 0 where they are not known."""
        return sum(file.size for file in self.files)

    @property
    def is_remote(self) -> bool:
        """True if reading it needs the network."""
        return self.dataset is not None and not self.dataset.is_local


def prepared_folder(corpus: str) -> Path | None:
    """The folder of shards that `corpus` names, if it names one."""
    if corpus in CORPORA:
        return None
    path = user_path(corpus).absolute()
    return path if os.path.isfile(path / MANIFEST) else None


def find_corpus(corpus: str) -> Corpus:
    """The corpus of that name, or at a path: a file of text, JSON lines or parquet, or a folder of such.

    Raises:
        UserError: no such name or path, nothing in it, or (shakespeare) not provided yet.
    """
    if corpus == "stdlib":
        return _stdlib()
    if corpus == "shakespeare":
        path = SHAKESPEARE.find()
        return Corpus("shakespeare", "shakespeare", (_source(path, path.name),), [SHAKESPEARE.sha256],
                      ONE_FILE_VAL_FRACTION, "char", plain=True)
    if dataset := find_dataset(corpus):
        return _streamed(dataset)
    path = user_path(corpus).absolute()
    if not os.path.exists(path):  # also False for what is too long for a path
        if path.suffix or os.sep in corpus:
            raise UserError("no such corpus file or folder", where=str(path),
                            instead=f"name a file of {_FILES}, a folder, or one of " + ", ".join(CORPORA))
        raise unknown("corpus", corpus, CORPORA, where=f"neither a name nor a file in {Path.cwd()}")
    return _at_path(path)


def _at_path(path: Path) -> Corpus:
    if path.is_dir():
        found = [_source(file, file.relative_to(path).as_posix()) for file in _walk(path)]
    else:
        found = [_source(path, path.name)]
        if found[0].special:
            raise UserError(f"the corpus is {found[0].special}, which can be read only once", where=str(path),
                            instead="write it to a file, and name that")
    files = tuple(file for file in found if file.size and not file.special)
    if not files:
        state = "empty" if path.is_file() else "a folder without a file that has text in it"
        raise UserError(f"nothing to read: the corpus is {state}", where=str(path),
                        instead=f"name a file of {_FILES}, or a folder of such")
    return Corpus(
        name=path.stem, words=str(path), files=files,
        identity=[_BY_CONTENT, str(path), [[file.name, file.size, file.mtime_ns] for file in files]],
        val_fraction=MANY_FILES_VAL_FRACTION if path.is_dir() else ONE_FILE_VAL_FRACTION, tokenizer="bytes",
        left_out=tuple(f"{file.path} ({file.special})" for file in found if file.special),
    )


def _streamed(dataset: HubDataset) -> Corpus:
    identity: list[Any] = ["data set", dataset.name, dataset.config, dataset.revision]
    if dataset.is_local:
        identity.append([[file.name, file.size, file.mtime_ns] for file in _at_path(Path(dataset.name)).files])
    name = "-".join(filter(None, (Path(dataset.name).name, dataset.config)))
    return Corpus(name, dataset.words, (), identity, None, "gpt2", val_tokens=DATASET_VAL_TOKENS, dataset=dataset)


def _stdlib() -> Corpus:
    """The standard library's own sources, whose text differs by Python version and build."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (file for file in _walk(root, _NOT_STDLIB) if file.suffix == ".py")
    files = tuple(source for file in found
                  if (source := _source(file, file.relative_to(root).as_posix())).size)
    if not files:
        raise UserError("this Python has no standard library sources (.py files)", where=str(root),
                        instead="name a text file or folder of your own with --corpus PATH")
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return Corpus("stdlib", "stdlib", files, [python, [[file.name, file.size] for file in files]],
                  MANY_FILES_VAL_FRACTION, "bytes", {"python": python}, plain=True)


def _walk(root: Path, left_out: frozenset[str] | set[str] = frozenset()) -> list[Path]:
    """The files under `root` sorted by path, without hidden ones; links to folders are not followed."""
    found = []

    def refuse(error: OSError) -> None:
        with reading(Path(error.filename)):
            raise error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found)


def _source(path: Path, name: str) -> SourceFile:
    with reading(path):
        found = path.stat()
    special = next((name for is_it, name in _NO_FILES.items() if is_it(found.st_mode)), None)
    return SourceFile(path, name, found.st_size, found.st_mtime_ns, special)


# A request to prepare a corpus, validated.
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Options:
    """Settings for preparing a corpus; what is None is the corpus's own default.

    Attributes:
        tokenizer: "bytes", "char", "gpt2", a file or a folder; see `ezpz_llm.data.tokenizers`.
        val_fraction: the last part of the token stream is the validation split.
        val_tokens: or so many tokens at its beginning are.
        shard_tokens: tokens a shard file.
        out: the folder to make; None for one in the cache.
        text_key: the member of a JSON object, or the column, that has a document's text.
        max_broken: how many broken documents may be left out.
    """

    tokenizer: str | None = None
    val_fraction: float | None = None
    val_tokens: int | None = None
    shard_tokens: int = SHARD_TOKENS
    out: Path | None = None
    text_key: str = TEXT
    max_broken: int = 0


@dataclass(frozen=True)
class Request:
    """A corpus to prepare and how. Equal requests of unchanged files have equal fingerprints.

    How many broken documents may be left out is no part of that: shards that are there were accepted when they were
    made, and say how many were.
    """

    corpus: Corpus
    tokenizer: Choice
    options: Options
    """Without the defaults that are the corpus's."""

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides which tokens come out."""
        options = self.options
        at_the_beginning = [options.val_tokens, "tokens at the beginning"]
        val = options.val_fraction if options.val_tokens is None else at_the_beginning
        asked = [FORMAT, self.corpus.name, self.corpus.identity, self.tokenizer.name, val, options.shard_tokens]
        if self.tokenizer.table is not None:
            asked.append(self.tokenizer.table)
        if options.text_key != TEXT:
            asked.append(["text key", options.text_key])
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    @property
    def folder(self) -> Path:
        """Folder of the shards: `out`, else a folder of the cache named after the request."""
        if self.options.out is not None:
            return self.options.out
        return cached_folder(f"{self.corpus.name}-{self.tokenizer.name}", self.fingerprint)

    @property
    def command(self) -> str:
        """Identity of these shards, whatever folder `--out` names."""
        val = (["--val-fraction", str(self.options.val_fraction)] if self.options.val_tokens is None
               else ["--val-tokens", str(self.options.val_tokens)])
        words = ["python3", "-m", "ezpz_llm.data", "prepare", self.corpus.words,
                 "--tokenizer", self.tokenizer.words, *val, "--shard-tokens", str(self.options.shard_tokens),
                 *(["--text-key", self.options.text_key] if self.options.text_key != TEXT else []),
                 *(["--max-broken", str(self.options.max_broken)] if self.options.max_broken else [])]
        return shlex.join([*words, "--download"] if self.corpus.is_remote else words)


def cached_folder(name: str, fingerprint: str) -> Path:
    """The folder of the cache for shards called `name`."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") or "corpus"
    # Names have an end, and more is put around this one while it is made.
    return cache_dir() / "shards" / f"{plain[:_LONGEST_NAME]}-{fingerprint[:12]}"


def make_request(corpus: str, options: Options) -> Request:
    """The request for `corpus`.

    Raises:
        UserError: there is no such corpus or tokenizer, or a number is out of its range.
    """
    tokenizer = None if options.tokenizer is None else choose(options.tokenizer)
    found = find_corpus(corpus)
    fraction, val_tokens = options.val_fraction, options.val_tokens
    for is_wrong, what, where, instead in (
            (fraction is not None and val_tokens is not None, "two validation splits",
             "--val-fraction and --val-tokens", "give one of them"),
            (not 0 <= (fraction or 0) < 1, f"a validation fraction of {fraction}", "--val-fraction",
             "give a number from 0 up to, not including, 1"),
            ((val_tokens or 0) < 0, f"{val_tokens} validation tokens", "--val-tokens", "give 0 or more"),
            (options.max_broken < 0, f"{options.max_broken} broken documents", "--max-broken", "give 0 or more"),
            (not options.text_key, "the name of the text is empty", "--text-key", "such as content"),
            (options.shard_tokens < 1, f"{options.shard_tokens} tokens a shard", "--shard-tokens",
             "give 1 or more")):
        if is_wrong:
            raise UserError(what, where=where, instead=instead)
    if fraction is None and val_tokens is None:
        fraction, val_tokens = found.val_fraction, found.val_tokens
    out = options.out and options.out.expanduser().absolute()
    return Request(found, tokenizer or choose(found.tokenizer),
                   replace(options, val_fraction=fraction, val_tokens=val_tokens, out=out))
