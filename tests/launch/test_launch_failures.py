"""Root cause of a run's end, from its output, records and the launcher's messages."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from launch_runs import CAPTURED, clean_env, launch, record
from slowness import scaled

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import read_record, update_record
from ezpz_llm.core.rundir.stop import Stop
from ezpz_llm.launcher.basics import log_kinds
from ezpz_llm.launcher.basics.hostlist import expand_numbers, fold_numbers
from ezpz_llm.launcher.basics.messages import NodeReport, RankReport, write_report
from ezpz_llm.launcher.diagnosis.classify import classify
from ezpz_llm.launcher.diagnosis.liveness import UNUSUAL_STATES
from ezpz_llm.launcher.diagnosis.log_patterns import LogMatch, read_abort, read_messages
from ezpz_llm.launcher.diagnosis.postmortem import postmortem_of
from ezpz_llm.launcher.diagnosis.recorded_exit import exit_record, facts_from
from ezpz_llm.launcher.diagnosis.verdict_rules import Evidence, Verdict, find_root_cause
from ezpz_llm.launcher.on_nodes.kinds import Kind
from ezpz_llm.launcher.on_nodes.run_facts import Failure, Raised, RunFacts

_GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:9"


def _captured(path: str) -> str:
    return (CAPTURED / path).read_text()


def _failure(rank: int, ended: float = 4.0, code: int = 1, signal: str | None = None, *tail: str,
             raised: Raised | None = None, **more: object) -> Failure:
    return Failure(rank, f"n{rank // 2 + 1}", 10 + rank, code, signal, ended, 1.0, tail, ("x",), raised, **more)


def _facts(**changes: object) -> RunFacts:
    return RunFacts(**{"world_size": 4, "hosts": ("n1", "n1", "n2", "n2"), "launcher": "srun",
                       "launcher_status": 143, "ended": 1000.0, **changes})


def _messages(text: str, **facts: object) -> list[LogMatch]:
    return read_messages(text, _facts(**{"hosts": ("n1", "n2", "n3", "n4"), **facts}))


def _judge(*failures: Failure, words: str = "", absent: tuple[int, ...] = (), **facts: object) -> Verdict | None:
    in_order = tuple(sorted(failures, key=lambda one: one.ended))
    return find_root_cause(Evidence(in_order, tuple(_messages(words, **facts)), _facts(**facts), absent))




@pytest.mark.parametrize(("line", "kind"), [
    (_GLOO, Kind.PEER_LOST),
    ("RuntimeError: [enforce fail] gloo/transport/tcp/pair.cc: Read error [n2]: Connection reset by peer",
     Kind.PEER_LOST),
    ("torch.distributed.DistBackendError: NCCL error in: x.cpp, remote process exited or there was a network error",
     Kind.PEER_LOST),
    ("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
     Kind.PEER_LOST),
    ("RuntimeError: NCCL communicator was aborted on rank 3.", Kind.PEER_LOST),
    ("n1:7:9 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.2<4> failed : Connection"
     " refused", Kind.PEER_LOST),
    ("torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote"
     " server shutdown or crash?", Kind.PEER_LOST),
    ("torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (n1,"
     " 5).", Kind.PEER_LOST),
    ("MPIDI_OFI_handle_cq_error(1075): OFI poll failed (ofi_events.c:1077:MPIDI_OFI_handle_cq_error:Input/output)",
     Kind.PEER_LOST),
    ("[1234] n1: UCX  ERROR ep 0x1: Connection reset by remote peer", Kind.PEER_LOST),
    ("n1[3][btl_tcp_frag.c:241] mca_btl_tcp_frag_recv: readv failed: Connection reset by peer (104)",
     Kind.PEER_LOST),
    ("|CCL_ERROR| atl_ofi.cpp: fi_cq_readerr: err: 113, prov_err: Unknown error", Kind.PEER_LOST),
    ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for 600000"
     " milliseconds before timing out.", Kind.COLLECTIVE_TIMEOUT),
    ("RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
     Kind.COLLECTIVE_TIMEOUT),
    ("torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//0",
     Kind.COLLECTIVE_TIMEOUT),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", Kind.DEVICE_MEMORY),
    ("RuntimeError: HIP out of memory. Tried to allocate 2.00 GiB.", Kind.DEVICE_MEMORY),
    ("MemoryError", Kind.HOST_MEMORY),
    ("std::bad_alloc: std::bad_alloc", Kind.HOST_MEMORY),
    ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
     Kind.HOST_MEMORY),
    ("ModuleNotFoundError: No module named 'x'", Kind.MISSING_MODULE),
    ("/usr/bin/python3: No module named x", Kind.MISSING_MODULE),
    ("python3: can't open file '/w/x.py': [Errno 2] No such file or directory", Kind.NOT_FOUND),
    ("python3: can't open file '/w/x.py': [Errno 13] Permission denied", Kind.NOT_FOUND),
    ("ImportError: libmpi.so.12: cannot open shared object file: No such file or directory", Kind.MISSING_MODULE),
    ("OSError: [Errno 28] No space left on device", Kind.DISK_FULL),
    ("RuntimeError: The server socket has failed to listen: EADDRINUSE", Kind.PORT_TAKEN),
    ("ValueError: a subprocess failed", Kind.EXIT),
    ("something else", Kind.EXIT),
])
def test_kinds_from_last_words(line: str, kind: Kind) -> None:
    assert classify(_failure(0, 4.0, 1, None, "before", line, "after")).kind is kind
    name, _, message = line.partition(": ")
    if kind is not Kind.EXIT and message and " " not in name:
        assert classify(_failure(0, raised=Raised(name, message))).kind is kind
        assert classify(_failure(0, 4.0, 134, "SIGABRT", raised=Raised(name, message))).kind is kind
    # The last output of a killed rank is unrelated to its end.
    assert classify(_failure(0, 4.0, 137, "SIGKILL", line)).kind is Kind.SIGNAL


def test_kinds_from_codes_and_signals() -> None:
    assert classify(_failure(0, 4.0, 139, "SIGSEGV")).kind is Kind.SIGNAL
    assert classify(_failure(0, 4.0, 137, "SIGKILL", oom_killed="kernel log: …")).kind is Kind.OOM_KILLED
    assert classify(_failure(0, 4.0, 137, None, oom_killed="kernel log: …")).kind is Kind.OOM_KILLED
    worker = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "
    assert classify(_failure(0, 4.0, 1, None, worker, oom_killed="oom_kill went up")).kind is Kind.OOM_KILLED
    # The kernel killed a worker process, and this rank failed as a consequence.
    assert classify(_failure(0, 4.0, 7, None, "bad", oom_killed="oom_kill went up")).kind is Kind.EXIT
    assert classify(_failure(0, 4.0, 127, None, "launch: cannot run 'x': not there")).kind is Kind.NOT_FOUND
    assert classify(_failure(0, 4.0, 2, None, "error: unknown option --x")).kind is Kind.USAGE
    assert classify(_failure(0, 4.0, 3, None, "error: launch started 4 ranks, but …")).kind is Kind.WRONG_WORLD
    # The same code of another program.
    assert classify(_failure(0, 4.0, 3, None, "error: no data")).kind is Kind.EXIT
    assert classify(_failure(0, 4.0, 143, "SIGTERM", ended_by="SIGTERM")).kind is Kind.TERMINATED
    assert classify(_failure(0, 4.0, 143, "SIGTERM", ended_by="launch")).kind is Kind.STOPPED
    assert classify(_failure(0, 4.0, 143, "SIGTERM")).kind is Kind.SIGNAL




def _means(text: str, **facts: object) -> list[tuple[str, str]]:
    return [(match.source, match.kind) for match in _messages(text, **facts)]


def test_slurms_words() -> None:
    blocks = _captured("slurm/srun_exit_codes.txt").split("=== ")[1:]
    endings = [[(match.host, match.ranks, match.code) for match in _messages(block)
                if match.kind == log_kinds.ENDED] for block in blocks]
    assert endings[0] == []
    assert endings[1] == [("n2", (3,), 7)]
    assert endings[3] == [("n2", (3,), 7), ("n2", (2,), 143), ("n1", (0,), 143), ("n1", (1,), 143)]
    assert endings[5] == [("n2", (3,), 137), ("n2", (2,), 137), ("n1", (0, 1), 137)]
    assert endings[7] == [("n2", (3,), 139)]
    assert endings[10] == [("n2", (2, 3), 2), ("n1", (0, 1), 2)]
    # A step that srun itself ends was not cancelled by a user.
    assert all(match.kind != log_kinds.CANCELLED for block in blocks for match in _messages(block))
    assert ("Slurm", log_kinds.NOT_STARTED) in _means(blocks[10])
    assert ("Slurm", log_kinds.NOT_STARTED) in _means(blocks[11])
    assert _means(_captured("slurm/time_limit.txt")) == [("Slurm", log_kinds.TIME_LIMIT)] * 2
    first, _, second = _captured("slurm/node_failure_and_requeue.txt").partition("restart=1")
    lost = _messages(first)
    assert {match.kind for match in lost} == {log_kinds.NODE_FAILED, log_kinds.ENDED, log_kinds.STEP_ENDED}
    assert lost[0].host == "n2"
    assert log_kinds.CANCELLED in {match.kind for match in _messages(second)}
    # Written by hand after Slurm's sources and documentation.
    for words, means in (
        ("slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***",
         log_kinds.PREEMPTED),
        ("slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO JOB REQUEUE ***",
         log_kinds.REQUEUED),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed.",
         log_kinds.MEMORY),
        ("slurmstepd: error: Detected 2 oom-kill event(s) in StepId=5.0 cgroup. Some of your processes may have"
         " been killed by the cgroup out-of-memory handler.", log_kinds.MEMORY),
        ("srun: error: n1: task 0: Out Of Memory", log_kinds.MEMORY),
        # Slurm 25.05 and newer name the signal.
        ("slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE to SIGNAL Terminated ***",
         log_kinds.CANCELLED),
        ("slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE to SIGNAL Killed ***",
         log_kinds.STEP_CANCELLED),
    ):
        assert _means(words) == [("Slurm", means)]
    failed = "slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TASK FAILURE ***"
    assert _means(failed) == []


def test_words_of_pbs_and_pals() -> None:
    killed = _means(_captured("pbs/walltime_kill.txt"), launcher="mpiexec", scheduler="pbs")
    assert killed == [("PBS", log_kinds.TIME_LIMIT)]
    # No output of PALS was captured: written by hand after its messages in public issues.
    hosts = tuple(f"x{number}c0s0b0n0" for number in range(1, 6))
    pals = _messages("x1c0s0b0n0: rank 7 exited with code 3\nx1c0s0b0n0: rank 14 died from signal 15\n"
                     "x2c0s0b0n0: shepherd died from signal 9\nping RPC timeout from x3c0s0b0n0 after 120s\n"
                     "ping failed on x4c0s0b0n0: Couldn't forward RPC ping(1)\n"
                     "launch failed on x5c0s0b0n0: Couldn't forward RPC launch(1)\n",
                     launcher="mpiexec", hosts=hosts)
    assert [(match.kind, match.host, match.ranks, match.code) for match in pals] == [
        (log_kinds.ENDED, "x1c0s0b0n0", (7,), 3), (log_kinds.ENDED, "x1c0s0b0n0", (14,), 143),
        (log_kinds.NODE_FAILED, "x2c0s0b0n0", (), None), (log_kinds.NODE_FAILED, "x3c0s0b0n0", (), None),
        (log_kinds.NODE_FAILED, "x4c0s0b0n0", (), None), (log_kinds.NOT_STARTED, "x5c0s0b0n0", (), None)]


def test_words_of_mpiexec_and_torchrun() -> None:
    endings = {}
    for block in _captured("mpi/exit_codes.txt").split("=== ")[1:]:
        title, _, text = block.partition("\n")
        endings[title.split(": rc=")[0].replace(": 4 ranks", "")] = [
            (match.source, match.ranks, match.host, match.code) for match in _messages(text, launcher="mpiexec")
            if match.kind == log_kinds.ENDED]
    assert endings["mpich-5.0.2: rank 2 exits 7, the others sleep 5 s"] == []
    assert endings["mpich-5.0.2: rank 2 kills itself with SIGKILL"] == [("MPICH", (), "n1", 137)]
    assert endings["intelmpi-2021.18: rank 2 kills itself with SIGSEGV"] == [("Intel MPI", (2,), "n1", 139)]
    assert endings["openmpi-5.0.11: rank 2 exits 7, the others sleep 5 s"] == [("Open MPI", (2,), None, 7)]
    assert endings["openmpi-5.0.11: rank 2 kills itself with SIGABRT"] == [("Open MPI", (2,), "n1", 134)]
    for name in ("mpich-5.0.2", "intelmpi-2021.18", "openmpi-5.0.11"):
        [block] = [section for section in _captured("mpi/exit_codes.txt").split("=== ")
                   if section.startswith(f"{name}: missing executable")]
        assert ("mpiexec", log_kinds.NOT_STARTED) in _means(block, launcher="mpiexec"), name
    for block, code in zip(_captured("mpi/torchrun_child_failed.txt").split("=== ")[1:], (7, 137), strict=True):
        assert [(match.source, match.ranks, match.code)
                for match in _messages(block, launcher="torchrun")] == [("torchrun", (1,), code)]
    [abort] = read_abort("Abort(5) on node 1 (rank 1 in comm 0): application called "
                         "MPI_Abort(MPI_COMM_WORLD, 5) - process 1", 1)
    assert (abort.kind, abort.ranks, abort.code) == (log_kinds.ABORTED, (1,), 5)




def test_success_has_no_verdict() -> None:
    assert _judge(launcher_status=0) is None
    # A failed rank is never reported as success, whatever the launcher's exit code.
    assert _judge(_failure(2, code=7), launcher_status=0).code == 7


def test_the_earliest_of_those_that_failed_of_themselves() -> None:
    late, early = _failure(0, 5.0, 3), _failure(2, 4.0, 7)
    assert _judge(late, early).rank == 2
    # A rank that only lost a peer is never the cause, whatever its clock says.
    follower = _failure(0, 3.9, 1, None, _GLOO)
    timeout = _failure(3, 3.8, 134, "SIGABRT", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)")
    ended = _failure(2, 3.7, 143, "SIGTERM", ended_by="SIGTERM")
    cause = _failure(1, 4.0, 137, "SIGKILL", "working")
    assert _judge(follower, timeout, ended, cause) == Verdict(137, Kind.SIGNAL, "SIGKILL", 1, ("n1",))
    assert _judge(follower, timeout, ended).rank == 3
    assert _judge(follower, ended).rank == 0
    assert _judge(ended).kind is Kind.TERMINATED


def test_srun_hides_the_code() -> None:
    """srun reports 143 for a rank that exited with 7, as for the ranks that srun ended (captured)."""
    words = _captured("slurm/srun_exit_codes.txt").split("=== ")[4]
    verdict = _judge(_failure(3, 4.0, 7, None, "bad"), _failure(0, 3.0, 143, "SIGTERM", ended_by="SIGTERM"),
                     words=words)
    assert (verdict.code, verdict.kind, verdict.rank) == (7, Kind.EXIT, 3)


@pytest.mark.parametrize(("ends_at", "words", "kind"), [
    (1000.0 + 11 * 3600 + 55 * 60, "", Kind.TERMINATED),
    (None, "", Kind.TERMINATED),
    (1000.0 - 14, "", Kind.TIME_LIMIT),
    (1000.0 + 40, "", Kind.TIME_LIMIT),
    (None, "time_limit", Kind.TIME_LIMIT),
    (1000.0 + 40, "srun: error: Node failure on n2\n", Kind.TIME_LIMIT),
])
def test_143_is_the_time_limit_only_by_words_or_clock(ends_at: float | None, words: str, kind: Kind) -> None:
    words = _captured("slurm/time_limit.txt") if words == "time_limit" else words
    terminated = [_failure(rank, 3.0, 143, "SIGTERM", ended_by="SIGTERM") for rank in range(4)]
    verdict = _judge(*terminated, words=words, ends_at=ends_at)
    assert (verdict.code, verdict.kind) == (143, kind)
    stopped = Stop("signal", "launch received SIGTERM and ended the run", "SIGTERM")
    verdict = _judge(*terminated, words=words, ends_at=ends_at, stopped=stopped, failed_before_stop=frozenset())
    assert (verdict.code, verdict.kind) == (143, kind)
    # A crash is reported as a crash, even near the end of the job.
    crash = _failure(2, 5.0, 139, "SIGSEGV")
    assert _judge(*terminated[:2], crash, ends_at=ends_at).kind is Kind.SIGNAL


def test_ranks_that_the_scheduler_signals_itself() -> None:
    directly = [_failure(rank, 3.0, 143, "SIGTERM") for rank in range(4)]
    assert _judge(*directly, words=_captured("slurm/time_limit.txt")).kind is Kind.TIME_LIMIT
    assert _judge(*directly).kind is Kind.SIGNAL
    killed = _failure(1, 3.0, 137, "SIGKILL")
    memory = "srun: error: n1: task 1: Out Of Memory"
    assert _judge(killed, words=memory) == Verdict(137, Kind.OOM_KILLED, memory, 1, ("n1",))
    assert _judge(killed, words="srun: error: n2: task 2: Out Of Memory").kind is Kind.SIGNAL


def test_an_order_from_launch_or_the_scheduler() -> None:
    idle = Stop("idle", "no sign of life for 30 s: rank 1 …")
    stopped = [_failure(rank, 3.0, 143, "SIGTERM", ended_by="launch") for rank in range(4)]
    assert _judge(*stopped, stopped=idle, failed_before_stop=frozenset()) == Verdict(124, Kind.IDLE, idle.text)
    # An exception in a rank's signal handler is not the cause of its end.
    handler = _failure(2, 3.5, 1, raised=Raised("ValueError", "in the handler of SIGTERM"))
    interrupted = Stop("signal", "launch received SIGINT and ended the run", "SIGINT")
    verdict = _judge(*stopped[:2], handler, stopped=interrupted, failed_before_stop=frozenset())
    assert (verdict.code, verdict.kind) == (130, Kind.TERMINATED)
    requeue = "slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO JOB REQUEUE ***"
    assert _judge(*stopped, words=requeue).kind is Kind.REQUEUED
    cancel = _captured("slurm/node_failure_and_requeue.txt").partition("restart=1")[2]
    assert _judge(*stopped, words=cancel).kind is Kind.CANCELLED


def test_a_lost_node() -> None:
    words = _captured("slurm/node_failure_and_requeue.txt").partition("restart=1")[0]
    lost = [_failure(0, 3.0, 1, None, _GLOO), _failure(1, 3.0, 143, "SIGTERM", ended_by="SIGTERM")]
    verdict = _judge(*lost, words=words, absent=(2, 3))
    assert (verdict.kind, verdict.hosts, verdict.rank) == (Kind.NODE_FAILED, ("n2",), 2)
    assert verdict.code == 143
    # Slurm signals the other tasks of the step directly, some before their shims can forward it.
    signalled = [_failure(rank, 3.0, 143, "SIGTERM", ended_by=by) for rank, by in enumerate((None, "SIGTERM"))]
    assert _judge(*signalled, words=words, absent=(2, 3)).kind is Kind.NODE_FAILED
    # No message names the node, but its ranks left no record, while the others only lost a peer.
    verdict = _judge(*lost, absent=(2, 3))
    assert (verdict.kind, verdict.hosts, verdict.rank) == (Kind.VANISHED, ("n2",), 2)


def test_a_lost_node_with_another_spelling() -> None:
    """slurmd uses the short name, a hostfile may have the full one."""
    hosts = ("n1.site.example", "N1.site.example", "n2.site.example", "n2.site.example")
    words = _captured("slurm/node_failure_and_requeue.txt").partition("restart=1")[0]
    lost = [_failure(0, 3.0, 1, None, _GLOO), _failure(1, 3.0, 143, "SIGTERM", ended_by="SIGTERM")]
    verdict = _judge(*lost, words=words, absent=(2, 3), hosts=hosts)
    assert (verdict.kind, verdict.rank) == (Kind.NODE_FAILED, 2)


def test_no_record_at_all() -> None:
    abort = "application called MPI_Abort(MPI_COMM_WORLD, 5) - process 1\n"
    assert _judge(words=abort, launcher_status=5) == Verdict(5, Kind.EXIT, abort.strip(), 1)
    missing = _captured("mpi/exit_codes.txt").split("mpich-5.0.2: missing executable")[1].split("===")[0]
    verdict = _judge(words=missing, launcher_status=255, launcher="mpiexec")
    assert (verdict.kind, verdict.code) == (Kind.NOT_STARTED, 3)
    assert _judge(launcher_status=-9) == Verdict(137, Kind.LAUNCHER,
                                                 "srun ended with code 137 (SIGKILL), and no rank left a record")
    assert _judge(launcher_status=None).evidence == "launch itself was killed, and its ranks with it"




def _run(folder: Path, failures: list[Failure], reports: list[NodeReport] = (), words: str = "") -> RunDir:
    run_dir = RunDir(folder / "r").create()
    update_record(run_dir, launch={
        "typed": ["launch", "python3", "-m", "ezpz_llm.train", "--resume=old", "--steps", "9"],
        "hosts": ["n1", "n2"], "ranks_per_host": [8, 8], "world_size": 16, "launcher": "srun",
        "env": {"EZPZ_LLM_RUN_ID": "abc"}})
    for failure in failures:
        run_dir.rank_error(failure.rank).write_text(json.dumps(asdict(failure)))
    for report in reports:
        write_report(run_dir, report)
    run_dir.launcher_log.write_text(words)
    return run_dir


def _sixteen(**changes: object) -> RunFacts:
    return _facts(world_size=16, hosts=("n1",) * 8 + ("n2",) * 8, **changes)


def test_the_cause_first_and_the_rest_folded(tmp_path: Path) -> None:
    raised = Raised("ValueError", "rank 3: bad shape", "train.py:12 in step", "KeyError: 'x'")
    alike = [_failure(rank, 5.0, raised=Raised("ValueError", f"rank {rank}: bad shape", "train.py:12 in step"))
             for rank in range(4, 8)]
    followers = [_failure(rank, 1.0, 1, None, _GLOO) for rank in range(8, 13)]
    ended = [_failure(rank, 9.0, 143, "SIGTERM", ended_by="SIGTERM") for rank in (0, 1, 2)]
    cause = _failure(3, 4.0, 1, None, "last line", raised=raised, phase="training", step=17)
    nodes = [NodeReport("abc", "n2", 8, "running", 1.0, {
        **{rank: RankReport(ended=1) for rank in range(8, 13)},
        **{rank: RankReport(phase="training", step=16) for rank in (13, 14, 15)}})]
    post_mortem = postmortem_of(_run(tmp_path, [*alike, *followers, *ended, cause], nodes), _sixteen(
        stopped=Stop("rank", "a rank failed"), failed_before_stop=frozenset(range(3, 13))))
    assert (post_mortem.code, post_mortem.rank, post_mortem.kind) == (1, 3, "exception")
    assert post_mortem.cause == "rank 3 on n2: ValueError: rank 3: bad shape (exit code 1)"
    lines = post_mortem.text.splitlines()
    assert lines[0] == "launch: rank 3 on n2 failed: exit code 1, after 1.0 s, in training, step 17"
    assert lines[1:3] == ["  ValueError: rank 3: bad shape; caused by KeyError: 'x'  (train.py:12 in step)",
                          "  | last line"]
    assert "  ranks 4-7: the same" in lines
    assert "  5 ranks: peer lost (connection closed by peer): 8-12" in lines
    assert "  3 ranks: ended by launch: 0-2" in lines
    assert "  no record: ranks 13-15 on n2, last reported in training, step 16" in lines
    assert json.loads(json.dumps(post_mortem.details))["absent"] == [13, 14, 15]


def test_what_to_try_next(tmp_path: Path) -> None:
    ended = [_failure(rank, 9.0, 143, "SIGTERM", ended_by="SIGTERM") for rank in range(16)]
    run_dir = _run(tmp_path, ended, words=_captured("slurm/time_limit.txt"))
    post_mortem = postmortem_of(run_dir, _sixteen())
    assert post_mortem.kind == "time_limit"
    assert "DUE TO TIME LIMIT" in post_mortem.text
    assert "there is no checkpoint to resume from" in post_mortem.text
    (run_dir.checkpoints / "latest").write_text("step-1\n")
    again = f"try: launch python3 -m ezpz_llm.train --steps 9 --resume {run_dir.path}"
    assert again in postmortem_of(run_dir, _sixteen()).text
    run_dir.launcher_log.write_text("srun: error: Node failure on n2\n")
    post_mortem = postmortem_of(run_dir, _sixteen())
    assert (post_mortem.kind, post_mortem.code) == ("node_failed", 143)
    assert "leave n2 out: launch --hosts n1 python3" in post_mortem.text


@pytest.mark.parametrize(("typed", "again"), [
    ("launch python3 x.py --hosts a,b", "launch --hosts 'n1,n[3-4]' python3 x.py --hosts a,b"),
    ("launch --nodes 4 python3 x.py", "launch --hosts 'n1,n[3-4]' python3 x.py"),
    ("launch --hosts n[1-4] -n 8 --ppn 2 x", "launch --hosts 'n1,n[3-4]' -n 6 --ppn 2 x"),
    ("launch -n 8 -- x -n 8", "launch --hosts 'n1,n[3-4]' -n 6 -- x -n 8"),
])
def test_the_command_without_a_failed_node(tmp_path: Path, typed: str, again: str) -> None:
    """launch's own options for nodes and ranks change; options of the program do not."""
    run_dir = _run(tmp_path, [], words="srun: error: Node failure on n2\n")
    update_record(run_dir, launch={"typed": typed.split(), "hosts": [f"n{number}" for number in range(1, 5)],
                                   "ranks_per_host": [2] * 4, "world_size": 8, "launcher": "srun",
                                   "env": {"EZPZ_LLM_RUN_ID": "abc"}})
    facts = _facts(world_size=8, hosts=tuple(f"n{number}" for number in (1, 1, 2, 2, 3, 3, 4, 4)))
    assert f"try: leave n2 out: {again}\n" in f"{postmortem_of(run_dir, facts).text}\n"


