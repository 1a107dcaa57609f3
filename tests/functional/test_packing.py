"""Layouts, packing and unpacking."""

import copy
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck

import fastformer
from fastformer.functional import packed_attention
from fastformer.packing import Layout, from_nested, pack, to_nested, unpack
from fastformer.packing.layout import RowMap
from tests.support.closeness import assert_close, assert_derivatives, assert_same, gradients, random
from tests.support.fused_op import DEVICE, needs_kernels


def test_lengths_come_in_any_integer_form():
    arrays = [partial(np.array, dtype=x) for x in ("int8", "uint32", "int64")]
    tensors = [partial(torch.tensor, dtype=x) for x in (torch.uint8, torch.int32, torch.uint64)]
    for form in (list, tuple, lambda x: [torch.tensor(each) for each in x], *arrays, *tensors):
        assert Layout.from_lengths(form([2, 1])).offsets.tolist() == [0, 2, 3]


def lengths(*values: int) -> torch.Tensor:
    return torch.arange(max(values, default=0)) >= torch.tensor(values).view(-1, 1)


# Padding of [B, L]: behind sequences, some empty, all as long (a reshape, not a gather), none; everywhere else.
MASKS = {
    "right": lengths(3, 1, 4),
    "empty sequences": lengths(0, 2, 0, 5, 0),
    "equal": lengths(3, 3, 3),
    "all empty": lengths(0, 0),
    "no sequence": lengths(),
    "left": [[1, 0, 0, 0], [1, 1, 0, 0]],
    "gaps": [[0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]],
    "everything": [[1, 1], [1, 1]],
    "a column of padding": [[0, 0, 1], [0, 1, 1]],
    "no column": torch.zeros(2, 0),
    "no row": torch.zeros(0, 3),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_layout_says_where_each_token_lies_and_packing_moves_each_once(name, batch_first):
    padding = torch.as_tensor(MASKS[name]).bool()
    B, L = padding.shape
    layout = Layout.from_mask(padding)
    where = [(b, t) for b in range(B) for t in range(L) if not padding[b, t]]
    counts = (~padding).sum(1).tolist()
    assert layout.lengths.tolist() == counts
    assert layout.lengths.dtype == layout.offsets.dtype == torch.int64
    assert (layout.batch, layout.total, layout.max_length) == (B, sum(counts), max(counts, default=0))
    assert (layout.columns, layout.shortest) == (L, min(counts, default=0))
    assert layout.offsets.tolist() == [sum(counts[:b]) for b in range(B + 1)]
    assert layout.origin.tolist() == [b * L + t for b, t in where]
    positions = [int((~padding[b, :t]).sum()) for b, t in where]
    assert layout.positions.tolist() == positions
    assert layout.slots.tolist() == [b * layout.max_length + t for (b, _), t in zip(where, positions, strict=True)]
    assert torch.equal(layout.mask(), ~padding)
    same = Layout.from_lengths(layout.lengths)
    assert all(torch.equal(getattr(layout, x), getattr(same, x)) for x in ("lengths", "offsets", "positions", "slots"))
    assert same.full == (len(set(counts)) <= 1)
    padded = random(B, L, 2)
    tokens = pack(padded if batch_first else padded.transpose(0, 1), layout, batch_first)
    assert_close(tokens, torch.stack([padded[b, t] for b, t in where]) if where else padded.new_zeros(0, 2))
    again = unpack(tokens, layout, batch_first)
    assert again.is_contiguous()
    again = again if batch_first else again.transpose(0, 1)
    assert_same(again, padded.masked_fill(padding[:, :, None], 0.0), [padded])
    compact = unpack(tokens, same)
    wider = torch.cat([compact, compact + 1], 1)  # a batch that is longer than its longest sequence
    assert_close(pack(wider if batch_first else wider.transpose(0, 1), same, batch_first), tokens)


def test_lengths_in_a_wider_batch():
    layout = Layout.from_lengths([2, 1], columns=4)
    assert (layout.columns, layout.max_length) == (4, 2)
    assert layout.origin.tolist() == [0, 1, 4]
    assert unpack(torch.tensor([5, 6, 7]), layout).tolist() == [[5, 6, 0, 0], [7, 0, 0, 0]]


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_kernels)])
def test_a_layout_forgets_other_layouts_and_is_freed_at_once(backend):
    """A loop over different keys, with one layout of queries, keeps the last keys at most."""
    layout = Layout.from_lengths([2, 1], DEVICE)
    q, others = torch.randn(3, 1, 4, device=DEVICE), weakref.WeakSet()
    for length in range(2, 12):
        key_layout = Layout.from_lengths([length, 3], DEVICE)
        k = torch.randn(key_layout.total, 1, 4, device=DEVICE)
        with fastformer.backend(backend):
            new = Layout.from_lengths([2, 1], DEVICE)
            actual, expected = (packed_attention(q, k, k, x, key_layout) for x in (layout, new))
        assert torch.equal(actual, expected)
        others.add(key_layout)
    del key_layout
    assert len(others) == 1
    gone = weakref.ref(layout)
    del layout
    assert gone() is None


