"""The second derivative of attention in torch's ops, whose fused op, that of values as wide as keys, has none."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from fastformer import functional
from fastformer.functional.attention import formula

B, H, T, S, K = 2, 2, 2, 3, 2

RULES = {
    "all keys": {},
    "causal": {"causal": True},
    "a scale": {"scale": 0.3},
    "a bool mask": {"mask": torch.ones(T, S).tril(1).bool()},
    "an additive mask": {"mask": torch.linspace(-1, 1, T * S, dtype=torch.float64).view(T, S)},
    "lengths": {"key_lengths": torch.tensor([S, 1]), "query_lengths": torch.tensor([1, T])},
}


def inputs(heads: int = H) -> list[torch.Tensor]:
    shapes = (B, H, T, K), (B, heads, S, K), (B, heads, S, K)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("heads", [H, 1])
@pytest.mark.parametrize("rules", RULES)
def test_by_differences(rules, heads):
    def attend(*x):
        return functional.attention(*x, **RULES[rules])

    assert torch.autograd.gradgradcheck(attend, inputs(heads))


@pytest.mark.parametrize("wanted", range(3))
def test_of_one_input_by_differences(wanted):
    x = [y.requires_grad_(i == wanted) for i, y in enumerate(inputs())]
    assert torch.autograd.gradgradcheck(lambda *x: functional.attention(*x), x)


def test_of_one_tensor_in_three_places_by_differences():
    (x, *_) = inputs()
    assert torch.autograd.gradgradcheck(lambda x: functional.attention(x, x, x), [x])


def test_of_a_mask_by_differences():
    mask = torch.randn(T, S, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda mask, *x: functional.attention(*x, mask), [mask, *inputs()])


def second(attend, x):
    first = torch.autograd.grad(attend(*x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(sum(y.square().sum() for y in first), x)


KEPT = {
    "on the CPU": (torch.autograd.graph.save_on_cpu, False),
    "by hooks": (lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x), False),
    "nowhere": (nullcontext, True),
}


@pytest.mark.parametrize("where", KEPT)
def test_is_the_same_wherever_tensors_are_kept(where):
    def attend(*x):
        return functional.attention(*x, causal=True)

    x = inputs()
    expected, (context, again) = second(attend, x), KEPT[where]
    with context():
        found = second((lambda *x: checkpoint(attend, *x, use_reentrant=False)) if again else attend, x)
    torch.testing.assert_close(found, expected)


def test_the_fused_op_is_not_wrapped_for_it(monkeypatch):
    def refuse(*given):
        raise AssertionError("wrapped")

    monkeypatch.setattr(formula._Passing, "apply", refuse)
    out = functional.attention(*inputs())
    assert out.grad_fn.name() == formula._FUSED_ON_CPU
    out.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch, of its own fakes
def test_compiled_autograd_finds_the_first_one_where_a_second_is_asked_for():
    x = inputs()
    expected = torch.autograd.grad(functional.attention(*x).square().sum(), x)
    loss = functional.attention(*x).square().sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        found = torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="is not implemented"):  # silence would be a wrong number
        torch.autograd.grad(sum(y.square().sum() for y in found), x)


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_kept_for_it(backward):
    q, k, v = (x * 1.0 for x in inputs())
    kept = [weakref.ref(x) for x in (q, k, v)]
    out = functional.attention(q, k, v)
    if backward:
        out.sum().backward()
    else:
        del out
    del q, k, v
    gc.collect()
    assert [x() for x in kept] == [None] * 3
