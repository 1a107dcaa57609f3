"""convert(also=): subclasses that their caller says compute what torch's class does, tried before it is believed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastformer
from tests.nn.conversion.conversion_cases import FF, B, D, H, S

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


class Casting(nn.LayerNorm):
    """As image libraries have it: in the dtype of the parameters, back in that of the input."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).to(x.dtype)


class InFloat(nn.LayerNorm):
    """All of it in fp32, in other steps than torch's."""

    def forward(self, x):
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        y = centred * (centred.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (y * self.weight.float() + self.bias.float()).to(x.dtype)


class Doubled(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class ChannelsFirst(nn.LayerNorm):
    """Of channels in dimension 1, as networks of speech have it: of two dimensions the same as torch's."""

    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class OtherEps(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps * 2)


class StopsGradient(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight.detach(), self.bias, self.eps)


class HalfGradient(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x / 2 + x.detach() / 2)


class Wide(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x).double()


class OnlyInTraining(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) if self.training else x


class Raises(nn.LayerNorm):
    def forward(self, x):
        raise KeyError("no such thing")


class OwnState(nn.LayerNorm):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "gamma"] = self.weight


class Root(nn.RMSNorm):
    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class Attention(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Unmasked(nn.MultiheadAttention):
    def forward(self, q, k, v, key_padding_mask=None, need_weights=True, attn_mask=None, average_attn_weights=True):
        return super().forward(q, k, v, need_weights=need_weights, average_attn_weights=average_attn_weights)


class EncoderLayer(nn.TransformerEncoderLayer):
    pass


class TwiceDropped(nn.TransformerEncoderLayer):
    def forward(self, *args, **kwargs):
        return self.dropout(super().forward(*args, **kwargs))


class DecoderLayer(nn.TransformerDecoderLayer):
    pass


class Encoder(nn.TransformerEncoder):
    pass


class Decoder(nn.TransformerDecoder):
    pass


class Transformer(nn.Transformer):
    pass


TAKEN = {
    "casting": (lambda: Casting(D), fastformer.LayerNorm),
    "in fp32": (lambda: InFloat(D), fastformer.LayerNorm),
    "without parameters": (lambda: Casting(D, elementwise_affine=False), fastformer.LayerNorm),
    "without eps": (lambda: Casting(D, eps=0.0), fastformer.LayerNorm),
    "two dimensions": (lambda: Casting((3, D)), fastformer.LayerNorm),
    "frozen": (lambda: Casting(D).requires_grad_(False), fastformer.LayerNorm),
    "rms": (lambda: Root(D, 1e-6), fastformer.RMSNorm),
    "attention": (lambda: Attention(D, H, dropout=0.3), fastformer.MultiheadAttention),
    "attention, batch first": (
        lambda: Attention(D, H, batch_first=True, kdim=6, vdim=4),
        fastformer.MultiheadAttention,
    ),
    "encoder layer": (lambda: EncoderLayer(D, H, FF), fastformer.TransformerEncoderLayer),
    "decoder layer": (lambda: DecoderLayer(D, H, FF, batch_first=True), fastformer.TransformerDecoderLayer),
    "encoder": (lambda: Encoder(nn.TransformerEncoderLayer(D, H, FF), 2), fastformer.TransformerEncoder),
    "decoder": (lambda: Decoder(nn.TransformerDecoderLayer(D, H, FF), 2), fastformer.TransformerDecoder),
    "transformer": (lambda: Transformer(D, H, 1, 1, FF), fastformer.Transformer),
}


# They compute something else there: less than fp64, and squares that fp16 cannot hold where eps matters.
LESS_EXACT = {("in fp32", torch.float64), ("rms", torch.float16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", TAKEN)
def test_what_computes_the_same_is_taken_over_and_given_back(name, training, dtype):
    make, ours = TAKEN[name]
    torch.manual_seed(1)
    module = make().to(dtype).train(training)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model, theirs = nn.Sequential(module).train(training), type(module)
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    before = {n: (type(m), dict(m.__dict__)) for n, m in model.named_modules()}
    state, seed = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = fastformer.convert(model, also={theirs: ours})
    if (name, dtype) in LESS_EXACT:
        assert type(module) is theirs
        assert "differs by" in report.left[0].outcome
        return
    assert not report.left, str(report)
    assert type(module) is ours
    assert "0" in [entry.name for entry in report.changed]
    assert torch.equal(torch.get_rng_state(), seed)
    assert not calls
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert all(m.training == training for m in model.modules())
    fastformer.revert(model)
    assert type(module) is theirs
    assert {n: (type(m), dict(m.__dict__)) for n, m in model.named_modules()} == before


LEFT = {
    "doubled": (lambda: Doubled(D), "the output differs by"),
    "channels first": (lambda: ChannelsFirst(D), "it raised RuntimeError"),
    "channels first, as many as tokens": (lambda: ChannelsFirst(5), "the output differs by"),
    "other eps": (lambda: OtherEps(D, eps=1e-9), "the output differs by"),
    "eps of a norm without parameters": (lambda: OtherEps(D, elementwise_affine=False), "the output differs by"),
    "no gradient": (lambda: StopsGradient(D), "the gradient of weight is there in one of the two only"),
    "another gradient": (lambda: HalfGradient(D), "the gradient of input 1 differs by"),
    "dtype": (lambda: Wide(D), r"the output is float64 \[5, 8\], not float32 \[5, 8\]"),
    "only in training": (
        lambda: OnlyInTraining(D),
        "gradient of bias and the gradient of weight is there in one of the two only",
    ),
    "raises": (lambda: Raises(D), "it raised KeyError: 'no such thing'"),
    "state": (lambda: OwnState(D), "it has a _save_to_state_dict of its own"),
    "meta": (lambda: Casting(D, device="meta"), "it is on meta, where nothing can be tried"),
}


def replaced():
    norm = Casting(D)
    norm.forward = lambda x: x
    return norm


LEFT["replaced"] = (replaced, "its forward was replaced in the instance")


@pytest.mark.parametrize("name", LEFT)
def test_what_differs_is_left_and_told_in_what(name):
    make, reason = LEFT[name]
    module = make()
    theirs = type(module)
    report = fastformer.convert(module, also={theirs: fastformer.LayerNorm})
    assert type(module) is theirs
    (entry,) = report.left
    assert entry.outcome.startswith("not fastformer.LayerNorm, as also says: ")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(entry.outcome)


@pytest.mark.parametrize(
    ("make", "ours", "reason"),
    [
        (lambda: Unmasked(D, H), fastformer.MultiheadAttention, "differs by"),
        (lambda: TwiceDropped(D, H, FF), fastformer.TransformerEncoderLayer, "differs by"),
    ],
)
def test_masks_and_dropout_are_tried_too(make, ours, reason):
    module = make()
    report = fastformer.convert(module, also={type(module): ours})
    assert type(module) is not ours
    assert reason in next(entry.outcome for entry in report.left if entry.name == "")


def test_others_of_the_class_are_not_taken_along():
    model = nn.Sequential(Casting(D), Doubled(D))
    report = fastformer.convert(model, also={Casting: fastformer.LayerNorm})
    assert [type(m) for m in model] == [fastformer.LayerNorm, Doubled]
    assert [(e.name, e.outcome) for e in report.left] == [("1", "a subclass, which may do something else")]


def test_a_layer_with_such_a_norm_runs_without_padding():
    layer = nn.TransformerEncoderLayer(D, H, FF, batch_first=True)
    layer.norm1, layer.norm2 = Casting(D), Casting(D)
    stack = nn.TransformerEncoder(layer, 1)
    assert [e.outcome for e in fastformer.convert(copy.deepcopy(stack)).padded] == ["layers.0.norm1 is a Casting"]
    assert not fastformer.convert(stack, also={Casting: fastformer.LayerNorm}).padded
    assert not stack(torch.randn(B, S, D), src_key_padding_mask=torch.arange(S).expand(B, S) > 1)[:, 2:].any()


@pytest.mark.parametrize(
    ("also", "error", "message"),
    [
        ({Casting(D): fastformer.LayerNorm}, TypeError, r"also must map classes of modules to ours, not Casting\("),
        ({Casting: "LayerNorm"}, TypeError, "also must map classes of modules to ours, not 'LayerNorm'"),
        ({int: fastformer.LayerNorm}, TypeError, "also must map classes of modules to ours, not <class 'int'>"),
        ({Casting: nn.LayerNorm}, ValueError, r"to torch.nn.LayerNorm, which is none of fastformer's LayerNorm, RMSN"),
        ({Casting: fastformer.FeedForward}, ValueError, "to fastformer.FeedForward, which is none of fastformer's"),
        (
            {nn.Linear: fastformer.LayerNorm},
            ValueError,
            r"maps torch.nn.Linear to fastformer.LayerNorm: no subclass of",
        ),
        ({Root: fastformer.LayerNorm}, ValueError, r"to fastformer.LayerNorm: no subclass of torch.nn.LayerNorm"),
    ],
)
def test_wrong_maps_are_refused_before_anything_changes(also, error, message):
    model = nn.Sequential(nn.LayerNorm(D))
    with pytest.raises(error, match=message):
        fastformer.convert(model, also=also)
    assert type(model[0]) is nn.LayerNorm


def test_a_subclass_of_ours_may_be_one_too():
    class Own(fastformer.LayerNorm):
        pass

    module = Own(D)
    fastformer.convert(module, also={Own: fastformer.LayerNorm})
    assert type(module) is fastformer.LayerNorm
    assert not fastformer.convert(module, also={Own: fastformer.LayerNorm}).changed
    fastformer.revert(module)
    assert type(module) is Own
