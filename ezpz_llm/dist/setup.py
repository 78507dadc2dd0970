"""Set a process up as a rank: who it is, what it computes on, whom it talks to, where it writes."""

from __future__ import annotations

import ctypes
import datetime
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch

from ezpz_llm.base import UserError, end_at_once_when_shown
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.dist.device import choose_device, claim_device, device_identity
from ezpz_llm.dist.heartbeat import answer_with_stacks
from ezpz_llm.dist.mesh import Degrees, Mesh
from ezpz_llm.dist.optional_work import OptionalWork
from ezpz_llm.dist.rendezvous import raise_before_group, rendezvous
from ezpz_llm.launch.addresses import own_interfaces, require_interfaces
from ezpz_llm.launch.owner import Ownership, own
from ezpz_llm.launch.ranks import ALONE, RankInfo, find_rank
from ezpz_llm.launch.schedulers import find_allocation
from ezpz_llm.launch.variables import RUN_ID_VARIABLE, WORLD_SIZE_VARIABLE
from ezpz_llm.rundir import RUN_DIR_VARIABLE, RunDir, SideFiles, default_run_dir, redact_words

_EXPORTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT",
             "OMPI_COMM_WORLD_LOCAL_RANK", "GLOO_SOCKET_IFNAME")
_KEPT_UNTIL_EXIT: list[torch.distributed.Work] = []


