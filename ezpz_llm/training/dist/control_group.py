"""Gloo group of all ranks beside the default group, for messages that need not wait for work on the devices."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import MutableMapping

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store

from ezpz_llm.launcher.basics.addresses import (
    address_towards,
    is_loopback,
    list_interfaces,
    require_interfaces,
    resolve,
)
from ezpz_llm.launcher.basics.processes import allow_many_files
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist.torch_internals import default_store

_LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
"""Variable of torch 2.8 and newer: gloo connects two ranks when they first communicate."""
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_LAST_ADDRESS = "gloo/address of the last rank"

_created: list[tuple[ProcessGroup, ProcessGroup]] = []
"""The latest default group with its control group. It is not destroyed before the default group: torch derives the
names of later groups from the number of existing ones."""


def create_control_group(info: RankInfo, on_node: bool, timeout: datetime.timedelta) -> ProcessGroup | None:
    """Create the control group, or return that of an earlier call with the same default group. Collective.

    Connects two ranks when they first communicate, because most ranks communicate with few others.

    Args:
        on_node: True if launch placed all ranks on this node.

    Returns:
        None, torch's name for the default group, if the default group uses gloo for CPU tensors.

    Raises:
        UserError: this node lacks the interface that GLOO_SOCKET_IFNAME names.
    """
    if "cpu:gloo" in torch.distributed.get_backend_config().split(","):
        return None
    default = torch.distributed.group.WORLD
    if _created and _created[0][0] is default:
        return _created[0][1]
    require_interfaces("gloo", info.rank, os.environ)
    choose_gloo_interface(PrefixStore("ezpz_llm/control", default_store()), info, on_node, os.environ)
    allow_many_files()
    before = os.environ.get(_LAZY_VARIABLE)
    os.environ.setdefault(_LAZY_VARIABLE, "1")
    try:
        control = torch.distributed.new_group(backend="gloo", timeout=timeout)
    finally:
        if before is None:
            del os.environ[_LAZY_VARIABLE]
    _created[:] = [(default, control)]
    return control


def forget_control_group() -> None:
    """Drop the control group of a default group that is destroyed. Its store listens until the last reference."""
    _created.clear()


def choose_gloo_interface(store: Store, info: RankInfo, on_node: bool, env: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME unless gloo's default, the address of the hostname, is right. Collective.

    The whole network can reach that address, unlike the loopback address, which suffices on one node. In Debian's
    /etc/hosts it is a loopback address, which other nodes cannot reach. A variable that the user has set is kept.

    Args:
        on_node: True if launch placed all ranks on this node; gloo then listens on the loopback address.
    """
    own = "127.0.0.1" if on_node else _reachable_address(store, info, env.get("MASTER_ADDR"))
    if own is None or _INTERFACE_VARIABLE in env:
        return
    for name, address in list_interfaces().items():
        if address == own:
            env[_INTERFACE_VARIABLE] = name
            return


def _reachable_address(store: Store, info: RankInfo, master: str | None) -> str | None:
    """Return this node's address towards the other nodes if its hostname has a loopback address; else None."""
    own = address_towards(master) if master else None
    if info.rank == info.world_size - 1:
        store.set(_LAST_ADDRESS, own or "")
    if not is_loopback(resolve(socket.gethostname()) or "127.0.0.1"):
        return None
    if own is None or is_loopback(own):
        # MASTER_ADDR is this node. The last rank is on another one, if there are several.
        last = store.get(_LAST_ADDRESS).decode()
        own = address_towards(last) if last else None
    return None if own is None or is_loopback(own) else own
