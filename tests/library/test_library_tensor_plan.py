"""Models sharded by a tensor-parallel plan, and invalid plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ezpz_llm.core.base import UserError
from ezpz_llm.training.library.tensor_plan import shard_model
from ezpz_llm.training.model.parameters import placement_of
from ezpz_llm.training.model.tensor_parallel import Share

PLAN = {"*.up": "colwise", "*.down": "rowwise", "*.norm": "replicated_with_grad_allreduce",
        "head": "colwise_gather_output"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)


def model() -> nn.Module:
    torch.manual_seed(0)
    built = nn.Sequential(Layer(), Layer())
    built.head = nn.Linear(4, 8)
    return built


def test_each_rank_has_its_shard_in_the_same_parameter_objects() -> None:
    plain = dict(model().named_parameters())
    for rank in range(2):
        sharded = model()
        before = dict(sharded.named_parameters())
        shard_model(sharded, PLAN, None, Share(rank, 2))
        after = dict(sharded.named_parameters())
        assert {name: id(after[name]) for name in after} == {name: id(before[name]) for name in before}
        for name, parameter in after.items():
            at = placement_of(name, parameter)
            (box,) = at.boxes
            assert at.shape == plain[name].shape
            assert torch.equal(parameter, plain[name][tuple(slice(*side) for side in box)])
            is_sharded = name.split(".")[-2] == "up" or name.endswith("down.weight")
            assert (parameter.numel() * 2 == plain[name].numel()) == is_sharded
            assert at.primary == (is_sharded or rank == 0)


@pytest.mark.parametrize(("plan", "message"), [
    ({"layers.*": "colwise"}, "no layer of the model is in the plan"),
    ({**PLAN, "head": "sequence_parallel"}, "head has the unsupported style 'sequence_parallel'"),
    ({**PLAN, "*.norm": "rowwise"}, "0.norm has type LayerNorm"),
    ({**PLAN, "tied": "colwise"}, "the weight of tied is tied to another"),
    ({**PLAN, "head": "colwise"}, "7 outputs of head cannot be divided over 2 ranks"),
    ({**PLAN, "dropped": "replicated"}, "dropped has dropout"),
])
def test_invalid_plans(plan: dict[str, str], message: str) -> None:
    module = model()
    if "tied" in plan:
        module.tied, module.table = nn.Linear(4, 4), nn.Embedding(4, 4)
        module.table.weight = module.tied.weight
    if "dropped" in plan:
        module.dropped = nn.Dropout(0.1)
    module.head = nn.Linear(4, 7 if message.startswith("7") else 8)
    with pytest.raises(UserError) as error:
        shard_model(module, plan, None, Share(0, 2))
    assert message in error.value.found


def test_norms_in_the_plan_may_be_frozen() -> None:
    module = model().requires_grad_(False)
    shard_model(module, PLAN, None, Share(0, 2))
    assert not any(parameter.requires_grad for parameter in module.parameters())
