"""Models that fastformer cannot represent, and damaged or untrusted folders, are refused before a model is built."""

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
from fastformer.apps.pretrained.tables import ARCHITECTURES
from tests.apps.pretrained.tiny_models import LLAMA3, build

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", rope("yarn", factor=4.0), "llama: rope_type must be default, linear or llama3, not 'yarn'"),
        ("llama", rope(**{**LLAMA3, "kind": "llama3", "high_freq_factor": 8.0}), r"'high_freq_factor'\] must be 4.0"),
        ("qwen2", rope("default", partial_rotary_factor=0.5), "rope_parameters must be .*partial_rotary_factor"),
        ("llama", {"attention_bias": True}, "attention_bias must be that of mlp_bias, False, not True"),
        ("llama", {"hidden_act": "gelu_new"}, "hidden_act must be one of .*, not 'gelu_new'"),
        ("llama", {"eos_token_id": None}, "eos_token_id must be a whole number below vocab_size, 37, not None"),
        ("qwen2", SLIDING, "layer_types must be the same for all layers, not .*'sliding_attention'"),
        ("qwen3", {**SLIDING, "rms_norm_eps": 1e-6}, "layer_types must be the same"),
        ("qwen3", {"attention_bias": True}, "qwen3: attention_bias must be False, not True"),
        ("qwen3", {"rms_norm_eps": 1e-5}, "rms_norm_eps must be 1e-06, not 1e-05"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be False, not True"),
        ("gpt2", {"activation_function": "quick_gelu"}, "activation_function must be .*, not 'quick_gelu'"),
        ("bert tokens", {"is_decoder": True}, "is_decoder must be False, not True"),
        ("bert sequences", {"classifier_dropout": 0.3}, "classifier_dropout must be hidden_dropout_prob, 0.1, not 0.3"),
        ("marian", {"decoder_ffn_dim": 20}, "decoder_ffn_dim must be encoder_ffn_dim, 24, not 20"),
        ("marian", {"encoder_layerdrop": 0.1}, "encoder_layerdrop must be 0, not 0.1"),
        ("marian", {"tie_word_embeddings": False}, "tie_word_embeddings must be True"),
        ("marian", {"decoder_start_token_id": 0}, "decoder_start_token_id must be another token than eos_token_id"),
        ("llama", {"quantization_config": {"load_in_8bit": True}}, "quantization_config must be None"),
    ],
)
def test_settings_are_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    hf_model = build(name, **{key: value for key, value in changes.items() if key != "quantization_config"})
    if "quantization_config" in changes:  # or transformers would quantise
        hf_model.config.quantization_config = changes["quantization_config"]
    with pytest.raises(ValueError, match=message):
        from_transformers(hf_model)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "qwen3", "mistral", "bert", "bert tokens", "marian"])
def test_settings_of_later_releases_are_refused_unless_they_have_the_default(name: str) -> None:
    hf_model = build(name)
    architecture, kind = ARCHITECTURES[type(hf_model).__name__], type(hf_model.config)
    later = dataclasses.make_dataclass(kind.__name__, [("novelty", bool, False)], bases=(kind,))
    config = later(**hf_model.config.to_dict() | {"novelty": False})
    assert architecture.read(config, hf_model.state_dict()) == architecture.read(hf_model.config, hf_model.state_dict())
    config.novelty = True
    with pytest.raises(ValueError, match="novelty must be False, which alone is known, not True"):
        architecture.read(config, hf_model.state_dict())


def test_other_classes_and_subclasses_are_refused() -> None:
    class Own(transformers.LlamaForCausalLM):
        pass

    Own.__name__ = "LlamaForCausalLM"
    for model in (transformers.BertForMaskedLM(build("bert").config), nn.Linear(2, 2), Own(build("llama").config)):
        with pytest.raises(ValueError, match=f"model must be one of .*, not .*{type(model).__name__}"):
            from_transformers(model)


def with_router(model: Any) -> None:
    model.model.layers[1].mlp.router = nn.Linear(4, 4)


def without_norm(model: Any) -> None:
    del model.transformer.h[1].ln_2


def on_meta(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj.to("meta")


def in_eight_bits(model: Any) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.to(torch.float8_e4m3fn)


def in_two_dtypes(model: Any) -> None:
    model.model.norm.to(torch.bfloat16)


def untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)


def with_other_positions(model: Any) -> None:
    with torch.no_grad():
        model.model.decoder.embed_positions.weight[3, 2] += 1e-3


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", with_router, r"mlp\.router\.bias, .*router\.weight: weights that LanguageModel does not have"),
        ("gpt2", without_norm, r"transformer\.h\.1\.ln_2\.weight: not among the weights"),
        ("llama", on_meta, r"layers\.1\.self_attn\.q_proj\.weight is on meta"),
        ("llama", in_eight_bits, r"up_proj\.weight must be of floating point numbers of 16 bits or more"),
        ("llama", in_two_dtypes, r"model\.norm\.weight must be of torch\.float32, as the model is"),
        ("gpt2", untied, r"output\.weight and embedding\.tokens\.weight are tied"),
        ("marian", with_other_positions, r"model\.decoder\.embed_positions\.weight: not what"),
    ],
)
def test_weights_are_refused_by_name(name: str, change: Callable[[Any], None], message: str) -> None:
    hf_model = build(name)
    change(hf_model)
    with pytest.raises(ValueError, match=message):
        from_transformers(hf_model)


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


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


