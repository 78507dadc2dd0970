"""torchrun: started directly if all ranks run on this node, else once per node by srun or mpiexec."""

from __future__ import annotations

from collections.abc import Callable

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.planning.dialects.work import Built, Launcher, Work
from ezpz_llm.launcher.planning.placement import Placement


def build(program: str, work: Work, starter: Callable[[], Launcher]) -> Built:
    """Return a torchrun command line. `starter` is called only if ranks run on other nodes.

    Raises:
        UserError: nodes have unequal numbers of ranks, there is no rendezvous port, or `starter` fails.
    """
    if work.here:
        # Port 0 lets two runs share a node.
        return Built((program, *_arguments(work, "c10d", "localhost:0")))
    if not work.placement.uniform:
        raise UserError("torchrun requires the same number of ranks on every node", where="--launcher torchrun",
                        instead="--ppn, or --launcher mpiexec or srun")
    launcher = starter()
    return launcher.build(_one_per_node(program, work))


def _one_per_node(program: str, work: Work) -> Work:
    """Return the work of starting one torchrun per node, each with all cores of the node.

    The site's options are omitted: they are for ranks, and would limit each torchrun to one device.
    """
    nodes = len(work.hosts)
    if nodes == 1:
        arguments = _arguments(work, "c10d", "localhost:0")
    else:
        address, port = work.master
        if port is None:
            raise UserError("torchrun on several nodes requires a rendezvous port", where="MASTER_PORT",
                            instead="set MASTER_PORT, or --launcher mpiexec or srun")
        # c10d numbers nodes alphabetically and guesses which of them hosts the store. static sets both explicitly.
        arguments = _arguments(work, "static", f"{address}:{port}")
    cores = work.cores_per_node or (work.cores_per_rank or 1) * work.placement.most
    return work._replace(command=(work.command[0], "-m", "ezpz_llm.launcher.planning.dialects.on_node", str(nodes),
                 str(work.placement.most), program, *arguments),
        placement=Placement(tuple((name, 1) for name in work.hosts), work.placement.source),
        cores_per_rank=cores,
        binding=work.binding._replace(kind="none", cores=()),
        site_options=(),
        # Each torchrun needs the devices of all its ranks.
        devices=(min((count for count in work.devices if count), default=None),) * nodes,
        devices_per_rank=None,
    )


def _arguments(work: Work, backend: str, endpoint: str) -> tuple[str, ...]:
    """Return the arguments of torchrun.

    Without `--`, torchrun would read the command's options as abbreviations of its own. `--log-dir`: otherwise
    torchrun's logs, which are empty, would go to the node's temporary folder.
    """
    return ("--nnodes", str(len(work.hosts)), "--nproc-per-node", str(work.placement.most),
            "--rdzv-backend", backend, "--rdzv-endpoint", endpoint,
            "--log-dir", str(work.node_list_path.with_name("torchrun")), "--no-python", "--", *work.command)
