"""Set-ups by with-env in a copy of the checkout, reusing the torch of a virtual environment; activate.

Nothing is downloaded: all packages are available, and pip's index is unreachable or never answers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from checkouts import Checkout, copy_checkout, no_network
from slowness import scaled

# A set-up starts pip and torch several times, which takes seconds, or minutes next to eight busy processes.
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Interrupted:
    exit_code: int
    shown: str
    left_running: list[str]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    folder = tmp_path_factory.mktemp("it's with env")  # characters that shells and pip treat specially
    wheels = tmp_path_factory.mktemp("wheels")  # without a space: PIP_FIND_LINKS is split at spaces
    return copy_checkout(folder, wheels, environment_with_torch(folder / "active"))


def environment_with_torch(folder: Path) -> Path:
    """Create a virtual environment with torch as installed from PyPI, and return its Python.

    The metadata of PyPI's torch have version 2.13.0, while torch.__version__ is 2.13.0+cu130. The environment uses
    the torch of the tests with metadata that lack the local part.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=scaled(60))
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "torch").symlink_to(Path(importlib.util.find_spec("torch").origin).parent)
    version = importlib.metadata.version("torch").partition("+")[0]
    info = site / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))
    return folder / "bin" / "python"


def write_program(path: Path, line: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def interrupted(checkout: Checkout) -> Interrupted:
    """First set-up, interrupted by SIGINT while pip hangs."""
    with socket.create_server(("127.0.0.1", 0)) as silent_index:
        variables = no_network(silent_index.getsockname()[1])
        env = checkout.environment(**variables)
        del env["PIP_NO_BUILD_ISOLATION"]
        process = subprocess.Popen(checkout.command("true"), env=env, stderr=subprocess.PIPE, text=True)
        silent_index.settimeout(280)
        connection, _ = silent_index.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            _, shown = process.communicate(timeout=scaled(100))
    return Interrupted(process.returncode, shown, processes_that_name(str(checkout.cache)))


@pytest.fixture(scope="module")
def ready(checkout: Checkout, interrupted: Interrupted) -> Checkout:
    """The same checkout, set up after the interrupted attempt."""
    shutil.rmtree(checkout.outside)  # left by the killed pip
    done = checkout.run("true", timeout=600)
    assert done.returncode == 0, done.stderr
    assert "setting up" in done.stderr
    assert f"using torch {importlib.metadata.version('torch').partition('+')[0]} of {checkout.python.parents[1]}" \
        in done.stderr
    return checkout


def processes_that_name(text: str) -> list[str]:
    for _ in range(20):  # a terminated process needs a moment to exit
        matching = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in words:
                matching.append(words)
        if not matching:
            break
        time.sleep(0.1)
    return matching


@pytest.mark.parametrize(("words", "shown"), [
    ((), "no command given"),
    (("--wheel", "x", "true"), "unknown option --wheel"),
    (("--wheels",), "--wheels requires a folder"),
])
def test_usage_errors(checkout: Checkout, words: tuple[str, ...], shown: str) -> None:
    done = checkout.run(*words)
    assert done.returncode == 2
    assert shown in done.stderr
    assert "usage: launchers/with-env" in done.stderr


def test_help(checkout: Checkout) -> None:
    done = checkout.run("--help")
    assert done.returncode == 0
    assert "--wheels DIR" in done.stdout


def test_missing_and_old_python(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.run("true", EZPZ_PYTHON=str(tmp_path / "python3"))
    assert (done.returncode, "EZPZ_PYTHON" in done.stderr) == (1, True)
    old = tmp_path / "python3.8"
    write_program(old, "echo 3.8")
    done = checkout.run("true", EZPZ_PYTHON=str(old), EZPZ_LLM_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "is Python 3.8; 3.10 or newer is required" in done.stderr


@pytest.mark.full
def test_interrupt_stops_pip(interrupted: Interrupted) -> None:
    assert interrupted.exit_code == 128 + signal.SIGINT
    assert "interrupted by SIGINT; run the same command to continue" in interrupted.shown
    assert interrupted.left_running == []


@pytest.mark.full
def test_command_inherits_streams_and_exit_code(ready: Checkout) -> None:
    done = ready.run("sh", "-c", "cat; echo error >&2; exit 7", stdin="input")
    assert (done.returncode, done.stdout, done.stderr) == (7, "input", "error\n")
    assert ready.run("--", "sh", "-c", "kill -9 $$").returncode == -signal.SIGKILL
    missing = ready.run("no-such-command")
    assert (missing.returncode, missing.stderr) == (127, "with-env: command not found: no-such-command\n")


@pytest.mark.full
def test_environment_has_checkout_and_existing_torch(ready: Checkout) -> None:
    script = "import ezpz_llm, torch; print(ezpz_llm.__file__); print(torch.__file__)"
    ours, torch_file = ready.run("python3", "-c", script).stdout.splitlines()
    assert Path(ours).is_relative_to(ready.root)
    assert Path(torch_file).is_relative_to(ready.python.parents[1])
    assert ready.run("launch", "--dry-run", "hostname").returncode == 0


@pytest.mark.full
def test_set_up_writes_only_to_the_cache(ready: Checkout) -> None:
    # pip calls rustc for its version, and rustup creates its own folders.
    left = {path.name for folder in ready.outside.iterdir() for path in folder.iterdir()} - {".rustup", ".cargo"}
    assert left == set()


@pytest.mark.full
def test_warm_start_adds_little(ready: Checkout) -> None:
    def median_ms(words: list[str]) -> float:
        """Return the median CPU time, which does not depend on other processes."""
        times = []
        for _ in range(11):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(words, env=ready.environment(), check=True, timeout=scaled(120))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
        return statistics.median(times)

    assert median_ms(ready.command("true")) - median_ms(["true"]) < scaled(50)


@pytest.mark.full
def test_newer_pyproject_without_changes_needs_no_update(ready: Checkout) -> None:
    (ready.root / "pyproject.toml").touch()
    done = ready.run("true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
def test_a_complete_environment_in_a_read_only_cache(ready: Checkout) -> None:
    """A compute node may mount the cache read-only, and a checkout's files may be newer without a change."""
    (ready.root / "pyproject.toml").touch()
    done = run_read_only(ready, "true")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_read_only_cache_without_an_environment(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "cache/venvs").mkdir(parents=True)
    done = run_read_only(replace(checkout, cache=tmp_path / "cache"), "true")
    assert done.returncode == 1
    assert done.stderr.startswith(f"with-env: the environment in {tmp_path}/cache is not complete and up to date")
    assert "set EZPZ_LLM_CACHE to another folder" in done.stderr
    assert len(done.stderr.splitlines()) == 2


def run_read_only(checkout: Checkout, *words: str) -> subprocess.CompletedProcess[str]:
    """Run with-env in a mount namespace in which the cache is read-only."""
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 77; shift; exec "$@"'
    command = ("unshare", "-m", "sh", "-c", script, "sh", str(checkout.cache), *checkout.command(*words))
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), env=checkout.environment(),
                          check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"cannot mount: {done.stderr}")
    return done


@pytest.mark.full
def test_suggested_commands_start_with_with_env_as_typed(ready: Checkout) -> None:
    typed = ready.command()[0].replace(" ", "\\ ").replace("'", "\\'")
    bare, own = "/usr/bin:/bin", f"{ready.venv / 'bin'}:/usr/bin:/bin"
    assert ready.run("printenv", "EZPZ_LLM_WITH_ENV", PATH=bare).stdout == f"{typed}\n"
    assert ready.run("printenv", "EZPZ_LLM_WITH_ENV", PATH=own).stdout == "", "launch is on PATH"
    assert f"instead: {typed} launch --dry-run" in ready.run("launch", "--json", "x", PATH=bare).stderr


@pytest.mark.full
def test_site_mpiexec_precedes_ours(ready: Checkout, tmp_path: Path) -> None:
    ours, site = ready.venv / "mpi" / "mpiexec", tmp_path / "site" / "mpiexec"
    write_program(site, "echo site")
    bare = "/usr/bin:/bin"

    def found(path: str, before: str = "") -> str:
        return ready.run("bash", "-c", f"{before} type -P mpiexec", PATH=path).stdout.strip()

    if not shutil.which("mpiexec", path=bare):
        assert found(bare) == str(ours)
    assert found(f"{site.parent}:{bare}") == str(site)
    assert found(f"{bare}:{site.parent}") != str(ours)
    assert found(bare, f"PATH={site.parent}:$PATH;") == str(site), "loaded later"
    library = ready.run("printenv", "MPI4PY_LIBMPI", MPI4PY_LIBMPI="").stdout
    assert library == f":{ready.venv}/mpich/lib\n", "the linker's folders first, then ours"
    assert ready.run("printenv", "MPI4PY_LIBMPI", MPI4PY_LIBMPI="mine").stdout == "mine\n"
    assert ready.run("printenv", "MPI4PY_LIBMPI", MPI4PY_LIBMPI="", CRAYPE_VERSION="2.7").stdout == "\n"


@pytest.mark.full
def test_launch_falls_back_to_mpich(ready: Checkout, tmp_path: Path) -> None:
    """Launch chooses an mpiexec when it runs, so the environment has one even if a site had one at set-up."""
    site, of_pbs = tmp_path / "site", tmp_path / "pbs"
    write_program(site / "mpiexec", "echo 'mpiexec (OpenRTE) 4.1.8'")
    write_program(of_pbs / "mpiexec", "echo pbs_version = 23.06.06")
    ours = str(ready.venv / "mpi" / "mpiexec")
    for folders, expected in (((of_pbs,), ours), ((of_pbs, site), str(site / "mpiexec")), ((), ours)):
        path = ":".join([*map(str, folders), str(tmp_path)])
        # Link the programs that with-env needs: their folder on this machine may contain an mpiexec.
        for name in ("bash", "sh", "readlink", "sha256sum", "grep", "sed"):
            if not (tmp_path / name).exists():
                (tmp_path / name).symlink_to(shutil.which(name))
        done = ready.run("launch", "--dry-run", "--json", "-n", "2", "hostname", PATH=path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["argv"][0] == expected


@pytest.mark.full
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_activate_and_deactivate(ready: Checkout, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    script = """
        before=$PATH
        deactivate() { echo "outer deactivate"; }
        . "$1/launchers/activate" || exit 9
        . "$1/launchers/activate"
        command -v launch
        PATH=/loaded/later:$PATH
        deactivate
        test "$PATH" = "/loaded/later:$before" && test -z "${VIRTUAL_ENV:-}" && echo "as before"
        deactivate
        false
        echo "still here"
    """
    done = subprocess.run([shell, "-c", script, shell, str(ready.root)], env=ready.environment(),
                          timeout=scaled(60), capture_output=True, text=True, check=False)
    assert done.stderr == ""
    found = str(ready.venv / "bin" / "launch")
    assert done.stdout.splitlines() == [found, "as before", "outer deactivate", "still here"]


@pytest.mark.full
def test_concurrent_set_ups_run_in_turn_and_explain_failure(checkout: Checkout, tmp_path: Path) -> None:
    """Two set-ups start together; the index is unreachable, so both fail, one after the other."""
    env = checkout.environment(EZPZ_LLM_CACHE=str(tmp_path), EZPZ_LLM_TORCH="torch==2.13.0")
    command = checkout.command("true")
    both = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    shown = [process.communicate(timeout=scaled(280))[1] for process in both]
    assert [process.returncode for process in both] == [1, 1]
    assert sum("waiting for another set-up of this environment to finish" in text for text in shown) == 1
    for text in shown:
        assert "there seems to be no network here" in text
        assert "with-env --wheels DIR" in text
        assert "fix the cause, then run the same command to start over" in text
    assert len([path for path in tmp_path.glob("venvs/*") if path.is_dir()]) == 1


@pytest.mark.full
def test_a_second_checkout_copies_the_environment_without_a_download(ready: Checkout, tmp_path: Path) -> None:
    first = ready.venv
    second = replace(copy_checkout(tmp_path, ready.wheels, ready.python), cache=ready.cache)
    done = second.run("python3", "-c", "import ezpz_llm; print(ezpz_llm.__file__)", PIP_FIND_LINKS="", timeout=600)
    assert done.returncode == 0, done.stderr
    assert "as hard links" in done.stderr
    assert Path(done.stdout.strip()).is_relative_to(second.root)
    mine, = (path for path in (ready.cache / "venvs").iterdir() if path.is_dir() and path != first)
    library = next(mine.glob("lib/python*/site-packages/pip/__init__.py"))
    assert library.stat().st_nlink > 1, "no space is used"
    for name in ("bin/launch", "bin/pip", "mpi/mpiexec", "pyvenv.cfg"):
        assert first.name not in (mine / name).read_text()
    assert second.run("true").stderr == ""
    script = "import ezpz_llm; print(ezpz_llm.__file__)"
    assert Path(ready.run("python3", "-c", script).stdout.strip()).is_relative_to(ready.root), "first is unchanged"
    shutil.rmtree(mine)


@pytest.mark.full
def test_an_interrupted_set_up_continues_with_the_packages_that_are_complete(ready: Checkout) -> None:
    (ready.venv / "stamp").unlink()
    record = next(ready.venv.glob("lib/python*/site-packages/ezpz_llm-*.dist-info"))
    (record / "INSTALLER").unlink()
    kept = next(ready.venv.glob("lib/python*/site-packages/pip/__init__.py")).stat().st_ino
    done = ready.run("true", timeout=600)
    assert done.returncode == 0, done.stderr
    assert "continuing the set-up" in done.stderr
    assert (record / "INSTALLER").exists()
    assert next(ready.venv.glob("lib/python*/site-packages/pip/__init__.py")).stat().st_ino == kept


@pytest.mark.full
def test_broken_stamp_restarts_the_set_up(ready: Checkout) -> None:
    (ready.venv / "stamp").write_text("")
    done = ready.run("true", timeout=600)
    assert done.returncode == 0, done.stderr
    assert "setting up" in done.stderr
    assert ready.run("true").stderr == ""
