"""Find, hash and load the target file of `--target FILE.py:FUNCTION` (imports torch only if the file does)."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.core.base import UserError, read_bytes, unknown_name_error
from ezpz_llm.training.library.target import Target
from ezpz_llm.verify.certify import recipe, verdict
from ezpz_llm.verify.certify.records import Basis, TargetRecord

ACCUMULATION = 3
"""Micro batches per step. An error by a factor of 3 cannot be confused with one by the number of ranks (2 or 4)."""
CLIP_SHARE = 0.5
"""Gradient clip as a share of the first gradient norm, because the scale of a target's gradients is unknown."""
EPS_SHARE = 0.5
"""Epsilon of the default optimizer, relative to the root mean square of the elements of a clipped gradient. With a
much smaller epsilon, Adam turns the rounding of tiny gradients into full-size steps."""
SAME = 2.0 ** -10
"""Relative tolerance between first gradients of one process in fp32 that differ only in summation order. Rounding
gives 1e-6; a different mean, mask or statistic exceeds the tolerance."""
RESUMED = 5e-7
"""Minimum relative tolerance of losses, gradient norms and weights of a resumed run. Larger baseline noise, as in
bf16, raises the tolerance."""
DTYPES = ("fp32", "bf16")
LAYOUTS = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero3_hpz2", "fsdp2")
"""Shipped layouts that work with any module, except those with offload."""
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class TargetFile:
    """Absolute path of a target's file, name of its function, and hash of the content."""

    path: str
    function: str
    sha256: str

    @property
    def title(self) -> str:
        """Name shown in place of a model's name."""
        return f"{Path(self.path).name}:{self.function}"


def find_target(text: str, folders: tuple[Path, ...] = (Path(),)) -> TargetFile:
    """Find the target named by `text` (FILE.py:FUNCTION). Reads the file but does not run it.

    Args:
        folders: directories in which to look for a relative path.

    Raises:
        UserError: `text` has another form, the file or function does not exist, or the file has a syntax error.
    """
    name, colon, function = text.rpartition(":")
    if not colon or not name.endswith(".py") or not function.isidentifier():
        raise UserError(f"{text!r} is not of the form FILE.py:FUNCTION", where="--target",
                        instead="--target FILE.py:FUNCTION")
    path = next((folder / name for folder in folders if (folder / name).is_file()), Path(name)).resolve()
    content = read_bytes(path, _MAX_BYTES)
    try:
        defined = [node.name for node in ast.parse(content).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError) as error:
        raise UserError(f"invalid Python: {error}", where=str(path)) from error
    if function not in defined:
        raise unknown_name_error("function", function, defined, where=str(path))
    return TargetFile(str(path), function, hashlib.sha256(content).hexdigest())


def load(file: TargetFile) -> Target:
    """Run a target file and call its function. The file can import modules next to it, like a script.

    Raises:
        UserError: the file has changed since `find_target`, or the function does not return a `Target`.
    """
    path = Path(file.path)
    # Hash and run the same bytes: the file on disk may change in between, and __pycache__ may be stale.
    content = read_bytes(path, _MAX_BYTES)
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise UserError("the file changed after certify had read it", where=file.path,
                        instead="certify again, without changing the file while it runs")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"target_{path.stem}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    exec(compile(content, str(path), "exec"), vars(module))
    target = getattr(module, file.function)()
    if not isinstance(target, Target):
        raise UserError(f"{file.function}() returns {type(target).__name__}, not a Target", where=file.title,
                        instead="return ezpz_llm.Target(module=…, batch=…, loss=…)")
    return target


def basis(file: TargetFile, steps: int) -> Basis:
    """Return the target file, the recipe and the constants of the bounds of a target's certificate."""
    return Basis(
        target=TargetRecord(path=Path(file.path).name, function=file.function, sha256=file.sha256),
        recipe={"steps": steps, "epochs": 2, "accumulation": ACCUMULATION, "clip_share": CLIP_SHARE,
                "rates": [recipe.rate_factor(step, steps) for step in range(steps)],
                "seed": recipe.SEED, "data_seed": recipe.DATA_SEED,
                "default_optimizer": {"lr": recipe.PEAK_LR, "betas": recipe.BETAS, "eps_share": EPS_SHARE,
                                      "weight_decay": recipe.WEIGHT_DECAY}},
        bounds={"rounding": verdict.ROUNDING, "k": verdict.K, "factor": verdict.FACTOR,
                "weight_factor": verdict.WEIGHT_FACTOR,
                "least_loss": verdict.MIN_LOSS, "same": SAME, "resumed": RESUMED})
