"""Decisions of `--resume`: a run continues, starts over or is complete, with its own settings."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from launch_runs import launch, left_over, start
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record, update_record
from ezpz_llm.core.rundir.value_source_record import Source
from ezpz_llm.train import main
from ezpz_llm.training.checkpoint import find
from ezpz_llm.training.checkpoint.manifest import complete_checkpoints
from ezpz_llm.training.checkpoint.state import read_state
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.layout import ops
from ezpz_llm.training.layout.batch import option_of
from ezpz_llm.training.trainer import loop
from ezpz_llm.training.trainer.config import TrainConfig
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import plan_run
from ezpz_llm.training.trainer.resume import find_resume_point, recorded_settings
from ezpz_llm.training.trainer.run import run

SMALL = ["--n-layer", "1", "--n-head", "2", "--n-kv-head", "2", "--n-embd", "32", "--block-size", "32",
         "--eval-tokens", "64", "--sample-tokens", "0", "--profile", "false", "--precision", "fp32",
         "--micro-batch-size", "2", "--lr", "2e-3", "--log-every", "2"]


class Died(Exception):
    """Injected end of a run."""


@pytest.fixture
def train(monkeypatch, capsys):
    """Return a function that trains with one rank in this process; the run dies in step `dies`."""
    original_step = loop.train_step

    def run_it(*words: object, dies: int = 0) -> tuple[int, str]:
        def step(session, number):
            if number + 1 == dies:
                raise Died
            original_step(session, number)

        monkeypatch.setattr(loop, "train_step", step)
        capsys.readouterr()
        code = run(parse([*map(str, words), "--device", "cpu"]))
        return code, capsys.readouterr().out

    return run_it


def losses(run_dir: str | Path) -> list[float]:
    return [line["loss"] for line in read_lines(RunDir(Path(run_dir)).metrics)]


def test_one_command_goes_through_all_of_it(train, tmp_path, capsys):
    """Die before the first checkpoint, die after it, finish, and run once more, as a requeued job does."""
    run_dir = tmp_path / "run"
    words = [*SMALL, "--ds-config", "ddp", "--steps", "12", "--save-every", "4", "--run-dir", run_dir,
             "--resume", "auto"]
    with pytest.raises(Died):
        train(*words, dies=4)
    kept = RunDir(run_dir).metrics.read_bytes()
    assert main([*map(str, words), "--check"]) == 0
    with pytest.raises(Died):
        train(*words, dies=10)
    out = capsys.readouterr().out
    assert f"note: {run_dir} ended before its first checkpoint: the run starts over\n" in out
    [aside] = run_dir.glob("metrics-before-*.jsonl")
    assert aside.read_bytes() == kept, "nothing is lost"
    code, out = train(*words)
    assert code == 0
    # A checkpoint is complete once all ranks agree, some steps after its own step.
    assert re.match(rf"resuming after step [48] \(\d+ samples\) from {run_dir}/checkpoints/", out), out
    once_more = train(*words)
    assert once_more == (0, f"{run_dir} is complete, step 12 of 12: nothing is left to do\n")
    assert main([*map(str, words), "--check"]) == 0
    assert train(*SMALL, "--ds-config", "ddp", "--steps", "12", "--run-dir", tmp_path / "whole")[0] == 0
    assert losses(run_dir) == losses(tmp_path / "whole")


def test_a_run_is_resumed_with_its_own_settings(train, tmp_path):
    """Resume with only --resume, from another folder, on other numbers of ranks, and under another layout."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 90)
    words = [*SMALL, "--corpus", text, "--tokenizer", "char", "--ds-config", "ddp", "--save-every", "4", "--beta2",
             "0.9", "--seed", "5"]
    whole = tmp_path / "whole"
    assert train(*words, "--steps", "8", "--run-dir", whole)[0] == 0
    half = whole / "checkpoints" / "step-00000004"
    code, out = train("--resume", half, "--run-dir", tmp_path / "on", "--verbose")
    assert code == 0
    assert losses(tmp_path / "on") == losses(whole)[4:]
    assert f"run {whole} (its command line): n_layer 1, " in " ".join(out.split())
    ours, theirs = (read_record(RunDir(path)).config for path in (tmp_path / "on", whole))
    differing = {name for name in theirs if ours[name] != theirs[name]} - {"run_dir", "resume"}
    assert differing == {"global_batch"}, "the derived global batch is recorded as a number"

    def plan(*more: str, ranks: int = 2):
        return plan_run(find_resume_point(parse(["--resume", str(half), "--device", "cpu", *more])).options, ranks)

    def batch(*more: str, ranks: int = 2) -> tuple[int, int, int]:
        sizes = plan(*more, ranks=ranks).resolved.batch
        return sizes.global_batch, sizes.micro_batch, sizes.accumulation

    assert batch() == (2, 1, 1), "the global batch is kept on any number of ranks"
    assert batch("--global-batch-size", "8") == (8, 2, 2)
    assert batch("--micro-batch-size", "2", "--gradient-accumulation-steps", "3") == (12, 2, 3)
    assert plan("--ds-config", "tp2").resolved.layout.tp == 2
    assert plan("--steps", "20").config.decay_steps == 20, "derived values are derived again"
    assert plan("--lr", "1e-3").config.min_lr == 1e-4
    assert plan("--n-embd", "64").model.n_embd == 64, "the command line wins, and the checkpoint rejects it later"


