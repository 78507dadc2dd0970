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
from ezpz_llm.layout.optimizers import OPTIMIZERS
from ezpz_llm.launch.dialects import dialects
from ezpz_llm.launch.schedulers import schedulers
from ezpz_llm.trainer.callbacks.installed_callbacks import installed_callbacks
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


_OTHER_CASES = [(module, group) for module in MODULES for group in GROUPS
           if (module, group) not in {("adamw", GROUPS[0]), ("slurm", GROUPS[1]), ("exits", GROUPS[0]),
                                       ("arguments", GROUPS[3])}]


@pytest.mark.parametrize(("module", "group"), [
    ("adamw", GROUPS[0]), ("slurm", GROUPS[1]), ("exits", GROUPS[0]), ("arguments", GROUPS[3]),
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
