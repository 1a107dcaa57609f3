"""Layouts, packing and unpacking."""

import copy
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

import fastformer
from fastformer.functional import packed_attention
from fastformer.packing import Layout, from_nested, pack, to_nested, unpack
from tests.support.closeness import assert_close, gradients, random
from tests.support.fused_op import DEVICE, needs_kernels

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


FORMS = {
    "a list": list,
    "a tuple": tuple,
    "tensors": lambda x: [torch.tensor(each) for each in x],
    **{f"an array of {x}": partial(np.array, dtype=x) for x in ("int8", "uint32", "int64")},
    **{f"a tensor of {x}": partial(torch.tensor, dtype=x) for x in (torch.uint8, torch.int32, torch.uint64)},
}
WRONG = {
    "negative": ([2, -1], ValueError, "must not be negative: -1"),
    "floating point": ([2.0, 1.0], TypeError, "must be integers, not torch.float32"),
    "bool": (np.array([True]), TypeError, "must be integers, not torch.bool"),
    "nothing": ([None, 1], TypeError, r"must be integers \[B\], not \[None, 1\]: "),
    "None": (None, TypeError, r"must be integers \[B\], not None: "),
    "one number": (3, ValueError, r"must be one-dimensional \[B\], not of shape \[\]"),
    "a table": (
        torch.ones(1, 2, dtype=torch.int64),
        ValueError,
        r"must be one-dimensional \[B\], not of shape \[1, 2\]",
    ),
    "beyond counting": ([2, 2**31], ValueError, "must be at most 2147483647, not 2147483648"),
}


@pytest.mark.parametrize("form", FORMS)
def test_lengths_come_in_any_integer_form(form):
    assert Layout.from_lengths(FORMS[form]([2, 1])).offsets.tolist() == [0, 2, 3]


@pytest.mark.parametrize("case", WRONG)
def test_other_lengths_are_refused_by_name(case):
    given, error, words = WRONG[case]
    with pytest.raises(error, match=f"^lengths {words}"):
        Layout.from_lengths(given)


def test_lengths_that_add_up_to_more_than_can_be_counted_are_refused_before_anything_is_made():
    with pytest.raises(ValueError, match="lengths must add up to at most 2147483647, not 4294967294"):
        Layout.from_lengths([2**31 - 1, 2**31 - 1])


