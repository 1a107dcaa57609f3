"""Models of sentence-transformers without padding, against the same models with it."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from fastformer.integrations.transformers import padding_free
from tests.integrations.tiny_transformers import ROUNDINGS, without_dropout
from tests.support.closeness import assert_close

TEXTS = ["the cat runs", "a dog", "the old house is red and the tree sees it in the house", "it"]
WORDS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(" ".join(TEXTS).split()))]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


@pytest.fixture(params=["Bert", "MPNet"])
def folder(request, tmp_path):
    """A saved model with a tokenizer of words."""
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    torch.manual_seed(1)
    settings = {"vocab_size": len(WORDS), "pad_token_id": 1, "initializer_range": 0.4, "num_labels": 1, **SIZES}
    config = getattr(transformers, f"{request.param}Config")(**settings)
    getattr(transformers, f"{request.param}ForSequenceClassification")(config).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_embeddings_and_gradients(pooling, folder, packed_calls):
    results = []
    for pack in (False, True):
        model = SentenceTransformer(modules=[Transformer(folder), Pooling(16, pooling_mode=pooling)], device="cpu")
        if pack:
            assert padding_free(model).packed
        encoded = model.encode(TEXTS, convert_to_tensor=True)
        embedded = without_dropout(model)(model.preprocess(TEXTS))["sentence_embedding"]
        embedded.square().sum().backward()
        results.append([encoded, embedded, *(x.grad for x in model.parameters() if x.grad is not None)])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, ROUNDINGS)
    assert len(packed_calls) == 4  # two layers, encoding and training


def test_scores_of_a_cross_encoder(folder, packed_calls):
    pairs, results = list(zip(TEXTS, reversed(TEXTS), strict=True)), []
    for pack in (False, True):
        model = CrossEncoder(folder, device="cpu")
        if pack:
            assert padding_free(model).packed
        results.append(model.predict(pairs, convert_to_tensor=True))
    assert_close(results[0], results[1], ROUNDINGS)
    assert len(packed_calls) == 2
