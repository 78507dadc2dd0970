"""Choice of torch in a set-up: an installed one, with pip's version, or a build from pip; download progress."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_wheels import write_wheel
from places import ROOT
from slowness import scaled

_TORCH = """
__version__ = {version!r}

class _Anything:
    def __getattr__(self, name): return self
    def __call__(self, *args, **named): return self
    def __matmul__(self, other): return self

ones = distributed = _Anything()
{more}
"""


def write_torch(folder: Path, version: str, metadata: str | None, more: str = "") -> None:
    """Write a fake torch package for find_torch; `metadata` is its version for pip."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(_TORCH.format(version=version, more=more))
    if metadata:
        write_metadata(folder, metadata)


def write_metadata(folder: Path, version: str) -> None:
    info = folder / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


def find_torch(*folders: Path) -> subprocess.CompletedProcess[str]:
    """Run find_torch.py as a new environment does, with these folders on PYTHONPATH."""
    home = folders[0].parent
    environment = home / "venv"
    if not environment.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=scaled(60))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    return subprocess.run([environment / "bin" / "python", ROOT / "launchers/lib/find_torch.py", "2.6"], env=env,
                          capture_output=True, text=True, timeout=scaled(60), check=False)


@pytest.mark.parametrize(("version", "metadata"), [
    ("2.13.0+cu130", "2.13.0"),  # PyPI's own wheel
    ("2.13.0+cpu", "2.13.0+cpu"),  # torch's own index
    ("2.9.0+rocm6.4", "2.9.0+rocm6.4"),
    ("2.8.0a0+5228986c39.nv25.6", "2.8.0a0+5228986c39.nv25.6"),  # a vendor's container
    ("2.10.0.post301", "2.10.0"),
])
def test_version_is_that_of_the_metadata(tmp_path: Path, version: str, metadata: str) -> None:
    write_torch(tmp_path / "site", version, metadata)
    done = find_torch(tmp_path / "site")
    assert (done.returncode, done.stdout.splitlines()) == (0, [str(tmp_path / "site/torch/__init__.py"), metadata])


def test_torch_without_metadata_gets_metadata_for_pip(tmp_path: Path) -> None:
    """Also if the only metadata belongs to a torch that Python does not import."""
    write_torch(tmp_path / "site", "2.9.1+site", None)
    write_metadata(tmp_path / "shadowed", "2.4.0")
    for folders in ([tmp_path / "site"], [tmp_path / "site", tmp_path / "shadowed"]):
        done = find_torch(*folders)
        assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["2.9.1+site"]), done.stdout
    assert len(list((tmp_path / "venv").glob("lib/python*/site-packages/torch-2.9.1+site.dist-info/METADATA"))) == 1


@pytest.mark.parametrize(("version", "more", "reason"), [
    ("2.5.1", "", "is older than 2.6"),
    ("2.13.0", "raise OSError('libcudart.so.13: cannot open shared object file')", "cannot be imported: libcudart"),
    ("2.13.0", "def ones(*args, **named): raise RuntimeError('no kernel image')", "cannot train: RuntimeError: no"),
    ("2.13.0", "distributed = type('D', (), {'is_available': lambda: False})", "built without torch.distributed"),
])
def test_unusable_torch_is_rejected_with_the_reason(tmp_path: Path, version: str, more: str, reason: str) -> None:
    write_torch(tmp_path / "site", version, version, more)
    done = find_torch(tmp_path / "site")
    assert done.returncode == 4
    assert reason in done.stdout
    assert str(tmp_path / "site") in done.stdout


def test_missing_torch_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    assert find_torch(tmp_path / "site").returncode in (0, 3)  # 0: the base Python has torch


_CHOOSE = """
set -euo pipefail
here=$1 venv=$2 python=$3 cache=$2 self=$1/launchers/with-env wheels=
source_of_wheels=(--no-index --find-links "$4")
source "$here/launchers/lib/setup.sh"
driver=$5
has_nvidia_driver() { $driver; }
choose_torch
printf '%s\\n' "${torch_words[@]}"
"""


@pytest.mark.parametrize(("offered", "driver", "chosen", "messages"), [
    (("2.13.0", "2.15.0"), False, "torch==2.13.0", (
     "2.8 GB to download, 5.1 GB on disk", "0.3 GB to download, 1.4 GB",
     "export EZPZ_LLM_TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'")),
    (("2.13.0",), True, "torch==2.13.0", ("with CUDA: 2.8 GB to download",)),
    (("2.13.0", "2.13.0+cpu"), False, "torch==2.13.0+cpu", ("torch 2.13.0+cpu, for CPUs: 0.3 GB",)),
    (("2.13.0+cu130", "2.13.0+cpu"), False, "torch==2.13.0+cpu", ("for CPUs",)),
    (("2.13.0+cu130", "2.13.0+cpu"), True, "torch==2.13.0", ("torch 2.13.0+cu130, with CUDA",)),
    (("2.13.0", "2.13.0+cpu"), True, "torch==2.13.0", ("for CPUs", "export EZPZ_LLM_TORCH=torch===2.13.0")),
])
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="sizes are known for x86-64")
def test_choice_of_build_and_its_size(
        tmp_path: Path, offered: tuple[str, ...], driver: bool, chosen: str, messages: tuple[str, ...]) -> None:
    for version in offered:
        write_wheel(tmp_path, "torch", version, {})
    program = tmp_path / "venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    env = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    done = subprocess.run(["bash", "-c", _CHOOSE, "choose", ROOT, tmp_path / "venv", sys.executable, tmp_path,
                           str(driver).lower()], env=env, capture_output=True, text=True,
                          timeout=scaled(60), check=False)
    assert (done.returncode, done.stdout) == (0, f"{chosen}\n"), done.stderr
    for message in messages:
        assert message in done.stderr
    assert ("CPU build is enough" in done.stderr) == (not driver and "+cpu" not in chosen)


@pytest.mark.parametrize(("lines", "expected"), [
    (["Collecting torch==2.13.0"], "resolving torch"),
    (["  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)"], ""),
    (["Collecting torch", "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (526.1 MB)",
      "Downloading https://a.host/simple/nvidia_cublas-13.1.1-py3-none-any.whl (1.5 GB)",
      "  Using cached mpmath-1.3.0-py3-none-any.whl (536 kB)"],
     "downloading mpmath (536 kB); 3 files, 2027 MB so far"),
    (["  Downloading sympy-1.14-py3-none-any.whl (6 MB)", "Installing collected packages: sympy, mpmath, torch"],
     "unpacking 3 packages; 1 files, 6 MB so far"),
    (["  Building wheel for deepspeed (pyproject.toml): started"], "building deepspeed"),
    ([], ""),
])
def test_progress_from_new_lines_of_the_log(tmp_path: Path, lines: list[str], expected: str) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(["Installing collected packages: of, an, earlier, step", *lines]))
    done = subprocess.run([sys.executable, ROOT / "launchers/lib/progress.py", log, "1"], capture_output=True,
                          text=True, timeout=scaled(60), check=True)
    assert done.stdout == f"{expected}\n"
