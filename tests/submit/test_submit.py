"""Tests of submit, from a launch command to a queued job, with stand-ins that print what schedulers print."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from golden import check_golden
from launch_runs import clean_env, scheduler
from places import ROOT
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import update_record
from ezpz_llm.launcher.jobs.schedulers.pbs import PbsScheduler
from ezpz_llm.launcher.jobs.schedulers.scheduler import Request, clock, clock_with_days
from ezpz_llm.launcher.jobs.schedulers.slurm import SlurmScheduler
from ezpz_llm.launcher.planning.sites import find_site, site_files
from ezpz_llm.launcher.submit.options import parse, read_duration
from ezpz_llm.launcher.submit.script import (
    array_lines,
    environment_lines,
    fill_template,
    remove_job_variables,
    request_lines,
)
from ezpz_llm.launcher.submit.state import find_state

ODD_WORDS = ["a b", "it's", 'say "hi"', "$(touch made)", "`touch made`", "a;b", "*", "", "#x", "\\", "$HOME",
             "--x=a b", "line\n#SBATCH --account=other", "ä", "${x}", "!y", "~", "-n"]


def submit(cwd: Path, *words: str, path: Path | None = None, bare: bool = False,
           **changes: str) -> subprocess.CompletedProcess[str]:
    """Run `ezpz-llm submit WORDS` with `path` first on PATH. A `bare` environment has only PATH and HOME."""
    ours = {"PATH": str(Path(sys.executable).parent)} if bare else clean_env()
    env = ours | {"HOME": "/home/user"} | changes
    if path:
        env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
    return subprocess.run([sys.executable, "-m", "ezpz_llm.submit", *words], cwd=cwd, env=env, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=scaled(60))


def request(**changes: object) -> Request:
    values: dict = {"name": "train", "nodes": 4, "time_s": 3600, "output": Path("/home/user/run/logs"),
                    "account": None, "queue": None, "reservation": None, "requeue": False, "gpus_per_node": None}
    return Request(**(values | changes))


@pytest.mark.parametrize(("name", "line"), [
    ("slurm", "#SBATCH --gpus-per-node=4"), ("pbs", "#PBS -l select=2:ngpus=4"),
    ("lsf", '#BSUB -gpu "num=4/host"'), ("flux", "#flux: --exclusive")])
def test_without_a_site_gpus_are_requested_by_option_and_missed_in_a_note(tmp_path: Path, name: str,
                                                                          line: str) -> None:
    words = ("--nodes", "2", "--time", "1h", "--dry-run", "--scheduler", name)
    command = ("--", "launch", "python3", "-m", "ezpz_llm.train")
    plain = submit(tmp_path, *words, *command)
    assert plain.returncode == 0, plain.stderr
    assert "note: no site file describes the nodes, so the script requests no GPUs" in plain.stderr
    assert "# ranks      2 " in plain.stdout
    with_gpus = submit(tmp_path, *words, "--gpus-per-node", "4", *command)
    assert (with_gpus.returncode, with_gpus.stderr) == (0, "")
    assert line in with_gpus.stdout.splitlines()
    assert "# ranks      8 " in with_gpus.stdout
    assert submit(tmp_path, *words, "--directive=--gres=gpu:4", *command).stderr == ""


def test_gpus_of_a_site_are_not_requested_twice(tmp_path: Path) -> None:
    words = ("--nodes", "2", "--time", "1h", "--dry-run", "--site", "perlmutter", "--account", "a",
             "--gpus-per-node")
    done = submit(tmp_path, *words, "4", "--", "launch", "hostname")
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("#SBATCH --gpus")]) == 1
    other = submit(tmp_path, *words, "3", "--", "launch", "hostname")
    assert other.returncode == 2
    assert "the nodes of site perlmutter have 4 devices" in other.stderr


@pytest.mark.parametrize(("text", "seconds"), [
    ("1:00:00", 3600), ("0:00:30", 30), ("36:00:00", 129600), ("1-12:00:00", 129600), ("90m", 5400), ("12h", 43200),
    ("1d12h", 129600), ("2h30m", 9000),
])
def test_durations_survive_formatting_and_parsing(text: str, seconds: int) -> None:
    assert read_duration(text) == seconds
    assert read_duration(clock(seconds)) == read_duration(clock_with_days(seconds)) == seconds


@pytest.mark.parametrize("text", ["60", "1:30", "1:60:00", "1-24:00:00", "-1:00:00", "1.5h", "", "h",
                                  "1h:00", "90 m", "1:00:00 ", "\u0661:00:00"])
def test_ambiguous_time_is_rejected(text: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(["--nodes", "1", "--time", text, "--", "launch", "x"])
    assert "H:MM:SS" in str(raised.value)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("text", ["0:00:00", "0h", "999999999d"])
def test_time_out_of_range_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match=f"--time {text!r} is not a duration of more than 0 and at most"):
        parse(["--nodes", "1", "--time", text, "--", "launch", "x"])


@pytest.mark.parametrize(("words", "message"), [
    ("--time 1h -- launch x", "--nodes"),
    ("--nodes 2 -- launch x", "--time"),
    ("--nodes 2 --time 1h", "the command is missing"),
    ("--nodes 2 --time 1h -- python3 x.py", "does not begin with launch"),
    ("--nodes 2 --time 1h -- launch", "no command to launch"),
    ("--nodes 2 --time 1h -- launch --dry-run x", "ezpz-llm submit --dry-run"),
    ("--nodes 2 --time 1h -- launch --version", "instead: ezpz-llm --version"),
    ("--nodes 2 --time 1h -- launch --pnp 2 x", "--ppn"),
    ("--nodes 2 --time 1h --acount x -- launch x", "--account"),
    ("--nodes 2 --time 1h --account a;b -- launch x", "letters, digits"),
    ("--nodes 2 --time 1h --queue $(id) -- launch x", "letters, digits"),
    ("--nodes 0 --time 1h -- launch x", "1 or more"),
    ("--nodes 2 --time 1h --chain 0 -- launch x", "1 or more"),
])
def test_a_wrong_word_is_named(words: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(words.split())
    assert message in str(raised.value)


@pytest.mark.parametrize("start", ["launch", "/opt/env/bin/launch", "ezpz-llm launch", "python3 -m ezpz_llm.launch",
                                   "/usr/bin/python3.11 -u -m ezpz_llm.launch"])
def test_every_form_of_launch_is_accepted(start: str) -> None:
    command = ("--ppn", "3", "python3", "x.py", "-n", "4")
    options = parse(["--nodes", "2", "--time", "1h", "--", *start.split(), *command])
    assert options.launch_words == tuple(start.split())
    assert (options.launch.per_host, options.launch.command) == (3, ("python3", "x.py", "-n", "4"))


def test_arguments_reach_the_job_unchanged(tmp_path: Path) -> None:
    lines = array_lines("command", [*ODD_WORDS, str(tmp_path)], {str(tmp_path): '"$run_dir"'})
    script = "\n".join([f"run_dir={shlex.quote(str(tmp_path))}", *lines, 'printf "%s\\0" "${command[@]}"'])
    done = subprocess.run(["bash"], input=script, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(120),
                          check=True)
    assert done.stdout.split("\0")[:-1] == [*ODD_WORDS, str(tmp_path)]
    assert not list(tmp_path.iterdir())
    assert max(map(len, lines)) < 130


@pytest.mark.parametrize(("name", "program", "directive", "indexes"), [
    ("slurm", "sbatch", "--array=0-2", {"SLURM_ARRAY_TASK_ID": "0"}),
    ("pbs", "qsub", "-J 0-2", {"PBS_ARRAY_INDEX": "0"}),
    ("lsf", "bsub", "-J a[1-2]", {"LSB_JOBINDEX": "1"}),
])
@pytest.mark.parametrize("words", [(), ("--run-dir", "mine")])
def test_each_element_of_an_array_has_a_run_directory(tmp_path: Path, name: str, program: str, directive: str,
                                                      indexes: dict[str, str], words: tuple[str, ...]) -> None:
    path = scheduler(tmp_path / "bin", program, "echo 7")
    done = submit(tmp_path, *JOB, "--scheduler", name, f"--directive={directive}", "--dry-run", "--", "launch",
                  *words, "python3", "-m", "ezpz_llm.train", path=path)
    assert done.returncode == 0, done.stderr
    section = done.stdout.partition("# ---- command\n")[2].partition("# ---- run")[0]
    outside = {"LSB_JOBINDEX": "0"} if name == "lsf" else {}
    directories = [subprocess.run(["bash", "-c", f'{section}\necho "$run_dir ${{command[*]}} ${{go_on[*]}}"'],
                                  env=variables, capture_output=True, text=True, timeout=scaled(60),
                                  check=True).stdout.split() for variables in (outside, indexes)]
    for index, shown in zip(("", f"-{next(iter(indexes.values()))}"), directories, strict=True):
        assert shown[1:4] == ["launch", "--run-dir", shown[0]]
        assert shown[-1] == shown[0]
        assert shown.count("--run-dir") == 1
        assert shown[0] == f"{directories[0][0]}{index}"
    assert directories[0][0].startswith(str(tmp_path / "mine") if words else str(tmp_path / "runs/train-"))


def test_only_the_scheduler_s_own_id_is_taken_for_one() -> None:
    for line, job in (("5", "5"), ("17;cluster", "17"), ("", None), ("Submitted batch job 5", None), ("5 6", None)):
        assert SlurmScheduler().job_id(line) == job
    for line, job in (("5.login", "5.login"), ("10[].login", "10[].login"), ("", None), ("login", None),
                      ("8246832.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov",) * 2, ("qsub: waiting", None)):
        assert PbsScheduler().job_id(line) == job


def test_pbs_and_slurm_reject_values_that_they_would_misread() -> None:
    assert "#PBS -l walltime=36:00:00" in PbsScheduler().directives(request(time_s=129600))
    assert "#SBATCH --time=1-12:00:00" in SlurmScheduler().directives(request(time_s=129600))
    for changes in ({"name": "two words"}, {"name": "1st"}, {"name": "x;y"}, {"output": Path("/a b/logs")},
                    {"output": Path("/a:b")}, {"queue": "q", "reservation": "R1"}):
        with pytest.raises(UserError):
            PbsScheduler().directives(request(**changes))
    with pytest.raises(UserError):
        SlurmScheduler().directives(request(name="a\n#SBATCH --account=b"))


def test_directives_of_the_site_replace_ours() -> None:
    values = {"nodes": "4", "time": "1:00:00", "account": "A", "queue": "debug", "reservation": None,
              "devices": "4"}
    lines = request_lines(PbsScheduler().directives(request(account="A", queue="debug")),
                          ["#PBS -l select={nodes}:system=polaris", "#PBS -l filesystems=home:eagle"],
                          values, PbsScheduler().subjects, "polaris")
    assert [line for line in lines if "select" in line] == ["#PBS -l select=4:system=polaris"]
    assert {"#PBS -A A", "#PBS -q debug", "#PBS -l place=scatter:excl"} <= set(lines)
    lines = request_lines(SlurmScheduler().directives(request(account="A", queue="debug")),
                          ["#SBATCH -C gpu", "#SBATCH --qos={queue}", "#SBATCH -N {nodes}",
                           "#SBATCH --gpus-per-node={devices}"], values, SlurmScheduler().subjects, "perlmutter")
    assert "#SBATCH --qos=debug" in lines
    assert not [line for line in lines if "--partition" in line or "--nodes=" in line]
    with pytest.raises(UserError, match="requires --account"):
        request_lines([], ["#PBS -A {account}"], values | {"account": None}, PbsScheduler().subjects, "polaris")


def test_the_environment_goes_along_without_secrets_and_devices(tmp_path: Path) -> None:
    env = {"PATH": "/opt/mpi/bin:/usr/bin", "HOME": "/home/user", "VIRTUAL_ENV": "/env", "HF_HOME": "/data/it's",
           "HF_TOKEN": "hf_secret", "CUDA_VISIBLE_DEVICES": "", "EZPZ_LLM_RUN_DIR": "/old", "NCCL_DEBUG": "INFO",
           "EZPZ_LLM_CACHE": "/data/cache", "EDITOR": "vi"}
    script = "\n".join([*environment_lines(env, tmp_path, ("SET_UP=done",), 3600, has_modules=False),
                        "pwd", "env", "echo $SET_UP"])
    job = subprocess.run(["/bin/bash"], input=script, env={"PATH": "/bin"}, cwd="/", capture_output=True, text=True,
                         timeout=scaled(120), check=True)
    lines = job.stdout.splitlines()
    assert lines[0] == str(tmp_path)
    assert {"HF_HOME=/data/it's", "NCCL_DEBUG=INFO", "EZPZ_LLM_CACHE=/data/cache", "VIRTUAL_ENV=/env"} <= set(lines)
    assert f"PATH={sys.prefix}/bin:/opt/mpi/bin:/usr/bin:/bin" in lines
    left_out = ("HF_TOKEN", "CUDA_", "EZPZ_LLM_RUN_DIR", "EDITOR", "HOME")
    assert not [line for line in lines if line.startswith(left_out)]
    now = int(subprocess.run(["date", "+%s"], capture_output=True, text=True, check=True).stdout)
    ends_at = next(int(line.partition("=")[2]) for line in lines if line.startswith("EZPZ_LLM_ENDS_AT="))
    assert now + 3000 < ends_at < now + 3600
    assert any(line.endswith("+ 75))") for line in environment_lines(env, tmp_path, (), 90, has_modules=False))


def test_site_modules_precede_the_path_of_the_login_node(tmp_path: Path) -> None:
    lines = environment_lines({"PATH": "/login/bin"}, tmp_path, ("echo $PATH", "PATH=/module/bin:$PATH"), 3600,
                              has_modules=True)
    job = subprocess.run(["/bin/bash"], input="\n".join([*lines, "echo $PATH"]), env={"PATH": "/bin"},
                         capture_output=True, text=True, timeout=scaled(60), check=True)
    assert job.stdout.splitlines() == ["/bin", f"{sys.prefix}/bin:/module/bin:/bin:/login/bin"]


def test_time_without_a_unit_is_rejected_with_the_reason() -> None:
    for text, instead in (("60", "--time 60m for minutes, or H:MM:SS"), ("1:30", "--time H:MM:SS, D-HH:MM:SS, or")):
        with pytest.raises(UserError, match=r"is not a (time with a unit|duration)") as caught:
            parse(["--nodes", "1", "--time", text, "--", "launch", "hostname"])
        assert caught.value.instead.startswith(instead)


def test_a_job_submitted_from_a_job_does_not_inherit_its_variables() -> None:
    inside = {"SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0", "SLURM_CONF": "/etc/s", "PMI_RANK": "1",
              "EZPZ_LLM_RUN_ID": "x"}
    assert remove_job_variables({"A": "1", **inside}) == {"A": "1", "SLURM_CONF": "/etc/s"}
    assert remove_job_variables({"A": "1", "SLURM_CLUSTERS": "c"}) == {"A": "1", "SLURM_CLUSTERS": "c"}


@pytest.mark.parametrize(("record", "files", "state"), [
    ({}, "", "new"),
    ({"submit": {"launched_before": None}}, "", "new"),
    ({"submit": {"launched_before": 5.0}, "launch": {"started": 5.0}, "exit": {"code": 0}}, "latest", "new"),
    ({"submit": {"launched_before": 5.0}, "launch": {"started": 6.0}, "exit": None}, "latest", "resume"),
    ({"launch": {"started": 6.0}, "exit": {"code": 143}}, "metrics latest", "resume"),
    ({"launch": {"started": 6.0}, "exit": None}, "metrics", "restart"),
    ({"launch": {"started": 6.0}, "exit": {"code": 1}}, "", "new"),
    ({"launch": {"started": 6.0}, "exit": {"code": 0}}, "", "complete"),
    ({"launch": {"started": 6.0}, "exit": {"code": 0}, "config": {"steps": 9}, "steps": 9}, "latest", "complete"),
    ({"launch": {"started": 6.0}, "exit": {"code": 0}, "config": {"steps": 9}, "steps": 4}, "latest", "resume"),
    ({"launch": {"started": 6.0}, "exit": {"code": 137}, "config": {"steps": 4}}, "latest", "complete"),
    ({"launch": {"started": 6.0}, "exit": {"code": 137}, "config": {"steps": 5}}, "metrics manifest", "resume"),
])
def test_state_of_a_run(record: dict, files: str, state: str, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).create()
    if record:
        update_record(run_dir, **record)
    if "latest" in files:
        (run_dir.checkpoints / "latest").write_text("step-00000004")
    if "manifest" in files:
        # `latest` may be missing for a moment while a checkpoint of the same step is replaced.
        (run_dir.checkpoints / ".step-00000004.replaced").mkdir()
        (run_dir.checkpoints / ".step-00000004.replaced" / "manifest.json").write_text("{}")
    if "metrics" in files:
        run_dir.metrics.write_text("{}\n")
    assert find_state(run_dir) == state


JOB = ("--nodes", "2", "--time", "10m")


def test_chain_is_submitted_with_checked_ids_and_recorded(tmp_path: Path) -> None:
    count = 'n=$(wc -l < $(dirname $0)/calls); echo "Welcome to the site"; echo "4$n.login"'
    path = scheduler(tmp_path / "bin", "qsub", count)
    done = submit(tmp_path, *JOB, "--chain", "3", "--requeue", "--site", str(pbs_site(tmp_path)), "--run-dir", "r",
                  "--", "launch", "-n", "2", "hostname", path=path)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "r"
    assert (path / "calls").read_text().splitlines() == [
        f"{run_dir}/job.sh", f"-W depend=afterany:41.login {run_dir}/job.sh",
        f"-W depend=afterany:42.login {run_dir}/job.sh"]
    assert "qdel 41.login 42.login 43.login" in done.stdout
    record = json.loads((run_dir / "run.json").read_text())["submit"]
    assert record["jobs"] == ["41.login", "42.login", "43.login"]
    assert (record["ranks"], record["scheduler"], record["typed"][:2]) == (2, "pbs", ["ezpz-llm", "submit"])
    assert "#PBS -r y" in (run_dir / "job.sh").read_text()


def pbs_site(folder: Path) -> Path:
    """Write a site file that only names the scheduler."""
    path = folder / "here.toml"
    path.write_text('scheduler = "pbs"\n')
    return path


@pytest.mark.parametrize(("script", "code", "messages", "left"), [
    # Output of Slurm 22.05.
    ('echo "sbatch: error: invalid partition specified: nix" >&2\n'
     'echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2; exit 1', 1,
     ("sbatch: error: invalid partition specified: nix\n", "--queue", "code 1", "--dry-run prints it"), []),
    (r"printf 'sbatch: error: \033]0;x\007no\n' >&2; exit 1", 1, (r"sbatch: error: \x1b]0;x\x07no",), []),
    ("exit 0", 1, ("not print exactly one job id",), ["hostname"]),
    ('echo "Submitted batch job"', 1, ("not print exactly one job id", "Submitted batch job"), ["hostname"]),
    ('[[ $* == *afterany* ]] && { echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }; echo 7', 1,
     ("QOSMaxSubmitJobPerUserLimit", "job 2 of the chain", "scancel 7\n"), ["hostname"]),
])
def test_a_refusal_is_shown_as_it_is_with_a_hint(script: str, code: int, messages: tuple[str, ...],
                                                 left: list[str], tmp_path: Path) -> None:
    path = scheduler(tmp_path / "bin", "sbatch", script)
    done = submit(tmp_path, *JOB, "--chain", "2", "--", "launch", "hostname", path=path)
    assert done.returncode == code
    for message in messages:
        assert message in done.stderr + done.stdout, done.stderr
    assert "Traceback" not in done.stderr
    if not left:
        assert "job.sh" not in done.stderr, "job.sh was removed with the run directory"
    # A job that may be queued keeps its run directory. A rejected job leaves none, which would be the newest run.
    assert [run.name.partition("-")[0] for run in (tmp_path / "runs").iterdir()] == left


@pytest.mark.parametrize(("name", "program", "answer", "watch", "cancel"), [
    ("slurm", "sbatch", "7", "squeue -j 7", "scancel 7"),
    ("pbs", "qsub", "7.login", "qstat 7.login", "qdel 7.login"),
    ("flux", "flux", "ƒ2bXr", "flux jobs ƒ2bXr", "flux cancel ƒ2bXr"),
    ("lsf", "bsub", "Job <7> is submitted to default queue <normal>.", "bjobs 7", "bkill 7"),
])
def test_broken_chain_prints_the_queued_jobs_and_how_to_cancel_them(
        tmp_path: Path, name: str, program: str, answer: str, watch: str, cancel: str) -> None:
    once = f'[[ $(wc -l < $(dirname $0)/calls) == 1 ]] || {{ echo "no more jobs" >&2; exit 1; }}; echo "{answer}"'
    path = scheduler(tmp_path / "bin", program, once)
    done = submit(tmp_path, *JOB, "--scheduler", name, "--chain", "2", "--", "launch", "hostname", path=path)
    assert done.returncode == 1
    assert "no more jobs" in done.stderr
    assert "rejected the job with code 1 (job 2 of the chain; the earlier ones are queued)" in done.stderr
    assert f"\nwatch      {watch}\ncancel     {cancel}\n" in done.stdout
    row = f"| `{name}` | `{watch.rpartition(' ')[0]} ID` | `{cancel.rpartition(' ')[0]} ID` |"
    assert row in (ROOT / "docs" / "reference" / "submit.md").read_text()


@pytest.mark.parametrize("name", ["sge", "oar", "cobalt", "pjm"])
def test_schedulers_without_job_scripts_are_rejected_by_name(tmp_path: Path, name: str) -> None:
    done = submit(tmp_path, *JOB, "--scheduler", name, "--", "launch", "hostname", path=tmp_path)
    assert done.returncode == 2
    assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_rejected_job_leaves_an_existing_run_directory_unchanged(tmp_path: Path) -> None:
    path = scheduler(tmp_path / "bin", "sbatch", "exit 1")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "notes.txt").write_text("mine")
    assert submit(tmp_path, *JOB, "--run-dir", "r", "--", "launch", "hostname", path=path).returncode == 1
    assert (tmp_path / "r" / "notes.txt").read_text() == "mine"
    assert submit(tmp_path, *JOB, "--run-dir", "new", "--", "launch", "hostname", path=path).returncode == 1
    assert not (tmp_path / "new").exists()


def test_invalid_ds_config_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    path = scheduler(tmp_path / "bin", "sbatch", "echo 7")
    train = ("python3", "-m", "ezpz_llm.train", "--ds-config")
    for dry_run in ((), ("--dry-run",)):
        done = submit(tmp_path, *JOB, *dry_run, "--", "launch", "--ppn", "2", *train, "zero17", path=path)
        assert done.returncode == 2
        assert "zero17" in done.stderr
        assert "submit: nothing was queued: the command's check failed" in done.stderr
        assert "launch:" not in done.stderr
    done = submit(tmp_path, *JOB, "--dry-run", "--", "launch", "--ppn", "2", *train, "zero1", path=path)
    assert done.returncode == 0, done.stderr
    assert "# ranks      4 (--ppn)" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("# queued by  sbatch --parsable ")
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True, timeout=scaled(120))
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]
    assert not (path / "calls").exists()


def test_conflicting_run_directories_sites_and_node_counts(tmp_path: Path) -> None:
    path = scheduler(tmp_path / "bin", "sbatch", "echo 7")
    done = submit(tmp_path, *JOB, "--run-dir", "a", "--", "launch", "--run-dir", "b", "hostname", path=path)
    assert (done.returncode, "two run directories" in done.stderr) == (2, True)
    done = submit(tmp_path, *JOB, "--site", "polaris", "--", "launch", "--site", "aurora", "hostname", path=path)
    assert (done.returncode, "two sites" in done.stderr) == (2, True)
    done = submit(tmp_path, *JOB, "--", "launch", "--nodes", "3", "hostname", path=path)
    assert (done.returncode, "--nodes 3" in done.stderr) == (2, True)


@pytest.mark.parametrize("site", sorted(site_files()))
def test_the_script_of_each_site(site: str, tmp_path: Path) -> None:
    """Golden scripts. Their requests follow the examples in the site's documentation, linked in the site's file."""
    path = scheduler(tmp_path / "bin", "sbatch", "echo 7")
    queue = find_site(site, {}).job.queue or "debug"
    done = submit(tmp_path, "--site", site, "--nodes", "4", "--time", "1:00:00", "--account", "proj", "--queue",
                  queue, "--run-dir", "runs/a", "--dry-run", "--", "launch", "python3", "-m", "ezpz_llm.train",
                  "--ds-config", "zero3", path=path, bare=True, EZPZ_LLM_CACHE="/home/user/cache")
    assert done.returncode == 0, done.stderr
    script = done.stdout.replace(str(tmp_path), "/home/user/work").replace(sys.prefix, "/home/user/env")
    first, last = "export PATH=(as submitted):$PATH\n", "export PATH=$PATH:(as submitted)\n"
    lines = script.splitlines(keepends=True)
    script = "".join((last if line.startswith("export PATH=$PATH:") else first) if "/home/user/work/bin:" in line
                    else line for line in lines)
    check_golden(f"submit_{site}.sh", script)
    assert (last if "module load" in script else first) in script
    modules, path_of_login = script.rfind("module "), max(script.find(first), script.find(last))
    assert modules < path_of_login, "module load must not find the login node's programs"


@pytest.mark.parametrize("name", ["pbs.sh", "slurm.sh"])
def test_fill_template_replaces_only_the_given_sections(name: str) -> None:
    sections = {"request": ["#X -a"], "environment": ["cd /"], "command": ["command=(:)"]}
    filled = fill_template(name, "# by hand", sections)
    assert filled.startswith("#!/bin/bash\n# by hand\n\n# ---- request\n#X -a\n\n# ---- environment\ncd /\n\n")
    assert "ezpz_llm.submit --state" in filled
    assert "ACCOUNT" not in filled


STOPS = """
import json, sys
from pathlib import Path
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import read_record, update_record
run_dir, steps, code = RunDir(Path(sys.argv[1])), *map(int, sys.argv[2:4])
done = (read_record(run_dir).steps or 0) + steps
update_record(run_dir, launch={"started": done}, config={"steps": 30}, steps=done, exit={"code": code})
if steps:
    (run_dir.checkpoints / "latest").write_text(f"step-{done:08d}")
