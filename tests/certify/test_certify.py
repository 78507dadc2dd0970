"""certify without running it: cases, bounds, verdicts, faults, expected traffic, and the table in the docs."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from places import ROOT
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.records import as_plain, as_record
from ezpz_llm.training.layout import ds_config, ops
from ezpz_llm.training.layout.knobs import KNOBS
from ezpz_llm.training.layout.memory import memory_per_rank
from ezpz_llm.training.layout.precision_recipes import GradientDtypes
from ezpz_llm.training.layout.suggestions import shipped_layouts
from ezpz_llm.training.model.parameters import parameter_count, parameter_shapes
from ezpz_llm.verify.certify import recipe, verdict
from ezpz_llm.verify.certify.case import Observed, dtype_findings, published_traffic, theoretical_numbers
from ezpz_llm.verify.certify.cases import (
    Case,
    all_cases,
    natural_worlds,
    omitted_cases,
    parser,
    paths_worlds,
    plan,
    quick_cases,
    resolve_case,
    split_runnable,
)
from ezpz_llm.verify.certify.injected_faults import FAULTS
from ezpz_llm.verify.certify.records import (
    CaseResult,
    CertificateRecord,
    KindTraffic,
    Machine,
    MemoryPart,
    Noise,
    RankCollectives,
    ReferenceSummary,
    SkippedCase,
    SummaryNoise,
    Worst,
)
from ezpz_llm.verify.certify.reference import Trajectory, certain_texts, check_gradients
from ezpz_llm.verify.certify.report import BEGIN, END, all_passed, as_json, basis, closing_text, write_docs


def planned(*arguments: str, world_size: int | None = None):
    return plan(parser().parse_args(arguments), world_size)


def test_planning_imports_no_torch(tmp_path: Path) -> None:
    program = ("import sys; from ezpz_llm.verify.certify.command import main; "
               "code = main(['--check', '--layouts', 'ddp', '--world-size', '2']); "
               "assert not {'torch', 'deepspeed'} & set(sys.modules); raise SystemExit(code)")
    process = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
                             timeout=scaled(60), check=False)
    assert process.returncode == 0, process.stderr
    assert not list(tmp_path.iterdir())


def test_layouts_are_certified_in_their_natural_worlds() -> None:
    assert natural_worlds("zero3") == (1, 2, 4)
    assert natural_worlds("tp2") == (2, 4)
    assert natural_worlds("pp2_tp2") == (4,)
    assert natural_worlds("3d") == (8,)
    assert natural_worlds("zero3_hpz2") == natural_worlds("fsdp2_within2") == (4,)


def test_quick_has_every_layout_in_both_shapes_and_each_kind_in_bf16() -> None:
    names = ds_config.names()
    cases = quick_cases(names, None, recipe.MODELS, recipe.DTYPES)
    assert ({(case.layout, case.model) for case in cases if case.dtype == "fp32"}
            == {(name, model) for name in names for model in recipe.MODELS})
    rounded = {case.layout: (case.dtype, case.model) for case in cases if case.dtype != "fp32"}
    assert set(rounded) == {"ddp", "fsdp2", "zero1", "zero3", "zero3_offload_optimizer", "tiled", "tp2_zero1",
                            "tp2_zero3", "sp2", "pp2", "pp2_tp2"}
    assert rounded["zero3"] == ("bf16", "tiny-gpt2")
    assert rounded["pp2"] == ("bf16", "tiny-gpt2")
    assert rounded["tiled"][0] == rounded["zero3_offload_optimizer"][0] == "bf16"


def test_quick_reports_a_bf16_case_as_missing_if_its_op_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "is_built", lambda name: False)
    work = planned("--quick", "--layouts", "ddp,zero3_offload_optimizer")
    assert [(skip.case.dtype, skip.illegal) for skip in work.skipped] == [("fp32", False)] * 2 + [("bf16", False)]


def test_tiny_wide_replaces_tiny_gpt2_where_it_also_runs_on_fewer_ranks() -> None:
    cases = all_cases(("zero1", "3d"), None, recipe.ALL_MODELS, recipe.DTYPES)
    gpt2 = [(case.layout, case.world, case.dtype) for case in cases if case.model == "tiny-gpt2"]
    assert gpt2 == [("zero1", world, dtype) for world in (1, 2) for dtype in recipe.DTYPES] + [
        ("zero1", 4, "bf16_autocast"), *(("3d", 8, dtype) for dtype in recipe.DTYPES)]


def test_quick_prints_what_it_omits() -> None:
    assert omitted_cases(planned("--quick", "--layouts", "pp2_tp2")) == (
        "--quick omits 6 of 9 cases of these layouts: on 4 ranks, in fp32, bf16_autocast, bf16, of tiny-gpt2, "
        "tiny-llama, tiny-paths, tiny-wide (omit --quick to run them)\n"
        "not covered by any layout: dropout, fp16, the data reader, z-loss, 3 ranks\n"
        "one process is checked with ignored targets and a z-loss")
    assert omitted_cases(planned("--layouts", "pp2_tp2")).startswith(
        "not covered by any layout: dropout, fp16, the data reader\n")


@pytest.mark.parametrize(("model", "worlds"), [("tiny-llama", natural_worlds), ("tiny-paths", paths_worlds)])
def test_every_case_has_the_batch_size_of_its_model(model: str, worlds: Callable[[str], tuple[int, ...]]) -> None:
    cases, skipped = split_runnable([Case(name, world, model, "fp32") for name in ds_config.names()
                                     for world in worlds(name)], "cpu")
    assert all(not entry.illegal for entry in skipped)
    for case in cases:
        batch = resolve_case(case, "cpu").batch
        assert batch.global_batch == recipe.shape(model).global_batch
        assert batch.accumulation > 1


def test_further_paths_are_certified_on_three_ranks_and_in_the_largest_world() -> None:
    assert paths_worlds("zero3") == (3, 4)
    assert paths_worlds("tp2") == paths_worlds("zero3_hpz2") == (4,)
    assert paths_worlds("3d") == (8,)
    assert paths_worlds("pp2") == (6,)
    shape = recipe.shape("tiny-paths")
    rows = recipe.sequences(shape.config, 3, shape.global_batch)
    tokens, targets = recipe.tokens_and_targets(rows, shape)
    ignored = targets == -100
    assert (tokens == rows[:, :-1]).all()
    assert (targets[~ignored] == rows[:, 1:][~ignored]).all()
    assert (ignored.sum(axis=1) == shape.config.block_size / 8).all()
    assert (ignored[0] != ignored).any(), "rows ignore different positions"


def test_quick_respects_the_other_options() -> None:
    work = planned("--quick", "--layouts", "ddp,zero3", "--dtype", "bf16_autocast", "--model", "tiny-llama",
                   "--world", "4")
    assert [(case.layout, case.world, case.model, case.dtype) for case in work.cases] == [
        ("ddp", 4, "tiny-llama", "bf16_autocast"), ("zero3", 4, "tiny-llama", "bf16_autocast")]


def test_a_fault_is_injected_into_every_case_it_applies_to() -> None:
    work = planned("--layouts", "ddp,zero1", "--inject-fault", "early-sync,gradients-x2", "--model", "tiny-gpt2",
                   "--dtype", "fp32", "--world", "1,2")
    assert [(case.fault, case.layout, case.world) for case in work.cases if case.fault == "early-sync"] == [
        ("early-sync", "ddp", 2)]
    assert len(work.cases) == 1 + 4


def test_if_nothing_can_run_the_error_names_world_sizes() -> None:
    with pytest.raises(UserError) as caught:
        planned("--layouts", "tp2,3d", "--world", "3")
    assert "3d: 3 ranks cannot be divided" in caught.value.found
    assert caught.value.instead == "--world 2 or 4 or 8"


def test_an_illegal_world_size_is_skipped_with_its_reason() -> None:
    work = planned("--layouts", "ddp,tp2", "--world", "1")
    assert {case.layout for case in work.cases} == {"ddp"}
    assert all(entry.illegal and "cannot be divided" in entry.reason for entry in work.skipped)
    assert all_passed([result()], work.skipped)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--layouts", "zero5"], "zero5"), (["--model", "tiny-gpt3"], "tiny-gpt3"), (["--dtype", "fp64"], "fp64"),
    (["--world", "two"], "two"), (["--world", "0"], "0"), (["--steps", "1"], "--steps 1 is too few"),
    (["--inject-fault", "gradients-x3"], "gradients-x3"), (["--layouts", ","], "empty"),
    (["--write-docs", "--layouts", "ddp"], "a row for every layout"), (["--write-docs", "--quick"], "whole matrix"),
    (["--json", "."], "is a directory"),
    (["--layouts", "tp2", "--world", "1"], "nothing to certify"),
    (["--layouts", "zero2", "--inject-fault", "unmarked-tp"], "not tensor-parallel"),
    (["--layouts", "zero3", "--inject-fault", "stale-second-copy"], "no second copy of the parameters"),
    (["--layouts", "ddp", "--world", "1", "--inject-fault", "duplicated-data"], "no second data-parallel rank"),
    (["--layouts", "zero1", "--world", "2", "--inject-fault", "early-sync"], "only ddp"),
    (["--layouts", "tp2", "--inject-fault", "wrong-sp-scale"], "not sequence-parallel"),
    (["--layouts", "ddp", "--dtype", "fp32", "--inject-fault", "stale-masters"], "no master weights"),
    (["--layouts", "ddp,tp2", "--world", "2", "--inject-fault", "beta2"], "into ddp on 1 rank only"),
])
def test_invalid_options_are_rejected(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        planned(*arguments)
    assert message in str(caught.value)


def test_under_launch_only_cases_with_its_world_size_run() -> None:
    work = planned("--layouts", "ddp,tp2,pp2_tp2", world_size=2)
    assert {case.world for case in work.cases} == {2}
    assert len(work.cases) == 2 * (2 + 3) + 2 + 3, (
        "two models; tp2 in two precisions, ddp in bf16 as well; tiny-paths; tiny-wide, for ddp also in bf16")
    work = planned("--layouts", "ddp,tp2,pp2_tp2", "--quick", world_size=2)
    assert [(case.layout, case.world, case.dtype) for case in work.cases] == [
        ("ddp", 2, "fp32"), ("ddp", 2, "fp32"), ("ddp", 2, "bf16"), ("tp2", 2, "fp32"), ("tp2", 2, "fp32")]
    with pytest.raises(UserError, match="launch started 2 ranks, but --world is 4"):
        planned("--world", "4", world_size=2)


def test_gradient_bounds_grow_towards_the_embedding() -> None:
    names = ["transformer.ln_f.weight", "transformer.h.3.attn.c_proj.weight", "transformer.h.0.ln_1.bias",
             "transformer.wte.weight"]
    assert [verdict.depth(name, 4) for name in names] == [0, 1, 4, 5]
    assert verdict.gradient_bound(names[0], 4, "bf16_autocast") == 4 * 2 ** -8
    assert verdict.gradient_bound(names[3], 4, "fp32") == pytest.approx(4 * 1.03 ** 5 * 2 ** -24)


def test_the_recipe_is_deterministic_and_learnable() -> None:
    config = recipe.model_config("tiny-gpt2")
    tokens = recipe.sequences(config, 3, 16)
    assert tokens.shape == (16, config.block_size + 1)
    assert (tokens == recipe.sequences(config, 3, 16)).all()
    assert (tokens != recipe.sequences(config, 4, 16)).any()
    following = (tokens[:, 1:] - 5 * tokens[:, :-1] - 1) % config.vocab_size
    assert set(following.ravel()) == {0, 7}  # each symbol has two successors, so the minimum loss is log 2
    rates = [recipe.learning_rate(step, 8) for step in range(8)]
    assert len(set(rates)) == 8
    assert recipe.zero_by_symmetry(recipe.model_config("tiny-llama")) == {}


def test_one_model_has_a_padded_vocabulary_of_odd_size() -> None:
    """Both models have embeddings of the same size, so traffic and memory are the same."""
    whole, padded = (recipe.model_config(name) for name in recipe.MODELS)
    assert whole.vocab_size == whole.padded_vocab_size == padded.padded_vocab_size
    assert padded.vocab_size % 2
    assert padded.vocab_size > padded.padded_vocab_size // 2
    tokens = recipe.sequences(padded, 0, 16)
    assert tokens.max() < padded.vocab_size
    assert len(set(tokens.ravel())) > 0.9 * padded.vocab_size


def numbers() -> tuple[verdict.Numbers, verdict.Numbers]:
    """Return the numbers of a layout and a reference that differ only by rounding."""
    names = {"transformer.wte.weight": 6144, "transformer.h.0.ln_1.weight": 64}
    expected = {"losses": [4.5, 4.4], "held_out": 4.3, "norms": [1.0, 2.0], "numel": names,
                "texts": [[1, 2], [], [5, 6]],
                "noise": Noise(1e-6, [1e-7, 1e-6], dict.fromkeys(names, 1e-7), dict.fromkeys(names, 1e-6)),
                "gradient": dict.fromkeys(names, 0.5), "weight": dict.fromkeys(names, 8.0),
                "movement": dict(zip(names, (0.01, 0.0), strict=True))}
    def rows(difference: float) -> dict:
        return {name: {"elements": numel, "difference": difference, "ranks": {0: 0.0, 1: difference}}
                for name, numel in names.items()}

    actual = {"losses": [4.5, 4.400001], "held_out": 4.3, "norms": [(1.0, 1.0), (2.0, 2.000001)],
              "first": rows(0.0),
              "gradient": rows(1e-8), "weight": rows(2e-6),
              "copy": {"weight of transformer.wte.weight": {"compared": 96, "apart": 0, "where": ""}},
              "texts": [[1, 2], [3, 4], [5, 6]],
              "again": {"loss": 4.400001, "norms": [2.0, 2.000001], "weight": rows(2e-6)}}
    return actual, expected


def result(**numbers: object) -> CaseResult:
    """Return the result of a case that passed."""
    passed = CaseResult(layout="ddp", world=2, model="tiny-gpt2", dtype="fp32", fault=None, passed=True,
                        failures=[], kinds=[], worst={}, seconds=1.0)
    return structs.replace(passed, **numbers)


def certificate(*results: CaseResult) -> CertificateRecord:
    return CertificateRecord(command="ezpz-llm certify", date="2026-01-02", seconds=130.0, passed=True,
                             environment=Machine({"torch": "2.13"}), results=list(results))


def judged(actual: verdict.Numbers, expected: verdict.Numbers) -> list[str]:
    return verdict.failures({**verdict.findings(actual, expected, 4, "fp32"),
                             **verdict.end_findings(actual, expected, 4, "fp32")})


def test_rounding_passes() -> None:
    assert judged(*numbers()) == []


def test_a_text_that_rounding_could_change_is_not_compared() -> None:
    runs = [Trajectory(texts=[[1, 2], [3, 4], [5, 6]], margins=[[0.9, 0.5], [0.9, 0.5], [0.9, 0.04]]),
            Trajectory(texts=[[1, 2], [3, 5], [5, 6]], margins=[[0.9, 0.5], [0.9, 0.5], [0.9, 0.05]])]
    assert certain_texts(runs) == [[1, 2], [], []]
    actual, expected = numbers()
    actual["texts"] = [[1, 2], [4, 4], [5, 7]]
    assert judged(actual, expected) == [
        "sampling: the number of prompts with other most likely tokens differs by 1, allowed 0 of 2; first 2"]


def test_rounding_of_the_decay_factor_on_each_step_passes() -> None:
    """torch's AdamW multiplies by 1 - lr x decay, rounded to fp32 with an error of up to half a spacing.

    DeepSpeed's CPU Adam adds a product instead. Without this term, correct runs reached 0.97 of the bound.
    """
    rate, decay, steps = 1.999e-3, 0.1, 8
    weights = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    multiplied, added = weights.clone(), weights.double()
    for _ in range(steps):
        multiplied.mul_(1 - rate * decay)
        added -= rate * decay * added
    _, expected = numbers()
    expected.update(losses=[4.5] * steps, weight=dict.fromkeys(expected["weight"], weights.norm().item()))
    expected["noise"] = structs.replace(expected["noise"], weight=dict.fromkeys(expected["weight"], 0.0))
    apart = (multiplied - added).norm().item()
    bound = verdict._min_weight_bound(expected)("transformer.wte.weight")
    assert 2.0 ** -24 * weights.norm().item() < apart <= bound, (apart, bound)


@pytest.mark.parametrize(("change", "message"), [
    (lambda actual: actual["losses"].__setitem__(1, 4.41), "loss at step 2 differs by 0.01"),
    (lambda actual: actual["losses"].__setitem__(0, math.nan), "loss at step 1"),
    (lambda actual: actual.update(held_out=4.4), "loss after the last step"),
    (lambda actual: actual["norms"].__setitem__(0, (1.0, 2.0)), "2 on rank 1, 2 times the reference's"),
    (lambda actual: actual["gradient"]["transformer.wte.weight"].update(difference=0.5),
     "gradient of transformer.wte.weight differs by 1,"),
    (lambda actual: actual["weight"]["transformer.h.0.ln_1.weight"].update(ranks={0: 0.0, 1: math.inf}),
     "weights of transformer.h.0.ln_1.weight on rank 1"),
    (lambda actual: actual["first"]["transformer.wte.weight"].update(ranks={0: 0.0, 2: 1e-9}),
     "initial weights of"),
    (lambda actual: actual["gradient"]["transformer.wte.weight"].update(elements=3072), "3072 of 6144"),
    (lambda actual: actual["weight"].pop("transformer.wte.weight"), "0 of 6144"),
    (lambda actual: actual["copy"]["weight of transformer.wte.weight"].update(apart=1, where=" on ranks 0 and 3"),
     "the weight of transformer.wte.weight on ranks 0 and 3 is not bitwise equal: 1 of 96 blocks"),
])
def test_failures_name_the_tensor_and_the_difference(change, message: str) -> None:
    actual, expected = numbers()
    change(actual)
    assert message in "\n".join(judged(actual, expected))


def test_among_several_failures_the_one_nearest_to_the_loss_is_named() -> None:
    """Independent of the ratios, because failures propagate from the loss backwards."""
    actual, expected = numbers()
    for name, difference in (("transformer.wte.weight", 0.4), ("transformer.h.0.ln_1.weight", 0.1)):
        actual["gradient"][name].update(difference=difference)
    line, = judged(actual, expected)
    assert line.startswith("backward: gradient of transformer.h.0.ln_1.weight differs by 0.2,")
    assert line.endswith("(and 1 more)")
    names = ["transformer.wte.weight", "transformer.h.0.mlp.c_proj.weight", "transformer.h.10.ln_1.weight",
             "transformer.h.10.mlp.c_fc.bias", "transformer.h.2.ln_1.weight", "lm_head.weight",
             "transformer.ln_f.bias"]
    assert verdict.backward_order(names) == [names[5], names[6], names[3], names[2], names[4], names[1], names[0]]


def test_failures_come_in_the_order_of_computation_with_their_phase() -> None:
    """A wrong gradient comes before a wrong gradient norm, and both before the loss of the next step."""
    actual, expected = numbers()
    actual["texts"][2], actual["again"]["loss"] = [5, 7], 4.5
    actual["weight"]["transformer.wte.weight"].update(difference=9.0)
    actual["norms"][0] = (1.0, 2.0)
    actual["gradient"]["transformer.h.0.ln_1.weight"].update(difference=0.1)
    actual["losses"][1] = 5.0
    assert [line.partition(": ")[0] for line in judged(actual, expected)] == [
        "backward", "reduction", "forward", "optimizer", "sampling", "resume"]
    assert [*verdict.findings(actual, expected, 4, "fp32"), *verdict.end_findings(actual, expected, 4, "fp32"),
            "format"] == list(verdict.PHASES)


def test_sensitivity_is_the_bound_relative_to_the_effect_of_the_steps() -> None:
    _, expected = numbers()
    assert verdict.sensitivity(expected, "fp32")["loss"] == pytest.approx(1e-5 / 0.1)
    largest = verdict.sensitivity(expected, "fp32")["weights_largest"]
    assert largest == math.inf, "weights that do not move have no sensitivity"
    expected["movement"]["transformer.h.0.ln_1.weight"] = 0.005
    sight = verdict.sensitivity(expected, "fp32")
    assert sight["weights_largest"] == pytest.approx(5e-6 / 0.005)
    assert sight["weights"] == pytest.approx((5e-6 / 0.01 + 5e-6 / 0.005) / 2)
    assert verdict.sensitivity(expected, "bf16")["weights"] == pytest.approx((3e-6 / 0.01 + 3e-6 / 0.005) / 2)


def test_among_several_ranks_the_first_beyond_the_bound_is_named() -> None:
    actual, expected = numbers()
    actual["norms"][1] = (2.0, 2.2, 9.0)
    actual["weight"]["transformer.wte.weight"].update(ranks={0: 1e-6, 1: 0.5, 3: 8.0})
    reduction, optimizer = judged(actual, expected)
    assert "2.2 on rank 1, 1.1 times the reference's" in reduction
    assert optimizer.startswith("optimizer: weights of transformer.wte.weight on rank 1 differs by 0.062,")


def test_a_case_with_a_missing_op_does_not_pass() -> None:
    work = planned("--layouts", "ddp", "--world", "1")
    from ezpz_llm.verify.certify.cases import Skipped

    missing = Skipped(work.cases[0], "not built (type: ezpz-llm doctor --build-ops cpu_adam)", illegal=False)
    assert not all_passed([result()], [missing])
    assert "MISSING: ddp on 1 ranks: not built (type:" in closing_text([], [missing])
    assert not all_passed([], [])


def test_a_record_is_json_with_one_line_per_result() -> None:
    worst = {"loss": Worst("loss at step 1", math.nan, 1.0, "", math.inf, 9)}
    written = certificate(result(), result(worst=worst))
    text = as_json(written)
    assert text.endswith('  "results": [\n    {"layout": "ddp", ' + text.split('{"layout": "ddp", ', 1)[1])
    assert text.count('\n    {"layout": ') == 2
    assert '"value": null' in text
    assert '"ratio": null' in text
    finite = {"loss": Worst("loss at step 1", None, 1.0, "", None, 9)}
    assert as_record(CertificateRecord, json.loads(text), "") == certificate(result(), result(worst=finite))
    assert json.loads(as_json(certificate()))["results"] == []


def test_all_documented_faults_exist() -> None:
    assert next(iter(FAULTS)) == "gradients-x2"
    assert set(FAULTS) == {
        "gradients-x2", "dropped-bucket", "accumulation-not-divided", "early-sync", "unmarked-tp",
        "stale-optimizer", "stale-masters", "bf16-reduction", "bf16-accumulation",
        "stale-second-copy", "drifting-copy", "wrong-mask", "shifted-targets",
        "duplicated-data", "untied-head", "wrong-sp-scale",
        # shared by all layouts
        "half-the-micro-batches", "rate-of-one-group", "decay-on-norms", "clip-scales-up", "mask-beyond-64",
        "last-loss", "beta2", "eps-x10", "rate-1-percent-off", "ignored-counted", "evaluation-cut-short"}


def test_expected_traffic_has_the_volumes_of_the_papers() -> None:
    config = recipe.model_config("tiny-gpt2")
    weights = 4 * parameter_count(config)
    book = {name: published_traffic((resolved := resolve_case(Case(name, 4, "tiny-gpt2", "fp32"), "cpu")).layout,
                                    config,
                                    resolved.batch) for name in ("ddp", "zero1", "zero3", "tp2")}
    assert book["ddp"] == {"all_reduce": weights}
    assert book["zero1"] == {"all_gather": weights, "reduce_scatter": weights}
    assert book["zero3"] == {"all_gather": 4 * weights, "reduce_scatter": 2 * weights}
    tokens = recipe.shape("tiny-gpt2").global_batch // 2 * config.block_size
    assert book["tp2"]["all_reduce"] > 4 * (4 * config.n_layer + 2) * tokens * config.n_embd


@pytest.mark.parametrize("layout", ["fsdp2_within2", "fsdp2", "ddp", "zero3"])
def test_gradients_reduced_in_half_the_bytes_are_noticed_in_subgroups_too(layout: str) -> None:
    """Compares a run that issues the expected collectives with one that reduces gradients in bf16."""
    case = Case(layout, 4, "tiny-gpt2", "bf16")
    config, resolved = recipe.model_config(case.model), resolve_case(case, "cpu")
    right = published_traffic(resolved.layout, config, resolved.batch, "bf16", resolved.gradients)
    wrong = published_traffic(resolved.layout, config, resolved.batch, "bf16",
                              replace(resolved.gradients, reduced="bf16"))
    memory = [{"gradients": 2**40}] * case.world

    def missing(issued: dict[str, int]) -> float:
        """Return the number of missing bytes; a run's collectives are summed over all process groups."""
        kinds = {kind: KindTraffic(1, sum(size for name, size in issued.items() if name.startswith(kind)))
                 for kind in ("all_reduce", "reduce_scatter")}
        finding, _ = dtype_findings(resolved, config, case.world, Observed([RankCollectives([0], kinds)], memory))
        assert "reduced" in finding.what
        return finding.value

    assert missing(right) == 0
    assert missing(wrong) >= 2 * parameter_count(config)


