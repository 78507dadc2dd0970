"""Fixtures for simulated clusters and a rank server, each started on first use; environment cleanup."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from forked_ranks import Server
from simcluster.cluster import Cluster, missing
from strangers import Strangers, two_users

# Rewriting assertions takes half of the collection time unless pytest may cache the rewritten bytecode.
sys.dont_write_bytecode = False
# Tests run in parallel: threads that spin while another test has their core made some tests ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Child processes cache bytecode, too: otherwise each of about a thousand compiles the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Messages must be the same however pytest was started: as in a shell with the environment on PATH.
os.environ.pop("EZPZ_LLM_WITH_ENV", None)

_SETTLED = ("cluster", "gpu_cluster", "host_cluster")
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "EZPZ_LLM_RUN_DIR")
_FIXTURES = (*_SETTLED, "wide_cluster", "links")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(name in _FIXTURES for name in getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.cluster)
        if item.get_closest_marker("slow"):
            # A slow parameter of a test marked full: -m full would select it, too.
            item.own_markers = [mark for mark in item.own_markers if mark.name != "full"]


def _started(factory: pytest.TempPathFactory, **settings: object) -> Iterator[Cluster]:
    if (why := missing()) is not None:
        pytest.skip(why)
    with Cluster(factory.mktemp("cluster") / "sim", **settings) as started:
        yield started


@pytest.fixture(scope="session")
def recording(pytestconfig: pytest.Config) -> bool:
    """Return True under benchmarks/record.py, which makes tests write their results to benchmarks/results."""
    return pytestconfig.pluginmanager.has_plugin("recording")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Slurm and sshd on four nodes with two slots each."""
    yield from _started(tmp_path_factory)


@pytest.fixture(scope="session")
def gpu_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Slurm on two nodes with two simulated GPUs each."""
    yield from _started(tmp_path_factory, nodes=2, gpus=2)


@pytest.fixture(scope="session")
def host_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes with sshd and no scheduler."""
    yield from _started(tmp_path_factory, slurm=False)


@pytest.fixture(scope="session")
def wide_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Slurm and sshd on eight nodes with two slots each, for jobs that run concurrently across tests."""
    yield from _started(tmp_path_factory, nodes=8)


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes without a scheduler, each with a link to a switch whose bandwidth a test can set."""
    yield from _started(tmp_path_factory, slurm=False, sshd=False)


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    """Two unprivileged users of this machine."""
    with two_users() as users:
        yield users


@pytest.fixture(autouse=True)
def _no_rank() -> Iterator[None]:
    """Fail a test that leaves rank variables or a process group, which later tests would inherit."""
    yield
    left = {name: os.environ.pop(name) for name in _OF_A_RANK if name in os.environ}
    has_group = "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized()
    if has_group:
        sys.modules["torch"].distributed.destroy_process_group()
    assert not left, left
    assert not has_group, "the test left torch's default process group"


@pytest.fixture(autouse=True)
def _settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait after each test until the cluster's nodes are idle and its queue is empty."""
    yield
    for name in _SETTLED:
        if name in request.fixturenames:
            request.getfixturevalue(name).settle()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server that starts ranks in processes which have already imported torch."""
    with Server(tmp_path_factory.mktemp("jobs")) as started:
        yield started
