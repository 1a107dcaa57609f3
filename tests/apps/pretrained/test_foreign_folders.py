"""Folders of transformers that are a stranger's: one sentence each, no way out of the folder, no size that is built."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer.apps.pretrained import from_transformers
from fastformer.apps.pretrained import models as pretrained_models
from tests.apps.pretrained.tiny_models import build

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

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


def test_a_weight_of_another_shape_is_named(copied: Callable[..., Path]) -> None:
    folder = copied("gpt2")
    weights = load_file(folder / WEIGHTS)
    weights["transformer.ln_f.bias"] = torch.zeros(17)
    save_file(weights, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"ln_f\.bias.*weights of another shape than the configuration says"):
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
