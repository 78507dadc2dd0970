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
from ezpz_llm.training.dist.version_rules import PIPELINES, STAGE_2, WIDE_GRADIENTS, find_rule
from ezpz_llm.training.layout.layout import Layout


def require_support(layout: Layout) -> None:
    """Check that the installed DeepSpeed trains correctly with this layout and has each name that its engine uses.

    Raises:
        UserError: DeepSpeed is not installed, trains incorrectly with this layout, or lacks a name.
    """
    for use, is_used in ((PIPELINES, layout.pp > 1), (STAGE_2, layout.zero.stage == 2)):
        if is_used:
            reject_use(use, f"layout {layout.name}", "use --ds-config zero1")
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
    """Return True if the installed DeepSpeed accumulates bf16 parameters' gradients in fp32 in this layout."""
    return layout.zero.stage == 3 or is_correct(WIDE_GRADIENTS)


def is_correct(use: str) -> bool:
    """Return False if the installed DeepSpeed has a known bug in a use of it (`training/dist/version_rules.py`)."""
    return find_rule("DeepSpeed", installed("deepspeed"), use) is None


def reject_use(use: str, where: str, otherwise: str) -> None:
    """Reject a use in which the installed DeepSpeed has a known bug.

    Args:
        otherwise: what to change instead of the version.

    Raises:
        UserError: the installed version has a known bug in this use.
    """
    version = installed("deepspeed")
    if (rule := find_rule("DeepSpeed", version, use)) is not None:
        raise UserError(f"deepspeed {version} {rule.problem} ({rule.issue.removeprefix('https://')})", where=where,
                        instead=f"pip install 'deepspeed>={rule.fixed_in},<0.20', or {otherwise}")


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
