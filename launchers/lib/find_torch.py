"""Print the file of the torch that this Python imports, and its version as pip knows it, on two lines.

Run by the Python of a new virtual environment, with the minimum version as argument. Exit code 3: torch is missing.
4: torch cannot be used, for the reason on standard output.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType


def main(floor: str) -> int:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return 3
    try:
        import torch
    except Exception as error:  # a build for missing libraries or devices can raise any error
        print(f"torch at {spec.origin} cannot be imported: {error}")
        return 4
    version = str(torch.__version__)
    if _numbers(version) < _numbers(floor):
        print(f"torch {version} at {spec.origin} is older than {floor}")
        return 4
    try:
        _compute_a_gradient(torch)
    except Exception as error:
        print(f"torch {version} at {spec.origin} cannot train: {type(error).__name__}: {error}")
        return 4
    print(spec.origin)
    print(_version_for_pip(Path(spec.origin), version))
    return 0


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def _compute_a_gradient(torch: ModuleType) -> None:
    # A successful import is not enough: builds can lack torch.distributed or have broken math libraries. An
    # optimizer step would not test more, but imports torch's compiler: 1.7 s, and a folder in the temporary
    # directory.
    if not torch.distributed.is_available():
        raise RuntimeError("it was built without torch.distributed")
    weights = torch.ones(2, 2, requires_grad=True)
    (weights @ weights).sum().backward()


def _version_for_pip(file: Path, version: str) -> str:
    """Return the version in the metadata of the distribution that contains `file`, for a pip constraint.

    torch.__version__ may have a local part (2.13.0+cu130) that the metadata of the wheel lacks. pip compares with
    the metadata, so a constraint with the local part would never match.
    """
    installed = next(iter(importlib.metadata.distributions(name="torch")), None)
    # An editable install has its metadata elsewhere, with the same public version.
    if installed and (_contains(installed, file)
                      or installed.version.partition("+")[0] == version.partition("+")[0]):
        return installed.version
    # Some sites' builds have no metadata: pip would not see them and would install another torch on top.
    folder = Path(sysconfig.get_path("purelib")) / f"torch-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("with-env\n")
    return version


def _contains(distribution: importlib.metadata.Distribution, file: Path) -> bool:
    return Path(str(distribution.locate_file("torch/__init__.py"))).resolve() == file.resolve()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