def test_the_default_layout_follows_the_number_of_ranks(tmp_path):
    assert plan_run(parse([]), 1).config.ds_config == "ddp"
    assert plan_run(parse([]), 2).config.ds_config == "zero1"
    assert plan_run(parse(["--ds-config", "zero1"]), 1).config.ds_config == "zero1"
    assert plan_run(parse(["--grad-accum-dtype", "bf16", "--precision", "bf16"]), 1).config.ds_config == "zero1"
    single = plan_run(parse([]), 1)
    update_record(RunDir(tmp_path).create(), steps=600, config=asdict(single.config),
                  sources={name: source.as_record() for name, source in single.sources.items()})
    resumed = find_resume_point(parse(["--resume", "auto", "--run-dir", str(tmp_path)])).options
    assert plan_run(resumed, 2).config.ds_config == "zero1"


def test_another_layout_drops_the_folder_for_offloaded_state(tmp_path, monkeypatch):
    monkeypatch.setattr(ops, "is_built", lambda name: True)
    run_dir = tmp_path / "run"
    words = ["--ds-config", "zero3_nvme", "--nvme-path", str(tmp_path / "disk")]
    given = parse(words)
    update_record(RunDir(run_dir).create(), steps=6, config=asdict(given.config),
                  sources={name: source.as_record() for name, source in given.sources.items()})

    def nvme_path(*more: str) -> str | None:
        options = find_resume_point(parse(["--resume", "auto", "--run-dir", str(run_dir), *more])).options
        return plan_run(options, 2).config.nvme_path

    assert nvme_path() == str(tmp_path / "disk")
    assert nvme_path("--ds-config", "fsdp2") is None
    assert nvme_path("--ds-config", "zero3_nvme", "--nvme-path", "/other") == "/other"
    with pytest.raises(UserError, match="offloads nothing to files"):
        nvme_path("--ds-config", "fsdp2", "--nvme-path", "/other")
    RunDir(run_dir).record.chmod(0o666)
    assert nvme_path() is None, "another user may have named the folder"


