"""`launch --stage-env`: an environment with many kinds of absolute paths, copied and run from the copy."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_runs import clean_env
from places import ROOT
from simcluster.cluster import Cluster, missing
from slowness import scaled

from ezpz_llm.core.base.private_folders import new_secret
from ezpz_llm.launcher.basics.variables import PATH_VARIABLE
from ezpz_llm.launcher.jobs.option_parsing import parse
from ezpz_llm.launcher.planning.plan import Setting, build_plan
from ezpz_llm.launcher.running.staging.archive import Root
from ezpz_llm.launcher.running.staging.receiver import _open_sent_file, _remedy, folder_of_copy, remove_stale
from ezpz_llm.launcher.running.staging.relocation import path_replacer
from ezpz_llm.launcher.running.staging.sender import _relocate

# Prints where each part of this rank's environment comes from, as a line of JSON.
WHERE = """
import json, os, shutil, socket, sys, demo, ezpz_llm, plain, string
launch = shutil.which("launch")
found = {"host": socket.gethostname(), "prefix": sys.prefix, "executable": sys.executable, "base": sys.base_prefix,
         "stdlib": string.__file__, "demo": demo.__file__, "plain": plain.__file__, "ezpz_llm": ezpz_llm.__file__,
         "launch": launch, "shebang": open(launch).readline().strip(), "VIRTUAL_ENV": os.environ["VIRTUAL_ENV"],
         "python3": shutil.which("python3"), "data": sorted(os.listdir(os.path.dirname(ezpz_llm.__path__[0]))),
         "args": sys.argv[1:], "copies": [name for folder in ("/local", "/tmp") if os.path.isdir(folder)
                                          for name in os.listdir(folder) if name.startswith("ezpz_llm-0-")]}
name = f"{os.environ['EZPZ_LLM_RUN_DIR']}/where-{socket.gethostname()}-{os.getpid()}.json"
open(name, "w").write(json.dumps(found))
"""
FINDER = """
import sys
from importlib.util import spec_from_file_location
MAPPING: dict[str, str] = {mapping!r}
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            return spec_from_file_location(name, MAPPING[name] + "/__init__.py")
sys.meta_path.append(Finder)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a small virtual environment with mpi4py and several kinds of installed code.

    This project is editable through a .pth file, another package through a finder (as with setuptools), and a
    module is on PYTHONPATH.
    """
    folder = tmp_path_factory.mktemp("environment")
    env, project, more = folder / "env", folder / "project" / "demo", folder / "more"
    venv.create(env, symlinks=True, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(env)}))
    for name in ("mpi4py", "msgspec"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        shutil.copytree(Path(spec.origin).parent, site / name)
    for package in (project, more):
        package.mkdir(parents=True)
    (project / "__init__.py").write_text("")
    (more / "plain.py").write_text("")
    (more / "not-code.bin").write_bytes(bytes(1000))
    (site / "project.pth").write_text(f"{ROOT}\n")
    (site / "__editable___demo_finder.py").write_text(FINDER.replace("{mapping!r}", repr({"demo": str(project)})))
    (site / "__editable__.demo.pth").write_text("import __editable___demo_finder\n")
    script = env / "bin/launch"
    script.write_text(f"#!{env}/bin/python3\nimport sys\nfrom ezpz_llm.cli import launch\nsys.exit(launch())\n")
    script.chmod(0o755)
    (folder / "where.py").write_text(WHERE)
    return folder


def variables(environment: Path) -> dict[str, str]:
    found = {"PATH": f"{environment}/env/bin:{clean_env()['PATH']}", "VIRTUAL_ENV": f"{environment}/env",
             "PYTHONPATH": str(environment / "more"), "EZPZ_LLM_CACHE": str(environment / "cache")}
    own = Path(sys.prefix, "lib/libmpi.so.12")
    return found | ({"MPI4PY_LIBMPI": str(own)} if own.exists() else {})


def places(run_dir: Path) -> list[dict]:
    """Return the ranks' reports by node."""
    found = [json.loads(path.read_text()) for path in run_dir.glob("where-*.json")]
    return sorted(found, key=lambda place: place["host"])


