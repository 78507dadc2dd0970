"""Full runs of the certify command: all layouts pass, and every injected fault is caught and named."""

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

from ezpz_llm.training.layout import ds_config
from ezpz_llm.training.layout.ops import is_built, needed_ops
from ezpz_llm.training.model.parameters import parameter_shapes
from ezpz_llm.verify.certify import recipe
from ezpz_llm.verify.certify.cases import load_layout, paths_worlds
from ezpz_llm.verify.certify.injected_faults import FAULTS

ENV = {name: value for name, value in clean_env(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE").items()
       if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
ON_ONE_LAYOUT = ["gradients-x2", "dropped-bucket", "accumulation-not-divided", "early-sync", "stale-optimizer",
                 "drifting-copy", "wrong-mask", "shifted-targets", "duplicated-data", "untied-head"]


# --quick alone takes minutes, and twice as long beside other tests.
pytestmark = pytest.mark.timeout(1000)


KEPT_REFERENCES = Path(tempfile.mkdtemp(prefix="certify-references-"))
atexit.register(shutil.rmtree, KEPT_REFERENCES, ignore_errors=True)


def certify(folder: Path, *arguments: str, timeout: float = 1000, **env: str) -> tuple[int, str, list[dict]]:
    """Run certify; return its exit code, output and results.

    References take longer than the cases of most tests, so the first run computes a reference and later runs reuse
    it, as if they continued an interrupted run. Runs with modified code (`env`) do not share references.
    """
    references = folder / "run" / "reference"
    if not env:
        shutil.copytree(KEPT_REFERENCES, references)
    process = subprocess.run([sys.executable, "-m", "ezpz_llm.certify", "--device", "cpu", "--run-dir",
                              str(folder / "run"), *arguments], cwd=folder, env={**ENV, **env}, capture_output=True,
                             text=True, timeout=timeout, check=False)
    if not env and references.is_dir():
        shutil.copytree(references, KEPT_REFERENCES, dirs_exist_ok=True)
    record = folder / "run" / "certify.json"
    results = json.loads(record.read_text())["results"] if record.exists() else []
    return process.returncode, process.stdout + process.stderr, results


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, dict]]:
    code, output, results = certify(tmp_path_factory.mktemp("quick"), "--quick", "--model", ",".join(recipe.MODELS))
    return code, output, {f"{result['layout']} {result['model']} {result['dtype']}": result for result in results}


GPT2, LLAMA = 841_216, 1_009_920
"""Size of the weights in bytes."""