@dataclass
class Dist:
    """A rank that is set up. As a context manager it leaves the process group; after an exception it does not wait
    for the others, and the process ends once the exception is printed.

    `backend` is None for a single process, which has no process group unless `ensure_group` makes one.
    """

    info: RankInfo
    device: torch.device
    backend: str | None
    mesh: Mesh
    run_dir: RunDir
    timeout: datetime.timedelta = datetime.timedelta(minutes=30)
    """Timeout of a collective."""
    environment_before: dict[str, str | None] = field(default_factory=dict)
    """Values from before `setup` of the variables that it set; `close` restores them."""
    ownership: Ownership | None = None
    """Ownership of the run directory, on rank 0 if launch does not hold it."""
    side: SideFiles = field(default_factory=SideFiles)
    """Files that this rank writes beside the training."""
    owns_group: bool = True
    """True if `setup` created the process group; `close` then leaves it."""
    optional: OptionalWork = field(default_factory=OptionalWork)
    """Runner of optional work, such as samples and plots, whose failure is only a warning."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.info.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.info.world_size

    @property
    def is_main(self) -> bool:
        """True if this is rank 0, the one that prints and writes for all."""
        return self.info.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def ensure_group(self) -> None:
        """Make a process group for a single process too, for engines that cannot do without."""
        if not torch.distributed.is_initialized():
            _make_group(self.device, torch.distributed.HashStore(), 0, 1, self.timeout)

    def arrange(self, *, tp: int = 1, pp: int = 1, sp: int = 1) -> None:
        """Divide the ranks into tensor-, pipeline- and sequence-parallel groups. Collective.

        Until then all ranks are data-parallel.

        Raises:
            UserError: the degrees do not divide the world.
        """
        degrees = Degrees.of_world(self.world_size, tp, pp, sp)
        if degrees != self.mesh.degrees:
            self.mesh = Mesh(degrees, self.rank, groups=self.mesh.rank_groups)

    def close(self) -> None:
        """Leave the process group together with the others."""
        self._let_go()
        if self.owns_group and torch.distributed.is_initialized():
            _leave_group()

    def _let_go(self) -> None:
        self.optional.store = None  # the store of rank 0 listens as long as there is a reference to it
        if self.ownership is not None:
            self.ownership.release()
        _restore(self.environment_before)

    def __enter__(self) -> Dist:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._let_go()
            _abandon()


def setup(*, device: str | None = None, run_dir: Path | None = None, name: str = "run",
          timeout_s: float = 1800, keeps_memory: bool = True) -> Dist:
    """Set this process up under whatever launcher started it, or alone. Collective.

    A process group that is there already is used as it is, and left to whoever made it.

    Args:
        device: "auto", "cuda", "xpu", "mps" or "cpu".
        run_dir: a run directory asked for; otherwise launch's, or a new one that rank 0 chooses.
        name: what a new run directory is called after.
        timeout_s: how long a collective may take before the process group gives up.
        keeps_memory: on a CPU, see `keep_freed_memory`.

    Raises:
        UserError: broken rank variables, another world size than launch promised, no address of rank 0, no device,
            two ranks on one device, two different run directories, or one that another run is writing to.
    """
    answer_with_stacks(os.environ)
    info = find_rank(os.environ)
    warn_if_single_process(info, os.environ)
    _check_promise(info)
    timeout = datetime.timedelta(seconds=timeout_s)
    before = {name: os.environ.get(name) for name in _EXPORTED}
    is_there = torch.distributed.is_initialized()
    if is_there:
        _check_group(info)
    try:
        store: torch.distributed.Store | None = None
        if is_there or info.world_size == 1:
            chosen = choose_device(device, info)
        else:
            chosen, store = _join(info, device, timeout)
        _export(info, chosen)
        if chosen.type == "cpu" and keeps_memory:
            keep_freed_memory(os.environ)
        folder, ownership = _agree_on_run_dir(info, run_dir, name)
        mesh = Mesh(Degrees(info.world_size), info.rank, timeout, chosen)
    except BaseException:
        _restore(before)
        _abandon()
        raise
    backend = None
    if info.world_size > 1:
        backend = torch.distributed.get_backend() if is_there else DEVICES[chosen.type].collectives
    return Dist(info, chosen, backend, mesh, folder, timeout, before, ownership, owns_group=not is_there,
                optional=OptionalWork(info.rank, info.world_size, store))


def _check_group(info: RankInfo) -> None:
    """Compare a process group that is there already with what the launcher says.

    Raises:
        UserError: they differ.
    """
    found = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if found != (info.rank, info.world_size):
        raise UserError("this process has a process group already, as rank {} of {}; its environment says rank "
                        "{} of {} ({})".format(*found, info.rank, info.world_size, info.source),
                        where="torch.distributed", instead="call setup() in place of init_process_group()")


def _check_promise(info: RankInfo) -> None:
    promised = os.environ.get(WORLD_SIZE_VARIABLE)
    if promised is None or promised == str(info.world_size):
        return
    raise UserError(f"launch started {promised} ranks, but this process sees {info.world_size} ({info.source})",
                    where=f"rank {info.rank} on {socket.gethostname()}",
                    instead="the mpiexec that belongs to the MPI in use (launch --explain shows which one "
                            "was taken), or srun with a PMI: srun --mpi=none makes every rank a world of its own")


def _join(info: RankInfo, asked: str | None,
          timeout: datetime.timedelta) -> tuple[torch.device, torch.distributed.Store]:
    """Choose a device, meet the other ranks in a store, and make the process group."""
    device, error = None, None
    try:
        device = choose_device(asked, info)
    except UserError as found:
        error = found
    else:
        # Before the rendezvous: a host without the interface may not even reach the others.
        require_interfaces(DEVICES[device.type].collectives, info.rank, os.environ)
    met = rendezvous(info, os.environ, timeout)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = met.address, str(met.port)
    if met.on_node and "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo listens on the address of the host's name otherwise, where the whole network reaches it.
        for name, address in own_interfaces().items():
            if address == "127.0.0.1":
                os.environ["GLOO_SOCKET_IFNAME"] = name
    if device is not None:
        try:
            claim_device(met.store, socket.gethostname(), device.type, device_identity(device), info.rank)
        except UserError as found:
            error = found
    raise_before_group(met.store, info, error, met.secret)
    _make_group(device, met.store, info.rank, info.world_size, timeout)
    return device, met.store


def _make_group(device: torch.device, store: torch.distributed.Store, rank: int, world_size: int,
                timeout: datetime.timedelta) -> None:
    traits = DEVICES[device.type]
    torch.distributed.init_process_group(traits.collectives, store=store, rank=rank, world_size=world_size,
                                         timeout=timeout, device_id=device if traits.bound else None)


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


def _restore(environment_before: dict[str, str | None]) -> None:
    for name, value in environment_before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _leave_group() -> None:
    """Leave the process group, all ranks together."""
    try:
        if torch.distributed.get_world_size() > 1:
            # Whoever drops a gloo work object last frees a tensor, which takes the GIL. In one of gloo's own
            # threads, while the interpreter shuts down, that ends the process ("terminate called without an
            # active exception", one in three ZeRO-3 runs). So the last one is kept for the main thread to drop.
            barrier = torch.distributed.barrier(async_op=True)
            barrier.wait()
            _KEPT_UNTIL_EXIT.append(barrier)
        torch.distributed.destroy_process_group()
    except BaseException:
        _abandon()
        raise


def _abandon() -> None:
    """After an exception: leave the process groups as they are.

    The other ranks may be in a collective, and NCCL's groups are destroyed together: the process would wait for
    them, its exception unprinted, until the collective times out.
    """
    if torch.distributed.is_initialized() and (torch.distributed.get_world_size() > 1
                                               or torch.distributed.get_backend() != "gloo"):
        end_at_once_when_shown()


def _agree_on_run_dir(info: RankInfo, asked: Path | None, name: str) -> tuple[RunDir, Ownership | None]:
    given = os.environ.get(RUN_DIR_VARIABLE)
    if given and asked is not None and Path(given).resolve() != asked.resolve():
        raise UserError(f"two run directories: launch made {given}, the command asks for {asked}",
                        where=f"{RUN_DIR_VARIABLE} and --run-dir", instead="one of the two, or the same in both")
    ownership: Ownership | None = None
    error: UserError | None = None
    outcome: list[str | None] = [None, None]
    if info.rank == 0:
        run_dir = RunDir((Path(given) if given else asked or default_run_dir(name).path).absolute())
        try:
            run_dir.create()
            if RUN_ID_VARIABLE not in os.environ:
                ownership = own(run_dir, "", os.environ)
            outcome = [str(run_dir.path), None]
        except UserError as found:
            error, outcome = found, [None, str(found)]
    if info.world_size > 1:
        torch.distributed.broadcast_object_list(outcome, src=0)
    path, failure = outcome
    if path is None:
        if info.world_size > 1:
            # All ranks know of it: a program that catches the error can go on, or end, without a group.
            _leave_group()
        raise error or UserError(failure or "rank 0 has no run directory")
    return RunDir(Path(path)), ownership


# A single process in a job of several hosts: most often somebody forgot to launch it.
def warn_if_single_process(info: RankInfo, env: Mapping[str, str],
                           command: Sequence[str] = tuple(sys.orig_argv)) -> None:
    """Say on standard error how to start ranks on all hosts of the job, where nothing has started this process as
    one of them. `command` is what was typed."""
    if info.source != ALONE or RUN_ID_VARIABLE in env:
        return
    try:
        job = find_allocation(env)
    except UserError:
        # Whoever is content with one process needs no job that can be read.
        return
    if len(job.hosts) > 1:
        print(f"one process on one of the {len(job.hosts)} hosts of {job.scheduler} job {job.job_id}; for ranks on"
              f" all of them: launch {shlex.join(redact_words(command))}", file=sys.stderr, flush=True)


# glibc's malloc.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Names of parameters in malloc.h."""
_USERS_OWN = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Stop glibc from returning freed memory to the kernel between steps.

    glibc gives large blocks back to the system at once, and gets them anew, page by page and zeroed, in the next
    step: a sixth of the processor time of a step with a large vocabulary. torch pools memory of accelerators only.
    Left alone where the user has chosen the settings, and where the C library is not glibc; an allocator in glibc's
    place does not ask for its settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(environ.get(name) for name in _USERS_OWN):
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
