"""Who may not have the name "fastformer": models of Hugging Face that compute their attention by themselves."""

import pytest

pytest.importorskip("transformers")

import transformers
from transformers import BertConfig, BertModel

from tests.integrations.test_packed import reasons
from tests.integrations.tiny_transformers import PLAIN


def test_what_computes_its_attention_itself_is_left_alone():
    config = transformers.DebertaV2Config(**{**PLAIN, "type_vocab_size": 0}, pooler_hidden_size=16)
    model = transformers.DebertaV2Model(config)
    before = model.config._attn_implementation
    assert "computes its attention outside of transformers' attention interface" in reasons(model)
    assert model.config._attn_implementation == before


ALIBI = {
    "Bloom": {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 60},
    "Falcon": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 60, "alibi": True},
    "Mpt": {"d_model": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 60},
}


@pytest.mark.parametrize("name", ALIBI)
def test_alibi_never_reaches_the_interface(name):
    """All that have it compute their attention themselves."""
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**ALIBI[name]))
    assert reasons(model) == "computes its attention outside of transformers' attention interface"


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (transformers.DebertaV2Config, transformers.DebertaV2Model),
        (transformers.XLNetConfig, transformers.XLNetModel),
        (transformers.OpenAIGPTConfig, transformers.OpenAIGPTModel),
        (transformers.BloomConfig, transformers.BloomModel),
    ],
)
@pytest.mark.parametrize("when", ["built", "switched"])
def test_a_name_that_would_change_nothing_raises(config, model, when):
    sizes = {"n_layer": 1, "num_hidden_layers": 1, "vocab_size": 60, "n_embd": 16, "n_head": 4, "d_model": 16}
    settings = config(**{name: size for name, size in sizes.items() if hasattr(config(), name)})
    if when == "built":
        settings._attn_implementation = "fastformer"
        with pytest.raises(ValueError, match=rf"does not reach the attention of {model.__name__}, .* use \"eager\""):
            model(settings)
    else:
        made = model(settings)
        made.set_attn_implementation("fastformer")  # transformers warns, and leaves it
        assert made.config._attn_implementation != "fastformer"


def test_a_subclass_of_somebodys_own_may_have_the_name():
    class Mine(BertModel):
        pass

    Mine.__module__ = "__main__"
    config = BertConfig(**PLAIN)
    config._attn_implementation = "fastformer"
    assert Mine(config).config._attn_implementation == "fastformer"
