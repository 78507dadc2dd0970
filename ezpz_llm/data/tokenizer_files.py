"""Tokenizers that others made: a tokenizer.json of Hugging Face's tokenizers, a *.model of SentencePiece.

The ids are the library's own. A folder of shards, a run and an export have a copy of the files, under the names
that transformers looks for; an entry (see `ezpz_llm.data.manifest`) names the library and a hash of the table, so
that the copy is known wherever it lies.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.base import MOST_IDS, UserError, import_package, read_bytes, read_json
from ezpz_llm.data.downloads import reading
from ezpz_llm.data.text import checked_cut, whole_characters
from ezpz_llm.rundir import RunDir

TOKENIZER_JSON, TOKENIZER_MODEL = "tokenizer.json", "tokenizer.model"
KINDS = {"tokenizers": TOKENIZER_JSON, "sentencepiece": TOKENIZER_MODEL}
"""The library (the extra and the package have its name), and how a copy of its file is called."""
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""What lies beside the table in a model's folder, for transformers."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Names of the end-of-text token where no tokenizer_config.json tells, in order."""
_CONFIG = COMPANIONS[0]
_MODELS = (TOKENIZER_MODEL, "spiece.model", "sentencepiece.bpe.model")
_KNOWN = (TOKENIZER_JSON, *_MODELS)
"""Names that say that the folder is one tokenizer's."""
_MOST_BYTES = 256 << 20
"""Of a tokenizer's file: the largest known has 33 MB."""
_NO_IDS = ("version", "truncation", "padding", "post_processor")
"""What a tokenizer.json says that concerns no id of a document: transformers changes some of it when it saves."""


def find_file(path: Path) -> Path | None:
    """The table that `path` names: the file itself, or the one in that folder; None if there is none."""
    if path.is_file():
        return path if path.suffix in (".json", ".model") else None
    return next((path / name for name in (TOKENIZER_JSON, *_MODELS) if (path / name).is_file()), None)


def find_copy(folder: Path, entry: Mapping[str, Any]) -> Path:
    """The copy of a tokenizer's file in a folder of shards, or in the run that a checkpoint belongs to.

    Raises:
        UserError: there is none.
    """
    name = KINDS[entry["kind"]]
    run = RunDir(folder.absolute().parent.parent).tokenizer
    for path in (folder / name, run / name):
        if path.is_file():
            return path
    raise UserError(f"the tokenizer {entry['name']} made these tokens, and its {name} is not there",
                    where=f"{folder} and {run}",
                    instead=f"copy the {name} with the fingerprint {entry['fingerprint'][:12]} to one of them, or "
                            "name its folder with --tokenizer")