def test_ranks_are_compared(tmp_path: Path) -> None:
    """The advice names ranks that did not fail this way, for comparison."""
    lacks = [_failure(rank, 4.0, 1, None, "ModuleNotFoundError: No module named 'apex'") for rank in (2, 3)]
    post_mortem = postmortem_of(_run(tmp_path, lacks), _facts())
    assert post_mortem.kind == "missing_module"
    assert post_mortem.text.startswith("launch: rank 2 on n2 failed: a Python module is missing, on n2 only: exit")
    assert post_mortem.cause.startswith("rank 2 on n2: a Python module is missing, on n2 only: ")
    assert ("try: ranks 0-1 on n1 did not fail this way: compare PATH, the environment and the mounts of n2"
            " with those of n1;" in post_mortem.text)
    # If one of a node's two ranks fails, the node is not singled out.
    assert " only" not in postmortem_of(_run(tmp_path / "one", lacks[:1]), _facts()).cause


def test_every_run_with_a_checkpoint_says_how_to_resume(tmp_path: Path) -> None:
    """This holds for every kind of end, including an error, and a launch that was killed and wrote no record."""
    run_dir = _run(tmp_path, [_failure(0, 4.0, 1, None, raised=Raised("ValueError", "bad"))])
    assert "--resume" not in postmortem_of(run_dir, _facts()).text
    (run_dir.checkpoints / "latest").write_text("step-1\n")
    resume = f"  resume: launch python3 -m ezpz_llm.train --steps 9 --resume {run_dir.path}"
    assert postmortem_of(run_dir, _facts()).text.splitlines()[-1] == resume
    shutil.rmtree(run_dir.errors)
    killed = postmortem_of(run_dir, _facts(launcher_status=None))
    assert "launch itself was killed" in killed.text
    assert killed.text.splitlines()[-1] == resume


