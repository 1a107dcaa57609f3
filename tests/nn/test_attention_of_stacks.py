"""Causality without a mask, and the weights that stacks return on request, against torch.nn.

Letters: B batch, T targets, S sources, H heads, D model width.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
from tests.support.closeness import assert_close, random

B, T, S, H, D = 3, 6, 5, 2, 16
HIDDEN = torch.arange(T) >= torch.tensor([[6], [2], [4]])
SOURCE_HIDDEN = torch.arange(S) >= torch.tensor([[1], [5], [3]])


def ahead(T: int, S: int) -> Tensor:
    return torch.ones(T, S, dtype=torch.bool).triu(1)


def both(batch_first: bool = True, norm_first: bool = False) -> tuple[Any, Any]:
    """A Transformer of torch.nn without dropout, and ours of the same weights."""
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": batch_first, "norm_first": norm_first, "dtype": torch.float64}
    theirs = nn.Transformer(D, H, 2, 2, 24, **options)  # type: ignore[arg-type]
    ours = copy.deepcopy(theirs)
    fastformer.convert(ours)
    return theirs, ours


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("side", ["src", "tgt", "memory"])
def test_is_causal_stands_for_the_causal_mask(side: str, padded: bool) -> None:
    theirs, ours = both()
    source, target = random(B, S, D), random(B, T, D)
    hidden = {"src_key_padding_mask": SOURCE_HIDDEN, "memory_key_padding_mask": SOURCE_HIDDEN} if padded else {}
    sizes = {"src": (S, S), "tgt": (T, T), "memory": (T, S)}[side]
    expected = theirs(source, target, **hidden, **{f"{side}_mask": ahead(*sizes)})
    assert_close(ours(source, target, **hidden, **{f"{side}_is_causal": True}), expected, roundings=1e3)
    assert not torch.allclose(ours(source, target, **hidden), expected)


@pytest.mark.parametrize("kind", ["plain", "zero", "bias"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_is_causal_of_attention(need_weights: bool, kind: str) -> None:
    """The keys of add_zero_attn and add_bias_kv stay open."""
    torch.manual_seed(0)
    ours = fastformer.MultiheadAttention(
        D, H, add_zero_attn=kind == "zero", add_bias_kv=kind == "bias", batch_first=True
    )
    x, memory = torch.randn(B, T, D), torch.randn(B, S, D)
    given = x, memory, memory
    expected, weights = ours(*given, attn_mask=ahead(T, S), need_weights=need_weights)
    out, found = ours(*given, is_causal=True, need_weights=need_weights)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, weights)


def weights_of(model: nn.Module) -> dict[str, list[Tensor]]:
    """What the attentions of torch.nn's layers weigh, by name, once the model is called."""
    seen: dict[str, list[Tensor]] = {}

    def ask(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
        return given, {**named, "need_weights": True, "average_attn_weights": False}

    for name, part in model.named_modules():
        if type(part) is nn.MultiheadAttention:
            part.register_forward_pre_hook(ask, with_kwargs=True)
            kind = name.split(".")[0] + " " + name.split(".")[-1]
            part.register_forward_hook(lambda module, given, out, kind=kind: seen.setdefault(kind, []).append(out[1]))
    return seen


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_weights_are_those_of_torchs_layers(batch_first: bool, norm_first: bool) -> None:
    theirs, ours = both(batch_first, norm_first)
    source, target = random(B, S, D), random(B, T, D)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    seen = weights_of(theirs)
    memory = theirs.encoder(source, src_key_padding_mask=SOURCE_HIDDEN)
    theirs.decoder(target, memory, ahead(T, T), None, HIDDEN, SOURCE_HIDDEN)
    expected = {name: torch.stack(found) for name, found in seen.items()}
    _, own = ours.encoder(source, src_key_padding_mask=SOURCE_HIDDEN, need_weights=True)
    masks = {"tgt_key_padding_mask": HIDDEN, "memory_key_padding_mask": SOURCE_HIDDEN}
    out, decoder, cross = ours.decoder(target, memory, **masks, tgt_is_causal=True, need_weights=True)
    assert own.shape == (2, B, H, S, S)
    assert decoder.shape == (2, B, H, T, T)
    assert cross.shape == (2, B, H, T, S)
    assert_close(own, expected["encoder self_attn"], roundings=1e3)
    assert_close(decoder, expected["decoder self_attn"], roundings=1e3)
    assert_close(cross, expected["decoder multihead_attn"], roundings=1e3)
    assert_close(out, ours.decoder(target, memory, **masks, tgt_is_causal=True), roundings=1e3)
    out.sum().backward()  # through the weights' way, too
    assert all(p.grad is not None for p in ours.decoder.parameters())


def test_what_the_weights_would_pass_by_is_refused() -> None:
    _, ours = both()
    x = random(B, S, D)
    with pytest.raises(ValueError, match="need_weights takes padded batches, not nested tensors"):
        ours.encoder(torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged), need_weights=True)
    with pytest.raises(RuntimeError, match="the stack has no layers, of which need_weights consists"):
        fastformer.TransformerEncoder(fastformer.TransformerEncoderLayer(D, H), 0)(x, need_weights=True)
    ours.encoder.layers[1].register_forward_hook(lambda module, given, out: None)
    with pytest.raises(RuntimeError, match=r"layers\.1 has hooks, which need_weights does not call"):
        ours.encoder(x, need_weights=True)
