"""The packed language model against torch.nn.TransformerEncoder, and what must hold of any such model."""

import copy
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastformer.apps.language.model import LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.text import LanguageBatch, LanguageBatches
from fastformer.apps.train import TrainConfig, Trainer
from fastformer.packing import Layout, pack
from tests.support.fused_op import DEVICE, assert_model_as_accurate_as_reference, needs_kernels
from tests.support.language_task import (
    STEPS_VOCABULARY,
    TorchTwin,
    bigram_loss,
    config,
    random_batch,
    random_model,
    steps_documents,
)

RAGGED = [1, 6, 4, 9, 2]
LONG = [3, 70, 1, 66]  # beyond the lengths at which attention works on short sequences

VARIANTS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"norm_first": False},
    "pre-norm, no final norm": {"final_norm": False},
    "post-norm, no final norm": {"norm_first": False, "final_norm": False},
    "separate": {"embeddings": "separate"},
    "learned": {"positions": "learned", "max_positions": 12},
    "output bias": {"output_bias": True},
    "no biases": {"bias": False},
    "gelu, eps, unscaled": {"activation": "gelu", "norm_eps": 1e-2, "scale_embeddings": False},
    "long": {"layers": 1},
    "three layers, one head": {"layers": 3, "heads": 1},
}


def variant_batch(variant: str) -> LanguageBatch:
    return random_batch(LONG if variant == "long" else RAGGED)


def padded_like(batch: LanguageBatch, extra: int = 0) -> LanguageBatch:
    """The batch with padding, `extra` columns more than needed."""

    def wide(ids: torch.Tensor) -> torch.Tensor:
        rows = nn.utils.rnn.pad_sequence(torch.split(ids, batch.lengths.tolist()), batch_first=True, padding_value=1)
        return F.pad(rows, (0, extra), value=1)

    return replace(batch, ids_in=wide(batch.ids_in), ids_out=wide(batch.ids_out))


def documents_of(batch: LanguageBatch) -> list[LanguageBatch]:
    """Each document as a batch of its own."""
    lengths = batch.lengths.tolist()
    parts = zip(batch.ids_in.split(lengths), batch.ids_out.split(lengths), batch.lengths.split(1), strict=True)
    return [LanguageBatch(*part) for part in parts]


def batch_of(documents: list[LanguageBatch]) -> LanguageBatch:
    """One batch of several."""
    return LanguageBatch(*(torch.cat(parts) for parts in zip(*(vars(d).values() for d in documents), strict=True)))


