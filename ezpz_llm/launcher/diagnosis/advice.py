"""Advice after a failure, in one line: from the matching known error (texts.toml), or from the kind of failure."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from ezpz_llm.core.base import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import read_own_record
from ezpz_llm.launcher.basics.hostlist import fold_hostnames, rank_ranges
from ezpz_llm.launcher.basics.hostnames import NodeNames
from ezpz_llm.launcher.basics.log_kinds import SSH
from ezpz_llm.launcher.diagnosis.log_patterns import read_messages
from ezpz_llm.launcher.diagnosis.verdict_rules import Evidence, Verdict, ranks_with_same_failure
from ezpz_llm.launcher.jobs.nested_launcher import shell_script
from ezpz_llm.launcher.jobs.option_parsing import parse, read_command, remove_options, value_of
from ezpz_llm.launcher.on_nodes.kinds import Kind
from ezpz_llm.launcher.on_nodes.known_failures import fill_advice
from ezpz_llm.launcher.on_nodes.run_facts import RunFacts

_TRAINER = "ezpz_llm.train"
_MAX_HOSTS = 8
_PATH = re.compile(r"'(/[^']+)'|\"(/[^\"]+)\"|(?:^|\s)(/[^\s:,]+)|\[Errno \d+\] [^']*'([^']+)'")


def find_advice(verdict: Verdict, evidence: Evidence, run_dir: RunDir, typed: Sequence[str] | None) -> str | None:
    """Return advice on what to type or change next, or None if the error message is sufficient.

    Args:
        typed: the run's command line; None if another user may have written its record.
    """
    if verdict.kind in (Kind.TIME_LIMIT, Kind.PREEMPTED, Kind.REQUEUED, Kind.CANCELLED):
        fallback = "request more time; there is no checkpoint to resume from"
        return resume_command(run_dir, typed) or (fallback if verdict.kind is Kind.TIME_LIMIT else None)
    if verdict.kind in (Kind.NODE_FAILED, Kind.VANISHED) and verdict.hosts:
        return _advise_to_exclude(verdict.hosts, evidence.facts, run_dir, typed)
    if verdict.kind is Kind.IDLE and not verdict.cause and any(run_dir.rank_stacks(0).parent.glob("rank*.txt")):
        return f"see the stacks of the silent ranks: {run_dir.rank_stacks(0).parent}"
    if verdict.kind is Kind.IDLE and not verdict.cause:
        return (f"run `ezpz-llm why {run_dir.path}` during a hang to see the silent rank and its stack;"
                " --idle-timeout S ends a hang sooner")
    if verdict.kind is Kind.NOT_STARTED:
        return _start_advice(verdict, evidence.facts, run_dir)
    text = verdict.advice or _ADVICE.get(verdict.kind)
    if text is None:
        return None
    text = _fill_placeholders(text, verdict, evidence, run_dir, typed)
    if verdict.kind in (Kind.MISSING_MODULE, Kind.NOT_FOUND):
        return _prepend_comparison(verdict, evidence, text)
    return text


def _prepend_comparison(verdict: Verdict, evidence: Evidence, text: str) -> str:
    """Prefix the advice with a comparison to the ranks that did not fail this way."""
    facts = evidence.facts
    failed, other_ranks = ranks_with_same_failure(verdict.kind, verdict.cause, evidence)
    if not other_ranks:
        return text
    bad, good = ({facts.hosts[rank] for rank in ranks if rank < len(facts.hosts)}
                 for ranks in (failed, other_ranks))
    if bad.isdisjoint(good):
        return (f"{rank_ranges(other_ranks)} on {_join_nodes(good)} did not fail this way: compare PATH, the"
                f" environment and the mounts of {_join_nodes(bad)} with those of {_join_nodes(good)}; if the file"
                f" or module is missing on {_join_nodes(bad)}: {text}")
    return (f"{rank_ranges(other_ranks)} did not fail this way: compare their PATH, PYTHONPATH and working"
            f" directory with those of {rank_ranges(failed)}; if they are the same: {text}")


def _join_nodes(hosts: Collection[str]) -> str:
    return ", ".join(sorted(hosts)[:_MAX_HOSTS]) + (" …" if len(hosts) > _MAX_HOSTS else "")


def _fill_placeholders(advice: str, verdict: Verdict, evidence: Evidence, run_dir: RunDir,
                       typed: Sequence[str] | None) -> str:
    """Replace the {NAME}s in `advice` with values from the run and from the error message."""
    match = _PATH.search(verdict.evidence)
    path = next(filter(None, match.groups())) if match else None
    elsewhere = "write it elsewhere (caches: EZPZ_LLM_CACHE, HF_HOME, TMPDIR)"
    if path is None:
        elsewhere = "choose another location (--run-dir, EZPZ_LLM_CACHE)"
    elif Path(path).is_relative_to(run_dir.path):
        elsewhere = "choose another --run-dir"
    return fill_advice(advice, {
        "less_memory": ("a smaller micro-batch (--micro-batch-size), --ds-config zero3, or a layout that offloads"
                        if typed and _is_trainer(typed, run_dir) else
                        "a smaller batch per rank, sharded parameters and optimizer state, or offloading"),
        "run_dir": str(run_dir.path), "hosts": _join_nodes(verdict.hosts) or "its node",
        "path": path or "that file", "elsewhere": elsewhere,
        "leave_out": _advise_to_exclude(verdict.hosts, evidence.facts, run_dir, typed)})


_ADVICE = {
    Kind.ENDED_EARLY: "every rank must enter every collective: the same number of batches on all (drop_last, or"
                      " torch's Join), no early return, no sys.exit",
    Kind.OOM_KILLED: "use fewer ranks per node (--ppn), {less_memory}",
    Kind.NOT_FOUND: "check the program's path and name, and PATH on {hosts}: ranks start in launch's working"
                    " directory, and load no modules",
    Kind.WRONG_WORLD: "use the mpiexec (or srun --mpi plug-in) that belongs to this MPI; check it with"
                      " ezpz-llm doctor",
    Kind.UNRECORDED: "check that node's kernel log (dmesg) for what killed a rank and its shim at the same time",
}


def _start_advice(verdict: Verdict, facts: RunFacts, run_dir: RunDir) -> str:
    where = ", ".join(verdict.hosts) or "the nodes"
    if any(match.source == SSH for match in read_messages(verdict.evidence, facts)):
        return (f"`ssh {shlex.quote(verdict.hosts[0]) if verdict.hosts else 'HOST'} true` must work"
                " from here without a prompt: add your key to ~/.ssh/authorized_keys and the node's key to"
                " ~/.ssh/known_hosts. In a PBS job, set HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC=pbs_tmrsh to start"
                " ranks without ssh")
    return (f"check that {where} can read this launch's Python, its environment and {run_dir.path} under the same"
            " paths; use --hosts to leave a node out, --start-timeout S to wait longer")


def resume_command(run_dir: RunDir, typed: Sequence[str] | None) -> str | None:
    """Return the command that resumes from the run's last checkpoint, or None if there is no checkpoint.

    Only this package's trainer has --resume. Another program loads the checkpoint of its own run directory.
    For another user's run (`typed` is None) no command is quoted: its record could hold any command.
    """
    if not (run_dir.checkpoints / "latest").exists():
        return None
    path = str(run_dir.path)
    if typed is None:
        return (f"your training command with --resume {shlex.quote(path)} (ezpz_llm.train), or with"
                f" ezpz_llm.load_checkpoint(model, {path!r})")
    if not typed:
        return None
    if _is_trainer(typed, run_dir):
        return shlex.join((*remove_options(typed, "--resume"), "--resume", path))
    options, command = _split(typed)
    return shlex.join((typed[0], "--run-dir", path, *remove_options(options, "--run-dir"), *command))


def _split(typed: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return launch's options and the command in a command line of launch."""
    command = parse(typed[1:]).command
    return typed[1:len(typed) - len(command)], command


