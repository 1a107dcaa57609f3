"""The translation model against torch.nn.Transformer, and what must hold of any such model."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fastformer.apps.models.embeddings import Embedding
from fastformer.apps.translation.model import TranslationModel, translation_loss
from tests.support.translation_task import (
    BOS,
    PAD,
    TorchTwin,
    config,
    random_batch,
    random_ids,
    random_model,
    weights_of,
)

RAGGED = [(1, 3), (6, 1), (4, 4), (9, 7)]  # lengths without special ids: one token, more source, more target


def widened(batch, columns):
    """Return a padded batch with more columns of padding."""
    names = ("source", "target_in", "target_out")
    return replace(batch, **{name: F.pad(getattr(batch, name), (0, columns), value=PAD) for name in names})


VARIANTS = {
    "pre-norm": {},
    "post-norm": {"norm_first": False},
    "pre-norm, no final norms": {"final_norm": False},
    "post-norm, no final norms": {"norm_first": False, "final_norm": False},
    "separate": {"embeddings": "separate", "target_vocabulary": 13},
    "shared": {"embeddings": "shared"},
    "learned": {"positions": "learned", "max_positions": 10},
    "output bias": {"output_bias": True},
    "no biases": {"bias": False},
    "gelu, eps, unscaled": {"activation": "gelu", "norm_eps": 1e-2, "scale_embeddings": False},
    "beyond the short attention": {"encoder_layers": 1, "decoder_layers": 1},
    "unequal stacks, one head": {"encoder_layers": 1, "decoder_layers": 3, "heads": 1},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_model_is_torchs_transformer(variant, dtype):
    """Packed and padded input give torch's loss on a padded batch, and torch's gradient of every parameter."""
    model = random_model(1, **VARIANTS[variant]).to(dtype)
    twin = TorchTwin(model.config).copy(model).to(dtype).train()  # train: not torch's inference fast path
    lengths = [*RAGGED, (70, 66)] if "beyond" in variant else RAGGED
    packed, padded = (random_batch(lengths, packed=form, vocabulary=13) for form in (True, False))
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5}[dtype]

    expected = twin.loss(padded, label_smoothing=0.1)
    wanted = torch.autograd.grad(expected, list(twin.parameters()))
    wanted = dict(zip((name for name, _ in twin.named_parameters()), wanted, strict=True))
    for batch in (packed, padded, widened(padded, 3)):
        loss = translation_loss(model, batch, label_smoothing=0.1)
        names, parameters = zip(*model.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss, parameters)
        torch.testing.assert_close(loss, expected, atol=tolerance, rtol=tolerance)
        for name, grad in zip(names, grads, strict=True):
            torch.testing.assert_close(grad, wanted[twin_name(name, wanted)], atol=10 * tolerance, rtol=tolerance)


def twin_name(name, wanted):
    """A shared parameter goes by the first of its names, and that differs between the two models."""
    actual = TorchTwin.name(name)
    return actual if actual in wanted else "source_tokens.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("inference", [False, True])
def test_sinusoidal_table_grows(dtype, inference):
    """Beyond max_length the table grows, old values stay what they were, and training can go on with it."""
    small, large = (Embedding(9, 6, max_length=n, dropout=0.0).to(dtype) for n in (4, 50))
    large.load_state_dict(small.state_dict())
    ids, positions = torch.randint(9, (30,)), torch.arange(30)
    with torch.inference_mode(inference):
        out = small(ids, positions, 30)
    assert small.table.shape[0] >= 30
    assert small.table.dtype == out.dtype == dtype
    torch.testing.assert_close(small.table[:50], large.table[: len(small.table)], atol=0, rtol=0)
    torch.testing.assert_close(out.clone(), large(ids, positions, 30), atol=0, rtol=0)
    assert not small.table.is_inference()
    small.table.add_(0)  # what DistributedDataParallel's broadcast of buffers does
    small(ids, positions, 30).sum().backward()


def test_tables_are_not_in_the_checkpoint():
    long = TranslationModel(config(max_positions=64))
    long.load_state_dict(TranslationModel(config(max_positions=8)).state_dict())


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("final_norm", [True, False])
def test_attention_maps_are_the_weights_of_torchs_layers(norm_first, final_norm):
    model = random_model(11, encoder_layers=2, decoder_layers=3, norm_first=norm_first, final_norm=final_norm)
    generator = torch.Generator().manual_seed(0)
    source = torch.tensor([*random_ids(4, generator), 3])
    target_in = torch.tensor([BOS, *random_ids(6, generator)])
    maps = model.attention_maps(source, target_in)
    assert not any(weights.requires_grad for weights in maps.values())
    twin = TorchTwin(model.config).copy(model).train()  # all dropout is 0
    seen = weights_of(twin, source[None], target_in[None])
    expected = {"encoder": seen[:2], "decoder": seen[2::2], "cross": seen[3::2]}
    torch.testing.assert_close(maps, {name: torch.stack(x) for name, x in expected.items()}, atol=1e-5, rtol=1e-5)
