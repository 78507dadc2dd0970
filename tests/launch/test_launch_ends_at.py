"""End time of a job from qstat and squeue: captured output, and the ways in which the commands fail.

The commands are scripts that print captured output, or output from public issues.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from launch_runs import CAPTURED, captured_env, clean_env, launch
from slowness import scaled

from ezpz_llm.launcher.jobs.schedulers import PATIENT, QUICK, find_allocation, pbs, supplement
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation
from ezpz_llm.launcher.jobs.schedulers.slurm_queries import read_squeue

# Time zone of the machine on which the files were captured.
_ZONE = "UTC"


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", _ZONE)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def _epoch(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))


def _command(folder: Path, name: str, body: str) -> str:
    """Return a PATH with this script, followed by the programs that scripts need."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def _qstat(name: str) -> str:
    return (CAPTURED / f"pbs/qstat_f_{name}.json").read_text()


@pytest.mark.parametrize(("name", "started", "hosts"), [
    ("sel2_nc2_mpi2", "02:21:54", ("n1", "n2")),
    ("sel2_plain", "02:21:57", ("n1",)),
    ("sel2_scatter", "02:21:54", ("n3", "n4")),
    ("sel3_ompthreads", "02:21:59", ("n1", "n2", "n3")),
    ("mixed", "02:22:02", ("n1", "n2", "n3")),
    ("array", "02:22:05", ("n1",)),
])
def test_captured_qstat(name: str, started: str, hosts: tuple[str, ...]) -> None:
    job_id = "10[1].login" if name == "array" else next(iter(json.loads(_qstat(name))["Jobs"]))
    job = pbs.read_job(_qstat(name), job_id)
    assert (job.started, job.ends_at) == (_epoch(f"2026-11-21 {started}"), _epoch(f"2026-11-21 {started}") + 300)
    assert (job.hosts, job.run_count) == (hosts, 1)
    # The values in the text form for the same job.
    text = (CAPTURED / f"pbs/qstat_f_{name}.txt").read_text()
    assert f"    stime = Sat Nov 21 {started} 2026\n" in text
    assert "    Resource_List.walltime = 00:05:00\n" in text


def test_every_form_of_exec_host() -> None:
    """Compare with the last column of `qstat -xan1` and its number of chunks."""
    lines = (CAPTURED / "pbs/qstat_xan1.txt").read_text().splitlines()
    rows = [line.split() for line in lines if ".login " in line]
    assert len(rows) == 12
    for row in rows[:10]:
        hosts = pbs.read_job(json.dumps({"Jobs": {"1": {"exec_host": row[-1]}}}), "1").hosts
        # Jobs 2 and 7 have both chunks on one node.
        assert len(hosts) == (1 if "n1/0+n1/1" in row else int(row[5]))
        assert all(row[-1].count(f"{host}/") for host in hosts)


# openpbs/openpbs#2541 (a shell function with quotes and line ends), #1255 (leading zeros), #2049 (backslashes).
_BROKEN = {
    "a quote in a value": ('"TAG":\t"sel2_nc2_mpi2"', '"TAG":\t"say "hi", twice"'),
    "a leading zero": ('"TAG":\t"sel2_nc2_mpi2"', '"TAG":\t005'),
    "a backslash": ('"TAG":\t"sel2_nc2_mpi2"', r'"TAG":' + '\t' + r'"ab\,c\'"'),
    "a function": ('"TAG":\t"sel2_nc2_mpi2"',
                   '"BASH_FUNC_module%%":\t"() {  eval `"$x" bash "$@"`;\n "stime" = 1\n}"'),
    "a control character": ('"TAG":\t"sel2_nc2_mpi2"', '"TAG":\t"a\x01b\nc"'),
    "a key twice": ('"nodect":\t2,', '"nodect":\t2,\n\t\t\t\t"nodect":\t3,'),
    "a number for a name": ('"Job_Name":\t"envdump"', '"Job_Name":\t12'),
}


@pytest.mark.parametrize("kind", _BROKEN)
def test_broken_json_is_read_all_the_same(kind: str) -> None:
    good, bad = _BROKEN[kind]
    text = _qstat("sel2_nc2_mpi2")
    assert good in text
    job = pbs.read_job(text.replace(good, bad), "5.login")
    assert job.ends_at == _epoch("2026-11-21 02:26:54")
    assert (job.hosts, job.run_count, job.asked_at) == (("n1", "n2"), 1, float(json.loads(text)["timestamp"]))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"Jobs": []}', '{"Jobs": {"5.login": {"Resource_List": 3}}}',
                                  "qstat: Unknown Job Id 5.login", '{"Jobs": {"6.login": {"stime": "x"}}}'])
