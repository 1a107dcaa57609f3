"""Mistakes in masks and shapes raise what torch raises."""

import pytest
import torch

from fastformer.packing import Layout, to_nested
from tests.nn.padding_cases import AHEAD, PADDING, B, D, S, T, stacks
from tests.support.closeness import random

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
]


def test_nested_tensors_take_no_mask():
    ours, _ = stacks("Transformer")
    layout = Layout.from_lengths([5, 2, 3])
    x, mask = to_nested(random(layout.total, D), layout), torch.zeros(5, 5).bool()
    for name in ("mask", "src_key_padding_mask"):
        with pytest.raises(ValueError, match="src must not be nested where a mask is given"):
            ours.encoder(x, **{name: mask})
    for name in ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask"):
        with pytest.raises(ValueError, match="tgt and memory must not be nested where a mask is given"):
            ours.decoder(x, x, **{name: mask})
    with pytest.raises(TypeError, match=r"nested must be a nested tensor, not one of shape \[3, 4, 6\]"):
        ours.decoder(x, torch.zeros(3, 4, D))


BAD = {
    "mask shape": {"src_key_padding_mask": torch.zeros(B, T + 1).bool()},
    "mask turned": {"src_key_padding_mask": torch.zeros(T, B).bool()},
    "mask of another batch": {"src_key_padding_mask": torch.zeros(B + 1, T).bool()},
    "mask dtype": {"src_key_padding_mask": torch.zeros(B, T).int()},
    "mask of scores": {"src_key_padding_mask": PADDING["right"][0], "mask": torch.zeros(T, T + 1)},
    "dtype of the mask of scores": {"src_key_padding_mask": PADDING["right"][0], "mask": torch.zeros(T, T).int()},
    "causal mask of another size": {
        "src_key_padding_mask": PADDING["right"][0],
        "mask": torch.ones(T + 1, T + 1).triu(1).bool(),
    },
    "causal mask of another size, stated": {
        "src_key_padding_mask": PADDING["right"][0],
        "mask": torch.ones(T + 1, T + 1).triu(1).bool(),
        "is_causal": True,
    },
    "dtype of a stated causal mask": {
        "src_key_padding_mask": PADDING["right"][0],
        "mask": AHEAD.int(),
        "is_causal": True,
    },
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_raises_what_torch_raises(name):
    ours, torchs = stacks("TransformerEncoder")
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        torchs(random(B, T, D), **BAD[name])
    with pytest.raises(wanted.type) as raised:
        ours(random(B, T, D), **BAD[name])
    assert raised.type is wanted.type
    assert str(raised.value).strip()


@pytest.mark.parametrize("wrong", ["memory", "tgt", "a batch for one", "mask"])
def test_a_mistake_in_a_decoder_raises_what_torch_raises(wrong):
    ours, torchs = stacks("TransformerDecoder")
    x, memory = random(B, T, D), random(B + (wrong == "memory"), S, D)
    masks = {"memory_key_padding_mask": torch.zeros(len(memory), S).bool()}
    if wrong == "tgt":
        x = random(B, T, D + 1)
    if wrong == "a batch for one":
        x, memory, masks = random(T, D), memory[:1], {"memory_key_padding_mask": torch.zeros(1, S).bool()}
    if wrong == "mask":
        masks["memory_mask"] = torch.zeros(T, T)
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        torchs(x, memory, **masks)
    with pytest.raises(wanted.type):
        ours(x, memory, **masks)


def test_batches_that_differ_are_named():
    ours, _ = stacks("Transformer")
    with pytest.raises(RuntimeError, match="src and tgt must have the same batch, not 2 and 3"):
        ours(random(2, S, D), random(3, T, D))
