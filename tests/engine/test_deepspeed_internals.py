"""Private names and patches of DeepSpeed: their effect in the installed version, and an error if one is missing.

`tests/layout/test_deepspeed_versions.py` tests the check of names before ranks start.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from places import HELPERS
from rank_jobs import Results, results_of
from slowness import scaled
from torch import nn

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.dist import deepspeed_internals as internals, deepspeed_patches as patches
from ezpz_llm.training.dist.deepspeed_names import NAMES
from ezpz_llm.training.engine.deepspeed_import import import_deepspeed
from ezpz_llm.training.layout.ops import is_built

RUNS = {
    "every layout": ("zero2", "zero3:hpz", "pp2"),
    "ZeRO 1 and 2": ("zero1", "zero2", "zero2:offload"),
    "ZeRO 3": ("zero3", "zero3:buckets", "zero3:hpz", "zero3_offload_optimizer", "zero3_nvme:files"),
    "pipelines": ("pp2", "pp2:bf16"),
    "optimizer offload": ("zero3_offload_optimizer",),
    "compiled ops": ("zero3_offload_optimizer",),
    "offload to NVMe": ("zero3_nvme:files",),
    "optimizer offload to NVMe": ("zero3_nvme:files",),
}
NEEDS_OPS = ("zero2:offload", "zero3_offload_optimizer", "zero3_nvme:files")
IN_THIS_PROCESS = ("__compatible_ops__", "_communication_backend_name", "mpu", "_WORLD_GROUP",
                   "tensor_model_parallel")
"""Names of "every layout" that tests below use without ranks."""
ROWS = [(layouts, module, name) for layouts, modules in NAMES.items() for module, names in modules.items()
        for name in names if name not in IN_THIS_PROCESS]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    are_built = all(map(is_built, ("cpu_adam", "pin_memory", "async_io")))
    runs = sorted({run for runs in RUNS.values() for run in runs if are_built or run not in NEEDS_OPS})
    return results_of(HELPERS / "deepspeed_internals_ranks.py", tmp_path_factory.mktemp("ranks"), runs, 2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("layouts", "module", "name"), ROWS)
def test_a_name_has_its_effect(results: Results, layouts: str, module: str, name: str) -> None:
    found = {run: results[run][name] for run in RUNS[layouts] if name in results.get(run, {})}
    if not found and not set(NEEDS_OPS) & results.keys():
        pytest.skip("cpu_adam and async_io are not built (ezpz-llm doctor --build-ops)")
    assert found, "no run tries the name"
    assert all(found.values()), found


def test_import_leaves_out_what_training_does_not_use() -> None:
    program = ("import sys\nfrom ezpz_llm.training.engine.deepspeed_import import import_deepspeed\n"
               "deepspeed = import_deepspeed('cpu')\n"
               "print([name for name in ('mlflow', 'torch._dynamo', 'torch._inductor') if name in sys.modules])\n"
               "print('deepspeed.runtime.zero.muon.original_muon' in sys.modules)\n"
               "print(deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'])\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=scaled(120),
                          check=True)
    assert done.stdout.split("\n")[-4:-1] == ["[]", "True", "False"]


def test_mlflow_can_be_imported_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mlflow.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with patches.without_mlflow(), pytest.raises(ModuleNotFoundError):
        __import__("mlflow")
    loaded = __import__("mlflow")
    with patches.without_mlflow():
        assert __import__("mlflow") is loaded


def test_globals_of_an_earlier_engine_are_reset() -> None:
    deepspeed = import_deepspeed("cpu")
    groups, accelerator = deepspeed.utils.groups, deepspeed.accelerator.get_accelerator()
    groups.mpu = groups._WORLD_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = object()
    accelerator._communication_backend_name = "ccl"
    import_deepspeed("cpu")
    assert (groups.mpu, groups._WORLD_GROUP, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP) == (None, None, None)
    assert groups._get_data_parallel_world_size.__globals__["mpu"] is None  # DeepSpeed reads this global
    assert accelerator.communication_backend_name() == "gloo"


def test_deepspeed_reads_the_mark_of_sharded_parameters() -> None:
    import_deepspeed("cpu")
    from deepspeed.runtime.utils import is_model_parallel_parameter

    for is_sharded in (True, False):
        parameter = nn.Parameter(torch.ones(1))
        internals.mark_tensor_parallel(parameter, is_sharded)
        assert internals.is_marked_tensor_parallel(parameter) == is_sharded
        assert bool(is_model_parallel_parameter(parameter)) == is_sharded


def test_deepspeeds_mark_of_an_invalid_norm_becomes_inf() -> None:
    zero: Any = SimpleNamespace(get_grad_norm_direct=lambda norm: norm,
                                complete_grad_norm_calculation_for_cpu_offload=lambda norm: norm)
    patches.report_invalid_norms(zero)
    for function in vars(zero).values():
        assert function(torch.tensor(-1.0)) == torch.inf
        assert function(torch.tensor(2.0)) == 2


def test_a_replaced_module_returns_and_is_never_registered() -> None:
    """DeepSpeed's engine holds its module as a plain attribute. Before 0.19, it finds it only there."""
    engine: Any = nn.Module()
    original, other = nn.Linear(1, 1), nn.Identity()
    vars(engine)["module"] = original
    with patches.using_module(engine, other):
        assert vars(engine)["module"] is other
    assert vars(engine)["module"] is original
    assert not list(engine.children())


