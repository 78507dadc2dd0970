"""Known bugs of other packages by version."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed import HashStore

from ezpz_llm.training.dist import version_rules
from ezpz_llm.training.dist.process_group import create_group
from ezpz_llm.training.dist.version_rules import (
    OVERLAP,
    PIPELINES,
    RULES,
    STAGE_2,
    Rule,
    avoiding_settings,
    find_rule,
)


@pytest.mark.parametrize(("version", "use", "is_wrong"), [
    ("0.17.6", STAGE_2, True), ("0.18.0", STAGE_2, False), ("0.19.2", PIPELINES, True),
    ("0.19.3", PIPELINES, False),
    ("0.19.2+cu12", OVERLAP, True), ("0.20.0", OVERLAP, False), ("0.19", PIPELINES, True), (None, PIPELINES, False),
])
def test_versions_are_compared_to_the_third_number(version: str | None, use: str, is_wrong: bool) -> None:
    assert (find_rule("DeepSpeed", version, use) is not None) == is_wrong


@pytest.mark.parametrize(("device", "torch_version", "rocm", "expected"), [
    ("cuda", "2.7.0+cu126", None, {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}),
    ("cuda", "2.7.1+cu126", None, {}),
    ("cuda", "2.6.0", None, {}),
    ("cpu", "2.7.0+cpu", None, {}),
    ("cuda", "2.8.0+rocm6.4", "6.4.43484-123eb5128", {"RCCL_MSCCL_ENABLE": "0"}),
    ("cuda", "2.8.0+rocm6.3", "6.3.42131", {}),
    ("xpu", "2.8.0+xpu", None, {"CCL_SEND": "direct", "CCL_RECV": "direct"}),
    ("xpu", "2.9.1+xpu", None, {}),
])
def test_settings_avoid_bugs(device: str, torch_version: str, rocm: str | None, expected: dict[str, str]) -> None:
    assert avoiding_settings(device, torch_version, rocm) == expected


def test_each_bug_has_a_public_source() -> None:
    for rule in RULES:
        assert rule.issue.startswith(("https://github.com/", "docs/evidence/")), rule
        assert rule.since < rule.before, rule


def test_settings_are_made_before_the_group_unless_the_user_has_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_rules, "RULES", (
        Rule("torch", (), (99,), "cpu", "", "https://github.com/", {"A_LIBRARYS_SETTING": "0", "USERS": "0"}),))
    monkeypatch.setenv("A_LIBRARYS_SETTING", "")
    monkeypatch.delenv("A_LIBRARYS_SETTING")
    monkeypatch.setenv("USERS", "1")
    create_group(torch.device("cpu"), HashStore(), 0, 1, torch.distributed.default_pg_timeout)
    torch.distributed.destroy_process_group()
    assert (os.environ["A_LIBRARYS_SETTING"], os.environ["USERS"]) == ("0", "1")