def test_runs_with_nothing_saved(train, tmp_path, capsys):
    assert train(*SMALL, "--ds-config", "ddp", "--steps", "2", "--save-every", "-1", "--run-dir", tmp_path / "a",
                 "--resume", "auto")[0] == 0
    code, out = train("--resume", "auto", "--run-dir", tmp_path / "a")
    assert (code, "complete, without checkpoints" in out) == (0, True), out
    code, out = train("--resume", tmp_path / "a", "--run-dir", tmp_path / "b", "--steps", "1", "--save-every", "0")
    assert (code, "ended before its first checkpoint: the run starts over" in out) == (0, True), out
    assert len(losses(tmp_path / "a")) == 2, "another run's metrics are not moved"
    assert [folder.name for folder in complete_checkpoints(RunDir(tmp_path / "b").checkpoints)] == ["step-00000001"]
    (tmp_path / "empty").mkdir()
    for wrong in ("empty", "missing"):
        with pytest.raises(UserError):
            find_resume_point(parse(["--resume", str(tmp_path / wrong)]))
    assert "starts in a new directory" in find_resume_point(parse(["--resume", "auto"])).notes[0]


def test_a_run_without_checkpoints_resumes_from_the_checkpoint_it_began_with(train, tmp_path, monkeypatch):
    """Resume it in a new directory, in its own, after a run without checkpoints, and once its origin is gone."""
    monkeypatch.chdir(tmp_path)
    assert train(*SMALL, "--ds-config", "ddp", "--steps", "2", "--run-dir", "a")[0] == 0
    with pytest.raises(Died):
        train("--resume", "a", "--run-dir", "b", "--steps", "9", "--save-every", "100", "--beta2", "0.9", dies=6)
    assert losses("b")
    begun = f"b ended before its first checkpoint: the run resumes from {tmp_path}/a, as that run did"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, out = train("--resume", "../b", "--run-dir", "c", "--steps", "4")
    assert (code, f"note: ../{begun}\n" in out) == (0, True), out
    assert f"resuming after step 2 (4 samples) from {tmp_path}/a/checkpoints/step-00000002\n" in out
    assert [line["step"] for line in read_lines(RunDir(Path("c")).metrics)] == [3, 4]
    assert read_record(RunDir(Path("c"))).config["beta2"] == 0.9
    monkeypatch.chdir(tmp_path)
    own = ["--run-dir", "b", "--resume", "auto", "--save-every", "-1"]
    code, out = train(*own)
    assert (code, f"note: {begun}\n" in out) == (0, True), out
    assert [line["step"] for line in read_lines(RunDir(Path("b")).metrics)] == list(range(3, 10))
    assert list(Path("b").glob("metrics-before-*")) == []
    assert "b is complete, without checkpoints" in find_resume_point(parse(own)).complete
    Path("a").rename("moved")
    for more in (["--resume", "b", "--steps", "12"], [*own, "--steps", "12"]):
        with pytest.raises(UserError, match=f"resumed from {tmp_path}/a, where no checkpoint is left") as caught:
            find_resume_point(parse(more))
        assert f"restore {tmp_path}/a" in caught.value.instead


def test_only_a_run_directory_with_settings_starts_over(train, tmp_path):
    run_dir = tmp_path / "run"
    assert train(*SMALL, "--ds-config", "ddp", "--steps", "1", "--run-dir", run_dir)[0] == 0
    with pytest.raises(UserError, match="no run directory or checkpoint at") as caught:
        find_resume_point(parse(["--resume", str(run_dir / "checkpoints/step-00000002")]))
    assert (caught.value.where, "step-00000001" in caught.value.instead) == ("--resume", True)
    update_record(RunDir(tmp_path / "killed").create(), launch={"typed": ["launch", "train"]})
    with pytest.raises(UserError, match="killed ended before it recorded its settings"):
        find_resume_point(parse(["--resume", str(tmp_path / "killed")]))
    assert find_resume_point(parse(["--resume", "auto", "--run-dir", str(tmp_path / "killed")])).notes == ()


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory) -> list[str]:
    """Return the command line of a complete run, with a YAML file; its last word is the run directory."""
    folder = tmp_path_factory.mktemp("six")
    file = folder / "c.yaml"
    file.write_text("beta2: 0.9\neps: 1e-7\n")
    words = [*SMALL, "--ds-config", "ddp", "--steps", "6", "--save-every", "3", "--config", str(file), "--device",
             "cpu", "--run-dir", str(folder / "run")]
    assert run(parse(words)) == 0
    return words