@pytest.mark.parametrize(("typed", "again"), [
    ("launch -n 4 python3 train.py --lr 1", "launch --run-dir RUN -n 4 python3 train.py --lr 1"),
    ("launch --run-dir old -- ./train --resume x", "launch --run-dir RUN -- ./train --resume x"),
    ("launch bash -c 'python3 train.py'", "launch --run-dir RUN bash -c 'python3 train.py'"),
    ("launch ezpz-llm train --resume x", "launch ezpz-llm train --resume RUN"),
    ("launch -n 2 python3 -u -m ezpz_llm.train", "launch -n 2 python3 -u -m ezpz_llm.train --resume RUN"),
    ("launch -n 2 python3 my_train --lr 1", "launch -n 2 python3 my_train --lr 1 --resume RUN"),
    ("launch sh -c './my_train --lr 1'", "launch --run-dir RUN sh -c './my_train --lr 1'"),
    ("launch bash -e -o pipefail -lc ./my_train", "launch --run-dir RUN bash -e -o pipefail -lc ./my_train"),
    ("launch bash my_train -c x", "launch bash my_train -c x --resume RUN"),
])
def test_resume_commands_suit_the_program(tmp_path: Path, typed: str, again: str) -> None:
    """Only the trainer has options such as --resume and --micro-batch-size."""
    run_dir = _run(tmp_path, [_failure(0, 4.0, 1, None, "torch.OutOfMemoryError: CUDA out of memory.")])
    runs_trainer = {"model": {"n_layer": 1}} if "my_train" in typed else {}
    update_record(run_dir, launch={"typed": shlex.split(typed), "env": {}}, **runs_trainer)
    (run_dir.checkpoints / "latest").write_text("step-1\n")
    text = postmortem_of(run_dir, _facts()).text
    assert text.splitlines()[-1] == f"  resume: {again.replace('RUN', str(run_dir.path))}"
    assert ("--micro-batch-size" in text) is (" --resume RUN" in again)
    run_dir.launcher_log.write_text("srun: error: Node failure on n2\n")
    shutil.rmtree(run_dir.errors)
    text = postmortem_of(run_dir, _facts()).text
    assert text.splitlines()[-1].startswith("  try: leave n2 out: launch ")
    assert text.count(str(run_dir.path)) == 1


def test_a_hang_names_who_is_behind(tmp_path: Path) -> None:
    timeout = [_failure(rank, 4.0, 134, "SIGABRT", "Watchdog caught collective operation timeout: WorkNCCL")
               for rank in range(15)]
    reports = [NodeReport("abc", "n1", 0, "ended", 1.0, {rank: RankReport(phase="training", step=8, ended=134)
                                                         for rank in range(15)}),
               NodeReport("abc", "n2", 15, "ended", 1.0, {15: RankReport(phase="training", step=7)})]
    stopped = Stop("rank", "a rank failed")
    post_mortem = postmortem_of(_run(tmp_path, timeout, reports),
                   _sixteen(stopped=stopped, failed_before_stop=frozenset(range(15))))
    assert (post_mortem.kind, post_mortem.code) == ("collective_timeout", 134)
    assert "behind the others: rank 15 on n2, at step 7 (others reached step 8)" in post_mortem.text
    assert post_mortem.cause == "rank 15 on n2 did not join a collective in which ranks 0-14 timed out"
    assert "15 ranks: timed out waiting for another rank: 0-14" in post_mortem.text


def test_a_hang_in_exit_handlers_after_an_exception(tmp_path: Path) -> None:
    """MPI_Finalize of a rank that raised an exception waits for the other ranks, which wait for its messages."""
    run_dir = _run(tmp_path, [_failure(rank, 4.0, 143, "SIGTERM", ended_by="launch") for rank in range(4)])
    for rank in range(4):
        place = "" if rank == 1 else "Thread 7 (idle)\n    recv (a.py:5)\n    <module> (a.py:9)\n"
        run_dir.rank_stacks(rank).parent.mkdir(exist_ok=True)
        run_dir.rank_stacks(rank).write_text(f"rank {rank}\n{place}")
    log = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nKeyError: \'loss\'\n'
    run_dir.rank_log(1).write_text(log)
    idle = Stop("idle", "no sign of life for 9 s", ranks=(0, 1, 2, 3))
    facts = _facts(stopped=idle, failed_before_stop=frozenset())
    cause = "rank 1 on n1 did not exit after an exception: KeyError: 'loss'; no sign of life for 9 s"
    assert postmortem_of(run_dir, facts).cause == cause
    run_dir.rank_log(1).write_text(f"{log}\nstep 8 | loss 7.1\n")  # the exception was caught
    assert "did not exit" not in postmortem_of(run_dir, facts).cause
    run_dir.rank_log(1).write_text(log.replace("KeyError: 'loss'", "RuntimeError: Connection closed by peer"))
    assert "did not exit" not in postmortem_of(run_dir, facts).cause, "launch was already ending its peers"
    in_driver = Stop("idle", f"rank 2: {UNUSUAL_STATES['D']}", ranks=(0, 1, 2, 3))
    run_dir.rank_log(1).write_text(log)
    assert "did not exit" not in postmortem_of(run_dir, _facts(stopped=in_driver)).cause


