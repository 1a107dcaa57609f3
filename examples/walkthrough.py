"""A Transformer, step by step.

From a text to its translation, with all numbers in between, on generated number words (English to French). Each step is
computed here in plain PyTorch, and compared with the result of fastformer's model: the assertions show that the
explanation is what runs.

Run it as a script (`python examples/walkthrough.py`) or cell by cell as a notebook (`examples/walkthrough.ipynb`, which
`python examples/notebook.py` writes from the script).

Letters: B sentences, S source and T target positions, D model width, H heads, K = D / H head size, V vocabulary.
"""

# %%
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.apps.models import sinusoidal_positions
from fastformer.apps.text import Batches, ParallelCorpus, WordTokenizer, collate, encode_pairs, number_corpus
from fastformer.apps.text.word_tokenizer import split_words
from fastformer.apps.translation import (
    SearchOptions,
    TranslationConfig,
    TranslationModel,
    greedy_search,
    translation_loss,
)

torch.manual_seed(1)
torch.set_printoptions(precision=2, sci_mode=False, linewidth=120)


def show(name: str, x: Tensor) -> None:
    """Print a tensor with its shape."""
    print(f"{name} {list(x.shape)}\n{x.detach()}\n")


def same(computed: Tensor, expected: Tensor) -> None:
    """Assert that two computations gave the same numbers, up to rounding."""
    torch.testing.assert_close(computed, expected, atol=1e-5, rtol=1e-5)


# %% [markdown]
# ## 1. Text to ids
#
# A tokenizer cuts a text into pieces, and gives each its number, the id. Here a piece is a word. Four ids are special:
# unknown words (unk), padding (pad), the begin (bos) and the end (eos) of a sentence.

# %%
train, _, held_out = number_corpus("fr", train=2000, valid=1, test=5)
english = WordTokenizer.from_lines(train.source)
french = WordTokenizer.from_lines(train.target)
pairs = ParallelCorpus(["eighty thousand three", "two hundred"], ["quatre-vingt mille trois", "deux cents"])
for sentence in pairs.source:
    print(f"{sentence!r} -> {split_words(sentence)} -> {english.encode(sentence)}")
print(f"special ids {dict(english.special_ids.names())}; vocabularies of {english.size} and {french.size} words")

# %% [markdown]
# ## 2. Batches, lengths and masks
#
# Padding gives the sentences of a batch the same length. Attention must ignore padding, and a target position must not
# see the words that it and later positions are to predict. The source ends with eos. The decoder reads bos and the
# target, and predicts the target and eos: the same words, one position apart.

# %%
batch = collate(encode_pairs(pairs, english, french), packed=False)
show("source, tokens + eos", batch.source)  # [B, S]
show("target_in, bos + tokens", batch.target_in)  # [B, T]
show("target_out, tokens + eos", batch.target_out)  # [B, T]

S, T = batch.source.shape[1], batch.target_in.shape[1]
source_padding = torch.arange(S) >= batch.source_lengths[:, None]  # [B, S], True: padding
target_padding = torch.arange(T) >= batch.target_lengths[:, None]  # [B, T]
ahead = torch.ones(T, T, dtype=torch.bool).triu(1)  # [T, T], True: a later position
show("padding of the source", source_padding.int())
show("look-ahead mask: row t may see columns up to t", ahead.int())
show("both together, of the second target", (ahead | target_padding[1]).int())

# %% [markdown]
# fastformer does not compute with padding at all: it packs the sentences one after another, and keeps their lengths.

# %%
packed = collate(encode_pairs(pairs, english, french), packed=True)
show("the source, packed", packed.source)
show("lengths", packed.source_lengths)
same(batch.source[~source_padding], packed.source)

# %% [markdown]
# ## 3. Embeddings with positions
#
# Each id selects a row of a table, times sqrt(D), so that words are as large as positions. Attention does not depend on
# the order of words, so positions are added: sine and cosine, of another frequency in each pair of dimensions.
# PE(pos, 2i) = sin(pos / 10000^(2i/D)) and PE(pos, 2i+1) = cos of the same angle.