def check_place(place: dict, environment: Path) -> str:
    """Check that all of a rank's environment is in one copy. Return the copy's folder."""
    copy = place["prefix"].removesuffix("/env")
    assert re.fullmatch(r"/(local|tmp)/ezpz_llm-0-[0-9a-f]{16}-[0-9a-f]{16}", copy), copy
    assert place["executable"] == place["python3"] == f"{copy}/env/bin/python3"
    assert place["shebang"] == f"#!{copy}/env/bin/python3"
    assert (place["launch"], place["VIRTUAL_ENV"]) == (f"{copy}/env/bin/launch", f"{copy}/env")
    for name in ("demo", "plain", "ezpz_llm"):
        assert place[name].startswith(f"{copy}/path"), place[name]
    if not sys.base_prefix.startswith("/usr"):
        assert place["base"] == f"{copy}/python"
        assert place["stdlib"].startswith(f"{copy}/python/lib/")
    assert place["data"] == ["ds_configs", "ezpz_llm", "jobs", "launchers"]
    assert place["args"] == ["a b", f"{environment}/env/bin/python3"]
    return copy


@pytest.mark.full
def test_ranks_run_from_the_copy(environment: Path, tmp_path: Path) -> None:
    command = [environment / "env/bin/python3", "-m", "ezpz_llm.launch", "-n", "2", "--launcher", "mpiexec",
               "--stage-env", "--run-dir"]
    words = ["python3", environment / "where.py", "a b", environment / "env/bin/python3"]
    for run, made in (("first", "new archive"), ("second", "cached archive"), ("third", "new archive")):
        if run == "third":
            (environment / "project/demo/new.py").write_text("")
        done = subprocess.run([*command, tmp_path / run, *words], cwd=tmp_path, capture_output=True, text=True,
                              env=clean_env(**variables(environment)), timeout=scaled(120), check=False)
        assert done.returncode == 0, done.stderr
        assert made in done.stderr
        copies = {check_place(place, environment) for place in places(tmp_path / run)}
        assert len(places(tmp_path / run)) == 2
        assert not [copy for copy in copies if Path(copy).exists()], "copies are removed after the run"
    record = json.loads((tmp_path / "third/run.json").read_text())["staging"]
    assert [archive["is_new"] for archive in record["archives"]] == [False, True], "the source alone is new"
    assert record["way"] == "file"
    assert not [path for path in environment.rglob("not-code.bin") if path.parent.name != "more"]


@pytest.mark.full
def test_ranks_run_from_a_mounted_image(environment: Path, tmp_path: Path) -> None:
    """Use the real sqfstar and squashfuse if they are installed."""
    env = clean_env(**variables(environment))
    for program in ("sqfstar", "squashfuse"):
        if shutil.which(program, path=env["PATH"]) is None:
            pytest.skip(f"there is no {program}")
    (tmp_path / "mine.toml").write_text('stage = "squashfs"\n')
    words = ["python3", environment / "where.py", "a b", environment / "env/bin/python3"]
    for run in ("first", "second"):
        done = subprocess.run(
            [environment / "env/bin/python3", "-m", "ezpz_llm.launch", "-n", "2", "--launcher", "mpiexec",
             "--stage-env", "--site", tmp_path / "mine.toml", "--run-dir", tmp_path / run, *words],
            cwd=tmp_path, capture_output=True, text=True, env=env, timeout=scaled(120), check=False)
        assert done.returncode == 0, done.stderr
        copies = {check_place(place, environment) for place in places(tmp_path / run)}
        assert (len(places(tmp_path / run)), len(copies)) == (2, 1)
        assert not [copy for copy in copies if Path(copy).exists()], "copies are removed after the run"
        assert not [line for line in Path("/proc/mounts").read_text().splitlines() if any(map(line.count, copies))]
        assert json.loads((tmp_path / run / "run.json").read_text())["staging"]["way"] == "squashfs"


