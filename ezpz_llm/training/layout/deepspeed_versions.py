"""Layout support of the installed DeepSpeed (imports neither DeepSpeed nor torch).

`docs/evidence/versions.md` has the certificates. The engines use private names of DeepSpeed, which a release may
remove (`training/dist/deepspeed_names.py`). `require_support` searches a module's source for each name as a whole
word, which takes milliseconds and also finds instance attributes.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

from ezpz_llm.core.base import UserError, installed
from ezpz_llm.training.dist.deepspeed_names import NAMES, missing_name_error
from ezpz_llm.training.layout.layout import Layout


def require_support(layout: Layout) -> None:
    """Check that the installed DeepSpeed trains correctly with this layout and has each name that its engine uses.

    Raises:
        UserError: DeepSpeed is not installed, trains incorrectly with this layout, or lacks a name.
    """
    if layout.pp > 1 and _is_older_than(0, 19):
        raise _incorrect_version_error(
            "divides gradients by the accumulation steps inconsistently across pipeline stages", layout, "0.19.8",
            "--ds-config zero1")
    if layout.zero.stage == 2 and _is_older_than(0, 18):
        raise _incorrect_version_error(
            "computes wrong gradients in ZeRO stage 2 (github.com/deepspeedai/DeepSpeed/issues/7718)", layout,
            "0.18.5", "--ds-config zero1")
    for module, name in _names_used_by(layout):
        if not _source_words(module).issuperset(name.split(".")):
            raise missing_name_error(f"{module}.{name}", f"layout {layout.name}")


def _names_used_by(layout: Layout) -> list[tuple[str, str]]:
    """Return each module of DeepSpeed and its private name that a layout uses."""
    stage, is_pipeline = layout.zero.stage, layout.pp > 1
    optimizer, param = layout.zero.offload_optimizer, layout.zero.offload_param
    is_used = {"every layout": True, "ZeRO 1 and 2": is_pipeline or stage in (1, 2), "ZeRO 3": stage == 3,
               "pipelines": is_pipeline, "optimizer offload": optimizer is not None,
               "compiled ops": optimizer is not None or param == "nvme",
               "offload to NVMe": "nvme" in (optimizer, param), "optimizer offload to NVMe": optimizer == "nvme"}
    return [(module, name) for layouts, modules in NAMES.items() if is_used[layouts]
            for module, names in modules.items() for name in names]


def accumulates_bf16_in_fp32(layout: Layout) -> bool:
    """Return True if the installed DeepSpeed accumulates bf16 parameters' gradients in fp32 in this layout.

    Before 0.19, stages 1 and 2 accumulate partly in bf16 (0.18.5) or fail (0.17.6).
    """
    return layout.zero.stage == 3 or not _is_older_than(0, 19)


def _is_older_than(*release: int) -> bool:
    version = re.findall(r"\d+", installed("deepspeed") or "")
    return bool(version) and tuple(map(int, version[:2])) < release


def _incorrect_version_error(problem: str, layout: Layout, fixed_in: str, layout_option: str) -> UserError:
    return UserError(f"deepspeed {installed('deepspeed')} {problem}", where=f"layout {layout.name}",
                     instead=f"pip install 'deepspeed>={fixed_in},<0.20', or use {layout_option}")


@functools.cache
def _source_words(module: str) -> frozenset[str]:
    """Return the words in a module's source; none if there is no such module."""
    package, *names = module.split(".")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder).joinpath(*names)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return frozenset(re.findall(r"\w+", file.read_text()))
    return frozenset()