def _is_trainer(typed: Sequence[str], run_dir: RunDir) -> bool:
    """Return True for the trainer, also if a script runs it: only the trainer records a model's settings."""
    command = parse(typed[1:]).command
    if read_command(command).module == _TRAINER:
        return True
    if shell_script(command):  # options after it do not reach the trainer in it
        return False
    with contextlib.suppress(UserError):  # run.json is damaged
        record = read_own_record(run_dir)
        return record is not None and record.model is not None
    return False


def _advise_to_exclude(hosts: Sequence[str], facts: RunFacts, run_dir: RunDir, typed: Sequence[str] | None) -> str:
    excluded = NodeNames(hosts)
    remaining = [host for host in dict.fromkeys(facts.hosts) if host not in excluded]
    bad = ", ".join(hosts)
    if not remaining:
        return f"use a node other than {bad}"
    if not typed:
        return f"leave {bad} out: run your command with launch --hosts …"
    again = _without_hosts(typed, remaining, facts)
    return f"leave {bad} out: {resume_command(run_dir, again) or shlex.join(again)}"


def _without_hosts(typed: Sequence[str], remaining: Sequence[str], facts: RunFacts) -> list[str]:
    """Return the command line for the remaining nodes, with as many ranks as they had in the run."""
    options, command = _split(typed)
    changed = ["--hosts", fold_hostnames(remaining)]
    if value_of(options, "-n") is not None:
        changed += ["-n", str(sum(map(facts.hosts.count, remaining)))]
    return [typed[0], *changed, *remove_options(options, "--hosts", "--nodes", "-n"), *command]