def copy_files(source: Path, folder: Path) -> None:
    """Copy a tokenizer's file and what lies beside it into `folder`.

    Args:
        source: the file, from `find_file` or `find_copy`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = KINDS[_kind(source)]
    with reading(source):
        shutil.copyfile(source, folder / name)
    for other in (*COMPANIONS, *KINDS.values()) if source.name in _KNOWN else ():
        if other != name and (source.parent / other).is_file():
            with reading(source.parent / other):
                shutil.copyfile(source.parent / other, folder / other)


def entry_of_file(path: Path) -> dict[str, Any]:
    """The manifest entry of the tokenizer in a file.

    Raises:
        UserError: the file is no such tokenizer's, or (SentencePiece) the library is not installed.
    """
    found = path.stat()
    beside = path.parent / _CONFIG
    return dict(_entry(path.absolute(), found.st_size, found.st_mtime_ns,
                       beside.stat().st_mtime_ns if beside.is_file() else 0))


@functools.lru_cache(maxsize=16)
def _entry(path: Path, size: int, mtime_ns: int, beside_ns: int) -> dict[str, Any]:
    kind = _kind(path)
    name = path.absolute().parent.name if path.name in _KNOWN else path.stem
    if kind == "sentencepiece":
        content = read_bytes(path, _MOST_BYTES)
        model = _sentencepiece(path, content)
        end = model.eos_id()
        return {"name": name, "kind": kind, "fingerprint": hashlib.sha256(content).hexdigest(),
                "vocab_size": model.vocab_size(), "end_of_text": end if end >= 0 else None}
    table = _Table.read(path)
    return {"name": name, "kind": kind, "fingerprint": table.fingerprint(),
            "vocab_size": max(table.ids.values()) + 1, "end_of_text": table.end_of_text(path.parent / _CONFIG)}


def _kind(path: Path) -> str:
    return "tokenizers" if path.suffix == ".json" else "sentencepiece"


@dataclass(frozen=True)
class _Table:
    """A tokenizer.json, as JSON, and the id of each of its tokens."""

    stored: dict[str, Any]
    ids: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> _Table:
        """The table of a tokenizer.json."""
        try:
            stored = read_json(path, _MOST_BYTES)
            vocabulary = stored["model"]["vocab"]
            # Unigram's is a list of tokens with their scores.
            ids = (dict(vocabulary) if isinstance(vocabulary, dict) else
                   {token: number for number, (token, _) in enumerate(vocabulary)})
            ids |= {token["content"]: token["id"] for token in stored.get("added_tokens") or ()}
            if not ids or not all(isinstance(number, int) and 0 <= number < MOST_IDS for number in ids.values()):
                raise ValueError(f"no ids from 0 to {MOST_IDS - 1:,}")
        except (UserError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"this is no table of Hugging Face's tokenizers: "
                            f"{error.found if isinstance(error, UserError) else error!r}", where=str(path),
                            instead="a tokenizer.json, or a *.model of SentencePiece") from error
        return cls(stored, ids)

    def fingerprint(self) -> str:
        """A hash of all that decides which ids a text gets, equal however the file was saved."""
        known = {name: value for name, value in self.stored.items() if name not in _NO_IDS}
        model = dict(known["model"])
        if isinstance(model.get("merges"), list):  # newer versions write them as pairs
            model["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        return hashlib.sha256(json.dumps(known | {"model": model}, sort_keys=True).encode()).hexdigest()

    def end_of_text(self, config: Path) -> int | None:
        """The id of the token that ends a text, as the tokenizer_config.json says, or by its name."""
        stored = read_json(config, _MOST_BYTES) if config.is_file() else {}
        named = stored.get("eos_token") if isinstance(stored, dict) else None
        named = named.get("content") if isinstance(named, dict) else named
        names = (named, *ENDS) if isinstance(named, str) else ENDS
        return next((self.ids[token] for token in names if token in self.ids), None)


def load(path: Path, entry: Mapping[str, Any] | None = None) -> FileTokenizer:
    """The tokenizer in a file.

    Args:
        entry: the one that it must be, if it is known.

    Raises:
        UserError: the library is not installed, the file is broken, or it is of another tokenizer.
    """
    found = entry_of_file(path)
    if entry is not None and entry["fingerprint"] != found["fingerprint"]:
        raise UserError(f"another tokenizer than the one that made the tokens: {entry['name']}, fingerprint "
                        f"{entry['fingerprint'][:12]}, here {found['fingerprint'][:12]}", where=str(path),
                        instead=f"put the {KINDS[entry['kind']]} there that the tokens were made with")
    return _load(path, tuple((found if entry is None else entry).items()))


@functools.lru_cache(maxsize=4)
def _load(path: Path, entry: tuple[tuple[str, Any], ...]) -> FileTokenizer:
    # A file that has changed has another entry.
    made = JsonTokenizer if _kind(path) == "tokenizers" else ModelTokenizer
    return made(path, dict(entry))


class FileTokenizer:
    """A tokenizer of another library; `path` is its file, `kind` the library."""

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        self.path = path
        self.entry = dict(entry)
        self.name: str = entry["name"]
        self.vocab_size: int = entry["vocab_size"]
        self.end_of_text: int | None = entry["end_of_text"]
        self.fingerprint: str = entry["fingerprint"]

    def encode(self, text: str) -> np.ndarray:
        """Ids (1-d, uint32) of `text`; lone surrogates count as U+FFFD where the library refuses them."""
        try:
            return np.array(self._ids(text), np.uint32)
        except (UnicodeError, RuntimeError, TypeError):  # a lone surrogate, which is looked for only then
            return np.array(self._ids(whole_characters(text)), np.uint32)

    def _ids(self, text: str) -> list[int] | np.ndarray:
        raise NotImplementedError

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of `ids`, by the library itself."""
        raise NotImplementedError

    @functools.cached_property
    def _begins_with_space(self) -> bool:
        """True if each text is encoded as though a space stood before it, also where one does."""
        whole = self.encode("a a").tolist()
        return (whole != [*self.encode("a").tolist(), *self.encode(" a").tolist()]
                and whole == 2 * self.encode("a").tolist())

    def encode_rest(self, text: str) -> np.ndarray:
        """The ids of what follows on a cut (see `cut`) in the middle of a document."""
        return self.encode(text[1:] if self._begins_with_space and text.startswith(" ") else text)

    def cut(self, data: bytes) -> int:
        """A place where a document may be cut; 0 where there is none."""
        return checked_cut(data, self.encode, self.encode_rest)


class JsonTokenizer(FileTokenizer):
    """A tokenizer.json; text that looks like a special token is ordinary text."""

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        super().__init__(path, entry)
        tokenizers = import_package("tokenizers", f"the tokenizer in {path.name}", "tokenizers", str(path))
        try:
            self._inner = tokenizers.Tokenizer.from_str(read_bytes(path, _MOST_BYTES).decode())
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"the library tokenizers cannot read this: {error}", where=str(path),
                            instead="pip install -U tokenizers if a newer version wrote it") from error
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True

    def _ids(self, text: str) -> list[int]:
        # Without offsets, which take the library as long again as the ids.
        return self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of `ids`, special tokens written out."""
        return self._inner.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


class ModelTokenizer(FileTokenizer):
    """A *.model of SentencePiece; control symbols in a text are ordinary text."""

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        super().__init__(path, entry)
        self._inner = _sentencepiece(path, read_bytes(path, _MOST_BYTES))
        try:
            self._ids("")
        except TypeError as error:
            raise UserError("the installed sentencepiece is too old: it gives no arrays of ids", where=str(path),
                            instead="pip install 'sentencepiece>=0.2.3'") from error

    def _ids(self, text: str) -> np.ndarray:
        return self._inner.encode(text, return_type="numpy")

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of `ids`; control symbols have none."""
        return self._inner.decode(np.asarray(ids).tolist())


def _sentencepiece(path: Path, content: bytes) -> Any:
    library = import_package("sentencepiece", f"the tokenizer in {path.name}", "sentencepiece", str(path))
    try:
        model = library.SentencePieceProcessor()
        model.LoadFromSerializedProto(content)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(f"SentencePiece cannot read this: {error}", where=str(path),
                        instead="a tokenizer.json, or a *.model of SentencePiece") from error
    return model
