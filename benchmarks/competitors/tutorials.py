"""Models of tutorials and of torch.nn, written from the description of the algorithms, for comparison only.

`TorchTranslation` is torch.nn.Transformer as its documentation uses it: batches padded to their longest sentence, bool
masks. `FixedLengthTranslation` is the from-scratch tutorial (T1): every sentence padded to 200 tokens, dense masks,
softmax(QK^T)V written out, and a greedy loop that decodes all 200 positions again for every token, one sentence at a
time. `TutorialLanguageModel` is the word-level language model (T2). They take the parameters of fastformer's models, so
that results can be compared before times are. Faults of the originals that change results are left out.

Letters: B batch, H heads, T target and S source positions, L = 200, D model width, K head size, V vocabulary.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.apps.language.model import LanguageModel
from fastformer.apps.models.embeddings import sinusoidal_positions
from fastformer.apps.text import Batch
from fastformer.apps.translation.model import TranslationConfig, TranslationModel


class _Embeddings(nn.Module):
    """Scaled token embeddings plus sinusoidal positions for both sides; the target's also projects to logits."""

    table: Tensor

    def __init__(self, config: TranslationConfig, length: int) -> None:
        super().__init__()
        self.source = nn.Embedding(config.source_vocabulary, config.d_model)
        self.target = nn.Embedding(config.target_vocabulary, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("table", sinusoidal_positions(length, config.d_model))

    def embed(self, tokens: nn.Embedding, ids: Tensor) -> Tensor:
        x = tokens(ids) * math.sqrt(tokens.embedding_dim) + self.table[: ids.shape[1]]
        return self.dropout(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.target.weight)


@torch.no_grad()
def _copy_embeddings(to: _Embeddings, model: TranslationModel) -> None:
    to.source.weight.copy_(model.source_embedding.tokens.weight)
    to.target.weight.copy_(model.target_embedding.tokens.weight)


class TorchTranslation(nn.Module):
    """torch.nn.Transformer, batch first and pre-norm, between tied embeddings; parameters copied from `model`."""

    def __init__(self, model: TranslationModel, positions: int = 512) -> None:
        super().__init__()
        c = model.config
        self.pad_id = c.pad_id
        self.embeddings = _Embeddings(c, positions)
        with warnings.catch_warnings():
            # torch says that its nested-tensor path does not support pre-norm layers.
            warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
            sizes = (c.d_model, c.heads, c.encoder_layers, c.decoder_layers, c.feed_forward, c.dropout)
            self.transformer = nn.Transformer(*sizes, batch_first=True, norm_first=True)
        _copy_embeddings(self.embeddings, model)
        state = {k: v for k, v in model.state_dict().items() if k.startswith(("encoder.", "decoder."))}
        self.transformer.load_state_dict(state)

    def loss(self, batch: Batch, label_smoothing: float) -> Tensor:
        """Return the sum of the cross entropy over the real target tokens of a padded batch."""
        e, length = self.embeddings, batch.target_in.shape[1]
        padding = batch.source == self.pad_id  # [B, S]
        hidden = self.transformer(
            e.embed(e.source, batch.source),
            e.embed(e.target, batch.target_in),
            tgt_mask=torch.ones(length, length, dtype=torch.bool, device=padding.device).triu(1),
            src_key_padding_mask=padding,
            tgt_key_padding_mask=batch.target_in == self.pad_id,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )  # [B, T, D]
        return _loss(e.logits(hidden), batch.target_out, self.pad_id, label_smoothing)


def _loss(logits: Tensor, target: Tensor, pad_id: int, label_smoothing: float) -> Tensor:
    settings = {"ignore_index": pad_id, "label_smoothing": label_smoothing, "reduction": "sum"}
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), **settings)  # type: ignore[arg-type]