def test_a_hang_after_the_end_of_a_thread(tmp_path: Path) -> None:
    """The main thread waits for a thread or worker that has ended, and other ranks wait for that rank."""
    run_dir = _run(tmp_path, [_failure(rank, 4.0, 143, "SIGTERM", ended_by="launch") for rank in range(4)])
    thread = ('Exception in thread Thread-1 (prefetch):\nTraceback (most recent call last):\n'
              '  File "a.py", line 3, in f\n')
    stack = ('Fatal Python error: Aborted\n\nCurrent thread 0x7 (most recent call first):\n'
             '  File "a.py", line 9 in <module>\n')
    run_dir.rank_log(1).write_text(f"step 1\n{thread}KeyError: 'text'\n{stack}")
    stopped = Stop("idle", "no sign of life for 9 s", ranks=(0, 1, 2, 3))
    idle = _facts(stopped=stopped, failed_before_stop=frozenset())
    cause = "rank 1 on n1: a thread or child process ended with KeyError: 'text'"
    post_mortem = postmortem_of(run_dir, idle)
    assert post_mortem.cause == f"{cause}; no sign of life for 9 s"
    assert "  try: " not in post_mortem.text
    run_dir.rank_log(1).write_text(f"{thread}KeyError: 'text'\n" + "step 2\n" * 20)  # went on without the thread
    assert cause not in postmortem_of(run_dir, idle).cause
    # The same if other ranks give up first.
    timeout = "RuntimeError: Timed out waiting 8000ms for recv operation to complete"
    run_dir = _run(tmp_path / "late", [_failure(rank, 4.0, 1, None, timeout) for rank in (0, 2, 3)]
                   + [_failure(1, 4.0, 143, "SIGTERM", ended_by="launch")])
    run_dir.rank_log(1).write_text(f"{thread}KeyError: 'text'\n")
    late = _facts(stopped=Stop("rank", "a rank failed"), failed_before_stop=frozenset({0, 2, 3}))
    post_mortem = postmortem_of(run_dir, late)
    assert post_mortem.cause == f"{cause}; ranks 0,2-3 timed out waiting for another rank"
    assert (post_mortem.kind, post_mortem.code) == ("collective_timeout", 1)