@pytest.mark.full
def test_no_image_without_its_programs(environment: Path, tmp_path: Path) -> None:
    """Each missing program is named, with a remedy."""
    (tmp_path / "mine.toml").write_text('stage = "squashfs"\n')
    bare = variables(environment) | {"EZPZ_LLM_CACHE": str(tmp_path / "cache"),
                                     "PATH": f"{environment}/env/bin:{Path(sys.prefix)}/mpi:{Path(sys.prefix)}/bin"
                                             ":/bin"}
    made = tmp_path / "made"
    made.mkdir()
    for missing_one, path in (("sqfstar", bare["PATH"]), ("squashfuse", f"{made}:{bare['PATH']}")):
        if shutil.which(missing_one, path=path):
            pytest.skip(f"{missing_one} is everywhere here")
        done = subprocess.run(
            [environment / "env/bin/python3", "-m", "ezpz_llm.launch", "-n", "1", "--stage-env", "--site",
             tmp_path / "mine.toml", "--run-dir", tmp_path / missing_one, "python3", "-c", "print('ran')"],
            cwd=tmp_path, capture_output=True, text=True, env=clean_env(**bare | {"PATH": path}),
            timeout=scaled(120), check=False)
        assert done.returncode != 0
        assert missing_one in done.stderr
        assert "remove stage = \"squashfs\" from the site file" in done.stderr
        assert "ran" not in done.stdout
        # With a working sqfstar, the nodes' program is the next one missing.
        (made / "sqfstar").write_text('#!/bin/sh\ncat > "$3"\n')
        (made / "sqfstar").chmod(0o755)


