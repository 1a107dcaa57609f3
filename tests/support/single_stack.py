"""Small language models and classifiers, their twin of torch's layers, and batches for them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.apps.classification.model import (
    ClassifierConfig,
    SequenceClassifier,
    TokenClassifier,
    sequence_classification_loss,
    token_classification_loss,
)
from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.text import LabelledBatch, LanguageBatch
from tests.support.translation_task import paper_positions

CLASSES = 5
LOSSES: dict[type, Any] = {
    LanguageModel: language_model_loss,
    TokenClassifier: token_classification_loss,
    SequenceClassifier: sequence_classification_loss,
}
SIZES = {"vocabulary": 17, "d_model": 12, "heads": 3, "layers": 2, "feed_forward": 20, "dropout": 0.0}


def random_model(kind: type, seed: int = 0, **changes: Any) -> Any:
    """Return a model whose norms and biases are random too, so that swapped ones show."""
    torch.manual_seed(seed)
    if kind is LanguageModel:
        model = kind(LanguageConfig(**{**SIZES, **CLASSICAL, **changes}))
    else:
        model = kind(ClassifierConfig(**{**SIZES, "classes": CLASSES, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def random_batch(kind: type, lengths: Sequence[int], seed: int = 0) -> Any:
    """Return random ids, and the ids or classes to predict; about every third class is ignored."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(4, 17, (total,), generator=generator)
    counts = torch.tensor(lengths, dtype=torch.int64)
    if kind is LanguageModel:
        return LanguageBatch(ids, torch.randint(4, 17, (total,), generator=generator), counts)
    labels = torch.randint(0, CLASSES, (total if kind is TokenClassifier else len(lengths),), generator=generator)
    labels[1::3] = -100
    return LabelledBatch(ids, labels, counts)


def parts(batch: Any) -> tuple[Tensor, Tensor]:
    """Return the ids, and the ids or classes to predict."""
    return (batch.ids_in, batch.ids_out) if isinstance(batch, LanguageBatch) else (batch.ids, batch.labels)


def padded_like(batch: Any, extra: int = 0, fill: int = 0) -> Any:
    """Return the batch with padding, `extra` columns more than needed; padding's ids and labels are `fill`."""

    def wide(values: Tensor) -> Tensor:
        rows = torch.split(values, batch.lengths.tolist())
        return F.pad(nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill), (0, extra), value=fill)

    names = ("ids_in", "ids_out") if isinstance(batch, LanguageBatch) else ("ids", "labels")
    total = int(batch.lengths.sum())
    return replace(batch, **{name: wide(x) for name in names if len(x := getattr(batch, name)) == total})


def loss_and_gradients(model: Any, batch: Any, label_smoothing: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    loss = LOSSES[type(model)](model, batch, label_smoothing)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss, dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


class TorchTwin(nn.Module):
    """The same model written with torch.nn.TransformerEncoder on padded batches: a padding mask, and a causal one."""

    def __init__(self, c: Any, kind: Any = LanguageModel) -> None:
        super().__init__()
        self.c, self.kind, self.causal = c, kind, kind.causal
        self.tokens = nn.Embedding(c.vocabulary, c.d_model)
        self.positions = nn.Embedding(c.max_positions, c.d_model) if c.positions == "learned" else None
        layer = nn.TransformerEncoderLayer(
            c.d_model, c.heads, c.feed_forward, c.dropout, c.activation, c.norm_eps, True, c.norm_first, c.bias
        )
        norm = nn.LayerNorm(c.d_model, c.norm_eps, bias=c.bias) if c.final_norm else None
        setattr(self, kind.stack_name, nn.TransformerEncoder(layer, c.layers, norm, enable_nested_tensor=False))
        size, bias = (c.vocabulary, c.output_bias) if self.causal else (c.classes, True)
        self.output = nn.Linear(c.d_model, size, bias=bias)
        if self.causal and c.embeddings == "tied":
            self.output.weight = self.tokens.weight

    @staticmethod
    def name(name: str) -> str:
        """Return the name here of a parameter of fastformer's model."""
        return name.removeprefix("embedding.")

    def copy(self, model: nn.Module) -> "TorchTwin":
        """Take the parameters of `model`, every one of them; in training mode, where torch has no fast path."""
        self.load_state_dict({self.name(name): value for name, value in model.state_dict().items()})
        return self.train()

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return logits `[B, L, C]` of padded ids, or `[B, C]`; no sequence is empty, which torch would make NaN of."""
        length = ids.shape[1]
        x = self.tokens(ids) * (self.c.d_model**0.5 if self.c.scale_embeddings else 1.0)
        table = paper_positions(length, self.c.d_model).float().to(x.dtype)
        x = x + (table if self.positions is None else self.positions.weight[:length])
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1) if self.causal else None
        padding = torch.arange(length) >= lengths[:, None]
        hidden = getattr(self, self.kind.stack_name)(x, mask=ahead, src_key_padding_mask=padding)
        if self.kind is not SequenceClassifier:
            return self.output(hidden)
        rows = [row[:n] for row, n in zip(hidden, lengths.tolist(), strict=True)]
        pool = {"mean": lambda r: r.mean(0), "first": lambda r: r[0], "max": lambda r: r.amax(0)}[self.c.pooling]
        return self.output(torch.stack([pool(row) for row in rows]))

    def loss(self, batch: Any, label_smoothing: float = 0.0) -> Tensor:
        """Return the loss of a padded batch."""
        ids, labels = parts(batch)
        if labels.dim() == 2:
            labels = labels.masked_fill(torch.arange(labels.shape[1]) >= batch.lengths[:, None], -100)
        logits = self(ids, batch.lengths).flatten(0, -2)
        return F.cross_entropy(logits, labels.flatten(), label_smoothing=label_smoothing, reduction="sum")
