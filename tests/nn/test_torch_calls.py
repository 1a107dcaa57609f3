"""What torch's stacks and layers pass to what is inside them, ours pass too: call by call, keyword by keyword.

Recorders stand at every place of every stack: hooks on one module, hooks on all, a subclass of a layer, a replaced
attention. The calls of torch's model and of its converted copy must be the same: names, order, keywords, types, dtypes
and values of masks and hints. Of activations the shape and dtype are compared here, their values elsewhere.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
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
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),  # torch's own nn.Transformer, pre-norm
]
B, H, S, T, D, F = 3, 2, 5, 4, 8, 12  # only activations are as wide as D or F


def layer_options(norm_first: bool = False, **changed: Any) -> dict[str, Any]:
    return {"dim_feedforward": F, "dropout": 0.0, "batch_first": True, "norm_first": norm_first} | changed


def encoder(**changed: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, **layer_options(**changed))
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(D), enable_nested_tensor=False)


def decoder(**changed: Any) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, **layer_options(**changed)), 2, nn.LayerNorm(D))


def transformer(**changed: Any) -> nn.Module:
    return nn.Transformer(D, H, 1, 1, **layer_options(**changed))


# An attn_mask for a length, and what is stated of it.
MASKS: dict[str, tuple[Callable[[int], Tensor] | None, bool | None]] = {
    "none": (None, None),
    "bool causal": (ahead, None),
    "bool causal, stated": (ahead, True),
    "bool causal, denied": (ahead, False),
    "causal": (lambda n: additive(ahead(n)), None),
    "bool window": (lambda n: ahead(n) | ahead(n).mT.triu(-1).tril(-2), None),
    "bool of each head": (lambda n: ahead(n).expand(B * H, n, n), None),
    "additive": (lambda n: torch.linspace(-1, 1, n * n).view(n, n), None),
}
PADDING: dict[str, Callable[[Tensor], Tensor] | None] = {
    "no padding": None,
    "padding": lambda hidden: hidden,
    "float padding": additive,
}


def arguments(model: nn.Module, mask: str, padding: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Inputs of a stack, with a mask of that form on its self-attention and padding of that form everywhere."""
    make, stated = MASKS[mask]
    hide = PADDING[padding]

    def hidden(length: int) -> Tensor | None:
        return None if hide is None else hide(torch.arange(length) >= torch.tensor([[length], [3], [2]]))

    source, target = torch.randn(B, S, D), torch.randn(B, T, D)
    own = None if make is None else make(S if isinstance(model, nn.TransformerEncoder) else T)
    if isinstance(model, nn.TransformerEncoder):
        return (source,), {"mask": own, "src_key_padding_mask": hidden(S), "is_causal": stated}
    of_target = {"tgt_mask": own, "tgt_key_padding_mask": hidden(T), "tgt_is_causal": stated}
    memory = {"memory_key_padding_mask": hidden(S)}
    if isinstance(model, nn.TransformerDecoder):
        return (target, source), {**of_target, **memory}
    of_source = {"src_mask": None if make is None else make(S), "src_is_causal": stated}
    return (source, target), {**of_source, **of_target, **memory, "src_key_padding_mask": hidden(S)}


def run(model: nn.Module, form: tuple[str, str], watch: Callable[[nn.Module, Calls], Any]) -> tuple[Calls, Tensor]:
    calls = Calls(widths=(D, F))
    torch.manual_seed(1)
    args, kwargs = arguments(model, *form)
    with watch(model, calls):
        return calls, model(*args, **kwargs)


def real(out: Tensor, form: tuple[str, str]) -> Tensor:
    if form[1] == "no padding":
        return out
    return torch.cat([out[0], out[1, :3], out[2, :2]])


def check(torchs: nn.Module, form: tuple[str, str], watch: Callable[[nn.Module, Calls], Any], least: int = 1) -> None:
    """Compare the calls, and the numbers of real tokens, of torch's model and of its converted copy."""
    ours = copy.deepcopy(torchs)
    assert fastformer.convert(ours).changed
    expected, numbers = run(torchs, form, watch)
    found, out = run(ours, form, watch)
    assert found == expected
    assert len(found) >= least
    torch.testing.assert_close(real(out, form), real(numbers, form), rtol=1e-4, atol=1e-5)


FORMS = [(mask, padding) for mask in MASKS for padding in PADDING]
MODELS = {"encoder": encoder, "decoder": decoder, "transformer": transformer}


def places(make: Callable[..., nn.Module]) -> list[str]:
    """Every module but the one whose caller is the test, and those that torch never calls as modules."""
    return [name for name, _ in make().named_modules() if name and not name.endswith(("out_proj", "layers"))]


