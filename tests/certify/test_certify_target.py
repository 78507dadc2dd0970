"""Certifying a user's training (--target): correct ones pass, and faults in user code are caught and named."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_runs import clean_env, need_mpiexec
from places import ROOT, TESTS
from rank_jobs import results_of
from slowness import scaled

from ezpz_llm.core.base import UserError
from ezpz_llm.core.base.records import as_record
from ezpz_llm.core.base.untrusted_input import read_bytes
from ezpz_llm.verify.certify import command as certify_main, target_file
from ezpz_llm.verify.certify.cases import parser, plan
from ezpz_llm.verify.certify.recheck import compare, read_certificate
from ezpz_llm.verify.certify.records import CertificateRecord
from ezpz_llm.verify.certify.target_file import LAYOUTS, find_target, load

pytestmark = pytest.mark.timeout(900)
TARGETS = TESTS / "helpers" / "targets.py"

IN_THE_STEP = {
    "loss_averaged_twice": "likely: the loss is divided by the number of ranks (2) twice (gradients are 0.5 times",
    "accumulation_not_divided": "likely: gradients are summed, not averaged, over the 3 micro-batches",
    "equal_masks": "random numbers: 8 steps ended with the same random state on several ranks, so dropout",
    "sampler_not_advanced":
        "data: 16 repeats of an earlier micro-batch: on rank 0, micro-batch 1 equals micro-batch 0",
    "epoch_not_set": "data: 12 repeats of an earlier micro-batch: on rank 0, micro-batch 40 equals micro-batch 0",
    "evaluation_that_changes_state":
        "evaluation: 20 parts of the state changed in an evaluation: the buffer seen",
    "running_statistics_differ": "copies: the buffer 0.running_mean on ranks 0 and 1 is not bitwise equal",
}
OTHERS_IN_THE_STEP = {
    "state_that_no_checkpoint_has": "resume: loss at step 5 after a resume differs by",
    "statistics_of_a_rank": "copies: the buffer 0.mean on ranks 0 and 1 is not bitwise equal",
}
REFUSED = {
    "parameter_left_out": "the optimizer does not have the parameter back.bias, which would never change",
    "plain_descent": "certify cannot read the first gradient from the state of SGD",
    "optimizer_with_closure": "certify cannot read the first gradient from the state of LBFGS",
    "decay_in_the_gradient": "certify cannot read the first gradient from the state of Adam",
    "unused_parameter": "the gradient of spare.weight is 0 or missing in one process",
    "frozen_part": "the gradient of head.weight is 0 or missing in one process",
    "tied_weight_copied": "3.weight starts as a copy of 0.weight but is not tied to it",
    "same_samples_on_all_ranks": "the parts of micro-batch 0 for 2 ranks have",
    "statistics_of_the_batch": "one process disagrees with itself: the gradient of",
    "not_a_target": "not_a_target() returns dict",
}


def certified(folder: Path, runs: list[str], ranks: int = 2) -> dict[str, dict]:
    need_mpiexec()
    return results_of(TESTS / "helpers/target_ranks.py", folder, runs, ranks)


def check_passes(reports: dict[str, dict]) -> None:
    for run, report in reports.items():
        assert report["refused"] is None, run
        assert set(report["results"]) == set(run.split(":")[1].split(",")), run
        for layout, entry in report["results"].items():
            assert entry["passed"], (run, layout, entry["failures"])
            assert entry["worst"]["gradient"]["compared"] > 10
            # Each layout resumes from a checkpoint of the previous one, the first from its own.
            layouts = list(report["results"])
            assert entry["resumed_from"] == layouts[max(0, layouts.index(layout) - 1)]
            assert entry["dtype"] != "fp32" or entry["worst"]["resume"]["value"] <= 5e-7, (run, layout)
            # The bounds are small relative to the effect of the steps.
            assert entry["reference"]["sight"]["weights"] < (1e-3 if entry["dtype"] == "fp32" else 0.05)


def test_correct_trainings_pass(tmp_path: Path) -> None:
    check_passes(certified(tmp_path, ["mlp:ddp,zero1:fp32", "unet_batches:ddp,zero1:fp32", "mlp:ddp:bf16",
                                    "momentum:zero2:fp32"]))


@pytest.mark.full
def test_correct_trainings_pass_under_every_layout(tmp_path: Path) -> None:
    layouts = [name for name in LAYOUTS if name != "zero3_hpz2"]
    rounded = [name for name in layouts if name != "zero0"]
    check_passes(certified(tmp_path, [f"{name}:{','.join(chosen)}:{dtype}" for name in ("mlp", "normed", "momentum")
                                      for chosen, dtype in ((layouts, "fp32"), (rounded, "bf16"))]))


@pytest.mark.slow
def test_correct_trainings_pass_on_four_ranks(tmp_path: Path) -> None:
    check_passes(certified(tmp_path, ["mlp:zero3_hpz2,zero2:fp32", "normed:zero3_hpz2,fsdp2:fp32"], ranks=4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "vit", "unet_groups", "unet_batches", "two_losses"])
def test_five_models_pass_under_every_layout(tmp_path: Path, name: str) -> None:
    if name in ("qwen3", "vit"):
        pytest.importorskip("transformers", reason="transformers is not installed (the extra `test` has it)")
    layouts = [layout for layout in LAYOUTS if layout != "zero3_hpz2"]
    divided = ["tp2", "tp2_zero1", "tp2_zero3"] if name == "qwen3" else []  # its class has a tp_plan
    for ranks, chosen in ((2, layouts + divided), (4, ["zero3_hpz2", "zero3", "fsdp2", *divided])):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        rounded = [layout for layout in chosen if layout not in ("zero0", "tp2")]  # these do not support bf16
        reports = certified(folder, [f"{name}:{','.join(chosen)}:fp32", f"{name}:{','.join(rounded)}:bf16"], ranks)
        check_passes(reports)
        for run, report in reports.items():
            for layout, case in report["results"].items():
                print(f"| {run.partition(':')[0]} | {case['dtype']} | {ranks} | {layout} | "
                      f"{case['resumed_from']} |",
                      " | ".join(f"{case['worst'][kind]['value']:.1e} of {case['worst'][kind]['bound']:.1e}"
                                 for kind in ("loss", "gradient", "norm", "weight", "resume")), "|")


@pytest.mark.full
def test_a_tp_plan_partitions_a_users_model(tmp_path: Path) -> None:
    check_passes(certified(tmp_path, ["divisible:zero1,tp2,tp2_zero3:fp32", "divisible:tp2_zero1:bf16"]))
    code, output = command(tmp_path, "--target", f"{TARGETS}:summed_too_little", "--layouts", "tp2",
                           "--dtype", "fp32", "--device", "cpu", "--run-dir", "run")
    assert code == 1, output
    assert "tensor-parallel ranks have different copies after the first step of 'layers.0.norm.weight" in output


@pytest.mark.full
def test_the_command_certifies_an_example(tmp_path: Path) -> None:
    code, output = command(tmp_path, "--target", f"{ROOT}/examples/certify/five_models.py:unet_batches",
                           "--layouts", "zero2", "--dtype", "bf16", "--device", "cpu", "--run-dir", "run")
    assert code == 0, output
    assert "1 of 1 case passed: same results as a single process" in output


def check_named(reports: dict[str, dict], faults: dict[str, str]) -> None:
    for name, named in faults.items():
        report = reports[f"{name}:ddp:fp32"]
        assert report["refused"] is None, name
        assert not report["results"]["ddp"]["passed"], name
        assert any(line.startswith(named) for line in report["results"]["ddp"]["failures"]), (
            name, report["results"]["ddp"]["failures"])


@pytest.mark.full
def test_state_that_is_not_saved_or_differs_between_ranks_is_named(tmp_path: Path) -> None:
    check_named(certified(tmp_path, [f"{name}:ddp:fp32" for name in OTHERS_IN_THE_STEP]), OTHERS_IN_THE_STEP)


def test_faults_in_user_code_are_caught_and_named(tmp_path: Path) -> None:
    reports = certified(tmp_path, [f"{name}:ddp:fp32" for name in (*IN_THE_STEP, *REFUSED)])
    check_named(reports, IN_THE_STEP)
    for name, named in REFUSED.items():
        report = reports[f"{name}:ddp:fp32"]
        assert report["results"] == {}, name
        assert report["refused"]["why"].startswith(named), name
        assert report["refused"]["instead"], name


@pytest.mark.full
def test_faults_are_caught_where_parameters_are_sharded(tmp_path: Path) -> None:
    names = ("loss_averaged_twice", "accumulation_not_divided", "equal_masks", "evaluation_that_changes_state")
    reports = certified(tmp_path, [f"{name}:zero3,fsdp2:fp32" for name in names])
    for name in names:
        for layout in ("zero3", "fsdp2"):
            report = reports[f"{name}:zero3,fsdp2:fp32"]["results"][layout]
            kind = {"equal_masks": "random", "evaluation_that_changes_state": "evaluation"}.get(name, "norm")
            assert kind in report["kinds"], (name, layout)


def command(folder: Path, *arguments: object) -> tuple[int, str]:
    """Run certify; return its exit code and output."""
    run = subprocess.run([sys.executable, "-m", "ezpz_llm.certify", *map(str, arguments)], cwd=folder, text=True,
                         env=clean_env(OMP_NUM_THREADS="1"), capture_output=True, timeout=scaled(600), check=False)
    return run.returncode, run.stdout + run.stderr


@pytest.mark.full
def test_a_certificate_can_be_rechecked_elsewhere(tmp_path: Path) -> None:
    origin, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (origin, elsewhere):
        folder.mkdir()
        shutil.copy(TARGETS, folder / "mine.py")
    code, output = command(origin, "--target", "mine.py:mlp", "--layouts", "ddp", "--dtype", "fp32", "--device",
                           "cpu", "--run-dir", "run", "--json", "mine.json")
    assert code == 0, output
    assert "1 of 1 case passed: same results as a single process" in output
    record = json.loads((origin / "mine.json").read_text())
    assert record["target"] == {"path": "mine.py", "function": "mlp",
                                "sha256": find_target(f"{TARGETS}:mlp").sha256}
    assert record["recipe"]["seed"]
    assert record["environment"]["versions"]["torch"]
    assert record["results"][0]["layout"] == "ddp"
    shutil.copy(origin / "mine.json", elsewhere)
    code, output = command(elsewhere, "--recheck", "mine.json", "--run-dir", "again")
    assert code == 0, output
    assert "the certificate holds on this machine: mine.json" in output
    # The target is found next to the certificate, and rejected after a change.
    assert read_certificate(elsewhere / "mine.json").arguments[1] == f"{elsewhere / 'mine.py'}:mlp"
    with open(elsewhere / "mine.py", "a") as file:
        file.write("# changed\n")
    code, output = command(elsewhere, "--recheck", "mine.json")
    assert code == 2
    assert "mine.py is not the file that was certified" in output


KEPT: dict[str, Any] = {
    "command": "ezpz-llm certify --layouts ddp", "date": "2026-01-02", "passed": True, "environment": {},
    "results": [{"layout": "ddp", "model": "tiny-gpt2", "dtype": "fp32", "world": 2, "fault": None,
                 "passed": True, "failures": [], "kinds": [], "worst": {}, "losses": [1.0], "seconds": 1.0}]}


@pytest.mark.parametrize(("change", "message"), [
    ({"passed": False}, "not every case of this certificate passed"),
    ({"passed": False, "references": {"tiny-gpt2 fp32": {  # null: NaN or Inf
        "losses": [None], "held_out": None, "norms": [None], "noise": {"loss": None, "norm": [None]},
        "zero_by_symmetry": {}}}}, "not every case of this certificate passed"),
    ({"results": []}, "not a certificate"),  # would hold whatever happens
    ({"command": "ezpz-llm certify --help"}, "not a certificate"),  # would exit with 0
    ({"command": "rm -r ."}, "not a certificate"),
    ({"command": "ezpz-llm certify 'open"}, "not a certificate"),
    ({"command": "ezpz-llm certify --target"}, "not a certificate"),
    ({"target": {"path": "mine.py", "sha256": "0"}}, "not a certificate"),  # no target in the command
    ({"command": "ezpz-llm certify --target mine.py:mlp"}, "not a certificate"),  # no hash of the target
    ({"results": [{"layout": "ddp"}]}, "results[0].world is missing"),
    ({"environment": {"versions": ["torch"]}}, "environment.versions"),
])
def test_an_invalid_certificate_is_rejected(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(json.dumps({**KEPT, **change}))
    with pytest.raises(UserError) as error:
        read_certificate(path)
    assert message in f"{error.value.found} {error.value.where}"


def test_a_case_that_failed_without_a_reason_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text(json.dumps(KEPT))
    here = as_record(CertificateRecord, {**KEPT, "results": [{**KEPT["results"][0], "passed": False}]}, "here")
    holds, text = compare(read_certificate(path), here)
    assert not holds
    assert "it failed without a reason" in text


def test_a_target_file_that_others_can_write_is_not_run(tmp_path: Path) -> None:
    shutil.copy(TARGETS, tmp_path / "mine.py")
    file = find_target(f"{tmp_path / 'mine.py'}:mlp")
    path = tmp_path / "kept.json"
    path.write_text(json.dumps({**KEPT, "command": f"ezpz-llm certify --target {file.path}:mlp",
                                "target": {"path": "mine.py", "sha256": file.sha256}}))
    assert read_certificate(path).arguments == ["--target", f"{file.path}:mlp"]
    Path(file.path).chmod(0o666)
    with pytest.raises(UserError, match="--recheck would run its code"):
        read_certificate(path)


def test_the_hashed_content_is_the_code_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.py"
    shutil.copy(TARGETS, path)
    file = find_target(f"{path}:mlp")

    def read_and_change(place: Path, max_bytes: int) -> bytes:
        content = read_bytes(place, max_bytes)
        path.write_text("raise SystemExit('this was never hashed')")
        return content

    monkeypatch.setattr(target_file, "read_bytes", read_and_change)
    assert load(file).loss.__name__ == "two_losses"
    with pytest.raises(UserError, match="the file changed after certify had read it"):
        load(file)
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize(("command", "message"), [
    ("ezpz-llm certify --layouts " + "ddp," * 2_000_000, "command is 'ezpz-llm certify"),
    ("ezpz-llm certify --steps 1000000000000", "--steps 1000000000000 is too many"),
    ("ezpz-llm certify --world " + "9" * 5000, "is not a list of up to 16 world sizes"),
    ("ezpz-llm certify --world " + ",".join(map(str, range(1, 2000))), "is not a list of up to 16 world sizes"),
    ("ezpz-llm certify --world 1,2,3,4,5,6,7,8 --layouts "
     + ",".join("./" * depth + "zero1.json" for depth in range(1, 120)), "cases are more than 2000")])
def test_counts_in_a_certificate_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str,
                                             message: str) -> None:
    """A long list of layouts or world sizes would take minutes to plan."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "ds_configs/zero1.json", tmp_path)
    path = tmp_path / "kept.json"
    path.write_text(json.dumps({**KEPT, "command": command}))
    with pytest.raises(UserError) as error:
        certify_main.main(["--recheck", str(path), "--run-dir", str(tmp_path / "run")])
    assert message in error.value.found


