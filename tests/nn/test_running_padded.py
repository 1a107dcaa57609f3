"""Switches and modules that may mix tokens have a stack run padded, with torch's arguments.

To compare the arguments, hooks, subclasses and replaced attentions multiply what they return with a number made of the
arguments: names, types, dtypes and values of masks and hints (of activations the shape). An argument that differs, or a
call too few or too many, changes the output.
"""

import copy
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import fastformer
from fastformer.packing import Layout, to_nested
from tests.nn.layer_cases import BESIDE_TORCH, FF, STACKS, B, D, H, S, T, build, inputs_for, twins
from tests.nn.layer_cases import PADDING as HIDDEN
from tests.nn.layer_cases import check as compare
from tests.support.all_pairs import all_pairs
from tests.support.closeness import assert_close, gradients, random
from tests.support.masks import ahead, minus_infinity, right

pytestmark = BESIDE_TORCH
KINDS = ("TransformerEncoder", "TransformerDecoder", "Transformer")
# An attn_mask for a length, and the value of is_causal.
MASKS: dict[str, tuple[Callable[[int], Tensor] | None, bool | None]] = {
    "none": (None, None),
    "bool causal": (ahead, None),
    "bool causal, is_causal": (ahead, True),
    "bool causal, not is_causal": (ahead, False),
    "causal": (lambda n: minus_infinity(ahead(n)), None),
    "bool window": (lambda n: ahead(n) | ahead(n).mT.triu(-1).tril(-2), None),
    "bool of each head": (lambda n: ahead(n).expand(B * H, n, n), None),
    "additive": (lambda n: torch.linspace(-1, 1, n * n, dtype=torch.float64).view(n, n), None),
}
PADDING = {"no padding": None, "padding": lambda hidden: hidden, "float padding": minus_infinity}
FORMS = [(mask, padding) for mask in MASKS for padding in PADDING]


def arguments(kind: str, mask: str, padding: str) -> dict[str, Any]:
    """Return a mask of that form on self-attention, and padding of that form everywhere."""
    make, stated = MASKS[mask]
    hide = PADDING[padding]
    own, hidden = (
        {n: None if form is None else form(x) for n, x in masks.items()}
        for form, masks in ((make, {T: T, S: S}), (hide, {T: right([T, 3, 2], T), S: right([S, 3, 2], S)}))
    )
    if kind == "TransformerEncoder":
        return {"mask": own[T], "src_key_padding_mask": hidden[T], "is_causal": stated}
    decoder = {"tgt_mask": own[T], "tgt_key_padding_mask": hidden[T], "tgt_is_causal": stated}
    decoder["memory_key_padding_mask"] = hidden[S]
    if kind == "TransformerDecoder":
        return decoder
    return {"src_mask": own[S], "src_is_causal": stated, "src_key_padding_mask": hidden[S], **decoder}


def scaled(out: Any, *args: Any, **kwargs: Any) -> Any:
    """Multiply an output with a number from 0.5 to 2.5 that depends on the arguments."""
    facts = [
        (name, (x.dtype, x.shape, None if x.shape[-1] in (D, FF) else x.tolist()) if isinstance(x, Tensor) else x)
        for name, x in (*enumerate(args), *sorted(kwargs.items()))
    ]
    factor = 0.5 + 2.0 * zlib.crc32(repr(facts).encode()) / 2**32
    return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor


