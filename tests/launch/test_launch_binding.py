"""Cores and devices of ranks, on three kinds of topologies.

They are written by hand after the machines' guides, generated at random, or this machine's, where real ranks report
their masks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from launch_runs import clean_env, launch
from simcluster.cluster import Cluster
from slowness import scaled

from ezpz_llm.launcher.basics import devices as devices_module
from ezpz_llm.launcher.basics.devices import Devices, device_addresses
from ezpz_llm.launcher.basics.hostlist import expand_numbers, fold_numbers
from ezpz_llm.launcher.planning.binding.core_binding import BindingInputs, choose_binding, deal_cores
from ezpz_llm.launcher.planning.binding.topology import Domain, Topology, site_topology, system_topology
from ezpz_llm.launcher.planning.rank_binding import Binding, CoreOption
from ezpz_llm.launcher.planning.sites import Site, find_site

_NO_DEVICES = Devices((), "none")


def _sys(root: Path, sockets: int, domains: int, cores: int, threads: int = 2, devices: dict[str, int] | None = None
         ) -> Path:
    """Create a /sys of a node with `domains` NUMA domains per socket and `cores` cores per domain.

    As on all these machines, the second hardware threads are numbered after the first threads of all cores.
    """
    count = sockets * domains * cores
    nodes: dict[int, list[int]] = {}
    for cpu in range(count * threads):
        core = cpu % count
        folder = root / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core // (domains * cores)}\n")
        siblings = ",".join(str(core + count * thread) for thread in range(threads))
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
        nodes.setdefault(core // cores, []).append(cpu)
    (root / "devices/system/cpu/online").write_text(f"0-{count * threads - 1}\n")
    for node, cpus in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(fold_numbers(tuple(cpus)) + "\n")
    # Device memory appears as a domain without CPUs.
    (root / "devices/system/node/node90").mkdir()
    (root / "devices/system/node/node90/cpulist").write_text("\n")
    for address, node in (devices or {}).items():
        (root / f"bus/pci/devices/{address}").mkdir(parents=True)
        (root / f"bus/pci/devices/{address}/numa_node").write_text(f"{node}\n")
    return root


_MACHINES = {"aurora": (2, 1, 52), "polaris": (1, 4, 8), "frontier": (1, 4, 16), "perlmutter": (1, 4, 16)}


def _topologies(folder: Path, name: str) -> list[Topology]:
    """Return a site's topology from its file, and from a /sys as on its compute nodes."""
    site = find_site(name, {})
    sockets, domains, cores = _MACHINES[name]
    every = range(2 * sockets * domains * cores)
    seen = system_topology(site, _NO_DEVICES, _sys(folder / name, sockets, domains, cores), every)
    assert seen is not None
    return [site_topology(site), seen]


_OPTIONS = {"srun": CoreOption.SCHEDULER, "pals": CoreOption.COUNT, "mpiexec": CoreOption.LIST,
            "torchrun": CoreOption.NONE}


def _bind(name: str, topology: Topology | None, ranks: int, launcher: str = "pals", **changes: object) -> Binding:
    site = find_site(name, {})
    around = {"ranks": ranks, "hosts": 2, "launcher": launcher, "option": _OPTIONS[launcher], "topology": topology,
              "allotted": None, "devices": tuple(map(str, range(ranks)))}
    return choose_binding("auto", site, BindingInputs(**(around | changes)))


@pytest.mark.parametrize(("name", "ranks", "cores"), [
    ("aurora", 12, "1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100"),
    ("aurora", 6, "1-17:18-34:35-51:53-69:70-86:87-103"),
    ("aurora", 5, "1-17:18-34:35-51:53-77:78-102"),
    ("aurora", 1, "1-51,53-103"),
    ("aurora", 102, ":".join(str(core) for core in range(104) if core not in (0, 52))),
    ("polaris", 4, "0-7:8-15:16-23:24-31"),
    ("polaris", 8, "0-3:4-7:8-11:12-15:16-19:20-23:24-27:28-31"),
    ("polaris", 2, "0-15:16-31"),
    ("polaris", 3, "0-9:10-19:20-29"),
])
def test_the_cores_of_a_site(tmp_path: Path, name: str, ranks: int, cores: str) -> None:
    for topology in _topologies(tmp_path, name):
        binding = _bind(name, topology, ranks)
        assert ":".join(binding.cores) == cores
        least = min(len(expand_numbers(own)) for own in cores.split(":"))
        assert binding.cpus_per_rank == binding.cores_per_rank == least
        assert binding.kind == find_site(name, {}).binding


