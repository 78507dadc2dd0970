"""Wheel built from the sdist, installed in a clean environment, and used from another directory."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from places import ROOT
from slowness import scaled

from ezpz_llm.cli import find_commands
from ezpz_llm.core.base.errors import TRAIN_PACKAGES

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


def requirements(name: str, extra: str = "") -> list[str]:
    """Return the names of the packages that `pip install NAME` or `NAME[EXTRA]` adds on this machine."""
    parsed = map(Requirement, importlib.metadata.requires(name) or ())
    return [one.name for one in parsed if one.marker is None or one.marker.evaluate({"extra": extra})]


def create_venv(folder: Path, wheel: Path) -> Path:
    """Create an environment with only the wheel; return its site-packages folder."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Environment of `pip install ezpz_llm`: the wheel and its dependencies, copied instead of downloaded."""
    folder = tmp_path_factory.mktemp("plain") / "venv"
    site = create_venv(folder, wheel)
    waiting, copied = requirements("ezpz_llm"), set()
    while waiting:
        name = waiting.pop()
        if name in copied:
            continue
        copied.add(name)
        waiting += requirements(name)
        for file in importlib.metadata.files(name) or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), site / file)
    return folder


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Environment with only the wheel, which uses the dependencies of the current environment."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    site = create_venv(folder, wheel)
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


def test_extra_train_has_what_a_plain_install_lacks() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^train = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block
    assert set(re.findall(r'^    "(\w+)', block[1], re.MULTILINE)) == set(TRAIN_PACKAGES)


def test_a_plain_install_has_no_torch(plain: Path, tmp_path: Path) -> None:
    code = f"import importlib.util as u; print([name for name in {TRAIN_PACKAGES} if u.find_spec(name)])"
    assert run(plain / "bin" / "python", "-c", code, cwd=tmp_path) == "[]\n"


def test_a_plain_install_launches_and_reports(plain: Path, tmp_path: Path) -> None:
    """Ranks are started without any MPI or torchrun."""
    env = {"PATH": f"{plain / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path)}

    def call(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=scaled(120))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert json.loads(call("launch", "-n", "2", "--dry-run", "--json", "python3", "-c", "1"))["argv"]
    code = ("import json, os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
            "if os.environ['RANK'] == '0':\n"
            "    for step in range(1, 21):\n"
            "        print(json.dumps({'step': step, 'loss': 5 - step / 10, 'step_time_s': 0.1}),\n"
            "              file=open('runs/a/metrics.jsonl', 'a'))")
    out = call("launch", "-n", "2", "--run-dir", "runs/a", "python3", "-c", code)
    assert "rank 0 of 2" in out
    assert (tmp_path / "runs/a/logs/rank0001.log").read_text() == "rank 1 of 2\n"
    assert "loss" in call("ezpz-llm", "report", "runs/a")
    assert "with code 0" in call("ezpz-llm", "why", "runs/a")
    assert "#SBATCH" in call("ezpz-llm", "submit", "--scheduler", "slurm", "--nodes", "2", "--time", "1:00:00",
                             "--dry-run", "--", "launch", "python3", "x.py")
    assert "--nodes" in call("ezpz-llm", "completion", "bash")


NEED_TRAINER = {"train": (), "test_dist": (), "evaluate": (), "generate": ("x",), "certify": (), "explain": (),
                "scale": (), "data": ("prepare", "corpus.txt"), "checkpoint": ("inspect", ".")}
"""Commands that need the extra "train", with arguments."""
NEED_NO_TRAINER = {"launch": ("--dry-run", "hostname"), "layouts": (), "completion": ("bash",),
                   "doctor": (), "preflight": ("--help",), "watch": ("--help",), "why": ("--help",),
                   "report": ("--help",),
                   "submit": ("--scheduler", "slurm", "--nodes", "2", "--time", "1:00:00", "--dry-run", "--",
                              "launch", "true")}
"""Commands of a plain install, with arguments."""


def test_every_command_is_tried_in_a_plain_install() -> None:
    assert sorted(find_commands()) == sorted(NEED_TRAINER | NEED_NO_TRAINER)


@pytest.mark.parametrize("name", NEED_TRAINER)
def test_a_plain_install_names_the_extra(plain: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    model = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 10, "n_positions": 8}
    (tmp_path / "config.json").write_text(json.dumps(model))
    for command in (("bin/python", "-m", f"ezpz_llm.{name}"), ("bin/ezpz-llm", name)):
        done = start(plain / command[0], *command[1:], *NEED_TRAINER[name], cwd=tmp_path)
        assert done.returncode == 2
        assert "pip install 'ezpz_llm[train]'" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", NEED_NO_TRAINER)
def test_a_plain_install_runs_the_other_commands(plain: Path, tmp_path: Path, name: str) -> None:
    run(plain / "bin" / "python", "-m", f"ezpz_llm.{name}", *NEED_NO_TRAINER[name], cwd=tmp_path)


def test_doctor_reports_a_plain_install_as_fit_and_names_the_extra(plain: Path, tmp_path: Path) -> None:
    report = json.loads(run(plain / "bin" / "ezpz-llm", "doctor", "--json", cwd=tmp_path))
    assert report["fit"] is True
    findings = {finding["topic"]: finding for finding in report["findings"]}
    assert findings.keys() >= {"python", "trainer", "launcher", "scheduler"}
    assert not findings.keys() & {"torch", "deepspeed", "MPI library", "compiler"}
    assert findings["trainer"]["level"] == "ok"
    assert "pip install 'ezpz_llm[train]'" in findings["trainer"]["instead"]
