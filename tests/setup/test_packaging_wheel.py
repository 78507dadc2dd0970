"""Wheel built from the sdist, installed in a clean environment, and used from another directory."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from places import ROOT
from slowness import scaled

SHIPPED = ("ezpz_llm", "ds_configs", "launchers", "jobs", "tests", "README.md", "LICENSE", "CHANGELOG.md",
           "CITATION.cff", "pyproject.toml", ".gitignore")


def start(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True,
                          timeout=scaled(120))


def run(*words: str | Path, cwd: Path) -> str:
    done = start(*words, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name)
        else:
            shutil.copy(ROOT / name, checkout / name)
    for left_over in ("jobs/__pycache__/x.pyc", "ds_configs/x.egg-info/PKG-INFO", "ezpz_llm/__pycache__/x.pyc"):
        (checkout / left_over).parent.mkdir(exist_ok=True)
        (checkout / left_over).write_text("ignored by git")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out, cwd=checkout)
    shutil.unpack_archive(next(out.glob("*.tar.gz")), out)
    source = next(path for path in out.iterdir() if path.is_dir())
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=source)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Environment with only the wheel, which uses the dependencies of the current environment."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    borrowed = [path for path in sys.path if path.endswith("site-packages") and Path(path).is_dir()]
    assert sysconfig.get_path("purelib") in borrowed
    # Folders added by a .pth file: their own .pth files, such as that of an editable install, are ignored.
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return folder


def test_wheel_contains_only_package_and_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    for name in ("ds_configs", "launchers", "launchers/lib"):
        expected = {path.name for path in (ROOT / name).iterdir() if path.is_file()}
        prefix = f"ezpz_llm/_data/{name}/"
        found = {entry[len(prefix):] for entry in modes if entry.startswith(prefix)}
        assert expected <= found, name
    assert any(name.startswith("ezpz_llm/_data/jobs/") for name in modes)
    assert [name for name in modes if name.endswith(".dist-info/licenses/LICENSE")]
    assert "ezpz_llm/py.typed" in modes
    assert modes["ezpz_llm/_data/launchers/with-env"] & stat.S_IXUSR
    assert modes["ezpz_llm/_data/launchers/with-env"] & stat.S_IXOTH
    assert not [name for name in modes if "__pycache__" in name or "egg-info" in name or name.startswith("tests")]


def test_wheel_works_from_another_directory(installed: Path, tmp_path: Path) -> None:
    python, launch = installed / "bin" / "python", installed / "bin" / "launch"
    where = run(python, "-c", "import ezpz_llm; print(ezpz_llm.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(installed)
    dry_run = ("-n", "2", "--launcher", "torchrun", "--dry-run", "--json")
    plan = json.loads(run(launch, *dry_run, "hostname", cwd=tmp_path))
    assert plan["argv"][-1] == "hostname"
    assert len(plan["ranks"]) == 2
    check = ("-m", "ezpz_llm.train", "--ds-config", "zero2", "--check", "--world-size", "2")
    run(python, *check, cwd=tmp_path)
    assert "doctor" in run(installed / "bin" / "ezpz-llm", "--help", cwd=tmp_path)
    assert not list(tmp_path.iterdir()), "a dry run and a check write nothing"


def test_unknown_ds_config_names_the_shipped_ones(installed: Path, tmp_path: Path) -> None:
    check = ("-m", "ezpz_llm.train", "--ds-config", "zero22", "--check", "--world-size", "2")
    done = start(installed / "bin" / "python", *check, cwd=tmp_path)
    assert done.returncode == 2
    assert "zero2" in done.stderr
    assert "Traceback" not in done.stderr
