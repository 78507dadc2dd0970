"""A plug-in of the wrong kind is left out with a warning, and replaces nothing of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hostile_plugins import GROUPS, MODULES, install
from launch_runs import clean_env
from slowness import scaled

_ASK = """
import sys
sys.path.insert(0, sys.argv[1])
from ezpz_llm.layout.optimizers import OPTIMIZERS
from ezpz_llm.launch.dialects import dialects
from ezpz_llm.launch.schedulers import schedulers
ours = {*map(type, OPTIMIZERS.values()), *map(type, dialects()), *map(type, schedulers().values())}
print(OPTIMIZERS["adamw"].printed, schedulers()["slurm"].TITLE, *sorted({one.__module__ for one in ours}))
"""


def _asked(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _ASK, str(folder)], env=clean_env(), text=True,
                          capture_output=True, timeout=scaled(60), check=False)


@pytest.fixture(scope="module")
def built_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _asked(tmp_path_factory.mktemp("empty")).stdout


_OTHERS = [(module, group) for module in MODULES for group in GROUPS
           if (module, group) not in {("adamw", GROUPS[0]), ("slurm", GROUPS[1]), ("exits", GROUPS[0])}]


@pytest.mark.parametrize(("module", "group"), [
    ("adamw", GROUPS[0]), ("slurm", GROUPS[1]), ("exits", GROUPS[0]),
    *(pytest.param(*one, marks=pytest.mark.full) for one in _OTHERS)])
def test_it_is_left_out(tmp_path: Path, built_in: str, module: str, group: str) -> None:
    done = _asked(install(tmp_path / "installed", module, group))
    assert done.returncode == 0, done.stderr
    assert done.stdout == built_in
    warning = f"warning: wrong = wrong_plugin:PLUGIN ({group}) is left out: "
    assert done.stderr.startswith(warning)
    assert done.stderr.replace(warning, "").count("\n") >= 1
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr
