"""Simulated clusters and a browser for tests, started when the first test wants one; and an environment that stays
clean."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from browser import Browser, find_browser
from forked_ranks import Server
from simcluster.cluster import Cluster, missing
from strangers import Strangers, two_users

# pytest rewrites every assertion, for half of the seconds of a collection, unless it may keep what it made of them.
sys.dont_write_bytecode = False
# Tests run side by side: threads that spin while another test has their core made some ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What tests start keeps bytecode, too: else each of some thousand processes compiles the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Messages are those of a shell with the environment on PATH, however pytest was started.
os.environ.pop("EZPZ_LLM_WITH_ENV", None)

_SETTLED = ("cluster", "gpu_cluster", "host_cluster")
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "EZPZ_LLM_RUN_DIR")
_FIXTURES = (*_SETTLED, "wide_cluster", "links")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(name in _FIXTURES for name in getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.cluster)
        if item.get_closest_marker("slow"):
            # One parameter of a test that is full otherwise: -m full would select it, too.
            item.own_markers = [mark for mark in item.own_markers if mark.name != "full"]


def _started(factory: pytest.TempPathFactory, **settings: object) -> Iterator[Cluster]:
    if (why := missing()) is not None:
        pytest.skip(why)
    with Cluster(factory.mktemp("cluster") / "sim", **settings) as found:
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser without a window, in which tests open pages."""
    if (program := find_browser()) is None:
        pytest.skip("no browser is installed (chromium)")
    found = Browser(program, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def recording(pytestconfig: pytest.Config) -> bool:
    """Whether to write down what is seen, which only benchmarks/record.py asks for."""
    return pytestconfig.pluginmanager.has_plugin("recording")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Slurm and sshd on four nodes with two slots each."""
    yield from _started(tmp_path_factory)


@pytest.fixture(scope="session")
def gpu_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Slurm on two nodes with two pretended GPUs each."""
    yield from _started(tmp_path_factory, nodes=2, gpus=2)


@pytest.fixture(scope="session")
def host_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four hosts with sshd and no scheduler."""
    yield from _started(tmp_path_factory, slurm=False)


@pytest.fixture(scope="session")
def wide_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Slurm and sshd on eight nodes with two slots each, for jobs that run at the same time, across tests."""
    yield from _started(tmp_path_factory, nodes=8)


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four hosts, each with one link to a switch, whose bandwidth a test may set; no scheduler."""
    yield from _started(tmp_path_factory, slurm=False, sshd=False)


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    """Two unprivileged users of this machine."""
    with two_users() as found:
        yield found


@pytest.fixture(autouse=True)
def _no_rank() -> Iterator[None]:
    """No test leaves variables of a rank behind, which the processes of later ones would take for theirs."""
    yield
    left = {name: os.environ.pop(name) for name in _OF_A_RANK if name in os.environ}
    assert not left, left


@pytest.fixture(autouse=True)
def _settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test finds, and leaves, idle nodes and no jobs."""
    yield
    for name in _SETTLED:
        if name in request.fixturenames:
            request.getfixturevalue(name).settle()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts ranks in processes that have imported torch already."""
    with Server(tmp_path_factory.mktemp("jobs")) as started:
        yield started
