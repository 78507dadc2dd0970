"""Tests of rejected and repaired layouts and of the suggestions, which must be legal."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from ezpz_llm.core.base.errors import UserError, run_command
from ezpz_llm.core.base.package_data import data_dir
from ezpz_llm.train import main
from ezpz_llm.training.layout import constraints, ops
from ezpz_llm.training.layout.batch import solve_batch
from ezpz_llm.training.layout.constraints import validate
from ezpz_llm.training.layout.knobs import LayoutCheck
from ezpz_llm.training.layout.layout import Layout, ZeroOptions
from ezpz_llm.training.layout.resolve import Request, Resolved, resolve
from ezpz_llm.training.layout.suggestions import (
    alternatives,
    as_cli_flags,
    is_legal,
    selection,
    shipped_layouts,
    validate_or_suggest,
)
from ezpz_llm.training.model.config import MODELS, ModelConfig
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import plan_run

TINY = MODELS["tiny-gpt2"]
LLAMA = MODELS["tiny-llama"]
ZERO1 = Layout("zero1", "deepspeed", ZeroOptions(1))
ZERO3 = Layout("zero3", "deepspeed", ZeroOptions(3))
HPZ2_TP2 = replace(ZERO3.with_zero(hpz_partition_size=2), tp=2)
TILED = ZERO3.with_zero(tiled=(("mlp.c_fc", 1, 4),))

REJECTED = {
    "ranks": ("check_world_size", LayoutCheck(replace(ZERO1, tp=2), 7, TINY), {"--tp 1", "6 ranks", "8 ranks"}),
    "ranks below the degrees": ("check_world_size", LayoutCheck(replace(ZERO1, tp=2, pp=2), 2, TINY),
                                {"4 ranks", "--tp 1", "--pp 1"}),
    "ddp with a stage": ("check_zero_stage", LayoutCheck(Layout("mine", "ddp", ZeroOptions(2)), 2, shipped=False),
                         {'"stage": 0', '"engine": "deepspeed"'}),
    "ddp pipeline": ("check_engine",
                     LayoutCheck(Layout("ddp", "ddp", pp=2), 2, TINY), {"--ds-config pp2", "--pp 1"}),
    "fsdp2 pipeline": ("check_engine",
                       LayoutCheck(Layout("fsdp2", "fsdp2", pp=4), 4, TINY),
                       {"--ds-config zero1 --pp 4", "--pp 1"}),
    "fsdp2 tensor parallel": ("check_engine",
                              LayoutCheck(Layout("fsdp2", "fsdp2", tp=2), 4, TINY),
                              {"--ds-config tp2_zero3", "--tp 1"}),
    "fsdp2 offload": ("check_offload_optimizer",
                      LayoutCheck(Layout("mine", "fsdp2", ZeroOptions(offload_optimizer="cpu")), 2, shipped=False),
                      {"no offload_optimizer", '"engine": "deepspeed" and "stage": 3'}),
    "ddp offload": ("check_offload_param",
                    LayoutCheck(Layout("mine", "ddp", ZeroOptions(offload_param="cpu")), 2, shipped=False),
                    {"no offload_param", '"engine": "deepspeed" and "stage": 3'}),
    "optimizer offload at stage 0": ("check_offload_optimizer",
                                     LayoutCheck(Layout("mine", "deepspeed",
                                                        ZeroOptions(0, offload_optimizer="cpu")), 2,
                                          shipped=False), {'"stage": 1', "no offload_optimizer"}),
    "parameter offload at stage 2": ("check_offload_param",
                                     LayoutCheck(Layout("mine", "deepspeed", ZeroOptions(2, offload_param="cpu")),
                                                 2,
                                          shipped=False),
                                     {'"stage": 3', "no offload_param"}),
    "stage 2 pipeline": ("check_pipeline_stage",
                         LayoutCheck(Layout("zero2", "deepspeed", ZeroOptions(2), pp=2), 2, TINY),
                         {"--ds-config pp2", "--pp 1"}),
    "stage 3 pipeline with tp": ("check_pipeline_stage", LayoutCheck(replace(ZERO3, pp=2, tp=2), 4, TINY),
                                 {"--ds-config pp2_tp2", "--pp 1"}),
    "stage 3 pipeline in a file": ("check_pipeline_stage",
                                   LayoutCheck(replace(ZERO3, pp=2), 2, TINY, shipped=False),
                                   {'"stage": 1', "--pp 1"}),
    "offloaded pipeline": ("check_pipeline_stage",
                           LayoutCheck(Layout("mine", "deepspeed", ZeroOptions(1, offload_optimizer="cpu"), pp=2),
                                       2,
                                shipped=False),
                           {"no offload_optimizer", "--pp 1"}),
    "pipeline with sequence parallel": ("check_pipeline_sequences",
                                        LayoutCheck(replace(ZERO1, pp=2, sp=2), 4, TINY),
                                        {"--sp 1", "--pp 1"}),
    "tiles without stage 3": ("check_tiled_stage", LayoutCheck(TILED.with_zero(stage=1), 2, TINY, shipped=False),
                              {'"stage": 3', "no tiled"}),
    "tiles with tensor parallel": ("check_tiled_stage", LayoutCheck(replace(TILED, tp=2), 2, TINY, shipped=False),
                                   {"--tp 1", "no tiled"}),
    "tiles with a pipeline": ("check_pipeline_stage", LayoutCheck(replace(TILED, pp=2), 2, TINY, shipped=False),
                              {'"stage": 1 and no tiled', "--pp 1"}),
    "unknown tiled layer": ("check_tiled_names",
                            LayoutCheck(ZERO3.with_zero(tiled=(("mlp.up", 1, 4),)), 2, shipped=False),
                            {"no tiled"}),
    "tiles of a missing gate": ("check_tiled_names",
                                LayoutCheck(ZERO3.with_zero(tiled=(("mlp.c_gate", 1, 4),)), 2, TINY,
                                     shipped=False), {"no tiled"}),
    "more tiles than rows": ("check_tiled_sizes",
                             LayoutCheck(ZERO3.with_zero(tiled=(("mlp.c_fc", 1, 513),)), 2, TINY,
                                               shipped=False), {"no tiled"}),
    "more tiles than columns": ("check_tiled_sizes",
                                LayoutCheck(ZERO3.with_zero(tiled=(("attn.c_attn", 129, 1),)), 2,
                                                          LLAMA, shipped=False), {"no tiled"}),
    "hpZ groups that do not divide the ranks": (
        "check_hpz", LayoutCheck(ZERO3.with_zero(hpz_partition_size=4), 6, TINY, shipped=False),
        {*(f'"zero_hpz_partition_size": {size}' for size in (2, 3, 6)), "4 ranks", "8 ranks"}),
    "hpZ with tensor parallel": ("check_hpz", LayoutCheck(HPZ2_TP2, 4, TINY, shipped=False),
                                 {"--tp 1", "no zero_hpz_partition_size"}),
    "shard_within that does not divide the ranks": (
        "check_shard_within", LayoutCheck(Layout("fsdp2", "fsdp2", ZeroOptions(shard_within=4)), 6, TINY),
        {*(f"--shard-within {size}" for size in (2, 3, 6)), "4 ranks", "8 ranks"}),
    "heads": ("check_heads", LayoutCheck(replace(ZERO1, tp=8), 8, TINY), {"--tp 4"}),
    "25 heads": ("check_heads", LayoutCheck(replace(ZERO1, tp=2), 4, MODELS["gpt2-1558m"]), {"--tp 1"}),
    "key/value heads": ("check_heads", LayoutCheck(replace(ZERO1, tp=4), 8, LLAMA), {"--tp 2"}),
    "key/value heads with sequence parallel": ("check_heads", LayoutCheck(replace(ZERO1, sp=2, tp=2), 4, LLAMA),
                                               {"--tp 1", "--sp 1"}),
    "MLP width": ("check_widths", LayoutCheck(replace(ZERO1, tp=4), 4, replace(TINY, intermediate_size=510)),
                  {"--tp 2"}),
    "vocabulary": ("check_widths",
                   LayoutCheck(replace(ZERO1, tp=2), 2, replace(TINY, vocab_size=65, vocab_multiple=1)),
                   {"--tp 1", "--vocab-multiple 2"}),
    "layers": ("check_pipeline_depth", LayoutCheck(replace(ZERO1, pp=8), 8, TINY), {"--pp 4", "--n-layer 8"}),
    "context": ("check_sequence_length", LayoutCheck(replace(ZERO1, sp=4), 4, replace(TINY, block_size=250)),
                {"--sp 2", "--block-size 248", "--block-size 252"}),
    "two at once": ("check_world_size", LayoutCheck(replace(ZERO3, tp=3, pp=2), 8, TINY),
                    {"--tp 1 --pp 1"}),
}


@pytest.mark.parametrize("title", REJECTED)
def test_an_illegal_layout_is_rejected_with_legal_suggestions(title: str) -> None:
    rule, case, suggested = REJECTED[title]
    _, _, problem = validate(case)
    assert problem is not None
    assert problem == next({check.__name__: check for check in constraints.RULES}[rule](case))
    choices = alternatives(case, problem)
    assert {as_cli_flags(case, choice) for choice in choices} == suggested
    for choice in choices:
        assert is_legal(choice)
    with pytest.raises(UserError) as raised:
        validate_or_suggest(case, {"tp": "command line"})
    assert raised.value.found == problem.message
    assert all(flags in raised.value.instead for flags in suggested)


def test_every_rule_has_a_test_case() -> None:
    repairs = {"check_pipeline_bubble"}
    assert {rule.__name__ for rule in constraints.RULES} == {rule for rule, *_ in REJECTED.values()} | repairs


def test_stage_0_under_a_pipeline_becomes_stage_1() -> None:
    layout, notes, problem = validate(LayoutCheck(Layout("zero0", "deepspeed", ZeroOptions(0), pp=2), 2, TINY))
    assert (layout.zero.stage, problem) == (1, None)
    assert "stage 1 instead of 0" in notes[0]
    resolved = resolve(Request("zero0", world_size=2, pp=2, global_batch=64, model=TINY))
    assert resolved.deepspeed["zero_optimization"]["stage"] == 1
    assert resolved.notes == notes


def test_a_pipeline_with_few_micro_batches_gets_a_note_about_its_bubble() -> None:
    def notes(accumulation: int) -> tuple[str, ...]:
        return resolve(Request("pp2", world_size=4, accumulation=accumulation, pp=4, model=TINY)).notes

    assert "idle 75% of the time with 1 micro" in notes(1)[0]
    assert "--gradient-accumulation-steps 16 reduces it to 16%" in notes(1)[0]
    assert notes(4) == ()


def test_all_suggestions_in_a_sweep_are_legal_options() -> None:
    """Every illegal case has suggestions, each of which passes every rule."""
    models: list[ModelConfig | None] = [None, TINY, LLAMA, MODELS["gpt2-1558m"], replace(TINY, n_layer=3)]
    fired = 0
    for base, world, model, tp, pp, sp in product(shipped_layouts(), (1, 6, 8), models, (1, 2, 3), (1, 2),
                                                  (1, 2)):
        case = LayoutCheck(replace(base, tp=tp, pp=pp, sp=sp), world, model,
                    batch=lambda dp_size: solve_batch(48, None, None, dp_size))
        problem = validate(case)[2]
        if problem is None:
            continue
        fired += 1
        choices = alternatives(case, problem)
        assert choices, (case, problem)
        for choice in choices:
            assert is_legal(choice)
            assert re.search(r"--ds-config|--tp|--pp|--sp|ranks|--\w+", as_cli_flags(case, choice))
    assert fired > 500


@pytest.fixture(autouse=True)
def _ops_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "is_built", lambda name: True)


def test_suggested_options_are_accepted_on_the_command_line() -> None:
    """Add each message's suggested options to the command line; the run can then be planned."""
    for argv, world in ((["--ds-config", "zero3", "--pp", "2"], 4), (["--ds-config", "fsdp2", "--tp", "2"], 4),
                        (["--tp", "8"], 8), (["--model", "tiny-llama", "--tp", "4"], 4), (["--pp", "8"], 8),
                        (["--sp", "4", "--block-size", "250"], 4),
                        (["--model", "shakespeare-char", "--n-head", "4", "--tp", "2"], 2),
                        (["--ds-config", "sp2", "--pp", "2"], 4), (["--ds-config", "zero3_nvme", "--pp", "2"], 2)):
        with pytest.raises(UserError) as raised:
            plan_run(parse(argv), world)
        for suggestion in raised.value.instead.split(" or "):
            plan_run(parse([*argv, *shlex.split(suggestion), "--gradient-accumulation-steps", "8"]), world)