def loss_and_gradients(
    model: LanguageModel, batch: LanguageBatch, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = language_model_loss(model, batch, label_smoothing)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss, dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_model_is_torchs_encoder_with_a_causal_and_a_padding_mask(variant, dtype):
    """Packed and padded input give torch's loss on a padded batch, and torch's gradient of every parameter."""
    model = random_model(1, **VARIANTS[variant]).to(dtype)
    twin = TorchTwin(model.config).copy(model).to(dtype)
    packed = variant_batch(variant)
    padded = padded_like(packed)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5}[dtype]

    expected = twin.loss(padded, label_smoothing=0.1)
    names, parameters = zip(*twin.named_parameters(), strict=True)
    wanted = dict(zip(names, torch.autograd.grad(expected, parameters), strict=True))
    for batch in (packed, padded, padded_like(packed, extra=3)):
        loss, gradients = loss_and_gradients(model, batch, label_smoothing=0.1)
        torch.testing.assert_close(loss, expected, atol=tolerance, rtol=tolerance)
        assert {TorchTwin.name(name) for name in gradients} == set(wanted)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[TorchTwin.name(name)], atol=10 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_and_logits_are_torchs(variant):
    model = random_model(2, **VARIANTS[variant]).double()
    packed = variant_batch(variant)
    padded = padded_like(packed)
    hidden = model(packed.ids_in, packed.lengths)
    assert hidden.shape == (packed.tokens, model.config.d_model)
    logits = TorchTwin(model.config).copy(model).double()(padded.ids_in, padded.lengths)
    expected = pack(logits, Layout.from_lengths(packed.lengths))
    torch.testing.assert_close(model.logits(hidden), expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(model(padded.ids_in, padded.lengths), hidden, atol=1e-12, rtol=0)


@pytest.mark.parametrize("lengths", [RAGGED, LONG], ids=["short", "long"])
def test_a_batch_is_its_documents_one_by_one(lengths):
    """Hidden states, loss and every gradient: each document alone, added up."""
    model = random_model(3).double()
    batch = random_batch(lengths)
    alone = documents_of(batch)
    hidden = torch.cat([model(one.ids_in, one.lengths) for one in alone])
    torch.testing.assert_close(model(batch.ids_in, batch.lengths), hidden, atol=1e-12, rtol=0)
    loss, gradients = loss_and_gradients(model, batch)
    parts = [loss_and_gradients(model, one) for one in alone]
    torch.testing.assert_close(loss, torch.stack([part for part, _ in parts]).sum(), atol=1e-10, rtol=0)
    for name, gradient in gradients.items():
        expected = torch.stack([part[name] for _, part in parts]).sum(0)
        torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("lengths", [RAGGED, LONG], ids=["short", "long"])
def test_changing_a_document_leaves_the_others_as_they_are(lengths):
    """Bit for bit: the same operations on the same numbers. And each hidden state of its own changes."""
    model = random_model(4)
    batch = random_batch(lengths)
    spans = torch.repeat_interleave(torch.arange(len(lengths)), batch.lengths)
    before = model(batch.ids_in, batch.lengths)
    for document in range(len(lengths)):
        mine = spans == document
        changed = torch.where(mine, (batch.ids_in + 1) % 17, batch.ids_in)
        after = model(changed, batch.lengths)
        assert torch.equal(after[~mine], before[~mine])
        assert ((after - before)[mine].abs().amax(1) > 1e-4).all()


@pytest.mark.parametrize("lengths", [RAGGED, LONG], ids=["short", "long"])
def test_gradients_stay_within_the_document_and_its_past(lengths):
    """The loss of one position reaches the embeddings of its own document up to itself, and those alone."""
    model = random_model(5).double()
    batch = random_batch(lengths)
    embedded: list[torch.Tensor] = []
    model.embedding.register_forward_hook(lambda module, args, output: embedded.append(output))
    hidden = model(batch.ids_in, batch.lengths)
    losses = F.cross_entropy(model.logits(hidden), batch.ids_out, reduction="none")
    ends = batch.lengths.cumsum(0).tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        for position in {start, (start + end) // 2, end - 1}:
            (gradient,) = torch.autograd.grad(losses[position], embedded[0], retain_graph=True)
            reached = gradient.abs().amax(1) > 0
            assert reached.nonzero().flatten().tolist() == list(range(start, position + 1))


def test_a_token_is_seen_by_all_that_follow_in_its_document_and_by_nothing_before():
    model = random_model(6).double()
    batch = random_batch([3, 7, 2])
    before = model(batch.ids_in, batch.lengths)
    for position in range(3, 10):
        changed = batch.ids_in.clone()
        changed[position] = (changed[position] + 1) % 17
        moved = (model(changed, batch.lengths) - before).abs().amax(1) > 1e-9
        assert moved.tolist() == [False] * position + [True] * (10 - position) + [False] * 2


def test_the_order_of_the_documents_does_not_matter():
    model = random_model(7).double()
    documents = documents_of(random_batch(RAGGED))
    order = [3, 0, 4, 2, 1]
    batch, other = batch_of(documents), batch_of([documents[i] for i in order])
    (loss, gradients), (moved, shuffled) = (loss_and_gradients(model, each) for each in (batch, other))
    torch.testing.assert_close(moved, loss, atol=1e-11, rtol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(shuffled[name], gradient, atol=1e-11, rtol=1e-10)
    parts = model(batch.ids_in, batch.lengths).split(RAGGED)
    hidden = model(other.ids_in, other.lengths)
    torch.testing.assert_close(hidden, torch.cat([parts[i] for i in order]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("lengths", [RAGGED, LONG], ids=["short", "long"])
def test_documents_of_length_zero_change_nothing(lengths):
    model = random_model(8).double()
    batch = random_batch(lengths)
    gaps = replace(batch, lengths=torch.tensor([0, *[n for length in lengths for n in (length, 0)]]))
    (loss, gradients), (same, others) = (loss_and_gradients(model, each) for each in (batch, gaps))
    torch.testing.assert_close(same, loss, atol=1e-11, rtol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_batch_of_no_tokens_has_loss_and_gradients_zero(lengths, padded):
    model = random_model(9, output_bias=True)
    shape = (len(lengths), 3) if padded else (0,)
    ids = torch.full(shape, 1)
    batch = LanguageBatch(ids, ids, torch.tensor(lengths, dtype=torch.int64))
    assert model(ids, batch.lengths).shape == (0, 12)
    loss, gradients = loss_and_gradients(model, batch, label_smoothing=0.1)
    assert loss.item() == 0
    assert all((gradient == 0).all() for gradient in gradients.values())


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("output_bias", [False, True])
def test_loss_is_the_sum_of_torchs_cross_entropy(label_smoothing, output_bias):
    model = random_model(10, output_bias=output_bias).double()
    batch = random_batch(RAGGED)
    logits = model.logits(model(batch.ids_in, batch.lengths))
    expected = F.cross_entropy(logits, batch.ids_out, label_smoothing=label_smoothing, reduction="sum")
    for form in (batch, padded_like(batch), padded_like(batch, extra=5)):
        loss = language_model_loss(model, form, label_smoothing)
        torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)


def test_loss_is_fp32_under_autocast():
    model = random_model(11, d_model=24)
    batch = random_batch(RAGGED)
    exact = language_model_loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = language_model_loss(model, batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
    loss.backward()


def test_dropout_is_active_in_training_only():
    batch = random_batch(RAGGED)
    model = random_model(12, dropout=0.3)
    rates = [m.p if isinstance(m, nn.Dropout) else getattr(m, "dropout", None) for m in model.modules()]
    assert {rate for rate in rates if isinstance(rate, float)} == {0.3}  # embedding, attention and both sublayers
    assert torch.equal(model(batch.ids_in, batch.lengths), model(batch.ids_in, batch.lengths))
    model.train()
    torch.manual_seed(0)
    first, second = model(batch.ids_in, batch.lengths), model(batch.ids_in, batch.lengths)
    torch.manual_seed(0)
    assert not torch.allclose(first, second)
    assert torch.equal(model(batch.ids_in, batch.lengths), first)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(variant):
    batch = random_batch(LONG if variant == "long" else [12, 12, 12])
    _, gradients = loss_and_gradients(random_model(13, **VARIANTS[variant]).train(), batch)
    for name, gradient in gradients.items():
        assert gradient.abs().sum() > 0, name


@pytest.mark.parametrize("embeddings", ["separate", "tied"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_tied_weights_stay_tied(how, embeddings):
    model = random_model(14, embeddings=embeddings)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        twin = random_model(15, embeddings=embeddings)
        twin.load_state_dict(model.state_dict())
    tokens = twin.embedding.tokens.weight
    assert (twin.output.weight is tokens) == (embeddings == "tied")
    assert tokens is not model.embedding.tokens.weight
    matrices = 1 if embeddings == "tied" else 2
    stack = sum(p.numel() for p in twin.decoder.parameters())
    assert sum(p.numel() for p in twin.parameters()) == stack + matrices * 17 * 12
    batch = random_batch(RAGGED)
    assert torch.equal(twin(batch.ids_in, batch.lengths), model(batch.ids_in, batch.lengths))
    # Still tied after a step.
    language_model_loss(twin.train(), batch).backward()
    torch.optim.SGD(twin.parameters(), 0.1).step()
    assert torch.equal(twin.output.weight, tokens) == (embeddings == "tied")


@pytest.mark.parametrize("initialisation", ["xavier_uniform", "xavier_normal", "normal", "uniform"])
def test_initialisation(initialisation):
    torch.manual_seed(0)
    settings = {"initialisation": initialisation, "embeddings": "separate", "output_bias": True}
    model = LanguageModel(config(vocabulary=90, d_model=96, heads=4, feed_forward=192, **settings))
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        xavier = (2 / sum(weight.shape)) ** 0.5
        std = {"normal": 0.02, "uniform": 0.2 / 12**0.5}.get(initialisation, xavier)
        std = 96**-0.5 if "tokens" in name else std
        assert weight.std().item() == pytest.approx(std, rel=0.1), name
        assert weight.mean().item() == pytest.approx(0, abs=5 * std / weight.numel() ** 0.5), name
    assert (model.output.bias == 0).all()
    # No two matrices are the copies that torch's stacks start with.
    first, second = (layer.linear1.weight for layer in model.decoder.layers)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("embeddings", ["separate", "tied"])
def test_logits_start_near_one(embeddings):
    torch.manual_seed(0)
    model = LanguageModel(config(d_model=96, heads=4, embeddings=embeddings)).eval()
    batch = random_batch(RAGGED)
    assert 0.3 < model.logits(model(batch.ids_in, batch.lengths)).std() < 3


def test_config_describes_itself():
    """Every field has a help text, and a model is rebuilt from the values alone."""
    model = random_model(16)
    values = {name: getattr(model.config, name) for name in LanguageConfig.__dataclass_fields__}
    assert LanguageConfig(**values) == model.config
    assert all(field.metadata["description"] for field in LanguageConfig.__dataclass_fields__.values())
    LanguageModel(LanguageConfig(**values)).load_state_dict(model.state_dict())
    assert LanguageConfig(vocabulary=9).longest is None
    assert LanguageConfig(vocabulary=9, positions="learned", max_positions=7).longest == 7


def test_tables_of_positions_are_not_in_the_checkpoint():
    long = LanguageModel(config(max_positions=64))
    long.load_state_dict(LanguageModel(config(max_positions=8)).state_dict())


ERRORS = [
    ({"heads": 5}, "heads (5) must divide d_model (12)"),
    ({"eos_id": 17}, "eos_id must be at least 0 and below vocabulary (17), not 17"),
    ({"pad_id": -1}, "pad_id must be at least 0 and below vocabulary (17), not -1"),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        config(**changes)


def test_input_errors():
    model = random_model(positions="learned", max_positions=5)
    ids, lengths = torch.tensor([4, 5, 6]), torch.tensor([2, 1])
    with pytest.raises(ValueError, match=r"^ids must be packed \[3\] or padded \[2, length\], not \[2\]$"):
        model(ids[:2], lengths)
    with pytest.raises(ValueError, match="has 1 rows, lengths has 2"):
        model(ids[None], lengths)
    with pytest.raises(ValueError, match="a length of 2 is beyond the row of 1"):
        model(ids[:2, None], lengths)
    with pytest.raises(ValueError, match=r"^lengths must not be negative: -1$"):
        model(ids, torch.tensor([4, -1]))
    with pytest.raises(TypeError, match=r"^lengths must be integers, not torch\.float32$"):
        model(ids, torch.tensor([2.0, 1.0]))
    with pytest.raises(ValueError, match=r"^a sequence of 6 is longer than max_length, 5$"):
        model(torch.full((6,), 4), torch.tensor([6]))
    with pytest.raises(TypeError, match=r"^ids must be int64, not torch\.float32$"):
        model(ids.float(), lengths)
    for wrong in (17, -1):
        with pytest.raises(IndexError, match=f"^ids must lie between 0 and 16, the last row of weight, not {wrong}$"):
            model(torch.tensor([4, 5, wrong]), lengths)
    with pytest.raises(IndexError, match=r"^target must lie between 0 and 16 or be -100, not 17$"):
        language_model_loss(model, LanguageBatch(ids, torch.tensor([4, 17, 4]), lengths))


@needs_kernels
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_fused_kernels_compute_the_same(norm_first):
    """By the rule of fused_op.py."""
    model = random_model(17, norm_first=norm_first, d_model=16, heads=2, layers=1).to(DEVICE)
    batch = random_batch([3, 0, 5, 1]).to(DEVICE)

    def results(model):
        loss, gradients = loss_and_gradients(model, batch)
        return [loss, *gradients.values()]

    assert_model_as_accurate_as_reference(model, results)


def trainer(folder: Path, steps: int, dropout: float = 0.0) -> Trainer:
    """Of a small model on counting documents, validated on others."""
    held_out = LanguageBatches(steps_documents(300, seed=1), context=16, tokens=600, shuffle=False)

    def validate(model: LanguageModel) -> dict[str, float]:
        batches = list(held_out.epoch(0))
        total = sum(language_model_loss(model, batch).item() for batch in batches)
        return {"loss": total / sum(batch.tokens for batch in batches)}

    torch.manual_seed(0)
    model = LanguageModel(config(vocabulary=STEPS_VOCABULARY, d_model=32, heads=4, feed_forward=64, dropout=dropout))
    settings = TrainConfig(lr=5e-3, warmup_steps=20, steps=steps, batch_tokens=600, log_every=50, validate_every=250)
    batches = LanguageBatches(steps_documents(3000, seed=0), context=16, tokens=600)
    return Trainer(
        model, language_model_loss, batches, settings, folder, validate=validate, architecture=model.config, show=False
    )


@pytest.mark.slow
def test_it_learns_what_the_last_token_does_not_tell(tmp_path):
    """The best prediction from the last token alone stays at 1.93 nats; a model that sees its past falls far below."""
    assert bigram_loss(steps_documents(300, seed=1)) > 1.9
    result = trainer(tmp_path, steps=250).fit()
    assert result.metrics["loss"] < 1.2


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """Bit for bit, in the middle of an epoch, with dropout."""
    whole = trainer(tmp_path / "whole", steps=9, dropout=0.1)
    whole.fit()
    trainer(tmp_path / "parts", steps=4, dropout=0.1).fit()
    rest = trainer(tmp_path / "parts", steps=9, dropout=0.1)
    rest.resume()
    rest.fit()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(rest.model.state_dict()[name], value), name
