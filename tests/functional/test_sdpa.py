"""`fastformer.sdpa` equals torch's SDPA, and skips what a mask of padding and causality hides."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import fastformer
from fastformer.functional import sdpa as module
from tests.support.closeness import assert_close

B, H, S, K = 3, 2, 260, 8  # long enough to be skipped in training
LENGTHS = torch.tensor([S, 31, 0])
ROW = torch.arange(S)
RIGHT = LENGTHS[:, None] > ROW  # [B, S], True = a real key
LEFT = RIGHT.flip(1)
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()
GAPS = RIGHT & (ROW != 7)


def square(real, causal):
    """Hides padded queries, too."""
    pairs = real[:, None, :, None] & real[:, None, None]
    return pairs & CAUSAL if causal else pairs


SKIPPED = {
    "keys, right": RIGHT[:, None, None],
    "keys, left": LEFT[:, None, None],
    "keys, one row": RIGHT[1:2, None, None],
    "causal": CAUSAL,
    "causal, 4": CAUSAL[None, None],
    "causal and keys, right": RIGHT[:, None, None] & CAUSAL,
    "causal and keys, left": LEFT[:, None, None] & CAUSAL,
    "queries and keys, right": square(RIGHT, False),
    "queries and keys, left": square(LEFT, False),
    "all, causal": square(LEFT, True),
    "all heads": RIGHT[:, None, None] & CAUSAL,
}
OTHERS = {
    "gaps": GAPS[:, None, None],
    "a window": (ROW[:, None] - ROW).abs() < 9,
    "causal after a prefix": CAUSAL | (ROW < 9),
    "a head's own": (torch.arange(H)[:, None, None] * 9 + 3 > ROW).expand(B, H, S, S),
    "a bias": torch.where(ROW < 130, 0.0, 1.0)[None],
    "little padding": (S - torch.arange(B)[:, None] > ROW)[:, None, None],
}
FORMS = {
    "bool": lambda mask: mask,
    "added": lambda mask: (
        torch.zeros(mask.shape).masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else mask
    ),
}


@pytest.fixture
def calls(monkeypatch):
    """The masks that torch's SDPA gets inside of ours."""
    seen = []
    torchs = F.scaled_dot_product_attention

    def recorded(query, key, value, attn_mask=None, *args, **options):
        seen.append(attn_mask)
        return torchs(query, key, value, attn_mask, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    return seen


def inputs(batch=B, length=S):
    torch.manual_seed(1)
    return [torch.randn(batch, length, H, K).transpose(1, 2).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*SKIPPED, *OTHERS])
def test_values_and_gradients_are_those_of_torch(name, form, calls):
    mask = FORMS[form]((SKIPPED | OTHERS)[name])
    mask = mask.expand(B, H, S, S) if name == "all heads" else mask
    qkv = inputs()
    out = fastformer.sdpa(*qkv, mask)
    assert all((each is None) == (name in SKIPPED) for each in calls)
    expected = F.scaled_dot_product_attention(*qkv, mask)
    direction = torch.randn_like(out)
    for actual in (
        (out, expected),
        *zip(*(torch.autograd.grad(x, qkv, direction) for x in (out, expected)), strict=True),
    ):
        assert_close(*actual)


@pytest.mark.parametrize("name", [*SKIPPED, "gaps"])
def test_the_call_of_a_gpu_gives_the_same(name, monkeypatch, calls):
    """By functional.attention, on a CPU here."""
    monkeypatch.setattr(module, "_uses_kernels", lambda query: True)
    mask, qkv = (SKIPPED | OTHERS)[name], inputs()
    out, expected = fastformer.sdpa(*qkv, mask), F.scaled_dot_product_attention(*qkv, mask)
    assert calls[0] is not mask
    assert_close(out, expected)


def test_a_mask_is_read_once_until_it_changes(monkeypatch):
    qkv, mask, read = inputs(), RIGHT.clone(), []
    find = module._find
    monkeypatch.setattr(module, "_find", lambda *arguments: read.append(1) or find(*arguments))
    for _ in range(3):
        fastformer.sdpa(*qkv, mask[:, None, None])  # each layer makes a view of its own
    assert len(read) == 1
    mask[0, 5:] = False
    out = fastformer.sdpa(*qkv, mask[:, None, None])
    assert_close(out, F.scaled_dot_product_attention(*qkv, mask[:, None, None]))
    assert len(read) == 2
    mask.numpy()[1, 9:] = False  # without a new version
    out = fastformer.sdpa(*qkv, mask[:, None, None])
    assert_close(out, F.scaled_dot_product_attention(*qkv, mask[:, None, None]))
    assert len(read) == 3
    with torch.inference_mode():
        copy = mask.clone()
        for length in (S, 40):
            copy[0, length:] = False
            out = fastformer.sdpa(*qkv, copy[:, None, None])
            assert_close(out, F.scaled_dot_product_attention(*qkv, copy[:, None, None]))


