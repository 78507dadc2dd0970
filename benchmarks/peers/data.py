"""Tokens for all programs, prepared once, in the format of each."""

from __future__ import annotations

import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np

from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.shards import TokenData

LETTERS = 65
"""Number of different characters, as in tiny Shakespeare."""
SHARDS = "shards"
_CHARACTERS = 2_000_000


def make_data(folder: Path, letters: bool) -> None:
    """Prepare sources of the standard library as `folder`/shards, and as train and val in .bin and .npy files.

    The corpus is small, since build-nanogpt loads the whole file into memory, at 8 bytes per token.

    Args:
        letters: use the 65 most common characters as tokens instead of bytes.
    """
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(_text(letters))
    prepare(str(folder / "text.txt"), "char" if letters else "bytes", out=folder / SHARDS, progress=False)
    data = TokenData.open(folder / SHARDS)
    for split in ("train", "val"):
        tokens = data.split(split)[:].astype(np.uint16)
        tokens.tofile(folder / f"{split}.bin")
        np.save(folder / f"{split}.npy", tokens)


def _text(letters: bool) -> str:
    """Return the beginning of the standard library; with `letters`, rare characters become the most common one."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > _CHARACTERS:
            break
    if not letters:
        return text
    common = [character for character, _ in Counter(text).most_common(LETTERS)]
    kept = set(common)
    return "".join(character if character in kept else common[0] for character in text)
