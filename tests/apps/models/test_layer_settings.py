"""Settings of models that ask for layers beyond torch's: what is built, counted, refused, trained and read again."""

from typing import Any

import pytest
import torch
from torch import nn

import fastformer
from fastformer.apps.classification.model import ClassifierConfig, SequenceClassifier
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.nn import ALiBi, Llama3Scaling, RelativeBias, Rotary

SMALL: dict[str, Any] = {"d_model": 16, "heads": 4, "feed_forward": 24, "dropout": 0.0}
MODERN: dict[str, Any] = {
    "norm": "rms", "activation": "swiglu", "kv_heads": 2, "head_size": 6, "qk_norm": True, "softcap": 20.0, "window": 3,
    "sinks": True, "positions": "rotary", "bias": False,
}  # fmt: skip
POSITIONS = ("rotary", "alibi", "relative", "none", "sinusoidal", "learned")


def models(**settings: Any) -> list[nn.Module]:
    shape = SMALL | settings
    return [
        TranslationModel(TranslationConfig(21, 21, encoder_layers=2, decoder_layers=1, **shape)),
        LanguageModel(LanguageConfig(23, layers=2, **shape)),
        SequenceClassifier(ClassifierConfig(23, 3, layers=2, **shape)),
    ]


def attentions(model: nn.Module, name: str) -> list[Any]:
    return [part for path, part in model.named_modules() if path.endswith(name)]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("modern", [False, True])
def test_the_numbers_of_a_model_are_counted_from_its_settings(positions, modern):
    shape = SMALL | (MODERN if modern else {}) | {"positions": positions}
    for embeddings in ("separate", "tied", "shared"):
        config = TranslationConfig(21, 21, encoder_layers=2, decoder_layers=3, embeddings=embeddings, **shape)
        for model in (*models(**shape), TranslationModel(config)):
            assert model.config.matrix_numbers == sum(p.numel() for p in model.parameters() if p.dim() > 1)


def test_layers_are_what_the_settings_say():
    for model in models(**MODERN, rotary_theta=500.0, rotary_scaling=4.0, rotary_original=64):
        for attention in attentions(model, "self_attn"):
            assert (attention.num_heads, attention.kv_heads, attention.head_dim) == (4, 2, 6)
            assert attention.rotary == Rotary(500.0, 1.0, Llama3Scaling(4.0, original=64))
            assert attention.window == (3, 3)
            assert attention.softcap == 20.0
            assert attention.sinks.shape == (4,)
            assert isinstance(attention.q_norm, fastformer.RMSNorm)
        for attention in attentions(model, "multihead_attn"):
            assert (attention.kv_heads, attention.rotary, attention.window) == (2, None, None)
        assert not any(isinstance(part, nn.LayerNorm) for part in model.modules())
    translation, language, classifier = models(positions="relative", relative_buckets=8, relative_distance=9)
    for model, bidirectional in ((translation.encoder, True), (translation.decoder, False), (language, False)):
        biases = [part for part in model.modules() if isinstance(part, RelativeBias)]
        assert [(b.buckets, b.max_distance, b.bidirectional) for b in biases] == [(8, 9, bidirectional)] * len(biases)
        assert biases
    assert all(b.bidirectional for b in classifier.modules() if isinstance(b, RelativeBias))
    assert any(isinstance(part, ALiBi) for part in models(positions="alibi")[1].modules())


@pytest.mark.parametrize("positions", POSITIONS)
def test_order_matters_but_where_there_are_no_positions(positions):
    torch.manual_seed(0)
    model = models(**MODERN | {"positions": positions, "window": None})[2].double().eval()
    ids = torch.tensor([5, 6, 7, 8, 9])
    lengths = torch.tensor([5])
    one, other = model(ids, lengths), model(ids[[0, 2, 1, 4, 3]], lengths)
    assert torch.allclose(one, other, atol=1e-12) == (positions == "none")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_heads": 3}, r"kv_heads \(3\) must divide heads \(4\)"),
        ({"kv_heads": 8}, r"kv_heads must be at least 1 and at most heads \(4\)"),
        ({"head_size": 5, "positions": "rotary"}, "rotary must turn an even number"),
        ({"positions": "relative", "relative_buckets": 9}, "relative_buckets must be even"),
        ({"positions": "relative", "relative_distance": 3}, "half of them below relative_distance"),
        ({"positions": "rope"}, "positions must be one of"),
        ({"norm": "group"}, "norm must be one of layer, rms"),
        ({"window": -1}, "window must be at least 0"),
        ({"softcap": 0.0}, "softcap must be at least 1e-30"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(settings, said):
    with pytest.raises(ValueError, match=said):
        LanguageConfig(23, **SMALL | settings)


def test_a_cached_step_is_the_model():
    torch.manual_seed(0)
    model = models(**MODERN)[1].double().eval()
    ids = torch.randint(4, 23, (2, 8))
    whole = [model(row, torch.tensor([8])) for row in ids]
    cache = model.decoder.new_cache(2)
    for t in range(8):
        x = model.embedding(ids[:, t : t + 1], torch.full((2, 1), t), t + 1)
        out = model.decoder.step(x, cache)[:, 0]
        torch.testing.assert_close(out, torch.stack([w[t] for w in whole]), rtol=1e-12, atol=1e-12)