def test_a_recheck_does_not_write_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed certificate was made with --write-docs."""
    requests: dict[str, Any] = {}

    def lead(work: object, options: argparse.Namespace, arguments: object, began: float) -> None:
        requests.update(vars(options))
        (options.run_dir / "certify.json").write_text(json.dumps({**KEPT, "refused": None}))

    monkeypatch.setattr(certify_main, "_run_locally", lead)
    path = tmp_path / "kept.json"
    path.write_text(json.dumps({**KEPT, "command": "ezpz-llm certify --json other.json --write-docs"}))
    (tmp_path / "run").mkdir()
    assert certify_main.main(["--recheck", str(path), "--run-dir", str(tmp_path / "run")]) == 0
    assert (requests["write_docs"], requests["json"]) == (False, None)


def test_a_step_function_without_an_optimizer_step_gives_a_message(tmp_path: Path) -> None:
    code, output = command(tmp_path, "--target", f"{TARGETS}:no_step", "--layouts", "ddp", "--dtype", "fp32",
                           "--device", "cpu", "--run-dir", "run")
    assert code == 1
    assert "the step function took no optimizer step after 3 micro-batches" in output
    assert "0 of 1 case passed" in output


def planned(*arguments: str):
    return plan(parser().parse_args(arguments))


def test_a_target_is_planned_without_torch() -> None:
    program = ("import sys; from ezpz_llm.verify.certify.command import main; "
               f"code = main(['--check', '--target', '{TARGETS}:mlp', '--world-size', '2']); "
               "assert not {'torch', 'deepspeed'} & set(sys.modules); raise SystemExit(code)")
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                             timeout=scaled(60), check=False)
    assert process.returncode == 0, process.stderr


def test_a_target_is_certified_under_layouts_that_wrap_supports() -> None:
    work = planned("--target", f"{TARGETS}:mlp", "--dtype", "fp32")
    assert [(case.layout, case.world) for case in work.cases] == [
        *((name, 2) for name in LAYOUTS if name != "zero3_hpz2"), ("zero3_hpz2", 4)]
    assert {case.model for case in work.cases} == {"targets.py:mlp"}
    assert {case.dtype for case in planned("--target", f"{TARGETS}:mlp").cases} == {"fp32", "bf16"}


@pytest.mark.parametrize(("arguments", "message"), [
    (["--target", "mine.py"], "not of the form FILE.py:FUNCTION"), (["--target", "none.py:mlp"], "No such file"),
    (["--target", f"{TARGETS}:mlq"], "unknown function 'mlq'"),
    (["--target", f"{TARGETS}:mlp", "--layouts", "pp2"], "pp2 splits layers"),
    (["--target", f"{TARGETS}:mlp", "--dtype", "bf16_autocast"], "bf16_autocast"),
    (["--target", f"{TARGETS}:mlp", "--quick"], "--quick"),
    (["--target", f"{TARGETS}:mlp", "--inject-fault", "gradients-x2"], "--inject-fault does not work with"),

])
def test_invalid_target_options_are_rejected(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        planned(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(("record", "message"), [
    ({"command": "ls"}, "not a certificate"),
    ({"command": "ezpz-llm certify", "date": "", "passed": False, "environment": {}, "results": []},
     "not every case of this certificate passed"),
])
def test_an_incomplete_certificate_is_rejected(tmp_path: Path, record: dict[str, object], message: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=message):
        read_certificate(path)

