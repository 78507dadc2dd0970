"""Sources of a training run's values, and the message for a mistyped one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
from slowness import scaled

from ezpz_llm import train
from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.schema import as_dataclass
from ezpz_llm.core.rundir.value_source_record import Source
from ezpz_llm.launcher.basics.check_report import CheckReport
from ezpz_llm.training.layout.batch import option_of
from ezpz_llm.training.layout.value_source import COMMAND_LINE, DEFAULT, Origin, ValueSource
from ezpz_llm.training.trainer.config import FIELDS, MODEL_OVERRIDES, RANGES, SECTIONS, TrainConfig
from ezpz_llm.training.trainer.options import build_parser, dump, parse
from ezpz_llm.training.trainer.plan import check_run, plan_run


def test_command_line_beats_file_beats_preset_beats_recipe(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: shakespeare-char-cpu\nlr: 2e-3\nglobal-batch-size: 24\n")
    options = parse(["--config", str(file), "--lr", "3e-3"])
    assert options.config.lr == 3e-3
    assert str(options.sources["lr"]) == "command line"
    assert options.config.global_batch == 24
    assert str(options.sources["global_batch"]) == str(file)
    assert options.config.block_size == 64
    assert str(options.sources["block_size"]) == "preset shakespeare-char-cpu"
    assert options.config.eval_tokens == 0
    assert str(options.sources["beta1"]) == "default"


def test_an_unknown_preset_is_reported_where_it_is_set(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: shakespear-char-cpu\n")
    for argv, where in ((["--config", str(file)], str(file)), (["--preset", "shakespear-char-cpu"], "--preset")):
        with pytest.raises(UserError, match="unknown preset") as raised:
            parse(argv)
        assert raised.value.where == where
    file.write_text("preset: [gpt3-125m]\n")
    with pytest.raises(UserError, match="it must be text"):
        parse(["--config", str(file)])


def test_the_preset_on_the_command_line_beats_that_in_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: shakespeare-char-cpu\n")
    options = parse(["--config", str(file), "--preset", "gpt3-125m"])
    assert str(options.sources["model"]) == "preset gpt3-125m"


def test_a_file_named_like_another_source_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "default.yaml").write_text("lr: 2e-3\n")
    assert parse(["--config", "default.yaml"]).origin("lr") is Origin.FILE


def test_naming_a_model_brings_its_recipe():
    options = parse(["--model", "gpt2-124m"])
    assert (options.config.lr, options.config.warmup_steps, options.config.steps) == (6e-4, 715, 19073)
    assert str(options.sources["lr"]) == "recipe of gpt2-124m"


@pytest.mark.parametrize("argv", [
    ["--model", "gpt2-124m", "--steps", "7", "--bias", "false", "--prompt", "a: 'b'"],
    ["--preset", "shakespeare-char-cpu", "--eval-tokens", "100"],
    [],
])
def test_printed_config_reads_back_equal(argv, tmp_path):
    options = parse(argv)
    file = tmp_path / "printed.yaml"
    file.write_text(dump(options.config))
    assert parse(["--config", str(file)]).config == options.config


def test_a_shorter_run_scales_the_warm_up_of_its_recipe():
    for steps, warmup in ((1, 0), (1000, 37), (19073, 715), (30000, 715)):
        plan = plan_run(parse(["--model", "gpt2-124m", "--steps", str(steps)]), 2)
        assert plan.config.warmup_steps == warmup
    plan = plan_run(parse(["--model", "gpt2-124m", "--steps", "1000"]), 2)
    assert str(plan.sources["warmup_steps"]) == "recipe of gpt2-124m, in proportion to 1000 steps"
    with pytest.raises(UserError, match="does not end within"):
        plan_run(parse(["--model", "gpt2-124m", "--steps", "10", "--warmup-steps", "20"]), 2)


@pytest.mark.parametrize("argv", [
    ["--grad-clip", "-1"], ["--weight-decay", "-0.1"], ["--min-lr", "-1"], ["--lr", "0"], ["--beta2", "1"],
    ["--lr", "0.1", "--min-lr", "0.2"], ["--seed", str(2**32)], ["--prompt", ""], ["--save-every", "-2"],
])
def test_a_number_out_of_range_is_rejected_with_its_option_and_source(argv):
    with pytest.raises(UserError) as raised:
        plan_run(parse(argv), 1)
    name = argv[-2].removeprefix("--")
    assert {name, name.replace("-", "_")} & set(re.split(r"[\s(]+", raised.value.where.replace("--", " ")))
    assert raised.value.instead


def test_numbers_of_a_ds_config_are_checked_too(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('{"gradient_clipping": -1, "zero_optimization": {"stage": 1}}')
    with pytest.raises(UserError, match="grad_clip is -1") as raised:
        plan_run(parse(["--ds-config", str(file)]), 1)
    assert str(file) in raised.value.where


@pytest.mark.parametrize(("argv", "message", "instead"), [
    (["--stpes", "5"], "--stpes", "--steps"),
    (["--preset", "shakespear-char-cpu"], "shakespear-char-cpu", "shakespeare-char-cpu"),
    (["--steps", "five"], "--steps is 'five': it must be a whole number", None),
    (["--recompute", "all"], "--recompute is 'all': it must be a whole number or selective", None),
    (["--micro-batch-size", "x"], "--micro-batch-size is 'x': it must be a whole number or null", None),
    (["--precision", "float16"], "float16", "fp16"),
    (["--device", "gpu"], "gpu", "cpu"),
    (["--steps"], "expected one argument", "--help"),
    (["--config", "missing.yaml"], "no such configuration file", None),
])
def test_a_mistyped_word_is_named_with_what_to_type_instead(argv, message, instead):
    with pytest.raises(UserError) as raised:
        parse(argv)
    assert message in raised.value.found
    if instead:
        assert instead in raised.value.instead


@pytest.mark.parametrize(("text", "message"), [
    ("lrr: 1e-3\n", "lrr"),
    ("lr: fast\n", "lr is 'fast': it must be a number"),
    ("micro_batch_size: x\n", "micro_batch_size is 'x'"),
    ("steps: null\n", "steps has no value"),
    ("precision: half\n", "half"),
    ("- a\n- b\n", "must consist of `name: value` lines"),
    ("lr: [\n", "cannot read"),
])
def test_a_bad_file_is_rejected_by_name(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as raised:
        parse(["--config", str(file)])
    assert message in raised.value.found
    assert str(file) in raised.value.where


def test_batch_sizes_and_clipping_have_the_names_of_deepspeed(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("grad_clip: 0.5\nmicro-batch-size: 2\n")
    config = parse(["--config", str(file), "--gradient-accumulation-steps", "3", "--global-batch-size=12"]).config
    assert (config.clip, config.micro_batch, config.accumulation, config.global_batch) == (0.5, 2, 3, 12)


def test_help_has_each_option_once_in_the_sections_of_the_configuration():
    text = build_parser().format_help()
    assert re.findall(r"^([a-z].*):$", text, re.MULTILINE) == ["options", *SECTIONS.values(), "examples"]
    shown = re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", text, re.MULTILINE)
    assert [option for option in shown if option in map(option_of, FIELDS)] == [*map(option_of, FIELDS)]
    assert len(shown) == len(set(shown)) == len(FIELDS) + 9


def test_options_import_no_torch():
    code = ("import sys, ezpz_llm.training.trainer.options as o; o.parse(['--steps', '5']); "
            "print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=scaled(120), check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(("device", "there", "fits"), [
    ("cpu", "g++", True), ("cpu", "gcc", False), ("auto", "gcc", True), ("cuda", "clang", True),
    ("cuda", "", False),
])
def test_compile_without_a_compiler_is_rejected_before_the_start(device, there, fits, tmp_path, monkeypatch):
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    if there:
        (tmp_path / there).write_text("")
        (tmp_path / there).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    options = parse(["--compile", "true", "--device", device, "--corpus", __file__])
    if fits:
        check_run(options, 1)
    else:
        with pytest.raises(UserError, match=r"torch\.compile needs a compiler") as raised:
            check_run(options, 1)
        assert "compile (command line)" in str(raised.value)
    check_run(parse(["--device", device, "--corpus", __file__]), 1)


@pytest.mark.parametrize(("words", "device", "compiles", "why"), [
    ("--ds-config ddp", "cuda", True, "follows from device cuda and layout ddp"),
    ("--ds-config zero1 --precision bf16", "cuda", True, "follows from device cuda and layout zero1"),
    ("--ds-config tp2", "cuda", True, "follows from device cuda and layout tp2"),
    ("--ds-config pp2", "cuda", True, "follows from device cuda and layout pp2"),
    ("--ds-config ddp", "cpu", False, "follows from device cpu"),
    ("--ds-config ddp", "xpu", False, "follows from device xpu"),
    ("--ds-config ddp", None, False, "follows from the device, not known yet"),
    ("--ds-config zero3", "cuda", False, "follows from layout zero3: ZeRO stage 3's hooks break"),
    ("--ds-config sp2", "cuda", False, "follows from layout sp2: the sequence-parallel exchange"),
    ("--ds-config tp2 --dropout 0.1", "cuda", False, "follows from layout tp2: dropout of sharded heads"),
    ("--ds-config ddp --compile false", "cuda", False, "command line"),
    ("--ds-config sp2 --compile true", "cpu", True, "command line"),
])
def test_compile_is_the_default_where_device_and_layout_allow_it(words, device, compiles, why):
    plan = plan_run(parse(words.split()), 2, device=device)
    assert plan.config.compile is compiles
    assert str(plan.sources["compile"]).startswith(why)


@pytest.mark.parametrize("layout", ["zero3", "tp2_zero3", "tiled"])
def test_selective_recomputation_under_stage_3_is_rejected(layout):
    with pytest.raises(UserError, match="does not support ZeRO stage 3"):
        plan_run(parse(["--ds-config", layout, "--recompute", "selective"]), 2)


@pytest.mark.parametrize(("words", "instead"), [
    ("--ds-config zero3", "--ds-config fsdp2"), ("--ds-config tp2_zero3", "--compile false"),
])
def test_compiling_under_stage_3_is_rejected(words, instead):
    with pytest.raises(UserError, match="stage 3's hooks break") as raised:
        plan_run(parse([*words.split(), "--compile", "true"]), 2)
    assert raised.value.instead.startswith(instead)
    assert raised.value.where == "compile (command line)"


@pytest.mark.parametrize("words", [f"--{name.replace('_', '-')} {value}" for name, value in [
    ("steps", 10**20), ("n_layer", 10**8), ("n_embd", 10**12), ("block_size", 2**63 - 1),
    ("global_batch_size", 10**20), ("eval_tokens", 10**30), ("tp", 10**12), ("lr", "1e300"), ("lr", "nan"),
    ("grad_clip", "inf"), ("seed", 2**32)]])
def test_an_absurd_number_is_rejected_at_once(words):
    with pytest.raises(UserError):
        plan_run(parse(words.split()), 2)


def test_every_number_has_a_range():
    numbers = {name for name, hint in get_type_hints(TrainConfig).items()
               if {int, float} & {hint, *get_args(hint)} and name not in MODEL_OVERRIDES}
    assert numbers - {"seed"} == RANGES.keys()


@pytest.mark.parametrize("path", ["/dev/zero", "pipe"])
def test_an_endless_file_is_rejected_at_once(path, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a regular file"):
        parse(["--config", str(tmp_path / path)])


def test_a_check_prints_its_result_as_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ds-config", "zero1", "--check", "--json", "--world-size", "2", "--device", "cpu"]
    assert train.main([*words, "--warmup-steps", "0", "--steps", "4", "--decay-steps", "9"]) == 0
    report = as_dataclass(CheckReport, json.loads(capsys.readouterr().out), "train")
    assert (report.layout, report.global_batch, report.error) == ("zero1", 8, None)
    assert report.explanation.startswith("layout ")
    assert [warning.split(":")[0] for warning in report.warnings] == ["warning"]
    assert train.main([*words, "--tp", "3"]) == train.main([*words, "--no-such-option"]) == 2
    invalid, unparsed = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert all((invalid["error"], invalid["instead"]))
    assert invalid["layout"] is None
    assert unparsed["error"] == "unknown option '--no-such-option'"
    with pytest.raises(UserError, match="--json requires --check"):
        train.main(["--json"])


@pytest.mark.parametrize("origin", Origin)
def test_a_source_survives_a_round_trip(origin: Origin) -> None:
    source = ValueSource(origin, "a/b", 10)
    assert ValueSource.from_record(source.as_record()) == source


def test_unknown_origins_are_kept_as_text() -> None:
    assert ValueSource.from_record(Source("later", "of x")) == ValueSource(Origin.FILE, "of x")


def test_command_line_values_are_typed_after_any_number_of_resumes() -> None:
    once = ValueSource.from_record(ValueSource.of_run("runs/a", COMMAND_LINE).as_record())
    twice = ValueSource.from_record(ValueSource.of_run("runs/a", once).as_record())
    assert once.is_typed
    assert twice.is_typed
    assert not ValueSource.of_run("runs/a", DEFAULT).is_typed
