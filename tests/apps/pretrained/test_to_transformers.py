"""Our models as transformers': the same logits, saved and loaded again, and whatever does not fit refused by name."""

from typing import Any

import pytest
import torch

from fastformer.apps.classification.model import EncoderConfig, TextEncoder
from fastformer.apps.language import CLASSICAL, LanguageConfig, LanguageModel
from fastformer.apps.pretrained import from_transformers, to_transformers
from fastformer.apps.translation import TranslationConfig, TranslationModel
from tests.apps.pretrained.test_from_transformers import FP32, apart, ours_of, theirs_of
from tests.apps.pretrained.tiny_models import D, V, build

transformers = pytest.importorskip("transformers")

SIZES = {"d_model": D, "heads": 4, "feed_forward": 24, "scale_embeddings": False}
GPT2 = {**SIZES, **CLASSICAL, "layers": 2, "positions": "learned", "max_positions": 32, "activation": "gelu_tanh"}
MARIAN = {**SIZES, "encoder_layers": 2, "decoder_layers": 3, "positions": "sinusoidal_halves", "norm_first": False}
MARIAN |= {"final_norm": False, "embeddings": "shared", "output_bias": True}
MARIAN |= {"pad_id": V - 1, "bos_id": V - 1, "eos_id": 0, "activation": "relu"}


def language_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    return LanguageModel(LanguageConfig(V, **{**GPT2, **changes})).eval()


def translation_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = TranslationModel(TranslationConfig(V, V, **{**MARIAN, **changes})).eval()
    if model.output.bias is not None:
        torch.nn.init.normal_(model.output.bias)
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "gpt2 untied", "marian", "marian, two vocabularies"])
def test_there_and_back_is_the_same_model(name: str) -> None:
    theirs = build(name)
    back = to_transformers(from_transformers(theirs))
    assert type(back) is type(theirs)
    expected = theirs.state_dict()
    found = back.state_dict()
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        if "embed_positions" in key:  # the table of positions is as long as the configuration says
            rows = min(len(x), len(found[key]))
            assert torch.equal(found[key][:rows], x[:rows])
        else:
            assert torch.equal(found[key], x), key
    assert apart(theirs_of(back), theirs_of(theirs)) == 0


@torch.no_grad()
@pytest.mark.parametrize(
    "model",
    [
        language_model(),
        language_model(embeddings="separate", activation="gelu", dropout=0.3),
        language_model(activation="silu", norm_eps=1e-6),
        translation_model(),
        translation_model(output_bias=False, activation="silu", scale_embeddings=True),
        translation_model(embeddings="tied"),
        translation_model(embeddings="separate", activation="gelu_tanh"),
    ],
    ids=lambda model: type(model).__name__,
)
def test_converted_back_logits_are_those_of_fastformer(model: Any, tmp_path: Any) -> None:
    theirs = to_transformers(model)
    assert apart(theirs_of(theirs), ours_of(model)) < FP32
    theirs.save_pretrained(tmp_path / "model")
    again = type(theirs).from_pretrained(tmp_path / "model", local_files_only=True)
    assert apart(theirs_of(again), ours_of(model)) < FP32
    assert apart(ours_of(from_transformers(tmp_path / "model")), ours_of(model)) == 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (language_model(norm="rms"), "GPT2LMHeadModel cannot represent this model: norm='rms' must be 'layer'"),
        (language_model(positions="sinusoidal"), "positions='sinusoidal' must be 'learned'"),
        (language_model(norm_first=False, window=4), r"norm_first=False .*window=4"),
        (language_model(scale_embeddings=True), "scale_embeddings=True"),
        (language_model(kv_heads=2), "kv_heads=2"),
        (language_model(output_bias=True), "output_bias=True"),
        (language_model(activation="swiglu"), "activation_function must be .*, not 'swiglu'"),
        (translation_model(positions="sinusoidal"), "MarianMTModel cannot represent .*positions='sinusoidal' must be"),
        (translation_model(norm_first=True, final_norm=True), "norm_first=True .*final_norm=True"),
        (translation_model(norm_eps=1e-6), "norm_eps=1e-06"),
        (translation_model(bias=False), "bias=False"),
        (TextEncoder(EncoderConfig(9, d_model=8, heads=2, layers=1)), "model must be one of .*, not a TextEncoder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_they_have_not_is_refused_by_name(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_transformers(model)


def test_weights_that_are_no_usual_numbers_are_refused() -> None:
    model = language_model()
    model.decoder.layers[1].to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"must be of torch\.float32, as the model is, not torch\.bfloat16"):
        to_transformers(model)
    with pytest.raises(ValueError, match="is on meta, and has no numbers"):
        to_transformers(language_model().to("meta"))


@torch.no_grad()
def test_a_weight_that_was_changed_shows() -> None:
    """The comparisons above can fail."""
    model = language_model()
    theirs = to_transformers(model)
    weight = theirs.transformer.h[0].attn.c_attn.weight
    weight.copy_(weight.roll(D, 1))
    assert apart(theirs_of(theirs), ours_of(model)) > 100 * FP32