def test_a_layout_used_in_inference_mode_serves_training():
    layout = Layout.from_mask(torch.tensor([[False, True], [False, False]]))
    with torch.inference_mode():
        pack(torch.zeros(2, 2, 3), layout, batch_first=False)
    x = random(2, 2, 3)
    gradients(pack(x, layout, batch_first=False), [x])


@pytest.mark.parametrize("way", ["fake", "grad"])
def test_a_layout_used_with_fake_tensors_or_torch_func_serves_plain_calls(way):
    layout, tokens = Layout.from_mask(torch.tensor([[True, False, False], [False, False, True]])), random(4, 2)
    if way == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            unpack(mode.from_tensor(tokens), layout)
    else:
        torch.func.grad(lambda x: unpack(x, layout).sum())(tokens)
    actual = pack(unpack(tokens, layout), copy.deepcopy(layout))
    assert type(actual) is torch.Tensor
    assert_close(actual, tokens)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("form", [torch.jagged, torch.strided])
def test_nested_tensors_are_packed_and_come_back(form):
    parts = [random(n, 2) for n in (3, 0, 2)]
    tokens, layout = from_nested(torch.nested.as_nested_tensor(parts, layout=form))
    assert layout.lengths.tolist() == [3, 0, 2]
    again = to_nested(tokens, layout)
    assert again.layout == torch.jagged
    assert (again._min_seqlen, again._max_seqlen) == (0, 3)
    assert_close(again.unbind(), parts)
    assert_same(again.values() ** 2, torch.cat(parts) ** 2, parts)


def test_a_jagged_tensor_with_holes_is_packed_without_them():
    values, lengths = random(7, 2), torch.tensor([2, 1])
    tokens, layout = from_nested(torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 7]), lengths))
    assert layout.lengths.tolist() == [2, 1]
    assert_same(tokens, values[[0, 1, 4]], [values])


def test_one_graph_packs_and_unpacks_whatever_a_layout_remembers():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x, layout: unpack(pack(x, layout) * 2, layout), fullgraph=True, backend=backend)
    for padding in ([[0, 1, 0], [1, 0, 0]], [[1, 0, 0], [0, 1, 0]]):
        layout, x = Layout.from_mask(torch.tensor(padding).bool()), random(2, 3, 2)
        for _ in range(2):
            assert_same(compiled(x, layout), 2 * x * layout.mask()[:, :, None], [x])
    assert len(graphs) == 1


@pytest.mark.parametrize("lengths", [[3, 1], [0, 2], [2, 2]])
def test_first_and_second_derivative(lengths):
    layout = Layout.from_lengths(lengths)
    for function, x in ((pack, random(2, layout.max_length + 1, 2)), (unpack, random(layout.total, 2))):
        assert_derivatives(lambda x, function=function: function(x, layout) ** 2, [x])
        assert gradcheck(lambda x, function=function: function(x, layout) ** 2, x, check_forward_ad=True)


# Heads [5, 2, 4] of rows [5, 20].
PARTS = {
    "the first of wider rows": lambda x: x[:, :8].view(5, 2, 4),
    "the second of wider rows": lambda x: x[:, 8:16].view(5, 2, 4),
    "behind half a head": lambda x: x[:, 2:10].view(5, 2, 4),
    "rows of no multiple of a head": lambda x: x.view(-1)[:95].view(5, 19)[:, 1:9].view(5, 2, 4),
    "one row for all": lambda x: x[:1, :8].expand(5, 8).view(5, 2, 4),
    "heads of which each second number counts": lambda x: x[:, :16].view(5, 2, 8)[..., ::2],
    "numbers before heads": lambda x: x[:, :8].view(5, 4, 2).transpose(1, 2),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("tokens", [5, 1])
def test_heads_are_spread_from_parts_of_wider_rows(part, tokens):
    slots = torch.tensor([9, 0, 3, 11, 4, 5, 1, 8, 2, 10])[: 2 * tokens]
    rows, wide = RowMap.of(slots, 12, heads=2), random(5, 20)
    heads = PARTS[part](wide)[:tokens]
    expected = torch.zeros(12, 4, dtype=wide.dtype).index_copy(0, slots, heads.flatten(0, 1))
    assert torch.equal(rows.spread_heads(heads.detach()), expected)
    assert_same(rows.spread_heads(heads), expected, [wide])
