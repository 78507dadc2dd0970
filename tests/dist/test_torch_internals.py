"""Private names of torch: their effect in the installed version, and an error if a version lacks one."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from slowness import scaled
from torch import nn

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.dist import torch_internals

C10D = "torch.distributed.distributed_c10d"
LOOKED_UP = [
    (C10D, "_get_default_store"), (C10D, "_world"), (C10D, "_world.pg_map"), (C10D, "_world.pg_names"),
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch.utils._python_dispatch", "TorchDispatchMode"), ("torch._C", "DisableTorchFunctionSubclass"),
    ("torch.utils._pytree", "tree_leaves"), ("torch.utils._pytree", "tree_map"),
    ("torch.cpu", "_is_avx512_bf16_supported"), ("torch.cpu", "_is_amx_tile_supported"),
    *(("torch", name) for name in ("_fused_sdp_choice", "_softmax_backward_data", "_foreach_norm", "_foreach_div_",
                                   "_foreach_copy_", "_foreach_mul_")),
    *(("torch", f"Tensor.{name}") for name in ("_make_wrapper_subclass", "_base", "_version", "_is_view",
                                               "_backward_hooks", "_post_accumulate_grad_hooks")),
    ("torch", "ScriptObject._type"), ("torch", "ops.aten.add.Tensor._schema"), ("torch", "nn.Module._apply"),
]
"""Names that are looked up when the module is imported."""


class Without:
    """Object without the attribute at a path."""

    def __init__(self, value: Any, path: list[str]) -> None:
        self._value, self._path = value, path

    def __getattr__(self, name: str) -> Any:
        first, *others = self._path
        if name == first and not others:
            raise AttributeError(name)
        value = getattr(self._value, name)
        return Without(value, others) if name == first else value


@pytest.mark.parametrize(("module", "name"), LOOKED_UP)
def test_a_missing_name_is_reported_at_import(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    import_module = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda other: (
        Without(import_module(other), name.split(".")) if other == module else import_module(other)))
    with pytest.raises(UserError, match=re.escape(f"has no {module}.{name}")) as error:
        runpy.run_path(torch_internals.__file__)
    assert error.value.found.startswith(f"torch {importlib.metadata.version('torch')} ")
    assert error.value.instead.startswith("pip install 'torch")


@pytest.mark.parametrize("name", ["_parameters", "_buffers", "_non_persistent_buffers_set"])
def test_a_missing_attribute_of_modules_is_reported_at_import(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    init = nn.Module.__init__

    def init_without(module: nn.Module) -> None:
        init(module)
        vars(module).pop(name)

    monkeypatch.setattr(nn.Module, "__init__", init_without)
    with pytest.raises(UserError, match=rf"has no torch\.nn\.Module\.{name}, which ezpz_llm uses"):
        runpy.run_path(torch_internals.__file__)


@pytest.mark.parametrize(("function", "module", "name"), [
    (torch_internals.compile_times, "torch._dynamo.utils", "calculate_time_spent"),
    (torch_internals.cache_lookups, "torch._dynamo.utils", "counters"),
    (torch_internals.caches_graphs, "torch._inductor.config", "fx_graph_cache"),
    (torch_internals.only_new_entries, "torch.compiler._cache", "CacheArtifactManager"),
    (partial(torch_internals.compile_graph, None, ()), "torch._dynamo", "lookup_backend"),
    (partial(torch_internals.compile_graph, None, ()), "torch._functorch.config", "patch"),
    (torch_internals.make_fake_store, "torch.testing._internal.distributed.fake_pg", "FakeStore")])
def test_a_missing_name_of_a_module_imported_on_use_is_reported(monkeypatch: pytest.MonkeyPatch, function: Any,
                                                                module: str, name: str) -> None:
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(UserError, match=re.escape(f"has no {module}.{name}")):
        function()


def test_flight_recorders_of_all_backends_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders = {"_dump_fr_trace": b"gloo", "_dump_nccl_trace": b"nccl", "_dump_xccl_trace": b"xccl"}
    fake = SimpleNamespace(**{name: lambda *settings, dump=dump: dump for name, dump in recorders.items()})
    monkeypatch.setattr(torch._C, "_distributed_c10d", fake)
    assert sorted(torch_internals.dump_collectives()) == [b"gloo", b"nccl", b"xccl"]
    monkeypatch.setattr(torch._C, "_distributed_c10d", SimpleNamespace())
    assert torch_internals.dump_collectives() == []


def test_other_missing_attributes_are_reported_on_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"FSDPModule\._get_fsdp_state"):
        torch_internals.initialize_fsdp(nn.Module())
    with pytest.raises(UserError, match=r"FSDPState\._lazy_init"):
        torch_internals.initialize_fsdp(SimpleNamespace(_get_fsdp_state=object))
    for present, missing in (("post", "_optimizer_step_pre_hooks"), ("pre", "_optimizer_step_post_hooks")):
        with pytest.raises(UserError, match=rf"Optimizer\.{missing}"):
            torch_internals.step_hooks(SimpleNamespace(**{f"_optimizer_step_{present}_hooks": {}}))
    kind = type("DTensor", (torch.Tensor,), {})
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(DTensor=kind))
    with pytest.raises(UserError, match=r"DTensor\._local_tensor"):
        torch_internals.local_tensor(torch.ones(1).as_subclass(kind))


def test_every_private_name_is_in_this_file() -> None:
    tree = ast.parse(Path(torch_internals.__file__).read_text())
    used = {node.attr if isinstance(node, ast.Attribute) else str(node.value) for node in ast.walk(tree)
            if isinstance(node, (ast.Attribute, ast.Constant))}
    private = {part for name in used for part in name.split(".") if re.fullmatch(r"_[a-z]\w+", part)}
    assert len(private) > 30
    assert private <= set(re.findall(r"\w+", Path(__file__).read_text()))


def test_a_run_ends_with_the_missing_name() -> None:
    program = ("import sys, torch; del torch._fused_sdp_choice\n"
               "from ezpz_llm.train import main\nfrom ezpz_llm.core.base.errors import run_command\n"
               "sys.exit(run_command(main, ['--steps', '1', '--device', 'cpu']))")
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=scaled(120),
                             check=False)
    assert process.returncode == 2, process.stderr
    version = importlib.metadata.version("torch")
    assert f"error: torch {version} has no torch._fused_sdp_choice, which ezpz_llm uses" in process.stderr
    assert "pip install 'torch" in process.stderr


def test_find_returns_existing_names() -> None:
    assert torch_internals.find("torch.distributed", "ProcessGroup.BackendType.GLOO").name == "GLOO"
    with pytest.raises(UserError, match=r"has no torch\.distributed\.no_such_module\.name"):
        torch_internals.find("torch.distributed.no_such_module", "name")


@pytest.fixture
def group() -> Iterator[None]:
    """Default process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_default_store_is_that_of_the_world(group: None) -> None:
    torch_internals.default_store().set("name", "value")
    assert torch_internals.default_store().get("name") == b"value"


