"""Every fused op on a GPU at real sizes: accuracy, memory, dropout, CUDA graphs, no wait of the host, compilations."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastformer
from fastformer import functional
from fastformer.packing import Layout
from tests.functional.test_sdpa import SKIPPED
from tests.gpu.gpu_cases import CASES, B, D, H, T, lengths
from tests.support.closeness import assert_close
from tests.support.fused_op import DEVICE, assert_as_accurate_as_reference
from tests.support.gpu import MARKS, captured, no_host_sync, peak_memory

pytestmark = MARKS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MIB = 1 << 20
# Those whose formula takes up to 11 GB in fp64 are run one after another, where workers share a GPU.
LARGE = pytest.mark.xdist_group("large")
GROUPED = [pytest.param(name, marks=LARGE) if name.startswith("linear_cross_entropy") else name for name in CASES]


def leaves(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(DEVICE, dtype).requires_grad_() for x in inputs]


def test_every_op_has_a_case():
    assert {name.split(",")[0] for name in CASES} == set(functional.OPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GROUPED)
def test_as_accurate_as_the_reference(name, dtype):
    op, inputs = CASES[name](DEVICE, 0.0)
    assert_as_accurate_as_reference(op, inputs, dtype)


# Without the few wide rows, for which partial sums of the weights' gradients are as large as the input.
@pytest.mark.parametrize("name", [name for name in CASES if "wide" not in name])
def test_memory(name):
    """Of forward and backward with dropout, in bf16: no more than the reference takes, which keeps at least as much."""
    op, inputs = CASES[name](DEVICE, 0.1)
    given = leaves(inputs, torch.bfloat16)
    outputs = op(*given)
    directions = [torch.randn_like(x) for x in ([outputs] if isinstance(outputs, Tensor) else outputs)]
    del outputs

    def step() -> None:
        outputs = op(*given)
        torch.autograd.grad([outputs] if isinstance(outputs, Tensor) else list(outputs), given, directions)

    taken = {}
    for backend in ("reference", "triton"):
        with fastformer.backend(backend):
            taken[backend] = peak_memory(step)
    assert taken["triton"] <= 1.1 * taken["reference"] + MIB, taken


def test_memory_of_the_loss_is_not_that_of_the_logits():
    op, inputs = CASES["linear_cross_entropy"](DEVICE, 0.0)
    x, w, b = given = leaves(inputs, torch.bfloat16)
    target = torch.randint(w.shape[0], x.shape[:1], device=DEVICE)
    eager = peak_memory(lambda: torch.autograd.grad(F.cross_entropy(F.linear(x, w, b).float(), target), given))
    with fastformer.backend("triton"):
        ours = peak_memory(lambda: torch.autograd.grad(op(*given), given))
    assert ours <= 0.25 * eager, (ours, eager)


@pytest.mark.parametrize("name", SKIPPED)
def test_sdpa_skips_what_a_mask_hides(name):
    """The formula in fp64: in 16 bits torch's SDPA does not give 0 for a query that may attend to nothing."""
    mask = SKIPPED[name].to(DEVICE)
    qkv = [torch.randn(3, 2, 260, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    wide = [x.detach().double().requires_grad_() for x in qkv]
    out, exact = fastformer.sdpa(*qkv, mask), F.scaled_dot_product_attention(*wide, mask)
    direction = torch.randn_like(out)
    assert_close(out, exact.to(out.dtype), roundings=4)
    actual = torch.autograd.grad(out, qkv, direction)
    expected = torch.autograd.grad(exact, wide, direction.double())
    assert_close(actual, [x.to(out.dtype) for x in expected], roundings=8)


# ---- what kernels do to the host


def step_of(name: str, dropout: float = 0.0):
    """Forward and backward as a function without arguments, and its inputs."""
    if name in CASES:
        op, inputs = CASES[name](DEVICE, dropout)
        parameters, call = [], lambda: op(*given)
    else:
        options = {"batch_first": True, "norm_first": True, "device": DEVICE, "dtype": torch.bfloat16}
        layer = fastformer.TransformerEncoderLayer(D, H, 4 * D, dropout, **options)
        layout = Layout.from_lengths([T, 1, T // 3, T - 1], DEVICE)
        padding = torch.arange(T, device=DEVICE) >= lengths(DEVICE)[:, None]
        packed = name == "packed encoder layer"
        inputs, parameters = [torch.randn(layout.total, D) if packed else torch.randn(B, T, D)], [*layer.parameters()]
        if packed:
            call = lambda: layer.compose(*given, *layer.packed_attentions(layout, causal=True))  # noqa: E731
        else:
            call = lambda: layer(*given, src_key_padding_mask=padding)  # noqa: E731
    given = leaves(inputs, torch.bfloat16)
    sources = [*given, *parameters]
    example = call()
    directions = [torch.randn_like(y) for y in ([example] if isinstance(example, Tensor) else example)]

    def step() -> list[Tensor]:
        out = call()
        outputs = [out] if isinstance(out, Tensor) else list(out)
        return [*outputs, *torch.autograd.grad(outputs, sources, directions)]

    return step, given


STEPS = [*CASES, "encoder layer", "packed encoder layer"]


# torch notices that autograd's nodes were made on the stream of the capture; they are used on another one only here.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
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