sys.exit(code)
"""


@pytest.mark.full
@pytest.mark.parametrize(("steps", "code", "words", "asks"), [
    (10, 0, ("--requeue",), 2),  # after steps 10 and 20; at 30 it is complete
    (10, 0, (), 0),
    (0, 0, ("--requeue",), 0),  # no progress: it would requeue itself forever
    (10, 1, ("--requeue",), 0),  # a failed run is not requeued
])
def test_run_that_ends_early_requeues_itself(steps: int, code: int, words: tuple[str, ...], asks: int,
                                                       tmp_path: Path) -> None:
    """The job's script runs with a scontrol that only records its arguments."""
    path = scheduler(tmp_path / "bin", "sbatch", "echo 7")
    (path / "launch").write_text(f'#!/bin/bash\nexec {sys.executable} {tmp_path}/stops.py "$2" {steps} {code}\n')
    (path / "launch").chmod(0o755)
    (tmp_path / "stops.py").write_text(STOPS)
    done = submit(tmp_path, *JOB, *words, "--run-dir", "r", "--", str(path / "launch"), "python3", "-m",
                  "ezpz_llm.train", path=path)
    assert done.returncode == 0, done.stderr
    scheduler(path, "scontrol", ":")
    (path / "calls").unlink()
    env = clean_env() | {"SLURM_JOB_ID": "7", "PATH": f"{path}{os.pathsep}{clean_env()['PATH']}"}
    for _ in range(4):
        ended = subprocess.run(["bash", str(tmp_path / "r/job.sh")], env=env, capture_output=True, text=True,
                               timeout=scaled(60), check=False)
        assert ended.returncode == code, ended.stderr
    calls = (path / "calls").read_text().splitlines() if (path / "calls").exists() else []
    assert calls == ["requeue 7"] * asks
    if asks:
        assert "is complete, nothing is left to do" in ended.stdout


def test_help_does_not_import_torch_or_deepspeed(tmp_path: Path) -> None:
    code = ("import sys; from ezpz_llm.launcher.submit.command import main; main(['--help']); "
            "assert not {'torch', 'numpy', 'deepspeed'} & sys.modules.keys()")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=scaled(120), capture_output=True)