def test_the_check_fails_with_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as raised:
        main(["--ds-config", "tp2_zero3", "--pp", "2", "--check", "--world-size", "8"])
    message = str(raised.value)
    assert raised.value.exit_code == 2
    assert "DeepSpeed rejects ZeRO stage 3 in pipelines" in message
    assert "tp2_zero3.json, pp from command line" in message
    assert "instead: --ds-config pp2_tp2 or --pp 1" in message


def test_the_page_shows_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/reference/layouts.md").read_text()
    arguments, shown = re.search(r"\$ python3 -m ezpz_llm.train (.*--check.*)\n((?:.*\n)*?)```", page).groups()
    assert run_command(main, shlex.split(arguments)) == 2
    assert capsys.readouterr().err.replace(f"{data_dir('ds_configs').parent}/", "") == shown


def test_vocab_multiple_pads_the_vocabulary() -> None:
    argv = ["--model", "shakespeare-char", "--n-head", "4", "--tp", "2", "--vocab-multiple", "2"]
    plan = plan_run(parse(argv), 2)
    assert plan.model.padded_vocab_size == 66


def test_every_shipped_layout_selects_itself() -> None:
    for layout in shipped_layouts():
        # 3d and pp2_tp2 are the same layout.
        assert selection(layout) == f"--ds-config {layout.name}".replace("3d", "pp2_tp2")
    assert selection(replace(ZERO1, tp=4, pp=2)) == "--ds-config zero1 --tp 4 --pp 2"
    assert selection(Layout("mine", "deepspeed", ZeroOptions(2, offload_optimizer="cpu"))) is None


