"""Invalid plug-ins are ignored with a warning and do not replace built-in ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hostile_plugins import GROUPS, MODULES, install
from launch_runs import clean_env
from slowness import scaled

_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from ezpz_llm.training.layout.optimizers import OPTIMIZERS
from ezpz_llm.launcher.planning.dialects import dialects
from ezpz_llm.launcher.jobs.schedulers import schedulers
from ezpz_llm.training.trainer.callbacks.installed_callbacks import installed_callbacks
classes = {*map(type, OPTIMIZERS.values()), *map(type, dialects()), *map(type, schedulers().values()),
           *map(type, installed_callbacks())}
print(OPTIMIZERS["adamw"].printed, schedulers()["slurm"].TITLE, *sorted({kind.__module__ for kind in classes}))
"""


def _print_plugins(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _PROGRAM, str(folder)], env=clean_env(), text=True,
                          capture_output=True, timeout=scaled(60), check=False)


@pytest.fixture(scope="module")
def built_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _print_plugins(tmp_path_factory.mktemp("empty")).stdout


_FAST_CASES = [("adamw", GROUPS[0]), ("slurm", GROUPS[1]), ("exits", GROUPS[0]), ("arguments", GROUPS[3]),
               ("base exception", GROUPS[2]), ("message", GROUPS[3]), ("state", GROUPS[0]), ("every", GROUPS[3]),
               ("signature", GROUPS[3])]
_OTHER_CASES = [(module, group) for module in MODULES for group in GROUPS if (module, group) not in _FAST_CASES]


@pytest.mark.parametrize(("module", "group"), [
    *_FAST_CASES,
    *(pytest.param(*case, marks=pytest.mark.full) for case in _OTHER_CASES)])
def test_invalid_plugin_is_ignored(tmp_path: Path, built_in: str, module: str, group: str) -> None:
    done = _print_plugins(install(tmp_path / "installed", module, group))
    assert done.returncode == 0, done.stderr
    assert done.stdout == built_in
    warning = f"warning: ignoring the entry point wrong = wrong_plugin:PLUGIN ({group}): "
    assert done.stderr.startswith(warning)
    assert done.stderr.replace(warning, "").count("\n") >= 1
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("damage", [b"[ezpz_llm.callbacks]\nx = y:\xff", b"[ezpz_llm.callbacks]\nno equals sign\n"])
def test_damaged_package_is_named_and_skipped(tmp_path: Path, damage: bytes) -> None:
    """importlib.metadata.entry_points fails for all packages if one of them is damaged."""
    folder = install(tmp_path / "installed", "good", GROUPS[3])
    (folder / "bad-1.0.dist-info").mkdir()
    (folder / "bad-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (folder / "bad-1.0.dist-info/entry_points.txt").write_bytes(damage)
    done = _print_plugins(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" wrong_plugin\n"), "the other package's callback is used"
    assert "warning: ignoring the entry points of " in done.stderr
    assert "bad-1.0.dist-info: " in done.stderr
    assert "Traceback" not in done.stderr


def test_damaged_package_that_fails_the_import_of_torch_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad-1.0.dist-info").mkdir()
    (tmp_path / "bad-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (tmp_path / "bad-1.0.dist-info/entry_points.txt").write_bytes(b"[a]\nx = y:\xff")
    program = ("from importlib.metadata import entry_points; from ezpz_llm.core.base import run_command; "
               "raise SystemExit(run_command(lambda _: entry_points(group='torch.backends'), []))")
    done = subprocess.run([sys.executable, "-c", program], env=clean_env(PYTHONPATH=str(tmp_path)), text=True,
                          capture_output=True, timeout=scaled(60), check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the metadata of an installed package is not UTF-8")
    assert "bad-1.0.dist-info/entry_points.txt" in done.stderr
