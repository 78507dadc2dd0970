"""User training loops: the example of docs/use/library.md, and the files of its run directory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch_runs import clean_env, need_mpiexec
from places import ROOT
from slowness import scaled

import ezpz_llm

PAGE = (ROOT / "docs/use/library.md").read_text()


def ten_lines(folder: Path) -> Path:
    """Write the page's first example to a script, and return its path."""
    script = folder / "mine.py"
    script.write_text(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1])  # type: ignore[index]
    return script


def run_dir_of(folder: Path) -> Path:
    (run_dir,) = (folder / "runs").iterdir()
    return run_dir


def command(folder: Path, *arguments: object) -> str:
    result = subprocess.run([sys.executable, *map(str, arguments)], cwd=folder, env=clean_env(OMP_NUM_THREADS="1"),
                            capture_output=True, text=True, timeout=scaled(300), check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def lines_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_import_does_not_import_torch():
    code = "import sys, ezpz_llm; ezpz_llm.UserError; print('torch' in sys.modules or 'numpy' in sys.modules)"
    assert command(ROOT, "-c", code) == "False\n"


def test_page_lists_public_names():
    sentence = re.search(r"^These names are the public interface, .*?: (.*?)\.", PAGE, re.DOTALL | re.MULTILINE)
    assert sentence
    listed = re.findall(r"`(\w+)`", sentence[1])
    assert sorted(listed) == sorted(set(ezpz_llm.__all__) - {"__version__"})
    for name in ezpz_llm.__all__:
        assert getattr(ezpz_llm, name) is not None
    with pytest.raises(AttributeError):
        _ = ezpz_llm.setup_torch


def test_ten_lines_in_one_process(tmp_path: Path):
    script = ten_lines(tmp_path)
    assert len([line for line in script.read_text().splitlines() if line]) <= 10
    output = command(tmp_path, script)
    assert "loss over step" in output
    run_dir = run_dir_of(tmp_path)
    lines = lines_of(run_dir)
    assert [line["step"] for line in lines] == list(range(1, 51))
    losses = [line["loss"] for line in lines]
    assert sum(losses[-10:]) < 0.1 * sum(losses[:10])
    assert all(line["tokens_per_second"] * line["step_time_s"] == pytest.approx(4) for line in lines)
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert "finished, step 50 of 50" in command(tmp_path, "-m", "ezpz_llm.report", run_dir)
    assert "Phases of a step on rank 0" in command(tmp_path, "-m", "ezpz_llm.explain", run_dir)


@pytest.mark.full
def test_ten_lines_under_launch(tmp_path: Path):
    need_mpiexec()
    command(tmp_path, "-m", "ezpz_llm.launch", "-n", "2", sys.executable, ten_lines(tmp_path))
    run_dir = run_dir_of(tmp_path)
    lines = lines_of(run_dir)
    assert len(lines) == 50
    assert lines[-1]["tokens_per_second"] * lines[-1]["step_time_s"] == pytest.approx(8)
    assert "all ranks succeeded" in command(tmp_path, "-m", "ezpz_llm.why", run_dir)


@pytest.mark.full
def test_ten_lines_under_torchrun(tmp_path: Path):
    command(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", ten_lines(tmp_path))
    run_dir = run_dir_of(tmp_path)
    lines = lines_of(run_dir)
    assert len(lines) == 50
    assert lines[-1]["tokens_per_second"] * lines[-1]["step_time_s"] == pytest.approx(8)
    record = json.loads((run_dir / "run.json").read_text())
    assert record["environment"]["rank_source"] == "torchrun (RANK)"


@pytest.mark.parametrize(("program", "name"), [
    ("/venv/lib/python3.11/site-packages/ipykernel_launcher.py", "notebook"), ("mine.py", "mine")])
def test_run_is_named_after_script(tmp_path: Path, program: str, name: str):
    code = f"import sys, ezpz_llm; sys.argv = [{program!r}]; ezpz_llm.setup(device='cpu'); ezpz_llm.finish()"
    command(tmp_path, "-c", code)
    assert run_dir_of(tmp_path).name.startswith(f"{name}-20")


_LOOP = """
import time
import torch, ezpz_llm
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
run = ezpz_llm.setup(run_dir="run", device="cpu", log_every=100)
assert ezpz_llm.setup() is run
for step in range(5, 50, 5):
    with ezpz_llm.phase("data"):
        torch.zeros(1)
    ezpz_llm.record(step, loss=1.0 / step, val_loss=2.0, mine=step)
    with ezpz_llm.phase("evaluation"):
        time.sleep(0.1)
ezpz_llm.finish()
assert torch.distributed.is_initialized()  # the library must not destroy the user's group
"""


def test_step_times_exclude_evaluation_and_are_means_over_steps(tmp_path: Path):
    command(tmp_path, "-c", _LOOP)
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(5, 50, 5))
    assert all(line["step_time_s"] < 0.02 and line["data_s"] > 0 for line in lines[1:])
    assert [line["mine"] for line in lines] == list(range(5, 50, 5))
    assert "tokens_per_second" not in lines[0]
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["summary"]["tokens_per_second"] is None
    assert record["summary"]["wall"]["evaluation"] > 9 * 0.1
    assert record["summary"]["val_loss"] == 2.0
    assert "evaluation" in command(tmp_path, "-m", "ezpz_llm.explain", "run")


_ENDINGS = """
import ezpz_llm
run = ezpz_llm.setup(run_dir="none")
ezpz_llm.finish()  # without a record
ezpz_llm.finish()
try:
    ezpz_llm.record(1, loss=1.0)
except ezpz_llm.UserError as error:
    print(error)
with ezpz_llm.setup(run_dir="inner") as run:
    ezpz_llm.record(1, loss=1.0)
    ezpz_llm.finish()
for name, context in (("finally", False), ("with", True)):
    try:
        run = ezpz_llm.setup(run_dir=name)
        try:
            for step in range(1, 8):
                ezpz_llm.record(step, loss=1.0)
            if context:
                with run:
                    raise KeyError("mine")
            raise KeyError("mine")
        finally:
            ezpz_llm.finish()
    except KeyError:
        pass
try:
    ezpz_llm.setup(run_dir="inner")
    ezpz_llm.record(1, loss=1.0)
except ezpz_llm.UserError as error:
    print(error)
ezpz_llm.finish()
print("reached the end")
"""


def test_a_run_can_end_in_any_way(tmp_path: Path):
    """Check finish without a record, twice, inside of with, and after an exception."""
    output = command(tmp_path, "-c", _ENDINGS)
    assert "reached the end" in output
    assert "finish() has ended the run\n  where:   ezpz_llm.record" in output
    assert "the run directory already holds 1 steps of another run" in output
    assert [line["step"] for line in lines_of(tmp_path / "inner")] == [1]
    assert [line["step"] for line in lines_of(tmp_path / "finally")] == list(range(1, 8))
    assert [line["step"] for line in lines_of(tmp_path / "with")] == list(range(1, 8))
    assert (tmp_path / "finally/report.html").exists()


@pytest.mark.parametrize(("last_line", "has_group"), [("pass", "False"), ("1 / 0", "True")])
def test_no_thread_is_left_at_exit_unless_a_script_fails(tmp_path: Path, last_line: str, has_group: str):
    """Check that the process group is gone before the interpreter shuts down, where gloo's threads would abort."""
    script = ("import atexit, torch, ezpz_llm; atexit.register(lambda: print(torch.distributed.is_initialized()));"
              f"ezpz_llm.setup(device='cpu', run_dir='run'); {last_line}")
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=clean_env(OMP_NUM_THREADS="1"),
                            capture_output=True, text=True, timeout=scaled(120), check=False)
    assert result.stdout.strip() == has_group


