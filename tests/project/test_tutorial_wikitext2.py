"""docs/tutorials/wikitext2.md: torch.nn.TransformerEncoder on columns, a mask of 0 and -inf, time first."""

import math

import pytest
import torch
from torch import nn

import fastformer
from fastformer.apps.language import CLASSICAL, LanguageConfig, LanguageModel
from fastformer.apps.text import ColumnBatches, encode_lines, open_text_dataset
from tests.support.closeness import assert_close
from tests.support.translation_task import paper_positions
from tests.support.tutorial_models import defined, drawn, prepared

weights, tokenizer, hidden = defined("wikitext2", "weights", "tokenizer", "hidden")
WORDS = ["the", "cat", "<unk>", "sat", "<eos>", "on", "a", "mat"]
D = 12


class Tutorial(nn.Module):
    """Ids `[T, B]` to logits `[T, B, V]`."""

    def __init__(self, final_norm):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(len(WORDS), D), nn.Linear(D, len(WORDS))
        layer = nn.TransformerEncoderLayer(D, 3, 20, 0.2)
        norm = nn.LayerNorm(D) if final_norm else None
        self.transformer_encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.register_buffer("pe", paper_positions(50, D).float()[:, None])  # [L, 1, D]

    def forward(self, ids, mask):
        x = self.encoder(ids) * math.sqrt(D) + self.pe[: len(ids)]
        return self.decoder(self.transformer_encoder(x, mask))


def look_ahead(length):
    return torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)


@pytest.mark.parametrize("final_norm", [False, True])
@torch.no_grad()
def test_its_weights_give_its_outputs(final_norm):
    theirs, words = drawn(Tutorial(final_norm)), tokenizer(WORDS)
    special = {f"{name}_id": getattr(words, f"{name}_id") for name in ("pad", "bos", "eos")}
    settings = LanguageConfig(
        words.size, d_model=D, heads=3, layers=2, feed_forward=20, norm_first=False, final_norm=final_norm,
        embeddings="separate", output_bias=True, **special, **CLASSICAL,
    )  # fmt: skip
    ours = LanguageModel(settings).double().eval()
    ours.load_state_dict(weights(theirs.state_dict()))
    text = "the cat sat on a dog"
    assert [WORDS[i] for i in words.encode(text)] == ["the", "cat", "sat", "on", "a", "<unk>"]
    ids = torch.tensor([[*words.encode(text), words.eos_id], words.encode("a mat on the cat the mat")]).T  # [T, B]
    given = theirs(ids, look_ahead(7)).log_softmax(-1).transpose(0, 1).flatten(0, 1)
    found = ours.logits(ours(ids.T, torch.tensor([7, 7]))).log_softmax(-1)
    assert_close(found[:, : len(WORDS)].contiguous(), given)
    assert found[:, len(WORDS) :].exp().max() == 0  # <pad> and <bos> are never foretold


@torch.no_grad()
def test_masks_of_zero_and_minus_infinity():
    layer = drawn(nn.TransformerEncoderLayer(D, 3, 20, 0.0))
    ours = fastformer.TransformerEncoderLayer(D, 3, 20, 0.0).double().eval()
    ours.load_state_dict(layer.state_dict())
    x = torch.randn(5, 2, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = look_ahead(5)
    given = layer(x, src_mask=mask)
    assert_close(ours(x, src_mask=mask), given)
    assert_close(ours(x, src_mask=hidden(mask)), given)

    changed = x.clone()
    changed[3] += 1
    wrong = ~hidden(mask)
    before, after = ours(x, src_mask=wrong), ours(changed, src_mask=wrong)
    assert (after[0] - before[0]).abs().max() > 1e-3  # it sees what comes
    assert torch.equal(ours(changed, src_mask=mask)[:3], ours(x, src_mask=mask)[:3])
    assert before.isfinite().all()
    attention = drawn(nn.MultiheadAttention(D, 3))
    assert attention(x, x, x, attn_mask=wrong)[0][-1].isnan().all()


def test_its_columns_of_the_real_text():
    """2,984 windows an epoch, each word after the first of its column predicted once."""
    train = open_text_dataset(prepared("wikitext2"))[0]
    words = sorted({word for line in train.lines for word in line.split()} | {"<eos>", "<unk>"})
    assert len(words) == 33_278
    batches = ColumnBatches(encode_lines([train.lines], tokenizer(words)), columns=20, context=35)
    assert batches.table.shape == (20, 2_088_628 // 20) == (20, 104_431)
    assert batches.batches_in(0) == math.ceil((104_431 - 1) / 35) == 2_984
