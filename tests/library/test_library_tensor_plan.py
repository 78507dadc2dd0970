"""A model that is divided by a plan: what each rank has of it, and plans that cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ezpz_llm.base import UserError
from ezpz_llm.library.tensor_plan import divide
from ezpz_llm.model.parameters import placement_of
from ezpz_llm.model.tensor_parallel import Share

PLAN = {"*.up": "colwise", "*.down": "rowwise", "*.norm": "replicated_with_grad_allreduce",
        "head": "colwise_gather_output"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(Layer(), Layer())
    made.head = nn.Linear(4, 8)
    return made


def test_each_rank_has_its_share_and_parameters_stay_the_same_objects() -> None:
    plain = dict(model().named_parameters())
    for rank in range(2):
        mine = model()
        before = dict(mine.named_parameters())
        divide(mine, PLAN, None, Share(rank, 2))
        found = dict(mine.named_parameters())
        assert {name: id(one) for name, one in found.items()} == {name: id(one) for name, one in before.items()}
        for name, parameter in found.items():
            at = placement_of(name, parameter)
            (box,) = at.boxes
            assert at.shape == plain[name].shape
            assert torch.equal(parameter, plain[name][tuple(slice(*side) for side in box)])
            divided = name.split(".")[-2] == "up" or name.endswith("down.weight")
            assert (parameter.numel() * 2 == plain[name].numel()) == divided
            assert at.primary == (divided or rank == 0)


@pytest.mark.parametrize(("plan", "said"), [
    ({"layers.*": "colwise"}, "no layer of the model is in the plan"),
    ({**PLAN, "head": "sequence_parallel"}, "head has the style 'sequence_parallel'"),
    ({**PLAN, "*.norm": "rowwise"}, "0.norm is a LayerNorm"),
    ({**PLAN, "tied": "colwise"}, "the weight of tied is tied to another"),
    ({**PLAN, "head": "colwise"}, "7 outputs of head cannot be divided over 2 ranks"),
    ({**PLAN, "dropped": "replicated"}, "dropped has dropout"),
])
def test_a_plan_that_cannot_be_is_named(plan: dict[str, str], said: str) -> None:
    made = model()
    if "tied" in plan:
        made.tied, made.table = nn.Linear(4, 4), nn.Embedding(4, 4)
        made.table.weight = made.tied.weight
    if "dropped" in plan:
        made.dropped = nn.Dropout(0.1)
    made.head = nn.Linear(4, 7 if said.startswith("7") else 8)
    with pytest.raises(UserError) as error:
        divide(made, plan, None, Share(0, 2))
    assert said in error.value.found
