"""Kinds of hostile input: tokens of other programs, their manifests, and tokenizers."""

from __future__ import annotations

import functools
import io
import json
import struct
from pathlib import Path
from random import Random

import hostile_mutations as mutate
import numpy as np
from hostile_kinds import kind, written
from megatron_files import write_megatron


@kind
def megatron(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.data.prepare import check_corpus, prepare
    from ezpz_llm.training.data.shards import TokenData

    sequences = [np.arange(rng.randrange(1, 9)) for _ in range(6)]
    prefix = write_megatron(folder / "a", sequences, rng.choice(["uint8", "uint16", "int32", "int64"]))
    for ending in rng.choice([[".idx"], [".idx"], [".bin"], [".idx", ".bin"]]):
        path = prefix.with_suffix(ending)
        content = path.read_bytes()
        path.unlink()
        written(path.parent, path.name, mutate.binary(rng, content))
    check_corpus(str(prefix), "bytes", block_size=4)
    data = TokenData.open(prepare(str(prefix), "bytes", progress=False))
    return [data.split(name)[:] for name in ("train", "val")]


@kind
def npyshards(rng: Random, folder: Path) -> object:
    """Read .npy shards of build-nanogpt and nanoGPT with a damaged header, which numpy parses."""
    from ezpz_llm.training.data.prepare import prepare
    from ezpz_llm.training.data.shards import TokenData

    bad = rng.choice(["train", "val"])
    for name in ("train", "val"):
        array = io.BytesIO()
        np.save(array, np.arange(40, dtype=rng.choice(["<u2", "<u2", "<u4"])))
        whole = array.getvalue()
        if name == bad and rng.random() < 0.6:
            header = mutate.data(rng, whole[10:128].decode("latin-1"))[:65_535]
            whole = whole[:8] + struct.pack("<H", len(header)) + header + whole[128:]
        elif name == bad:
            whole = mutate.binary(rng, whole)
        written(folder / "shards", f"x_{name}_000000.npy", whole)
    data = TokenData.open(prepare(str(folder / "shards"), "bytes", progress=False))
    return [data.split(name)[:] for name in ("train", "val")]


_PATHS = ["", "\0", ".", "..", "/", "/dev/zero", "/proc/self/mem", "/proc/self/environ", "x" * 300, "a/" * 3000,
          "train.bin", "/srv/x", "~/x", "\ud800"]


@kind
def writtenby(rng: Random, folder: Path) -> object:
    """Read a manifest of another program's shards whose paths point anywhere."""
    from ezpz_llm.core.base.records import as_plain
    from ezpz_llm.training.data.document_lookup import find_extracts
    from ezpz_llm.training.data.manifest import sampled_hash, verify
    from ezpz_llm.training.data.shards import TokenData
    from ezpz_llm.training.data.tokenizers import get_tokenizer, to_entry

    prefix = write_megatron(folder / "tokens", [np.arange(20) for _ in range(10)], "uint16")
    tokens = prefix.with_suffix(".bin")
    shard = {"file": str(tokens), "tokens": 100, "offset": 0, "file_bytes": 400, "sha256": sampled_hash(tokens)}
    splits = {"train": {"tokens": 100, "shards": [shard]},
              "val": {"tokens": 100, "shards": [{**shard, "offset": 200}]}}
    whole = {"format": "ezpz_llm tokens 1", "request": "r", "command": "c", "written_by": "Megatron",
             "document_index": str(prefix.with_suffix(".idx")),
             "source": {"corpus": "x", "files": 1, "bytes": 400},
             "tokenizer": as_plain(to_entry(get_tokenizer("bytes"))),
             "vocab_size": 257, "end_of_text": 256, "dtype": "uint16", "documents": 10, "tokens": 200,
             "unigram_entropy": 1.0, "splits": splits}
    shard = rng.choice([split["shards"][0] for split in splits.values()])
    way = rng.randrange(6)
    if way == 0:
        shard["file"] = rng.choice([*_PATHS, str(folder), "manifest.json"])
    elif way == 1:
        shard[rng.choice(["file_bytes", "offset", "tokens"])] = rng.choice(
            [*mutate.VALUES, 1, 3, 199, 399, 401, 10**9, 10**15])
    elif way == 2:
        whole["document_index"] = rng.choice([*_PATHS, str(folder), str(tokens)])
    elif way == 3:
        whole["parts"] = [{"folder": rng.choice([*_PATHS, str(folder), str(folder)]),
                           "weight": rng.choice([0, 1, 1e-9, 1e12])}]
    elif way == 4:
        whole["written_by"] = rng.choice(["", "nanoGPT", "\x1b[31m", *mutate.VALUES])
    written(folder, "manifest.json", mutate.json_data(rng, whole) if way == 5 else json.dumps(whole).encode())
    data = TokenData.open(folder)
    streams = [data.split(name)[:4] for name in ("train", "val") if not data.parts]
    return streams, verify(folder), find_extracts(data, 8, 1, [0, 3])


@functools.cache
def _table() -> str:
    """Return a small tokenizer.json, as written by Hugging Face's tokenizers library."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.normalizer = tokenizers.normalizers.NFC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator(["some words, and some more words"] * 9, tokenizers.trainers.BpeTrainer(
        vocab_size=60, special_tokens=["<|endoftext|>"], show_progress=False))
    return made.to_str()


@kind
def tokenizer(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.data.prepare import prepare
    from ezpz_llm.training.data.tokenizers import choose_tokenizer

    config = {"eos_token": {"content": "<|endoftext|>"}, "tokenizer_class": "PreTrainedTokenizerFast"}
    bad = rng.choice(["table", "table", "table", "config"])
    table = json.loads(_table())
    if bad == "table" and rng.random() < 0.3:
        ids = rng.choice([table["model"]["vocab"], table["added_tokens"][0]])
        ids[rng.choice(["id", "s", "w"])] = rng.choice(
            [-1, 2**24 - 1, 2**24, 2**31, 2**32, 10**12, 10**18, 1.5, True, None])
        content = json.dumps(table).encode()
    else:
        content = mutate.json_data(rng, table) if bad == "table" else json.dumps(table).encode()
    written(folder / "model", "tokenizer.json", content)
    written(folder / "model", "tokenizer_config.json",
            mutate.json_data(rng, config) if bad == "config" else json.dumps(config).encode())
    made = choose_tokenizer(str(folder / "model")).load()
    made.decode(made.encode("some words\ud800 ñ²٣<|endoftext|>"))
    prefix = write_megatron(folder / "tokens", [np.arange(9)], "uint16")
    return prepare(str(prefix), str(folder / "model"), progress=False)
