"""The rules that transformers' masks become: the same pairs as its own, flags where they exist, errors where not."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch import Tensor, nn
from transformers import LlamaConfig, masking_utils

from fastformer.integrations.transformers.attention import MaskRules, attention_forward, mask_rules
from tests.integrations.small_configs import LENGTH, VOCABULARY
from tests.integrations.tiny_transformers import ROUNDINGS, dtype_of, tiny
from tests.support.closeness import assert_close

B, H, K = 3, 2, 8
LEFT = torch.zeros(B, dtype=torch.long)
PATTERNS = {
    "causal": masking_utils.causal_mask_function,
    "both ways": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "window of one": masking_utils.sliding_window_causal_mask_function(1),
    "window both ways": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunks": masking_utils.chunked_causal_mask_function(3, LEFT),
    "causal or a prefix": masking_utils.or_masks(
        masking_utils.causal_mask_function, lambda b, h, q, k: (k < 2) & (q >= 0)
    ),
}
# T, S, position of the first query, position of the first key
PLACES = {
    "training": (6, 6, 0, 0),
    "continued": (3, 7, 4, 0),
    "one step": (1, 7, 6, 0),
    "static cache, empty": (4, 9, 0, 0),
    "static cache, begun": (3, 9, 4, 0),
    "static cache, one step": (1, 9, 4, 0),
    "dropped keys": (2, 4, 7, 5),
    "dropped keys, one step": (1, 3, 8, 6),
    "queries beyond the keys": (3, 5, 4, 0),
    "queries before the keys": (3, 5, 0, 2),
}


class Layer(nn.Module):
    """What the attention asks of a layer."""

    is_causal = True


def attended(rules: MaskRules) -> Tensor:
    """Bool `[B, T, S]`: who attends to whom by the weights, which are never 0 for equal scores."""
    _, _, T, S = rules.shape
    q, k, v = torch.zeros(B, H, T, K), torch.zeros(B, H, S, K), torch.randn(B, H, S, K)
    out, weights = attention_forward(Layer(), q, k, v, rules, output_attentions=True)
    assert weights is not None
    assert weights.shape == (B, H, T, S)
    assert_close(out, (weights @ v).transpose(1, 2))
    return weights[:, 0] > 0


def expected(T: int, S: int, q_offset: Any, kv_offset: int, pattern: Any, padding: Tensor | None) -> Tensor:
    mask = masking_utils.sdpa_mask(
        B, T, S, q_offset, kv_offset, pattern, padding, allow_is_causal_skip=False, allow_is_bidirectional_skip=False
    )
    return mask[:, 0]


def padding_mask(kind: str | None, positions: int) -> Tensor | None:
    real = torch.ones(B, positions, dtype=torch.bool)
    match kind:
        case None:
            return None
        case "left":
            real[0, :2], real[1, :1] = False, False
        case "right":
            real[0, -2:], real[1, -1:] = False, False
        case "gaps":
            real[0, 1], real[2, ::2] = False, False
        case "all":
            real[1] = False
    return real


@pytest.mark.parametrize("padding", [None, "left", "right", "gaps", "all", "none"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_pairs_as_the_masks_of_transformers(pattern, place, padding):
    T, S, q_offset, kv_offset = PLACES[place]
    real = padding_mask(padding, min(q_offset + T, kv_offset + S))  # later positions are padding
    rules = mask_rules(
        B, T, S, q_offset=q_offset, kv_offset=kv_offset, mask_function=PATTERNS[pattern], attention_mask=real
    )
    same = expected(T, S, q_offset, kv_offset, PATTERNS[pattern], real)
    assert torch.equal(attended(rules), same)
    position = torch.tensor(q_offset)  # as static caches say it
    rules = mask_rules(
        B, T, S, q_offset=position, kv_offset=kv_offset, mask_function=PATTERNS[pattern], attention_mask=real
    )
    assert torch.equal(attended(rules), same)


def test_a_padding_mask_may_change_before_backward():
    real = padding_mask("left", 6)
    rules = mask_rules(B, 6, 6, attention_mask=real)
    before = attended(rules)
    real.fill_(True)
    assert torch.equal(attended(rules), before)


def test_rules_made_in_advance_pass_a_second_time_and_move_between_devices():
    config = LlamaConfig(attn_implementation="fastformer")
    rules = mask_rules(B, 4, 4)
    embeds = torch.zeros(B, 4, 16)
    assert masking_utils.create_causal_mask(config, embeds, rules, None) is rules
    assert rules.contiguous() is rules
    assert rules.ndim == 4
    moved = mask_rules(B, 4, 4, attention_mask=padding_mask("left", 4)).to("meta", non_blocking=True)
    assert (moved.causal, moved.key_mask.device.type) == (True, "meta")


def test_nothing_looks_at_values_on_a_device():
    """Tensors of device "meta" have none: looking would raise, as it would wait on a GPU."""
    real = padding_mask("left", LENGTH).to("meta")
    q, k = torch.empty(B, 4, LENGTH, K, device="meta"), torch.empty(B, 2, LENGTH, K, device="meta")
    for pattern in (PATTERNS["causal"], PATTERNS["window"], PATTERNS["both ways"]):
        rules = mask_rules(B, LENGTH, LENGTH, mask_function=pattern, attention_mask=real, device="meta")
        assert rules.mask is None
        out, _ = attention_forward(Layer(), q, k, k, rules)
        assert out.shape == (B, LENGTH, 4, K)
        position = torch.tensor(LENGTH - 2, device="meta")
        mask_rules(B, 2, LENGTH, q_offset=position, mask_function=pattern, attention_mask=real, device="meta")


@pytest.mark.parametrize("shape", [(3, 1, LENGTH, LENGTH), (1, 1, LENGTH, LENGTH), (3, 1, 1, LENGTH)])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_masks_of_the_user(name, shape):
    """Bool and additive, and with T5's position bias."""
    ids = torch.randint(3, VOCABULARY, (3, LENGTH))
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True
    additive = torch.zeros(shape, dtype=dtype_of(name)).masked_fill(~mask, -1e30)
    outputs = []
    for attention, given in (("eager", additive), ("fastformer", additive), ("fastformer", mask)):
        model = tiny(name, attention)
        model = model.encoder if name == "t5" else model.model
        outputs.append(model(ids, attention_mask=given).last_hidden_state)
    assert_close(outputs[1], outputs[0], ROUNDINGS)
    assert_close(outputs[2], outputs[0], ROUNDINGS)


