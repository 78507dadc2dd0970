"""The tokenizer that a model reads text with."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from ezpz_llm.data.manifest import MANIFEST
from ezpz_llm.data.shards import TokenData
from ezpz_llm.data.tokenizers import END_OF_TEXT, Tokenizer, from_entry, get_tokenizer
from ezpz_llm.errors import UserError
from ezpz_llm.hf.source import Source
from ezpz_llm.resources import user_path

FILE = "tokenizer.json"
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")


class FileTokenizer:
    """A tokenizer.json of Hugging Face's, which text that looks like a special token does not concern."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise UserError(f"reading {FILE} needs the package tokenizers", where=str(path),
                            instead="pip install 'ezpz_llm[hf]'") from error
        try:
            content = path.read_bytes()
            self._inner = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{FILE} cannot be read: {error}", where=str(path)) from error
        self.name = str(path)
        self.vocab_size = self._inner.get_vocab_size()
        ends = (self._inner.token_to_id(token) for token in _ENDS)
        self.end_of_text = next((found for found in ends if found is not None), None)
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self._inner.encode_special_tokens = True

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: np.ndarray) -> str:
        return self._inner.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def tokenizer_of(source: Source, given: str | None) -> Tokenizer:
    """The tokenizer named on the command line, or else the one that the model's data were made with.

    Args:
        given: bytes, gpt2, or a folder with token shards or a tokenizer.json.

    Raises:
        UserError: none is known, one of another vocabulary is given, or its file is not on this machine.
    """
    found = _given(given) if given is not None else _own(source)
    if found.vocab_size > source.model.padded_vocab_size:
        raise UserError(f"the tokenizer has {found.vocab_size} tokens, the model {source.model.vocab_size}",
                        where="--tokenizer", instead="the tokenizer that the model's data were made with")
    return found


def _given(given: str) -> Tokenizer:
    folder = user_path(given)
    if (folder / MANIFEST).is_file():
        return TokenData.open(folder).tokenizer
    if (folder / FILE).is_file():
        return FileTokenizer(folder / FILE)
    if given == "char":
        raise UserError("the tokenizer char has the characters of its corpus", where="--tokenizer",
                        instead="the folder with the corpus's token shards")
    return get_tokenizer(given)


def _own(source: Source) -> Tokenizer:
    if source.tokenizer is not None:
        return from_entry(source.tokenizer, str(source.folder))
    if (source.folder / FILE).is_file():
        return FileTokenizer(source.folder / FILE)
    raise UserError("the model does not say how text becomes its tokens", where=str(source.folder),
                    instead="--tokenizer gpt2, bytes, or a folder with token shards or a tokenizer.json")
