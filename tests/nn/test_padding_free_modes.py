"""Stacks that skip padding in inference, on nested tensors, compiled, traced, checkpointed and transformed."""

import copy

import pytest
import torch
from torch import Tensor, nn

import fastformer
from fastformer.packing import Layout, from_nested, to_nested
from tests.nn.layer_cases import AHEAD, FF, PADDING, STACKS, B, D, S, T, inputs_for, twins
from tests.support.closeness import assert_close, assert_same, random

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
]


@pytest.mark.parametrize("kind", STACKS)
def test_inference_is_training_without_dropout(kind, tokens_seen):
    ours, _ = twins(kind, dropout=0.3)
    hidden, hidden_keys = PADDING["left"]
    x = inputs_for(kind)
    names = ("src_key_padding_mask",) if "Encoder" in kind else ("tgt_key_padding_mask", "memory_key_padding_mask")
    masks = dict(zip(names, (hidden, hidden_keys), strict=False))
    dropped = ours(*x, **masks)
    expected = ours.eval()(*x, **masks)
    assert not torch.allclose(dropped, expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(ours(*x, **masks), expected.detach())
    assert set(tokens_seen) == {int((~hidden).sum())}


@pytest.mark.parametrize("batch_first", [True, False])  # which means nothing to a nested tensor
def test_nested_tensors_go_in_and_come_out(batch_first):
    ours, _ = twins("Transformer", batch_first=batch_first)
    layout, source = Layout.from_lengths([5, 2, 3]), Layout.from_lengths([1, 4, 2])
    x, memory = random(layout.total, D), random(source.total, D)
    out = ours(to_nested(memory, source), to_nested(x, layout), tgt_is_causal=True)
    assert out.is_nested
    assert out.layout == torch.jagged
    tokens, again = from_nested(out)
    assert again.lengths.tolist() == [5, 2, 3]
    expected = ours.decoder.packed(x, layout, ours.encoder.packed(memory, source), source)
    assert_same(tokens, expected, [x, memory, *ours.parameters()])
    tokens, _ = from_nested(ours.encoder(to_nested(memory, source), is_causal=True))
    assert_close(tokens, ours.encoder.packed(memory, source, causal=True))
    tokens, _ = from_nested(ours.decoder(to_nested(x, layout), to_nested(memory, source)))
    assert_close(tokens, ours.decoder.packed(x, layout, memory, source, causal=False))


def test_meta_and_fake_tensors_have_the_shape_of_the_output():
    ours, _ = twins("TransformerEncoder", dtype=torch.float32)
    x, hidden = torch.randn(B, T, D), PADDING["right"][0]
    meta = copy.deepcopy(ours).to("meta")
    assert meta(x.to("meta"), src_key_padding_mask=hidden.to("meta")).shape == (B, T, D)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(t) for t in (x, hidden)]
        assert ours(fake[0], src_key_padding_mask=fake[1]).shape == (B, T, D)


def test_layers_that_are_computed_again_in_backward_change_no_bit():
    ours, _ = twins("TransformerEncoder", dtype=torch.float32, dropout=0.25)
    x, masks, outs = random(B, T, D, dtype=torch.float32), {"src_key_padding_mask": PADDING["right"][0]}, []
    for ours.checkpoint_activations in (False, True):
        torch.manual_seed(3)
        outs.append(ours(x, **masks))
    assert_same(*outs, [x, *ours.parameters()], roundings=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_is_right_for_other_masks():
    ours, _ = twins("TransformerDecoder", dtype=torch.float32)
    given = {"tgt": torch.randn(B, T, D), "memory": torch.randn(B, S, D), "tgt_key_padding_mask": PADDING["right"][0]}
    traced = torch.jit.trace(ours, example_kwarg_inputs=given, check_trace=False)
    given["tgt_key_padding_mask"] = PADDING["left"][0]
    assert_close(traced(**given), ours(**given))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # SDPA under vmap
def test_masks_under_vmap_and_derivatives_in_forward_mode():
    """With masks that are mapped over the batch runs padded."""
    ours, _ = twins("TransformerEncoder")
    ours.eval()
    x, hidden = random(B, T, D, grad=False), torch.stack([PADDING["right"][0], PADDING["none"][0]])
    tilted = torch.stack([AHEAD, AHEAD.T])  # a mask of scores each
    with torch.no_grad():
        expected = torch.stack([ours(x, mask, hide) for mask, hide in zip(tilted, hidden, strict=True)])
        assert_close(torch.func.vmap(lambda mask, hide: ours(x, mask, hide))(tilted, hidden), expected)
        tangent, step = torch.randn_like(x), 1e-6
        out, along = torch.func.jvp(lambda y: ours(y, src_key_padding_mask=hidden[0]), (x,), (tangent,))
        numeric = (ours(x + step * tangent, src_key_padding_mask=hidden[0]) - out) / step
    assert_close(along, numeric, roundings=1e11)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_sequence_by_vmap():
    ours, _ = twins("TransformerEncoder")
    parameters = {name: p.detach() for name, p in ours.named_parameters()}
    x, hidden = random(B, T, D, grad=False), PADDING["gaps"][0]

    def loss(parameters: dict[str, Tensor], x: Tensor, hidden: Tensor) -> Tensor:
        out = torch.func.functional_call(ours, parameters, (x[None],), {"src_key_padding_mask": hidden[None]})
        return out.pow(3).sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, hidden)
    for b in range(B):
        alone = torch.func.grad(loss)(parameters, x[b], hidden[b])
        assert_close([together[name][b] for name in alone], list(alone.values()))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_inference_path_has_the_same_zeros():
    """It takes an even number of heads only."""
    torch.backends.mha.set_fastpath_enabled(True)
    layer = nn.TransformerEncoderLayer(8, 2, FF, batch_first=True, dtype=torch.float64)
    torchs = nn.TransformerEncoder(layer, 2).eval()
    ours = fastformer.TransformerEncoder(layer, 2).eval()
    ours.load_state_dict(torchs.state_dict())
    x, hidden = random(B, T, 8, grad=False), PADDING["right"][0]
    expected = torchs(x, src_key_padding_mask=hidden)
    assert not expected[hidden].any()  # it skipped the padding
    assert_close(ours(x, src_key_padding_mask=hidden), expected)
