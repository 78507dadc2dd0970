"""`--corpus A=0.7,B=0.3`: a folder of the cache whose manifest names the parts and their weights."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.base.errors import UserError
from ezpz_llm.data.corpora import cached_folder
from ezpz_llm.data.manifest import COUNTS, FORMAT, MANIFEST
from ezpz_llm.data.order import BLOCK, shares
from ezpz_llm.data.shards import TokenData
from ezpz_llm.data.tokenize_corpus import entropy
from ezpz_llm.rundir import write_json

_PART = re.compile(r"(?P<corpus>.+)=(?P<weight>[0-9.]+(e-?[0-9]+)?)")


def find_mixture(words: str) -> list[tuple[str, float]] | None:
    """The corpora and weights that `words` name, two or more; None if they name a single corpus.

    Raises:
        UserError: a corpus is named twice, or a weight is too small.
    """
    if "," not in words or os.path.exists(words):  # also False for what is too long for a path
        return None
    matches = [_PART.fullmatch(part.strip()) for part in words.split(",")]
    if not all(matches):
        return None
    try:
        found = [(match["corpus"], float(match["weight"])) for match in matches if match]
    except ValueError as error:
        raise UserError(f"a weight is not a number: {error}", where=words, instead="such as A=0.7,B=0.3") from error
    names = [name for name, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name} is mixed with itself", where=words, instead="name each corpus once")
    shares(names, [weight for _, weight in found])
    return found


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
        try:
            counts = np.load(data.folder / COUNTS)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"the counts of its tokens cannot be read: {error}", where=str(data.folder / COUNTS),
                            instead="remove the folder, and prepare it again") from error
        histogram += counts / counts.sum() * count / BLOCK
    first = opened[0].manifest

    def total(*keys: str) -> int:
        values: list[Any] = [data.manifest for data in opened]
        for key in keys:
            values = [value[key] for value in values]
        return sum(values)

    write_json(folder / MANIFEST, {
        "format": FORMAT,
        "request": fingerprint,
        "command": shlex.join(["python3", "-m", "ezpz_llm.data", "prepare", words]),
        "source": {"corpus": words, "files": total("source", "files"), "bytes": total("source", "bytes")},
        "parts": [{"folder": str(part), "weight": weight} for part, weight in parts],
        **{key: first[key] for key in ("tokenizer", "vocab_size", "end_of_text", "dtype")},
        "documents": total("documents"),
        "tokens": total("tokens"),
        "unigram_entropy": entropy(histogram),
        "splits": {name: {"tokens": total("splits", name, "tokens"), "shards": []} for name in first["splits"]},
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
