"""What cannot run packed of a Hugging Face model runs padded and right, and the report says why."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from torch import nn
from transformers import BertConfig, BertModel, RecurrentGemmaConfig, RecurrentGemmaModel

from fastformer.integrations.transformers import obstacles, padded, padding_free
from fastformer.integrations.transformers.layer_hooks import enter
from fastformer.integrations.transformers.masks import mask_rules
from fastformer.nn.padding_free import TOKEN_WISE
from tests.integrations.test_packed_models import assert_same, outcome
from tests.integrations.tiny_transformers import PLAIN, ROUNDINGS, batch, count_packed, pairs, tiny
from tests.support.closeness import assert_close


@pytest.fixture
def seen(monkeypatch):
    return count_packed(monkeypatch)


def reasons(model: nn.Module, **options: Any) -> str:
    report = padding_free(model, **options)
    assert not report.packed
    return " / ".join(entry.outcome for entry in report.padded)


def assert_padded_and_right(name: str, model: nn.Module, seen: list[int], side: str = "right") -> None:
    inputs = pairs(name, side)
    assert_same(outcome(model, inputs), outcome(tiny(name, "eager"), inputs))
    assert not seen


def test_a_recurrence_and_a_convolution():
    config = RecurrentGemmaConfig(**PLAIN, num_key_value_heads=1, attention_window_size=4, lru_width=16)
    assert reasons(RecurrentGemmaModel(config)) == "layer 0, temporal_block.conv_1d is a Conv1d"


class Shifting(nn.Linear):
    """A linear map of the token before, as somebody may write an adapter."""

    def forward(self, x):
        return super().forward(x.roll(1, 1))


@pytest.mark.parametrize(
    "part", [Shifting(32, 16), nn.Sequential(nn.Conv1d(1, 1, 1)), nn.GRU(32, 16), nn.LazyLinear(3)]
)
def test_a_part_of_somebodys_own(part):
    model = tiny("bert")
    model.bert.encoder.layer[1].output.dense = part
    kind = type(part[0] if isinstance(part, nn.Sequential) else part).__name__
    where = "layer 1, output.dense" + (".0" if isinstance(part, nn.Sequential) else "")
    assert reasons(model) == f"{where} is a {kind}"
    assert model.config._attn_implementation == "fastformer"


def test_a_part_that_is_declared_token_wise(monkeypatch, seen):
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    monkeypatch.setattr("fastformer.nn.padding_free.TOKEN_WISE", {*TOKEN_WISE, Doubled})
    model = tiny("bert")
    for layer in model.bert.encoder.layer:
        layer.output.dense.__class__ = Doubled
    expected = outcome(model, batch("bert", "left"))
    model.zero_grad()
    assert padding_free(model).packed
    assert_same(outcome(model, batch("bert", "left")), expected)
    assert len(seen) == 2


class MixingLayer(transformers.models.bert.modeling_bert.BertLayer):
    """A subclass, which may do anything."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return super().forward(hidden_states + hidden_states.roll(1, 1), attention_mask, **kwargs)


def test_a_layer_of_somebodys_own(seen):
    model = tiny("bert", "sdpa")
    model.bert.encoder.layer[1].__class__ = MixingLayer
    assert reasons(model) == "BertEncoder and MixingLayer are not among the classes that were tested"
    assert model.config._attn_implementation == "sdpa"
    assert padding_free(model, also=[MixingLayer]).packed  # the caller knows
    with pytest.raises(TypeError, match="also must hold classes of modules, not 'BertLayer'"):
        padding_free(model, also=["BertLayer"])


MIXING = (
    "mamba", "rwkv", "recurrent", "jamba", "bamba", "zamba", "convbert", "qwen3_next", "funnel", "reformer",
    "longformer", "longt5", "bigbird", "fnet", "canine", "falcon_h1", "xlstm", "minimax.", "nemotron_h",
)  # fmt: skip


def test_a_class_that_fully_shard_made_is_that_which_it_was_made_of(seen):
    model = tiny("bert", "eager")
    for module in (*model.bert.encoder.layer, model.bert.encoder):
        kind = type(module)
        made = {"__module__": "torch.distributed.fsdp._fully_shard._fully_shard"}
        module.__class__ = type(f"FSDP{kind.__name__}", (kind,), made)
    inputs = batch("bert", "left")
    assert padding_free(model).packed
    assert_same(outcome(model, inputs), outcome(tiny("bert", "eager"), inputs))
    assert len(seen) == 2