@pytest.mark.parametrize("cleared", ["ended", "ranks ended"])
def test_a_node_that_is_gone_is_told_from_one_that_cleared_its_ranks(tmp_path: Path, cleared: str) -> None:
    """On n1 Slurm ended the ranks and the agent, maybe before the agent saw the launcher's helpers exit."""
    reports = [NodeReport("abc", host, first, state, 1.0, {first + rank: RankReport() for rank in range(8)})
               for host, first, state in (("n1", 0, cleared), ("n2", 8, "running"))]
    post_mortem = postmortem_of(_run(tmp_path, [], reports), _sixteen(launcher_status=255))
    assert (post_mortem.kind, post_mortem.code, post_mortem.rank) == ("vanished", 255, 8)
    assert "launch: ranks 8-15 on n2: gone without a record" in post_mortem.text
    assert "leave n2 out" in post_mortem.text


def test_the_same_account_from_the_files_alone(tmp_path: Path) -> None:
    facts = _sixteen(stopped=Stop("signal", "launch received SIGTERM and ended the run", "SIGTERM"),
                     failed_before_stop=frozenset({2}), launcher_status=-15)
    run_dir = _run(tmp_path, [_failure(2, 4.0, 7, None, "bad"),
                              _failure(1, 4.0, 143, "SIGTERM", ended_by="SIGTERM")])
    told = postmortem_of(run_dir, facts)
    update_record(run_dir, exit=exit_record(told))
    again = postmortem_of(run_dir, facts_from(read_record(run_dir), 0.0))
    assert (again.text, again.code, again.kind) == (told.text, told.code, told.kind)
    assert told.code == 7