_TWO_RANKS = """
import sys, ezpz_llm, torch
run = ezpz_llm.setup(log_every=3)
model = torch.nn.Linear(2, 1)
model = ezpz_llm.wrap(model, torch.optim.AdamW(model.parameters()), "zero1")
def train(step):
    loss = model(torch.ones(1, 2)).square().mean()
    model.backward(loss), model.step()
    ezpz_llm.record(step, loss=torch.tensor(step + 10.0 * run.rank), tokens=torch.tensor(4 + run.rank),
                    mine=run.rank)
try:
    for step in range(1, 9):
        train(step)
        if step == 5:
            ezpz_llm.save_checkpoint(model, step)
    assert ezpz_llm.load_checkpoint(model)["step"] == 5
    for step in range(6, 11):
        train(step)
    if run.rank == 1 and len(sys.argv) > 1:
        raise ValueError("of the script")
    if len(sys.argv) > 1:
        train(11)
finally:
    ezpz_llm.finish()
"""


@pytest.mark.full
def test_two_ranks_go_back_and_finish(tmp_path: Path):
    """Check means and sums over ranks, one line for each step after going back, and an error on one rank."""
    need_mpiexec()
    (tmp_path / "two.py").write_text(_TWO_RANKS)
    launch = ("-m", "ezpz_llm.launch", "-n", "2", "--run-dir")
    command(tmp_path, *launch, "run", sys.executable, "two.py")
    lines = lines_of(tmp_path / "run")
    assert [(line["step"], line["loss"], line["mine"]) for line in lines] == [
        (step, step + 5, 0) for step in range(1, 11)]
    assert all(line["tokens_per_second"] * line["step_time_s"] == pytest.approx(9) for line in lines)
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["summary"]["steps"], record["config"]["steps"]) == (10, 10)
    failed = subprocess.run([sys.executable, *launch, "failed", sys.executable, "two.py", "fail"], cwd=tmp_path,
                            env=clean_env(OMP_NUM_THREADS="1"), timeout=scaled(120), capture_output=True, text=True,
                            check=False)
    assert failed.returncode == 1
    assert "ValueError: of the script" in failed.stdout + failed.stderr


