"""Find the torch that this Python imports: two lines, its file and its version as pip knows it.

Run by the Python of a new virtual environment, with the version that is needed at least. Exit 3: there is none; 4:
there is one that cannot be used, with the reason on standard output.
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
    except Exception as error:  # a build for libraries or devices that are not here can raise anything
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
    # Imports that work say little: builds without torch.distributed exist, and broken maths libraries. A step of an
    # optimizer would say no more, but imports torch's compiler: 1.7 s, and a folder among the temporary files.
    if not torch.distributed.is_available():
        raise RuntimeError("it was built without torch.distributed")
    weights = torch.ones(2, 2, requires_grad=True)
    (weights @ weights).sum().backward()


def _version_for_pip(file: Path, version: str) -> str:
    """The version in the metadata of the distribution that holds `file`, to which pip can be held.

    torch.__version__ may have a local part (2.13.0+cu130) that the metadata of the same wheel lacks: pip compares
    with the metadata, and no installed torch meets a constraint with the local part.
    """
    found = next(iter(importlib.metadata.distributions(name="torch")), None)
    # An editable install has its metadata elsewhere, but of the same public version.
    if found and (_holds(found, file) or found.version.partition("+")[0] == version.partition("+")[0]):
        return found.version
    # Some sites' builds come without metadata: pip would not see them, and would install another on top.
    folder = Path(sysconfig.get_path("purelib")) / f"torch-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("with-env\n")
    return version


def _holds(distribution: importlib.metadata.Distribution, file: Path) -> bool:
    return Path(str(distribution.locate_file("torch/__init__.py"))).resolve() == file.resolve()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
