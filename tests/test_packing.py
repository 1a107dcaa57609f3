"""Layouts, packing and unpacking."""

import pytest
import torch
from closeness import assert_close, gradients, random
from torch.autograd import gradcheck, gradgradcheck

from fastformer.packing import Layout, pack, unpack

# Ragged; with empty sequences at both ends and inside; all equal (a reshape, not a gather); all empty; no sequence.
LENGTHS = ([3, 1, 4], [0, 2, 0, 5, 0], [3, 3, 3], [0, 0], [])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_layout_says_where_each_token_lies(lengths):
    layout = Layout.from_lengths(lengths)
    assert layout.lengths.tolist() == lengths
    assert layout.lengths.dtype == layout.offsets.dtype == torch.int64
    assert (layout.batch, layout.total, layout.max_length) == (len(lengths), sum(lengths), max(lengths, default=0))
    assert layout.offsets.tolist() == [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    where = [(b, t) for b, length in enumerate(lengths) for t in range(length)]
    assert layout.positions.tolist() == [t for _, t in where]
    assert layout.slots.tolist() == [b * layout.max_length + t for b, t in where]
    assert layout.mask().tolist() == [[t < length for t in range(layout.max_length)] for length in lengths]
    assert layout.full == (len(set(lengths)) <= 1)


@pytest.mark.parametrize("form", [tuple, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_lengths_come_in_any_integer_form(form):
    assert Layout.from_lengths(form([2, 1])).offsets.tolist() == [0, 2, 3]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("extra", [0, 2])
def test_pack_and_unpack_move_every_token_once(lengths, extra):
    layout = Layout.from_lengths(lengths)
    padded = random(len(lengths), layout.max_length + extra, 2, grad=False)
    tokens = pack(padded, layout)
    expected = [padded[b, t] for b, length in enumerate(lengths) for t in range(length)]
    assert torch.equal(tokens, torch.stack(expected) if expected else padded.new_zeros(0, 2))
    again = unpack(tokens, layout)
    assert again.shape == (len(lengths), layout.max_length, 2)
    assert torch.equal(again, padded[:, : layout.max_length] * layout.mask()[:, :, None])
    assert torch.equal(pack(again, layout), tokens)


def test_pack_takes_ids_and_unpack_pads_them_with_zeros():
    layout = Layout.from_lengths([2, 1])
    ids = pack(torch.tensor([[5, 6, 9], [7, 9, 9]]), layout)
    assert ids.tolist() == [5, 6, 7]
    assert unpack(ids, layout).tolist() == [[5, 6], [7, 0]]


@pytest.mark.parametrize("lengths", [[3, 1], [0, 2], [2, 2]])
def test_gradients(lengths):
    layout = Layout.from_lengths(lengths)
    padded = random(2, layout.max_length + 1, 2)
    (gradient,) = gradients(pack(padded, layout), [padded])
    assert torch.equal(gradient[:, : layout.max_length] != 0, layout.mask()[:, :, None].expand(-1, -1, 2))
    assert not gradient[:, layout.max_length :].any()
    for function, x in ((pack, padded), (unpack, random(layout.total, 2))):
        assert gradcheck(lambda x, function=function: function(x, layout) ** 2, x)
        assert gradgradcheck(lambda x, function=function: function(x, layout) ** 2, x)


def test_half_precision_is_kept():
    layout = Layout.from_lengths([2, 1])
    padded = random(2, 2, 3, dtype=torch.bfloat16, grad=False)
    assert_close(unpack(pack(padded, layout), layout)[0], padded[0])


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([1.0, 2.0], TypeError, "lengths must be integers, not torch.float32"),
        ([True], TypeError, "lengths must be integers, not torch.bool"),
        ([[1, 2]], ValueError, r"lengths must be one-dimensional \[B\], not of shape \[1, 2\]"),
        ([2, -1], ValueError, "lengths must not be negative: -1"),
    ],
)
def test_bad_lengths(lengths, error, message):
    with pytest.raises(error, match=message):
        Layout.from_lengths(lengths)


def test_tensors_that_do_not_fit_the_layout():
    layout = Layout.from_lengths([2, 4])
    with pytest.raises(ValueError, match="padded has 3 rows, lengths has 2"):
        pack(torch.zeros(3, 4), layout)
    with pytest.raises(ValueError, match="a length of 4 is beyond the row of 3"):
        pack(torch.zeros(2, 3), layout)
    with pytest.raises(ValueError, match="tokens has 5 rows, the lengths add up to 6"):
        unpack(torch.zeros(5, 1), layout)
