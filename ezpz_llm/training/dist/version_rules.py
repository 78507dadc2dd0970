"""Known bugs of other packages by version: uses to reject, and variables that avoid a bug (imports no torch).

Add a row for a bug that makes a run wrong or lets it hang. docs/evidence/versions.md lists the tested versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Package = Literal["torch", "DeepSpeed", "ROCm"]


@dataclass(frozen=True)
class Rule:
    """Bug of a package's versions in [since, before).

    Attributes:
        use: what must not be used with these versions: a device type, or a name that the layout check passes.
        problem: continues "DeepSpeed 0.18.5".
        issue: address of the public issue, or the page of this project with the measurement.
        settings: environment variables that avoid the bug. If empty, the caller of `find_rule` rejects or replaces
            the use.
    """

    package: Package
    since: tuple[int, ...]
    before: tuple[int, ...]
    use: str
    problem: str
    issue: str
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def fixed_in(self) -> str:
        """First version without the bug."""
        return ".".join(map(str, self.before))


PIPELINES, STAGE_2, OVERLAP = "pipelines", "ZeRO stage 2", "overlap_comm"
WIDE_GRADIENTS = "bf16 gradients accumulated in fp32"
XPU_ATTENTION = "attention on xpu"

RULES = (
    Rule("DeepSpeed", (), (0, 19, 3), PIPELINES,
         "divides gradients by the accumulation steps again in each pipeline stage",
         "https://github.com/deepspeedai/DeepSpeed/issues/8152"),
    Rule("DeepSpeed", (), (0, 18), STAGE_2, "computes wrong gradients in ZeRO stage 2",
         "https://github.com/deepspeedai/DeepSpeed/issues/7718"),
    # Stages 1 and 2 on devices with streams. Buffers were also freed too early before 0.19.0 (pull request 7965).
    Rule("DeepSpeed", (), (0, 19, 3), OVERLAP,
         "reduces gradients before they are complete, with overlap_comm in ZeRO stages 1 and 2",
         "https://github.com/deepspeedai/DeepSpeed/issues/8061"),
    # 0.18.5 accumulates partly in bf16, and 0.17.6 fails in the first step.
    Rule("DeepSpeed", (), (0, 19), WIDE_GRADIENTS,
         "does not accumulate the gradients of bf16 parameters in fp32 in ZeRO stages 1 and 2",
         "docs/evidence/versions.md"),
    Rule("torch", (2, 7, 0), (2, 7, 1), "cuda",
         "uses NCCL's non-blocking mode for groups that are bound to a device, in which collectives hang at random",
         "https://github.com/pytorch/pytorch/issues/153960", {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}),
    Rule("torch", (2, 8), (2, 9), "xpu", "may hang in send, receive, gather, and scatter",
         "https://github.com/pytorch/pytorch/issues/156782", {"CCL_SEND": "direct", "CCL_RECV": "direct"}),
    # Replaced by this package's attention, and by torch's math kernel with dropout (model/attention_kernels.py).
    Rule("torch", (), (2, 11), XPU_ATTENTION, "has no fused attention with gradients on Intel GPUs",
         "https://github.com/intel/torch-xpu-ops/issues/2232"),
    # Every group of a layout is a split of the world's communicator. No release is known to have the fix.
    Rule("ROCm", (6, 4), (8,), "cuda", "may crash in ncclCommSplit with MSCCL",
         "https://github.com/ROCm/TheRock/issues/7874", {"RCCL_MSCCL_ENABLE": "0"}),
)


def find_rule(package: Package, version: str | None, use: str) -> Rule | None:
    """Return the rule for a use of an installed version, such as "2.7.0+cu126"; None without a known bug."""
    release = tuple(map(int, re.findall(r"\d+", (version or "").partition("+")[0])[:3]))
    return next((rule for rule in RULES if release and rule.package == package and rule.use == use
                 and rule.since <= release < rule.before), None)


def avoiding_settings(device_type: str, torch_version: str, rocm_version: str | None) -> dict[str, str]:
    """Return the variables that avoid bugs of torch and ROCm on a device type.

    Args:
        rocm_version: `torch.version.hip`.
    """
    rules = (find_rule("torch", torch_version, device_type), find_rule("ROCm", rocm_version, device_type))
    return {name: value for rule in rules if rule is not None for name, value in rule.settings.items()}