# Padding of [B, L] on the right, on the left, in between and everywhere; nothing; no column; no row.
MASKS = {
    "right": [[0, 0, 0, 1], [0, 1, 1, 1]],
    "left": [[1, 0, 0, 0], [1, 1, 0, 0]],
    "gaps": [[0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]],
    "everything": [[1, 1], [1, 1]],
    "nothing": [[0, 0], [0, 0]],
    "no column": torch.zeros(2, 0),
    "no row": torch.zeros(0, 3),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_mask_may_have_padding_anywhere(name, batch_first):
    padding = torch.as_tensor(MASKS[name]).bool()
    B, L = padding.shape
    layout = Layout.from_mask(padding)
    where = [(b, t) for b in range(B) for t in range(L) if not padding[b, t]]
    assert layout.lengths.tolist() == (~padding).sum(1).tolist()
    assert layout.origin.tolist() == [b * L + t for b, t in where]
    assert layout.positions.tolist() == [int((~padding[b, :t]).sum()) for b, t in where]
    assert (layout.columns, layout.shortest) == (L, min(layout.lengths.tolist(), default=0))
    assert torch.equal(layout.mask(), ~padding)
    same = Layout.from_lengths(layout.lengths)
    assert all(torch.equal(getattr(layout, x), getattr(same, x)) for x in ("lengths", "offsets", "positions", "slots"))
    assert layout.max_length == same.max_length
    padded = random(B, L, 2)
    given = padded if batch_first else padded.transpose(0, 1)
    tokens = pack(given, layout, batch_first)
    assert_close(tokens, torch.stack([padded[b, t] for b, t in where]) if where else padded.new_zeros(0, 2))
    again = unpack(tokens, layout, batch_first)
    again = again if batch_first else again.transpose(0, 1)
    assert_close(again, padded.masked_fill(padding[:, :, None], 0.0))
    (gradient,) = gradients(again, [padded])
    (expected,) = gradients(padded.masked_fill(padding[:, :, None], 0.0), [padded])
    assert_close(gradient, expected)


def test_numbers_need_no_default_device():
    with torch.device("meta"):
        layout = Layout.from_lengths([2, 1])
    assert layout.offsets.tolist() == [0, 2, 3]


def test_lengths_in_a_wider_batch():
    layout = Layout.from_lengths([2, 1], columns=4)
    assert (layout.columns, layout.max_length) == (4, 2)
    assert layout.slots.tolist() == [0, 1, 2]
    assert layout.origin.tolist() == [0, 1, 4]
    assert unpack(torch.tensor([5, 6, 7]), layout).tolist() == [[5, 6, 0, 0], [7, 0, 0, 0]]
    with pytest.raises(ValueError, match="a length of 5 is beyond the row of 4"):
        Layout.from_lengths([2, 5], columns=4)


def test_a_layout_moves_to_another_device():
    layout = Layout.from_lengths([2, 1])
    assert layout.to("cpu") is layout
    assert layout.mask().device.type == "cpu"
    moved = layout.to("meta")
    assert moved.mask().device.type == "meta"  # it remembers nothing of the other device
    assert {x.device.type for x in (moved.offsets, moved.positions, moved.slots, moved.origin)} == {"meta"}
    assert moved.lengths.tolist() == [2, 1]  # stay on the CPU


def test_a_layout_is_freed_as_soon_as_nobody_needs_it():
    """What it remembers of itself must not keep tensors on the device until the garbage collector comes."""
    layout = Layout.from_lengths([2, 1])
    assert layout.once("thing", lambda: 5, layout) == 5
    gone = weakref.ref(layout)
    del layout
    assert gone() is None


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_kernels)])
def test_a_layout_forgets_other_layouts(backend):
    """A loop over different keys, with one layout of queries, keeps the last keys at most."""
    layout = Layout.from_lengths([2, 1], DEVICE)
    q, others, values = torch.randn(3, 1, 4, device=DEVICE), weakref.WeakSet(), weakref.WeakSet()
    for length in range(2, 12):
        key_layout = Layout.from_lengths([length, 3], DEVICE)
        k = torch.randn(key_layout.total, 1, 4, device=DEVICE)
        with fastformer.backend(backend):
            packed_attention(q, k, k, layout, key_layout)
        values.add(layout.once("value", lambda: torch.ones(1), key_layout))
        others.add(key_layout)
    del key_layout
    assert len(others) == len(values) == 1


def test_what_a_layout_remembers_outlives_inference_mode():
    layout = Layout.from_mask(torch.tensor([[False, True], [False, False]]))
    with torch.inference_mode():
        pack(torch.zeros(2, 2, 3), layout, batch_first=False)
    x = random(2, 2, 3)
    gradients(pack(x, layout, batch_first=False), [x])


@pytest.mark.parametrize("way", ["fake", "grad"])
def test_what_others_make_of_a_layout_is_theirs(way):
    """An estimate of memory or a gradient of torch.func comes first, and plain calls with the same layout after it."""
    layout, tokens = Layout.from_mask(torch.tensor([[True, False, False], [False, False, True]])), random(4, 2)
    if way == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            unpack(mode.from_tensor(tokens), layout)
    else:
        torch.func.grad(lambda x: unpack(x, layout).sum())(tokens)
    found = pack(unpack(tokens, layout), copy.deepcopy(layout))
    assert type(found) is torch.Tensor
    assert_close(found, tokens)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("form", [torch.jagged, torch.strided])
def test_nested_tensors(form):
    parts = [random(n, 2) for n in (3, 0, 2)]
    nested = torch.nested.as_nested_tensor(parts, layout=form)
    tokens, layout = from_nested(nested)
    assert layout.lengths.tolist() == [3, 0, 2]
    assert_close(tokens, torch.cat(parts))
    again = to_nested(tokens, layout)
    assert again.layout == torch.jagged
    assert (again._min_seqlen, again._max_seqlen) == (0, 3)
    for a, b in zip(again.unbind(), parts, strict=True):
        assert_close(a, b)
    for a, b in zip(gradients(again.values() ** 2, parts), gradients(torch.cat(parts) ** 2, parts), strict=True):
        assert_close(a, b)


def test_a_jagged_tensor_with_holes():
    values, lengths = random(7, 2), torch.tensor([2, 1])
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 7]), lengths)
    tokens, layout = from_nested(nested)
    assert layout.lengths.tolist() == [2, 1]
    assert_close(tokens, values[[0, 1, 4]])