def test_a_resumed_run_warns_about_changed_training_settings(six_steps, tmp_path, capsys):
    run_dir = Path(six_steps[-1])
    half = run_dir / "checkpoints" / "step-00000003"

    def warnings(where: Path, *more: str) -> str:
        capsys.readouterr()
        assert main(["--resume", str(where), "--device", "cpu", *more, "--check"]) == 0
        return capsys.readouterr().err

    assert "with different settings" not in warnings(half)
    assert "with different settings" not in warnings(half, "--ds-config", "zero1", "--micro-batch-size", "1",
                                                 "--log-every", "1", "--save-every", "1")
    longer = warnings(run_dir, "--steps", "12")
    assert "min_lr" not in longer
    assert "decay_steps was 6 and is 12 (follows from steps)" in longer
    assert ("The learning rate was 0.000321 at step 6. At step 7 it is now 0.00123; with the old settings it would "
            "be 0.0002. To keep the old settings, add --warmup-steps 0 --decay-steps 6\n") in longer
    kept = ["--steps", "12", "--warmup-steps", "0", "--decay-steps", "6"]
    assert "with different settings" not in warnings(run_dir, *kept)
    for option, value, before in (
            ("--lr", "1e-3", "0.002"), ("--schedule", "linear", "'cosine'"), ("--min-lr", "1e-5", "0.0002"),
            ("--warmup-steps", "2", "0"), ("--decay-steps", "9", "6"), ("--beta2", "0.95", "0.9"),
            ("--weight-decay", "0", "0.1"), ("--grad-clip", "0.5", "1.0"), ("--global-batch-size", "4", "2"),
            ("--dropout", "0.1", "0.0"), ("--z-loss", "1e-4", "0.0"), ("--precision", "bf16_autocast", "'fp32'")):
        text = warnings(half, option, value)
        assert f"{option} {before}" in text.partition("add ")[2], (option, text)
    capsys.readouterr()
    assert run(parse(["--resume", str(run_dir), "--run-dir", str(tmp_path / "on"), "--device", "cpu", "--steps",
                      "7"])) == 0
    assert "decay_steps was 6 and is 7" in capsys.readouterr().err


def test_another_corpus_is_rejected_by_name_before_ranks_start(train, tmp_path, monkeypatch):
    """Accept a prepared copy of the text, and the same text at another path."""
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    text = "to be or not to be, that is the question " * 60
    a, b, c = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    a.write_text(text)
    b.write_text(text)
    c.write_text(text[::-1])
    run_dir = tmp_path / "run"
    words = [*SMALL, "--ds-config", "ddp", "--save-every", "1"]
    assert train(*words, "--corpus", a, "--steps", "1", "--run-dir", run_dir)[0] == 0

    def check(*more: object) -> int:
        return main([*words, "--steps", "3", "--resume", str(run_dir), "--check", *map(str, more)])

    monkeypatch.chdir(tmp_path)
    for more in ([], ["--corpus", a], ["--corpus", "a.txt"], ["--tokenizer", "bytes"]):
        assert check(*more) == 0
    for option, value, before in (("corpus", c, a), ("corpus", "stdlib", a), ("corpus", f"{a}=1,{c}=1", a),
                                  ("tokenizer", "char", "bytes"), ("text-key", "content", "text")):
        with pytest.raises(UserError) as caught:
            check(f"--{option}", value)
        assert f"the run was trained with --{option} {before}" in caught.value.found
        assert f", not {value}" in caught.value.found
        assert f"omit --{option}" in caught.value.instead
    with pytest.raises(UserError, match=f"not {b}") as caught:
        check("--corpus", b)
    assert f"prepare it first: python3 -m ezpz_llm.data prepare {b}" in caught.value.instead
    prepare(str(b), progress=False)
    assert check("--corpus", b) == 0
    prepare(str(c), progress=False)
    with pytest.raises(UserError, match="the run was trained with --corpus"):
        check("--corpus", c)
    a.rename(tmp_path / "moved.txt")
    assert check("--corpus", "moved.txt") == 0


