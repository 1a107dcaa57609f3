"""Models of the applications through the mixin of huggingface_hub, from and to a folder."""

import json

import pytest
import torch

pytest.importorskip("huggingface_hub")

from safetensors.torch import load_file

from fastformer.apps.classification import EncoderConfig, SequenceClassifier
from fastformer.apps.export import on_hub
from fastformer.apps.language import LanguageConfig, LanguageModel
from fastformer.apps.text import TextError
from fastformer.apps.train.weights import CheckpointError, read_weights, write_weights
from fastformer.apps.translation import TranslationConfig, TranslationModel

SIZES = {"d_model": 16, "heads": 2, "feed_forward": 32}
MODELS = {
    "translation": (
        TranslationModel,
        TranslationConfig(50, 50, encoder_layers=1, decoder_layers=1, embeddings="shared", **SIZES),
    ),
    "language": (LanguageModel, LanguageConfig(50, layers=1, norm="rms", positions="rotary", **SIZES)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_saved_and_loaded(kind, tmp_path):
    network, config = MODELS[kind]
    model = on_hub(network)(config)
    assert isinstance(model, network)
    assert type(model) is on_hub(network)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    made = on_hub(network).from_pretrained(tmp_path)
    assert made.config == config
    assert not made.training
    assert len(list(made.parameters())) == len(list(model.parameters()))  # what is tied stays tied
    for (name, x), (other, y) in zip(model.state_dict().items(), made.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(x, y)


@pytest.fixture
def folder(tmp_path):
    network, config = MODELS["language"]
    on_hub(network)(config).save_pretrained(tmp_path)
    return tmp_path


def load(folder):
    return on_hub(LanguageModel).from_pretrained(folder)


def test_settings_of_a_stranger_build_nothing(folder):
    settings = json.loads((folder / "config.json").read_text())
    settings["feed_forward"] = 10**6
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="bytes of weights are there"):
        load(folder)


def test_nothing_is_unpickled(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError):
        load(folder)


def test_other_weights_are_refused(folder):
    path = folder / "model.safetensors"
    weights = read_weights(path)
    write_weights(path, {**weights, "decoder.norm.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"holds decoder.norm.weight of shape"):
        load(folder)
    write_weights(path, {**weights, "decoder.norm.weight": weights["decoder.norm.weight"] * torch.nan})
    with pytest.raises(CheckpointError, match="NaN"):
        load(folder)
    with pytest.raises(ValueError, match="strict must be True"):
        on_hub(LanguageModel).from_pretrained(folder, strict=False)


@pytest.mark.parametrize("content", ["", "3", "[]", "[" * 10**5, "{}", '{"vocabulary": 50, "a\\u2028b": 1}', "\xff"])
def test_settings_of_any_form_are_refused_in_a_line(folder, content):
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises((CheckpointError, TextError), match=r"config\.json: not ") as caught:
        load(folder)
    assert len(str(caught.value).splitlines()) == 1


def test_only_models_of_ours():
    with pytest.raises(TypeError, match=r"network must be a class of .*TranslationModel.*, not <class 'torch.nn"):
        on_hub(torch.nn.Linear)
    assert issubclass(on_hub(SequenceClassifier), SequenceClassifier)
    assert EncoderConfig(5).layers == 4
