"""The kinds of hostile input that are hostnames, options of other programs, mixtures, and token files."""

from __future__ import annotations

from pathlib import Path
from random import Random

import hostile_mutations as mutate
import numpy as np
from hostile_kinds import kind, written

_HOSTNAMES = ["n1", "n1.a.site.org", "N1.A.Site.Org.", "n1.b.site.org", "10.0.0.1", "localhost", "n" * 64,
              "xn--n1-8q", "n1-ib", "2001:db8::1"]


@kind
def hostnames(rng: Random, folder: Path) -> object:
    from ezpz_llm.launch.hostnames import match_names, node_keys, same_nodes

    def names() -> list[str]:
        whole = [rng.choice(_HOSTNAMES) for _ in range(rng.randrange(1, 40))] * rng.choice([1, 1, 1, 200])
        return [mutate.text(rng, name) if rng.random() < 0.3 else name for name in whole]

    return match_names(names(), names()), same_nodes(names(), names()), node_keys(names())


@kind
def synonyms(rng: Random, folder: Path) -> object:
    from ezpz_llm.base.synonyms import rows
    from ezpz_llm.trainer.options import parse

    option = rng.choice(rows()).option
    if rng.random() < 0.5:
        option = mutate.text(rng, option)
    spelled = rng.choice([option, f"{option}=3", option.replace("_", "-")])
    return parse([spelled, *rng.choice([[], ["3"], ["F", "--lr"]])])


@kind
def mixture(rng: Random, folder: Path) -> object:
    from ezpz_llm.data.corpora import find_corpus
    from ezpz_llm.data.mixture import find_mixture

    for name in ("a.txt", "b,c.txt", "d=e.txt"):
        written(folder, name, b"some text\n" * 9)
    words = mutate.text(rng, ",".join(f"{folder}/{name}={rng.choice([0.7, 1, 3])}" for name in
                                      rng.sample(["a.txt", "b,c.txt", "d=e.txt"], rng.randrange(1, 4))))
    parts = find_mixture(words)
    return [find_corpus(part) for part, _ in parts] if parts else find_corpus(words)


@kind
def tokenfiles(rng: Random, folder: Path) -> object:
    """nanoGPT's folder with tokens of any width and order, or a file of another program in place of one."""
    from ezpz_llm.data.prepare import check_corpus

    heads = [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", b"\x88\xd8\x34\x01", b"LITPKDS",
             b"MMIDIDX\0\0", b"PK\x03\x04", b"\x80\x04", b"\x1f\x8b", b"\x93NUMPY", b"ARROW1\0\0", b""]
    for name in ("train.bin", "val.bin"):
        width = rng.choice(["<u1", "<u2", "<u2", ">u2", "<u4", "<i8", "<f4"])
        tokens = np.array([rng.randrange(200) for _ in range(rng.randrange(2000))]).astype(width).tobytes()
        content = rng.choice(heads) + tokens if rng.random() < 0.5 else tokens
        written(folder / "tokens", name, mutate.binary(rng, content) if rng.random() < 0.5 else content)
    return check_corpus(str(folder / "tokens"), "gpt2", block_size=4)
