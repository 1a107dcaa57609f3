"""What goes from the CPU to a device goes in one transfer, and from pinned memory where that is a GPU.

Here "meta" is the device: the transfers are counted as the operations that have another device behind them.
"""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastformer.apps.language.model import language_model_loss
from fastformer.apps.translation.model import translation_loss
from fastformer.functional.attention import packed_reference
from fastformer.host.devices import send
from fastformer.packing import Layout
from tests.support import language_task
from tests.support.gpu import MARKS, no_host_sync
from tests.support.translation_task import random_batch, random_model

LENGTHS = [5, 1, 9, 0, 3]


class Transfers(TorchDispatchMode):
    """Counts the copies from the CPU to another device, and notes whether their memory is that of tensors it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, found = (args[1], args[0]) if func is torch.ops.aten.copy_.default else (args[0] if args else None, out)
        if isinstance(given, Tensor) and isinstance(found, Tensor) and given.is_cpu and not found.is_cpu:
            self.sources.append(given)
        return out


def translation(packed: bool = True):
    return random_batch([(3, 5), (2, 2), (7, 1)], packed=packed)


def attends_nothing(q, k, v, layout, key_layout, rules):
    return q + k.sum() + v.sum()


def learned(make, **changes):
    """A model without a table of positions, which would be made anew each time on "meta"."""
    return partial(make, positions="learned", max_positions=16, **changes)


CASES = {
    "translation": (learned(random_model), translation, translation_loss),
    "translation, padded": (learned(random_model), partial(translation, False), translation_loss),
    "language": (learned(language_task.random_model), lambda: language_task.random_batch(LENGTHS), language_model_loss),
}


@pytest.fixture(params=CASES)
def case(request):
    make_model, make_batch, loss = CASES[request.param]
    return make_model(), make_batch(), loss


def test_a_training_step_takes_one_transfer(case, monkeypatch):
    """The kernels of attention need no more than the layout; the reference makes groups of its own on the CPU."""
    monkeypatch.setattr(packed_reference, "packed_attention", attends_nothing)
    model, batch, loss = case
    model.to("meta")
    with Transfers() as transfers:
        moved = batch.to("meta", non_blocking=True)
        assert len(transfers.sources) == 1
        loss(model, moved).backward()
    assert len(transfers.sources) == 1


def test_a_layout_takes_one_transfer():
    with Transfers() as transfers:
        layout = Layout.from_lengths(LENGTHS, "meta", columns=12)
        Layout.from_lengths(LENGTHS).to("meta")
    assert len(transfers.sources) == 2
    assert {x.device.type for x in layout.tensors} == {"meta"}


@pytest.fixture
def staged(monkeypatch):
    """The transfers go to the CPU itself, so that their values can be seen; "meta" is what is asked for."""
    original = Tensor.to

    def to(self, *args, **kwargs):
        if args and args[0] == torch.device("meta"):
            return self.clone()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", to)


def test_the_loss_and_its_gradients_are_the_same_after_the_transfer(case, staged):
    model, batch, loss = case
    expected = loss(model, batch)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    moved = batch.to("meta")
    assert len(moved.layouts) == len([name for name in vars(batch) if "lengths" in name])
    found = loss(model, moved)
    assert torch.equal(found, expected)
    for a, b in zip(torch.autograd.grad(found, list(model.parameters())), wanted, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(loss(model, moved.to("cpu")), expected)


def test_values_shapes_and_dtypes_arrive(staged):
    a, b = torch.arange(6).view(2, 3), torch.tensor([1.5, -2.0], dtype=torch.float64)
    c, d, e = torch.tensor([True, False, True]), torch.tensor(7, dtype=torch.int32), torch.empty(0, 4)
    given = a, b, c, a, d, e, a.t()
    found = send("meta", *given)
    for x, y in zip(found, given, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    assert found[0] is found[3]
    assert len({x.untyped_storage().data_ptr() for x in found}) == 1
    start = found[0].untyped_storage().data_ptr()
    assert not any((x.data_ptr() - start) % 128 for x in found if x.numel())  # kernels like them so


class TestOnAGpu:
    pytestmark = MARKS

    @pytest.mark.parametrize("name", CASES)
    def test_the_host_waits_for_nothing(self, name):
        """Sync debug mode sees a copy that waits from pageable memory only where it blocks: the memory is looked at."""
        make_model, make_batch, loss = CASES[name]
        model, batch = make_model().cuda(), make_batch()

        def step() -> None:
            loss(model, batch.to("cuda", non_blocking=True)).backward()

        step()
        with no_host_sync(), Transfers() as transfers:
            step()
        assert len(transfers.sources) == 1
        assert all(x.is_pinned() for x in transfers.sources)

    def test_pinned_memory_is_not_used_again_before_its_copy_is_done(self):
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # the copies wait behind this, some tens of milliseconds
        sent = [send("cuda", torch.full((1 << 16,), i))[0] for i in range(20)]
        assert [int(x.sum()) for x in sent] == [i << 16 for i in range(20)]
