"""Parse mixtures of corpora, `--corpus A=0.7,B=0.3`, and suggest corrections of invalid ones."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

from ezpz_llm.core.base import UserError, user_path
from ezpz_llm.training.data.corpora import CORPORA
from ezpz_llm.training.data.hub import HUB_PREFIX, find_dataset
from ezpz_llm.training.data.shards import samples_per_block

_WEIGHT = r"(?P<weight>\d*\.?\d+(?:[eE]-?\d+)?%?)"
_WEIGHT_FIRST = re.compile(_WEIGHT + r"\s*[\s:*@=]\s*(?P<corpus>.+)")
_WEIGHT_LAST = re.compile(r"(?P<corpus>.+?)\s*[\s:*@=(]\s*" + _WEIGHT + r"\)?")
_MAX_COMMAS = 8
"""Maximum number of commas in one path."""


@dataclass(frozen=True)
class _Part:
    """Part of a mixture as typed; `weight` is None if missing."""

    corpus: str
    weight: str | None

    @property
    def number(self) -> float | None:
        """Weight as a number; None if missing or not a number above 0."""
        try:
            number = float(self.weight or "")
        except ValueError:
            return None
        return number if 0 < number < math.inf else None

    @property
    def problem(self) -> str | None:
        """Error message for this part; None if it is valid."""
        if not self.corpus:
            return "a part has no name; is there an extra comma?" if self.weight is None else (
                f"the weight {self.weight} has no corpus before it")
        if self.weight is None:
            return f"{self.corpus} has no weight"
        if self.number is None:
            return f"the weight of {self.corpus} is {self.weight!r}, not a number above 0"
        return None


def find_mixture(words: str) -> list[tuple[str, float]] | None:
    """Return two or more corpora and their weights; None if `words` names a single corpus.

    A comma belongs to a path if the path with the comma exists.

    Raises:
        UserError: a corpus is listed twice, a single corpus has a weight, or a weight is missing, not a number, or
            too small.
    """
    if os.path.exists(words):  # also False for names that are too long
        return None
    if others := _other_notation(words):
        raise UserError("this is a mixture in the notation of another program", where=f"--corpus {words}",
                        instead=_advice(others))
    if not {",", "="} & set(words):
        return None
    parts = _split(words)
    if not any(part.number is not None or _exists(part.corpus) for part in parts):
        return None
    if len(parts) == 1:
        if parts[0].weight is None or not _exists(parts[0].corpus):
            return None  # a path with a comma or an equals sign
        raise UserError("a single corpus cannot have a weight", where=f"--corpus {words}",
                        instead=f"--corpus {parts[0].corpus}, or several as A=0.7,B=0.3")
    if problems := [part.problem for part in parts if part.problem]:
        raise UserError("; ".join(dict.fromkeys(problems)), where=f"--corpus {words}", instead=_advice(parts))
    names = [canonical_corpus(part.corpus) for part in parts]
    for part, name in zip(parts, names, strict=True):
        if names.count(name) > 1:
            raise UserError(f"{part.corpus} is given more than once", where=f"--corpus {words}",
                            instead="list each corpus once")
    weights = [part.number or 0.0 for part in parts]
    samples_per_block([part.corpus for part in parts], weights)
    return [(part.corpus, weight) for part, weight in zip(parts, weights, strict=True)]


def _other_notation(words: str) -> list[_Part]:
    """Return the parts of a mixture like "0.7 A 0.3 B" (Megatron), "A:70%,B:30%" or "0.7*A + 0.3*B".

    Returns an empty list for other words.
    """
    if all(_exists(part.corpus) and not (part.weight or "").endswith("%") for part in _split(words)):
        return []
    plain = re.sub(r"[{}\[\]\"']", "", words).strip()
    for separator in (r"\s*[,;]\s*", r"\s*\+\s*", r"\s+"):
        pieces = re.split(separator, plain)
        pairs = [" ".join(pieces[index:index + 2]) for index in range(0, len(pieces), 2)]
        for texts in (pairs, pieces):
            parts = [_parse_other_part(text) for text in texts]
            if all(parts):
                return [part for part in parts if part]
    return []


def _parse_other_part(text: str) -> _Part | None:
    for pattern in (_WEIGHT_FIRST, _WEIGHT_LAST):
        match = pattern.fullmatch(text)
        if match and _exists(match["corpus"]) and not match["corpus"].startswith(HUB_PREFIX):
            weight = match["weight"]
            return _Part(match["corpus"], str(float(weight[:-1]) / 100) if weight.endswith("%") else weight)
    return _Part(text, None) if _exists(text) and not text.startswith(HUB_PREFIX) else None


def absolute_corpus(words: str) -> str:
    """Return a corpus or mixture with absolute paths instead of relative ones."""
    if parts := find_mixture(words):
        return ",".join(f"{absolute_corpus(corpus)}={weight!r}" for corpus, weight in parts)
    if words in CORPORA:
        return words
    dataset = find_dataset(words)
    return str(user_path(words).absolute()) if dataset is None else dataset.words


def canonical_corpus(corpus: str) -> str:
    """Return a canonical spelling of a single corpus."""
    if corpus in CORPORA or corpus.startswith(HUB_PREFIX):
        return corpus
    try:
        return str(user_path(corpus).resolve())
    except UnicodeEncodeError:  # no file can have this name; opening it reports that
        return corpus


def _exists(corpus: str) -> bool:
    """Return True for a known name or an existing path, including Megatron's X for X.bin and X.idx."""
    if corpus in CORPORA or corpus.startswith(HUB_PREFIX):
        return True
    return bool(corpus) and any(os.path.exists(user_path(name)) for name in (corpus, f"{corpus}.idx"))


def _split(text: str) -> list[_Part]:
    pieces = text.split(",")
    parts = []
    while pieces:
        # Use the longest existing path, or else everything up to the next comma.
        sizes = range(min(_MAX_COMMAS, len(pieces)), 0, -1)
        candidates = [(size, _parse_part(",".join(pieces[:size]).strip())) for size in sizes]
        size, part = next(((size, part) for size, part in candidates
                           if _exists(part.corpus) and "," not in (part.weight or "")), candidates[-1])
        parts.append(part)
        del pieces[:size]
    return parts


def _parse_part(text: str) -> _Part:
    corpus, equals, weight = text.rpartition("=")
    if not equals or (not _exists(corpus.strip()) and _exists(text)):
        return _Part(text, None)
    return _Part(corpus.strip(), weight.strip())


def _advice(parts: list[_Part]) -> str:
    """Return the mixture with weights filled in for the parts without one, as advice."""
    named = [part for part in parts if part.corpus]
    weights = [part.number for part in named if part.number is not None]
    missing = len(named) - len(weights)
    default = (1 - sum(weights)) / missing if missing and sum(weights) < 1 else 1
    if len(named) < 2:
        return "--corpus " + "".join(f"{part.corpus}, or several as " for part in named) + "A=0.7,B=0.3"
    fixed = ",".join(f"{part.corpus}={default if part.number is None else part.number:.4g}" for part in named)
    unknown = [part.corpus for part in named if part.number is None and not _exists(part.corpus)]
    link = f"; if {unknown[0]} is part of a path with a comma, create a link: ln -s PATH NAME" if unknown else ""
    return f"--corpus {fixed}{link}"