def test_groups_are_listed_and_counted(group: None) -> None:
    assert torch_internals.live_groups() == [dist.group.WORLD]
    assert torch_internals.count_groups() == 1
    other = dist.new_group([0])
    assert torch_internals.live_groups() == [dist.group.WORLD, other]
    assert torch_internals.count_groups() == 2


def test_a_fake_store_makes_groups_of_ranks_that_do_not_exist() -> None:
    dist.init_process_group("fake", store=torch_internals.make_fake_store(), rank=1, world_size=4)
    try:
        assert dist.get_process_group_ranks(dist.group.WORLD) == [0, 1, 2, 3]
        dist.all_reduce(torch.ones(2))
    finally:
        dist.destroy_process_group()


def test_dispatched_operators_have_a_schema_and_groups_a_type(group: None) -> None:
    calls = []

    class Recorder(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            schema = torch_internals.operator_schema(func)
            objects = [leaf for leaf in torch_internals.tree_leaves(args) if isinstance(leaf, torch.ScriptObject)]
            calls.append((schema.name, schema.is_mutable, *map(torch_internals.script_type, objects)))
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(2)
    with Recorder():
        tensor.add_(1)
        dist.all_reduce(tensor)
    assert calls[0] == ("aten::add_", True)
    name, _, *types = next(call for call in calls if call[0].startswith("c10d::"))
    assert name == "c10d::allreduce_"
    assert any("ProcessGroup" in kind for kind in types)


def test_wrapper_subclasses_have_no_storage() -> None:
    class Wrapper(torch.Tensor):
        __torch_dispatch__ = classmethod(lambda cls, *args: None)

    wrapper = torch_internals.make_wrapper(Wrapper, torch.ones(2, 3, dtype=torch.bfloat16))
    assert type(wrapper) is Wrapper
    assert (wrapper.shape, wrapper.dtype) == ((2, 3), torch.bfloat16)


def test_subclasses_can_be_passed_to_plain_functions() -> None:
    class Rejecting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any) -> Any:
            raise AssertionError

    tensor = torch.ones(2).as_subclass(Rejecting)
    with torch_internals.plain_functions():
        assert torch.equal(tensor + tensor, torch.full((2,), 2.0))