def test_invalid_output_is_ignored(text: str) -> None:
    assert pbs.read_job(text, "5.login") == pbs.Job()


@pytest.mark.parametrize(("text", "seconds"), [("00:00:06", 6), ("120:00:00", 432000), ("300", 300),
                                               ("1:06:00:00", 108000), ("soon", None), ("", None)])
def test_walltimes(text: str, seconds: float | None) -> None:
    job = pbs.read_job(json.dumps({"Jobs": {"5.login": {"Resource_List": {"walltime": text}}}}), "5.login")
    assert job.walltime_s == seconds


def _pbs_allocation() -> Allocation:
    env = captured_env("pbs/env_job_sel2_nc2_mpi2.txt")
    return find_allocation(env | {"PBS_NODEFILE": str(CAPTURED / "pbs/nodefile_sel2_nc2_mpi2.txt")})


def test_a_pbs_job_gets_its_end_from_qstat(tmp_path: Path) -> None:
    (tmp_path / "answer").write_text(_qstat("sel2_nc2_mpi2"))
    body = f'[ "$*" = "-f -F json 5.login" ] && cat {tmp_path / "answer"}'
    allocation = supplement(_pbs_allocation(), {"PATH": _command(tmp_path / "bin", "qstat", body)}, QUICK)
    assert (allocation.ends_at, allocation.notes) == (_epoch("2026-11-21 02:26:54"), ())


def test_qstat_may_contradict(tmp_path: Path) -> None:
    """qstat's output is for another node, a requeued job, or a clock that is hours off."""
    text = _qstat("sel2_nc2_mpi2").replace("n2/0*2", "n3/0*2").replace('"run_count":\t1', '"run_count":\t2')
    (tmp_path / "answer").write_text(text)
    env = {"PATH": _command(tmp_path / "bin", "qstat", f"cat {tmp_path / 'answer'}")}
    allocation = supplement(_pbs_allocation(), env, QUICK)
    assert allocation.notes == ("PBS has started this job 2 times (run_count)",
                                "the node file has n1, n2, but qstat's exec_host has n1, n3: using the node file")
    assert [host.name for host in allocation.hosts] == ["n1", "n2"]
    (tmp_path / "answer").write_text(_qstat("sel2_nc2_mpi2").replace("02:21:54", "07:21:54"))
    allocation = supplement(_pbs_allocation(), env, QUICK)
    assert allocation.ends_at is None
    assert "another time zone?" in allocation.notes[0]


def test_qstat_may_fail(tmp_path: Path) -> None:
    """A missing, failing (its message is shown), once failing, or hanging qstat gives a note and no error."""
    allocation = _pbs_allocation()
    supplemented = supplement(allocation, {"PATH": str(tmp_path)}, PATIENT)
    assert supplemented.notes == ("the job's end time is unknown: qstat is not on PATH",)
    env = {"PATH": _command(tmp_path / "bin", "qstat", "echo 'qstat: cannot connect to server' >&2; exit 111")}
    supplemented = supplement(allocation, env, PATIENT)
    assert supplemented.ends_at is None
    assert supplemented.notes == ("the job's end time is unknown: `qstat -f -F json 5.login` failed: exit code "
                                  "111, 'qstat: cannot connect to server'",)
    (tmp_path / "answer").write_text(_qstat("sel2_nc2_mpi2"))
    once = f"[ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; exit 1; }}; cat {tmp_path / 'answer'}"
    env = {"PATH": _command(tmp_path / "bin", "qstat", once)}
    assert supplement(allocation, env, PATIENT).ends_at is not None
    env = {"PATH": _command(tmp_path / "bin", "qstat", "exec sleep 60")}
    begun = time.monotonic()
    supplemented = supplement(allocation, env, (0.2, 2))
    assert time.monotonic() - begun < scaled(10)
    assert supplemented.notes[0].endswith("failed: no reply within 0.2 s")


