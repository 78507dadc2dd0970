"""Which cores and which device each rank of a host gets."""

from ezpz_llm.launch.binding.choose import Binding, BindingInputs, bind, deal
from ezpz_llm.launch.binding.topology import Domain, Topology, site_topology, system_topology

__all__ = ["Binding", "BindingInputs", "Domain", "Topology", "bind", "deal", "site_topology", "system_topology"]
