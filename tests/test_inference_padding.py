"""Inference on a padded batch: the encoder skips the padding where torch's own stack does, and nowhere else."""

import warnings

import pytest
import torch
from closeness import assert_close
from torch import nn

import fastformer

LENGTHS = [3, 7, 1, 5]
PADDING = torch.arange(9) >= torch.tensor(LENGTHS)[:, None]  # [4, 9]; two columns are padding in every row


def stacks(norm_first: bool = False, **options: object) -> tuple[nn.TransformerEncoder, fastformer.TransformerEncoder]:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    ours = fastformer.TransformerEncoder(layer, 2, **options).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def rows_computed(stack: fastformer.TransformerEncoder, *args: object, **kwargs: object) -> tuple[torch.Tensor, int]:
    """The output, and how many positions the first feed-forward saw."""
    seen = []

    def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen.append(output[..., 0].numel())

    handle = stack.layers[0].norm2.register_forward_hook(hook)
    try:
        return stack(*args, **kwargs), seen[0]
    finally:
        handle.remove()


@torch.no_grad()
def test_padding_is_skipped_and_comes_out_as_zeros_as_in_torch():
    theirs, ours = stacks()
    src = torch.randn(4, 9, 16, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors is in prototype")
        expected = theirs(src, src_key_padding_mask=PADDING)
    out, rows = rows_computed(ours, src, src_key_padding_mask=PADDING)
    assert rows == sum(LENGTHS)
    assert (expected[PADDING] == 0).all()
    assert_close(out, expected)


@torch.no_grad()
@pytest.mark.parametrize("case", ["gaps", "left", "float mask", "attention mask", "switched off", "pre-norm"])
def test_everything_else_runs_as_it_is(case: str, slow_path: None):
    theirs, ours = stacks(case == "pre-norm", enable_nested_tensor=case != "switched off")
    src, padding, mask = torch.randn(4, 9, 16, dtype=torch.float64), PADDING, None
    if case == "gaps":
        padding = padding.clone()
        padding[1, 2] = True
    elif case == "left":
        padding = padding.flip(1)
    elif case == "float mask":
        padding = torch.zeros(4, 9, dtype=torch.float64).masked_fill(padding, float("-inf"))
    elif case == "attention mask":
        mask = torch.ones(9, 9, dtype=torch.bool).triu(1)
    out, rows = rows_computed(ours, src, mask, src_key_padding_mask=padding)
    assert rows == 4 * 9
    assert_close(out, theirs(src, mask, src_key_padding_mask=padding))


def test_with_gradients_nothing_is_skipped(slow_path: None):
    theirs, ours = stacks()
    src = torch.randn(4, 9, 16, dtype=torch.float64)
    out, rows = rows_computed(ours, src, src_key_padding_mask=PADDING)
    assert rows == 4 * 9
    assert_close(out, theirs(src, src_key_padding_mask=PADDING))


@torch.no_grad()
def test_a_row_of_padding_alone_gives_zeros():
    _, ours = stacks()
    padding = PADDING.clone()
    padding[2] = True
    out = ours(torch.randn(4, 9, 16, dtype=torch.float64), src_key_padding_mask=padding)
    assert (out[2] == 0).all()
    assert out.isfinite().all()