def _squeue_row(**changes: str) -> str:
    """Return the captured row as id|end|nodes."""
    head, row = (line.split("|") for line in (CAPTURED / "slurm/squeue_o.txt").read_text().splitlines())
    columns = dict(zip(head, row, strict=True)) | changes
    return "|".join(columns[name] for name in ("JOBID", "END_TIME", "NODELIST"))


def test_captured_squeue() -> None:
    """Compare the output of three commands for one job: squeue's text and JSON, and scontrol."""
    ends_at, hosts = read_squeue(_squeue_row(), "3")
    jobs = json.loads((CAPTURED / "slurm/squeue.json").read_text())["jobs"]
    job = next(job for job in jobs if job["job_id"] == 3)
    assert (ends_at, hosts) == (job["end_time"], job["nodes"])
    shown = (CAPTURED / "slurm/scontrol_show_job.txt").read_text()
    assert time.strftime("EndTime=%Y-%m-%dT%H:%M:%S", time.localtime(ends_at)) in shown
    assert f"   NodeList={hosts}\n" in shown
    # An array's last task has the array's job id, for which squeue shows every task.
    rows = "\n".join([_squeue_row(JOBID="10"), _squeue_row(END_TIME="2026-11-21T03:00:00")])
    assert read_squeue(rows, "3")[0] == _epoch("2026-11-21 03:00:00")
    assert read_squeue(_squeue_row(END_TIME="N/A"), "3") == (None, "n[1-2]")
    assert read_squeue("", "3") == (None, "")


def test_a_slurm_job_gets_its_end_from_squeue(tmp_path: Path) -> None:
    env = captured_env("slurm/env_sbatch_script.txt") | {"SQUEUE_SORT": "x", "SLURM_TIME_FORMAT": "relative"}
    allocation = find_allocation(env)
    body = '[ "$SQUEUE_SORT:$SLURM_TIME_FORMAT:$3" = :standard:3 ] && cat "$(dirname $0)/answer"'
    env["PATH"] = _command(tmp_path / "bin", "squeue", body)
    (tmp_path / "bin" / "answer").write_text(_squeue_row())
    supplemented = supplement(allocation, env, QUICK)
    assert (supplemented.ends_at, supplemented.notes) == (_epoch("2026-11-21 02:14:37"), ())
    (tmp_path / "bin" / "answer").write_text(_squeue_row(NODELIST="n[1,4]", END_TIME="N/A"))
    supplemented = supplement(allocation, env, QUICK)
    assert supplemented.ends_at is None
    assert supplemented.notes == ("the job's end time is unknown: squeue reports none",
                                  "SLURM_JOB_NODELIST is n[1-2], but squeue says n[1,4]: using SLURM_JOB_NODELIST")
    (note,) = supplement(allocation, {"PATH": ""}, QUICK).notes
    assert note == "the job's end time is unknown: squeue is not on PATH"


def test_no_command_runs_without_need(tmp_path: Path) -> None:
    env = {"PATH": _command(tmp_path / "bin", "squeue", f"touch {tmp_path}/asked")}
    known = captured_env("slurm/env_sbatch_script.txt") | {"SLURM_JOB_END_TIME": "1795240000"}
    assert supplement(find_allocation(known), known | env, QUICK).ends_at == 1795240000.0
    assert supplement(find_allocation({}), env, QUICK).ends_at is None
    assert not (tmp_path / "asked").exists()


def test_the_plan_has_the_end_time_for_the_ranks(tmp_path: Path) -> None:
    """The plan of `launch --dry-run` in a PBS job has the end time in the variable that the trainer reads."""
    (tmp_path / "answer").write_text(_qstat("sel2_nc2_mpi2"))
    path = _command(tmp_path / "bin", "qstat", f"cat {tmp_path / 'answer'}")
    env = captured_env("pbs/env_job_sel2_nc2_mpi2.txt")
    env |= {"PBS_NODEFILE": str(CAPTURED / "pbs/nodefile_sel2_nc2_mpi2.txt"), "TZ": _ZONE,
            "PATH": f"{path}:{clean_env()['PATH']}"}
    done = launch(tmp_path, "--dry-run", "--json", "hostname", **env)
    plan = json.loads(done.stdout)
    assert plan["env"]["EZPZ_LLM_ENDS_AT"] == f"{_epoch('2026-11-21 02:26:54'):.0f}"
    assert plan["sources"]["EZPZ_LLM_ENDS_AT"] == "pbs"