def test_lists_of_ranks() -> None:
    assert fold_numbers([9, 0, 1, 2, 5, 1]) == "0-2,5,9"
    assert expand_numbers("0-2,5,9") == (0, 1, 2, 5, 9)
    assert fold_numbers([]) == ""




@pytest.mark.parametrize(("words", "code"), [((sys.executable, "mistyped.py"), 2), (("mistyped",), 127)])
def test_a_mistyped_name_is_not_a_missing_library(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    done = launch(tmp_path, "-n", "2", "--run-dir", "r", *words)
    assert done.returncode == code, done.stderr
    assert "the program cannot be run: " in done.stderr
    assert "try: check the program's path and name" in done.stderr
    assert "install" not in done.stderr


@pytest.mark.full
def test_real_peers_of_a_real_failure(tmp_path: Path) -> None:
    """The other ranks get gloo's error at once, often before the failing rank has exited."""
    (tmp_path / "x.py").write_text("""
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo", rank=int(os.environ["PMI_RANK"]), world_size=int(os.environ["PMI_SIZE"]))
# Keep a reference: if gloo's thread dropped the last one while Python exits, the rank would abort.
kept = dist.all_reduce(torch.ones(1), async_op=True)
kept.wait()
if dist.get_rank() == 1:
    raise ValueError("bad shape")
dist.all_reduce(torch.ones(1))
""")
    for _ in range(3):
        done = launch(tmp_path, "-n", "3", "--run-dir", "r", sys.executable, "x.py", timeout=120,
                      OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
        assert done.returncode == 1
        text = done.stderr[done.stderr.index("launch: rank"):]
        if "peer lost" in text:
            break
    assert "launch: rank 1 on" in text
    assert "ValueError: bad shape  (" in text
    assert "x.py:8 in <module>)" in text
    # Closed or reset, depending on timing; on a busy machine launch may end one or both first.
    followers = re.findall(r"ranks?: (peer lost \(connection \w+ by peer\)|ended by launch): ([\d,-]+)", text)
    assert set().union(*(expand_numbers(ranks) for _, ranks in followers)) == {0, 2}, text
    assert any(what.startswith("peer lost") for what, _ in followers), text
    kept = record(tmp_path / "r")["exit"]
    assert (kept["code"], kept["kind"], kept["rank"]) == (1, "exception", 1)


def test_worlds_of_one(tmp_path: Path) -> None:
    """Every rank is 0 of 1 if the launcher belongs to another MPI than the ranks (here with a stand-in)."""
    mpiexec = tmp_path / "bin/mpiexec"
    mpiexec.parent.mkdir()
    mpiexec.write_text("""#!/bin/sh
[ "$1" = --version ] && { echo "HYDRA build details:"; echo "    Version: 4.1"; exit 0; }
while [ "$1" != -m ]; do python=$1; shift; done
PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 exec "$python" "$@"
""")
    mpiexec.chmod(0o755)
    env = clean_env() | {"PATH": f"{mpiexec.parent}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", "r", "hostname"],
                          cwd=tmp_path, env=env, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 3, done.stderr
    assert "launch: the world size is not what launch planned: error: launch started 2 ranks" in done.stderr
    assert "try: use the mpiexec (or srun --mpi plug-in) that belongs to this MPI" in done.stderr


def test_a_real_abort(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("""
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    MPI.COMM_WORLD.Abort(5)
MPI.COMM_WORLD.barrier()
""")
    done = launch(tmp_path, "-n", "2", "--run-dir", "r", sys.executable, "x.py")
    assert done.returncode == 5, done.stderr
    assert "launch: rank 1 on" in done.stderr
    assert "MPI_Abort(MPI_COMM_WORLD, 5) - process 1" in done.stderr
    assert "no record" not in done.stderr


def test_a_missing_module(tmp_path: Path) -> None:
    done = launch(tmp_path, "-n", "3", "--run-dir", "m", sys.executable, "-m", "no_such_module_anywhere")
    assert done.returncode == 1
    assert "a Python module is missing" in done.stderr
    assert "ranks " in done.stderr
    assert ": the same" in done.stderr
    assert "try: install it into the Python that the ranks run" in done.stderr


def test_a_rank_whose_variables_are_cleared_on_the_way(tmp_path: Path) -> None:
    """torch reports missing variables after they were removed, as by a container's --cleanenv."""
    (tmp_path / "x.py").write_text("""
import os
for name in ("RANK", "WORLD_SIZE"):
    if name not in os.environ:
        raise ValueError("Error initializing torch.distributed using env:// rendezvous: environment variable "
                         f"{name} expected, but not set")
""")
    words = ("-n", "2", "--run-dir", "r")
    assert launch(tmp_path, *words, sys.executable, "x.py").returncode == 0
    done = launch(tmp_path, *words, "env", "-u", "RANK", sys.executable, "x.py")
    assert done.returncode == 1
    assert ("try: launch sets RANK and the other variables, but something between launch and the program clears"
            " them" in done.stderr)


@pytest.mark.parametrize(("tail", "shown"), [
    (("PMIX ERROR: NOT-FOUND in file server/pmix_server.c at line 229", "-" * 40), "PMIX ERROR: NOT-FOUND"),
    (("There are not enough slots available", "Either request fewer procs", "", "-----"), "There are not enough"),
    (("step 7 | loss 2.0", "unable to open the site's license", "wandb: Synced 5 files"), "unable to open"),
    (("srun: error: Unable to satisfy cpu bind request", "srun: Job step aborted: Waiting"), "srun: error: Unable"),
    (("error: no data", "RuntimeError failed"), "error: no data"),
    (("step 6 | loss 2.1", "step 7 | loss 2.0"), "step 7"), (("-----",), ""), ((), ""),
])
def test_the_line_that_reads_like_an_error(tail: tuple[str, ...], shown: str) -> None:
    error = replace(_failure(0, 4.0, 1, None), tail=tail).error
    assert error.startswith(shown)
    assert bool(error) is bool(shown)
