"""Tests of ZeRO options from rule to memory and traffic, with hpZ in a user's ds_config."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from places import ROOT

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.package_data import data_dir
from ezpz_llm.training.layout import ds_config, suggestions
from ezpz_llm.training.layout.knobs import KNOBS, knob_rows
from ezpz_llm.training.layout.layout import Layout, ZeroOptions
from ezpz_llm.training.layout.memory import held_parameters, memory_per_rank
from ezpz_llm.training.layout.resolve import Request, Resolved, resolve
from ezpz_llm.training.model.config import MODELS
from ezpz_llm.verify.certify.case import published_traffic

TINY = MODELS["tiny-gpt2"]
HPZ2 = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
HPZ4 = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}


@pytest.fixture
def zeropp(tmp_path: Path):
    def zeropp(world_size: int, **given: int) -> Resolved:
        path = tmp_path / "zeropp.json"
        path.write_text(json.dumps(HPZ2))
        return resolve(Request(str(path), world_size=world_size, model=TINY, **given))
    return zeropp


def test_hpz_is_certified_and_must_divide_the_ranks(zeropp) -> None:
    resolved = zeropp(4)
    assert resolved.layout.zero == ZeroOptions(3, hpz_partition_size=2)
    assert "zero_hpz_partition_size" in resolved.explain()
    assert not any(note.startswith("uncertified: ") for note in resolved.notes)
    with pytest.raises(UserError, match="2 does not divide the 3 ranks"):
        zeropp(3)


def test_hpz_changes_the_estimates_of_memory_and_traffic(zeropp) -> None:
    resolved, zero3 = zeropp(8, accumulation=2), resolve(Request("zero3", world_size=8, model=TINY, accumulation=2))
    parameters = held_parameters(zero3.layout, TINY, 0)
    more = {part.kind: part.bytes for part in memory_per_rank(resolved.layout, TINY, 8)}
    assert more.pop("secondary") == 4 * parameters // 2
    assert more == {part.kind: part.bytes for part in memory_per_rank(zero3.layout, TINY, 8)}
    volume, whole = (published_traffic(run.layout, TINY, run.batch) for run in (resolved, zero3))
    assert whole["all_gather"] == 4 * (4 * parameters)
    assert (volume["all_gather"], volume["all_gather (2 ranks)"]) == (4 * parameters, 3 * (4 * parameters))


def test_a_key_that_no_certificate_covers_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"zero_optimization": {
        "stage": 2, "round_robin_gradients": True, "stage3_gather_16bit_weights_on_model_save": True}}))
    notes = " ".join(resolve(Request(str(path), world_size=4, model=TINY)).notes)
    assert "uncertified: round_robin_gradients of mine.json; no certificate covers" in notes


def test_hpz_with_groups_of_two_is_a_shipped_layout(zeropp) -> None:
    assert resolve(Request("zero3_hpz2", world_size=8)).layout == zeropp(8).layout
    assert suggestions.selection(zeropp(8).layout) == "--ds-config zero3_hpz2"


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16_autocast", 4), ("bf16", 2)])
def test_the_second_copy_has_the_parameters_dtype(zeropp, precision: str, itemsize: int) -> None:
    layout = zeropp(8).layout
    sizes = {part.kind: part.bytes for part in memory_per_rank(layout, TINY, 8, precision=precision)}
    assert sizes["secondary"] == itemsize * held_parameters(layout, TINY, 0) // 2


def test_shard_within_changes_the_estimates_of_memory_and_traffic() -> None:
    fsdp2 = resolve(Request("fsdp2", world_size=8, model=TINY, accumulation=2))
    resolved = resolve(Request("fsdp2", world_size=8, model=TINY, accumulation=2, shard_within=4))
    parameters = held_parameters(fsdp2.layout, TINY, 0)
    assert sum(part.bytes for part in memory_per_rank(resolved.layout, TINY, 8)) == 16 * parameters // 4
    whole = published_traffic(fsdp2.layout, TINY, fsdp2.batch)
    assert published_traffic(resolved.layout, TINY, resolved.batch) == {
        "all_gather (4 ranks)": whole["all_gather"], "reduce_scatter (4 ranks)": whole["reduce_scatter"],
        "all_reduce (2 ranks)": whole["reduce_scatter"] // 4}
    assert resolve(Request("fsdp2_within2", world_size=8, shard_within=4)).layout == resolved.layout
    assert str(resolved.sources["shard_within"]) == "command line"
    assert suggestions.selection(resolve(Request("fsdp2_within2",
                                                 world_size=8)).layout) == "--ds-config fsdp2_within2"


@pytest.mark.parametrize(("layout", "world_size", "within", "message", "instead"), [
    ("fsdp2", 6, 4, "shard_within 4 does not divide the 6 ranks", "--shard-within 2 or --shard-within 3 or "),
    ("zero3", 4, 2, "engine deepspeed does not support shard_within", "no shard_within"),
    ("fsdp2", 4, 1, "shard_within is 1", "2 or more")])
def test_invalid_shard_within_is_rejected(layout: str, world_size: int, within: int, message: str,
                                          instead: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        resolve(Request(layout, world_size=world_size, model=TINY, shard_within=within))
    assert instead in (error.value.instead or "")


def test_a_new_layout_keeps_the_options_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ds_configs"
    shutil.copytree(data_dir("ds_configs"), folder)
    originals = [suggestions.selection(layout) for layout in suggestions.shipped_layouts()]
    (folder / "zeropp.json").write_text(json.dumps(HPZ4))
    with monkeypatch.context() as patched:
        patched.setattr(ds_config, "data_dir", lambda name: folder)
        suggestions.shipped_layouts.cache_clear()
        selections = {layout.name: suggestions.selection(layout) for layout in suggestions.shipped_layouts()}
    suggestions.shipped_layouts.cache_clear()
    assert selections.pop("zeropp") == "--ds-config zeropp"
    assert list(selections.values()) == originals


def test_layouts_compare_by_value_and_round_trip_through_a_record() -> None:
    layout = Layout("mine", "deepspeed", ZeroOptions(3, tiled=(("mlp.c_fc", 1, 4),), hpz_partition_size=2), sp=2)
    record = json.loads(json.dumps(layout.as_record()))
    assert Layout.from_record(record, "layout.json") == layout == Layout("other", "deepspeed", layout.zero, sp=2)
    del record["hpz_partition_size"]
    assert Layout.from_record(record, "layout.json") == layout.with_zero(hpz_partition_size=1)


def test_the_page_has_the_table_with_each_option_once() -> None:
    assert [knob.field for knob in KNOBS] == [item.name for item in fields(ZeroOptions)]
    page = (ROOT / "docs" / "reference" / "layouts.md").read_text()
    for row in knob_rows():
        assert f"| {' | '.join(row)} |" in page


def test_options_of_certified_layouts_are_marked_certified() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "certify.json").read_text())
    certified = {result["layout"] for result in record["results"] if result["passed"]}
    layouts = [layout for layout in suggestions.shipped_layouts() if layout.name in certified]
    for knob in KNOBS:
        assert knob.certified == any(knob.is_set(layout) for layout in layouts), knob.key
