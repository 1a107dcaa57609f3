"""Two processes, each with other padding, whose models of Hugging Face are sharded or copied, against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

pytest.importorskip("transformers")

from torch import Tensor, nn

from fastformer.integrations.transformers import padded, padding_free
from tests.integrations.survey import counted
from tests.integrations.tiny_transformers import ROUNDINGS, attentions, checkpoint, pairs, tiny, without_dropout
from tests.support.closeness import assert_close
from tests.support.processes import leave, run_two, two_of_gloo

NAMES = ("llama", "t5")
SIDES = (("right", "left"), ("left", None))  # of each step, for each process; without padding nothing is packed
WAYS = ("ddp", "sharded first", "sharded and checkpointed")


def loss(model: Any, name: str, side: str | None, row: int) -> Tensor:
    """Of a batch whose rows begin with another one in each process."""
    value: Tensor = model(**{key: x.roll(row, 0) for key, x in pairs(name, side).items()}).loss
    return value


def alone(name: str) -> list[dict[str, Tensor]]:
    """The gradients of eager in each step: the mean over both processes."""
    model, gradients = without_dropout(tiny(name, "eager")), []
    for sides in SIDES:
        model.zero_grad()
        sum(loss(model, name, side, rank) for rank, side in enumerate(sides)).div(2).backward()
        gradients.append({key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None})
    return gradients


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for layers in [x for x in model.modules() if isinstance(x, nn.ModuleList) and "Layer" in type(x[0]).__name__]:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(x: Tensor) -> Tensor:
    gathered: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return gathered


def work(rank: int, folder: str) -> None:
    two_of_gloo(rank, folder)
    for name in NAMES:
        expected = alone(name)
        for way in WAYS:
            model = without_dropout(tiny(name, "eager"))
            if way != "sharded first":
                assert padding_free(model).packed
            outside: Any = sharded(model) if way != "ddp" else nn.parallel.DistributedDataParallel(model)
            if way == "sharded first":
                assert padding_free(model).packed
            if way == "sharded and checkpointed":
                checkpoint(model)
            assert all(hasattr(x, "full_tensor") == (way != "ddp") for x in model.parameters())
            for sides, expected_gradients in zip(SIDES, expected, strict=True):
                outside.zero_grad()
                with counted() as calls:
                    loss(outside, name, sides[rank], rank).backward()
                again = 2 if way == "sharded and checkpointed" else 1
                assert calls["packed_attention"] == (0 if sides[rank] is None else again * attentions(name))
                gradients = {key: whole(x.grad) for key, x in model.named_parameters() if x.grad is not None}
                assert gradients.keys() == expected_gradients.keys()
                for key, x in expected_gradients.items():
                    assert_close(gradients[key], x, ROUNDINGS)
            assert padded(model).packed
    leave(rank, folder)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    run_two(work, tmp_path)
