"""Which tokenizer `--tokenizer` names: one of ours by its name, or the one that a folder belongs to.

A folder is one with token shards, a checkpoint, or one with a tokenizer.json (of Hugging Face's tokenizers library)
that gives the ids of a tokenizer of ours. Any other tokenizer.json is named and refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base.outside import read_json
from ezpz_llm.base.schema import as_type
from ezpz_llm.data.manifest import MANIFEST, TokenizerEntry
from ezpz_llm.data.tokenizers import (
    END_OF_TEXT,
    GPT2_FINGERPRINT,
    TOKENIZERS,
    CharTokenizer,
    Tokenizer,
    byte_alphabet,
    from_entry,
    get_tokenizer,
    gpt2_fingerprint,
    read_merges,
    to_entry,
)
from ezpz_llm.errors import UserError, unknown
from ezpz_llm.resources import user_path

TOKENIZER_JSON = "tokenizer.json"
_STATE = "state.json"
_OTHER_FILES = {"tokenizer.model": "SentencePiece (tokenizer.model)", "vocab.txt": "WordPiece (vocab.txt)",
                "merges.txt": "BPE (vocab.json and merges.txt, without a tokenizer.json)",
                "tekken.json": "Tekken (tekken.json)"}
_MOST_BYTES = 256 << 20
"""Of a tokenizer.json: the largest known has 33 MB."""
_SUPPORTED = "bytes, char and gpt2"


@dataclass(frozen=True)
class Choice:
    """A tokenizer that was asked for.

    Attributes:
        name: "bytes", "char" or "gpt2".
        words: how a command names it: the name, or an absolute folder.
        entry: what a manifest would keep of it; None where only the name is given, so that any table of it will do.
    """

    name: str
    words: str
    entry: Mapping[str, Any] | None = None

    @property
    def table(self) -> str | None:
        """The characters of "char", where they are given."""
        return None if self.entry is None else self.entry.get("table")

    def fits(self, entry: Mapping[str, Any]) -> bool:
        """Whether tokens of the tokenizer `entry` are tokens of this one."""
        return self.name == entry["name"] and (self.entry is None
                                               or self.entry["fingerprint"] == entry["fingerprint"])

    def describe(self) -> str:
        return describe(self.entry) if self.entry is not None else self.name

    def make(self) -> Tokenizer:
        """The tokenizer; "char" without a table has no characters."""
        return get_tokenizer(self.name) if self.entry is None else from_entry(self.entry, self.words)


def describe(entry: Mapping[str, Any]) -> str:
    """A tokenizer's name and the beginning of its fingerprint; of "char" the number of characters, too."""
    size = f"{len(entry['table'])} characters, " if "table" in entry else ""
    return f"{entry['name']} ({size}fingerprint {entry['fingerprint'][:12]})"


def choose(words: str) -> Choice:
    """The tokenizer that `words` name.

    Raises:
        UserError: neither a name nor a folder, or a folder whose tokenizer is not known or not supported.
    """
    if words in TOKENIZERS:
        return Choice(words, words)
    folder = user_path(words).absolute()
    if not os.path.isdir(folder):
        raise unknown("tokenizer", words, TOKENIZERS, where="--tokenizer, which also takes a folder with token "
                                                            "shards, a checkpoint or a tokenizer.json")
    entry = entry_in(folder)
    if entry is None:
        other = other_in(folder)
        raise UserError(f"its tokenizer is {other}; text can be encoded with {_SUPPORTED} only" if other else
                        "the folder says nothing of a tokenizer", where=f"--tokenizer {folder}",
                        instead="a folder with token shards, a checkpoint, or a tokenizer.json of GPT-2's"
                                if other is None else f"a model whose tokenizer is one of {_SUPPORTED}")
    return Choice(entry["name"], str(folder) if "table" in entry else entry["name"], entry)


def entry_in(folder: Path) -> Mapping[str, Any] | None:
    """The manifest entry of the tokenizer that a folder belongs to; None if it is not one of ours."""
    for name in (_STATE, MANIFEST):
        found = _json(folder / name).get("tokenizer")
        if isinstance(found, dict) and {"name", "fingerprint"} <= found.keys():
            return as_type(TokenizerEntry, found, str(folder / name), "tokenizer")
    return recognise(_json(folder / TOKENIZER_JSON))


def other_in(folder: Path) -> str | None:
    """What the tokenizer of a model's folder is called, where it is not one of ours; None if nothing tells."""
    if (folder / TOKENIZER_JSON).is_file():
        model = _json(folder / TOKENIZER_JSON).get("model")
        model = model if isinstance(model, dict) else {}
        size = f", {len(model['vocab']):,} tokens" if isinstance(model.get("vocab"), (dict, list)) else ""
        name = _json(folder / "tokenizer_config.json").get("tokenizer_class", TOKENIZER_JSON)
        return f"{name} ({model.get('type', 'of no known kind')}{size})"
    return next((name for file, name in _OTHER_FILES.items() if (folder / file).is_file()), None)


def recognise(stored: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest entry of the tokenizer of ours that gives the ids of a tokenizer.json; None if none does.

    Needs no file of the tokenizer's: the whole table is in `stored`, whose fingerprint is compared.
    """
    try:
        return _recognise(stored)
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


def _recognise(stored: Mapping[str, Any]) -> dict[str, Any] | None:
    model, added = stored["model"], stored.get("added_tokens") or []
    changes = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
               "ignore_merges")
    # Special tokens are none of a text's; others that are added would be.
    if (model.get("type", "BPE") != "BPE" or stored.get("normalizer") is not None
            or any(model.get(name) for name in changes) or not all(token["special"] for token in added)):
        return None
    vocabulary = dict(model["vocab"])
    end = vocabulary.pop(END_OF_TEXT, None)
    end = next((token["id"] for token in added if token["content"] == END_OF_TEXT), end)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    pieces = stored.get("pre_tokenizer")
    if pieces is None:
        characters = sorted(vocabulary)
        if merges or end is not None or [vocabulary[one] for one in characters] != list(range(len(characters))):
            return None
        return to_entry(CharTokenizer("".join(characters))) if {*map(len, characters)} == {1} else None
    if pieces["type"] != "ByteLevel" or pieces.get("add_prefix_space", True) or end != len(vocabulary):
        return None
    byte_of = {character: value for value, character in byte_alphabet().items()}
    ranks = {bytes(byte_of[character] for character in token): rank for token, rank in vocabulary.items()}
    if not pieces.get("use_regex", True):
        return to_entry(get_tokenizer("bytes")) if ranks == {bytes([n]): n for n in range(256)} else None
    if ranks != read_merges("\n".join(["", *merges])) or gpt2_fingerprint(ranks) != GPT2_FINGERPRINT:
        return None
    return {"name": "gpt2", "fingerprint": GPT2_FINGERPRINT}


def _json(path: Path) -> dict[str, Any]:
    """An object in a file; empty where there is none."""
    try:
        found = read_json(path, _MOST_BYTES)
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}
