"""Two processes under DistributedDataParallel, each with other padding, against one process that sees both batches."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastformer
from tests.support.closeness import assert_close, random
from tests.support.processes import leave, run_two, two_of_gloo

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")

WORLD, B, S, T, D = 2, 3, 5, 4, 8
# Sentences of both processes; in the first step the second process has nothing but padding.
LENGTHS = [([[5, 2, 0], [0, 0, 0]], [[1, 4, 3], [0, 0, 0]]), ([[1, 1, 2], [5, 5, 5]], [[2, 0, 4], [4, 4, 3]])]


def transformer() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Transformer(D, 2, 1, 1, 16, 0.0, batch_first=True, dtype=torch.float64)
    fastformer.convert(model)
    return model


def transformer_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    torch.manual_seed(10 * step + rank)
    source, target = random(B, S, D, grad=False), random(B, T, D, grad=False)
    hidden = [
        torch.arange(n) >= torch.tensor(side[rank])[:, None] for n, side in zip((S, T), LENGTHS[step], strict=True)
    ]
    masks = dict(zip(("src_key_padding_mask", "tgt_key_padding_mask"), hidden, strict=True))
    return model(source, target, memory_key_padding_mask=hidden[0], **masks).pow(3).sum()


def trained(wrap: Callable[[nn.Module], nn.Module], loss: Callable[[nn.Module, int], Tensor]) -> dict[str, Tensor]:
    """The parameters of a model after two steps."""
    model = transformer()
    wrapped, optimizer = wrap(model), torch.optim.SGD(model.parameters(), 0.01)
    for step in range(2):
        optimizer.zero_grad()
        loss(wrapped, step).backward()
        optimizer.step()
    return model.state_dict()


def work(rank: int, folder: str) -> None:
    two_of_gloo(rank, folder)
    found = trained(DistributedDataParallel, lambda model, step: transformer_loss(model, step, rank))
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    leave(rank, folder)


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    run_two(work, tmp_path)
    mean = lambda model, step: sum(transformer_loss(model, step, rank) for rank in range(WORLD)) / WORLD  # noqa: E731
    found, start = torch.load(tmp_path / "found.pt", weights_only=True), transformer().state_dict()
    for key, expected in trained(lambda model: model, mean).items():
        assert_close(found[key], expected, roundings=1e3)
    assert any(not torch.equal(found[key], start[key]) for key in found)