EMPTY = SimpleNamespace()
DEEPSPEED: Any = SimpleNamespace(
    ops=ModuleType("deepspeed.ops"), comm=ModuleType("deepspeed.comm"),
    accelerator=SimpleNamespace(get_accelerator=object), utils=SimpleNamespace(groups=ModuleType("groups")),
    runtime=SimpleNamespace(pipe=SimpleNamespace(module=SimpleNamespace(dist=ModuleType("deepspeed.comm")),
                                                 p2p=ModuleType("p2p"), schedule=ModuleType("schedule"))))
"""DeepSpeed without private names."""
USES: list[tuple[str, Callable[[], Any]]] = [
    ("deepspeed.ops.__compatible_ops__", lambda: patches.turn_off_unused_ops(DEEPSPEED)),
    ("object._communication_backend_name", lambda: patches.set_communication_backend(DEEPSPEED, "gloo")),
    ("groups.mpu", lambda: patches.forget_earlier_engines(DEEPSPEED, [])),
    ("deepspeed.comm.new_group", lambda: patches.using_groups(DEEPSPEED, object, print, print).__enter__()),
    ("deepspeed.comm.send", lambda: patches.send_within(DEEPSPEED, None)),  # type: ignore[arg-type]
    ("get_grad_norm_direct", lambda: patches.report_invalid_norms(EMPTY)),
    ("check_grad_overflow", lambda: patches.skip_overflow_check(EMPTY)),
    ("overlap_comm", lambda: patches.keep_until_reduced(EMPTY)),
    ("reduction_stream", lambda: patches.keep_until_reduced(SimpleNamespace(overlap_comm=True))),
    ("average_tensor", lambda: patches.keep_until_reduced(SimpleNamespace(overlap_comm=True, reduction_stream=1))),
    ("optimizer_swapper", lambda: patches.keep_unaligned_gradients(EMPTY)),
    ("_adjust_for_misaligned_lengths",
     lambda: patches.keep_unaligned_gradients(SimpleNamespace(optimizer_swapper=object()))),
    ("invalidate_secondary_tensor", lambda: patches.keep_second_shards(EMPTY)),
    ("module", lambda: patches.using_module(EMPTY, nn.Identity()).__enter__()),
    ("_global_grad_norm", lambda: internals.gradient_norm(EMPTY)),
    ("override_loss_scale", lambda: internals.set_loss_scale(EMPTY, 1.0)),
    ("averaged_gradients", lambda: internals.averaged_gradients(EMPTY, 0)),
    ("all_grad_tensors", lambda: internals.discard_averaged_gradients(EMPTY)),
    ("grad_partitions_flat_buffer", lambda: internals.zero_partitioned_gradients(EMPTY)),
    ("ipg_buckets", lambda: internals.bucket_buffers(SimpleNamespace(contiguous_gradients=True))),
    ("bit16_groups", lambda: internals.partitioned_groups(EMPTY)),
    ("fp32_groups_flat_partition", lambda: internals.partitioned_groups(SimpleNamespace(bf16_groups=[]))),
    ("update_lp_params", lambda: internals.refresh_parameters(EMPTY)),
    ("sub_group_to_group_id", lambda: internals.sub_groups(EMPTY)),
    ("_swappable_optimizer_subgroup", lambda: internals.is_in_files(EMPTY, 0)),
    ("_optimizer_states_and_gradient_swap_in", lambda: internals.in_memory(
        SimpleNamespace(_swappable_optimizer_subgroup=lambda number: True), 0).__enter__()),
    ("checkpoint_event_prologue", lambda: internals.refresh_shards(EMPTY, [])),
    ("empty_partition_cache", lambda: internals.release_gathered(EMPTY)),
    ("local_device", lambda: internals.device_of_shards(EMPTY)),
    ("TrainSchedule", lambda: internals.prepare_pipeline(EMPTY, DEEPSPEED, 1, 2, 0)),  # type: ignore[arg-type]
    ("total_loss", lambda: internals.begin_pipeline_step(EMPTY)),
    ("_INSTRUCTION_MAP", lambda: internals.execute_instruction(EMPTY, EMPTY)),
    ("pipe_buffers", lambda: internals.pipeline_labels(EMPTY)),
    ("non_expert_gradients", lambda: internals.flat_gradients(EMPTY)),
    *((name, lambda function=function: function(nn.Parameter(torch.ones(1)))) for name, function in (
        ("_hp_mapping", internals.fragment_of), ("ds_status", internals.is_gathered),
        ("ds_secondary_tensor", internals.discard_second_shard), ("partition_numel", internals.shard_numel),
        ("ds_numel", internals.whole_numel), ("ds_shape", internals.whole_shape),
        ("partition", internals.partition_parameter), ("_hp_grad", internals.fp32_gradient))),
]


@pytest.mark.parametrize(("name", "use"), USES)
def test_a_use_of_a_missing_name_reports_it(name: str, use: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match=rf"deepspeed [\d.]+ has no (\w+\.)*{name}, which ezpz_llm uses") as error:
        use()
    assert error.value.instead.startswith("pip install 'deepspeed")
