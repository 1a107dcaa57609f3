"""What fastformer cannot represent is refused by name; an untrusted folder leads nowhere and builds no size."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastformer.apps.pretrained import from_transformers
from fastformer.apps.pretrained import models as pretrained_models
from fastformer.apps.pretrained.models import architectures
from tests.apps.pretrained.tiny_models import ALL, build

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

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


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMES: list[Any] = [5, True, "GPT2LMHeadModel", {"a": 1}, [["x"]], [{}], [None], []]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name in ("gpt2", "llama", "marian", "bert"):
        build(name).save_pretrained(folder / name)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    def copy(name: str, **settings: Any) -> Path:
        folder = shutil.copytree(saved / name, tmp_path / name)
        content = json.loads((folder / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps(content))
        return folder

    return copy


@pytest.mark.parametrize(
    "content",
    ["null", "[]", "5", "{}", "[" * 10**5] + [json.dumps({"architectures": names}) for names in NAMES],
)
def test_a_configuration_of_any_form_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model of transformers, there is no config\.json"):
        from_transformers(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json|architectures must be one of"):
        from_transformers(tmp_path)


WIDTHS: list[Any] = [0, -16, "16", None, 10**6, 2**40]
ROPES: list[Any] = [5, [1], {"rope_type": "linear"}, {"rope_type": 5, "rope_theta": 1}]
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *(("gpt2", {"n_embd": x}) for x in WIDTHS),
    *(("gpt2", {"n_layer": x}) for x in (-1, 0, "x", 10**6, 10**9)),
    *(("gpt2", {"vocab_size": x}) for x in (-1, 1.5, 38, 10**9, 2**63)),
    *(("gpt2", {name: 5}) for name in ("activation_function", "id2label", "to_dict", "quantization_config")),
    *(("gpt2", {name: 5}) for name in ("fusion_config", "per_layer_config", "transformers_weights", "dtype")),
    *(("gpt2", {"dtype": x}) for x in ("float8", "os", "uint8", "complex64")),
    *(("gpt2", {"n_head": 0}), ("gpt2", {"__class__": "x"}), ("gpt2", {"num_labels": 10**9})),
    *(("llama", {"rope_parameters": rope}) for rope in ROPES),
    *(("llama", {"num_key_value_heads": x}) for x in (0, 3, -2, 8)),
    *(("llama", {"head_dim": x}) for x in (0, 5, -4, 10**9)),
    *(("marian", {"max_position_embeddings": x}) for x in (-1, 0, 10**9)),
    *(("marian", {"vocab_size": 36}), ("marian", {"d_model": 0}), ("marian", {"encoder_layers": 10**6})),
    *(("bert", {"type_vocab_size": x}) for x in (0, 10**10)),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_settings_of_any_size_and_kind_are_refused(
    copied: Callable[..., Path], name: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (whatever is said)
        from_transformers(copied(name, **settings))


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_no_kernels_are_fetched(copied: Callable[..., Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes what a configuration names for a repository of code, which it would run."""
    folder = copied("gpt2", **{name: "somebody/kernels"})
    asked: list[Any] = []
    monkeypatch.setattr(
        "transformers.integrations.hub_kernels.load_and_register_attn_kernel", lambda *a, **k: asked.append(a)
    )
    with suppress(Exception):  # which says that it is not installed
        from_transformers(folder)
    assert not asked
    from_transformers(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("every", [False, True])
def test_weights_of_no_usual_floating_dtype_are_refused(
    copied: Callable[..., Path], dtype: torch.dtype, every: bool
) -> None:
    folder = copied("llama")
    weights = load_file(folder / WEIGHTS)
    names = list(weights) if every else ["lm_head.weight"]
    save_file(weights | {name: weights[name].to(dtype) for name in names}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=rf"lm_head\.weight.* is of {dtype}|settings are of a model with"):
        from_transformers(folder)


def test_masks_and_positions_of_old_files_are_no_weights(copied: Callable[..., Path]) -> None:
    folder = copied("gpt2")
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32, dtype=torch.bool)}
    save_file(load_file(folder / WEIGHTS) | masks, folder / WEIGHTS)
    from_transformers(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(copied: Callable[..., Path], value: float) -> None:
    folder = copied("gpt2")
    weights = load_file(folder / WEIGHTS)
    weights["transformer.ln_f.bias"][3] = value
    save_file(weights, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"ln_f\.bias holds NaN or infinity"):
        from_transformers(folder)


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 8, b"\xff" * 8, b"\2" + b"\0" * 7 + b"[]"])
def test_a_damaged_file_of_weights_is_refused(copied: Callable[..., Path], content: bytes) -> None:
    folder = copied("gpt2")
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
        from_transformers(folder)


def in_parts(folder: Path, name: str, **index: Any) -> None:
    (folder / WEIGHTS).rename(folder / "part.safetensors")
    content = {"weight_map": dict.fromkeys(load_file(folder / "part.safetensors"), name)} | index
    (folder / INDEX).write_text(json.dumps(content))


def test_weights_in_parts_are_read(copied: Callable[..., Path], saved: Path) -> None:
    folder = copied("gpt2")
    in_parts(folder, "part.safetensors")
    expected = from_transformers(saved / "gpt2").state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in from_transformers(folder).state_dict().items())


@pytest.mark.parametrize("name", ["../gpt2/part.safetensors", "/etc/passwd", 5, None, "..", "no.safetensors"])
def test_an_index_leads_nowhere_else(copied: Callable[..., Path], name: Any) -> None:
    folder = copied("gpt2")
    in_parts(folder, name)
    with pytest.raises((ValueError, OSError), match=r"index\.json: damaged|no\.safetensors: no such file"):
        from_transformers(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": 5}))
    with pytest.raises(ValueError, match=r"index\.json: damaged"):
        from_transformers(folder)


def test_an_adapter_beside_the_model_is_refused(copied: Callable[..., Path]) -> None:
    folder = copied("gpt2")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="an adapter lies beside the model"):
        from_transformers(folder)


def test_a_size_is_compared_with_the_files_before_it_is_built(
    copied: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("gpt2", n_layer=5000)
    monkeypatch.setattr(pretrained_models, "read_weights", lambda path: pytest.fail("read before it was compared"))
    with pytest.raises(ValueError, match="the settings are of a model with"):
        from_transformers(folder)
