"""Programs by name, and the work on which they are compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Program:
    """A program of the comparison.

    Attributes:
        module: module of this package that runs the program.
        changes: fields of its Task that differ from the defaults.
        peer: name of the required checkout of another project.
        package: required package from PyPI.
        differs: differences between its work and that of the other programs.
    """

    module: str
    changes: dict[str, Any] = field(default_factory=dict)
    peer: str | None = None
    package: str | None = None
    differs: str = ""


_TWO = {"ranks": 2, "threads": 1}
_COMPILED = {"compile": True}
_FP32 = {"precision": "fp32"}
_HF = "its labels are its inputs, so that a window has one prediction fewer"
_NANOGPT = "fp32 is all that it has on a CPU; GELU is the exact one"
_PICOTRON = ("SwiGLU of 8/3 C, RMSNorm, rotary positions, no biases, a head that is not tied; neither clipping, "
             "nor warm-up, nor decay groups")

PROGRAMS: dict[str, Program] = {
    "ours": Program("ours"),
    "ours-compiled": Program("ours", _COMPILED),
    "ours-1-thread": Program("ours", {"threads": 1}),
    "ours-ddp-2": Program("ours", _TWO),
    "ours-zero1-2": Program("ours", {**_TWO, "layout": "zero1"}),
    "ours-zero2-2": Program("ours", {**_TWO, "layout": "zero2"}),
    "ours-zero3-2": Program("ours", {**_TWO, "layout": "zero3"}),
    "plain-fp32": Program("plain", _FP32),
    "plain-bf16": Program("plain"),
    "plain-bf16-compiled": Program("plain", _COMPILED),
    "plain-bf16-ddp-2": Program("plain", _TWO),
    "hf-bf16": Program("hf", package="transformers", differs=_HF),
    "hf-bf16-compiled": Program("hf", _COMPILED, package="transformers", differs=_HF),
    "nanogpt": Program("nanogpt", _FP32, peer="nanogpt", differs=_NANOGPT),
    "nanogpt-compiled": Program("nanogpt", {**_FP32, **_COMPILED}, peer="nanogpt",
                                differs=_NANOGPT),
    "build-nanogpt": Program("build_nanogpt", peer="build-nanogpt", differs="samples in order, not at random"),
    "build-nanogpt-compiled": Program("build_nanogpt", _COMPILED, peer="build-nanogpt",
                                      differs="samples in order, not at random"),
    "picotron": Program("picotron_llama", _FP32, peer="picotron", differs=_PICOTRON),
    "ceiling": Program("ceiling"),
    "shards": Program("shards", {"threads": 1}),
}
"""All except `ours…`, `ceiling` and `shards` are code of other projects, or typical user code."""

TRAINS_NOT = ("ceiling", "shards")
NATIVE = ("ours", "ceiling")
"""Modules that use the machine's native precision; the others use the one in their names."""
EAGER_PEERS = ("nanogpt", "build-nanogpt", "picotron", "hf-bf16")


@dataclass(frozen=True)
class Work:
    """A shape, a batch and the programs to run; `letters` selects a vocabulary of 65 characters."""

    programs: tuple[str, ...]
    changes: dict[str, Any]
    steps: int = 12
    rounds: int = 3
    letters: bool = False


_SHAPE = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 50304, "global_batch": 8}
_ALL = ("ours", "plain-bf16", "ours-compiled", "plain-bf16-compiled", "build-nanogpt", "build-nanogpt-compiled",
        "hf-bf16", "nanogpt", "picotron", "plain-fp32", "ceiling", "shards")
WORKS: dict[str, Work] = {
    "cpu-50304": Work(_ALL, _SHAPE),
    "cpu-65": Work(_ALL, {**_SHAPE, "vocab_size": 65}, steps=24, letters=True),
    "ddp": Work(("ours", "ours-ddp-2", "ours-1-thread", "plain-bf16", "plain-bf16-ddp-2"),
                {**_SHAPE, "global_batch": 32}),
    "zero": Work(("ours-ddp-2", "ours-zero1-2", "ours-zero2-2", "ours-zero3-2"),
                 {**_SHAPE, "global_batch": 32, "collectives": True}),
    "memory": Work(("ours", "build-nanogpt", "ours-compiled", "build-nanogpt-compiled", "plain-bf16", "hf-bf16",
                    "nanogpt", "picotron"), _SHAPE, steps=6, rounds=1),
    "tiny": Work(_ALL, {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "vocab_size": 65,
                        "global_batch": 8, "lr": 3e-3}, steps=24, rounds=1, letters=True),
    "tiny-2": Work(("ours-ddp-2", "ours-zero1-2", "ours-zero2-2", "ours-zero3-2", "plain-bf16-ddp-2"),
                   {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "vocab_size": 65, "global_batch": 8,
                    "lr": 3e-3, "collectives": True}, steps=24, rounds=1, letters=True),
}
"""Work by name. The tiny ones are for trying out the benchmark."""
