"""Ranks in a container: command lines for each runtime, real ranks in a stand-in for apptainer, and errors.

No runtime is installed: `apptainer` is a script that accepts the documented options, and sets a variable for the
command.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import step_standin
from launch_runs import launch, need_mpiexec, scheduler as make_program

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.basics import devices
from ezpz_llm.launcher.planning.container import choose_container
from ezpz_llm.launcher.planning.sites import Container, find_site

_APPTAINER = """
[ "$1 $2" = "exec --bind" ] && [ -d "$3" ] || exit 9
shift 3
while [ "${1#--}" != "$1" ]; do OPTIONS="$OPTIONS $1"; shift; done
export INSIDE="$1$OPTIONS"
shift
exec "$@"
"""


def _plan(cwd: Path, *words: str, **env: str) -> dict:
    done = launch(cwd, "--dry-run", "--json", "--run-dir", "r", *words, "hostname", **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _refused(cwd: Path, *words: str, **env: str) -> str:
    done = launch(cwd, "--dry-run", *words, "hostname", **env)
    assert done.returncode == 2, done.stdout
    return done.stderr


def _site(folder: Path, container: str) -> str:
    (folder / "mine.toml").write_text(f"[job]\ncontainer = {container}\n")
    return str(folder / "mine.toml")


def _slurm(folder: Path, *programs: str) -> dict[str, str]:
    return {"PATH": f"{step_standin.make(folder / 'bin', *programs)}:/usr/bin:/bin", "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": os.uname().nodename, "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_CPUS_PER_NODE": "2",
            "SLURM_JOB_END_TIME": "4000000000"}


def test_ranks_run_inside(tmp_path: Path) -> None:
    """The image comes from the site file; the plan, the first lines and run.json report it; --wrap is inside."""
    need_mpiexec()
    programs = make_program(tmp_path / "bin", "apptainer", _APPTAINER)
    (tmp_path / "x.sif").touch()
    site = _site(tmp_path, '{ image = "x.sif", options = ["--nv"] }')
    path = f"{programs}:/usr/bin:/bin"
    image = str(tmp_path / "x.sif")
    plan = _plan(tmp_path, "--site", site, "--wrap", "env A=1", "-n", "2", PATH=path)
    shim = plan["argv"].index("--")
    assert plan["argv"][shim + 1:] == ["apptainer", "exec", "--bind", str(tmp_path / "r"), "--nv", image, "env",
                                       "A=1", "hostname"]
    assert (plan["container"], plan["sources"]["container"]) == (image, "[job] container of site mine")
    shown = launch(tmp_path, "--dry-run", "--site", site, "-n", "2", "hostname", PATH=path).stdout
    assert f"container  {image}, run with apptainer ([job] container of site mine)" in shown.splitlines()
    words = ("-n", "2", "--tee", "all", "--run-dir", "r", "bash", "-c", "echo $RANK in $INSIDE")
    done = launch(tmp_path, "--site", site, *words, PATH=path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} in {image} --nv" for rank in range(2)]
    outside = launch(tmp_path, "--site", site, "--container", "none", *words, PATH=path)
    assert sorted(outside.stdout.splitlines()) == ["[0] 0 in", "[1] 1 in"]


@pytest.mark.parametrize(("container", "wanted"), [
    ('{ runtime = "singularity" }', "singularity exec --bind R docker://x/y:1 hostname"),
    ('{ runtime = "shifter", options = ["--module=gpu"] }', "shifter --image=docker://x/y:1 --module=gpu hostname"),
    ('{ runtime = "podman-hpc", options = ["--gpu"] }',
     "podman-hpc run --rm --env-host --network=host --ipc=host --volume=R:R --volume=CWD:CWD --workdir=CWD --gpu"
     " docker://x/y:1 hostname"),
])
def test_the_words_of_each_runtime(tmp_path: Path, container: str, wanted: str) -> None:
    for name in ("singularity", "shifter", "podman-hpc", "mpiexec"):
        make_program(tmp_path / "bin", name, "echo HYDRA build details:")
    plan = _plan(tmp_path, "--site", _site(tmp_path, container), "--container", "docker://x/y:1", "-n", "1",
                 PATH=f"{tmp_path}/bin:/usr/bin:/bin")
    line = " ".join(plan["argv"][plan["argv"].index("--") + 1:])
    assert line == wanted.replace("R:R", f"{tmp_path}/r:{tmp_path}/r").replace("CWD", str(tmp_path)).replace(
        "--bind R", f"--bind {tmp_path}/r")
    assert plan["sources"]["container"] == "--container"


@pytest.mark.parametrize(("folder", "options", "words"), [
    ("_NVIDIA", [], ("--nv",)), ("_NVIDIA", ["--nvccli"], ("--nvccli",)), ("_AMD", [], ("--rocm",)),
    (None, [], ())])
def test_apptainer_gives_the_container_this_nodes_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       folder: str | None, options: list[str],
                                                       words: tuple[str, ...]) -> None:
    for name in ("_NVIDIA", "_AMD"):
        monkeypatch.setattr(devices, name, tmp_path / "driver" if name == folder else tmp_path / "absent")
    (tmp_path / "driver/1").mkdir(parents=True)
    (tmp_path / "driver/1/gpu_id").write_text("7\n")
    env = {"PATH": str(make_program(tmp_path / "bin", "apptainer", ":"))}
    site = find_site(_site(tmp_path, f"{{ options = {json.dumps(options)} }}"), env)
    chosen = choose_container("docker://x", site, "mpiexec", tmp_path / "r", (), env)
    assert chosen.words == ("apptainer", "exec", "--bind", str(tmp_path / "r"), *words, "docker://x")


def test_a_folder_that_cannot_be_mounted_is_rejected(tmp_path: Path) -> None:
    programs = make_program(tmp_path / "bin", "apptainer", ":")
    said = _refused(tmp_path, "--container", "docker://x", "--run-dir", "run 09:30",
                    PATH=f"{programs}:/usr/bin:/bin")
    assert f"the container cannot mount {tmp_path}/run 09:30, because ':' separates its paths" in said
    env = _slurm(tmp_path, "srun")
    site = _site(tmp_path, '{ image = "x#y", runtime = "pyxis" }')
    assert "because ',' separates" in _refused(tmp_path, "--site", site, "--run-dir", "a,b", **env)


def test_srun_takes_the_whole_step_inside(tmp_path: Path) -> None:
    """Pyxis runs the shim inside, with the image's python3; our variables override the image's."""
    env = _slurm(tmp_path, "srun")
    make_program(tmp_path / "bin", "python3", f'exec {sys.executable} "$@"')
    site = _site(tmp_path, '{ image = "nvcr.io#nvidia/pytorch:24.05-py3", runtime = "pyxis" }')
    argv = _plan(tmp_path, "--site", site, "-n", "2", **env)["argv"]
    words = {word.partition("=")[0]: word.partition("=")[2] for word in argv if word.startswith("--container-")}
    assert words["--container-image"] == "nvcr.io#nvidia/pytorch:24.05-py3"
    assert words["--container-mounts"] == f"{tmp_path}/r:{tmp_path}/r,{tmp_path}:{tmp_path}"
    assert words["--container-workdir"] == str(tmp_path)
    assert {"MASTER_ADDR", "EZPZ_LLM_RUN_DIR", "EZPZ_LLM_SECRET"} <= set(words["--container-env"].split(","))
    assert argv[argv.index("-m") - 1] == "python3"
    done = launch(tmp_path, "--site", site, "-n", "2", "--tee", "all", "bash", "-c", "echo $RANK $INSIDE", **env)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} nvcr.io#nvidia/pytorch:24.05-py3"
                                                for rank in range(2)], done.stderr


def test_missing_requirements_are_reported_once(tmp_path: Path) -> None:
    (tmp_path / "x.sif").touch()
    env = _slurm(tmp_path, "srun")
    said = _refused(tmp_path, "--container", "x.sif", **env)
    assert f"error: apptainer, which is required to run {tmp_path}/x.sif, is not on PATH" in said
    assert "--container none" in said
    assert f"the image {tmp_path}/y.sif does not exist" in _refused(tmp_path, "--container", "./y.sif", **env)
    # This srun does not have Alps' Container Engine.
    alps = _refused(tmp_path, "--site", "alps", "--container", "pytorch", **env)
    assert 'this srun has no option --environment, which runtime "environment" requires' in alps
    make_program(tmp_path / "bin", "apptainer", "exit 1")
    make_program(tmp_path / "bin", "torchrun", "exit 1")
    by_mpi = _refused(tmp_path, "--site", "alps", "--container", "pytorch", "--launcher", "torchrun", **env)
    assert "--environment is an option of srun, but torchrun starts the ranks" in by_mpi
    assert "omit --stage-env: an image is a single file already" in _refused(
        tmp_path, "--container", "x.sif", "--stage-env", **env)


def test_sites_name_their_runtime() -> None:
    """Check the runtime of each site; the files name the sources."""
    found = {name: find_site(name, {}).job.container
             for name in ("alps", "delta", "lumi", "marenostrum5", "perlmutter")}
    assert found == {"alps": Container(runtime="environment"),
                     "delta": Container(runtime="apptainer", options=("--nv",)),
                     "lumi": Container(runtime="singularity", options=("-B", "/appl:/appl")),
                     "marenostrum5": Container(runtime="singularity", options=("--nv",)),
                     "perlmutter": Container(runtime="shifter")}


@pytest.mark.parametrize("value", ['"x.sif"', '{ image = 1 }', '{ runtime = "docker" }', '{ images = "x" }',
                                   '{ image = "x", options = "--nv" }'])
def test_a_broken_table(tmp_path: Path, value: str) -> None:
    with pytest.raises(UserError, match=r"job\.container is ") as raised:
        find_site(_site(tmp_path, value), {})
    assert 'runtime = "apptainer"' in str(raised.value.instead)
    assert raised.value.where == f"{tmp_path}/mine.toml, line 2"