ISSUED = {
    "ddp tiny-llama": [((0, 1), {"all_reduce": (6, LLAMA)})],
    "zero0 tiny-gpt2": [((0, 1), {"all_reduce": (1, GPT2)})],
    # Stages 1 and 2 all-reduce where the ZeRO paper reduce-scatters, stage 2 on every micro-step. There are two
    # all-gathers because there are two parameter groups, with and without weight decay.
    "zero1 tiny-llama": [((0, 1), {"all_gather": (2, LLAMA), "all_reduce": (6, LLAMA), "scalars": (2, 8)})],
    "zero2 tiny-gpt2": [((0, 1), {"all_gather": (2, GPT2), "all_reduce": (10, 2 * GPT2), "scalars": (2, 8)})],
    # Layers are gathered for both passes of a micro-step, except those that the forward pass left gathered.
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
    # Each tile is gathered separately.
    "tiled tiny-gpt2": [
        ((0, 1), {"all_gather": (218, 3_421_696), "reduce_scatter": (10, 2 * GPT2), "scalars": (3, 24)}),
    ],
    "fsdp2 tiny-gpt2": [((0, 1), {"all_gather": (18, 3_281_920), "reduce_scatter": (5, GPT2), "scalars": (1, 4)})],
    # All-gathers and reduce-scatters in groups of two, then an all-reduce of each gradient shard.
    "fsdp2_within2 tiny-gpt2": [
        ((0, 1, 2, 3), {"all_gather": (18, 3_281_920), "all_reduce": (5, GPT2 // 2), "reduce_scatter": (5, GPT2),
                        "scalars": (1, 4)}),
    ],
    "sp2 tiny-llama": [
        ((0, 1), {"all_gather": (2, LLAMA), "all_reduce": (6, LLAMA), "all_to_all": (64, 3_145_728),
                  "scalars": (2, 8)}),
    ],
    # Activations, and one all-reduce of all gradients. The loss gathers two numbers per token, in 11 chunks per
    # micro-batch.
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
    # Activations and their gradients; gradient buckets of the stage, and separately of the tied table.
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
    # Ranks 0 to 3 hold the embedding, the others the last norm and the head.
    "3d tiny-gpt2": [
        ((0, 1, 2, 3), {"all_gather": (10, 492_288), "all_reduce": (48, 1_422_080), "recv": (8, 65_824),
                        "scalars": (4, 16), "send": (8, 65_824)}),
        ((4, 5, 6, 7), {"all_gather": (18, 353_536), "all_reduce": (47, 1_406_208), "recv": (8, 65_824),
                        "scalars": (4, 16), "send": (8, 65_824)}),
    ],
}
"""Collectives of a step by group of ranks with equal traffic: number and bytes by kind. Gradients fill several
buckets."""


def missing_ops(layout: str) -> list[str]:
    return [name for name in needed_ops(load_layout(layout)) if not is_built(name)]


@pytest.mark.full
def test_every_layout_passes(quick: tuple[int, str, dict[str, dict]]) -> None:
    """Layouts whose op is not built on this machine are missing, and the exit code is 1."""
    code, output, results = quick
    assert [f"{name}: {result['failures']}" for name, result in results.items() if not result["passed"]] == []
    unbuilt = {name for name in ds_config.names() if missing_ops(name)}
    assert code == bool(unbuilt), output
    assert {name for name in results if name.endswith(" fp32")} == {
        f"{name} {model} fp32" for name in ds_config.names() for model in recipe.MODELS if name not in unbuilt}
    assert "--quick omits" in output
    for result in results.values():
        assert min(result["norms"]) > recipe.CLIP
        # The loss decreases by far more than the allowed difference between two runs.
        assert result["losses"][0] - result["losses"][-1] > max(0.03, 100 * result["worst"]["loss"]["bound"])


@pytest.mark.full
def test_every_layout_passes_on_further_code_paths(tmp_path: Path) -> None:
    code, output, results = certify(tmp_path, "--model", "tiny-paths", "--dtype", "fp32", "--steps", "3")
    assert [result["failures"] for result in results if not result["passed"]] == []
    unbuilt = {name for name in ds_config.names() if missing_ops(name)}
    assert code == bool(unbuilt), output
    assert {(result["layout"], result["world"]) for result in results} == {
        (name, world) for name in ds_config.names() if name not in unbuilt for world in paths_worlds(name)}


@pytest.mark.full
@pytest.mark.parametrize("issued", ISSUED)
def test_collectives_are_the_known_ones(quick: tuple[int, str, dict[str, dict]], issued: str) -> None:
    if missing := missing_ops(issued.partition(" ")[0]):
        pytest.skip(f"{', '.join(missing)} not built (ezpz-llm doctor --build-ops)")
    result = quick[2][f"{issued} fp32"]
    assert result["passed"]
    collectives = [(tuple(group["ranks"]),
                    {kind: (entry["count"], entry["bytes"]) for kind, entry in group["kinds"].items()})
                   for group in result["collectives"]]
    assert collectives == ISSUED[issued]


@pytest.mark.full
def test_results_include_the_expected_traffic(quick: tuple[int, str, dict[str, dict]]) -> None:
    _, _, results = quick
    exchanged = ISSUED["sp2 tiny-llama"][0][1]
    assert results["zero1 tiny-llama fp32"]["textbook"] == {"all_gather": LLAMA, "reduce_scatter": LLAMA}
    assert results["sp2 tiny-llama fp32"]["textbook"]["all_to_all"] == exchanged["all_to_all"][1]
    assert results["pp2 tiny-llama fp32"]["textbook"] == {"recv": 262_144, "send": 262_144}


@pytest.mark.full
def test_measured_memory_matches_the_estimate(quick: tuple[int, str, dict[str, dict]]) -> None:
    for name, result in quick[2].items():
        # Buckets and FSDP2 shards are padded, and files are read through buffers.
        allowed = 0.03 if result["layout"] in ("zero2", "fsdp2", "zero3_nvme") else 0.0001
        measured = max(sum(rank.values()) - rank["gathered"] - rank["other"] for rank in result["memory"])
        arithmetic = sum(part["bytes"] for part in result["arithmetic"] if part["where"] != "files")
        if result["layout"] == "zero3_hpz2":
            # Norms and biases stay gathered, so they have no secondary copy, of which a rank would hold half.
            shapes = parameter_shapes(recipe.model_config(result["model"])).values()
            arithmetic -= 4 * sum(shape[0] for shape in shapes if len(shape) == 1) // 2
        assert measured == pytest.approx(arithmetic, rel=allowed), name


@pytest.mark.full
def test_injected_faults_are_caught_by_name(tmp_path: Path) -> None:
    code, output, results = certify(tmp_path, "--layouts", "ddp", "--world", "2", "--model", "tiny-gpt2", "--dtype",
                                    "fp32", "--steps", "3", "--inject-fault", ",".join(ON_ONE_LAYOUT))
    assert code == 1, output
    assert [result["fault"] for result in results] == ON_ONE_LAYOUT
    for result in results:
        missing = set(FAULTS[result["fault"]].shows) - set(result["kinds"])
        assert not missing, f"{result['fault']}: {missing} not among {result['failures']}"
        assert f"ddp tiny-gpt2 fp32 on 2 ranks with {result['fault']}:" in output
    named = {result["fault"]: " ".join(result["failures"]) for result in results}
    assert "gradient norm at step 1" in named["gradients-x2"]
    assert "2 times the reference's" in named["gradients-x2"]
    assert "loss" not in named["gradients-x2"]  # invisible in the losses of Adam with clipping
    assert "gradient of transformer.h.1." in named["dropped-bucket"]
    assert "gradient norm at step 1" in named["dropped-bucket"]
    assert "loss at step 2" in named["stale-optimizer"]
    assert "is not bitwise equal: 96 of 96 blocks" in named["drifting-copy"]
    assert "loss at step 1" in named["duplicated-data"]
    assert "gradient of transformer.wte.weight" in named["untied-head"]


@pytest.mark.full
def test_hpz_gathers_across_groups_once_a_step_and_never_from_a_stale_copy(tmp_path: Path) -> None:
    options = ("--layouts", "zero3_hpz2", "--world", "4", "--model", "tiny-llama", "--steps", "3")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.mkdir()
    code, output, (result,) = certify(right, *options, "--dtype", "fp32")
    assert code == 0, output
    (ranks,) = result["collectives"]
    gathers = ranks["kinds"]["all_gather"]["groups"]
    # Only the first forward pass gathers across all ranks; backward passes and later micro-steps do not.
    assert gathers == {"4": {"count": 22, "bytes": LLAMA}, "2": {"count": 39, "bytes": 2_449_408}}
    assert result["textbook"] == {"all_gather": LLAMA, "all_gather (2 ranks)": 3 * LLAMA,
                                  "reduce_scatter": 2 * LLAMA}

    wrong.mkdir()
    code, output, results = certify(wrong, *options, "--dtype", "fp32,bf16", "--inject-fault", "stale-second-copy")
    assert code == 1, output
    assert {result["dtype"] for result in results} == {"fp32", "bf16"}
    for result in results:
        assert set(FAULTS["stale-second-copy"].shows) <= set(result["kinds"]), result["failures"]
        assert "loss at step 2" in " ".join(result["failures"])


@pytest.mark.full
def test_unrequested_bf16_gradients_are_caught_by_their_bytes(tmp_path: Path) -> None:
    arguments = ("--world", "2", "--model", "tiny-gpt2", "--dtype", "bf16", "--steps", "3")
    for number, (layouts, faults) in enumerate((("ddp,fsdp2", "bf16-reduction,stale-masters"),
                                                ("zero1,zero3", "bf16-reduction,bf16-accumulation,stale-masters"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        code, output, results = certify(folder, *arguments, "--layouts", layouts, "--inject-fault", faults)
        assert code == 1, output
        assert {result["fault"] for result in results} == set(faults.split(","))
        for result in results:
            missing = set(FAULTS[result["fault"]].shows) - set(result["kinds"])
            assert not missing, f"{result['layout']} {result['fault']}: {missing} not in {result['failures']}"


@pytest.mark.full
@pytest.mark.parametrize(("layouts", "dtype", "kind"), [
    ("zero1,zero2", "bf16", "parameter"),
    ("zero1,zero2,sp2", "fp32", "parameter"),
    ("ddp,zero0,tp2", "fp32", "weight")])
def test_replicas_that_drift_minimally_are_noticed(tmp_path: Path, layouts: str, dtype: str, kind: str) -> None:
    """Under ZeRO, master weights are not replicated, so the parameters that ranks compute with are compared."""
    code, output, results = certify(tmp_path, "--layouts", layouts, "--world", "2", "--model", "tiny-gpt2",
                                    "--dtype", dtype, "--steps", "3", "--inject-fault", "drifting-copy")
    assert code == 1, output
    assert [result["layout"] for result in results] == layouts.split(",")
    for result in results:
        assert "copy" in result["kinds"], result["failures"]
        assert f"the {kind} of transformer." in " ".join(result["failures"]), result["failures"]
        assert "on ranks 0 and 1 is not bitwise equal" in " ".join(result["failures"])


@pytest.mark.full
def test_unmarked_tensor_parallel_parameters_are_caught_by_the_norm(tmp_path: Path) -> None:
    code, output, results = certify(tmp_path, "--layouts", "tp2,tp2_zero1,tp2_zero3", "--world", "2", "--model",
                                    "tiny-llama", "--dtype", "fp32", "--steps", "3", "--inject-fault",
                                    "unmarked-tp")
    assert code == 1, output

    assert len(results) == 3
    for result in results:
        assert "gradient norm at step 1" in " ".join(result["failures"])
        # Only the norm is wrong.
        assert not {"cover", "first", "gradient"} & set(result["kinds"]), result["failures"]


@pytest.mark.full
def test_a_wrong_sequence_parallel_scale_is_caught(tmp_path: Path) -> None:
    code, output, results = certify(tmp_path, "--layouts", "sp2", "--world", "2", "--model", "tiny-gpt2", "--dtype",
                                    "fp32", "--steps", "3", "--inject-fault", "wrong-sp-scale")
    assert code == 1, output
    assert "2 times the reference's" in " ".join(results[0]["failures"])
    assert set(results[0]["kinds"]) >= set(FAULTS["wrong-sp-scale"].shows)


@pytest.mark.slow
def test_a_layout_that_crashes_fails_and_the_others_continue(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"zero_optimization": {"stage": 1, "reduce_bucket_size": -1}}))
    code, output, results = certify(tmp_path, "--layouts", f"{broken},ddp", "--world", "2", "--model", "tiny-gpt2",
                                    "--dtype", "fp32")
    assert code == 1, output
    assert [result["passed"] for result in results] == [False, True]
    assert "reduce_bucket_size" in " ".join(results[0]["failures"])
    assert "1 of 2 cases passed: same results as a single process" in output


@pytest.mark.full
def test_a_shared_fault_fails_in_the_comparison_with_the_definition(tmp_path: Path) -> None:
    code, output, results = certify(tmp_path, "--layouts", "ddp", "--world", "1", "--model", "tiny-gpt2", "--dtype",
                                    "fp32", "--steps", "3", "--inject-fault", "beta2")
    assert code == 1, output
    (result,) = results
    assert result["kinds"] == ["optimizer"]
    assert result["failures"][0].startswith("one process disagrees with the definition of the step: optimizer, ")
    assert result["failures"][0] in output


def faulty_copy(folder: Path, path: str, right: str, wrong: str) -> dict[str, str]:
    """Copy the package with one changed line; return the environment variables that select the copy."""
    shutil.copytree(ROOT / "ezpz_llm", folder / "ezpz_llm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("ds_configs", "launchers", "jobs"):
        (folder / name).symlink_to(ROOT / name)
    file = folder / "ezpz_llm" / path
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("started", ["alone", pytest.param("by launch", marks=pytest.mark.full)])
def test_if_the_single_process_is_wrong_the_certificate_says_so_and_no_layout_is_compared(tmp_path: Path,
                                                                                          started: str) -> None:
    """certify.json is written in this case too."""
    faulty = faulty_copy(tmp_path, "training/engine/base.py", "loss += micro_loss.detach() / accumulation",
                         "loss = micro_loss.detach()")
    options = ("--layouts", "ddp", "--model", "tiny-gpt2", "--dtype", "fp32", "--steps", "3", "--json",
               "out/kept.json")
    if started == "alone":
        code, output, results = certify(tmp_path, *options, "--world", "2", **faulty)
        assert results == []
    else:
        run = launch(tmp_path, "-n", "2", "--run-dir", "run", sys.executable, "-m", "ezpz_llm.certify", *options,
                     timeout=200, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", **faulty)
        code, output = run.returncode, run.stdout + run.stderr
    assert code == 1, output
    headline = "one process disagrees with the definition of the step: tiny-gpt2 fp32: forward, step 1"
    assert f"\n{headline}" in output, output
    assert "no layout was compared" in output
    assert "could not be computed" not in output
    assert "Traceback" not in output
    for path in ("run/certify.json", "out/kept.json"):
        certificate = json.loads((tmp_path / path).read_text())
        assert not certificate["passed"]
        assert certificate["refused"]["why"].startswith(headline)
        assert certificate["recipe"]["steps"] == 3


@pytest.mark.full
@pytest.mark.parametrize(("layout", "right"), [
    ("zero1", "refresh_parameters(self.zero)"), ("zero3", "refresh_shards(self.zero, self.placed)")])
def test_loaded_weights_that_do_not_reach_the_parameters_are_noticed(tmp_path: Path, layout: str,
                                                                     right: str) -> None:
    """The initial weights equal those of the checkpoint, so certify sets them to NaN first."""
    faulty = faulty_copy(tmp_path, "training/engine/deepspeed_state.py", right, "pass")
    code, output, results = certify(tmp_path, "--layouts", layout, "--world", "2", "--model", "tiny-gpt2",
                                    "--dtype", "fp32", "--steps", "3", **faulty)
    assert code == 1, output
    assert results[0]["failures"][0].startswith("forward: loss at step 1"), output


@pytest.mark.full
def test_ranks_of_a_launch_certify_the_cases_that_fit(tmp_path: Path) -> None:
    process = launch(tmp_path, "-n", "2", "--run-dir", "run", sys.executable, "-m", "ezpz_llm.certify", "--layouts",
                     "zero1", "--model", "tiny-gpt2", "--dtype", "fp32", "--steps", "3", "--json", "out/kept.json",
                     timeout=120, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "1 of 1 case passed: same results as a single process" in process.stdout
    certificate = json.loads((tmp_path / "out" / "kept.json").read_text())
    assert certificate["passed"]
    assert {"torch", "deepspeed"} <= set(certificate["environment"]["versions"])
    assert certificate["recipe"]["seed"] == recipe.SEED


@pytest.mark.full
def test_ranks_that_cannot_be_set_up_fail_every_case_at_once(tmp_path: Path) -> None:
    """There is one launch, not one per case."""
    code, output, results = certify(tmp_path, "--layouts", "ddp,zero1", "--world", "2", "--model", "tiny-gpt2",
                                    "--dtype", "fp32", GLOO_SOCKET_IFNAME="nosuch0")
    assert code == 1, output
    assert [result["passed"] for result in results] == [False, False]
    assert output.count("2 ranks: 2 cases to certify") == 1
    assert "nosuch0" in output


@pytest.mark.full
def test_sigterm_leaves_no_process(tmp_path: Path) -> None:
    marker = f"certify-{uuid.uuid4().hex}"
    process = subprocess.Popen([sys.executable, "-m", "ezpz_llm.certify", "--device", "cpu", "--layouts", "ddp",
                                "--world", "2"], cwd=tmp_path, env={**ENV, "EZPZ_LLM_TEST_MARKER": marker},
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert any("reference:" in line for line in process.stdout)
        process.terminate()
        process.communicate(timeout=scaled(60))
    finally:
        process.kill()
    assert process.returncode == 143
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
    if (layouts, dtype) != ("pp2", "bf16")])  # not supported by pipelines
def test_faults_are_caught_in_other_layouts(tmp_path: Path, layouts: str, dtype: str) -> None:
    """Inject every fault that applies to a layout, in every precision."""
    layout = load_layout(layouts.split(",")[-1])
    faults = [name for name, fault in FAULTS.items()
              if fault.needs(layout, 2) is None and (dtype == "bf16" or not fault.needs_masters)]
    code, output, results = certify(tmp_path, "--layouts", layouts, "--world", "2", "--dtype", dtype,
                                    "--inject-fault", ",".join(faults), timeout=1700)
    assert code == 1, output
    assert {result["fault"] for result in results} == set(faults)
    for result in results:
        missing = set(FAULTS[result["fault"]].shows) - set(result["kinds"])
        assert not missing, (f"{result['layout']} {result['model']} {result['fault']}: {missing} not in "
                             f"{result['failures']}")