@pytest.mark.parametrize(
    ("kind", "place", "norm_first"),
    [
        # Its stacks have been by themselves in both forms.
        pytest.param(kind, place, pre, marks=[pytest.mark.long] if kind == "transformer" and pre else [])
        for kind, make in MODELS.items()
        for place in places(make)
        for pre in (False, True)
    ],
)
def test_hooks_of_one_module(kind, place, norm_first):
    model = MODELS[kind](norm_first=norm_first)
    attends = place.endswith(("attn", *"0123456789")) or "." not in place
    for form in FORMS if attends else FORMS[1:2]:
        check(model, form, lambda model, calls: hooked(model, [place], calls))


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("kind", MODELS)
def test_hooks_of_all_modules(kind, norm_first):
    model = MODELS[kind](norm_first=norm_first, activation=nn.GELU())
    for form in FORMS[::4]:
        check(model, form, hooked_everywhere, least=20)


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("subclass_of", ["torch", "ours"])
def test_subclass_of_a_layer(kind, form, subclass_of):
    name = f"Transformer{kind.capitalize()}"
    torchs = type("Own", (Recording, getattr(nn, f"{name}Layer")), {})(D, H, **layer_options())
    model = getattr(nn, name)(torchs, 2)
    if subclass_of == "torch":
        return check(model, form, lambda model, calls: collected(Recording, calls))
    layer = type("Own", (Recording, getattr(fastformer, f"{name}Layer")), {})(D, H, **layer_options())
    layer.load_state_dict(torchs.state_dict())
    expected, numbers = run(model, form, lambda model, calls: collected(Recording, calls))
    found, out = run(getattr(fastformer, name)(layer, 2), form, lambda model, calls: collected(Recording, calls))
    assert found == expected
    assert found
    torch.testing.assert_close(real(out, form), real(numbers, form))


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
@pytest.mark.parametrize(
    ("kind", "at"), [("encoder", "self_attn"), ("decoder", "self_attn"), ("decoder", "multihead_attn")]
)
def test_replaced_attention(kind, at, form):
    model = MODELS[kind]()
    setattr(model.layers[1], at, Attention(H))
    check(model, form, lambda model, calls: collected(Attention, calls))


class AddsItsMasks(nn.TransformerEncoderLayer):
    """A layer with attention of its own, which adds the masks that it is given to its scores."""

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        scores = src @ src.mT + src_mask
        return src + (scores + src_key_padding_mask[:, None]).softmax(-1) @ src


@pytest.mark.parametrize("mask", [ahead(S), ahead(S).mT.triu(-1)], ids=["causal", "window"])
@pytest.mark.parametrize("way", ["converted", "built"])
def test_bool_masks_are_additive_where_a_layer_adds_them(way, mask):
    theirs = nn.TransformerEncoder(AddsItsMasks(D, H, **layer_options()), 2, enable_nested_tensor=False)
    if way == "converted":
        ours = copy.deepcopy(theirs)
        assert fastformer.convert(ours).changed
    else:
        ours = fastformer.TransformerEncoder(AddsItsMasks(D, H, **layer_options()), 2)
    x, hidden = torch.randn(B, S, D), torch.arange(S) >= torch.tensor([[S], [3], [2]])
    expected = theirs(x, mask, hidden)
    torch.testing.assert_close(ours(x, mask, hidden)[~hidden], expected[~hidden])


class OnlyTheHint(nn.TransformerEncoderLayer):
    """As rotary variants do: a mask of its own making, from the hint alone."""

    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        mask = additive(ahead(x.shape[1])) if is_causal else None
        return self.dropout1(self.self_attn(x, x, x, attn_mask=mask, need_weights=False)[0])


@pytest.mark.parametrize("own", [0, 1])
def test_no_token_sees_the_future_where_a_layer_counts_on_the_hint(own):
    model = encoder()
    layer = OnlyTheHint(D, H, **layer_options())
    layer.load_state_dict(model.layers[own].state_dict())
    model.layers[own] = layer
    ours = copy.deepcopy(model)
    fastformer.convert(ours)
    x = torch.randn(B, S, D)
    mask = nn.Transformer.generate_square_subsequent_mask(S)
    torch.testing.assert_close(ours(x, mask), model(x, mask))
    later = x.clone()
    later[:, -1] += 1.0
    torch.testing.assert_close(ours(later, mask)[:, :-1], ours(x, mask)[:, :-1])


def test_a_mask_that_learns_keeps_its_gradient_beside_a_hook():
    model = fastformer.TransformerEncoder(fastformer.TransformerEncoderLayer(D, H, **layer_options()), 1)
    model.layers[0].register_forward_hook(lambda *_: None)
    mask = torch.zeros(S, S, requires_grad=True)
    model(torch.randn(B, S, D), mask).square().sum().backward()
    assert mask.grad is not None
    assert mask.grad.abs().sum() > 0


def test_layers_that_differ_in_the_order_of_dimensions():
    layers = [nn.TransformerEncoderLayer(D, H, **layer_options(batch_first=first)) for first in (True, False)]
    model = nn.TransformerEncoder(layers[0], 2, enable_nested_tensor=False)
    model.layers[1] = layers[1]
    ours = copy.deepcopy(model)
    fastformer.convert(ours)
    x, hidden = torch.randn(S, S, D), ahead(S)
    hidden = hidden & hidden.any(-1, keepdim=True)
    torch.testing.assert_close(ours(x, src_key_padding_mask=hidden), model(x, src_key_padding_mask=hidden))
    assert ours.obstacle() == "the layers differ in batch_first"