@pytest.fixture
def read(tmp_path: Path):
    """Resolve a ds_config with these values."""
    def read(values: dict[str, Any], world_size: int = 4, **request: Any) -> Resolved:
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(values))
        return resolve(Request(str(path), world_size=world_size, accumulation=8, model=TINY, **request))
    return read


def test_degrees_in_deepspeeds_keys_are_translated(read) -> None:
    resolved = read({"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2},
                     "pipeline": {"stages": 2, "partition": "best"}})
    assert (resolved.layout.tp, resolved.layout.pp, resolved.batch.dp_size) == (2, 2, 1)
    assert not {"tensor_parallel", "pipeline"} & resolved.deepspeed.keys()
    notes = " ".join(resolved.notes)
    assert "tensor_parallel.autotp_size 2 of mine.json becomes tp 2" in notes
    assert "pipeline.stages 2 of mine.json becomes pp 2" in notes
    resolved = read({"zero_optimization": {"stage": 3}, "sequence_parallel_size": 2})
    assert resolved.layout.sp == 2
    assert "sequence_parallel_size" not in resolved.deepspeed
    assert "sequence_parallel_size 2 of mine.json becomes sp 2" in " ".join(resolved.notes)
    typed = read({"zero_optimization": {"stage": 3}, "sequence_parallel_size": 2}, sp=4)
    assert typed.layout.sp == 4
    for degree_1 in ({"tensor_parallel": {"autotp_size": 0}}, {"pipeline": {"stages": "auto"}},
                  {"sequence_parallel_size": 1}):
        assert read(degree_1).layout == Layout("mine", "deepspeed", ZeroOptions(0))


@pytest.mark.parametrize(("values", "message"), [
    ({"tensor_parallel": {"autotp_size": -1}}, "autotp_size is -1"),
    ({"tensor_parallel": {"autotp_size": 2}, "ezpz_llm": {"tp": 4}}, 'tp in "ezpz_llm" is 4'),
    ({"sequence_parallel_size": "2"}, "not a whole number"),
    ({"data_parallel_size": 2}, "data_parallel_size is 2"),
    ({"pipeline": {"pipe_partitioned": True}}, "pipe_partitioned"),
    ({"pipeline": {"partition": "type:Block"}}, "pipeline.partition"),
    ({"pipeline": {"seed_layers": True}}, "seed_layers"),
])
def test_invalid_degrees_in_deepspeeds_keys_are_rejected(read, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read(values)
