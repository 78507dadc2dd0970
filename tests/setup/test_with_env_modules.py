"""Environments on top of facility modules: with-env keeps their torch, triton and torchvision."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkouts import copy_checkout
from made_up_wheels import write_wheel
from slowness import scaled

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

STAND_INS = {"torch", "triton", "torchvision", "deepspeed"}


@dataclass(frozen=True)
class Module:
    """Versions in a facility's module on 2026-11-25 (github.com/argonne-lcf/user-guides, 7d04a3f).

    Labels after "+" and the versions of triton and torchvision are made up.
    """

    torch: str
    deepspeed: str | None
    triton: str
    torchvision: str


MODULES = {"Polaris conda/2025-09-25": Module("2.8.0", "0.17.6", "3.4.0", "0.23.0"),
           "Aurora frameworks/2025.3.1": Module("2.10.0a0+git449b176", "0.18.5", "3.5.0+git1b0", "0.25.0+bfb"),
           "Aurora 2026.1.0": Module("2.13.0a0+gitcc9ad0d", None, "3.7.0+git1d4", "0.28.0a0+4d8")}
ASK = """
from importlib import metadata, util
import json
names = ("torch", "triton", "torchvision", "deepspeed")
print(json.dumps({name: [metadata.version(name), util.find_spec(name).origin] for name in names}))
"""


def make_python(folder: Path, module: Module) -> Path:
    """Create an environment with the packages of the tests and stand-ins of a module's. Return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=scaled(60))
    site = next(folder.glob("lib/python*/site-packages"))
    for path in Path(importlib.util.find_spec("torch").origin).parents[1].iterdir():
        if path.name.partition("-")[0].lower() not in STAND_INS and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    for name, version in vars(module).items():
        if version is not None:
            info = site / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            if spec := importlib.util.find_spec(name):
                (site / name).symlink_to(Path(spec.origin).parent)
            else:
                (site / name).mkdir()
                (site / name / "__init__.py").touch()
    return folder / "bin" / "python"


@pytest.mark.parametrize("name", MODULES)
def test_packages_of_module_are_kept(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    module, wheels = MODULES[name], tmp_path_factory.mktemp("wheels")
    for package in ("torch", "triton", "torchvision"):
        write_wheel(wheels, package, "99.0", {f"{package}/__init__.py": ""})
    write_wheel(wheels, "deepspeed", "0.19.8", {"deepspeed/__init__.py": ""})
    checkout = copy_checkout(tmp_path, wheels, make_python(tmp_path / "module", module))
    done = checkout.run("python3", "-c", ASK, timeout=scaled(600))
    assert done.returncode == 0, done.stderr
    packages = json.loads(done.stdout)
    for package in ("torch", "triton", "torchvision"):
        version, origin = packages[package]
        assert version == getattr(module, package)
        assert Path(origin).is_relative_to(tmp_path / "module")
    assert packages["deepspeed"][0] == (module.deepspeed or "0.19.8")