def test_another_mixture_is_rejected_by_its_parts(train, tmp_path, monkeypatch):
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name} to be or not to be, that is the question " * 60)
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "--ds-config", "ddp", "--save-every", "1"]
    assert train(*words, "--corpus", "a.txt=0.5,b.txt=0.5", "--steps", "1", "--run-dir", tmp_path / "run")[0] == 0
    again = [*words, "--steps", "3", "--resume", "run", "--check", "--corpus"]
    assert main([*again, f"./a.txt=0.5, {tmp_path / 'b.txt'}=0.5"]) == 0
    for other in ("a.txt=0.6,b.txt=0.4", "b.txt=0.5,a.txt=0.5", "a.txt"):
        before = f"{tmp_path}/a.txt=0.5,{tmp_path}/b.txt=0.5"
        with pytest.raises(UserError, match=re.escape(f"--corpus {before}, not {other}")):
            main([*again, other])
    same = [*words, "--steps", "1", "--corpus", "a.txt=0.5,b.txt=0.5", "--resume", "run"]
    assert find_resume_point(parse(same)).complete


def test_a_fine_tuned_run_resumes_without_its_initial_weights(train, tmp_path, monkeypatch):
    """Remove the initial weights, and resume from another working directory."""
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be, that is the question\n" * 90)
    words = [*SMALL, "--corpus", "text.txt", "--ds-config", "ddp"]
    assert train(*words, "--tokenizer", "char", "--steps", "1", "--run-dir", "first")[0] == 0
    assert train(*words, "--init-from", "first", "--steps", "2", "--run-dir", "tuned")[0] == 0
    Path("first").rename("moved")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    words = ["--resume", "../tuned", "--run-dir", "on", "--steps", "4"]
    assert main([*words, "--check"]) == 0
    code, out = train(*words)
    assert code == 0
    assert "resuming after step 2" in out
    settings = read_record(RunDir(Path("on"))).config
    assert {name: settings[name] for name in ("init_from", "corpus", "model")} == {
        "init_from": str(tmp_path / "first"), "corpus": str(tmp_path / "text.txt"), "model": "first"}
    assert read_state(find("on")).tokenizer == read_state(find(tmp_path / "moved")).tokenizer


def test_recorded_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "more.txt"):
        Path(name).write_text("x")
    for name in ("hf", "rows", "stdlib"):
        Path(name).mkdir()

    def recorded(*words: str) -> dict[str, object]:
        settings = recorded_settings(parse(words).config)
        return {name: value for name, value in settings.items()
                if name != "lr" and value != getattr(TrainConfig, name)}  # --init-from also changes lr

    assert recorded() == {}
    assert recorded("--corpus", "shakespeare", "--tokenizer", "gpt2", "--ds-config", "zero2", "--init-from",
                    "openai/gpt2") == {"corpus": "shakespeare", "tokenizer": "gpt2", "ds_config": "zero2",
                                       "init_from": "openai/gpt2"}
    for corpus, absolute in (("text.txt=0.25,stdlib=0.75", f"{tmp_path}/text.txt=0.25,stdlib=0.75"),
                             ("hf:rows", f"hf:{tmp_path}/rows"), ("hf:owner/rows", "hf:owner/rows"),
                             ("fineweb-edu", "fineweb-edu"), ("./stdlib", f"{tmp_path}/stdlib")):
        assert recorded("--corpus", corpus) == {"corpus": absolute}
    for name in ("tokenizer", "init_from", "ds_config", "hellaswag", "nvme_path", "resume"):
        assert recorded(option_of(name), "hf") == {name: f"{tmp_path}/hf"}


