"""Run a training script of another project unchanged, except for constants without an option."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from peers.task import Clock

Names = dict[str, Any]


class Over(BaseException):
    """Raised when the clock has all its steps; a BaseException, so that scripts do not catch it."""


def run_script(path: Path, folder: Path, clock: Clock, *, loss: str, values: Mapping[str, Any],
               after: Mapping[str, Callable[[Names], None]] | None = None) -> Names:
    """Run the script in `folder` until the clock has all its steps, and return the script's globals.

    A step ends with the optimizer's step.

    Args:
        loss: name of the global variable with the last loss.
        values: values to assign to these global variables instead of the script's.
        after: functions to call once a class of this name is defined.
    """
    module = ModuleType("peer_script")
    sys.modules[module.__name__] = module
    names: Names = module.__dict__
    names["__file__"] = str(path)
    sys.path.insert(0, str(path.parent))
    sys.dont_write_bytecode = True

    def tick(*_: Any) -> None:
        clock.tick(names[loss].detach().clone())
        if clock.is_over:
            raise Over

    hook = register_optimizer_step_post_hook(tick)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for statement in ast.parse(path.read_text(), str(path)).body:
                _run(statement, path, names, values)
                if isinstance(statement, ast.ClassDef) and statement.name in (after or {}):
                    after[statement.name](names)
    except Over:
        return names
    finally:
        hook.remove()
    raise SystemExit(f"{path} ended before it had made all its steps")


def _run(statement: ast.stmt, path: Path, names: Names, values: Mapping[str, Any]) -> None:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        name = statement.targets[0].id
        if name in values:
            names[name] = values[name]
            return
    exec(compile(ast.Module([statement], []), str(path), "exec"), names)


def stand_in(name: str, **members: Any) -> None:
    """Install a stub module with these members, for a module that the comparison does not need."""
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module