def scale(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
    return scaled(out, *args, **kwargs)


def converted(torchs: nn.Module) -> nn.Module:
    model = copy.deepcopy(torchs)
    assert fastformer.convert(model).changed
    return model


def check(kind: str, torchs: nn.Module, model: nn.Module, forms: list[tuple[str, str]] = FORMS) -> None:
    """Compare outputs at real tokens."""
    for form in forms:
        inputs, masks = inputs_for(kind), arguments(kind, *form)
        real = ~right([T, 3, 2], T) if form[1] != "no padding" else slice(None)
        assert_close(model(*inputs, **masks)[real], torchs(*inputs, **masks)[real])


def places(kind: str) -> list[str]:
    """Name every module but the model, and those that torch never calls as modules."""
    return [name for name, _ in build(nn, kind).named_modules() if name and not name.endswith(("out_proj", "layers"))]


# Of the first layer in post-norm, of the second in pre-norm; a Transformer's own calls are those of its stacks.
HOOKED = [
    *((kind, place, place.startswith("layers.1")) for kind in KINDS[:2] for place in places(kind)),
    *((KINDS[2], place, False) for place in places(KINDS[2]) if place.count(".") < 3),
]


@pytest.mark.parametrize("number", range(len(HOOKED)), ids=["-".join(map(str, each)) for each in HOOKED])
def test_a_hook_gets_torchs_arguments(number):
    kind, place, norm_first = HOOKED[number]
    torchs = build(nn, kind, norm_first=norm_first)
    model = converted(torchs)
    for each in (torchs, model):
        each.get_submodule(place).register_forward_hook(scale, with_kwargs=True)
    attends = place.endswith(("attn", *"0123456789")) or "." not in place
    check(kind, torchs, model, FORMS[number % 3 :: 3] if attends else FORMS[1:2])


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_all_modules_get_torchs_arguments(kind, norm_first):
    torchs = build(nn, kind, norm_first=norm_first, activation=nn.GELU())
    model, calls = converted(torchs), []
    # Without keyword arguments: torch's handle does not undo the registration of a global hook that gets them.
    handle = register_module_forward_hook(lambda module, args, out: calls.append(module) or scaled(out, *args))
    try:
        check(kind, torchs, model, FORMS[::4])
    finally:
        handle.remove()
    assert len(calls) >= 10 * 2 * len(FORMS[::4])


class OwnBlocks:
    def _sa_block(self, *args, **kwargs):
        return scaled(super()._sa_block(*args, **kwargs), *args, **kwargs)

    def _mha_block(self, *args, **kwargs):
        return scaled(super()._mha_block(*args, **kwargs), *args, **kwargs)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_replaced_blocks_of_a_layer_get_torchs_arguments(kind):
    torchs = build(nn, kind)
    model = converted(torchs)
    for stack in (torchs, model):
        for block in ("_sa_block", "_ff_block"):
            run = getattr(stack.layers[1], block)
            own = lambda *args, run=run, **options: scaled(run(*args, **options), *args, **options)  # noqa: E731
            setattr(stack.layers[1], block, own)
    check(kind, torchs, model)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("way", ["converted", "built"])
def test_a_subclass_of_a_layer_gets_torchs_arguments(kind, way):
    torchs, model = (
        getattr(library, kind)(
            type("Own", (OwnBlocks, getattr(library, f"{kind}Layer")), {})(
                D, H, dim_feedforward=FF, dropout=0.0, batch_first=True, dtype=torch.float64
            ),
            2,
        )
        for library in (nn, fastformer)
    )
    model.load_state_dict(torchs.state_dict())
    check(kind, torchs, converted(torchs) if way == "converted" else model)


class Attention(nn.Module):
    """Attention of a user, without projections."""

    in_proj_bias, _qkv_same_embed_dim, num_heads, batch_first = None, True, H, True

    def forward(self, q, k, v, attn_mask=None, key_padding_mask=None, need_weights=True, is_causal=False):
        return scaled((q @ k.mT).softmax(-1) @ v, attn_mask, key_padding_mask, need_weights, is_causal), None


@pytest.mark.parametrize(
    ("kind", "at"), [(KINDS[0], "self_attn"), (KINDS[1], "self_attn"), (KINDS[1], "multihead_attn")]
)
def test_a_replaced_attention_gets_torchs_arguments(kind, at):
    torchs = build(nn, kind)
    setattr(torchs.layers[1], at, Attention())
    check(kind, torchs, converted(torchs))


def test_layers_that_differ_in_the_order_of_dimensions():
    torchs = build(nn, KINDS[0])
    torchs.layers[1].self_attn.batch_first = False
    stack, x = converted(torchs), random(T, T, D)
    hidden = ahead(T) & ahead(T).any(-1, keepdim=True)
    assert_close(stack(x, src_key_padding_mask=hidden), torchs(x, src_key_padding_mask=hidden))
    assert stack.obstacle() == "the layers differ in batch_first"


@pytest.mark.parametrize("kind", STACKS)
def test_padding_free_can_be_set_for_a_call_a_stack_and_all_stacks(kind, monkeypatch, tokens_seen):
    stack, torchs = twins(kind)
    inputs = inputs_for(kind)
    mask = {"src_key_padding_mask" if "Encoder" in kind else "tgt_key_padding_mask": HIDDEN["right"][0]}

    def runs_padded(**arguments: object) -> bool:
        tokens_seen.clear()
        stack(*inputs, **mask, **arguments)
        return tokens_seen[0] == B * T

    assert not runs_padded()
    assert runs_padded(padding_free=False)
    assert_close(stack(*inputs, **mask, padding_free=False), torchs(*inputs, **mask))
    with torch.no_grad():
        assert_close(stack.eval()(*inputs, **mask, padding_free=False), torchs(*inputs, **mask))
    stack.train().padding_free = False
    assert runs_padded()
    assert not runs_padded(padding_free=True)
    assert runs_padded(padding_free=None)
    del stack.padding_free
    monkeypatch.setattr(type(stack), "padding_free", False)
    assert runs_padded()
    assert list(copy.deepcopy(stack).state_dict()) == list(torchs.state_dict())


class OfBatch(nn.LayerNorm):
    def forward(self, x):
        return x - x.mean((0, 1))


CHANGES = {
    "layers.1.linear1 has hooks": lambda layer: layer.linear1.register_forward_hook(lambda *_: None),
    "layers.1 has hooks": lambda layer: layer.register_forward_hook(lambda module, args, out: out.flip(1)),
    "layers.1.norm2 is a OfBatch": lambda layer: setattr(layer, "norm2", OfBatch(D, dtype=torch.float64)),
    "layers.1.norm2 normalises over 2 dimensions": lambda layer: setattr(
        layer, "norm2", nn.LayerNorm((T, D), dtype=torch.float64)
    ),
    "layers.1.activation is a function that is not declared token_wise": lambda layer: setattr(
        layer, "activation", lambda x: x.softmax(1)
    ),
    "layers.1.activation is a Softmax": lambda layer: setattr(layer, "activation", nn.Softmax(1)),
    "layers.1.self_attn has add_bias_kv or add_zero_attn": lambda layer: setattr(
        layer,
        "self_attn",
        fastformer.MultiheadAttention(D, H, add_bias_kv=True, batch_first=True, dtype=torch.float64),
    ),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_module_that_may_mix_tokens_gets_the_padded_batch(reason, tokens_seen):
    model, torchs = twins("TransformerEncoder", norm_first=True)
    assert model.obstacle() is None
    CHANGES[reason](model.layers[1])
    assert model.obstacle() == reason
    torchs.layers[1] = copy.deepcopy(model.layers[1])
    hidden = HIDDEN["right"][0]
    compare(model, torchs, (random(B, T, D),), hidden, src_key_padding_mask=hidden)
    assert set(tokens_seen) == {B * T}


def test_a_foreign_layer_or_norm_gets_the_padded_batch():
    class Own(fastformer.TransformerEncoderLayer):
        def forward(self, src, **masks):
            return super().forward(src, **masks).flip(1)

    stack = fastformer.TransformerEncoder(Own(D, H, FF, batch_first=True), 2)
    assert stack.obstacle() == "layers.0 is a Own that overrides forward or a block"
    nested = to_nested(torch.zeros(3, D), Layout.from_lengths([2, 1]))
    message = "must not be nested where layers need a padded batch: layers.0 is a Own that overrides forward or a block"
    with pytest.raises(RuntimeError, match="src " + message):
        stack(nested)
    norm = nn.BatchNorm1d(T)
    stack = fastformer.TransformerEncoder(fastformer.TransformerEncoderLayer(D, H, FF), 2, norm)
    assert stack.obstacle() == "norm is a BatchNorm1d"
    stack.norm = nn.LayerNorm((T, D))
    assert stack.obstacle() == "norm normalises over 2 dimensions"


def test_a_mask_that_changes_before_backward_where_hooks_keep_the_padding():
    actual, x = [], random(B, T, D)
    for stack in twins("TransformerEncoder"):
        hidden = HIDDEN["right"][0].clone()
        stack.layers[0].register_forward_hook(lambda *_: None)
        out = stack(x, src_key_padding_mask=hidden)
        hidden.zero_()
        actual.append(gradients(out.masked_fill(HIDDEN["right"][0][..., None], 0.0), [x, *stack.parameters()]))
    assert_close(*actual)


class OwnEncoder(fastformer.TransformerEncoder):
    def forward(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
        return super().forward(src, mask, src_key_padding_mask, is_causal) + 1


@pytest.mark.parametrize(("cls", "batch_first"), [(OwnEncoder, True), (fastformer.TransformerEncoder, False)])
def test_custom_stacks_are_called_as_torch_calls_them(cls, batch_first):
    """Without arguments of fastformer, and with layers whose batch is another dimension."""
    layer = fastformer.TransformerEncoderLayer(D, H, FF, 0.0, batch_first=batch_first, dtype=torch.float64)
    encoder = cls(layer, 1)
    assert fastformer.Transformer(D, H, custom_encoder=encoder).encoder is encoder
    model, torchs = twins("Transformer")
    model.encoder, torchs.encoder = encoder, copy.deepcopy(encoder)
    hidden = right([1, 3, 2], B)
    masks = {"src_key_padding_mask": hidden, "tgt_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    compare(model, torchs, (random(B, B, D), random(B, B, D)), hidden, **masks)


@pytest.mark.parametrize(
    ("where", "kind", "batch_first"), all_pairs(["stack", "layer", "attention"], STACKS, [True, False])
)
def test_hooks_see_padded_batches_when_packed_is_called(where, kind, batch_first):
    stack, _ = twins(kind, batch_first=batch_first)
    module = {"stack": stack, "layer": stack.layers[1], "attention": stack.layers[1].self_attn}[where]
    layout = Layout.from_lengths([3, 5, 0])
    x = [random(8, D), layout] if kind == "TransformerEncoder" else [random(8, D), layout, random(8, D), layout]
    plain, shapes = stack.packed(*x, causal=True), []

    def double(module, args, kwargs, out):
        shapes.append(kwargs.get("query", args[0] if args else None).shape)
        return (out[0] * 2.0, out[1]) if isinstance(out, tuple) else out * 2.0

    handle = module.register_forward_hook(double, with_kwargs=True)
    out = stack.packed(*x, causal=True)
    assert shapes == [(3, 5, D) if batch_first else (5, 3, D)]
    assert not torch.allclose(out, plain)
    if where == "stack":
        assert_close(out, plain * 2.0)
    with pytest.raises(ValueError, match="causal must be False with attn_mask"):
        stack.packed(*x, True, torch.zeros(5, 5))
    handle.remove()
    assert_close(stack.packed(*x, causal=True), plain)
