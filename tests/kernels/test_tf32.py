"""Products of fp32 in tf32, where torch's own are asked to be: kernels, tiles, and what they launch."""

import pytest
import torch

import fastformer
from fastformer import functional
from tests.support.fused_op import DEVICE, needs_kernels

pytestmark = needs_kernels

HEADS = (16, 32, 64, 80, 128)
# Those that multiply.
KERNELS = {
    "_attention": "forward",
    "_attention_keys_values": "backward",
    "_attention_queries": "backward",
    "_attention_mask_gradient": "mask_gradient",
    "_attention_weights": "weights",
    "_attention_split": "decode",
}


@pytest.fixture
def launched(monkeypatch):
    """The constants of each launch, by kernel; nothing is launched."""
    import importlib

    from fastformer_kernels.host import launch

    actual: dict[str, dict] = {}

    def note(kernel, grid, *args, **constants):
        actual[kernel.__name__ if hasattr(kernel, "__name__") else kernel.fn.__name__] = constants

    for module in {*KERNELS.values(), "delta", "problem"}:
        monkeypatch.setattr(importlib.import_module(f"fastformer_kernels.attention.{module}"), "launch", note)
    assert launch.precision(torch.zeros(1, device=DEVICE)) == "ieee"
    return actual


def attend(K: int, dtype: torch.dtype) -> None:
    """Everything that attention does."""
    q, k, v = (torch.zeros(1, 2, 600, K, dtype=dtype, device=DEVICE, requires_grad=True) for _ in range(3))
    mask = torch.zeros(600, 600, device=DEVICE, requires_grad=True)
    with fastformer.backend("triton"):
        out, weights = functional.attention_with_weights(q, k, v, mask)
        torch.autograd.grad(out.sum() + weights.sum(), (q, k, v, mask))
        with torch.no_grad():
            functional.attention(q[:, :, :1], k, v)


@pytest.fixture
def high():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("K", HEADS)
def test_all_products_are_tf32_if_torch_allows_it(K, launched, high):
    from fastformer_kernels.host import launch

    if launch.device_of(torch.empty(0, device=DEVICE)).architecture in launch.WITHOUT_TF32:
        pytest.skip("not on this GPU")
    attend(K, torch.float32)
    assert {name: launched[name]["PRECISION"] for name in KERNELS} == dict.fromkeys(KERNELS, "tf32")


@pytest.mark.parametrize(("K", "dtype"), [(64, torch.bfloat16), (136, torch.float32), (256, torch.float32)])
def test_no_product_is_tf32_where_it_cannot_be(K, dtype, launched, high):
    """In 16 bits there is one way to multiply; for wide heads no tile of tf32 fits into registers."""
    attend(K, dtype)
    assert {name: launched[name]["PRECISION"] for name in KERNELS} == dict.fromkeys(KERNELS, "ieee")


def test_no_product_is_tf32_where_triton_leaves_out_a_barrier(launched, high, monkeypatch):
    from fastformer_kernels.host import launch

    device = launch.Device("sm_103", 148, 227 << 10)
    monkeypatch.setattr(launch, "assumed", device)
    monkeypatch.setattr(launch, "_properties", lambda index: device)
    for without_tf32, precision in ((set(), "tf32"), ({"sm_100"}, "ieee")):
        monkeypatch.setattr(launch, "WITHOUT_TF32", without_tf32)
        attend(64, torch.float32)
        assert {name: launched[name]["PRECISION"] for name in KERNELS} == dict.fromkeys(KERNELS, precision)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("K", [64, 128])
def test_exact_products_are_three_of_tf32_or_on_plain_cores(K, target, launched, monkeypatch):
    from fastformer_kernels.host import launch

    device = launch.Device(target, 132, 163 << 10)
    monkeypatch.setattr(launch, "assumed", device)
    monkeypatch.setattr(launch, "_properties", lambda index: device)
    attend(K, torch.float32)
    split = ("_attention", "_attention_keys_values", "_attention_queries") if target == "sm_90" else ()
    expected = dict.fromkeys(KERNELS, "ieee") | dict.fromkeys(split, "tf32x3")
    assert {name: launched[name]["PRECISION"] for name in KERNELS} == expected


@pytest.mark.parametrize("K", [32, 64])
def test_tiles_of_tf32_are_tall_enough_for_matrix_units(K, launched, high):
    """sm_90 multiplies 64 rows at a time: of queries, or of keys where scores are transposed."""
    from fastformer_kernels.host.launch import device_of

    if device_of(torch.empty(0, device=DEVICE)).architecture not in ("sm_90", "sm_100"):
        pytest.skip("older GPUs multiply 16 rows at a time")
    attend(K, torch.float32)
    for name in ("_attention", "_attention_queries", "_attention_mask_gradient", "_attention_weights"):
        assert launched[name]["BLOCK_T"] >= 64, name
    assert launched["_attention_keys_values"]["BLOCK_S"] >= 64
    assert launched["_attention"]["num_warps"] % 4 == 0
