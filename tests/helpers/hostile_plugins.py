"""Invalid plug-ins, declared in the entry points of another package."""

from __future__ import annotations

from pathlib import Path

MODULES = {
    "text": "PLUGIN = 'x'",
    "none": "PLUGIN = None",
    "module": "import os as PLUGIN",
    "class": "class PLUGIN: pass",
    "exits": "import sys; sys.exit(7)",
    "raises": "raise ValueError('\\x1b[31mred')",
    "missing": "",
    "no syntax": "def",
    "no package": "import a_package_that_nobody_has",
    "any name": "class Any:\n    def __getattr__(self, name): return name\nPLUGIN = Any()",
    "no attributes": "class Any:\n    def __getattr__(self, name): raise SystemExit(7)\nPLUGIN = Any()",
    "adamw": "from ezpz_llm.training.layout.optimizers import Optimizer\n"
             "class Mine(Optimizer):\n    def build(self, groups, settings, fused): pass\n"
             "PLUGIN = Mine('adamw', 'mine', {'exp_avg': 4})",
    "no name": "from ezpz_llm.training.layout.optimizers import Optimizer\n"
               "class Mine(Optimizer):\n    def build(self, groups, settings, fused): pass\n"
               "PLUGIN = Mine(['adamw'], 'mine', {})",
    "slurm": "from ezpz_llm.launcher.jobs.schedulers.scheduler import Scheduler\n"
             "class Mine(Scheduler):\n    NAME = 'slurm'; TITLE = 'mine'; JOB_VARIABLE = 'MINE'\n"
             "    def detect(self, env): return None\nPLUGIN = Mine()",
    "base exception": "class Odd(BaseException): pass\nraise Odd('gone')",
    "message": "class Odd(Exception):\n    def __str__(self): raise SystemExit(0)\nraise Odd",
    "state": "from ezpz_llm.training.layout.optimizers import Optimizer\n"
             "class Mine(Optimizer):\n    def build(self, groups, settings, fused): pass\n"
             "PLUGIN = Mine('mine', 'mine', 4)",
    "every": "from ezpz_llm import Callback\nclass PLUGIN(Callback):\n    evaluate_every = 'x'",
    "signature": "from ezpz_llm import Callback\nclass PLUGIN(Callback):\n    def on_log(self, context): pass",
    "property": "from ezpz_llm import Callback\nclass PLUGIN(Callback):\n    name = property(lambda self: '')",
    "arguments": "from ezpz_llm import Callback\nclass PLUGIN(Callback):\n    def __init__(self, needed): pass",
    "pattern": "from ezpz_llm.launcher.planning.dialects.work import Dialect\nPLUGIN = Dialect('mine', '(', print)",
}
"""Source of each plug-in module."""
GOOD = "from ezpz_llm import Callback\nclass PLUGIN(Callback): pass"
GROUPS = ("ezpz_llm.optimizers", "ezpz_llm.schedulers", "ezpz_llm.dialects", "ezpz_llm.callbacks")


def install(folder: Path, module: str, group: str) -> Path:
    """Create a folder for PYTHONPATH with the plug-in."""
    (folder / "wrong-1.0.dist-info").mkdir(parents=True)
    (folder / "wrong_plugin.py").write_text(GOOD if module == "good" else MODULES[module])
    (folder / "wrong-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n")
    (folder / "wrong-1.0.dist-info/entry_points.txt").write_text(f"[{group}]\nwrong = wrong_plugin:PLUGIN\n")
    return folder
