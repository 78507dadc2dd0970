"""The tokens that all programs read: made once, in each one's format."""

from __future__ import annotations

import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np

from ezpz_llm.data.prepare import prepare
from ezpz_llm.data.shards import TokenData

LETTERS = 65
"""As many as tiny Shakespeare has."""
SHARDS = "shards"
_CHARACTERS = 2_000_000


def make_data(folder: Path, letters: bool) -> None:
    """Prepare sources of the standard library as `folder`/shards, and as train and val in .bin and .npy files.

    Not many of them: build-nanogpt has its whole file in memory, at 8 bytes a token.

    Args:
        letters: of the 65 commonest characters, one token each; else bytes.
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
    """The beginning of the standard library, with `letters` its rare characters replaced by the commonest."""
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
