"""Set a process up as a rank: who it is, what it computes on, whom it talks to, where it writes."""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch

from ezpz_llm.dist.alone import say_if_alone
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.dist.device import choose_device, claim_device, device_identity
from ezpz_llm.dist.heap import keep_heap
from ezpz_llm.dist.meeting import meet, raise_together
from ezpz_llm.dist.mesh import Degrees, Mesh
from ezpz_llm.dist.stacks import answer_with_stacks
from ezpz_llm.errors import UserError
from ezpz_llm.launch.interfaces import require_interfaces
from ezpz_llm.launch.ranks import RankInfo, find_rank
from ezpz_llm.launch.variables import WORLD_SIZE_VARIABLE
from ezpz_llm.rundir import RUN_DIR_VARIABLE, RunDir, default_run_dir

_EXPORTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT",
             "OMPI_COMM_WORLD_LOCAL_RANK")
_KEPT_UNTIL_EXIT: list[torch.distributed.Work] = []


@dataclass
class Dist:
    """A rank that is set up. As a context manager it closes the process group, also after an exception.

    `backend` is None for a single process, which has no process group unless `ensure_group` makes one.
    """

    info: RankInfo
    device: torch.device
    backend: str | None
    mesh: Mesh
    run_dir: RunDir
    timeout: datetime.timedelta = datetime.timedelta(minutes=30)
    """How long a collective may take before the process group gives up."""
    environment_before: dict[str, str | None] = field(default_factory=dict)
    """What `setup` found of the variables that it set, put back by `close`."""

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def world_size(self) -> int:
        return self.info.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes for all."""
        return self.info.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def ensure_group(self) -> None:
        """Make a process group for a single process too, for engines that cannot do without."""
        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group(DEVICES[self.device.type].collectives, store=store, rank=0,
                                                 world_size=1)

    def arrange(self, *, tp: int = 1, pp: int = 1, sp: int = 1) -> None:
        """Divide the ranks into tensor-, pipeline- and sequence-parallel groups. Collective.

        Until then all ranks are data-parallel.

        Raises:
            UserError: the degrees do not divide the world.
        """
        degrees = Degrees.of_world(self.world_size, tp, pp, sp)
        if degrees != self.mesh.degrees:
            self.mesh.close()
            self.mesh = Mesh(degrees, self.rank, self.timeout)

    def close(self) -> None:
        """Leave the process group together with the others."""
        if torch.distributed.is_initialized() and self.world_size > 1:
            # Whoever drops a gloo work object last frees a tensor, which takes the GIL. In one of gloo's own
            # threads, while the interpreter shuts down, that ends the process ("terminate called without an active
            # exception", one in three ZeRO-3 runs). So the last one is kept for the main thread to drop.
            barrier = torch.distributed.barrier(async_op=True)
            barrier.wait()
            _KEPT_UNTIL_EXIT.append(barrier)
        _leave(self.environment_before)

    def __enter__(self) -> Dist:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            # The others may be anywhere: waiting for them could take for ever.
            _leave(self.environment_before)


def setup(*, device: str | None = None, run_dir: Path | None = None, name: str = "run",
          timeout_s: float = 1800) -> Dist:
    """Set this process up under whatever launcher started it, or alone. Collective.

    Args:
        device: "auto", "cuda", "xpu", "mps" or "cpu".
        run_dir: a run directory asked for; otherwise launch's, or a new one that rank 0 chooses.
        name: what a new run directory is called after.
        timeout_s: how long a collective may take before the process group gives up.

    Raises:
        UserError: broken rank variables, another world size than launch promised, no address of rank 0, no device,
            two ranks on one device, two different run directories.
    """
    answer_with_stacks(os.environ)
    info = find_rank(os.environ)
    say_if_alone(info, os.environ)
    _check_promise(info)
    timeout = datetime.timedelta(seconds=timeout_s)
    before = {name: os.environ.get(name) for name in _EXPORTED}
    try:
        chosen = choose_device(device, info) if info.world_size == 1 else _join(info, device, timeout)
        _export(info, chosen)
        if chosen.type == "cpu":
            keep_heap(os.environ)
        folder = _agree_on_run_dir(info, run_dir, name)
        mesh = Mesh(Degrees(info.world_size), info.rank, timeout)
    except BaseException:
        _leave(before)
        raise
    backend = DEVICES[chosen.type].collectives if info.world_size > 1 else None
    return Dist(info, chosen, backend, mesh, folder, timeout, before)


def _check_promise(info: RankInfo) -> None:
    promised = os.environ.get(WORLD_SIZE_VARIABLE)
    if promised is None or promised == str(info.world_size):
        return
    raise UserError(f"launch started {promised} ranks, but this process sees {info.world_size} ({info.source})",
                    where=f"rank {info.rank} on {socket.gethostname()}",
                    instead="the mpiexec that belongs to the MPI in use (launch --explain shows which one "
                            "was taken), or srun with a PMI: srun --mpi=none makes every rank a world of its own")


def _join(info: RankInfo, asked: str | None, timeout: datetime.timedelta) -> torch.device:
    """Choose a device, meet the other ranks, and make the process group."""
    device, error = None, None
    try:
        device = choose_device(asked, info)
    except UserError as found:
        error = found
    else:
        # Before the meeting: a host without the interface may not even reach the others.
        require_interfaces(DEVICES[device.type].collectives, info.rank, os.environ)
    store, address, port = meet(info, os.environ, timeout)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    if error is None:
        try:
            claim_device(store, socket.gethostname(), device.type, device_identity(device), info.rank)
        except UserError as found:
            error = found
    raise_together(store, info, error)
    torch.distributed.init_process_group(DEVICES[device.type].collectives, store=store, rank=info.rank,
                                         world_size=info.world_size, timeout=timeout,
                                         device_id=device if DEVICES[device.type].bound else None)
    return device


def _export(info: RankInfo, device: torch.device) -> None:
    """Tell libraries that read the environment themselves (DeepSpeed does) what was found.

    They take LOCAL_RANK for the number of the rank's device, which it is not where a rank sees only its own.
    """
    number = str(info.local_rank if device.index is None else device.index)
    os.environ.update(RANK=str(info.rank), WORLD_SIZE=str(info.world_size), LOCAL_RANK=number,
                      LOCAL_SIZE=str(info.local_size))
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
        # DeepSpeed refuses to start where the two differ.
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = number


def _leave(environment_before: dict[str, str | None]) -> None:
    for name, value in environment_before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _agree_on_run_dir(info: RankInfo, asked: Path | None, name: str) -> RunDir:
    given = os.environ.get(RUN_DIR_VARIABLE)
    if given and asked is not None and Path(given).resolve() != asked.resolve():
        raise UserError(f"two run directories: launch made {given}, the command asks for {asked}",
                        where=f"{RUN_DIR_VARIABLE} and --run-dir", instead="one of the two, or the same in both")
    error, outcome = None, [None, None]
    if info.rank == 0:
        run_dir = RunDir((Path(given) if given else asked or default_run_dir(name).path).absolute())
        try:
            run_dir.create()
            outcome = [str(run_dir.path), None]
        except UserError as found:
            error, outcome = found, [None, str(found)]
    if info.world_size > 1:
        torch.distributed.broadcast_object_list(outcome, src=0)
    path, failure = outcome
    if path is None:
        raise error or UserError(failure)
    return RunDir(Path(path))