NAMES: list[Any] = [5, "GPT2LMHeadModel", [["x"]], [{}], [None], []]


@pytest.mark.parametrize(
    "content", ["null", "[]", "{}", "[" * 10**5, *(json.dumps({"architectures": x}) for x in NAMES)]
)
def test_damaged_configurations_are_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model of transformers, there is no config\.json"):
        from_transformers(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json|architectures must be one of"):
        from_transformers(tmp_path)


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *(("gpt2", {"n_embd": x}) for x in (0, -16, "16", None, 2**40)),
    *(("gpt2", {"n_layer": x}) for x in (0, "x", 10**9)),
    *(("gpt2", {"vocab_size": x}) for x in (-1, 1.5, 38, 2**63)),
    *(("gpt2", {name: 5}) for name in ("activation_function", "id2label", "to_dict", "quantization_config")),
    *(("gpt2", {name: 5}) for name in ("fusion_config", "per_layer_config", "transformers_weights", "dtype")),
    *(("gpt2", {"dtype": x}) for x in ("os", "uint8")),
    *(("gpt2", {"n_head": 0}), ("gpt2", {"__class__": "x"}), ("gpt2", {"num_labels": 10**9})),
    *(("llama", {"rope_parameters": x}) for x in (5, [1], {"rope_type": "linear"})),
    *(("llama", {"num_key_value_heads": x}) for x in (0, 3)),
    *(("llama", {"head_dim": x}) for x in (0, 5, 10**9)),
    *(("marian", {"max_position_embeddings": x}) for x in (0, 10**9)),
    *(("marian", {"vocab_size": 36}), ("marian", {"d_model": 0}), ("marian", {"encoder_layers": 10**6})),
    *(("bert", {"type_vocab_size": x}) for x in (0, 10**10)),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_settings_in_a_file_that_do_not_fit_are_refused(
    copied: Callable[..., Path], name: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (transformers words some of them)
        from_transformers(copied(name, **settings))


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_no_kernels_are_fetched(copied: Callable[..., Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes what a configuration names for a repository of code, which it would run."""
    fetched: list[Any] = []
    monkeypatch.setattr(
        "transformers.integrations.hub_kernels.load_and_register_attn_kernel", lambda *a, **k: fetched.append(a)
    )
    with suppress(Exception):  # which says that the package `kernels` is not installed
        from_transformers(copied("gpt2", **{name: "somebody/kernels"}))
    assert not fetched


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("every", [False, True])
def test_weights_of_unusual_dtypes_are_refused(copied: Callable[..., Path], dtype: torch.dtype, every: bool) -> None:
    folder = copied("llama")
    weights = load_file(folder / WEIGHTS)
    names = list(weights) if every else ["lm_head.weight"]
    save_file(weights | {name: weights[name].to(dtype) for name in names}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=rf"lm_head\.weight.* is of {dtype}|settings are of a model with"):
        from_transformers(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_nan_and_infinity_are_refused_and_masks_of_old_files_ignored(
    copied: Callable[..., Path], value: float | None
) -> None:
    folder = copied("gpt2")
    weights = load_file(folder / WEIGHTS) | {"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32, dtype=torch.bool)}
    if value is not None:
        weights["transformer.ln_f.bias"][3] = value
    save_file(weights, folder / WEIGHTS)
    if value is None:
        from_transformers(folder)
        return
    with pytest.raises(ValueError, match=r"ln_f\.bias holds NaN or infinity"):
        from_transformers(folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\2" + b"\0" * 7 + b"[]"])
def test_damaged_weights_are_refused(copied: Callable[..., Path], content: bytes) -> None:
    folder = copied("gpt2")
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
        from_transformers(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("part.safetensors", ""),
        *((name, r"index\.json: damaged") for name in ("../gpt2/part.safetensors", "/etc/passwd", 5, None, "..")),
        ("no.safetensors", r"no\.safetensors: there is no such weights file"),
    ],
)
def test_an_index_names_files_in_its_folder(copied: Callable[..., Path], saved: Path, name: Any, message: str) -> None:
    folder = copied("gpt2")
    (folder / WEIGHTS).rename(folder / "part.safetensors")
    content = {"weight_map": dict.fromkeys(load_file(folder / "part.safetensors"), name)}
    (folder / INDEX).write_text(json.dumps(content))
    if message:
        with pytest.raises(ValueError, match=message):
            from_transformers(folder)
    else:
        expected = from_transformers(saved / "gpt2").state_dict()
        assert all(torch.equal(x, expected[key]) for key, x in from_transformers(folder).state_dict().items())


def test_an_adapter_beside_the_model_is_refused(copied: Callable[..., Path]) -> None:
    folder = copied("gpt2")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="an adapter lies beside the model"):
        from_transformers(folder)


def test_a_size_is_compared_with_the_files_before_weights_are_read(
    copied: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("gpt2", n_layer=5000)
    monkeypatch.setattr(pretrained_models, "read_weights", lambda path: pytest.fail("read before it was compared"))
    with pytest.raises(ValueError, match="the settings are of a model with"):
        from_transformers(folder)