def test_the_list_holds_no_class_that_mixes_tokens():
    """Recurrences, convolutions and blocks of tokens, by the names of their types."""
    assert len(obstacles.tested()) > 150
    assert not [stack for stack in obstacles.tested() if stack.startswith(MIXING)]


SMALL = {
    "vocab_size": 60,
    "d_model": 16,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "d_ff": 32,
    "num_heads": 4,
    "d_kv": 4,
}


@pytest.mark.parametrize(
    ("model", "config", "settings", "reason"),
    [
        (
            "Lfm2Model",
            "Lfm2Config",
            {**PLAIN, "num_key_value_heads": 2, "layer_types": ["full_attention", "conv"]},
            "layer 1, conv.conv is a Conv1d",
        ),
        (
            "SwitchTransformersModel",
            "SwitchTransformersConfig",
            {**SMALL, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
            "layer 1, layer.1.mlp.router: experts drop what exceeds their capacity, padding included",
        ),
    ],
)
def test_classes_that_mix_tokens_by_configuration(model, config, settings, reason):
    """The record has them without; which tokens an expert drops depends on all others, those of padding included."""
    assert reason in reasons(getattr(transformers, model)(getattr(transformers, config)(**settings)))


def test_layers_left_out_at_random():
    model = tiny("marian", encoder_layerdrop=0.5)
    report = padding_free(model)
    assert [entry.name for entry in report.packed] == ["model.decoder.layers"]
    assert [entry.outcome for entry in report.padded] == ["layerdrop is 0.5: layers are left out at random"]


@pytest.mark.parametrize(("name", "rows"), [("llama", 3), ("llama", 1), ("bert", 3), ("bert", 1)])
def test_layers_left_out_afterwards_raise_and_give_no_wrong_numbers(name, rows):
    model, inputs = tiny(name), {key: x[-rows:] for key, x in batch(name, "right").items()}
    padding_free(model)
    owner = model.model if name == "llama" else model.bert.encoder
    if name == "llama":
        model.config.num_hidden_layers = 1
    else:
        owner.layer = owner.layer[:1]
    with pytest.raises(RuntimeError, match=f"the last layer of {type(owner).__name__} did not run"):
        model(**inputs)
    padded(model)
    model(**inputs)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_hidden_states_and_attention_weights(name, asked, seen):
    inputs = pairs(name, "right")
    expected = tiny(name, "eager")(**inputs, **{asked: True})
    model = tiny(name, "eager")
    padding_free(model)
    actual = model(**inputs, **{asked: True})
    assert not seen
    kinds = [key for key in expected if key.endswith(asked.removeprefix("output_"))]
    assert kinds
    real = {LENGTH: mask.bool() for mask in (inputs["attention_mask"],) for LENGTH in mask.shape[1:]}
    for kind in kinds:
        for one, other in zip(actual[kind], expected[kind], strict=True):
            assert one.shape == other.shape
            if asked == "output_hidden_states" and one.shape[1] in real:
                one, other = one[real[one.shape[1]]], other[real[one.shape[1]]]
            assert_close(one, other, ROUNDINGS)
    model(**inputs)
    assert seen


def test_hidden_states_by_the_configuration(seen):
    model = tiny("llama", output_hidden_states=True)
    padding_free(model)
    assert len(model(**batch("llama", "right")).hidden_states) == 3
    assert not seen


def test_router_logits_are_of_padded_batches(seen):
    """The loss that balances experts takes them by the padding mask."""
    settings = {**PLAIN, "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    inputs, losses = batch("llama", "right"), []
    for pack in (False, True):
        torch.manual_seed(1)
        config = transformers.MixtralConfig(**settings, attn_implementation="eager", experts_implementation="eager")
        model = transformers.MixtralForCausalLM(config).eval()
        if pack:
            assert padding_free(model).packed
        losses.append(model(**inputs).loss)
    assert_close(losses[1], losses[0], ROUNDINGS)
    assert not seen


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_within_a_layer_see_batches(kind, seen):
    model = tiny("bert", "eager")
    padding_free(model)
    shapes = []

    def look(module, *seen_here):
        shapes.append((seen_here[-1] if isinstance(seen_here[-1], torch.Tensor) else seen_here[-1][0]).shape)

    handle = getattr(model.bert.encoder.layer[1].output.dense, kind)(look)
    inputs = batch("bert", "right")
    assert_same(outcome(model, inputs), outcome(tiny("bert", "eager"), inputs))
    assert {shape[:2] for shape in shapes} == {(3, 9)}
    assert len(seen) == 1  # the first layer packs, the second unpacks
    handle.remove()
    model(**inputs)
    assert len(seen) == 3


def test_a_layer_that_unpacks_has_t5s_bias_in_full(seen):
    model = tiny("t5", "eager", num_layers=3)
    padding_free(model)
    model.encoder.block[1].layer[0].register_forward_hook(lambda *_: None)
    inputs = pairs("t5", "left")
    assert_same(outcome(model, inputs), outcome(tiny("t5", "eager", num_layers=3), inputs))
    assert len(seen) == 1 + 2 * 3  # of the encoder the first layer: a bias in full stays so


def test_positions_in_several_dimensions_run_padded(seen):
    """`[3, B, L]`, as for pictures: where B and L are 3, their first dimensions look like those of tokens."""
    model = tiny("llama").model
    padding_free(model)
    layer, table = model.layers[0], torch.randn(3, 3, 3, 4)
    rules = mask_rules(3, 3, 3, attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool())
    given = {"attention_mask": rules, "position_embeddings": (table[0], table[0])}
    assert enter(layer, (torch.randn(3, 3, 16),), given) is not None
    given["position_embeddings"] = (table, table)
    assert enter(layer, (torch.randn(3, 3, 16),), given) is None


def test_feed_forward_in_chunks():
    assert reasons(tiny("bert", chunk_size_feed_forward=3)) == "chunk_size_feed_forward is 3"


def test_masks_of_the_user_run_padded(seen):
    model = tiny("llama")
    padding_free(model)
    inputs = batch("llama", "right")
    over_pairs = inputs["attention_mask"].bool()[:, None, None, :] & torch.ones(9, 9, dtype=torch.bool).tril()
    expected = outcome(tiny("llama", "eager"), inputs)
    assert_same(outcome(model, {**inputs, "attention_mask": over_pairs}), expected)
    assert not seen


def test_another_attention_chosen_afterwards(seen):
    model = tiny("llama")
    padding_free(model)
    model.set_attn_implementation("eager")
    assert_padded_and_right("llama", model, seen)


def test_the_first_column_under_padding_on_the_left_is_zero():
    """What reads a position of padding sees zeros there: a pooler of the first token gives its own value for them."""
    config = BertConfig(**PLAIN)
    config._attn_implementation = "fastformer"
    model = BertModel(config).eval()
    padding_free(model)
    inputs = batch("bert", "left")
    del inputs["labels"]
    pooled = model(**inputs).pooler_output
    assert_close(pooled[1], torch.tanh(model.pooler.dense.bias))
    assert float((pooled[0] - pooled[1]).detach().abs().max()) > 0.01


def test_two_models_of_one_configuration():
    """transformers keeps the name of the attention in it, so both get ours; their numbers stay what they are."""
    config = BertConfig(**PLAIN, attn_implementation="eager")
    one, other = BertModel(config).eval(), BertModel(config).eval()
    inputs = batch("bert", "right")
    del inputs["labels"]
    expected = other(**inputs).last_hidden_state
    padding_free(one)
    assert_close(other(**inputs).last_hidden_state, expected, ROUNDINGS)
    padded(one)
    assert other.config._attn_implementation == "eager"


def test_layers_that_no_model_of_transformers_holds():
    assert reasons(nn.ModuleDict({"one": tiny("bert").bert.encoder})) == "no model of transformers holds it"


def test_the_report():
    model = nn.ModuleDict({"one": tiny("marian", decoder_layerdrop=0.1), "two": nn.Linear(3, 3)})
    lines = str(padding_free(model)).splitlines()
    assert lines == [
        "1 stacks packed, 1 padded",
        "  packed  one.model.encoder.layers  transformers.MarianEncoderLayer : 2 layers",
        "  padded  one.model.decoder.layers  transformers.MarianDecoderLayer : layerdrop is 0.1: layers are left out "
        "at random",
    ]
    assert str(padding_free(nn.Linear(3, 3))) == "0 stacks packed, 0 padded"