def committed() -> CertificateRecord:
    path = ROOT / "benchmarks" / "results" / "certify.json"
    return as_record(CertificateRecord, json.loads(path.read_text()), str(path))


@pytest.mark.parametrize(("layout", "dtype"), [("ddp", "bf16"), ("zero2", "bf16"), ("tp2", "bf16_autocast")])
def test_computed_numbers_use_the_precision_and_gradient_dtypes_of_the_case(layout: str, dtype: str) -> None:
    """A certificate must report the same bytes that `dtype_findings` checks."""
    case = Case(layout, 4, "tiny-gpt2", dtype)
    config, resolved = recipe.model_config(case.model), resolve_case(case, "cpu")
    gradients = GradientDtypes(reduced="bf16", accumulated="bf16")
    for run in (resolved, replace(resolved, gradients=gradients)) if dtype == "bf16" else (resolved,):
        arithmetic, textbook = theoretical_numbers(run, config, case.world)
        assert textbook == published_traffic(run.layout, config, run.batch, dtype, run.gradients)
        assert as_plain(arithmetic) == [asdict(part) for part in memory_per_rank(
            run.layout, config, case.world, precision=dtype, gradients=run.gradients)]


def test_the_committed_certificate_matches_the_current_recipe() -> None:
    """Compares recipe, bounds, precisions and kinds of findings, without which it would not apply to this code."""
    record = committed()
    today = json.loads(json.dumps(as_plain(basis(recipe.STEPS))))
    assert {key: getattr(record, key) for key in today} == today
    assert {result.dtype for result in record.results} == set(recipe.DTYPES)
    assert {kind for result in record.results for kind in result.worst} == set(verdict.PHASES)
    cases, _ = split_runnable(all_cases(ds_config.names(), None, recipe.ALL_MODELS, recipe.DTYPES), None)
    assert ({(result.layout, result.world, result.model, result.dtype) for result in record.results}
            >= {(case.layout, case.world, case.model, case.dtype) for case in cases})