_SCHEDULED = """
import sys, torch, ezpz_llm
ezpz_llm.setup()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=len(sys.argv) > 4)
wrapped = ezpz_llm.wrap(model, optimizer, sys.argv[1])
scheduler = getattr(torch.optim.lr_scheduler, sys.argv[2])(optimizer, *map(float, sys.argv[3].split(",")))
begin = 0
if len(sys.argv) > 4:
    state = ezpz_llm.load_checkpoint(wrapped, sys.argv[4])
    begin = state["step"]
    scheduler.load_state_dict(state["scheduler"])
    assert "param_groups" not in state
for step in range(begin + 1, 7):
    print(f"{step}:{wrapped.lr:.6f}")
    wrapped.backward(wrapped(torch.ones(2, 8)).square().mean())
    wrapped.step()
    scheduler.step()
    if step == 3:
        ezpz_llm.save_checkpoint(wrapped, step, scheduler=scheduler.state_dict())
print(optimizer.param_groups[0]["betas"], optimizer.param_groups[0]["foreach"])
ezpz_llm.finish()
"""


@pytest.mark.parametrize(("scheduler", "arguments", "layouts"), [
    ("StepLR", "2,0.5", ("ddp", "zero1")), ("CosineAnnealingLR", "8", ("zero1", "fsdp2"))])
def test_a_resumed_schedule_continues(tmp_path: Path, scheduler: str, arguments: str, layouts: tuple[str, str]):
    """Schedulers compute the next learning rate from the current one, which the checkpoint restores."""
    (tmp_path / "scheduled.py").write_text(_SCHEDULED)
    first = command(tmp_path, "scheduled.py", layouts[0], scheduler, arguments)
    again = command(tmp_path, "scheduled.py", layouts[1], scheduler, arguments, run_dir_of(tmp_path))
    assert re.findall(r"^[456]:.*$", first, re.MULTILINE) == re.findall(r"^[456]:.*$", again, re.MULTILINE)
    assert "(0.9, 0.999) True" in again  # the script's own flag


