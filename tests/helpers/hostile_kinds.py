"""Kinds of untrusted input, each with a reader that must return or raise a UserError."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import hostile_mutations as mutate

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.package_data import data_dir
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.checkpoint.manifest import FileRecord, make_record
from ezpz_llm.training.trainer import options

Read = Callable[[Random, Path], object]
KINDS: dict[str, Read] = {}
RUN_ID = "0123456789abcdef"

LAUNCH = {
    "typed": ["launch", "-n", "2", "x"],
    "argv": ["mpiexec"],
    "command": ["x"],
    "scheduler": "none",
    "job_id": None,
    "hosts": ["n1", "n2"],
    "ranks_per_host": [1, 1],
    "launcher": "mpiexec",
    "dialect": "hydra",
    "world_size": 2,
    "env": {"EZPZ_LLM_RUN_ID": RUN_ID, "EZPZ_LLM_ENDS_AT": "1800000000"},
    "started": 1000.0,
}
EXIT = {
    "code": 3,
    "cause": "rank 1 failed",
    "kind": "exception",
    "rank": 1,
    "ended": 2000.0,
    "launcher_status": 3,
    "stopped": None,
    "failed_before_stop": [1],
    "ended_before_stop": [0],
}
FAILURE = {
    "rank": 1,
    "host": "n2",
    "pid": 7,
    "exit_code": 3,
    "signal": None,
    "ended": 1990.0,
    "duration_s": 5.0,
    "tail": ["a", "b"],
    "argv": ["x"],
    "exception": {"type": "ValueError", "message": "bad", "where": "x.py:1"},
    "phase": "step",
    "step": 4,
    "oom_killed": None,
    "ended_by": None,
    "launch": RUN_ID,
}
NODE = {
    "run_id": RUN_ID,
    "host": "n1",
    "first_rank": 0,
    "state": "ended",
    "interval_s": 1.0,
    "ranks": {"0": {"pid": 5, "phase": "step", "step": 4, "ended": 0, "lived_s": 9.0}},
    "left": [],
    "builds": [],
}
MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 256, "vocab_size": 257}
LAYOUT = {
    "layout": {"name": "zero1", "engine": "deepspeed", "zero_stage": 1, "tiled": []},
    "precision": "fp32",
    "batch": {"global_batch": 8, "micro_batch": 4, "accumulation": 1, "dp_size": 2},
}
RECORD = {
    "launch": LAUNCH,
    "exit": EXIT,
    "steps": 20,
    "precision": "fp32",
    "stopped": None,
    "model": MODEL,
    "config": {"model": "tiny-gpt2", "steps": 20, "lr": 0.004, "log_every": 10, "optimizer": "adamw"},
    "sources": {"lr": {"origin": "command_line", "detail": ""}},
    "memory": None,
    "summary": {"wall": {"training": 3.0}},
    "environment": {"world_size": 2, "versions": {"torch": "2.6"}, "device": {"type": "cpu"}},
}
ROWS = [
    {
        "step": step,
        "loss": 5 - step / 10,
        "lr": 0.004,
        "grad_norm": 1.0,
        "step_time_s": 0.1,
        "data_s": 0.01,
        "tokens_per_second": 20480.0,
        "tokens_per_second_per_device": 10240.0,
        "forward_s": 0.03,
        "backward_s": 0.05,
        "optimizer_s": 0.009,
        "other_s": 0.001,
        "val_loss": 4.0,
    }
    for step in range(1, 21)
]

FAILURE_TEXT = r"""
[licence]
kind = "missing_module"
cause = "no licence is free"
patterns = ['no licence \((?P<number>-\d+)\)|no licence']
advice = "ask for {number} at {hosts}, {path}"
source = "https://example.org"
examples = ["no licence (-15)", "no licence (a)"]
"""
PATTERNS = [
    "(a+)+$|no licence",
    "(a|a)*$|no licence",
    "(a*)*b|no licence",
    "a*a*a*a*a*b|no licence",
    "(.*)*\\1x|no licence",
    "(?:" * 90 + ")" * 90 + "|no licence",
    "((a{1,999}){1,999}){1,999}b|no licence",
    "(?P<a>x)(?P<a>y)",
    "(?<=a+)b",
    "no licence|" * 3000 + "x",
    "(?i)(?#" + "x" * 9000 + ")no licence",
    "[" * 500,
    "no licence|\\x00",
]


@contextlib.contextmanager
def cached_train_parser() -> Iterator[None]:
    """Build train's parser only once inside the block, since that takes 0.1 s."""
    build_parser = options.build_parser
    options.build_parser = functools.cache(build_parser)
    try:
        yield
    finally:
        options.build_parser = build_parser