def test_srun_is_told_a_number_of_cores(tmp_path: Path) -> None:
    for name, ranks, cpus, cores in (("frontier", 8, 7, 7), ("frontier", 5, 11, 11), ("perlmutter", 4, 32, 16)):
        binding = _bind(name, site_topology(find_site(name, {})), ranks, "srun")
        assert (binding.kind, binding.cpus_per_rank, binding.cores_per_rank) == ("depth", cpus, cores)
        assert binding.cores == ()
        # Other launchers get a list of cores.
        assert _bind(name, site_topology(find_site(name, {})), ranks, "mpiexec").kind == "list"
    # With one torchrun per node, Slurm must count all hardware threads, although ranks use only the first ones.
    spelled = _bind("perlmutter", site_topology(find_site("perlmutter", {})), 4, "torchrun", allotted=128)
    assert (spelled.cores[1], spelled.cpus_per_rank, spelled.cpus_per_host) == ("16-31", 32, 128)
    binding = _bind("generic", None, 4, "srun", allotted=10)
    assert (binding.kind, binding.cpus_per_rank) == ("depth", 2)
    assert _bind("generic", None, 4, "srun").cpus_per_rank is None


def test_a_plan_without_a_list_of_cores_states_the_reason(tmp_path: Path) -> None:
    site = find_site("generic", {})
    root = _sys(tmp_path, 1, 2, 4)
    whole = system_topology(site, _NO_DEVICES, root, range(16))
    part = system_topology(site, _NO_DEVICES, root, (0, 1, 8, 9, 3))
    for topology, ranks, changes, why in (
        (None, 2, {}, "cores are unknown on this node"),
        (whole, 9, {}, "9 ranks share 8 cores"),
        (whole, 1, {}, "the only rank of a node has all its cores"),
        (whole, 2, {"allotted": 4}, "the job has 4 of a node's 16 CPUs"),
        (part, 2, {}, "only some of this node's cores"),
    ):
        binding = _bind("generic", topology, ranks, "mpiexec", **changes)
        assert (binding.kind, binding.cores) == ("none", ())
        assert why in binding.source
    assert _bind("generic", whole, 2, "mpiexec", allotted=4).cores_per_rank == 1
    # Half of a site's node.
    assert _bind("perlmutter", site_topology(find_site("perlmutter", {})), 2, "mpiexec", allotted=64).kind == "none"
    assert _bind("aurora", site_topology(find_site("aurora", {})), 103).source == "103 ranks share 102 cores"
    # On one node all ranks have its mask. A core's two threads stay together, and a single thread counts as a core.
    assert _bind("generic", part, 3, "mpiexec", hosts=1).cores == ("0,8", "1,9", "3")
    around = BindingInputs(2, 1, "torchrun", CoreOption.NONE, whole, None, (None, None))
    assert choose_binding("auto", site, around).by_shim
    assert choose_binding("none", site, around) == Binding(devices=(None, None), cpus_per_rank=8, cpus_per_host=16,
                                                           cores_per_rank=4, source="--bind none")


def test_a_generic_host_is_bound_by_socket_and_domain(tmp_path: Path) -> None:
    site = find_site("generic", {})
    two = system_topology(site, _NO_DEVICES, _sys(tmp_path / "two", 2, 2, 4), range(32))
    firsts = {ranks: [fold_numbers(tuple(core[0] for core in cores)) for cores in deal_cores(two, ranks)]
              for ranks in (3, 4)}
    assert firsts == {3: ["0-3", "4-7", "8-15"], 4: ["0-3", "4-7", "8-11", "12-15"]}
    assert [len(cores) for cores in deal_cores(two, 6)] == [2] * 6
    assert deal_cores(two, 17) == deal_cores(two, 0) == ()
    # With a mask that leaves one core on a socket, ranks are distributed by cores.
    holes = system_topology(site, _NO_DEVICES, tmp_path / "two", (*range(8), 8))
    assert [len(cores) for cores in deal_cores(holes, 8)] == [1] * 8
    assert system_topology(site, _NO_DEVICES, tmp_path / "nowhere", (0,)) is None


