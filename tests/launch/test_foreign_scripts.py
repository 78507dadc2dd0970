"""Scripts of other projects, run unchanged under every launcher on one and two simulated nodes.

Their ranks form one world, or launch rejects the start with the reason. The full matrix, with recorded results:
python3 benchmarks/record.py foreign-scripts
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from launch_runs import need_mpiexec
from places import ROOT
from simcluster.cluster import Cluster, missing
from slowness import scaled

from ezpz_llm.core.base import UserError
from ezpz_llm.core.base.package_data import cache_dir, data_dir
from ezpz_llm.launcher.jobs.mpi_world import detect_mpi, find_disconnected_mpi
from ezpz_llm.launcher.planning.dialects.srun_mpi import mpi_settings, offered_plugins

SCRIPTS = ROOT / "examples/unchanged"
NEEDS = {"torch_ddp": "torch", "mpi4py_sum": "mpi4py", "deepspeed_zero2": "deepspeed",
         "accelerate_fit": "accelerate", "hf_trainer": "accelerate"}
WAYS = {"mpiexec": ("mpiexec", None), "torchrun": ("torchrun", None), "srun, pmi2": ("srun", "pmi2"),
        "srun, none": ("srun", "none")}
MARKS = {("torch_ddp", "mpiexec", 1): (), ("mpi4py_sum", "srun, pmi2", 2): (), ("mpi4py_sum", "srun, none", 2): (),
         ("mpi4py_sum", "torchrun", 1): (), ("accelerate_fit", "srun, none", 2): pytest.mark.full,
         ("deepspeed_zero2", "mpiexec", 1): pytest.mark.full, ("hf_trainer", "srun, none", 2): pytest.mark.full}
REFUSED = {("mpi4py_sum", "srun, none"), ("mpi4py_sum", "torchrun")}
RESULTS = data_dir("benchmarks") / "results/foreign_scripts.json"
_SAID = re.compile(r"^rank (\d+) of (\d+), sum of \w+ (\S+)$", re.MULTILINE)


def _cells() -> list:
    return [pytest.param(script, way, nodes, id=f"{script}-{way}-{nodes}",
                         marks=MARKS.get((script, way, nodes), pytest.mark.slow))
            for script in NEEDS for way in WAYS for nodes in (1, 2)]


@pytest.mark.timeout(600)  # DeepSpeed compiles an op once, which takes minutes
@pytest.mark.parametrize(("script", "way", "nodes"), _cells())
def test_a_script_of_another_project(cluster: Cluster, tmp_path: Path, recording: bool, script: str,
                                     way: str, nodes: int) -> None:
    """Two ranks with different data end with the same sum only if they have communicated."""
    pytest.importorskip(NEEDS[script], reason=f"{NEEDS[script]} is not installed (the extra `test` has it)")
    began = time.monotonic()
    launcher, plugin = WAYS[way]
    if launcher == "mpiexec":
        need_mpiexec()
    env = {"SLURM_MPI_TYPE": plugin} if plugin else {}
    for attempt in range(3):
        run_dir = tmp_path / f"run{attempt}"
        done = cluster.run("salloc", f"-N{nodes}", f"--ntasks-per-node={2 // nodes}", "-t5", "launch", "--launcher",
                           launcher, "--run-dir", run_dir, "python3", SCRIPTS / f"{script}.py", cwd=tmp_path,
                           timeout=580, OMP_NUM_THREADS="1", EZPZ_LLM_CACHE=str(cache_dir()), **env)
        if not _has_aborted_at_exit(run_dir):
            break
    if (script, way) in REFUSED:
        assert done.returncode == 2, done.stdout + done.stderr
        assert ("mpi4py_sum.py imports mpi4py, and each of the 2 ranks would be alone in its own MPI world"
                " (rank 0 of 1)" in done.stderr)
        result = "refused before the start: " + done.stderr.partition("error: ")[2].partition("\n")[0]
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        said = [_SAID.findall((run_dir / f"logs/rank{rank:04d}.log").read_text()) for rank in (0, 1)]
        assert [words[:2] for rank in said for words in rank] == [("0", "2"), ("1", "2")], said
        assert said[0][0][2] == said[1][0][2]
        result = "ranks 0 and 1 of 2, the same sum"
    if recording:
        _write(script, way, nodes, result, time.monotonic() - began)


def _has_aborted_at_exit(run_dir: Path) -> bool:
    """Return True if a rank printed its sum, then aborted while Python shut down.

    A gloo thread that still holds the last collective of a backward pass aborts the process
    (https://github.com/pytorch/pytorch/issues/190489). Frequent on loaded machines.
    """
    texts = [path.read_text() for path in run_dir.glob("logs/rank*.log")]
    return any("terminate called without an active exception" in text for text in texts if _SAID.search(text))


def _write(script: str, way: str, nodes: int, result: str, seconds: float) -> None:
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {
        "command": "python3 benchmarks/record.py foreign-scripts",
        "what": "2 ranks of each script of examples/unchanged on simulated nodes with real Slurm; seconds of the"
                " whole job, all ranks on one machine's cores", "cores": os.cpu_count(), "versions": {}, "runs": {}}
    names = ("torch", "mpi4py", "deepspeed", "accelerate", "transformers")
    found["versions"] = {name: importlib.metadata.version(name) for name in names}
    found["runs"][f"{script}, {way}, {nodes} x {2 // nodes}"] = {
        "result": result, "seconds": round(seconds, 1), "date": datetime.now(timezone.utc).date().isoformat()}
    RESULTS.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


def test_the_recipes_of_the_page_are_lines_of_the_scripts() -> None:
    page = (data_dir("docs") / "use" / "your_own_script.md").read_text()
    recipes = re.findall(r"^## [^\n]*`(\w+)\.py`\n\n```python\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    assert sorted(name for name, _ in recipes) == sorted(NEEDS)
    for name, recipe in recipes:
        lines = [line.strip() for line in (SCRIPTS / f"{name}.py").read_text().splitlines()]
        assert len(recipe.splitlines()) == 3
        assert [line for line in recipe.splitlines() if line not in lines] == []


# mpi4py, imported indirectly.
_HIDDEN = """
import importlib, time
world = importlib.import_module("mpi4py.MPI").COMM_WORLD
print(world.rank, world.size, flush=True)
time.sleep(3)
"""


@pytest.fixture(scope="module")
def plain_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with Slurm's default, MpiDefault=none."""
    if (why := missing()) is not None:
        pytest.skip(why)
    with Cluster(tmp_path_factory.mktemp("plain") / "sim", nodes=2, mpi="none", net="10.78.0") as found:
        yield found


def _is_compiled(program: Path) -> bool:
    """Compile mpi_sum.c. Return False if there is no mpicc or C compiler."""
    mpicc = shutil.which("mpicc", path=f"{os.environ['PATH']}{os.pathsep}{sys.prefix}/mpich/bin")
    if mpicc is None:
        return False
    done = subprocess.run([mpicc, "-o", str(program), str(SCRIPTS / "mpi_sum.c")], capture_output=True,
                          timeout=scaled(60), check=False)
    return done.returncode == 0


@pytest.mark.cluster
def test_slurm_without_an_mpi_plugin(plain_cluster: Cluster, tmp_path: Path) -> None:
    """A program that visibly uses MPI gets a plug-in. If only its ranks reveal MPI, they are named.

    A program that does not communicate is not mentioned.
    """
    (tmp_path / "hidden.py").write_text(_HIDDEN)
    in_c = "./mpi_sum" if _is_compiled(tmp_path / "mpi_sum") else ""
    (tmp_path / "job.sh").write_text(f"""
for program in "python3 {SCRIPTS}/mpi4py_sum.py" "python3 hidden.py" "sleep 2" {in_c}; do
    launch --run-dir "r${{#program}}" --tee all $program > "${{program##*[ /]}}.out" 2>&1 || exit
done
[ -z "{in_c}" ] || SLURM_MPI_TYPE=none launch --dry-run {in_c} > refused.out 2>&1 || [ $? = 2 ]
""")
    done = plain_cluster.run("salloc", "-N2", "--ntasks-per-node=1", "-t5", "bash", "job.sh", cwd=tmp_path,
                             timeout=120)
    shown = {path.stem: path.read_text() for path in tmp_path.glob("*.out")}
    assert done.returncode == 0, (done.stderr, shown)
    for name in ("mpi4py_sum.py", *(["mpi_sum"] if in_c else [])):
        chosen = re.sub(r"^\[\d\] ", "", shown[name], flags=re.MULTILINE)
        assert sorted(_SAID.findall(chosen)) == [("0", "2", "3"), ("1", "2", "3")]
        assert "rank 0 of 1" not in chosen
    if in_c:
        refused = shown["refused"]
        assert ("mpi_sum needs libmpi.so.12, and each of the 2 ranks would be alone in its own MPI world"
                " (rank 0 of 1)" in refused)
        assert "instead: SLURM_MPI_TYPE=pmi2 launch …; this srun supports pmix, cray_shasta, pmi2" in refused
    hidden = shown["hidden.py"]
    assert "[0] 0 1\n" in hidden
    warning = ("launch: warning: the ranks load MPICH or a derivative (libmpi.so.12), but are not connected: each"
               " of the 2 ranks is alone in its own MPI world (rank 0 of 1), because srun set no PMI or PMIx"
               " variables")
    assert hidden.count(warning) == 1, hidden
    assert "SLURM_MPI_TYPE=pmi2 launch" in hidden
    assert "MPI" not in shown["2"].replace("MPICH/Hydra", "")


def test_what_shows_that_a_program_uses_mpi(tmp_path: Path) -> None:
    texts = {"top": "import os\nfrom mpi4py import MPI\n", "maybe": "try:\n    import mpi4py\nexcept OSError: 0\n",
             "other": "import mpi4pyx\n", "c": "\x7fELF…\0libmpi.so.12\0libc.so.6\0", "go": "\x7fELF…\0libc.so.6\0",
             "open": "\x7fELF…\0libmpi.so.40\0"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = {name: detect_mpi(str(tmp_path / name), {}) for name in (*texts, "missing")}
    assert found == {"top": ("imports mpi4py", False), "c": ("needs libmpi.so.12", False),
                     "open": ("needs libmpi.so.40", True), "maybe": None, "other": None, "go": None,
                     "missing": None}
    # launch does not query Slurm for one rank, under mpiexec, or if --mpi is given.
    for launcher, words, ranks in (("srun", ("srun",), 1), ("mpiexec", ("mpiexec",), 4),
                                   ("srun", ("srun", "--mpi=pmix"), 4)):
        assert mpi_settings(launcher, words, str(tmp_path / "top"), ranks, {}, (1.0, 1)) == {}


def test_the_plugins_of_srun() -> None:
    text = ("MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\n"
            "specific pmix plugin versions available: pmix_v4\n")
    assert offered_plugins(text) == ["pmix", "cray_shasta", "pmi2"]


@pytest.mark.parametrize(("plugins", "instead"), [
    ("pmi2 pmix", "SLURM_MPI_TYPE=pmix launch …; this srun supports pmi2, pmix"),
    ("pmi2", "SLURM_MPI_TYPE=NAME launch …, if this MPI supports one of srun's plug-ins (pmi2), or --launcher "
             "mpiexec"),
    ("", "SLURM_MPI_TYPE=pmix launch …; for the plug-ins of this srun, run srun --mpi=list"),
])
def test_the_advice_for_open_mpi_without_a_plugin(tmp_path: Path, plugins: str, instead: str) -> None:
    program = tmp_path / "program"
    program.write_text("\x7fELF…\0libmpi.so.40\0")
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n" + "".join(f"echo '\t{name}'\n" for name in plugins.split()))
    srun.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_MPI_TYPE": "none"}
    with pytest.raises(UserError, match="each of the 2 ranks would be alone in its own MPI world") as caught:
        mpi_settings("srun", ("srun",), str(program), 2, env, (10.0, 1))
    assert caught.value.instead == instead


_MPICH, _OPEN_MPI = {"libmpi.so.12"}, {"libmpi.so.40", "libopen-pal.so.80", "libpmix.so.2"}


@pytest.mark.parametrize(("libraries", "variable", "is_alone"), [
    (_MPICH, "SLURM_STEP_ID", True), (_MPICH, "PMI_FD", False), (_MPICH, "PALS_RANKID", False),
    (_MPICH, "PMIX_RANK", True), (_MPICH | {"libpmix.so.2"}, "PMIX_RANK", False),
    ({"libmpi_cray.so.12", "libpmi2.so.0"}, "SLURM_STEP_ID", False),
    (_OPEN_MPI, "SLURM_STEP_ID", True), (_OPEN_MPI, "PMIX_RANK", False), (_OPEN_MPI, "PMI_RANK", True),
    (_OPEN_MPI | {"libpmi2.so.0"}, "PMI_RANK", False), ({"libpmix.so.2"}, "SLURM_STEP_ID", False),
])
def test_which_mpi_is_alone(libraries: set[str], variable: str, is_alone: bool) -> None:
    assert (find_disconnected_mpi(libraries, {variable: "0"}) is not None) == is_alone