def kind(read: Read) -> Read:
    """Register the reader of a kind under its name."""
    KINDS[read.__name__] = read
    return read


def written(folder: Path, name: str, content: bytes) -> Path:
    """Write a file below `folder`. For `special` inputs, sometimes create a special file instead."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for rng, share in _special:
        if rng.random() < share:
            _make_special(rng, path)
            return path
    path.write_bytes(content)
    return path


_special: list[tuple[Random, float]] = []
"""Random generator and fraction of files to replace by special ones; empty except for `special` inputs."""


def _make_special(rng: Random, path: Path) -> None:
    """Create a file that blocks its reader, or that has no end."""
    way = rng.randrange(6)
    if way == 0:
        os.mkfifo(path)
    elif way == 1:
        path.mkdir()
    elif way == 2:
        with socket.socket(socket.AF_UNIX) as listener:
            # A socket's path is limited to 107 characters.
            listener.bind(f"/proc/self/fd/{(handle := os.open(path.parent, os.O_RDONLY))}/{path.name}")
            os.close(handle)
    elif way == 3:
        path.write_bytes(b"")
        os.truncate(path, 300 << 20)
    else:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/tty", "/proc/self/mem", "/proc/kmsg", path.name, "gone"]))


def _run(rng: Random, folder: Path, files: dict[str, Any]) -> RunDir:
    """Create a run directory in which one or two files are hostile."""
    run_dir = RunDir(folder / "run").create()
    bad = set(rng.sample(sorted(files), min(len(files), rng.choice([1, 1, 2]))))
    for name, whole in files.items():
        if isinstance(whole, list):
            content = (
                mutate.lines(rng, whole)
                if name in bad
                else b"".join(json.dumps(row).encode() + b"\n" for row in whole)
            )
        else:
            content = mutate.json_data(rng, whole) if name in bad else json.dumps(whole).encode()
        written(run_dir.path, name, content)
    return run_dir


@kind
def board(rng: Random, folder: Path) -> object:
    """Receive a message of a preflight's rank or rank 0."""
    from ezpz_llm.verify.check.preflight.messages import Introduction, Reply, Request, receive

    message, kind = rng.choice([({"rank": 1, "host": "n1"}, Introduction), ({"stage": "mpi", "group": ""}, Request),
                                ({"stage": "ready", "answer": {"device": {}}}, Reply)])
    body = mutate.json_data(rng, message)
    frame = len(body).to_bytes(4, "big") + body
    ours, theirs = socket.socketpair()
    with ours, Connection(theirs.detach()) as connection:
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            ours.sendall(frame if rng.random() < 0.7 else mutate.data(rng, frame.decode("latin-1")))
        ours.shutdown(socket.SHUT_WR)
        try:
            return receive(connection, kind)
        except (EOFError, OSError):  # documented: the connection is dropped
            return None