def test_the_distance_to_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "driver"
    places = {"0000:07:00.0": 1, "0000:46:00.0": 3, "0000:c1:00.0": 2, "0000:e1:00.0": -1}
    for address in places:
        (driver / address.upper()).mkdir(parents=True)
    monkeypatch.setattr(devices_module, "_NVIDIA", driver)
    devices = Devices(("0", "1", "2", "3"), "driver")
    seen = system_topology(Site(), devices, _sys(tmp_path / "sys", 2, 2, 4, devices=places), range(32))
    assert seen.devices == {"0": 1, "1": 3, "2": 2}
    assert _bind("generic", seen, 4, "mpiexec").distances == ("same socket", "far", "near", None)
    assert system_topology(Site(), Devices(("GPU-8932f937",), "CUDA_VISIBLE_DEVICES"), tmp_path / "sys",
                           range(32)).devices == {}


def test_the_site_file_places_devices_unknown_to_linux(tmp_path: Path) -> None:
    # Linux numbers this node's domains in a different order than the site file.
    root = _sys(tmp_path, 2, 1, 52)
    for node, cpus in (("node0", "52-103,156-207"), ("node1", "0-51,104-155")):
        (root / f"devices/system/node/{node}/cpulist").write_text(cpus)
    seen = system_topology(find_site("aurora", {}), Devices(tuple(map(str, range(12))), "site aurora"), root,
                           range(208))
    assert seen.devices == dict.fromkeys(map(str, range(6)), 1) | dict.fromkeys(map(str, range(6, 12)), 0)
    assert set(_bind("aurora", seen, 12).distances) == {"near"}


def test_amd_devices_have_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # From the kernel's documentation: location_id is bus << 8 | device << 3 | function.
    for number, (gpu, place) in enumerate([(0, 0), (4711, 0xC100), (4712, 0xD109)]):
        node = tmp_path / "nodes" / str(number)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{gpu}\n")
        (node / "properties").write_text(f"cpu_cores_count 0\nlocation_id {place}\ndomain 1\n")
    monkeypatch.setattr(devices_module, "_NVIDIA", tmp_path / "nothing")
    monkeypatch.setattr(devices_module, "_AMD", tmp_path / "nodes")
    assert device_addresses() == ("0001:c1:00.0", "0001:d1:01.1")


@st.composite
def _any_topology(draw: st.DrawFn) -> Topology:
    """Draw a topology: sockets and domains of any size, cores with one or two threads, and gaps in the numbers."""
    sizes = draw(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=1, max_size=4))
    count = sum(map(sum, sizes))
    holes = draw(st.sets(st.integers(0, max(0, count - 1)), max_size=count))
    threads = draw(st.integers(1, 2))
    domains, core = [], 0
    for socket, parts in enumerate(sizes):
        for size in parts:
            numbers: Collection[int] = [number for number in range(core, core + size) if number not in holes]
            cores = tuple(tuple(number + count * thread for thread in range(threads)) for number in numbers)
            domains.append(Domain(len(domains), socket, cores))
            core += size
    return Topology(tuple(domains), "drawn")


@settings(deadline=None)
@given(_any_topology(), st.integers(1, 60))
def test_any_ranks_on_any_host(topology: Topology, ranks: int) -> None:
    dealt = deal_cores(topology, ranks)
    if ranks > len(topology.cores):
        assert dealt == ()
        return
    assert len(dealt) == ranks
    assert all(dealt)
    handed = [core for cores in dealt for core in cores]
    assert len(handed) == len(set(handed))
    # In the node's order, without cores that ranks must not use: reserved cores belong to no domain.
    places = [topology.cores.index(core) for core in handed]
    assert places == sorted(places)
    by_socket: dict[int, list[int]] = {}
    for cores in dealt:
        sockets = {domain.socket for domain in topology.domains_of([cpu for core in cores for cpu in core])}
        if ranks > len(topology.sockets):
            assert len(sockets) == 1
            by_socket.setdefault(sockets.pop(), []).append(len(cores))
    for socket, sizes in by_socket.items():
        assert len(set(sizes)) == 1
        own = sum(len(domain.cores) for domain in topology.domains if domain.socket == socket)
        assert own - sum(sizes) < len(sizes), "a core more for each was left over"


