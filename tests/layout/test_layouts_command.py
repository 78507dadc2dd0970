"""Tests of `ezpz-llm layouts`: its lists, its memory estimates, and its recorded output."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_ranks import CONFIGS
from places import HELPERS, ROOT
from rank_jobs import results_of
from slowness import scaled
from version_matrix import LAYOUTS

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.layouts import main
from ezpz_llm.training.dist.degrees import Degrees
from ezpz_llm.training.engine.precision import autocast_forward
from ezpz_llm.training.layout import ds_config, ops
from ezpz_llm.training.layout.layout import Layout, ZeroOptions
from ezpz_llm.training.layout.memory import cast_per_rank, held_parameters, memory_per_rank, total, unsharded_bytes
from ezpz_llm.training.layout.resolve import Request, Resolved, resolve
from ezpz_llm.training.layout.suggestions import shipped_layouts
from ezpz_llm.training.model.config import MODELS
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.parameters import block_matrix_count, parameter_count

PAGE = ROOT / "benchmarks/results/layouts_command.md"


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_every_layout_has_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys).splitlines()
    assert sorted(line.split()[0] for line in lines) == ds_config.names()
    assert all(len(line.split()) > 4 for line in lines)
    assert any(line.startswith("tiled ") and "gathered one at a time" in line for line in lines)
    assert sorted(json.loads(printed(capsys, "--json"))) == ds_config.names()


def test_other_versions_are_tested_with_each_layout_that_needs_no_op() -> None:
    assert sorted(LAYOUTS) == sorted(layout.name for layout in shipped_layouts() if not ops.needed_ops(layout))


def resolved(typed: str, model: str, world: int) -> Resolved:
    """Resolve a run with these words on its command line."""
    arguments = shlex.split(typed)
    options = {name.lstrip("-"): value for name, value in zip(arguments[::2], arguments[1::2], strict=True)}
    name = options.pop("ds-config")
    return resolve(Request(name, world_size=world, model=MODELS[model], accumulation=8,
                           **{degree: int(value) for degree, value in options.items()}))


def test_legal_layouts_resolve_and_illegal_ones_do_not(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "is_built", lambda name: True)
    for model, world in (("llama3-8b", 64), ("gpt2-1558m", 6), ("tiny-llama", 1)):
        output = json.loads(printed(capsys, "--world", str(world), "--model", model, "--json"))
        assert sorted(entry["name"] for entry in output["named"]) == ds_config.names()
        for entry in output["named"]:
            typed = f"--ds-config {entry['name']}"
            if entry["reason"] is None:
                assert resolved(typed, model, world).batch.dp_size == entry["degrees"]["dp"]
                continue
            with pytest.raises(UserError, match=re.escape(entry["reason"])):
                resolved(typed, model, world)
            for offer in entry["instead"]:
                ranks = re.fullmatch(r"(\d+) ranks", offer)
                resolved(f"{typed} {'' if ranks else offer}", model, int(ranks[1]) if ranks else world)
        for grid in output["degrees"]:
            for stage, entry in grid["stages"].items():
                layout = resolved(entry["words"], model, world).layout
                assert (layout.tp, layout.pp, layout.sp) == (grid["tp"], grid["pp"], grid["sp"])
                assert layout.zero.stage == int(stage)


def test_unlisted_degrees_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    output = json.loads(printed(capsys, "--world", "8", "--model", "tiny-llama", "--json"))
    listed = {(grid["tp"], grid["pp"], grid["sp"], int(stage))
              for grid in output["degrees"] for stage in grid["stages"]}
    for tp, pp, sp, stage in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (0, 1, 2, 3)):
        try:
            layout = resolved(f"--ds-config zero{stage} --tp {tp} --pp {pp} --sp {sp}", "tiny-llama", 8).layout
        except UserError:
            assert (tp, pp, sp, stage) not in listed
        else:
            assert (tp, pp, sp, layout.zero.stage) in listed


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-llama"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
def test_estimated_parameters_equal_those_of_each_rank(model: str, tp: int, pp: int) -> None:
    """Compare with the model that each rank assembles for training."""
    from ezpz_llm.training.engine.build import assemble

    config, layout = MODELS[model], Layout("x", "deepspeed", ZeroOptions(1), tp=tp, pp=pp)
    degrees = Degrees.of_world(tp * pp, tp, pp)
    for rank in range(tp * pp):
        place = degrees.coordinates(rank)
        mesh = SimpleNamespace(group=lambda *axes: None, tp_rank=place["tp"], tp_size=tp, pp_rank=place["pp"],
                               pp_size=pp)
        part = assemble(config, layout, mesh, seed=0)
        assert sum(parameter.numel() for parameter in part.parameters()) == held_parameters(layout, config,
                                                                                            place["pp"])


@pytest.mark.parametrize(("name", "device", "host", "files"), [
    ("ddp", 16, 0, 0), ("fsdp2", 4, 0, 0), ("fsdp2_within2", 8, 0, 0), ("zero0", 16, 0, 0),
    ("zero1", 8 + 12 / 4, 0, 0), ("zero2", 4 + 16 / 4, 0, 0), ("zero3", 5, 0, 0), ("zero3_hpz2", 7, 0, 0),
    ("zero3_offload_optimizer", 1, 4, 0),
    ("zero3_offload_all", 0, 5, 0), ("zero3_nvme", 0, 1, 4), ("sp2", 8 + 12 / 4, 0, 0), ("tiled", 5, 0, 0)])
def test_bytes_per_parameter_on_four_ranks(name: str, device: float, host: float, files: float) -> None:
    config = MODELS["gpt2-124m"]
    layout = next(layout for layout in shipped_layouts() if layout.name == name)
    parts = memory_per_rank(layout, config, 4)
    count = parameter_count(config)
    for where, expected in (("device", device), ("host", host), ("files", files)):
        assert total(parts, where) == pytest.approx(expected * count, rel=1e-6)


def test_named_layouts_have_bf16_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    output = json.loads(printed(capsys, "--world", "8", "--model", "gpt2-124m", "--json"))
    count = parameter_count(MODELS["gpt2-124m"])
    sizes = {entry["name"]: sum(part["bytes"] for part in entry["memory_bf16"]) / count
             for entry in output["named"]}
    assert {name: round(sizes[name], 2) for name in ("ddp", "zero1", "zero3", "zero3_hpz2", "fsdp2",
                                                         "fsdp2_within2")} == {
        "ddp": 18, "zero1": 4, "zero3": 2.25, "zero3_hpz2": 3.25, "fsdp2": 2, "fsdp2_within2": 8}
    assert sizes["zero0"] == 0
    assert (round(sizes["pp2"], 1), sizes["zero3_nvme"]) == (5.9, 2.25)
    rows = {line.split()[0]: line.split()[-1] for line in printed(
        capsys, "--world", "8", "--model", "gpt2-124m").split("\n\n")[0].splitlines()[2:]}
    assert rows["zero1"] == f"{4 * count / 1e9:.3g}"
    assert rows["zero0"] == "-"


@pytest.mark.full
def test_estimated_casts_equal_what_autograd_keeps(tmp_path: Path) -> None:
    """Compare with a forward pass in bf16 on two ranks.

    FSDP2 keeps as much as DDP, but nothing if parameters are gathered in bf16. ZeRO-3 keeps nothing.
    """
    layouts = ["ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3"]
    casts = results_of(HELPERS / "cast_ranks.py", tmp_path, [*layouts, "bf16:fsdp2"], 2)
    config = MODELS["gpt2-124m"]
    for layout in shipped_layouts():
        if layout.name in layouts:
            count = config.n_layer * block_matrix_count(config)
            assert cast_per_rank(layout, config).bytes == pytest.approx(2 * casts[layout.name] * count)
    assert list(casts.values()) == [1, 1, 1, 1, 1, 0, 0]


@pytest.mark.full
def test_estimated_unsharded_state_of_fsdp2_equals_the_measured_one(tmp_path: Path) -> None:
    """Compare with the first of two micro-steps: parameters after its forward pass, gradients after backward."""
    measured = results_of(HELPERS / "whole_ranks.py", tmp_path, ["fp32", "bf16_autocast", "bf16"], 2)
    fsdp2 = next(layout for layout in shipped_layouts() if layout.name == "fsdp2")
    config = CONFIGS["llama"]
    for precision, (parameters, gradients) in measured.items():
        assert unsharded_bytes(fsdp2, config, precision, 1) == parameters
        assert unsharded_bytes(fsdp2, config, precision, 2) == parameters + gradients
    assert measured["bf16"][1] == 0 < measured["fp32"][1]


def test_each_micro_batch_in_flight_has_its_own_casts() -> None:
    config, casts = MODELS["tiny-llama"], {}
    model = GPT(config)
    autocast_forward(model, torch.device("cpu"), "bf16_autocast")
    matrices = {tuple(parameter.shape) for name, parameter in model.named_parameters() if ".h." in name}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16 and {tuple(tensor.shape), tuple(tensor.shape[::-1])} & matrices:
            casts[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens, losses = torch.zeros(1, 23, dtype=torch.long), []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for number in (1, 2):
            losses.append(model(tokens, tokens))
            elements = sum(tensor.numel() for tensor in casts.values())
            assert elements == number * config.n_layer * block_matrix_count(config)


def test_groups_that_cross_nodes_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    output = json.loads(printed(capsys, "--world", "16", "--model", "llama3-1b", "--ranks-per-node", "4", "--json"))
    assert {grid["tp"] for grid in output["degrees"] if grid["crosses_nodes"]} == {8}
    text = printed(capsys, "--world", "16", "--model", "llama3-1b", "--ranks-per-node", "6")
    assert re.search(r"zero1 --tp 4 .*crosses nodes", text)
    assert re.search(r"tp2_zero1 .*in a node", text)


@pytest.mark.parametrize("argv", [("--world", "0"), ("--world", "2", "--ranks-per-node", "0"),
                                  ("--ranks-per-node", "2"), ("--world", "2", "--model", "llama3-9b")])
def test_invalid_options_are_rejected(argv: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as raised:
        main(argv)
    assert raised.value.instead


def test_nothing_heavy_is_imported() -> None:
    program = ("import sys; from ezpz_llm.layouts import main; main(['--world', '64', '--model', "
               "'llama3-8b']); sys.exit(bool({'torch', 'deepspeed', 'numpy', 'rich'} & set(sys.modules)))")
    process = subprocess.run([sys.executable, "-c", program], timeout=scaled(60), check=False, capture_output=True)
    assert process.returncode == 0, process.stderr


def test_the_page_shows_the_output_of_the_command(recording: bool) -> None:
    """Run each command on the page and compare its output."""
    def run(block: re.Match[str]) -> str:
        program = "from ezpz_llm.cli import main; raise SystemExit(main())"
        process = subprocess.run([sys.executable, "-c", program, *shlex.split(block[1])], capture_output=True,
                                 text=True, timeout=scaled(60), check=True)
        return f"```\n$ ezpz-llm {block[1]}\n{process.stdout}```\n"

    text = PAGE.read_text()
    updated, blocks = re.subn(r"```\n\$ ezpz-llm (layouts.*)\n(?:.*\n)*?```\n", run, text)
    assert blocks == 2
    if recording:
        PAGE.write_text(updated)
    else:
        assert updated == text, "the output has changed; run python3 benchmarks/record.py layouts-page"
