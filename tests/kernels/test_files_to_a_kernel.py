"""How many files somebody reads who follows a call from a module to its kernel."""

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import fastformer
from tests.support.fused_op import INTERPRETED, needs_kernels
from tests.support.python import ROOT

ROOTS = [str(ROOT / name) for name in ("fastformer", "kernels")]

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not INTERPRETED, reason="a plan goes past the launcher; the interpreter has no plans"),
]


def files_to(kernel: str, call) -> list[str]:
    """The files of the package and of the kernels whose functions run until the kernel is launched, in order."""
    found: list[str] = []
    launched = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or launched or not frame.f_code.co_filename.startswith(tuple(ROOTS)):
            return
        file = str(Path(frame.f_code.co_filename).relative_to(ROOT))
        if file not in found:
            found.append(file)
        if frame.f_code.co_name == "launch" and frame.f_locals["kernel"].__name__ == kernel:
            launched.append(kernel)

    with fastformer.backend("triton"):
        call()  # what is imported and remembered by the first call is none of the way
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(before)
    assert launched, f"{kernel} was not launched; entered: {found}"
    return found


def test_layer_norm():
    norm, x = fastformer.LayerNorm(32), torch.randn(2, 8, 32)
    files = files_to("layer_norm_forward_kernel", lambda: norm(x))
    assert files[0] == "fastformer/nn/modules.py"
    assert len(files) <= 8, files


def test_rotary():
    x, positions, (cos, sin) = torch.randn(8, 2, 32), torch.arange(8), torch.randn(2, 8, 16)
    files = files_to("rotary_kernel", lambda: fastformer.functional.rotary(x, positions, cos, sin))
    assert files[0] == "fastformer/functional/rotary/op.py"
    assert len(files) <= 7, files


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("form", ["padding", "causal and padding", "additive and padding"])
def test_masked_attention(form, grad):
    module, x = fastformer.MultiheadAttention(32, 2, batch_first=True).eval(), torch.randn(2, 32, 32)
    padding = torch.arange(32) >= torch.tensor([[32], [20]])
    ahead = torch.ones(32, 32, dtype=torch.bool).triu(1)
    mask = {"padding": None, "causal and padding": ahead, "additive and padding": ahead * -1e4}[form]

    def call() -> None:
        with torch.set_grad_enabled(grad):
            module(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)

    files = files_to("_attention", call)
    assert files[0] == "fastformer/nn/multihead_attention.py"
    assert len(files) <= 11, files
