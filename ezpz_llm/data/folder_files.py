"""Files of a folder that may not be meant as training text: other splits, copies, backups, documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

_SPLITS = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
           "val": "validation", "dev": "validation", "test": "test"}
_DATA = (".txt", ".json", ".jsonl", ".ndjson", ".parquet", ".tokens")
"""Only these names can have a split: a folder of programs may have a train.py and a test.py."""
_PACKED = (".gz", ".zst", ".zstd")
_BACKUP = re.compile(r".*(~|\.(bak|backup|orig|old|save|tmp|part|swp))|#.*#|Copy of .*|.* \(copy\).*|.* copy\..*")
_DOCUMENTATION = re.compile(r"(readme|licen[cs]e|copying|notice|authors|changelog|citation|contributing)([._-].*)?",
                            re.IGNORECASE)


def find_splits(names: Sequence[str]) -> dict[str, str]:
    """Return the split of each file that has one: "train", "validation" or "test".

    The split is the first or last word of the name without numbers, or the name of the first folder. Without a
    training split, no file has one.

    Args:
        names: paths relative to the folder.
    """
    splits = {name: split for name in names if (split := _split_of(PurePosixPath(name))) is not None}
    return splits if "train" in splits.values() else {}


def _split_of(path: PurePosixPath) -> str | None:
    name = _unpacked(path.name)
    stem, dot, suffix = name.rpartition(".")
    if f"{dot}{suffix}".lower() not in _DATA:
        return None
    words = [word for word in re.split(r"[^a-z]+", stem.lower()) if word and word != "of"]
    ends = [*words[:1], *words[-1:]] if len(path.parts) == 1 else [*words[:1], *words[-1:], path.parts[0].lower()]
    return next((_SPLITS[word] for word in ends if word in _SPLITS), None)


def odd_files(names: Sequence[str]) -> Iterator[str]:
    """Yield each file that may not be meant as training text, with the reason."""
    known = set(names)
    for name in names:
        last = PurePosixPath(name).name
        if (plain := _unpacked(name)) != name and plain in known:
            yield f"{name} (a copy of {plain})"
        elif _BACKUP.fullmatch(last):
            yield f"{name} (a backup)"
        elif _DOCUMENTATION.fullmatch(last):
            yield f"{name} (documentation)"


def _unpacked(name: str) -> str:
    return next((name.removesuffix(end) for end in _PACKED if name.lower().endswith(end)), name)
