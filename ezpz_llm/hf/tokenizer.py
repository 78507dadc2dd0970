"""The tokenizer of an exported model, in the format of Hugging Face's tokenizers library (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ezpz_llm.data.tokenizers import END_OF_TEXT, GPT2_VOCAB, byte_alphabet
from ezpz_llm.errors import UserError
from ezpz_llm.rundir import write_json

# tokenizers' schema, which every version of its 0.x reads.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_BPE = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}


def write_tokenizer(entry: Mapping[str, Any] | None, block_size: int,
                    folder: Path) -> tuple[int | None, str | None]:
    """Write tokenizer.json and tokenizer_config.json, which AutoTokenizer loads.

    Unlike ours, Hugging Face's reads the text of the end-of-text token as that token.

    Args:
        entry: what a run's shards keep of their tokenizer.
        block_size: the model's longest context.

    Returns:
        The id of the end-of-text token, None where there is none; and why nothing was written, None if it was.
    """
    if entry is None:
        return None, "the checkpoint does not say with which tokenizer its data were made"
    try:
        made = {"bytes": _bytes, "char": _characters, "gpt2": _gpt2}[entry["name"]](entry)
    except KeyError:
        return None, f"a tokenizer {entry['name']} has no form there"
    except UserError as error:
        return None, error.found
    end_of_text = next((token["id"] for token in made["added_tokens"]), None)
    write_json(folder / "tokenizer.json", {"version": "1.0", "truncation": None, "padding": None,
                                           "normalizer": None, "post_processor": None, **made})
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
        **(dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT) if end_of_text is not None else {})})
    return end_of_text, None


def _gpt2(entry: Mapping[str, Any]) -> dict[str, Any]:
    merges = [line for line in GPT2_VOCAB.find().read_text("utf-8").split("\n")[1:] if line]
    alphabet = byte_alphabet()
    # The ranks of vocab.bpe: the bytes in the alphabet's order, then one a merge.
    tokens = [*alphabet.values(), *(line.replace(" ", "") for line in merges)]
    return _byte_level({token: rank for rank, token in enumerate(tokens)}, merges, use_regex=True)


def _bytes(entry: Mapping[str, Any]) -> dict[str, Any]:
    alphabet = byte_alphabet()
    return _byte_level({alphabet[value]: value for value in range(256)}, [], use_regex=False)


def _byte_level(vocabulary: dict[str, int], merges: list[str], use_regex: bool) -> dict[str, Any]:
    end = {"id": len(vocabulary), "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False, "special": True}
    return {"added_tokens": [end], "pre_tokenizer": {**_BYTE_LEVEL, "use_regex": use_regex},
            "decoder": {**_BYTE_LEVEL, "use_regex": True},
            "model": {**_BPE, "vocab": vocabulary, "merges": merges}}


def _characters(entry: Mapping[str, Any]) -> dict[str, Any]:
    vocabulary = {character: number for number, character in enumerate(entry["table"])}
    return {"added_tokens": [], "pre_tokenizer": None, "decoder": {"type": "Fuse"},
            "model": {**_BPE, "vocab": vocabulary, "merges": []}}
