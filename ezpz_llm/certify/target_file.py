"""The file of a target: `--target FILE.py:FUNCTION`, what certify does with it, and its function called (imports no
torch, but what the file itself imports).
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, read_bytes, unknown
from ezpz_llm.certify import recipe, verdict
from ezpz_llm.library.target import Target

ACCUMULATION = 3
"""Micro batches of a step: not 2 or 4, so that a factor says whether ranks or micro batches were miscounted."""
CLIP_SHARE = 0.5
"""What gradients are clipped to, of the first one's norm: the size of a target's gradients is its own affair."""
EPS_SHARE = 0.5
"""The epsilon of the optimizer that certify makes, of the root mean square of a clipped gradient's elements: Adam
makes steps of full size out of the rounding of an element whose gradient lies far below its epsilon."""
SAME = 2.0 ** -10
"""How far one process's first gradients may lie apart, in fp32, whose sums are the same in another order. Rounding
gives 1e-6; another mean, mask or statistic more than this."""
RESUMED = 5e-7
"""How far losses, norms and weights of a run that was resumed may lie from those of one that was not, relatively;
where rounding alone moves one process by more, as in bf16, as far as the baseline noise lets a layout lie."""
DTYPES = ("fp32", "bf16")
LAYOUTS = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero3_hpz2", "fsdp2")
"""Shipped layouts that need no knowledge of a model, without those that put state elsewhere."""
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class TargetFile:
    """A target's file, absolute, with the name of its function and the hash of its content."""

    path: str
    function: str
    sha256: str

    @property
    def title(self) -> str:
        """The place of a model's name in tables."""
        return f"{Path(self.path).name}:{self.function}"


def find_target(text: str, folders: tuple[Path, ...] = (Path(),)) -> TargetFile:
    """Find the target that `text`, FILE.py:FUNCTION, names; the file is read and not run.

    Args:
        folders: where a relative path may begin.

    Raises:
        UserError: no such file or function, or no Python.
    """
    name, colon, function = text.rpartition(":")
    if not colon or not name.endswith(".py") or not function.isidentifier():
        raise UserError(f"{text!r} names no function of a file", where="--target",
                        instead="--target FILE.py:FUNCTION")
    path = next((folder / name for folder in folders if (folder / name).is_file()), Path(name)).resolve()
    content = read_bytes(path, _MOST_BYTES)
    try:
        defined = [node.name for node in ast.parse(content).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError) as error:
        raise UserError(f"this is no Python that can be read: {error}", where=str(path)) from error
    if function not in defined:
        raise unknown("function", function, defined, where=str(path))
    return TargetFile(str(path), function, hashlib.sha256(content).hexdigest())


def load(file: TargetFile) -> Target:
    """Run what was found of the file, and call its function. Modules beside it can be imported, as in a script.

    Raises:
        UserError: the file was changed since it was found, or gives something else than a `Target`.
    """
    path = Path(file.path)
    # Hashed and run is what one reading gave: what is on the disk by then, or in __pycache__, is not looked at.
    content = read_bytes(path, _MOST_BYTES)
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise UserError("the file was changed after certify had read it", where=file.path,
                        instead="certify again, and change the file when that has ended")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"target_{path.stem}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses of the file look for it
    exec(compile(content, str(path), "exec"), vars(module))
    given = getattr(module, file.function)()
    if not isinstance(given, Target):
        raise UserError(f"{file.function}() gives {type(given).__name__}", where=file.title,
                        instead="ezpz_llm.Target(module=…, batch=…, loss=…)")
    return given


def basis(file: TargetFile, steps: int) -> dict[str, Any]:
    """What a certificate of a target rests on: the file, the recipe and the constants of the bounds."""
    return {
        "target": {**asdict(file), "path": Path(file.path).name},
        "recipe": {"steps": steps, "epochs": 2, "accumulation": ACCUMULATION, "clip_share": CLIP_SHARE,
                   "rates": [recipe.rate_factor(step, steps) for step in range(steps)],
                   "seed": recipe.SEED, "data_seed": recipe.DATA_SEED,
                   "default_optimizer": {"lr": recipe.PEAK_LR, "betas": recipe.BETAS, "eps_share": EPS_SHARE,
                                         "weight_decay": recipe.WEIGHT_DECAY}},
        "bounds": {"rounding": verdict.ROUNDING, "k": verdict.K, "factor": verdict.FACTOR,
                   "least_loss": verdict.LEAST_LOSS, "same": SAME,
                   "resumed": RESUMED},
    }