def test_one_view_of_a_mask_is_stored():
    buffer = torch.ones(2 * S, 2 * S, dtype=torch.bool).tril()  # of a model that slices it for each length
    for length in range(S, 2 * S, 20):
        fastformer.sdpa(*inputs(length=length), buffer[:length, :length])
    stored = pickle.dumps(module._remembered[buffer])  # the bytes of a copy, and little more
    assert len(stored) < 2 * buffer.numel(), f"{len(stored)} bytes"


def test_other_calls_are_passed_on(calls):
    short = RIGHT[:, :9, None, None].transpose(1, 3)
    qkv = inputs(length=9)
    assert_close(fastformer.sdpa(*qkv, short), F.scaled_dot_product_attention(*qkv, short))
    assert calls[0] is short
    assert_close(fastformer.sdpa(*qkv, is_causal=True), F.scaled_dot_product_attention(*qkv, is_causal=True))
    compiled = torch.compile(fastformer.sdpa, backend="eager", fullgraph=True)
    long, mask = inputs(), RIGHT[:, None, None]
    assert_close(compiled(*long, mask), F.scaled_dot_product_attention(*long, mask))


def test_grouped_heads_scale_autocast_and_dropout():
    (q, k, v), mask = inputs(), RIGHT[:, None, None]
    k, v = k[:, :1], v[:, :1]
    options = {"scale": 0.3, "enable_gqa": True}
    assert_close(fastformer.sdpa(q, k, v, mask, **options), F.scaled_dot_product_attention(q, k, v, mask, **options))
    with torch.autocast("cpu", torch.bfloat16):
        out = fastformer.sdpa(*inputs(), mask)
        assert_close(out, F.scaled_dot_product_attention(*inputs(), mask), roundings=4)
    ones = torch.ones(B, H, S, K)
    out = fastformer.sdpa(torch.zeros(B, H, S, K), ones, ones, mask, dropout_p=0.5)
    assert out[0].mean().item() == pytest.approx(1.0, abs=0.05)  # 520 means of 260 weights: 6 * 0.06 / 520 ** 0.5
    assert not out[2].any()


class Attention(torch.nn.Module):
    """Such as people write."""

    def __init__(self):
        super().__init__()
        self.heads = torch.nn.Linear(H * K, 3 * H * K)

    def forward(self, x, mask):
        q, k, v = (y.unflatten(2, (H, K)).transpose(1, 2) for y in self.heads(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.again = torch.nn.LayerNorm(H * K), Attention(), Attention()

    def forward(self, x, mask):
        return self.again(self.attention(self.norm(x), mask), mask)


def sdpa_of(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("wrap", [staticmethod, classmethod, torch.no_grad()], ids=["static", "class", "decorated"])
def test_wrapped_methods_that_call_sdpa_are_found(wrap):
    model = type("Own", (torch.nn.Module,), {"attend": wrap(sdpa_of)})()
    assert [entry.outcome for entry in fastformer.convert(model, sdpa=True).changed] == ["calls fastformer.sdpa"]


def test_converted_modules_skip_and_come_back(calls):
    torch.manual_seed(0)
    model, x, mask = Block(), torch.randn(B, S, H * K), RIGHT[:, None, None]
    expected = model(x, mask)
    fastformer.convert(model)
    assert type(model.attention) is Attention  # only with the option
    model.again.forward = model.again.forward  # replaced in the instance
    report = str(fastformer.convert(model, sdpa=True))
    assert "changed  attention  tests.Attention -> calls fastformer.sdpa" in report
    assert "left  again  tests.Attention : its forward was replaced in the instance" in report
    del model.again.forward
    fastformer.convert(model, sdpa=True)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls.clear()
        assert_close(twin(x, mask), expected)
        assert None in calls
    assert isinstance(model.attention, Attention)
    fastformer.revert(model)
    assert type(model.attention) is type(model.again) is Attention
    calls.clear()
    model(x, mask)
    assert None not in calls