def test_mentions_of_a_folder_are_replaced_and_nothing_like_them() -> None:
    moved = path_replacer({"/opt/env": "env", "/opt/env/src": "path0", "/opt/py": "python"}, Path("/local/c"))
    assert moved("#!/opt/env/bin/python3") == "#!/local/c/env/bin/python3"
    assert moved("'/opt/env/src', '/opt/env'") == "'/local/c/path0', '/local/c/env'"
    for other in ("/opt/envs/x", "/opt/py3/x", "/data/opt/py/x", "/opt/env-2", "opt/env"):
        assert moved(other) == other


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start three nodes, each with a local disk at /local."""
    if (why := missing()) is not None:
        pytest.skip(why)
    with Cluster(tmp_path_factory.mktemp("disks") / "sim", nodes=3, net="10.79.0", node_tmp=True) as found:
        yield found


def left(disks: Cluster) -> list[str]:
    return [line for node in disks.nodes for line in disks.run("ls", "/local", node=node).stdout.split()]


def stage(disks: Cluster, environment: Path, folder: Path, run: str, *, in_a_job: bool) -> tuple[int, str]:
    """Run a staged launch on the three nodes, in a Slurm job or by mpiexec over ssh. Return its code and output."""
    words = ["launch", "--stage-env", "--hosts", "n1,n2,n3", "--ppn", "1", "--run-dir", str(folder / run),
             "python3", str(environment / "where.py"), "a b", str(environment / "env/bin/python3")]
    if not in_a_job:
        done = disks.run(*words, node="n1", cwd=folder, timeout=120, **variables(environment))
        return done.returncode, done.stderr
    script = folder / f"{run}.sh"
    script.write_text(f"#!/bin/bash\nexec {subprocess.list2cmdline(words)}\n")
    done = disks.run("sbatch", "--wait", "-N3", "--exclusive", f"--output={folder}/{run}.log", script, cwd=folder,
                     timeout=120, **variables(environment))
    return done.returncode, (folder / f"{run}.log").read_text()


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.parametrize("way", ["sbcast", "mpi"])
def test_every_node_gets_a_copy_or_none(way: str, disks: Cluster, environment: Path, tmp_path: Path) -> None:
    code, output = stage(disks, environment, tmp_path, "good", in_a_job=way == "sbcast")
    assert code == 0, output
    assert f"by {way}\n" in output
    found = places(tmp_path / "good")
    assert [place["host"] for place in found] == ["n1", "n2", "n3"]
    assert len({check_place(place, environment) for place in found}) == 1
    assert all(len(place["copies"]) == 1 for place in found), "no archive lies beside the copy"
    assert left(disks) == []

    disks.run("mount", "-t", "tmpfs", "-o", "size=2m", "full", "/local", node="n3")
    try:
        code, output = stage(disks, environment, tmp_path, "full", in_a_job=way == "sbcast")
        assert left(disks) == []
    finally:
        # Slurm's daemon may still hold the file that it could not write.
        assert disks.run("umount", "--lazy", "/local", node="n3").returncode == 0
    assert code == 3, output
    assert ("n3 has too little space for a copy" if way == "sbcast" else "No space left on device") in output
    assert way == "sbcast" or "instead: free space there" in output
    assert "fix the cause (such as a full local disk), or omit --stage-env" in output
    assert "n3" in output.partition("\nstaging")[2]
    assert places(tmp_path / "full") == []
    assert left(disks) == []


def test_copies_of_dead_runs_are_removed_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    """Copies are matched by the run's id in their names; other users' copies and recent ones are kept."""
    own = f"ezpz_llm-{os.getuid()}"
    names = {f"{own}-dead-aa": False, f"{own}-dead-aa.0.tar": False, f"{own}-alive-bb": True,
             f"{own}-young-cc": True, "ezpz_llm-12345-dead-dd": True}
    for name in names:
        (tmp_path / name).touch() if name.endswith(".tar") else (tmp_path / name).mkdir()
        os.utime(tmp_path / name, None if "young" in name else (0, 0))
    sleeper = subprocess.Popen(["sleep", "60"], env={**os.environ, "EZPZ_LLM_RUN_ID": "alive"})
    try:
        remove_stale(tmp_path / f"{own}-new-ee")
    finally:
        sleeper.kill()
        sleeper.wait()
    assert {name: (tmp_path / name).exists() for name in names} == names


def test_nobody_can_make_a_copy_s_folder_first(tmp_path: Path) -> None:
    """The name is not on any command line, and an existing folder of that name is not used."""
    secret, begin = new_secret(), f"{tmp_path}/ezpz_llm-"
    folder = folder_of_copy(begin, {"EZPZ_LLM_SECRET": secret})
    assert folder.parent == tmp_path
    assert len(folder.name) > len("ezpz_llm-")
    assert folder != folder_of_copy(begin, {"EZPZ_LLM_SECRET": new_secret()})

    def make(needed: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "ezpz_llm.launcher.running.staging.receiver", "make", begin,
                               str(needed)],
                              env=clean_env(EZPZ_LLM_SECRET=secret), capture_output=True, text=True,
                              timeout=scaled(60), check=False)

    assert "has too little space for a copy" in make(1 << 60).stderr
    assert list(tmp_path.iterdir()) == []
    assert make(1).returncode == 0
    assert folder.stat().st_mode & 0o777 == 0o700
    for planted in (lambda: None, lambda: folder.rmdir() or folder.symlink_to(tmp_path)):
        planted()
        done = make(1)
        assert done.returncode == 3, done.stderr
        assert "cannot create its copy of the environment: File exists" in done.stderr
        assert "instead: start again if the folder is local to the node" in done.stderr
    assert folder.is_symlink()


def test_the_path_that_the_shim_restores_begins_with_the_copy(tmp_path: Path) -> None:
    path = f"{sys.prefix}/bin:/usr/bin"
    env = {**clean_env(), "PATH": path}
    plan = build_plan(parse(["-n", "1", "true"]), env)
    plan = plan._replace(env={**plan.env, PATH_VARIABLE: Setting(path, "Open MPI 4")})
    relocated = _relocate(plan, [Root(Path(sys.prefix), "env")], tmp_path, env)
    assert relocated.env[PATH_VARIABLE].value == relocated.env["PATH"].value == f"{tmp_path}/env/bin:{path}"


@pytest.mark.parametrize(("folder", "reason"), [("", "No such file or directory"), ("file/", "Not a directory")])
def test_only_a_full_disk_is_told_to_free_space(folder: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.launcher.running.staging.receiver", "file",
                           f"{tmp_path}/{folder}ezpz_llm-", str(tmp_path / "missing.tar")],
                          env=clean_env(EZPZ_LLM_SECRET=new_secret()), capture_output=True, text=True,
                          timeout=scaled(60), check=False)
    assert done.returncode == 3, done.stderr
    assert f"cannot create its copy of the environment: {reason}" in done.stderr
    assert "instead: fix that on the node, or omit --stage-env" in done.stderr
    for number in (errno.ENOSPC, errno.EDQUOT):
        assert "free space there" in _remedy(OSError(number, os.strerror(number)))


def test_only_an_archive_of_ours_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "ours").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    with _open_sent_file(str(tmp_path / "ours")) as file:
        assert file.read() == b"x"
    with pytest.raises(OSError, match="symbolic links"), _open_sent_file(str(tmp_path / "link")):
        pass
    if os.geteuid() == 0:
        os.chown(tmp_path / "ours", 5002, 5002)
        with pytest.raises(OSError, match="another user"), _open_sent_file(str(tmp_path / "ours")):
            pass
