"""The stand-in for PBS (pbs_standin/) prints the captured output, and rejects what PBS rejects."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pbs_standin
import pytest
from launch_runs import CAPTURED
from pbs_standin.formats import as_json, as_text, table
from pbs_standin.state import Home, place
from slowness import scaled


@pytest.mark.parametrize("name", ["sel2_nc2_mpi2", "sel2_plain", "sel2_scatter", "sel3_ompthreads", "mixed",
                                  "array"])
def test_the_stand_in_prints_as_pbs_does(name: str) -> None:
    text = (CAPTURED / f"pbs/qstat_f_{name}.json").read_text()
    assert as_json(json.loads(text)) == text.rstrip("\n")
    ((job, fields),) = json.loads(text)["Jobs"].items()
    assert as_text(job, fields) == (CAPTURED / f"pbs/qstat_f_{name}.txt").read_text()


def test_the_stand_ins_tables() -> None:
    text = (CAPTURED / "pbs/pbsnodes_a.json").read_text()
    assert as_json(json.loads(text)) == text.rstrip("\n")
    rows = [("10[].login", "envdump", "user", "0", "B", "workq"),
            ("10[0].login", "envdump", "user", "00:00:00", "E", "workq"),
            ("10[1].login", "envdump", "user", "00:00:00", "E", "workq")]
    assert table(rows) == (CAPTURED / "pbs/qstat_t_array.txt").read_text()
    # qstat -Qf wraps lines like qstat -f.
    queue = (CAPTURED / "pbs/qstat_Qf.txt").read_text()
    fields = dict(line.lstrip().split(" = ", 1) for line in queue.replace("\n\t", "").splitlines()[1:] if line)
    assert as_text("workq", fields).replace("Job Id: ", "Queue: ") == queue
    assert (CAPTURED / "pbs/walltime_kill.txt").read_text().startswith("=>> PBS: job killed: walltime 10 exceeded")


def test_chunks_are_placed_as_captured(tmp_path: Path) -> None:
    """Place the captured jobs' requests on four free nodes, and compare exec_host and node file."""
    pbs_standin.make(tmp_path / "home", {f"n{number}": 2 for number in range(1, 5)})
    home = Home(tmp_path / "home")
    for name in ("sel2_nc2_mpi2", "sel2_plain", "sel3_ompthreads", "mixed"):
        ((_, fields),) = json.loads((CAPTURED / f"pbs/qstat_f_{name}.json").read_text())["Jobs"].items()
        chunks = place(home, str(fields["Resource_List"]["select"]), fields["Resource_List"]["place"])
        assert [host for host, _, _ in chunks] == [part.split("/")[0] for part in fields["exec_host"].split("+")]
        node_file = "".join(f"{host}\n" * chunk["mpiprocs"] for host, _, chunk in chunks)
        assert node_file == (CAPTURED / f"pbs/nodefile_{name}.txt").read_text()
    assert place(home, "5:ncpus=1", "scatter") is None


def test_invalid_commands_are_rejected(tmp_path: Path) -> None:
    bin_folder = pbs_standin.make(tmp_path / "home", {"n1": 2})

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run([str(bin_folder / words[0]), *words[1:]], input="hostname\n", capture_output=True,
                              text=True, timeout=scaled(120), check=False)
        return done.returncode, done.stderr.strip()

    assert run("qstat", "-f", "9.login") == (153, "qstat: Unknown Job Id 9.login")
    assert run("qdel", "9.login") == (153, "qdel: Unknown Job Id 9.login")
    assert run("qsub", "-W", "depend=afterany:9.login") == (153, "qsub: Unknown Job Id 9.login")
    assert run("qsub", "-Y") == (2, "qsub: invalid option -- 'Y'")
    assert run("qsub", "-l", "nodez=2") == (2, "qsub: Unknown resource: nodez")