def forward(mask: Any = None, T: int = 4, S: int = 4, layer: nn.Module | None = None, **kwargs: Any) -> Any:
    q, k = torch.randn(B, 4, T, K), torch.randn(B, 2, S, K)
    return attention_forward(layer or Layer(), q, k, k, mask, **kwargs)


def seeded(*args: Any, **kwargs: Any) -> Tensor:
    torch.manual_seed(5)
    out: Tensor = forward(*args, **kwargs)[0]
    return out


def test_without_a_mask_the_layer_says_whether_it_is_causal():
    assert_close(seeded(mask_rules(B, 4, 4)), seeded())
    assert_close(seeded(mask_rules(B, 4, 4), is_causal=False), seeded())  # as in eager and sdpa (Moonshine)
    both_ways = mask_rules(B, 4, 4, mask_function=PATTERNS["both ways"])
    assert_close(seeded(both_ways), seeded(is_causal=False))
    with pytest.raises(AssertionError):
        assert_close(seeded(), seeded(is_causal=False))
    assert seeded(T=1, S=6).shape == (B, 1, 4, K)
    assert seeded(T=2, S=6, is_causal=False).shape == (B, 2, 4, K)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_mask": torch.ones(4)}, "does not know head_mask, which may change the result"),
        ({"indices": torch.zeros(1), "cache": object()}, "does not know cache, indices"),
        ({"T": 2, "S": 6}, "attention_mask is None, so the positions of 2 queries among 6 keys are unknown"),
        ({"sliding_window": 2}, "attention_mask is None, but must contain the sliding window of 2"),
        ({"mask": torch.ones(B, 4, dtype=torch.bool)}, r"mask must be broadcastable to .* not of shape \[3, 4\]"),
        ({"mask": mask_rules(B, 5, 4)}, "attention_mask is for 5 queries and 4 keys, not for 4 and 4"),
        ({"mask": mask_rules(B, 4, 5)}, "attention_mask is for 4 queries and 5 keys, not for 4 and 4"),
    ],
)
def test_arguments_that_no_rule_expresses_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        forward(**arguments)


def test_keywords_that_pass_through_layers_change_nothing():
    forward(
        use_cache=True, position_ids=torch.arange(4), output_hidden_states=True, sliding_window=9, s_aux=None,
        num_items_in_batch=torch.tensor(3), deterministic=True, logits_to_keep=1, labels=torch.ones(2, 4),
    )  # fmt: skip


def test_one_query_for_the_whole_batch():
    q, k = torch.randn(1, 4, 2, K), torch.randn(B, 4, 5, K)
    rules = mask_rules(B, 2, 5, mask_function=PATTERNS["both ways"], attention_mask=padding_mask("right", 5))
    out, _ = attention_forward(Layer(), q, k, k, rules)
    assert_close(out, attention_forward(Layer(), q.expand(B, -1, -1, -1), k, k, rules)[0])


@pytest.mark.parametrize(
    "use",
    [
        lambda rules: torch.zeros(4, 4) + rules,
        lambda rules: torch.zeros(4, 4).masked_fill(rules, 0.0),
        lambda rules: torch.cat([rules, torch.zeros(1)]),
        lambda rules: rules[:, :, :, :3],
        lambda rules: rules.size(),
    ],
)
def test_rules_are_no_tensor(use):
    rules = mask_rules(1, 4, 4)
    with pytest.raises((TypeError, AttributeError), match="computes with its attention mask by itself"):
        use(rules)
    assert not hasattr(rules, "size")
    assert copy.deepcopy(rules).shape == rules.shape
