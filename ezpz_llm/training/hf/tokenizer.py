"""Tokenizers of weights: their own, one chosen by the user, and the files of an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, user_path
from ezpz_llm.core.rundir import RunDir, write_json
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.data.corpora import prepared_folder
from ezpz_llm.training.data.manifest import MANIFEST, TokenizerEntry, read_manifest
from ezpz_llm.training.data.mixture import find_mixture
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.tokenizer_files import COMPANIONS, copy_files, find_copy, find_file, load
from ezpz_llm.training.data.tokenizers import (
    END_OF_TEXT,
    GPT2_VOCAB,
    Tokenizer,
    byte_alphabet,
    choose_tokenizer,
    describe,
    find_entry,
    find_unsupported_tokenizer,
    from_entry,
    get_tokenizer,
    to_entry,
    tokenizer_argument,
)
from ezpz_llm.training.hf.source import Source
from ezpz_llm.training.model.config import ModelConfig


def entry_of(source: Source) -> TokenizerEntry | None:
    """Return the manifest entry of the weights' tokenizer; None if it is unknown or unsupported."""
    return find_entry(source.folder) if source.tokenizer is None else source.tokenizer


def tokenizer_argument_for(source: Source, given: str | None, corpus: str, asked: bool) -> str:
    """Return the tokenizer to use with these weights on a corpus, as an argument of `prepare`.

    It is the weights' own tokenizer, unless the user chose another one; `tokenizer_mismatch` warns about it.

    Args:
        given: tokenizer from the options; None for none.
        asked: True if the user chose `given`, False if a preset did.

    Raises:
        UserError: the weights' tokenizer is unknown or unsupported, or differs from `given` or from the tokenizer
            of a prepared corpus.
    """
    own, choice = entry_of(source), None if given is None else choose_tokenizer(given)
    if own is None:
        other = find_unsupported_tokenizer(source.folder)
        if choice is not None and (asked or other is None):
            return choice.words
        if other is None:
            raise UserError("the tokenizer of the weights is unknown", where=str(source.folder),
                            instead="--tokenizer gpt2 for GPT-2's, bytes, or the folder of their tokenizer")
        raise UserError(f"the weights' tokenizer is {other}, which is not supported", where=str(source.folder),
                        instead="weights that have a tokenizer.json or a tokenizer.model")
    # A name such as char means the weights' own tokenizer of that name.
    if choice is not None and not choice.fits(own):
        if asked:
            return choice.words
        raise _mismatch(source, own, choice.describe(), "--tokenizer")
    for part, _ in find_mixture(corpus) or [(corpus, 1.0)]:
        folder = prepared_folder(corpus=part)
        of_corpus = None if folder is None else read_manifest(folder).tokenizer
        if of_corpus is not None and not own.has_same_ids(of_corpus):
            raise _mismatch(source, own, describe(of_corpus), str(folder))
    return tokenizer_argument(own, source.folder)


def _mismatch(source: Source, own: TokenizerEntry, of_corpus: str, where: str) -> UserError:
    return UserError(f"the weights' tokenizer is {describe(own)}, the corpus's is {of_corpus}: the same ids mean "
                     "different text", where=f"{where}, and {source.folder}",
                     instead=f"prepare it with --tokenizer {tokenizer_argument(own, source.folder)}, or pass the "
                             "text itself as --corpus; to train the weights on other tokens, pass the corpus's "
                             "--tokenizer")


def tokenizer_mismatch(source: Source, used: TokenizerEntry) -> str | None:
    """Return a warning if tokens were not made with the weights' own tokenizer.

    Args:
        used: manifest entry of the tokenizer that made the tokens.
    """
    own = entry_of(source)
    if own is not None and own.has_same_ids(used):
        return None
    name = describe(own) if own is not None else find_unsupported_tokenizer(source.folder)
    if name is None:
        return None
    return f"the weights' tokenizer is {name}, but --tokenizer chose {describe(used)} for these tokens"


def tokenizer_warning(source: Source, given: str | None) -> str | None:
    """Return a warning if the tokenizer given on the command line is not the weights' own."""
    if given is None or given == "char":
        return None
    path = user_path(given)
    used = find_entry(path) if path.exists() else to_entry(get_tokenizer(given))
    return None if used is None else tokenizer_mismatch(source, used)


def tokenizer_of(source: Source, given: str | None) -> Tokenizer:
    """Return the tokenizer given on the command line, or else the one that made the model's data.

    Args:
        given: bytes, gpt2, or a file or folder with a tokenizer.

    Raises:
        UserError: no tokenizer is known, its vocabulary is too large, or its file is not on this machine.
    """
    tokenizer = _given_tokenizer(given, source) if given is not None else _own_tokenizer(source)
    check_vocabulary(tokenizer.vocab_size, source.model)
    return tokenizer


def encodes_special_tokens(source: Source) -> bool:
    """Return True if special tokens in a prompt are tokens, not ordinary text, as in the model's training data.

    transformers encodes them as tokens.
    """
    if source.kind != "checkpoint":
        return True
    data = read_record(RunDir(source.folder.parent.parent)).data
    return data is not None and data.source.get("encodes_special_tokens") is True