class _Attention(nn.Module):
    """softmax(QK^T / sqrt(K)) V with the score matrix in memory and a mask of 0 and 1."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            project(y).view(y.shape[0], -1, self.heads, y.shape[2] // self.heads).transpose(1, 2)
            for project, y in ((self.query, x), (self.key, memory), (self.value, memory))
        )  # [B, H, L, K]
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        weights = self.dropout(scores.masked_fill(mask.unsqueeze(1) == 0, -1e9).softmax(-1))  # [B, H, L, L]
        return self.out(torch.matmul(weights, v).transpose(1, 2).reshape(x.shape))


class _Layer(nn.Module):
    """Pre-norm layer; with `cross` it is a decoder's."""

    def __init__(self, config: TranslationConfig, cross: bool) -> None:
        super().__init__()
        width, dropout = config.d_model, config.dropout
        attentions = 2 if cross else 1
        self.attentions = nn.ModuleList(_Attention(width, config.heads, dropout) for _ in range(attentions))
        self.norms = nn.ModuleList(nn.LayerNorm(width, config.norm_eps) for _ in range(attentions + 1))
        self.linear1, self.linear2 = nn.Linear(width, config.feed_forward), nn.Linear(config.feed_forward, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        h = self.norms[0](x)
        x = x + self.dropout(self.attentions[0](h, h, mask))
        if memory is not None:
            x = x + self.dropout(self.attentions[1](self.norms[1](x), memory, memory_mask))
        h = self.dropout(self.linear1(self.norms[-1](x)).relu())
        return x + self.dropout(self.linear2(h))


class FixedLengthTranslation(nn.Module):
    """T1: every sentence is 200 tokens long; parameters copied from `model`."""

    LENGTH = 200

    def __init__(self, model: TranslationModel) -> None:
        super().__init__()
        c = model.config
        self.config = c
        self.embeddings = _Embeddings(c, self.LENGTH)
        encoder = [_Layer(c, cross=False) for _ in range(c.encoder_layers)]
        decoder = [_Layer(c, cross=True) for _ in range(c.decoder_layers)]
        self.encoder, self.decoder = nn.ModuleList(encoder), nn.ModuleList(decoder)
        self.encoder_norm, self.decoder_norm = (nn.LayerNorm(c.d_model, c.norm_eps) for _ in range(2))
        _copy_embeddings(self.embeddings, model)
        for source, norm in ((model.encoder.norm, self.encoder_norm), (model.decoder.norm, self.decoder_norm)):
            assert source is not None, "T1 has a norm after each stack"
            norm.load_state_dict(source.state_dict())
        for stack, layers in ((model.encoder.layers, encoder), (model.decoder.layers, decoder)):
            for source, layer in zip(stack, layers, strict=True):
                _copy_layer(source, layer)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Encode `[B, L]`: memory `[B, L, D]` and its dense mask `[B, 1, L]`."""
        mask = (source != self.config.pad_id).unsqueeze(1)
        x = self.embeddings.embed(self.embeddings.source, source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x), mask

    def decode(self, target: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """Return the logits of every position, `[B, L, V]`."""
        look_ahead = torch.ones(1, self.LENGTH, self.LENGTH, dtype=torch.bool, device=target.device).tril()
        mask = (target != self.config.pad_id).unsqueeze(1) & look_ahead  # [B, L, L]
        x = self.embeddings.embed(self.embeddings.target, target)
        for layer in self.decoder:
            x = layer(x, mask, memory, memory_mask)
        return self.embeddings.logits(self.decoder_norm(x))

    def pad(self, ids: Tensor) -> Tensor:
        """Pad `[B, S]` to `[B, L]`."""
        return F.pad(ids, (0, self.LENGTH - ids.shape[1]), value=self.config.pad_id)

    def loss(self, batch: Batch, label_smoothing: float) -> Tensor:
        """Return the sum of the cross entropy over the real target tokens of a padded batch."""
        memory, mask = self.encode(self.pad(batch.source))
        logits = self.decode(self.pad(batch.target_in), memory, mask)
        return _loss(logits, self.pad(batch.target_out), self.config.pad_id, label_smoothing)

    @torch.no_grad()
    def greedy(self, source: Sequence[int], tokens: int) -> tuple[list[int], float]:
        """Translate one sentence (ids with eos) to `tokens` ids, none of them special, and their log probability."""
        c, device = self.config, self.embeddings.target.weight.device
        memory, mask = self.encode(self.pad(torch.tensor([list(source)], device=device)))
        output = torch.full((1, self.LENGTH), c.pad_id, device=device)
        output[0, 0] = c.bos_id
        total = 0.0
        for t in range(tokens):
            log_p = self.decode(output, memory, mask).log_softmax(-1)[0, t]  # [V]
            log_p[[c.pad_id, c.bos_id, c.eos_id]] = -math.inf
            output[0, t + 1] = log_p.argmax()
            total += float(log_p.max() - log_p.logsumexp(0))
        return output[0, 1 : tokens + 1].tolist(), total


def _copy_layer(source: Any, layer: _Layer) -> None:
    """Copy a layer with torch's parameter names."""
    state = source.state_dict()
    copies: list[tuple[Any, str]] = [(layer.linear1, "linear1."), (layer.linear2, "linear2.")]
    copies += [(norm, f"norm{i}.") for i, norm in enumerate(layer.norms, 1)]
    for name, attention in zip(("self_attn.", "multihead_attn."), layer.attentions, strict=False):
        weights, biases = (state[f"{name}in_proj_{kind}"].chunk(3) for kind in ("weight", "bias"))
        for i, projection in enumerate((attention.query, attention.key, attention.value)):
            projection.load_state_dict({"weight": weights[i], "bias": biases[i]})  # type: ignore[union-attr]
        copies.append((attention.out, f"{name}out_proj."))
    for module, name in copies:
        module.load_state_dict({kind: state[name + kind] for kind in ("weight", "bias")})


class TutorialLanguageModel(nn.Module):
    """T2: embedding, positions, nn.Transformer's encoder under a float mask, linear; ids are `[T, B]`, time first."""

    table: Tensor

    def __init__(self, model: LanguageModel, positions: int) -> None:
        super().__init__()
        c = model.config
        self.silent = [c.pad_id, c.bos_id]  # T2 lacks them
        self.tokens = nn.Embedding(c.vocabulary, c.d_model)
        self.register_buffer("table", sinusoidal_positions(positions, c.d_model)[:, None])
        self.dropout = nn.Dropout(0.2)
        # The original subclasses nn.Transformer, and gives it no dropout rate.
        layer = nn.TransformerEncoderLayer(c.d_model, c.heads, c.feed_forward)
        norm = None if model.decoder.norm is None else nn.LayerNorm(c.d_model)
        self.encoder = nn.TransformerEncoder(layer, c.layers, norm, enable_nested_tensor=False)
        self.output = nn.Linear(c.d_model, c.vocabulary)
        self.tokens.load_state_dict(model.embedding.tokens.state_dict())
        self.encoder.load_state_dict(model.decoder.state_dict())
        self.output.load_state_dict(model.output.state_dict())

    def forward(self, ids: Tensor) -> Tensor:
        """Return log probabilities `[T, B, V]` of the word after each."""
        mask = torch.full((len(ids), len(ids)), -math.inf, device=ids.device).triu(1)
        x = self.dropout(self.tokens(ids) * math.sqrt(self.tokens.embedding_dim) + self.table[: len(ids)])
        return F.log_softmax(self.output(self.encoder(x, mask=mask)), dim=-1)

    def loss(self, data: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss over all tokens."""
        return F.nll_loss(self(data).flatten(0, 1), target.flatten())

    @torch.no_grad()
    def next_words(self, text: Tensor) -> Tensor:
        """Return log probabilities `[T, V]` of the word after each of `[T]`, none for pad and bos."""
        log_p: Tensor = self(text[:, None])[:, 0]
        log_p[:, self.silent] = -torch.inf
        return log_p

    def write(self, text: Tensor, steps: range, context: int) -> Tensor:
        """Return word t for each t of `steps`, from the text `[T]` before it or its window of `context` words."""
        starts = [0]
        for t in range(1, len(text)):
            starts.append(t - context // 2 if t - starts[-1] == context else starts[-1])
        return torch.stack([self.next_words(text[starts[t] : t + 1])[-1].argmax() for t in steps])
