"""What kernels do to the host: capture in CUDA graphs, no waiting, few compilations."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fastformer
from fastformer.packing import Layout
from tests.gpu.gpu_cases import CASES, B, H, T, lengths
from tests.support.closeness import assert_close
from tests.support.fused_op import DEVICE
from tests.support.gpu import MARKS, captured, no_host_sync

pytestmark = MARKS

TESTS = Path(__file__).resolve().parent
D, FF = 512, 2048


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)


def padding() -> Tensor:
    mask: Tensor = torch.arange(T, device=DEVICE) >= lengths(DEVICE)[:, None]
    return mask


def encoder_layer(dropout: float) -> nn.Module:
    options = {"batch_first": True, "norm_first": True, "device": DEVICE, "dtype": torch.bfloat16}
    return fastformer.TransformerEncoderLayer(D, H, FF, dropout, **options)


def step_of(name: str, dropout: float = 0.0):
    """Forward and backward as a function without arguments, and its inputs."""
    if name in CASES:
        op, inputs = CASES[name](DEVICE, dropout)
        given = [x.to(DEVICE, torch.bfloat16).requires_grad_() for x in inputs]
        call, sources = lambda: op(*given), given
    else:
        layer, x, mask = encoder_layer(dropout), leaf(B, T, D), padding()
        layout = Layout.from_lengths([T, 1, T // 3, T - 1], DEVICE)
        tokens = leaf(layout.total, D)
        if name == "encoder layer":
            given, call = [x], lambda: layer(x, src_key_padding_mask=mask)
        else:
            given, call = [tokens], lambda: layer.compose(tokens, *layer.packed_attentions(layout, causal=True))
        sources = [*given, *layer.parameters()]
    example = call()
    directions = [torch.randn_like(y) for y in ([example] if isinstance(example, Tensor) else example)]

    def step() -> list[Tensor]:
        out = call()
        outputs = [out] if isinstance(out, Tensor) else list(out)
        return [*outputs, *torch.autograd.grad(outputs, sources, directions)]

    return step, given


STEPS = [*CASES, "encoder layer", "packed encoder layer"]


@pytest.mark.parametrize("name", STEPS)
def test_a_cuda_graph_replays_on_new_inputs(name):
    with fastformer.backend("triton"):
        step, given = step_of(name)
        replay, results = captured(step)
        with torch.no_grad():
            for x in given:
                x.copy_(torch.randn_like(x))
        replay()
        replayed = [x.clone() for x in results]
        for a, b in zip(replayed, step(), strict=True):
            assert_close(a, b, roundings=4)  # matrix products may be others than outside of a graph


@pytest.mark.parametrize("name", ["attention", "feed_forward", "dropout_add_layer_norm", "embedding", "encoder layer"])
def test_a_cuda_graph_draws_new_dropout_in_each_replay(name):
    with fastformer.backend("triton"):
        replay, results = captured(step_of(name, 0.5)[0])
        replays = []
        for _ in range(2):
            replay()
            replays.append([x.clone() for x in results])
    assert not torch.equal(replays[0][0], replays[1][0])
    assert all(torch.isfinite(x).all() for x in (*replays[0], *replays[1]))


@pytest.mark.parametrize("name", STEPS)
def test_the_host_waits_for_nothing(name):
    with fastformer.backend("triton"):
        step, _ = step_of(name, 0.1)
        step()
        with no_host_sync():
            step()


def test_warm_up_compiles_what_a_step_launches(monkeypatch):
    """Sizes that no other test has, so that nothing is compiled before."""
    triton = pytest.importorskip("triton")
    layer = fastformer.TransformerEncoderLayer(208, 2, 336, 0.0, batch_first=True, device=DEVICE, dtype=torch.bfloat16)
    x, mask = torch.randn(2, 40, 208, device=DEVICE, dtype=torch.bfloat16), torch.zeros(2, 40, device=DEVICE).bool()
    mask[0, 33:] = True
    with fastformer.backend("triton"):
        assert fastformer.warm_up(layer, x, step=lambda x: layer(x, src_key_padding_mask=mask), progress=False) > 0
        compiled = []
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts))
        out = layer(x, src_key_padding_mask=mask)
        out.sum().backward()
    assert not compiled
    with fastformer.backend("reference"):
        expected = layer(x, src_key_padding_mask=mask)
    assert_close(out, expected, roundings=16)
