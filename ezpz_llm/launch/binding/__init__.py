"""Which cores and which device each rank of a host gets."""

from ezpz_llm.launch.binding.choose import Binding, Circumstances, bind
from ezpz_llm.launch.binding.deal import deal
from ezpz_llm.launch.binding.system import system_topology
from ezpz_llm.launch.binding.topology import Domain, Topology, site_topology

__all__ = ["Binding", "Circumstances", "Domain", "Topology", "bind", "deal", "site_topology", "system_topology"]
