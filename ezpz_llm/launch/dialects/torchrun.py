"""torchrun: by itself on this host, else one on each host, started by srun or mpiexec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ezpz_llm.base import UserError
from ezpz_llm.launch.dialects.work import Built, Launcher, Work
from ezpz_llm.launch.placement import Placement


def build(program: str, work: Work, starter: Callable[[], Launcher]) -> Built:
    """`starter` is asked for only where a torchrun must be started on another host.

    Raises:
        UserError: unequal numbers of ranks a host; no port to meet at; what `starter` raises.
    """
    if work.here:
        # Port 0 of the rendezvous lets two runs share a host.
        return Built((program, *_words(work, "c10d", "localhost:0")))
    if not work.placement.uniform:
        raise UserError("torchrun needs equally many ranks on every host", where="--launcher torchrun",
                        instead="--ppn, or --launcher mpiexec or srun")
    outer = starter()
    return outer.build(outer.program, _one_a_host(program, work))


def _one_a_host(program: str, work: Work) -> Work:
    """One torchrun a host, with all its cores; the site's options are for ranks, and would give it one device."""
    nodes = len(work.hosts)
    if nodes == 1:
        words = _words(work, "c10d", "localhost:0")
    else:
        address, port = work.master
        if port is None:
            raise UserError("torchruns on several hosts need a port to meet at", where="MASTER_PORT",
                            instead="set MASTER_PORT, or --launcher mpiexec or srun")
        # c10d numbers hosts by the alphabet and guesses which of them is the rendezvous point; static is told both.
        words = _words(work, "static", f"{address}:{port}")
    cores = work.cores_per_host or (work.cores_per_rank or 1) * work.placement.most
    return replace(
        work,
        command=(work.command[0], "-m", "ezpz_llm.launch.dialects.on_node", str(nodes), str(work.placement.most),
                 program, *words),
        placement=Placement(tuple((name, 1) for name in work.hosts), work.placement.source),
        cores_per_rank=cores,
        binding=replace(work.binding, kind="none", cores=()),
        site_options=(),
    )


def _words(work: Work, backend: str, endpoint: str) -> tuple[str, ...]:
    """Without `--`, torchrun would take the command's own options for abbreviations of its own. Its own logs, which
    are empty, would go to the host's temporary folder."""
    return ("--nnodes", str(len(work.hosts)), "--nproc-per-node", str(work.placement.most),
            "--rdzv-backend", backend, "--rdzv-endpoint", endpoint,
            "--log-dir", str(work.hosts_file.with_name("torchrun")), "--no-python", "--", *work.command)