def test_trees_are_flattened_and_mapped() -> None:
    assert torch_internals.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert torch_internals.tree_map(lambda leaf: 2 * leaf, {"a": [1, (2,)]}) == {"a": [2, (4,)]}


def test_views_and_writes_are_known() -> None:
    tensor = torch.zeros(4)
    assert torch_internals.viewed_tensor(tensor) is None
    assert torch_internals.viewed_tensor(tensor[1:]) is tensor
    count = torch_internals.write_count(tensor)
    tensor[1:].add_(1)
    assert torch_internals.write_count(tensor) == count + 1


def test_hooks_of_a_tensor_are_counted() -> None:
    parameter = nn.Parameter(torch.ones(1))
    for kind in (torch_internals.BACKWARD_HOOKS, torch_internals.ACCUMULATION_HOOKS):
        assert not getattr(parameter, kind)
    parameter.register_hook(lambda gradient: None)
    parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    for kind in (torch_internals.BACKWARD_HOOKS, torch_internals.ACCUMULATION_HOOKS):
        assert len(getattr(parameter, kind)) == 1
    assert all(hasattr(parameter, name) for name in torch_internals.TENSOR_METADATA)


def test_fake_tensors_are_recognized() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert isinstance(torch.ones(2), torch_internals.FakeTensor)
    assert not isinstance(torch.ones(2), torch_internals.FakeTensor)


def test_shards_are_those_of_dtensors(group: None) -> None:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    whole = torch.ones(4)
    sharded = distribute_tensor(whole, init_device_mesh("cpu", (1,)))
    assert torch_internals.local_tensor(sharded).data_ptr() == sharded.to_local().data_ptr()
    assert torch_internals.local_tensor(whole) is whole


