"""Files of a folder that may not be meant as training text: other splits, copies, backups, documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

_SPLITS = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
           "val": "validation", "dev": "validation", "test": "test", "testing": "test", "eval": "test",
           "evaluation": "test"}
"""The words that the library datasets looks for."""
_DATA = (".txt", ".json", ".jsonl", ".ndjson", ".parquet", ".tokens")
"""Only these names can have a split: a folder of programs may have a train.py and a test.py."""
_PACKED = (".gz", ".zst", ".zstd")
_BACKUP = re.compile(r".*(~|\.(bak|backup|orig|old|save|tmp|part|swp))|#.*#|Copy of .*|.* \(copy\).*|.* copy\..*")
_DOCUMENTATION = re.compile(r"(readme|licen[cs]e|copying|notice|authors|changelog|citation|contributing)([._-].*)?",
                            re.IGNORECASE)


def find_splits(names: Sequence[str]) -> dict[str, str]:
    """Return the split of each file that has one: "train", "validation" or "test".

    The split is the first or last word of the name without numbers, or the name of a folder. Without a training
    split, no file has one.

    Args:
        names: paths relative to the folder.
    """
    splits = {name: split for name in names if (split := _split_of(PurePosixPath(name))) is not None}
    return splits if "train" in splits.values() else {}


def _split_of(path: PurePosixPath) -> str | None:
    stem = _stem(path.name)
    if stem == _unpacked(path.name):
        return None
    words = [word for word in re.split(r"[^a-z]+", stem.lower()) if word and word != "of"]
    ends = [*words[:1], *words[-1:], *map(str.lower, path.parts[:-1])]
    return next((_SPLITS[word] for word in ends if word in _SPLITS), None)


def odd_files(names: Sequence[str]) -> Iterator[str]:
    """Yield each file that may not be meant as training text, with the reason."""
    known: dict[str, str] = {}
    for name in names:
        last = PurePosixPath(name).name
        if (first := known.setdefault(_stem(name), name)) != name:
            yield f"{name} (a copy of {first}?)"
        elif _BACKUP.fullmatch(last):
            yield f"{name} (a backup)"
        elif _DOCUMENTATION.fullmatch(last):
            yield f"{name} (documentation)"


def _unpacked(name: str) -> str:
    return next((name[:-len(end)] for end in _PACKED if name.lower().endswith(end)), name)


def _stem(name: str) -> str:
    """Return the name of a file without suffixes of compression and of data."""
    name = _unpacked(name)
    return next((name[:-len(end)] for end in _DATA if name.lower().endswith(end)), name)