@settings(deadline=None)
@given(st.integers(1, 102), st.sets(st.integers(0, 103), max_size=90))
def test_no_rank_gets_a_reserved_core(ranks: int, reserved: set[int]) -> None:
    site = Site("drawn", cores=("0-51", "52-103"), sockets=2, binding="list", reserved_cores=",".join(
        str(core) for core in sorted(reserved)))
    topology = site_topology(site)
    inputs = BindingInputs(ranks, 1, "pals", CoreOption.COUNT, topology, None, (None,) * ranks)
    binding = choose_binding("auto", site, inputs)
    used = [cpu for cores in binding.cores for cpu in expand_numbers(cores)]
    assert not reserved & set(used)
    assert len(used) == len(set(used))
    assert (len(binding.cores) == ranks) == (ranks <= 104 - len(reserved))


_LOOK = ("import json, os; print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'],"
         " os.environ.get('EZPZ_LLM_BIND')]))")


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_real_ranks_run_on_their_cores(tmp_path: Path, launcher: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core only")
    done = launch(tmp_path, "--explain", "-n", "2", "--launcher", launcher, "--run-dir", "run",
                  sys.executable, "-c", _LOOK)
    assert done.returncode == 0, done.stderr
    logs = [tmp_path / f"run/logs/rank000{rank}.log" for rank in range(2)]
    seen = [json.loads(log.read_text().splitlines()[-1]) for log in logs]
    half = len(cores) // 2
    plan = [line.split() for line in done.stderr.splitlines() if line.lstrip().startswith(("0  ", "1  "))]
    for rank, (mask, threads, handed_on) in enumerate(seen):
        assert mask == cores[half * rank:half * (rank + 1)]
        assert plan[rank][3] == fold_numbers(tuple(mask))
        assert int(threads) <= half
        assert handed_on is None
    assert ("set by the rank shim" in done.stderr) == (launcher == "torchrun")
    if launcher == "torchrun":
        free = launch(tmp_path, "-n", "2", "--launcher", launcher, "--bind", "none", sys.executable, "-c", _LOOK)
        assert json.loads(free.stdout.splitlines()[-1])[0] == cores


@pytest.mark.parametrize("launcher", ["mpiexec", pytest.param("torchrun", marks=pytest.mark.full)])
def test_ranks_on_other_hosts_run_on_their_cores(cluster: Cluster, tmp_path: Path, launcher: str) -> None:
    look = f"import os; print(os.uname().nodename, end=' '); {_LOOK}"
    done = cluster.run("launch", "--hosts", "n1,n2", "--ppn", "2", "--launcher", launcher, "--run-dir",
                       tmp_path / "run", sys.executable, "-c", look, node="n1", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    for rank in range(4):
        host, seen = (tmp_path / f"run/logs/rank000{rank}.log").read_text().splitlines()[-1].split(" ", 1)
        assert host == f"n{rank // 2 + 1}"
        assert json.loads(seen)[0] == cores[half * (rank % 2):half * (rank % 2 + 1)]


def test_a_node_without_the_cores_is_reported() -> None:
    program = ("import os; from ezpz_llm.launcher.on_nodes.shim.rank import bind_to_cores;"
               " from ezpz_llm.launcher.basics.ranks import find_rank; bind_to_cores(find_rank({}), os.environ);"
               " print(sorted(os.sched_getaffinity(0)))")
    done = subprocess.run([sys.executable, "-c", program], env=clean_env(EZPZ_LLM_BIND="9000-9007"),
                          timeout=scaled(60), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == sorted(os.sched_getaffinity(0))
    assert f"rank 0 on {os.uname().nodename} is not bound to cores 9000-9007: Invalid argument" in done.stderr