# %%
D, H = 32, 2
K = D // H
config = TranslationConfig(
    english.size, french.size, d_model=D, heads=H, encoder_layers=1, decoder_layers=1, feed_forward=64, dropout=0.0
)
model = TranslationModel(config).eval()

angle = torch.tensor(3 / 10000 ** (2 * 5 / D))
same(sinusoidal_positions(10, D)[3, 10:12], torch.stack([angle.sin(), angle.cos()]))


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Return the vectors [B, L, D] of ids [B, L]."""
    return table[ids] * math.sqrt(D) + sinusoidal_positions(ids.shape[1], D)


x = embed(batch.source, model.source_embedding.tokens.weight)  # [B, S, D]
show("embeddings of the first source, first 6 dimensions", x[0, :, :6])
same(x, model.source_embedding(batch.source, torch.arange(S).expand(2, S), S))

# %% [markdown]
# ## 4. Attention: scores, mask, softmax, heads
#
# Each position has a query, a key and a value. A score is the product of a query and a key, divided by sqrt(K). The
# mask sets the scores of forbidden keys to minus infinity. Softmax turns each row of scores into weights that add up to
# 1, and the result is the average of the values with these weights. Each head does so with its own K dimensions.


# %%
def attention(attn: torch.nn.Module, x: Tensor, memory: Tensor, forbidden: Tensor) -> tuple[Tensor, ...]:
    """Attend from x [B, T, D] to memory [B, S, D]; forbidden: bool [B, 1, T or 1, S]. Also return each intermediate."""
    wq, wk, wv = attn.in_proj_weight.chunk(3)  # [D, D] each
    bq, bk, bv = attn.in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(of, w, b).unflatten(-1, (H, K)).transpose(1, 2)  # [B, H, length, K]
        for of, w, b in ((x, wq, bq), (memory, wk, bk), (memory, wv, bv))
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(K)  # [B, H, T, S]
    masked = scores.masked_fill(forbidden, -math.inf)
    weights = masked.softmax(-1)
    heads = weights @ v  # [B, H, T, K]
    return attn.out_proj(heads.transpose(1, 2).flatten(2)), scores, masked, weights, heads


layer = model.encoder.layers[0]
h = layer.norm1(x)  # pre-norm: each sublayer reads a normalised copy
mixed, scores, masked, weights, heads = attention(layer.self_attn, h, h, source_padding[:, None, None])
show("scores of the second source, head 1", scores[1, 0])
show("after the padding mask", masked[1, 0])
show("after softmax: each row adds up to 1", weights[1, 0])
show("result of head 1, first 6 of K dimensions", heads[1, 0, :, :6])
same(weights.sum(-1), torch.ones(2, H, S))
assert weights[1, :, :, 3:].eq(0).all()  # padding has no weight

# %% [markdown]
# The maps that the model reports for a sentence, which `fastformer plot attention` draws, are these weights.

# %%
maps = model.attention_maps(batch.source[0], batch.target_in[0])  # the first sentence has no padding
same(weights[0], maps["encoder"][0])

# %% [markdown]
# ## 5. The encoder layer
#
# The result of attention is added to the layer's input. Then a feed-forward network computes each position by itself,
# and its result is added as well. A norm ends the stack.


# %%
def feed_forward(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """Apply two linear layers, with a ReLU between them."""
    return layer.linear2(F.relu(layer.linear1(x)))


x = x + mixed
x = x + feed_forward(layer, layer.norm2(x))
memory = model.encoder.norm(x)  # [B, S, D]
show("memory of the first source, first 6 dimensions", memory[0, :, :6])
encoded, layout = model.encode(packed.source, packed.source_lengths)  # [all source tokens, D]
same(memory[~source_padding], encoded)

# %% [markdown]
# ## 6. The decoder layer
#
# Its self-attention sees earlier positions only. Its cross attention sees the memory without its padding.

# %%
layer = model.decoder.layers[0]
y = embed(batch.target_in, model.target_embedding.tokens.weight)  # [B, T, D]
h = layer.norm1(y)
mixed, scores, masked, weights, _ = attention(layer.self_attn, h, h, ahead | target_padding[:, None, None])
show("self-attention of the first target, head 1: scores", scores[0, 0])
show("after the look-ahead mask", masked[0, 0])
show("after softmax", weights[0, 0])
same(weights[0], maps["decoder"][0])

y = y + mixed
mixed, _, _, weights, _ = attention(layer.multihead_attn, layer.norm2(y), memory, source_padding[:, None, None])
show("cross attention of the first pair, head 1: rows write French, columns read English", weights[0, 0])
same(weights[0], maps["cross"][0])

y = y + mixed
y = y + feed_forward(layer, layer.norm3(y))
hidden = model.decoder.norm(y)  # [B, T, D]
same(
    hidden[~target_padding],
    model(packed.source, packed.source_lengths, packed.target_in, packed.target_lengths),
)

# %% [markdown]
# ## 7. Logits and loss
#
# The logit of a word is the product of a position's hidden state with the word's row of the output matrix; with tied
# weights, this is the embedding table. Softmax makes probabilities of logits. The loss is -log of the probability of
# the right word, summed over the real positions. Equal probabilities give a loss of log V for each word, and a model
# with random weights somewhat more.

# %%
logits = hidden @ model.target_embedding.tokens.weight.T  # [B, T, V]
log_p = logits.log_softmax(-1)
losses = -log_p.gather(-1, batch.target_out[..., None]).squeeze(-1)  # [B, T]
show("-log p of the right words; padding will not count", losses)
loss = losses[~target_padding].sum()
print(f"loss {loss / packed.tokens:.2f} nats a word; log V is {math.log(french.size):.2f}")
same(loss, translation_loss(model, packed))

# %% [markdown]
# ## 8. Learning
#
# The gradient of the loss says how to change each parameter. After a few hundred small steps the model translates.

# %%
EPOCHS = 12
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
batches = Batches(encode_pairs(train, english, french), tokens=500, seed=1)
model.train()
for epoch in range(EPOCHS):
    optimizer.param_groups[0]["lr"] = 0.01 * (1 - epoch / EPOCHS)  # large steps first, small ones at the end
    total = words = 0
    for each in batches.epoch(epoch):
        loss = translation_loss(model, each)
        (loss / each.tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        total, words = total + loss.item(), words + each.tokens
    if epoch % 3 == 2:
        print(f"epoch {epoch + 1}: loss {total / words:.3f} nats a word")
model.eval()

# %% [markdown]
# ## 9. Decoding, step by step
#
# To translate, the decoder first reads bos. In each step the most probable word is appended to its input, until that
# word is eos. A real search caches keys and values (`fastformer.generate`); here everything is computed again at each
# step, with the same result.

# %%
sentence = held_out.source[0]
source = torch.tensor([*english.encode(sentence), english.eos_id])
print(f"{sentence!r}, which no training pair holds; in French {held_out.target[0]!r}")
read = [french.bos_id]
with torch.no_grad():
    while read[-1] != french.eos_id and len(read) < 20:
        state = model(source, torch.tensor([len(source)]), torch.tensor(read), torch.tensor([len(read)]))  # [t, D]
        p = model.logits(state[-1]).softmax(-1)  # [V]: what may follow
        best = p.topk(3)
        guesses = zip(french.pieces(best.indices.tolist()), best.values.tolist(), strict=True)
        shown = "  ".join(f"{word} {share:.2f}" for word, share in guesses)
        print(f"{' '.join(french.pieces(read)):>40}  ->  {shown}")
        read.append(int(best.indices[0]))
written = [i for i in read[1:] if i != french.eos_id]
print(f"\n{sentence!r} -> {french.decode(written)!r}")
(hypothesis,) = greedy_search(model, source, torch.tensor([len(source)]), SearchOptions(max_length=19))
assert hypothesis.ids == written
