"""Kernel counts of a compiled step, from the graphs that torch.compile passes to its backend, without a device.

torch.compile runs on the program's fake tensors as on real ones. Each graph that inductor receives (forward,
backward, and the two of the chunked loss) is moved to a fake CUDA device, lowered, and fused by inductor's
scheduler; no code is generated or run. Each node of the schedule is a kernel, whose bytes are those that the
scheduler reports: each buffer is read or written once. Code that is not compiled, such as the optimizer, is
counted when dispatched.

Inductor splits long sums over the device's multiprocessors; it gets the number of an H100.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from roofline_counts import Counter, Kernel, Step, fake_engine, fake_samples, products_of, take_step
from torch import Tensor, fx
from torch._inductor import compile_fx, config, ir, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import get_fused_kernel_name
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import _disable_current_modes

from ezpz_llm.training.trainer.plan import RunPlan

_DEVICE = torch.device("cuda", 0)
_H100 = DeviceProperties("cuda", 0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
                         max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32)


def count_compiled(plan: RunPlan) -> Step:
    """Count the second optimizer step of a plan; the first one compiles, and allocates the moments."""
    counter = Counter()
    torch._dynamo.reset()
    inductor = functools.partial(compile_fx.compile_fx, inner_compile=functools.partial(_take_graph, counter))
    with (mock.patch.object(compile_fx, "compile_fx", inductor), config.patch(compile_threads=1),
          fake_engine(plan) as engine):
        samples = fake_samples(plan)
        take_step(engine, samples)
        counter.step = Step()
        with counter:
            take_step(engine, samples)
    return counter.step


def _take_graph(counter: Counter, graph: fx.GraphModule, inputs: Sequence[Any],
                **settings: Any) -> Callable[[Sequence[Any]], Any]:
    """Replace inductor's compilation of a graph by a function that counts the graph's kernels when called."""
    schedules: dict[tuple[Any, ...], list[Kernel]] = {}

    def run(arguments: Sequence[Any]) -> Any:
        arguments = list(arguments)
        shapes = tuple(tuple(one.shape) if isinstance(one, Tensor) else one for one in arguments)
        if shapes not in schedules:
            with _disable_current_modes():
                schedules[shapes] = list(_kernels(graph, arguments, bool(settings.get("is_backward"))))
        counter.step.kernels += schedules[shapes]
        with counter.paused():
            return graph(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _kernels(graph: fx.GraphModule, arguments: Sequence[Any], is_backward: bool) -> Iterator[Kernel]:
    """Return the kernels of a graph for arguments of these shapes, on an H100."""
    graph = copy.deepcopy(graph)
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": _DEVICE}
    mode = FakeTensorMode()
    with mode:
        inputs = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=_DEVICE)
                  if isinstance(one, Tensor) else one for one in arguments]
    with (torch.no_grad(), mock.patch.object(scheduler, "has_triton", return_value=True),
          mock.patch.object(DeviceProperties, "create", return_value=_H100)):
        # The steps of compile_fx's codegen_and_compile, up to the schedule.
        compile_fx.view_to_reshape(graph)
        FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*inputs)
        compile_fx._recursive_record_original_output_strides(graph)
        with V.set_fake_mode(mode):
            compile_fx._recursive_post_grad_passes(graph, is_inference=False)
        lowered = GraphLowering(graph, example_inputs=inputs, is_backward=is_backward, is_inference=False)
        with V.set_fake_mode(mode), V.set_graph_handler(lowered), V.set_extern_kernel_nodes([]), DebugContext():
            lowered.run(*inputs)
            lowered.init_wrapper_code()
            lowered._update_scheduler()
            yield from [_kernel(node) for node in lowered.scheduler.nodes if not _is_nothing(node)]


def _is_nothing(node: scheduler.BaseSchedulerNode) -> bool:
    """Return True for a node that launches no kernel: it allocates memory, or selects an output of a kernel."""
    return isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput)


def _kernel(node: scheduler.BaseSchedulerNode) -> Kernel:
    read, written = node.get_read_buffer_sizes(), node.get_write_buffer_sizes()
    if not isinstance(node, scheduler.ExternKernelSchedulerNode):
        return Kernel(get_fused_kernel_name(node.get_nodes(), "original_aten"), read, written)
    operator = node.node
    origin = operator.get_origin_node()
    if origin is None:  # an operator with several results
        origin = next(one for one in operator.get_origins() if one.target is operator.op_overload)
    args, kwargs = fx.map_arg((origin.args, origin.kwargs), lambda one: one.meta["val"])
    name = origin.target.overloadpacket.__name__
    return Kernel(name, read, written, *products_of(origin.target, args, kwargs, origin.meta["val"]))
