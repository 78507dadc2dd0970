"""certify as a user runs it: everything passes, every injected fault is caught and named."""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from launch_runs import clean_env, launch
from places import ROOT
from slowness import scaled

from ezpz_llm.certify import recipe
from ezpz_llm.certify.cases import layout_of
from ezpz_llm.certify.injected_faults import FAULTS
from ezpz_llm.layout import ds_config
from ezpz_llm.layout.ops import is_built, needed_ops
from ezpz_llm.model.parameters import parameter_shapes

ENV = {name: value for name, value in clean_env(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE").items()
       if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
ON_ONE_LAYOUT = ["gradients-x2", "dropped-bucket", "accumulation-not-divided", "early-sync", "stale-optimizer",
                 "drifting-copy", "wrong-mask", "shifted-targets", "duplicated-data", "untied-head"]


# The quick certificate alone takes minutes, twice as many beside other tests.
pytestmark = pytest.mark.timeout(1000)


KEPT_REFERENCES = Path(tempfile.mkdtemp(prefix="certify-references-"))
atexit.register(shutil.rmtree, KEPT_REFERENCES, ignore_errors=True)


def certify(folder: Path, *words: str, timeout: float = 1000, **env: str) -> tuple[int, str, list[dict]]:
    """Exit code, output and results of a run.

    A reference takes longer than the cases that most tests want. Each is made once, by the first run that needs it,
    and found by the later ones as a run that was interrupted would find it; not by those of code that was changed.
    """
    references = folder / "run" / "reference"
    if not env:
        shutil.copytree(KEPT_REFERENCES, references)
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.certify", "--device", "cpu", "--run-dir",
                           str(folder / "run"), *words], cwd=folder, env={**ENV, **env}, capture_output=True,
                          text=True, timeout=timeout, check=False)
    if not env and references.is_dir():
        shutil.copytree(references, KEPT_REFERENCES, dirs_exist_ok=True)
    kept = folder / "run" / "certify.json"
    results = json.loads(kept.read_text())["results"] if kept.exists() else []
    return done.returncode, done.stdout + done.stderr, results


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, dict]]:
    code, said, results = certify(tmp_path_factory.mktemp("quick"), "--quick")
    return code, said, {f"{one['layout']} {one['model']} {one['dtype']}": one for one in results}


GPT2, LLAMA = 841_216, 1_009_920
"""Bytes of the weights."""