def test_a_complete_run_rejects_changed_options(six_steps):
    run_dir = six_steps[-1]
    for again in (["--resume", run_dir], [*six_steps, "--resume", "auto"]):
        assert find_resume_point(parse(again)).complete
    for more, message in ((["--lr", "1e-2"], "--lr 0.01 differs from the run's 0.002"),
                          (["--corpus", "other.txt"], "--corpus 'other.txt' differs from the run's 'stdlib'"),
                          (["--steps", "6", "--decay-steps", "9"], "--decay-steps 9 differs from the run's 6"),
                          (["--ds-config", "zero3", "--tp", "2"],
                           "--ds-config 'zero3' differs from the run's 'ddp', --tp 2"),
                          (["--preset", "shakespeare-char-cpu", "--steps", "6"], "--corpus 'shakespeare'")):
        with pytest.raises(UserError) as error:
            find_resume_point(parse(["--resume", run_dir, *more]))
        assert message in str(error.value), error.value
        assert "--steps N with N above 6" in str(error.value)
    Path(six_steps[six_steps.index("--config") + 1]).write_text("beta2: 0.9\neps: 1e-6\n")
    with pytest.raises(UserError, match="--eps 1e-06 differs from the run's 1e-07"):
        find_resume_point(parse([*six_steps, "--resume", "auto"]))
    assert not find_resume_point(parse(["--resume", run_dir, "--lr", "1e-2", "--steps", "9"])).complete


@pytest.mark.parametrize(("source", "is_complete"), [
    (Source("ds_config", "mine.json"), True), (Source("deepspeed_default", "mine.json"), True),
    (Source("derived", "steps"), True), (Source("recipe", "gpt2-124m", scaled_to=6), True),
    (Source("file", "mine.json"), False)])
def test_a_complete_run_accepts_values_that_the_ds_config_overrides_again(tmp_path, source, is_complete):
    (tmp_path / "c.yaml").write_text("beta2: 0.9\n")
    words = ["--config", str(tmp_path / "c.yaml"), "--run-dir", str(tmp_path / "run"), "--resume", "auto",
             "--save-every", "-1", "--steps", "6"]
    update_record(RunDir(tmp_path / "run").create(), sources={"beta2": source}, steps=6,
                  config={**asdict(parse(words).config), "beta2": 0.99})
    if is_complete:
        assert find_resume_point(parse(words)).complete
    else:
        with pytest.raises(UserError, match=r"beta2 0\.9 differs from the run's 0\.99"):
            find_resume_point(parse(words))


@pytest.mark.full
def test_a_killed_run_starts_over_with_the_same_command(tmp_path):
    words = ["-n", "1", sys.executable, "-m", "ezpz_llm.train", *SMALL, "--device", "cpu", "--run-dir", "r",
             "--resume", "auto", "--save-every", "5000", "--steps"]
    first = start(tmp_path, *words, "9000", OMP_NUM_THREADS="1")
    deadline = time.monotonic() + scaled(90)
    while not (tmp_path / "r/metrics.jsonl").exists():
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid, command in left_over(tmp_path / "r").items():
        if "ezpz_llm.train" in command and "ezpz_llm.launch" not in command:
            os.kill(pid, signal.SIGKILL)
    _, err = first.communicate(timeout=scaled(60))
    assert first.returncode == 137, err
    done = launch(tmp_path, *words, "4", timeout=120, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "ended before its first checkpoint: the run starts over" in done.stdout
    assert [line["step"] for line in read_lines(RunDir(tmp_path / "r").metrics)] == [1, 2, 3, 4]
    again = launch(tmp_path, *words, "4", timeout=120, OMP_NUM_THREADS="1")
    assert (again.returncode, "r is complete, step 4 of 4" in again.stdout) == (0, True), again.stderr
