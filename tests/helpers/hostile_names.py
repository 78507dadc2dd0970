"""Kinds of hostile input: hostnames, options of other programs, mixtures, token files, and weights."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import hostile_mutations as mutate
import numpy as np
from hostile_kinds import kind, written

_HOSTNAMES = ["n1", "n1.a.site.org", "N1.A.Site.Org.", "n1.b.site.org", "10.0.0.1", "localhost", "n" * 64,
              "xn--n1-8q", "n1-ib", "2001:db8::1"]


@kind
def hostnames(rng: Random, folder: Path) -> object:
    from ezpz_llm.launcher.basics.hostnames import match_names, match_same_nodes, node_keys

    def names() -> list[str]:
        whole = [rng.choice(_HOSTNAMES) for _ in range(rng.randrange(1, 40))] * rng.choice([1, 1, 1, 200])
        return [mutate.text(rng, name) if rng.random() < 0.3 else name for name in whole]

    return match_names(names(), names()), match_same_nodes(names(), names()), node_keys(names())


@kind
def synonyms(rng: Random, folder: Path) -> object:
    from ezpz_llm.core.base.synonyms import rows
    from ezpz_llm.training.trainer.options import parse

    option = rng.choice(rows()).option
    if rng.random() < 0.5:
        option = mutate.text(rng, option)
    spelled = rng.choice([option, f"{option}=3", option.replace("_", "-")])
    return parse([spelled, *rng.choice([[], ["3"], ["F", "--lr"]])])


@kind
def mixture(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.data.corpora import find_corpus
    from ezpz_llm.training.data.mixture import find_mixture

    for name in ("a.txt", "b,c.txt", "d=e.txt"):
        written(folder, name, b"some text\n" * 9)
    words = mutate.text(rng, ",".join(f"{folder}/{name}={rng.choice([0.7, 1, 3])}" for name in
                                      rng.sample(["a.txt", "b,c.txt", "d=e.txt"], rng.randrange(1, 4))))
    parts = find_mixture(words)
    return [find_corpus(part) for part, _ in parts] if parts else find_corpus(words)


@kind
def tokenfiles(rng: Random, folder: Path) -> object:
    """Read nanoGPT's folder with tokens of any width and byte order, or with another program's file in it."""
    from ezpz_llm.training.data.prepare import check_corpus

    heads = [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", b"\x88\xd8\x34\x01", b"LITPKDS",
             b"MMIDIDX\0\0", b"PK\x03\x04", b"\x80\x04", b"\x1f\x8b", b"\x93NUMPY", b"ARROW1\0\0", b""]
    for name in ("train.bin", "val.bin"):
        width = rng.choice(["<u1", "<u2", "<u2", ">u2", "<u4", "<i8", "<f4"])
        tokens = np.array([rng.randrange(200) for _ in range(rng.randrange(2000))]).astype(width).tobytes()
        content = rng.choice(heads) + tokens if rng.random() < 0.5 else tokens
        written(folder / "tokens", name, mutate.binary(rng, content) if rng.random() < 0.5 else content)
    return check_corpus(str(folder / "tokens"), "gpt2", block_size=4)


@kind
def weights(rng: Random, folder: Path) -> object:
    """Read a folder of transformers weights, sharded or not, with damaged files, indexes, and names."""
    import torch
    from safetensors.torch import save

    from ezpz_llm.training.hf.config import stored_tensors, to_hf
    from ezpz_llm.training.hf.source import find_source
    from ezpz_llm.training.hf.weights import open_weights
    from ezpz_llm.training.model.config import get_model_config
    from ezpz_llm.training.model.parameters import parameter_shapes, whole_box

    model = get_model_config("tiny-llama", n_layer=1, n_head=2, n_kv_head=1, n_embd=8, vocab_size=20, block_size=8,
                             intermediate_size=12)
    tensors = {stored.name: torch.zeros(stored.shape) for stored in stored_tensors(model)}
    if rng.random() < 0.4:
        name = rng.choice(list(tensors))
        value = tensors.pop(name)
        others = [f"module.{name}", f"_orig_mod.{name}", f"{name}.lora_A", "lm_head.weight", "x" * 9000]
        tensors[rng.choice(others)] = value
    names = list(tensors)
    parts = [names] if rng.random() < 0.4 else [names[::2], names[1::2]]
    files = ["model.safetensors"] if len(parts) == 1 else ["model-00001-of-00002.safetensors",
                                                           "model-00002-of-00002.safetensors"]
    written(folder, "config.json", json.dumps(to_hf(model)).encode())
    for file, part in zip(files, parts, strict=True):
        content = save({name: tensors[name] for name in part})
        head = b"version https://git-lfs.github.com/spec/v1\n"
        written(folder, file, rng.choice([content, content, mutate.binary(rng, content), head]))
    if len(parts) > 1 or rng.random() < 0.3:
        index = {"metadata": {}, "weight_map": {name: file for file, part in zip(files, parts, strict=True)
                                                for name in part}}
        content = json.dumps(index).encode()
        written(folder, "model.safetensors.index.json",
                content if rng.random() < 0.4 else mutate.json_data(rng, index))
    if rng.random() < 0.1:
        written(folder, "adapter_config.json", b"{}")
    with open_weights(find_source(str(folder), "--init-from")) as opened:
        return [opened.read(name, whole_box(shape)).sum() for name, shape in parameter_shapes(model).items()]