def test_the_committed_certificate_matches_computed_numbers_and_docs(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed numbers must not have changed, whichever ops are built, and the docs must show the certificate."""
    monkeypatch.setattr(ops, "is_built", lambda name: True)
    certificate = committed()
    assert certificate.passed
    uncertified = {layout.name for layout in shipped_layouts()
                   if any(knob.is_set(layout) and not knob.certified for knob in KNOBS)}
    assert {result.layout for result in certificate.results} == set(ds_config.names()) - uncertified
    for result in certificate.results:
        case = Case(result.layout, result.world, result.model, result.dtype)
        config, resolved = recipe.model_config(case.model), resolve_case(case, "cpu")
        assert (result.arithmetic, result.textbook) == theoretical_numbers(resolved, config, case.world)
    page, copy = ROOT / "benchmarks" / "results" / "certified.md", tmp_path / "certified.md"
    shutil.copy(page, copy)
    write_docs(certificate, copy)
    assert copy.read_text() == page.read_text()


def test_write_docs_keeps_the_text_around_the_table(tmp_path: Path) -> None:
    page = tmp_path / "layouts.md"
    page.write_text("# Layouts\n\nprose\n")
    sight = {"loss": 0.0123, "weights": 0.04, "weights_largest": 0.2}
    reference = ReferenceSummary([1.0], 1.0, [1.0], SummaryNoise(0.0, [0.0]), {}, sight)
    record = structs.replace(
        certificate(result(
            model="tiny-llama", worst={"loss": Worst("loss at step 1", 0.0, 1.0, "", 0.0, 9)},
            textbook={"all_reduce": 8},
            memory=[{"parameters": 12, "gradients": 4, "gathered": 1, "other": 3}],
            arithmetic=[MemoryPart("parameters", "device", 16)],
            collectives=[RankCollectives([0, 1], {"all_reduce": KindTraffic(1, 8)})])),
        references={"tiny-gpt2 bf16": reference},
        skipped=[SkippedCase("zero3_nvme", 2, "tiny-gpt2", "fp32", None, "async_io is not built", False)])
    write_docs(record, page)
    page.write_text(page.read_text() + "after\n")
    write_docs(structs.replace(record, date="2026-01-03"), page)
    text = page.read_text()
    assert text.startswith("# Layouts\n\nprose\n")
    assert text.endswith("after\n")
    assert text.count(BEGIN) == text.count(END) == 1
    assert "2026-01-03: 2 ranks; fp32 | 16 / 16 (+4) on 2 | all_reduce 1 x, 8 B | all_reduce 8 B |" in text
    assert "no: async_io is not built" in text
    assert "| tiny-gpt2 bf16 | 0.012 | 0.04 | 0.2 |" in text
    assert "1 of 1 cases passed in 2 minutes" in text
    with pytest.raises(UserError, match="found no page to update"):
        write_docs(record, tmp_path / "missing.md")


def test_a_reference_with_a_zero_gradient_is_rejected() -> None:
    """A full tensor, or the rows of queries. The bias of keys is an exception."""
    config = recipe.model_config("tiny-gpt2")
    tensors = {f"moment/{name}": torch.ones(shape) for name, shape in parameter_shapes(config).items()}
    keys = recipe.zero_by_symmetry(config)["transformer.h.1.attn.c_attn.bias"]
    tensors["moment/transformer.h.1.attn.c_attn.bias"][slice(*keys)] = 0
    check_gradients(config, tensors)
    for name, rows in (("transformer.h.2.ln_1.weight", 64), ("transformer.h.0.attn.c_attn.weight", 64)):
        dead = {**tensors, f"moment/{name}": tensors[f"moment/{name}"].clone()}
        dead[f"moment/{name}"][:rows] = 0
        with pytest.raises(UserError, match=rf"the gradient of {name}, rows 0 to {rows}, is 0 in one process"):
            check_gradients(config, dead)
