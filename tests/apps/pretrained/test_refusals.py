"""What ours cannot be is refused by name: classes, settings with their values, weights."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastformer.apps.pretrained import from_transformers
from fastformer.apps.pretrained.models import architectures
from tests.apps.pretrained.tiny_models import ALL, build

transformers = pytest.importorskip("transformers")

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
OTHER_BANDS = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
OTHER_BANDS |= {"high_freq_factor": 8.0, "original_max_position_embeddings": 32}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": YARN}, "llama: rope_type must be default, linear or llama3, not 'yarn'"),
    ("llama", {"rope_parameters": DYNAMIC}, "rope_type .* not 'dynamic'"),
    ("llama", {"rope_parameters": OTHER_BANDS}, r"rope_parameters\['high_freq_factor'\] must be 4.0, not 8.0"),
    ("qwen2", {"rope_parameters": PARTIAL}, "rope_parameters must be .*partial_rotary_factor"),
    ("llama", {"attention_bias": True}, "attention_bias must be that of mlp_bias, False, not True"),
    ("llama", {"mlp_bias": True}, "attention_bias must be that of mlp_bias, True, not False"),
    ("llama", {"hidden_act": "gelu_new"}, "hidden_act must be one of .*, not 'gelu_new'"),
    ("llama", {"eos_token_id": None}, "eos_token_id must be a whole number below vocab_size, 37, not None"),
    ("qwen2", SLIDING, "layer_types must be the same for all layers, not .*'full_attention', 'sliding_attention'"),
    ("qwen3", {**SLIDING, "rms_norm_eps": 1e-6}, "layer_types must be the same"),
    ("qwen3", {"attention_bias": True}, "qwen3: attention_bias must be False, not True"),
    ("qwen3", {"rms_norm_eps": 1e-5}, "rms_norm_eps must be 1e-06, not 1e-05"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be False, not True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights must be True, not False"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn must be False, not True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention must be False, not True"),
    ("gpt2", {"activation_function": "quick_gelu"}, "activation_function must be .*, not 'quick_gelu'"),
    ("bert tokens", {"is_decoder": True}, "is_decoder must be False, not True"),
    ("bert sequences", {"classifier_dropout": 0.3}, "classifier_dropout must be hidden_dropout_prob, 0.1, not 0.3"),
    ("bert", {"hidden_act": "mish"}, "hidden_act must be .*, not 'mish'"),
    ("marian", {"decoder_ffn_dim": 20}, "decoder_ffn_dim must be encoder_ffn_dim, 24, not 20"),
    ("marian", {"decoder_attention_heads": 2}, "decoder_attention_heads must be encoder_attention_heads, 4, not 2"),
    ("marian", {"encoder_layerdrop": 0.1}, "encoder_layerdrop must be 0, not 0.1"),
    ("marian", {"tie_word_embeddings": False}, "tie_word_embeddings must be True"),
    ("marian", {"decoder_start_token_id": 0}, "decoder_start_token_id must be another token than eos_token_id, not 0"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_settings_are_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_transformers(build(name, **changes))


@pytest.mark.parametrize("name", ALL)
def test_every_setting_is_read_or_known_to_be_idle(name: str) -> None:
    """A setting that no mapping knows is refused, so that one of a later release cannot be passed over."""
    theirs = build(name)
    architecture, kind = architectures()[type(theirs).__name__], type(theirs.config)
    later = dataclasses.make_dataclass(kind.__name__, [("novelty", bool, False)], bases=(kind,))
    config = later(**theirs.config.to_dict() | {"novelty": False})
    assert architecture.read(config, theirs.state_dict()) == architecture.read(theirs.config, theirs.state_dict())
    config.novelty = True
    with pytest.raises(ValueError, match="novelty must be False, which alone is known, not True"):
        architecture.read(config, theirs.state_dict())


def test_quantised_models_are_refused() -> None:
    theirs = build("llama")
    theirs.config.quantization_config = {"load_in_8bit": True}
    with pytest.raises(ValueError, match="quantization_config must be None"):
        from_transformers(theirs)


def test_other_classes_are_refused() -> None:
    config = transformers.MixtralConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    for model in (
        transformers.MixtralModel(config.__class__(**config.to_dict() | {"num_local_experts": 2})),
        nn.Linear(2, 2),
    ):
        with pytest.raises(ValueError, match=f"model must be one of .*, not .*{type(model).__name__}"):
            from_transformers(model)

    class Own(transformers.LlamaForCausalLM):
        pass

    Own.__name__ = "LlamaForCausalLM"
    with pytest.raises(ValueError, match="model must be one of"):
        from_transformers(Own(build("llama").config))


def test_weights_that_are_left_over_or_missing_are_refused() -> None:
    theirs = build("llama")
    theirs.model.layers[1].mlp.router = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.mlp\.router\.bias, .*router\.weight: weights that LanguageModel"
    ):
        from_transformers(theirs)
    theirs = build("gpt2")
    del theirs.transformer.h[1].ln_2
    with pytest.raises(ValueError, match=r"transformer\.h\.1\.ln_2\.weight: not among the weights"):
        from_transformers(theirs)


def without_numbers(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj.to("meta")


def in_eight_bits(model: Any) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.to(torch.float8_e4m3fn)


def in_two_dtypes(model: Any) -> None:
    model.model.norm.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_numbers, r"layers\.1\.self_attn\.q_proj\.weight is on meta"),
        (in_eight_bits, r"up_proj\.weight must be of floating point numbers of 16 bits or more, not torch\.float8"),
        (in_two_dtypes, r"model\.norm\.weight must be of torch\.float32, as the model is, not torch\.bfloat16"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_weights_that_are_no_usual_numbers_are_refused(change: Any, message: str) -> None:
    theirs = build("llama")
    change(theirs)
    with pytest.raises(ValueError, match=message):
        from_transformers(theirs)


def test_weights_that_were_untied_are_refused() -> None:
    theirs = build("gpt2")
    theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach() + 1)
    with pytest.raises(ValueError, match=r"output\.weight and embedding\.tokens\.weight are tied"):
        from_transformers(theirs)


def test_positions_that_are_not_sinusoidal_are_refused() -> None:
    theirs = build("marian")
    with torch.no_grad():
        theirs.model.decoder.embed_positions.weight[3, 2] += 1e-3
    with pytest.raises(ValueError, match=r"model\.decoder\.embed_positions\.weight: not what"):
        from_transformers(theirs)


def test_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model of transformers, there is no config\.json"):
        from_transformers(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not a JSON file"):
        from_transformers(tmp_path)
    path.write_text(json.dumps({"architectures": ["MixtralForCausalLM"]}))
    with pytest.raises(ValueError, match=r"architectures must be one of .*, not \['MixtralForCausalLM'\]"):
        from_transformers(tmp_path)
    build("gpt2").config.save_pretrained(tmp_path)
    content = json.loads(path.read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    path.write_text(json.dumps(content))
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        from_transformers(tmp_path)