def check_vocabulary(tokens: int, model: ModelConfig) -> None:
    """Check that the model's vocabulary, without padding, is at least as large as the tokenizer's.

    The padding rows of the embedding belong to no token.

    Raises:
        UserError: the tokenizer has more tokens.
    """
    if tokens > model.vocab_size:
        raise UserError(f"the tokenizer has {tokens} tokens, the model {model.vocab_size}", where="--tokenizer",
                        instead="the tokenizer that made the model's data")


def _given_tokenizer(given: str, source: Source) -> Tokenizer:
    path = user_path(given)
    if (path / MANIFEST).is_file():
        return TokenData.open(path).tokenizer
    if file := find_file(path):
        return load(file)
    if given == "char":
        own = entry_of(source)
        if own is not None and own.name == given:
            return from_entry(own, str(source.folder))
        raise UserError("the tokenizer char depends on its corpus", where="--tokenizer",
                        instead="the folder with the corpus's token shards")
    return choose_tokenizer(given).load()


def _own_tokenizer(source: Source) -> Tokenizer:
    if source.tokenizer is not None:
        return from_entry(source.tokenizer, str(source.folder), source.folder)
    if file := find_file(source.folder):
        return load(file)
    raise UserError("the tokenizer of the model is unknown", where=str(source.folder),
                    instead="--tokenizer gpt2, bytes, a tokenizer.json, a SentencePiece *.model, or a folder "
                            "with one of these or with token shards")


# Schema of Hugging Face's tokenizers library, which every 0.x version reads.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_BPE = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}


def write_tokenizer(entry: TokenizerEntry | None, block_size: int, folder: Path,
                    origin: Path | None = None) -> tuple[int | None, str | None]:
    """Write tokenizer.json, or tokenizer.model, and tokenizer_config.json, which AutoTokenizer loads.

    Files of other libraries are copied unchanged. Unlike ours, Hugging Face's tokenizer encodes the text of the
    end-of-text token as that token.

    Args:
        entry: the tokenizer's entry in the manifest of the run's token shards.
        block_size: context length of the model.
        origin: folder of the weights, in which to look for files of other libraries.

    Returns:
        The id of the end-of-text token, if any; and the reason if nothing was written, else None.
    """
    if entry is None:
        return None, "the checkpoint does not say which tokenizer made its data"
    if entry.kind is not None:
        return _copy(entry, block_size, folder, origin or folder)
    try:
        fields = {"bytes": _bytes, "char": _characters, "gpt2": _gpt2}[entry.name](entry)
    except KeyError:
        return None, f"Hugging Face has no equivalent of the tokenizer {entry.name}"
    except UserError as error:
        return None, error.found
    end_of_text = next((token["id"] for token in fields["added_tokens"]), None)
    write_json(folder / "tokenizer.json", {"version": "1.0", "truncation": None, "padding": None,
                                           "normalizer": None, "post_processor": None, **fields})
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
        **(dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT) if end_of_text is not None else {})})
    return end_of_text, None


def _copy(entry: TokenizerEntry, block_size: int, folder: Path,
          origin: Path) -> tuple[int | None, str | None]:
    try:
        file = find_file(origin) or find_copy(origin, entry)
        tokenizer = load(file, entry)
    except UserError as error:
        return None, f"{error.found} ({error.instead})"
    copy_files(file, folder)
    # Do not guess a class of transformers for a *.model without configuration: its classes give different ids.
    if entry.kind == "tokenizers" and not (folder / COMPANIONS[0]).is_file():
        end = {} if tokenizer.end_of_text is None else {"eos_token": tokenizer.decode([tokenizer.end_of_text])}
        write_json(folder / COMPANIONS[0], {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size,
            "clean_up_tokenization_spaces": False, **end})
    return tokenizer.end_of_text, None


def _gpt2(entry: TokenizerEntry) -> dict[str, Any]:
    merges = [line for line in GPT2_VOCAB.find().read_text("utf-8").split("\n")[1:] if line]
    alphabet = byte_alphabet()
    # Ids of vocab.bpe: the bytes in the alphabet's order, then one per merge.
    tokens = [*alphabet.values(), *(line.replace(" ", "") for line in merges)]
    return _byte_level({token: rank for rank, token in enumerate(tokens)}, merges, use_regex=True)


def _bytes(entry: TokenizerEntry) -> dict[str, Any]:
    alphabet = byte_alphabet()
    return _byte_level({alphabet[value]: value for value in range(256)}, [], use_regex=False)


def _byte_level(vocabulary: dict[str, int], merges: list[str], use_regex: bool) -> dict[str, Any]:
    end = {"id": len(vocabulary), "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False, "special": True}
    return {"added_tokens": [end], "pre_tokenizer": {**_BYTE_LEVEL, "use_regex": use_regex},
            "decoder": {**_BYTE_LEVEL, "use_regex": True},
            "model": {**_BPE, "vocab": vocabulary, "merges": merges}}


def _characters(entry: TokenizerEntry) -> dict[str, Any]:
    vocabulary = {character: number for number, character in enumerate(entry.table or "")}
    return {"added_tokens": [], "pre_tokenizer": None, "decoder": {"type": "Fuse"},
            "model": {**_BPE, "vocab": vocabulary, "merges": []}}
