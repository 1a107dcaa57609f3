"""The measure of noise: right computations in a dtype have errors around it, whatever their terms."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.closeness import random
from tests.support.noise import noise

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def errors(op, inputs, dtype):
    """The error of each result of an op in a dtype, and its noise."""
    rounded_inputs = [x.to(dtype).double().requires_grad_() for x in inputs]

    def run(dtype=torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in rounded_inputs]
        out = op(*leaves)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    exact = run()
    errors_in_dtype = [(a.double() - e).abs().max().item() for a, e in zip(run(dtype), exact, strict=True)]
    return errors_in_dtype, noise(run, exact, dtype)


OPS = {
    "one number": (lambda x: x * 1.7, [(1,)]),
    "a product": (F.linear, [(30, 20), (10, 20)]),
    "many terms": (F.linear, [(5, 4000), (3, 4000)]),
    "softmax": (lambda x: x.softmax(-1), [(9, 30)]),
    # What is added to a whole row changes no weight: its gradient is zero, a sum of terms that cancel.
    "a gradient of zero": (lambda x, y: (x + y).softmax(-1), [(9, 30), (9, 1)]),
    "gelu": (F.gelu, [(200,)]),
    "silu": (F.silu, [(200,)]),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[1:]), [(20, 33)]),
    "rms norm": (lambda x, w: F.rms_norm(x, x.shape[1:], w), [(20, 33), (33,)]),
    "attention": (F.scaled_dot_product_attention, [(2, 3, 20, 16)] * 3),
}


@pytest.mark.parametrize("name", OPS)
def test_errors_are_about_as_large_as_the_noise(name):
    """A tenth of it would be too little for right computations, were it a tolerance."""
    op, shapes = OPS[name]
    for dtype in DTYPES:
        errors_in_dtype, expected = errors(op, [random(*shape) for shape in shapes], dtype)
        assert all(n > 0 and error <= 4 * n for error, n in zip(errors_in_dtype, expected, strict=True))
        if dtype == torch.float32 and name not in ("one number", "many terms"):
            assert max(error / n for error, n in zip(errors_in_dtype, expected, strict=True)) > 0.1


def test_results_written_in_place_are_rounded():
    x, y = random(5, 4).detach(), random(5, 4).detach()

    def run():
        return [x.clone().add_(y), x.clone().addmm_(x, x.t() @ y), torch.mul(x, y, out=torch.empty_like(x))]

    for errors_in_dtype, largest in zip(noise(run, run(), torch.float16), run(), strict=True):
        assert 1e-4 < errors_in_dtype / largest.abs().max() < 1e-2