# By groups of ranks: what a step issues by kind, how many and the bytes of their buffers. Gradients fill several
# buckets.
ISSUED = {
    "ddp tiny-llama": [((0, 1), {"all_reduce": (1, LLAMA)})],
    "zero0 tiny-gpt2": [((0, 1), {"all_reduce": (1, GPT2)})],
    # Stages 1 and 2 all-reduce what the textbook reduce-scatters, stage 2 on every micro-step. Two groups of
    # parameters, with decay and without, are gathered.
    "zero1 tiny-llama": [((0, 1), {"all_gather": (2, LLAMA), "all_reduce": (6, LLAMA), "scalars": (2, 8)})],
    "zero2 tiny-gpt2": [((0, 1), {"all_gather": (2, GPT2), "all_reduce": (10, 2 * GPT2), "scalars": (2, 8)})],
    # Layers are gathered for both passes of a micro-step, but for those that the forward pass has left behind.
    "zero3 tiny-llama": [
        ((0, 1), {"all_gather": (61, 3_459_328), "reduce_scatter": (12, 2 * LLAMA), "scalars": (3, 24)}),
    ],
    "zero3_offload_optimizer tiny-gpt2": [
        ((0, 1), {"all_gather": (82, 2_684_416), "reduce_scatter": (10, 2 * GPT2), "scalars": (2, 8)}),
    ],
    "zero3_offload_all tiny-llama": [
        ((0, 1), {"all_gather": (61, 3_459_328), "reduce_scatter": (12, 2 * LLAMA), "scalars": (3, 12)}),
    ],
    "zero3_nvme tiny-gpt2": [
        ((0, 1), {"all_gather": (110, 3_421_696), "reduce_scatter": (10, 2 * GPT2), "scalars": (2, 8)}),
    ],
    # A tile at a time.
    "tiled tiny-gpt2": [
        ((0, 1), {"all_gather": (218, 3_421_696), "reduce_scatter": (10, 2 * GPT2), "scalars": (3, 24)}),
    ],
    "fsdp2 tiny-gpt2": [((0, 1), {"all_gather": (18, 3_281_920), "reduce_scatter": (5, GPT2), "scalars": (1, 4)})],
    # Gathers and scatters in groups of two, then an all-reduce of what a rank has of each gradient.
    "fsdp2_within2 tiny-gpt2": [
        ((0, 1, 2, 3), {"all_gather": (18, 3_281_920), "all_reduce": (5, GPT2 // 2), "reduce_scatter": (5, GPT2),
                        "scalars": (1, 4)}),
    ],
    "sp2 tiny-llama": [
        ((0, 1), {"all_gather": (2, LLAMA), "all_reduce": (6, LLAMA), "all_to_all": (64, 3_145_728),
                  "scalars": (2, 8)}),
    ],
    # The all-reduces of activations that the textbook has and one of all gradients; two numbers a token for the
    # loss, in 11 chunks of a micro batch.
    "tp2 tiny-llama": [
        ((0, 1), {"all_gather": (2 * 11, 16_384), "all_reduce": (37, 5_224_704), "scalars": (1, 4)}),
    ],
    "tp2_zero1 tiny-gpt2": [
        ((0, 1), {"all_gather": (2 * 11, 16_384), "all_reduce": (39, 5_150_720), "scalars": (4, 16)}),
    ],
    "tp2_zero3 tiny-llama": [
        ((0, 1), {"all_gather": (2 * 11, 16_384), "all_reduce": (36, 4_718_592), "reduce_scatter": (6, 1_012_224),
                  "scalars": (6, 48)}),
    ],
    # Activations and their gradients; buckets of the stage, and of the tied table alone.
    "pp2 tiny-llama": [
        ((0,), {"all_reduce": (13, 541_696), "recv": (4, 262_144), "scalars": (4, 16), "send": (4, 262_144)}),
        ((1,), {"all_reduce": (13, 541_952), "recv": (4, 262_144), "scalars": (4, 16), "send": (4, 262_144)}),
    ],
    "pp2_tp2 tiny-gpt2": [
        ((0, 1), {"all_gather": (8, 524_288), "all_reduce": (48, 2_601_728), "recv": (8, 131_360),
                  "scalars": (4, 16), "send": (8, 131_360)}),
        ((2, 3), {"all_gather": (28, 278_528), "all_reduce": (47, 2_585_856), "recv": (8, 131_360),
                  "scalars": (4, 16), "send": (8, 131_360)}),
    ],
    # The first ranks of all the pipeline have the embedding, the others the last norm and the head.
    "3d tiny-gpt2": [
        ((0, 1, 2, 3), {"all_gather": (10, 492_288), "all_reduce": (48, 1_422_080), "recv": (8, 65_824),
                        "scalars": (4, 16), "send": (8, 65_824)}),
        ((4, 5, 6, 7), {"all_gather": (18, 353_536), "all_reduce": (47, 1_406_208), "recv": (8, 65_824),
                        "scalars": (4, 16), "send": (8, 65_824)}),
    ],
}


def missing_ops(layout: str) -> list[str]:
    return [name for name in needed_ops(layout_of(layout)) if not is_built(name)]


@pytest.mark.full
def test_every_layout_is_the_same_maths(quick: tuple[int, str, dict[str, dict]]) -> None:
    """Of those that this machine can run: one whose op is not built is named, and counts as not certified."""
    code, said, results = quick
    assert [f"{name}: {one['failures']}" for name, one in results.items() if not one["passed"]] == []
    left_out = {name for name in ds_config.names() if missing_ops(name)}
    assert code == bool(left_out), said
    assert {name for name in results if name.endswith(" fp32")} == {
        f"{name} {model} fp32" for name in ds_config.names() for model in recipe.MODELS if name not in left_out}
    assert "--quick leaves out" in said
    assert "held to its definitions first: rates, parts, loss scale, dropout, sums, trainer" in said
    for one in results.values():
        assert min(one["norms"]) > recipe.CLIP
        # A run that learns, by far more than what two runs may differ by.
        assert one["losses"][0] - one["losses"][-1] > max(0.03, 100 * one["worst"]["loss"]["bound"])


@pytest.mark.full
@pytest.mark.parametrize("issued", ISSUED)
def test_collectives_are_those_that_are_known(quick: tuple[int, str, dict[str, dict]], issued: str) -> None:
    if missing := missing_ops(issued.partition(" ")[0]):
        pytest.skip(f"{', '.join(missing)} not built (ezpz-llm doctor --build-ops)")
    result = quick[2][f"{issued} fp32"]
    assert result["passed"]
    found = [(tuple(group["ranks"]), {kind: (one["count"], one["bytes"]) for kind, one in group["kinds"].items()})
             for group in result["collectives"]]
    assert found == ISSUED[issued]


@pytest.mark.full
def test_the_textbook_is_beside_them(quick: tuple[int, str, dict[str, dict]]) -> None:
    _, _, results = quick
    exchanged = ISSUED["sp2 tiny-llama"][0][1]
    assert results["zero1 tiny-llama fp32"]["textbook"] == {"all_gather": LLAMA, "reduce_scatter": LLAMA}
    assert results["sp2 tiny-llama fp32"]["textbook"]["all_to_all"] == exchanged["all_to_all"][1]
    assert results["pp2 tiny-llama fp32"]["textbook"] == {"recv": 262_144, "send": 262_144}


@pytest.mark.full
def test_memory_is_what_arithmetic_says(quick: tuple[int, str, dict[str, dict]]) -> None:
    for name, one in quick[2].items():
        # Buckets and FSDP's shards are padded, and files are read through buffers.
        allowed = 0.03 if one["layout"] in ("zero2", "fsdp2", "zero3_nvme") else 0.0001
        held = max(sum(rank.values()) - rank["gathered"] - rank["other"] for rank in one["memory"])
        arithmetic = sum(part["bytes"] for part in one["arithmetic"] if part["where"] != "files")
        if one["layout"] == "zero3_hpz2":
            # Norms and biases stay gathered, and so have no second copy, of which a rank would have half.
            shapes = parameter_shapes(recipe.model_config(one["model"])).values()
            arithmetic -= 4 * sum(shape[0] for shape in shapes if len(shape) == 1) // 2
        assert held == pytest.approx(arithmetic, rel=allowed), name


@pytest.mark.full
def test_injected_faults_are_caught_by_name(tmp_path: Path) -> None:
    code, said, results = certify(tmp_path, "--layouts", "ddp", "--world", "2", "--model", "tiny-gpt2", "--dtype",
                                  "fp32", "--steps", "3", "--inject-fault", ",".join(ON_ONE_LAYOUT))
    assert code == 1, said
    assert [one["fault"] for one in results] == ON_ONE_LAYOUT
    for one in results:
        missing = set(FAULTS[one["fault"]].shows) - set(one["kinds"])
        assert not missing, f"{one['fault']}: {missing} not among {one['failures']}"
        assert f"ddp tiny-gpt2 fp32 on 2 ranks with {one['fault']}:" in said
    named = {one["fault"]: " ".join(one["failures"]) for one in results}
    assert "gradient norm at step 1" in named["gradients-x2"]
    assert "2 times the reference's" in named["gradients-x2"]
    assert "loss" not in named["gradients-x2"]  # clipped Adam's losses do not show it
    assert "gradient of transformer.h.1." in named["dropped-bucket"]
    assert "gradient norm at step 1" in named["dropped-bucket"]
    assert "loss at step 2" in named["stale-optimizer"]
    assert "is not the same bits: 96 of 96 blocks" in named["drifting-copy"]
    assert "loss at step 1" in named["duplicated-data"]
    assert "gradient of transformer.wte.weight" in named["untied-head"]


@pytest.mark.full
def test_hpz_gathers_across_groups_once_a_step_and_never_from_a_stale_copy(tmp_path: Path) -> None:
    words = ("--layouts", "zero3_hpz2", "--world", "4", "--model", "tiny-llama", "--steps", "3")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.mkdir()
    code, said, (result,) = certify(right, *words, "--dtype", "fp32")
    assert code == 0, said
    (ranks,) = result["collectives"]
    gathers = ranks["kinds"]["all_gather"]["groups"]
    # All ranks take part in what the first forward pass gathers, and in no backward pass and no later micro-step.
    assert gathers == {"4": {"count": 22, "bytes": LLAMA}, "2": {"count": 39, "bytes": 2_449_408}}
    assert result["textbook"] == {"all_gather": LLAMA, "all_gather (2 ranks)": 3 * LLAMA,
                                  "reduce_scatter": 2 * LLAMA}

    wrong.mkdir()
    code, said, results = certify(wrong, *words, "--dtype", "fp32,bf16", "--inject-fault", "stale-second-copy")
    assert code == 1, said
    assert {one["dtype"] for one in results} == {"fp32", "bf16"}
    for result in results:
        assert set(FAULTS["stale-second-copy"].shows) <= set(result["kinds"]), result["failures"]
        assert "loss at step 2" in " ".join(result["failures"])


@pytest.mark.full
def test_gradients_in_bf16_that_nobody_asked_for_are_caught_by_their_bytes(tmp_path: Path) -> None:
    words = ("--world", "2", "--model", "tiny-gpt2", "--dtype", "bf16", "--steps", "3")
    for number, (layouts, faults) in enumerate((("ddp,fsdp2", "bf16-reduction,stale-masters"),
                                                ("zero1,zero3", "bf16-reduction,bf16-accumulation,stale-masters"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        code, said, results = certify(folder, *words, "--layouts", layouts, "--inject-fault", faults)
        assert code == 1, said
        assert {one["fault"] for one in results} == set(faults.split(","))
        for one in results:
            missing = set(FAULTS[one["fault"]].shows) - set(one["kinds"])
            assert not missing, f"{one['layout']} {one['fault']}: {missing} not in {one['failures']}"


@pytest.mark.full
@pytest.mark.parametrize(("layouts", "dtype", "kind"), [
    ("zero1,zero2", "bf16", "parameter"),
    ("zero1,zero2,sp2", "fp32", "parameter"),
    ("ddp,zero0,tp2", "fp32", "weight")])
def test_copies_that_drift_by_the_least_are_seen_bit_for_bit(tmp_path: Path, layouts: str, dtype: str,
                                                             kind: str) -> None:
    """Of ZeRO's masters no rank has another's: there it is the parameters that all compute with."""
    code, said, results = certify(tmp_path, "--layouts", layouts, "--world", "2", "--model", "tiny-gpt2", "--dtype",
                                  dtype, "--steps", "3", "--inject-fault", "drifting-copy")
    assert code == 1, said
    assert [one["layout"] for one in results] == layouts.split(",")
    for one in results:
        assert "copy" in one["kinds"], one["failures"]
        assert f"the {kind} of transformer." in " ".join(one["failures"]), one["failures"]
        assert "on ranks 0 and 1 is not the same bits" in " ".join(one["failures"])


@pytest.mark.full
def test_unmarked_tensor_parallel_parameters_are_caught_by_the_norm(tmp_path: Path) -> None:
    code, said, results = certify(tmp_path, "--layouts", "tp2,tp2_zero1,tp2_zero3", "--world", "2", "--model",
                                  "tiny-llama", "--dtype", "fp32", "--steps", "3", "--inject-fault", "unmarked-tp")
    assert code == 1, said
    assert len(results) == 3
    for one in results:
        assert "gradient norm at step 1" in " ".join(one["failures"])
        assert not {"cover", "first", "gradient"} & set(one["kinds"]), one["failures"]  # what is told is right


@pytest.mark.full
def test_a_wrong_scale_over_a_sequence_is_caught(tmp_path: Path) -> None:
    code, said, results = certify(tmp_path, "--layouts", "sp2", "--world", "2", "--model", "tiny-gpt2", "--dtype",
                                  "fp32", "--steps", "3", "--inject-fault", "wrong-sp-scale")
    assert code == 1, said
    assert "2 times the reference's" in " ".join(results[0]["failures"])
    assert set(results[0]["kinds"]) >= set(FAULTS["wrong-sp-scale"].shows)


@pytest.mark.slow
def test_a_layout_that_crashes_fails_and_the_others_go_on(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"zero_optimization": {"stage": 1, "reduce_bucket_size": -1}}))
    code, said, results = certify(tmp_path, "--layouts", f"{broken},ddp", "--world", "2", "--model", "tiny-gpt2",
                                  "--dtype", "fp32")
    assert code == 1, said
    assert [one["passed"] for one in results] == [False, True]
    assert "reduce_bucket_size" in " ".join(results[0]["failures"])
    assert "1 of 2 are the same maths as one process" in said


@pytest.mark.full
def test_a_shared_fault_fails_as_one_process_that_the_definition_does_not_give(tmp_path: Path) -> None:
    code, said, results = certify(tmp_path, "--layouts", "ddp", "--world", "1", "--model", "tiny-gpt2", "--dtype",
                                  "fp32", "--steps", "3", "--inject-fault", "beta2")
    assert code == 1, said
    (result,) = results
    assert result["kinds"] == ["optimizer"]
    assert result["failures"][0].startswith("one process disagrees with the definition of the step: optimizer, ")
    assert result["failures"][0] in said


def faulty_copy(folder: Path, path: str, right: str, wrong: str) -> dict[str, str]:
    """The package with a line of its code changed; the environment in which it is the one that runs."""
    shutil.copytree(ROOT / "ezpz_llm", folder / "ezpz_llm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("ds_configs", "launchers", "jobs"):
        (folder / name).symlink_to(ROOT / name)
    file = folder / "ezpz_llm" / path
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("started", ["alone", pytest.param("by launch", marks=pytest.mark.full)])
def test_where_one_process_is_wrong_the_certificate_says_so_and_no_layout_is_compared(tmp_path: Path,
                                                                                      started: str) -> None:
    """The gravest failure there is leaves a certificate as any other does."""
    faulty = faulty_copy(tmp_path, "engine/base.py", "loss += micro_loss.detach() / accumulation",
                         "loss = micro_loss.detach()")
    words = ("--layouts", "ddp", "--model", "tiny-gpt2", "--dtype", "fp32", "--steps", "3", "--json",
             "out/kept.json")
    if started == "alone":
        code, said, results = certify(tmp_path, *words, "--world", "2", **faulty)
        assert results == []
    else:
        done = launch(tmp_path, "-n", "2", "--run-dir", "run", sys.executable, "-m", "ezpz_llm.certify", *words,
                      timeout=200, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", **faulty)
        code, said = done.returncode, done.stdout + done.stderr
    assert code == 1, said
    headline = "one process disagrees with the definition of the step: tiny-gpt2 fp32: forward, step 1"
    assert f"\n{headline}" in said, said
    assert "no layout was compared" in said
    assert "could not be computed" not in said
    assert "Traceback" not in said
    for path in ("run/certify.json", "out/kept.json"):
        kept = json.loads((tmp_path / path).read_text())
        assert not kept["passed"]
        assert kept["refused"]["why"].startswith(headline)
        assert kept["recipe"]["steps"] == 3


@pytest.mark.full
@pytest.mark.parametrize(("layout", "right"), [
    ("zero1", "self.zero.update_lp_params()"),
    ("zero3", "self.zero._reassign_or_swap_out_partitioned_parameters(number)")])
def test_loaded_weights_that_do_not_reach_the_parameters_are_seen(tmp_path: Path, layout: str, right: str) -> None:
    """The initial weights, which ranks would go on with, are the checkpoint's: certify makes NaN of them first."""
    faulty = faulty_copy(tmp_path, "engine/deepspeed_engine.py", right, "pass")
    code, said, results = certify(tmp_path, "--layouts", layout, "--world", "2", "--model", "tiny-gpt2", "--dtype",
                                  "fp32", "--steps", "3", **faulty)
    assert code == 1, said
    assert results[0]["failures"][0].startswith("forward: loss at step 1"), said


@pytest.mark.full
def test_ranks_of_a_launch_certify_what_fits_them(tmp_path: Path) -> None:
    done = launch(tmp_path, "-n", "2", "--run-dir", "run", sys.executable, "-m", "ezpz_llm.certify", "--layouts",
                  "zero1", "--model", "tiny-gpt2", "--dtype", "fp32", "--steps", "3", "--json", "out/kept.json",
                  timeout=120, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 are the same maths as one process" in done.stdout
    kept = json.loads((tmp_path / "out" / "kept.json").read_text())
    assert kept["passed"]
    assert {"torch", "deepspeed"} <= set(kept["environment"]["versions"])
    assert kept["recipe"]["seed"] == recipe.SEED


@pytest.mark.full
def test_ranks_that_cannot_be_set_up_fail_every_case_at_once(tmp_path: Path) -> None:
    """One launch, not one a case."""
    code, said, results = certify(tmp_path, "--layouts", "ddp,zero1", "--world", "2", "--model", "tiny-gpt2",
                                  "--dtype", "fp32", GLOO_SOCKET_IFNAME="nosuch0")
    assert code == 1, said
    assert [one["passed"] for one in results] == [False, False]
    assert said.count("2 ranks: 2 to certify") == 1
    assert "nosuch0" in said


@pytest.mark.full
def test_a_certify_that_is_told_to_end_leaves_no_process(tmp_path: Path) -> None:
    marker = f"certify-{uuid.uuid4().hex}"
    begun = subprocess.Popen([sys.executable, "-m", "ezpz_llm.certify", "--device", "cpu", "--layouts", "ddp",
                              "--world", "2"], cwd=tmp_path, env={**ENV, "EZPZ_LLM_TEST_MARKER": marker},
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert any("reference:" in line for line in begun.stdout)
        begun.terminate()
        begun.communicate(timeout=scaled(60))
    finally:
        begun.kill()
    assert begun.returncode == 143
    assert [path for path in Path("/proc").glob("[0-9]*/environ") if _holds(path, marker)] == []


def _holds(path: Path, marker: str) -> bool:
    try:
        return marker.encode() in path.read_bytes()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("layouts", "dtype"), [
    (layouts, dtype) for dtype in recipe.DTYPES
    for layouts in ("ddp", "zero1,zero2,zero3", "pp2", "tp2,tp2_zero1,tp2_zero3", "sp2")
    if (layouts, dtype) != ("pp2", "bf16")])  # which pipelines do not have
def test_faults_are_caught_in_other_layouts(tmp_path: Path, layouts: str, dtype: str) -> None:
    """Every fault that a layout can have, in every precision."""
    layout = layout_of(layouts.split(",")[-1])
    faults = [name for name, fault in FAULTS.items()
              if fault.needs(layout, 2) is None and (dtype == "bf16" or not fault.of_masters)]
    code, said, results = certify(tmp_path, "--layouts", layouts, "--world", "2", "--dtype", dtype,
                                  "--inject-fault", ",".join(faults), timeout=1700)
    assert code == 1, said
    assert {one["fault"] for one in results} == set(faults)
    for one in results:
        missing = set(FAULTS[one["fault"]].shows) - set(one["kinds"])
        assert not missing, f"{one['layout']} {one['model']} {one['fault']}: {missing} not in {one['failures']}"