def test_fully_shard_is_initialized_before_the_first_pass(group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    torch_internals.initialize_fsdp(model)
    assert [part._get_fsdp_state()._is_root for part in (model, model[0])] == [True, False]


def test_moves_of_a_module_are_noticed() -> None:
    class Tied(torch_internals.MovableModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.after_move()

        def after_move(self) -> None:
            self.second.weight = self.first.weight

    with torch.device("meta"):
        model = Tied()
    assert model.to_empty(device="cpu").second.weight is model.first.weight
    assert model.bfloat16() is model
    assert model.second.weight.dtype == torch.bfloat16


def test_modules_compute_with_replaced_parameters() -> None:
    module = nn.Linear(1, 1, bias=False)
    torch_internals.parameters_by_name(module)["weight"] = torch.full((1, 1), 3.0)
    assert module(torch.ones(1, 1)).item() == 3


def test_buffers_of_the_state_dict_are_listed() -> None:
    module = nn.Module()
    module.register_buffer("first", torch.ones(1))
    module.register_buffer("absent", None)
    module.register_buffer("second", torch.ones(1), persistent=False)
    assert torch_internals.persistent_buffers(module) == ["first", "absent"]


def test_hooks_of_an_optimizer_are_those_that_were_registered() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert torch_internals.has_step_hooks(optimizer)
    assert not torch_internals.has_step_hooks(object.__new__(torch.optim.SGD))
    optimizer.register_step_pre_hook(print)
    optimizer.register_step_post_hook(repr)
    assert [list(hooks.values()) for hooks in torch_internals.step_hooks(optimizer)] == [[print], [repr]]


def test_fused_optimizers_divide_and_skip_in_their_step() -> None:
    """The private name is `_step_supports_amp_scaling`. Without it, the step would be slower, not wrong."""
    parameter = nn.Parameter(torch.zeros(1))
    assert not torch_internals.supports_grad_scale(torch.optim.AdamW([parameter]))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    assert torch_internals.supports_grad_scale(optimizer)
    assert torch_internals.supports_grad_scale(torch.optim.AdamW([parameter], fused=True))
    parameter.grad = torch.full((1,), 6.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    optimizer.step()
    assert parameter.item() == 0
    parameter.grad = torch.full((1,), 6.0)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert parameter.item() == -3


def test_cpu_features_are_not_claimed_without_the_flag_of_the_cpu() -> None:
    flags = Path("/proc/cpuinfo").read_text()
    assert not torch_internals.cpu_has_avx512_bf16() or "avx512_bf16" in flags
    assert not torch_internals.cpu_has_amx() or "amx_tile" in flags


def test_attention_has_a_choice_of_kernels() -> None:
    heads = torch.ones(1, 1, 4, 8)
    assert torch_internals.fused_attention_choice(heads, heads, heads) in range(8)


def test_the_gradient_of_softmax_is_that_of_autograd() -> None:
    logits, gradient = torch.randn(2, 5, requires_grad=True), torch.randn(2, 5)
    output = torch.softmax(logits, 1)
    (expected,) = torch.autograd.grad(output, logits, gradient)
    computed = torch_internals.softmax_backward(gradient, output.detach(), 1, torch.float32)
    torch.testing.assert_close(computed, expected)


def test_functions_of_lists_change_every_tensor() -> None:
    tensors = [torch.full((4,), 2.0), torch.full((1,), 3.0)]
    assert [norm.item() for norm in torch_internals.foreach_norm(tensors)] == [4, 3]
    torch_internals.foreach_mul_(tensors, 4.0)
    torch_internals.foreach_div_(tensors, torch.tensor(2.0))
    assert [tensor[0].item() for tensor in tensors] == [4, 6]
    torch_internals.foreach_copy_(tensors, [torch.zeros(4), torch.ones(1)])
    assert [tensor[0].item() for tensor in tensors] == [0, 1]


@pytest.mark.slow
def test_a_graph_is_compiled_with_its_backward_pass_unless_the_cache_has_it(tmp_path: Path) -> None:
    code = ("import torch\nfrom ezpz_llm.training.dist.torch_internals import cache_lookups, compile_graph\n"
            "torch.compile(lambda x: x.sin().sum(), backend=compile_graph)(torch.ones(2, requires_grad=True))\n"
            "import torch._functorch.config as config\n"
            "print(*cache_lookups(), hasattr(config, 'force_non_lazy_backward_lowering'))")
    found = []
    for _ in range(2):
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(300),
                                 env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, check=False)
        assert process.returncode == 0, process.stderr
        hits, misses, has_both = process.stdout.split()
        found.append((int(hits), int(misses)))
    graphs = 2 if has_both == "True" else 1
    assert found == [(0, graphs), (graphs, 0)]


def test_compile_times_are_seconds_by_phase() -> None:
    process = subprocess.run([sys.executable, "-c", (
        "import torch\nfrom ezpz_llm.training.dist.torch_internals import compile_times\n"
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))\n"
        "times = compile_times()\nassert times and all(value > 0 for value in times.values()), times")],
        capture_output=True, text=True, timeout=scaled(120), check=False)
    assert process.returncode == 0, process.stderr
