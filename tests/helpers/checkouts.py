"""Copies of the checkout, each with its own cache and with pip cut off from the network."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from made_up_wheels import write_wheel
from places import ROOT
from slowness import scaled


def no_network(port: int = 9) -> dict[str, str]:
    """Return pip settings with an index on this machine only; by default nothing listens on its port."""
    return {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "",
            "PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple"}


@dataclass
class Checkout:
    """A copy of the checkout with its own cache."""

    root: Path
    cache: Path
    wheels: Path
    python: Path

    def command(self, *words: str) -> list[str]:
        return [str(self.root / "launchers" / "with-env"), *words]

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "EZPZ_LLM_TORCH")}
        # The build back end comes from the tests' own environment.
        outside = {name: str(self.outside / name) for name in ("HOME", "TMPDIR")}
        for folder in outside.values():
            Path(folder).mkdir(parents=True, exist_ok=True)
        return {**kept, **outside, "PIP_NO_BUILD_ISOLATION": "0", "EZPZ_LLM_CACHE": str(self.cache),
                "EZPZ_PYTHON": str(self.python), **no_network(), "PIP_FIND_LINKS": str(self.wheels), **variables}

    def run(self, *words: str, stdin: str = "", timeout: float = 280, **variables: str):
        return subprocess.run(self.command(*words), input=stdin, capture_output=True, text=True,
                              timeout=scaled(timeout),
                              env=self.environment(**variables), cwd=self.root.parent, check=False)

    @property
    def outside(self) -> Path:
        return self.cache.parent / "outside"

    @property
    def venv(self) -> Path:
        venvs = [path for path in (self.cache / "venvs").iterdir() if path.is_dir()]
        assert len(venvs) == 1, venvs
        return venvs[0]


def copy_checkout(folder: Path, wheels: Path, python: Path) -> Checkout:
    """Copy the checkout into a folder. Its with-env uses `python`, and pip uses `wheels`.

    Args:
        wheels: a folder without blanks in its path, since pip splits PIP_FIND_LINKS at blanks.
    """
    root = folder / "a checkout"
    root.mkdir()
    for name in ("ezpz_llm", "ds_configs", "launchers", "jobs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    scripts = dict.fromkeys((f"mpich-5.0.2.data/scripts/{name}" for name in ("mpiexec", "mpirun")),
                            "#!/bin/sh\necho HYDRA build details:\n")
    write_wheel(wheels, "mpich", "5.0.2", scripts)
    return Checkout(root, folder / "cache", wheels, python)
