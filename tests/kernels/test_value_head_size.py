"""Values of a head size of their own, as in multi-head latent attention: kernels against fp64 of the same inputs."""

import pytest
import torch

from fastformer.backend import BackendError
from fastformer.functional import attention, attention_with_weights, packed_attention
from fastformer.packing import Layout
from fastformer_kernels.attention.arguments import Arguments
from tests.kernels.attention_cases import (
    DTYPES,
    check,
    check_decoding,
    check_empty,
    check_opcheck,
    check_second_derivative,
    fused,
    heads,
    on_device,
)
from tests.support.fused_op import DEVICE, assert_as_accurate_as_reference, needs_kernels

pytestmark = needs_kernels

# Smaller and larger than that of keys, of as wide a tile and of another; (192, 128) is that of DeepSeek-V2 (2024).
SIZES = [(64, 128), (40, 56), (16, 1), (192, 128), (64, 32), (24, 200), (40, 72)]
CASES = [(K, V, DTYPES[i % len(DTYPES)]) for i, (K, V) in enumerate([SIZES[0], (64, 128), SIZES[1], *SIZES[1:]])]


@pytest.mark.parametrize(("K", "V", "dtype"), CASES, ids=str)
def test_values_and_gradients(K, V, dtype):
    """Two query heads of one key head, more than one tile of keys, causal to the last of them."""
    check(heads(1, 2, 37, 70, K, 1, V), dtype, causal=True, alignment="bottom_right")


@pytest.mark.parametrize(("K", "V", "dtype"), [(40, 56, DTYPES[0]), (40, 16, DTYPES[1])], ids=str)
def test_every_option_with_weights_and_the_gradient_of_the_mask(K, V, dtype):
    """All that is no dropout, and dW: each loop with masks, and every kernel that reads values."""
    rules = {"causal": True, "alignment": "bottom_right", "window": (40, None), "softcap": 3.0, "scale": 0.7}
    rules |= {"key_mask": torch.rand(2, 70) < 0.8, "key_lengths": torch.tensor([70, 66])}
    rules |= {"query_lengths": torch.tensor([37, 30]), "mask": torch.randn(2, 1, 37, 70)}
    check(heads(2, 4, 37, 70, K, 2, V), dtype, op=attention_with_weights, **rules)


@pytest.mark.parametrize(("K", "V", "dtype"), [(16, 40, DTYPES[1]), (40, 16, DTYPES[0])], ids=str)
def test_packed_sequences(K, V, dtype):
    layout, key_layout = (Layout.from_lengths(n, DEVICE) for n in ([5, 0, 34, 1], [5, 4, 66, 0]))
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((40, 2, K), (75, 1, K), (75, 1, V))]
    assert_as_accurate_as_reference(
        lambda *x: packed_attention(*x, layout, key_layout, causal=True, window=(40, 0)), inputs, dtype
    )


@pytest.mark.parametrize(("K", "V"), [(40, 72), (192, 128), (16, 1)])
def test_decoding(K, V):
    check_decoding(heads(3, 4, 1, 139, K, 2, V), key_lengths=torch.tensor([139, 0, 5]))


def test_the_second_derivative():
    x = [*on_device(*heads(1, 2, 5, 7, 16, 1, 24)), torch.randn(5, 7, device=DEVICE, requires_grad=True)]
    check_second_derivative(x, lambda run: run(attention, *x))


@pytest.mark.parametrize("sizes", [(0, 4), (3, 0), (0, 0)])
def test_nothing_to_ask_or_to_attend_to(sizes):
    check_empty(on_device(*heads(1, 2, *sizes, 16, 1, 24)))


@pytest.mark.parametrize(("K", "V"), [(16, 0), (16, 257), (320, 16)])
def test_head_sizes_that_the_kernels_cannot_take(K, V):
    inputs = [x.to(DEVICE, torch.float32) for x in heads(1, 2, 2, 3, K, 1, V)]
    with pytest.raises(BackendError, match=f"attention takes head sizes from 1 to 256, not {V if K == 16 else K}"):
        fused(attention, *inputs)
    assert attention(*inputs).shape == (1, 2, 2, V)  # backend "auto" falls back


@pytest.mark.parametrize("packed", [False, True])
def test_registered_ops_pass_opcheck(packed):
    shapes = [(8, 2, 16), (8, 1, 16), (8, 1, 24)] if packed else [(2, 2, 5, 16), (2, 1, 7, 16), (2, 1, 7, 24)]
    mask = None if packed else torch.randn(5, 7, device=DEVICE)
    arguments = Arguments(queries=5, keys=5 if packed else 7, scale=0.25, mask=mask)
    check_opcheck([torch.randn(shape, device=DEVICE) for shape in shapes], arguments)