def test_a_ds_config_with_only_the_batch_size_does_not_accumulate(tmp_path: Path):
    (tmp_path / "z.json").write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 1}}')
    (tmp_path / "batch.py").write_text("""
import torch, ezpz_llm
ezpz_llm.setup()
model = torch.nn.Linear(8, 1)
model = ezpz_llm.wrap(model, torch.optim.AdamW(model.parameters()), "z.json")
model.backward(model(torch.ones(64, 8)).square().mean())
print("accumulation", model.accumulation, "stepped", model.step() is not None)
ezpz_llm.finish()
""")
    assert "accumulation 1 stepped True" in command(tmp_path, "batch.py")


def test_a_script_may_clear_gradients(tmp_path: Path):
    """Check that zero_grad discards gradients as in torch, and changes nothing after a step."""
    (tmp_path / "clear.py").write_text("""
import torch, ezpz_llm
ezpz_llm.setup()
weights = []
for clears in (False, True):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    wrapped = ezpz_llm.wrap(model, optimizer, "bf16.json", accumulation=2)
    for step in range(4):
        if clears and step % 2 == 0:
            wrapped.backward(wrapped(torch.full((2, 8), 7.0)).mean() * 0)
            optimizer.zero_grad()
        else:
            wrapped.backward(wrapped(torch.ones(2, 8)).mean() * 0)
        wrapped.step()
        wrapped.backward(wrapped(torch.ones(2, 8)).square().mean())
        wrapped.step()
        if clears:
            optimizer.zero_grad()
    weights.append(wrapped.module.weight.float())
print("equal", torch.equal(*weights))
ezpz_llm.finish()
""")
    (tmp_path / "bf16.json").write_text('{"ezpz_llm": {"engine": "ddp"}, "bf16": {"enabled": true}}')
    assert "equal True" in command(tmp_path, "clear.py")


@pytest.mark.full
def test_ranks_do_not_diverge_under_reentrant_checkpointing(tmp_path: Path):
    """Check the error for a shared weight's second gradient, after the all-reduce of the first has started."""
    need_mpiexec()
    (tmp_path / "shared.py").write_text("""
import sys, torch, ezpz_llm
from torch.utils.checkpoint import checkpoint
run = ezpz_llm.setup()
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2**20)
    def forward(self, x):
        return sum(checkpoint(lambda part: self.head(part).square().mean(), part, use_reentrant=True)
                   for part in self.inner(x).chunk(2))
torch.manual_seed(0)
model = Model()
model = ezpz_llm.wrap(model, torch.optim.AdamW(model.parameters()), "bf16.json")
model.backward(model(torch.full((4, 8), float(run.rank + 1))))
""")
    (tmp_path / "bf16.json").write_text('{"ezpz_llm": {"engine": "ddp"}, "bf16": {"enabled": true}}')
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.launch", "-n", "2", sys.executable, "shared.py"],
                          cwd=tmp_path, env=clean_env(OMP_NUM_THREADS="1"), capture_output=True, text=True,
                          timeout=scaled(300), check=False)
    assert done.returncode != 0
    assert "was computed again after its reduction over ranks had started" in done.stdout + done.stderr
    assert "use_reentrant=False" in done.stdout + done.stderr


def test_a_run_starts_over_if_it_was_killed_before_its_first_checkpoint(
        run: ezpz_llm.Run, capsys: pytest.CaptureFixture[str]):
    metrics = run.run_dir / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "loss": 8.0}\n')
    module = torch.nn.Linear(2, 1)
    model = ezpz_llm.wrap(module, torch.optim.AdamW(module.parameters()))
    assert ezpz_llm.load_checkpoint(model) is None
    ezpz_llm.record(1, loss=1.0)
    assert ezpz_llm.load_checkpoint(model) is None  # keeps this attempt's metrics
    run.flush()
    assert [line["loss"] for line in lines_of(run.run_dir)] == [1.0]
    (old,) = run.run_dir.glob("metrics-before-*.jsonl")
    assert len(old.read_text().splitlines()) == 2
    assert f"the metrics of the earlier attempt are kept as {old}" in capsys.readouterr().err
