"""Options of launch, and arguments that belong to the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from slowness import scaled

import ezpz_llm
from ezpz_llm import __version__
from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.jobs.option_parsing import Options, parse, read_command, run_dir_of


@pytest.mark.parametrize(("words", "expected"), [
    ("python3 x.py -n 4 --timeout 9", Options(("python3", "x.py", "-n", "4", "--timeout", "9"))),
    ("-n 2 python3 x.py --dry-run", Options(("python3", "x.py", "--dry-run"), ranks=2)),
    ("-n 2 -- -odd --help", Options(("-odd", "--help"), ranks=2)),
    ("--ppn=3 --hostfile h --launcher srun hostname -- -n 1",
     Options(("hostname", "--", "-n", "1"), per_host=3, hostfile=Path("h"), launcher="srun")),
    ("--idle-timeout 2.5 --run-dir=a=b --dry-run --json x",
     Options(("x",), idle_limit_s=2.5, run_dir=Path("a=b"), dry_run=True, as_json=True)),
    ("--start-timeout 0 x", Options(("x",), start_limit_s=0.0)),
    ("--explain - x", Options(("-", "x"), explain=True)),
    ("--version", Options(version=True)),
])
def test_options_end_at_the_first_other_word(words: str, expected: Options) -> None:
    assert parse(words.split()) == expected


@pytest.mark.parametrize(("words", "message"), [
    ("", "no command"),
    ("-n 2", "no command"),
    ("--dryrun x", "--dry-run"),
    ("--time 3 x", "unknown option '--time'"),
    ("--launch mpiexec x", "--launcher"),
    ("-n", "-n needs a value"),
    ("-n 0 x", "'0' is not a whole number"),
    ("-n two x", "'two' is not a whole number"),
    ("--ppn=-1 x", "'-1' is not"),
    ("--idle-timeout 0 x", "above 0"),
    ("--idle-timeout nan x", "above 0"),
    ("--start-timeout -1 x", "'-1' is not a number of seconds, or 0 for no limit"),
    ("--launcher mpirun x", "auto, mpiexec, srun, flux, jsrun, torchrun"),
    ("--dry-run=yes x", "takes no value"),
    ("--json x", "--dry-run"),
    ("--no-check x", "launch --dry-run --no-check"),
    ("--run-dir= x", "the value of --run-dir is empty"),
    ("--site= x", "the value of --site is empty"),
    ("--wrap= x", "'' is not a command line"),
])
def test_a_wrong_word_is_named(words: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(words.split())
    assert message in str(raised.value)
    assert raised.value.exit_code == 2


def test_a_command_from_an_unset_variable_is_named() -> None:
    with pytest.raises(UserError, match="the command to launch is an empty string"):
        parse(["-n", "2", ""])


@pytest.mark.parametrize(("words", "name", "module", "arguments"), [
    ("python3 -m ezpz_llm.train --steps 3", "train", "ezpz_llm.train", "--steps 3"),
    ("/usr/bin/python3.11 -u -X dev -W ignore -m ezpz_llm.test_dist", "test_dist", "ezpz_llm.test_dist", ""),
    ("python3 -m other.train x", "train", None, "x"),
    ("python3 -c pass -m ezpz_llm.train", "python", None, "pass -m ezpz_llm.train"),
    ("python3 dir/x.py -m ezpz_llm.train", "x", None, "-m ezpz_llm.train"),
    ("bin/ezpz-llm test-dist --x", "test_dist", "ezpz_llm.test_dist", "--x"),
    ("hostname -s", "hostname", None, "-s"),
])
def test_our_own_commands_are_recognised(words: str, name: str, module: str | None, arguments: str) -> None:
    target = read_command(tuple(words.split()))
    assert (target.name, target.module, " ".join(target.arguments)) == (name, module, arguments)


def test_one_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours = read_command(("python3", "-m", "ezpz_llm.train", "--run-dir", "d"))
    assert run_dir_of(ours, None) == Path("d")
    assert run_dir_of(ours, tmp_path / "d") == tmp_path / "d"
    with pytest.raises(UserError, match="two run directories"):
        run_dir_of(ours, Path("e"))
    foreign = read_command(("python3", "x.py", "--run-dir", "d"))
    assert run_dir_of(foreign, Path("e")) == Path("e")
    assert run_dir_of(foreign, None) is None


def test_console_scripts_list_and_dispatch_without_torch(tmp_path: Path) -> None:
    program = "import sys, ezpz_llm.cli as c; sys.argv = ['ezpz-llm', *sys.argv[1:]]; code = c.main();" \
              " print(sorted({'torch', 'numpy', 'deepspeed', 'mpi4py'} & set(sys.modules))); sys.exit(code)"

    def ezpz_llm(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True,
                              timeout=scaled(60), cwd=tmp_path, check=False)

    listed = ezpz_llm("--help")
    assert listed.returncode == 0
    assert "\n  launch      Start a program on every rank of the allocation.\n" in listed.stdout
    assert "[]" in listed.stdout
    assert "Other commands" not in listed.stdout, "each command is in a group"
    assert max(map(len, listed.stdout.splitlines())) < 80
    assert "usage: ezpz-llm launch" in ezpz_llm("launch", "--help").stdout
    wrong = ezpz_llm("lunch")
    assert wrong.returncode == 2
    assert "did you mean launch?" in wrong.stderr


def test_version_is_told_without_torch(tmp_path: Path) -> None:
    for program in ("from ezpz_llm.launcher.running.command import main; main(['--version'])",
                    "import sys; from ezpz_llm.cli import main; sys.argv[1:] = ['--version']; main()"):
        code = f"{program}; import sys; assert not {{'torch', 'numpy', 'mpi4py'}} & sys.modules.keys()"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                              timeout=scaled(60), check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == (f"ezpz_llm {__version__} from {Path(ezpz_llm.__file__).parent} "
                               f"(Python {sys.version.split()[0]})\n")


@pytest.mark.parametrize("words", ["-n 1000000000000", "--ppn 1000000", "--nodes 10000000", f"-n {'9' * 5000}",
                                   "-n ²", "--idle-timeout 1e300"])
def test_a_number_beyond_all_machines_is_refused(words):
    with pytest.raises(UserError):
        parse([*words.split(), "x"])


@pytest.mark.parametrize("words", ["-h --", "--version --", "--", ""])
def test_words_without_a_command(words):
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.launch", *words.split()], capture_output=True, text=True,
                          timeout=scaled(60), check=False)
    assert done.returncode in (0, 2)
    assert "Traceback" not in done.stderr