@kind
def ds(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.layout.resolve import Request, resolve

    whole = rng.choice(sorted(data_dir("ds_configs").glob("*.json"))).read_text()
    if rng.random() < 0.6:
        content = mutate.json_data(rng, {**json.loads(whole), "fp16": {"enabled": "auto"}, "train_batch_size": 8})
    else:
        content = mutate.data(rng, whole)
    return resolve(Request(str(written(folder, "mine.json", content)), world_size=2))


@kind
def failuretexts(rng: Random, folder: Path) -> object:
    """Read a user's file of failure patterns, which `why` matches against a rank's last output."""
    from ezpz_llm.why import main

    if rng.random() < 0.15:  # rarely, since some patterns run into the one-second limit
        content = FAILURE_TEXT.replace("|no licence']", f"|no licence', '{rng.choice(PATTERNS)}']").encode()
    else:
        content = mutate.data(rng, FAILURE_TEXT)
    failure = {**FAILURE, "exception": None, "tail": ["a" * 300 + "!", "(" * 3000, "no licence (-15)"]}
    run_dir = RunDir(folder / "run").create()
    written(run_dir.path, "run.json", json.dumps({"launch": LAUNCH, "exit": EXIT}).encode())
    written(run_dir.path, "errors/rank0001.json", json.dumps(failure).encode())
    os.environ["EZPZ_LLM_FAILURE_TEXTS"] = str(written(folder, "texts.toml", content))
    try:
        return main([str(run_dir.path), *rng.choice([[], ["--json"]])])
    finally:
        del os.environ["EZPZ_LLM_FAILURE_TEXTS"]


@kind
def foreignrun(rng: Random, folder: Path) -> object:
    """Read another user's run directory, in which any file may be hostile or special, with every command."""
    from ezpz_llm.checkpoint import main as checkpoint
    from ezpz_llm.launcher.diagnosis.status import read_status
    from ezpz_llm.launcher.submit.state import find_state
    from ezpz_llm.training.report.command import main as report
    from ezpz_llm.verify.explain.command import main as explain
    from ezpz_llm.watch import main as watch
    from ezpz_llm.why import main as why

    _special.append((rng, 0.15))
    try:
        run_dir = _run(
            rng,
            folder,
            {
                "run.json": RECORD,
                "metrics.jsonl": ROWS,
                "layout.json": LAYOUT,
                "deepspeed.json": {"zero_optimization": {"stage": 1}},
                "errors/rank0001.json": FAILURE,
                "heartbeat/node00000.json": NODE,
            },
        )
        for name in ("checkpoints/latest", "logs/rank0000.log", "logs/rank0001.log", "logs/launcher.log",
                     "stacks/rank0000.txt", "profile/trace-rank0000.json.gz", "checkpoints/step-3/manifest.json"):
            written(run_dir.path, name, mutate.data(rng, "step-3\n"))
    finally:
        _special.clear()
    commands = (
        lambda path: why([path]),
        lambda path: why([path, "--json"]),
        lambda path: report([path]),
        lambda path: explain([path]),
        lambda path: read_status(RunDir(Path(path)), 30.0),
        lambda path: watch([path, "--once"]),
        lambda path: watch([path, "--once", "--json"]),
        lambda path: find_state(RunDir(Path(path))),
        lambda path: checkpoint(["inspect", path]),
        lambda path: checkpoint(["verify", path]),
    )
    return rng.choice(commands)(str(run_dir.path))


@kind
def hellaswag(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.evaluate.hellaswag import read_items

    content = mutate.lines(rng, [{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}] * 3)
    if rng.random() < 0.4:
        packed = gzip.compress(content)
        if rng.random() < 0.5:
            at = rng.randrange(len(packed))
            packed = packed[:at] + rng.randbytes(rng.choice([0, 1, 8])) + packed[at + 1 :]
        return read_items(written(folder, "items.jsonl.gz", packed))
    return read_items(written(folder, "items.jsonl", content))


@kind
def hfconfig(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.hf.config import to_hf
    from ezpz_llm.training.hf.source import find_source
    from ezpz_llm.training.model.config import MODELS

    whole = to_hf(MODELS[rng.choice(["gpt2-124m", "llama3-1b", "tiny-llama"])])
    written(folder, "config.json", mutate.json_data(rng, whole))
    return find_source(str(folder), "--init-from")


@kind
def hostfile(rng: Random, folder: Path) -> object:
    from ezpz_llm.launcher.jobs import hostfile as hostfiles

    return hostfiles.read(
        written(folder, "hosts", mutate.data(rng, "n1 slots=4\nn2:2\nn3\n# no host\nn4.site.org\n"))
    )


@kind
def hostlist(rng: Random, folder: Path) -> object:
    from ezpz_llm.launcher.basics.hostlist import expand_counts, expand_hostlist

    if rng.random() < 0.3:
        return expand_counts(mutate.text(rng, "2(x2),1,4(x10)"))
    return expand_hostlist(mutate.text(rng, rng.choice(["nid[001-004,007],gpu01", "n[0-9][0-9]", "a,b,c[1-3]-ib"])))


@kind
def launchcli(rng: Random, folder: Path) -> object:
    from ezpz_llm.launcher.running.command import main

    return main(
        [
            "--dry-run",
            "--no-check",
            *mutate.words(
                rng,
                rng.choice(
                    [
                        [
                            "-n",
                            "2",
                            "--run-dir",
                            str(folder / "r"),
                            "python3",
                            "-m",
                            "ezpz_llm.train",
                            "--steps",
                            "3",
                        ],
                        ["--ppn", "2", "--hosts", "n[1-4]", "--idle-timeout", "9", "--", "x"],
                        ["--hostfile", "/dev/null", "--nodes", "3", "--bind", "none", "x"],
                        ["-h", "--"],
                    ]
                ),
            ),
        ]
    )


@kind
def lsf(rng: Random, folder: Path) -> object:
    from ezpz_llm.launcher.jobs.schedulers.lsf import LsfScheduler, read_time_left

    path = written(folder, "hosts", mutate.data(rng, "n1\nn1\nn2\nn2\n"))
    env = {"LSB_JOBID": "7", "LSB_JOBINDEX": "3"} | rng.choice(
        [
            {"LSB_MCPU_HOSTS": "login1 1 n1 42 n2 42 n3 42"},
            {"LSB_HOSTS": "n1 n1 n2 n2"},
            {"LSB_DJOB_HOSTFILE": str(path)},
        ]
    )
    env = env if "LSB_DJOB_HOSTFILE" in env and rng.random() < 0.7 else mutate.environment(rng, env)
    if rng.random() < 0.5:  # with jsrun, the first node may be the launch node
        with contextlib.suppress(OSError):
            written(folder, "bin/jsrun", b"").chmod(0o755)
        env["PATH"] = str(folder / "bin")
    left = read_time_left(mutate.text(rng, "1:05 L"))
    return LsfScheduler().detect(env), left


def _described(path: Path) -> FileRecord:
    """Return a manifest's record of a file; an empty record if it is not a regular file."""
    try:
        return make_record(path)
    except (OSError, UserError):
        return FileRecord(path.name, 0, "")


@kind
def manifest(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.checkpoint.index import read_index
    from ezpz_llm.training.checkpoint.manifest import read_manifest, verify
    from ezpz_llm.training.checkpoint.state import read_state

    checkpoint = folder / "step-3"
    index = {
        "format": 1,
        "kinds": ["weight"],
        "parameters": {
            "w": {
                "shape": [4],
                "pieces": [{"box": [[0, 4]], "start": 0, "stop": 4, "file": "rank-00000.safetensors", "key": "0"}],
            }
        },
    }
    state = {"step": 3, "model": MODEL, "seed": 1, "optimizer_step": 3, "loss_scale": None, "world_size": 1}
    for name, whole in (("state.json", state), ("index.json", index)):
        written(
            checkpoint, name, mutate.json_data(rng, whole) if rng.random() < 0.4 else json.dumps(whole).encode()
        )
    files = {
        name: {"size": described.size, "sha256": described.sha256}
        for name in ("state.json", "index.json")
        for described in [_described(checkpoint / name)]
    }
    whole = {"format": 1, "step": 3, "files": files}
    written(
        checkpoint,
        "manifest.json",
        mutate.json_data(rng, whole) if rng.random() < 0.6 else json.dumps(whole).encode(),
    )
    verify(checkpoint, read_manifest(checkpoint))
    return read_state(checkpoint), read_index(checkpoint)


@kind
def metajunk(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.data.nanogpt_meta import read_meta

    declared = {"dtype": mutate.value(rng, "uint32")} if rng.random() < 0.5 else {}
    content = pickle.dumps({"itos": mutate.value(rng, {0: "a", 1: "b"}), "stoi": {}, **declared})
    if rng.random() < 0.2:  # nested tuples, a large memo, and many small objects
        unit = rng.choice([b"\x85", b"\x86", b"l", b"}", b"]", b"\x8f", b"\x94", b"0", b"2", b"a", b"s"])
        content = b"\x80\x04})" + unit * rng.choice([50, 1000, 200_000]) + rng.choice([b"Ns.", b".", b""])
    if rng.random() < 0.5:
        at = rng.randrange(len(content))
        content = content[:at] + rng.randbytes(rng.choice([1, 4])) + content[at + 1 :]
    written(folder, "meta.pkl", rng.choice([content, content, b"cos\nsystem\n(S'id'\ntR."]))
    if rng.random() < 0.5:
        written(folder, "meta.json", mutate.json_data(rng, {"dtype": "uint32"}))
    return read_meta(folder, is_raw=True)


@kind
def nodefile(rng: Random, folder: Path) -> object:
    """Read the node files of Grid Engine, OAR, Cobalt and PJM."""
    from ezpz_llm.launcher.jobs.schedulers.node_files import COBALT, GRID_ENGINE, OAR, PJM

    scheduler, mark, name, line = rng.choice(
        [
            (GRID_ENGINE, "JOB_ID", "PE_HOSTFILE", "{} 2 all.q@{} UNDEFINED\n"),
            (OAR, "OAR_JOB_ID", "OAR_NODEFILE", "{}\n{}\n"),
            (COBALT, "COBALT_JOBID", "COBALT_NODEFILE", "{}\n{}\n"),
            (PJM, "PJM_JOBID", "PJM_O_NODEINF", "{}\n{}\n"),
        ]
    )
    path = written(folder, "nodes", mutate.data(rng, "".join(line.format(host, host) for host in ("n1", "n2"))))
    env = {mark: "7", name: str(path), "NHOSTS": "2"}
    return scheduler.detect(env if rng.random() < 0.7 else mutate.environment(rng, env))


@kind
def orders(rng: Random, folder: Path) -> object:
    from ezpz_llm.launcher.basics.messages import (
        SignalOrder,
        StacksOrder,
        read_orders,
        read_reports,
        read_stop_order,
    )

    run_dir = _run(
        rng,
        folder,
        {
            "control/stop": {"run_id": RUN_ID, "grace_s": 5.0, "launch_host": "n1"},
            "heartbeat/node00000.json": NODE,
            "control/stacks-a": {"run_id": RUN_ID, "token": "a", "ranks": [0]},
            "control/signal-a": {"run_id": RUN_ID, "token": "a", "number": 15},
        },
    )
    return (
        read_stop_order(run_dir, RUN_ID),
        read_orders(StacksOrder, run_dir, RUN_ID),
        read_orders(SignalOrder, run_dir, RUN_ID),
        read_reports(run_dir, RUN_ID),
    )


@kind
def pbs(rng: Random, folder: Path) -> object:
    from ezpz_llm.launcher.jobs.schedulers.pbs import PbsScheduler

    path = written(folder, "nodes", mutate.data(rng, "n1\nn1\nn2\nn2\n"))
    env = {"PBS_JOBID": "7.server", "NCPUS": "8", "PBS_NODEFILE": str(path)}
    if rng.random() < 0.3:
        env = mutate.environment(rng, env)
    return PbsScheduler().detect(env)


@kind
def preprec(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.data.corpora import find_corpus
    from ezpz_llm.training.data.reader import tasks, texts

    documents = [{"text": "some words", "id": 1}, {"text": "more of them"}, {"text": "é"}]
    if rng.random() < 0.3:
        path = written(folder, "docs.json", mutate.json_data(rng, documents))
    else:
        path = written(folder, "docs.jsonl", mutate.lines(rng, documents))
    pieces = (piece for task in tasks(find_corpus(str(path))) for piece in task.pieces)
    return sum(len(text) for piece in pieces for _, text in texts(piece))


@kind
def presets_corpus(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.data.corpora import find_corpus
    from ezpz_llm.training.data.mixture import find_mixture

    words = mutate.words(rng, [rng.choice(["stdlib=0.7,shakespeare=0.3", "a=1,b=2", "x.txt"])])
    return [
        find_mixture(word) or find_corpus(word)
        for word in words
        if word not in ("stdlib", "/", ".") and not os.path.isdir(os.path.expanduser(word))
    ]


@kind
def qstat(rng: Random, folder: Path) -> object:
    from ezpz_llm.launcher.jobs.schedulers.pbs import read_job

    whole = {
        "timestamp": 1700000000,
        "Jobs": {
            "7.server": {
                "stime": "Wed Nov 15 10:00:00 2023",
                "exec_host": "n1/0*8+n2/0*8",
                "run_count": 1,
                "exec_vnode": "(n1:ncpus=8)+(n2:ncpus=8)",
                "Resource_List": {"walltime": "01:30:00"},
            }
        },
    }
    return read_job(mutate.json_data(rng, whole).decode(errors="replace"), "7.server").ends_at


@kind
def rankenv(rng: Random, folder: Path) -> object:
    from ezpz_llm.launcher.basics.ranks import find_rank

    return find_rank(
        mutate.environment(
            rng,
            rng.choice(
                [
                    {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"},
                    {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
                    {
                        "SLURM_PROCID": "1",
                        "SLURM_STEP_NUM_TASKS": "4",
                        "SLURM_LOCALID": "1",
                        "SLURM_NODEID": "0",
                        "SLURM_STEP_ID": "0",
                        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
                    },
                    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "EZPZ_LLM_RANKS_PER_NODE": "1,1"},
                ]
            ),
        )
    )


@kind
def report(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.report.command import main

    run_dir = _run(rng, folder, {"run.json": RECORD, "metrics.jsonl": ROWS, "layout.json": LAYOUT})
    return main(
        [str(run_dir.path), "--html", str(folder / "page.html")] if rng.random() < 0.3 else [str(run_dir.path)]
    )


_OF_FILES = ("ds", "failuretexts", "hellaswag", "hfconfig", "hostfile", "lsf", "manifest", "megatron", "metajunk",
             "nodefile", "npyshards", "orders", "pbs", "preprec", "report", "shards", "tokenizer", "toml", "trace",
             "why", "yaml")


@kind
def special(rng: Random, folder: Path) -> object:
    """Read another kind's files, half of them replaced by a FIFO, device, folder, socket, loop or huge file."""
    _special.append((rng, 0.5))
    try:
        return KINDS[rng.choice(_OF_FILES)](rng, folder)
    finally:
        _special.clear()


TRAINING = ["launch", "--ppn", "2", "python3", "-m", "ezpz_llm.train", "--model", "tiny-gpt2"]


@kind
def scalecli(rng: Random, folder: Path) -> object:
    from ezpz_llm.verify.scaling.options import parse

    return parse(mutate.words(rng, ["--nodes", "1,2", "--repeats", "2", "--seed", "8", "--", *TRAINING]))


@kind
def shards(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.data.shards import TokenData

    split = {"tokens": 8, "shards": [{"file": "train_000000.bin", "tokens": 8, "sha256": "0" * 64}]}
    whole = {
        "format": "ezpz_llm tokens 1",
        "request": "r",
        "command": "c",
        "documents": 1,
        "tokens": 16,
        "source": {"corpus": "x", "files": 1, "bytes": 16},
        "vocab_size": 257,
        "end_of_text": 256,
        "tokenizer": {"name": "bytes", "fingerprint": "f"},
        "dtype": "uint16",
        "unigram_entropy": 1.0,
        "splits": {"train": split, "val": split},
    }
    written(folder, "train_000000.bin", bytes(16))
    written(folder, "manifest.json", mutate.json_data(rng, whole))
    data = TokenData.open(folder)
    return data.fingerprint, data.unigram_entropy, [data.split(name)[:4] for name in ("train", "val")]


@kind
def slurm(rng: Random, folder: Path) -> object:
    from ezpz_llm.launcher.jobs.schedulers.slurm import SlurmScheduler

    return SlurmScheduler().detect(
        mutate.environment(
            rng,
            {
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "n[1-4],m2",
                "SLURM_JOB_NUM_NODES": "5",
                "SLURM_NTASKS": "10",
                "SLURM_TASKS_PER_NODE": "2(x5)",
                "SLURM_JOB_CPUS_PER_NODE": "8(x5)",
                "SLURM_GPUS_PER_NODE": "a100:4",
                "SLURM_JOB_END_TIME": "1800000000",
                "SLURM_HET_SIZE": "1",
                "SLURM_STEP_ID": "4294967290",
            },
        )
    )


@kind
def submitcli(rng: Random, folder: Path) -> object:
    from ezpz_llm.launcher.submit.options import parse

    return parse(mutate.words(rng, ["--nodes", "2", "--time", "1:00:00", "--account", "a", "--chain", "2", "--",
                                    *TRAINING]))


@kind
def toml(rng: Random, folder: Path) -> object:
    from ezpz_llm.launcher.planning.sites import read_site

    whole = rng.choice(sorted((data_dir("launchers") / "sites").glob("*.toml"))).read_text()
    content = mutate.data(rng, whole)
    if rng.random() < 0.1:
        deep = rng.choice([90, 900, 5000])
        content = rng.choice(
            [
                b"a = " + b"[" * deep + b"]" * deep,
                b"a." * deep + b"b = 1",
                b"a = " + b"{a = " * deep,
                b"[" + b"a." * deep + b"a]",
                b"a = " + b"1" * 5000,
            ]
        )
    return read_site(written(folder, "site.toml", content), "--site")


@kind
def trace(rng: Random, folder: Path) -> object:
    from ezpz_llm.verify.explain.trace import read_trace

    def event(name: str, ts: float, dur: float, cat: str = "user_annotation") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": {}}

    events = [event(f"step {step}", 1000 * step, 900) for step in (1, 2)]
    events += [event(phase, 1000 * step + 10, 100) for step in (1, 2) for phase in ("data", "forward", "backward")]
    events += [event("aten::mm", 1020, 50, "cpu_op"), event("gloo:all_reduce", 1100, 50, "cpu_op")]
    whole = {
        "traceEvents": events,
        "baseTimeNanoseconds": 10,
        "host_name": "n1",
        "ezpz_llm": {
            "rank": 0,
            "device": "cpu",
            "collectives": [{"kind": "all_reduce", "axes": "dp", "ranks": [0, 1], "bytes": 8}],
        },
    }
    packed = gzip.compress(mutate.json_data(rng, whole), 1)
    if rng.random() < 0.2:
        at = rng.randrange(len(packed))
        packed = packed[:at] + rng.randbytes(rng.choice([0, 1, 8])) + packed[at + 1 :]
    return read_trace(written(folder, "trace-rank0000.json.gz", packed))


@kind
def traincli(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.trainer.options import parse
    from ezpz_llm.training.trainer.plan import plan_run

    words = [
        "--model",
        "tiny-gpt2",
        "--steps",
        "20",
        "--lr",
        "1e-3",
        "--n-layer",
        "2",
        "--global-batch-size",
        "8",
        "--ds-config",
        "zero1",
        "--seed",
        "3",
        "--warmup-steps",
        "2",
    ]
    return plan_run(parse(mutate.words(rng, words)), 2)


@kind
def why(rng: Random, folder: Path) -> object:
    from ezpz_llm.why import main

    run_dir = _run(
        rng,
        folder,
        {
            "run.json": {"launch": LAUNCH, "exit": EXIT},
            "errors/rank0001.json": FAILURE,
            "errors/rank0000.json": FAILURE,
            "heartbeat/node00000.json": NODE,
        },
    )
    written(
        run_dir.path,
        "logs/rank0001.log",
        mutate.data(rng, 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: bad\n'),
    )
    return main([str(run_dir.path), *rng.choice([[], ["--json"]])])


@kind
def yaml(rng: Random, folder: Path) -> object:
    from ezpz_llm.training.trainer.options import parse

    content = mutate.data(
        rng, "steps: 20\nlr: 1e-3\nmodel: tiny-gpt2\nprompt: 'a: b'\ncompile: false\nn_layer: 2\n"
    )
    if rng.random() < 0.15:
        bomb = (
            "a: &a [x, x]\n"
            + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)) * 1
        )
        content = rng.choice(
            [
                b"[" * 5000,
                b"{" * 5000,
                b"- " * 5000,
                bomb.encode(),
                b"&a [*a]",
                b"a: " + b"1:" * 3000,
                b"!!python/object/apply:os.system [id]",
                b"!!int ''",
                b"? [a]\n: 1",
                b"<<: [1]",
            ]
        )
    return parse(["--config", str(written(folder, "run.yaml", content))])
