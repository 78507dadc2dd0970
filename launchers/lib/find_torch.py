"""Find the torch that this Python imports: two lines, its file and its version.

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
    _introduce_to_pip(version)
    print(spec.origin)
    print(version)
    return 0


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def _introduce_to_pip(version: str) -> None:
    # Some sites' builds come without metadata: pip would not see them, and would install another on top.
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        folder = Path(sysconfig.get_path("purelib")) / f"torch-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        (folder / "INSTALLER").write_text("with-env\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
