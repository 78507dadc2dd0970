"""Process group of all ranks: creation, comparison with the launcher's ranks, and destruction."""

from __future__ import annotations

import datetime
import os

import torch

from ezpz_llm.core.base import UserError, exit_after_uncaught_exception
from ezpz_llm.core.rundir.records import Network
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.collective_network import logged_network
from ezpz_llm.training.dist.version_rules import avoiding_settings

_KEPT_UNTIL_EXIT: list[torch.distributed.Work] = []


def check_group(info: RankInfo) -> None:
    """Compare an existing process group with the launcher's rank and world size.

    Raises:
        UserError: rank or world size differs.
    """
    in_group = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if in_group != (info.rank, info.world_size):
        raise UserError("this process already has a process group, as rank {} of {}, but its environment says rank "
                        "{} of {} ({})".format(*in_group, info.rank, info.world_size, info.source),
                        where="torch.distributed", instead="call setup() instead of init_process_group()")


def avoid_known_bugs(device_type: str) -> None:
    """Set variables that avoid known bugs of the installed versions, unless the user has set them."""
    for name, value in avoiding_settings(device_type, torch.__version__, torch.version.hip).items():
        os.environ.setdefault(name, value)


def create_group(device: torch.device, store: torch.distributed.Store, rank: int, world_size: int,
                 timeout: datetime.timedelta) -> Network:
    """Create the process group with the backend of a device, after `avoid_known_bugs`. Collective.

    Returns:
        The network of the group.
    """
    traits = DEVICES[device.type]
    avoid_known_bugs(device.type)
    with logged_network(traits.collectives) as network:
        torch.distributed.init_process_group(traits.collectives, store=store, rank=rank, world_size=world_size,
                                             timeout=timeout, device_id=device if traits.bound else None)
    return network


def destroy_group() -> None:
    """Wait for all ranks, and destroy the process group. Collective."""
    try:
        if torch.distributed.get_world_size() > 1:
            # The thread that drops the last reference to a gloo work object frees a tensor, which needs the GIL. If
            # that is one of gloo's threads during interpreter shutdown, the process aborts ("terminate called
            # without an active exception", in one of three ZeRO-3 runs). Keep the object for the main thread.
            barrier = torch.distributed.barrier(async_op=True)
            barrier.wait()
            _KEPT_UNTIL_EXIT.append(barrier)
        torch.distributed.destroy_process_group()
    except BaseException:
        skip_cleanup_at_exit()
        raise


def skip_cleanup_at_exit() -> None:
    """After an exception, exit as soon as it is printed, without destroying the process groups.

    NCCL destroys groups collectively. Other ranks may be in another collective, and this process would print its
    exception only after a timeout.
    """
    if torch.distributed.is_initialized() and (torch.distributed.get_world_size() > 1
                                               or torch.distributed.get_backend() != "gloo"):
        exit_after_uncaught_exception()
