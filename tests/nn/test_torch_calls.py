"""What torch's stacks and layers pass to the modules inside them, ours pass too: call by call, keyword by keyword.

Recorders stand at every place of every stack: hooks on one module, hooks on all, a subclass of a layer, a replaced
attention. The calls of torch's model and of ours must be the same: names, order, keywords, types, dtypes and values of
masks and hints. Of activations the shape and dtype are compared here, their values with the output.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
from tests.nn.layer_cases import FF, B, D, H, S, T, build, inputs_for, right
from tests.support.closeness import assert_close, random
from tests.support.torch_recorders import (
    Attention,
    Calls,
    Recording,
    additive,
    ahead,
    collected,
    hooked,
    hooked_everywhere,
)

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),  # torch's, where one mask is bool and the other is not
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]
KINDS = ("TransformerEncoder", "TransformerDecoder", "Transformer")
float64 = partial(additive, dtype=torch.float64)
# An attn_mask for a length, and what is stated of it.
MASKS: dict[str, tuple[Callable[[int], Tensor] | None, bool | None]] = {
    "none": (None, None),
    "bool causal": (ahead, None),
    "bool causal, stated": (ahead, True),
    "bool causal, denied": (ahead, False),
    "causal": (lambda n: float64(ahead(n)), None),
    "bool window": (lambda n: ahead(n) | ahead(n).mT.triu(-1).tril(-2), None),
    "bool of each head": (lambda n: ahead(n).expand(B * H, n, n), None),
    "additive": (lambda n: torch.linspace(-1, 1, n * n, dtype=torch.float64).view(n, n), None),
}
PADDING = {"no padding": None, "padding": lambda hidden: hidden, "float padding": float64}
FORMS = [(mask, padding) for mask in MASKS for padding in PADDING]


def arguments(kind: str, mask: str, padding: str) -> dict[str, Any]:
    """A mask of that form on self-attention, and padding of that form everywhere."""
    make, stated = MASKS[mask]
    hide = PADDING[padding]
    own, hidden = (
        {n: None if form is None else form(x) for n, x in given.items()}
        for form, given in ((make, {T: T, S: S}), (hide, {T: right([T, 3, 2], T), S: right([S, 3, 2], S)}))
    )
    if kind == "TransformerEncoder":
        return {"mask": own[T], "src_key_padding_mask": hidden[T], "is_causal": stated}
    decoder = {"tgt_mask": own[T], "tgt_key_padding_mask": hidden[T], "tgt_is_causal": stated}
    decoder["memory_key_padding_mask"] = hidden[S]
    if kind == "TransformerDecoder":
        return decoder
    return {"src_mask": own[S], "src_is_causal": stated, "src_key_padding_mask": hidden[S], **decoder}


def converted(torchs: nn.Module) -> nn.Module:
    ours = copy.deepcopy(torchs)
    assert fastformer.convert(ours).changed
    return ours


def check(kind, torchs, ours, form, watch, least=1) -> None:
    """Compare the calls that a recorder sees, and the numbers of real tokens."""
    inputs, results = inputs_for(kind), []
    for model in (torchs, ours):
        calls = Calls(widths=(D, FF))
        with watch(model, calls=calls):
            out = model(*inputs, **arguments(kind, *form))
        results.append((calls, out if form[1] == "no padding" else out[~right([T, 3, 2], T)]))
    (expected, wanted), (found, out) = results
    assert found == expected
    assert len(found) >= least
    assert_close(out, wanted)


def places(kind: str) -> list[str]:
    """Every module but the one whose caller is the test, and those that torch never calls as modules."""
    return [name for name, _ in build(nn, kind).named_modules() if name and not name.endswith(("out_proj", "layers"))]


@pytest.mark.parametrize(
    ("kind", "place", "norm_first"),
    [
        # Its stacks have been by themselves in both forms.
        pytest.param(kind, place, pre, marks=[pytest.mark.long] if kind == "Transformer" and pre else [])
        for kind in KINDS
        for place in places(kind)
        for pre in (False, True)
    ],
)
def test_hooks_of_one_module(kind, place, norm_first):
    torchs = build(nn, kind, norm_first=norm_first)
    attends = place.endswith(("attn", *"0123456789")) or "." not in place
    for form in FORMS if attends else FORMS[1:2]:
        check(kind, torchs, converted(torchs), form, partial(hooked, places=[place]))


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_all_modules(kind, norm_first):
    torchs = build(nn, kind, norm_first=norm_first, activation=nn.GELU())
    for form in FORMS[::4]:
        check(kind, torchs, converted(torchs), form, hooked_everywhere, least=20)


def recorded(cls):
    return lambda model, calls: collected(cls, calls)


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("built", ["converted", "built"])
def test_subclass_of_a_layer(kind, form, built):
    torchs, ours = (
        getattr(library, kind)(
            type("Own", (Recording, getattr(library, f"{kind}Layer")), {})(
                D, H, dim_feedforward=FF, dropout=0.0, batch_first=True, dtype=torch.float64
            ),
            2,
        )
        for library in (nn, fastformer)
    )
    ours.load_state_dict(torchs.state_dict())
    check(kind, torchs, converted(torchs) if built == "converted" else ours, form, recorded(Recording))


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
@pytest.mark.parametrize(
    ("kind", "at"), [(KINDS[0], "self_attn"), (KINDS[1], "self_attn"), (KINDS[1], "multihead_attn")]
)
def test_replaced_attention(kind, at, form):
    torchs = build(nn, kind)
    setattr(torchs.layers[1], at, Attention(H).double())
    check(kind, torchs, converted(torchs), form, recorded(Attention))


class AddsItsMasks(nn.TransformerEncoderLayer):
    """A layer with attention of its own, which adds the masks that it is given to its scores."""

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        scores = src @ src.mT + src_mask
        return src + (scores + src_key_padding_mask[:, None]).softmax(-1) @ src


class OnlyTheHint(nn.TransformerEncoderLayer):
    """As rotary variants do: a mask of its own making, from the hint alone."""

    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        mask = float64(ahead(x.shape[1])) if is_causal else None
        return self.dropout1(self.self_attn(x, x, x, attn_mask=mask, need_weights=False)[0])


@pytest.mark.parametrize("mask", [ahead(T), ahead(T).mT.triu(-1)], ids=["causal", "window"])
@pytest.mark.parametrize("way", ["converted", "built"])
def test_bool_masks_are_additive_where_a_layer_adds_them(way, mask):
    layer = AddsItsMasks(D, H, FF, 0.0, batch_first=True, dtype=torch.float64)
    torchs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    ours = converted(torchs) if way == "converted" else fastformer.TransformerEncoder(layer, 2)
    x, hidden = random(B, T, D), right([T, 3, 2], T)
    assert_close(ours(x, mask, hidden)[~hidden], torchs(x, mask, hidden)[~hidden])


@pytest.mark.parametrize("own", [0, 1])
def test_no_token_sees_the_future_where_a_layer_counts_on_the_hint(own):
    torchs = build(nn, KINDS[0])
    torchs.layers[own].__class__ = OnlyTheHint
    ours, x, mask = converted(torchs), random(B, T, D), float64(ahead(T))
    assert_close(ours(x, mask), torchs(x, mask))
    later = torch.cat([x[:, :-1], x[:, -1:] + 1.0], 1)
    assert_close(ours(later, mask)[:, :-1], ours(x, mask)[:, :-1])


def test_layers_that_differ_in_the_order_of_dimensions():
    torchs = build(nn, KINDS[0])
    torchs.layers[1].self_attn.batch_first = False
    ours, x = converted(torchs), random(T, T, D)
    hidden = ahead(T) & ahead(T).any(-1, keepdim=True)
    assert_close(ours(x, src_key_padding_mask=hidden), torchs(x, src_key_padding_mask=hidden))
    assert ours.obstacle() == "the layers differ in batch_first"