@pytest.mark.parametrize(("offsets", "rows"), [([2, 3, 7], [2, 3, 4, 5, 6]), ([0, 3, 5], [0, 1, 2, 3, 4])])
def test_a_jagged_tensor_with_rows_before_or_after_its_sequences(offsets, rows):
    values = random(7, 2)
    tokens, layout = from_nested(torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets)))
    assert layout.lengths.tolist() == torch.tensor(offsets).diff().tolist()
    assert_close(tokens, values[rows])
    assert_close(gradients(tokens, [values])[0].ne(0).any(-1).nonzero().flatten(), torch.tensor(rows))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_of_no_sequence():
    tokens, layout = from_nested(torch.nested.nested_tensor([]))
    assert (tokens.shape[0], layout.batch) == (0, 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_not_nested_or_ragged_elsewhere():
    with pytest.raises(TypeError, match=r"nested must be a nested tensor, not one of shape \[2, 3\]"):
        from_nested(torch.zeros(2, 3))
    other = torch.nested.nested_tensor_from_jagged(torch.zeros(5, 3), torch.tensor([0, 2, 5])).transpose(1, 2)
    with pytest.raises(ValueError, match="nested must be ragged in its second dimension, not in dimension 2"):
        from_nested(other)
    other = torch.nested.as_nested_tensor([torch.zeros(2, 3), torch.zeros(2, 4)], layout=torch.strided)
    with pytest.raises(ValueError, match="nested must be ragged in its second dimension alone"):
        from_nested(other)
    with pytest.raises(ValueError, match="tokens has 2 rows, the lengths add up to 3"):
        to_nested(torch.zeros(2, 3), Layout.from_lengths([3]))


@pytest.mark.parametrize(
    ("padding", "error", "message"),
    [
        (torch.zeros(2, 3), TypeError, "padding must be bool, True = padding, not torch.float32"),
        ([[True, False]], TypeError, "padding must be a Tensor, not list"),
        (torch.zeros(3).bool(), ValueError, r"padding must be of shape \[B, L\], not \[3\]"),
    ],
)
def test_bad_masks(padding, error, message):
    with pytest.raises(error, match=message):
        Layout.from_mask(padding)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("batch_first", [True, False])
def test_pack_and_unpack_move_every_token_once(lengths, extra, batch_first):
    layout = Layout.from_lengths(lengths)
    padded = random(len(lengths), layout.max_length + extra, 2, grad=False)
    tokens = pack(padded if batch_first else padded.transpose(0, 1), layout, batch_first)
    expected = [padded[b, t] for b, length in enumerate(lengths) for t in range(length)]
    assert torch.equal(tokens, torch.stack(expected) if expected else padded.new_zeros(0, 2))
    again = unpack(tokens, layout)
    assert again.shape == (len(lengths), layout.max_length, 2)
    assert torch.equal(again, padded[:, : layout.max_length] * layout.mask()[:, :, None])
    assert torch.equal(pack(again, layout), tokens)


def test_one_graph_packs_and_unpacks_whatever_a_layout_remembers():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x, layout: unpack(pack(x, layout) * 2, layout), fullgraph=True, backend=backend)
    for padding in ([[0, 1, 0], [1, 0, 0]], [[1, 0, 0], [0, 1, 0]]):
        layout, x = Layout.from_mask(torch.tensor(padding).bool()), random(2, 3, 2)
        for _ in range(2):
            out, expected = compiled(x, layout), 2 * x * layout.mask()[:, :, None]
            assert_close(out, expected)
            assert_close(*gradients(out, [x]), *gradients(expected, [x]))
    assert len(graphs) == 1


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
        assert gradcheck(lambda x, function=function: function(x, layout) ** 2, x, check_forward_ad=True)


def test_half_precision_is_kept():
    layout = Layout.from_lengths([2, 1])
    padded = random(2, 2, 3, dtype=torch.bfloat16, grad=False)
    assert_close(unpack(pack(padded, layout), layout)[0], padded[0])


def test_tensors_that_do_not_fit_the_layout():
    layout = Layout.from_lengths([2, 4])
    with pytest.raises(ValueError, match="padded has 3 rows, lengths has 2"):
        pack(torch.zeros(3, 4), layout)
    with pytest.raises(ValueError, match="a length of 4 is beyond the row of 3"):
        pack(torch.zeros(2, 3), layout)
    with pytest.raises(ValueError, match="a length of 4 is beyond the row of 3"):
        pack(torch.zeros(2, 3), Layout.from_lengths([2, 1], columns=4))
    with pytest.raises(ValueError, match="tokens has 5 rows, the lengths add up to 6"):
        unpack(torch.zeros(5, 1), layout)
