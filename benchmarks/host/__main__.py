"""Measure the host time of fastformer's calls and of torch's, on tensors so small that computing takes no time.

    python -m benchmarks.host         # microseconds of process CPU time, best of 40 rounds

A GPU waits for the host if its own work is shorter: at batches below some 4,000 tokens of the base model. Needs no GPU
(`null_driver`); torch then runs a CPU's tiny kernels in place of launches, which take about as long. CUDA graphs are
not launched, which would take some microseconds.
"""

import argparse
import copy
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import fastformer
from benchmarks.competitors.training import training_step
from benchmarks.competitors.tutorials import TorchTranslation
from benchmarks.harness.clock import Call
from benchmarks.harness.lengths import VOCABULARY, random_pairs
from benchmarks.host import null_driver
from fastformer import functional
from fastformer.apps.models import decoding
from fastformer.apps.text import Batch, collate
from fastformer.apps.train import Processes, TrainConfig
from fastformer.apps.train.graphs import GraphedUpdate
from fastformer.apps.train.update import Update
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, translation_loss
from fastformer.apps.translation.search import SearchOptions, beam_search
from fastformer.host.cuda_graphs import Recorder
from fastformer.packing import Layout

_ROUNDS = 40
_SECONDS = 0.004  # of a round, so short that other programs do not run in the best one
D, H, P = 32, 2, 0.1


Pair = tuple[str, Call, Call]  # a name, fastformer's call and torch's


def _parameters(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def _calls() -> list[tuple[str, list[Tensor], Callable[..., Tensor], Callable[..., Tensor]]]:
    """Return names, what is differentiated, fastformer's ops and torch's."""
    layout = Layout.from_lengths([4, 4])
    heads = _parameters(*[(8, H, 16)] * 3)
    dense = _parameters(*[(2, H, 4, 16)] * 3)
    ids, target = torch.randint(0, 50, (8,)), torch.randint(0, 50, (8,))
    key_lengths, positions = torch.tensor([3, 4]), torch.arange(8)
    table = torch.randn(8, D)
    key_mask = (torch.arange(4) < key_lengths[:, None])[:, None, None]
    x, r, w, b = _parameters((8, D), (8, D), (D,), (D,))
    w1, b1, w2, b2 = _parameters((64, D), (64,), (D, 64), (D,))
    vocabulary, bias = _parameters((50, D), (50,))
    (projected,), (cos, sin) = _parameters((8, 2 * H, 16)), torch.randn(2, 8, 8)
    norm = (D,)

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = torch.cat([cos, cos], -1)[:, None], torch.cat([sin, sin], -1)[:, None]
        return x * cos + torch.cat([-b, a], -1) * sin

    def padded(x: Tensor) -> Tensor:
        return x.view(2, 4, H, 16).transpose(1, 2)

    return [
        ("layer_norm", [x, w, b], lambda x, w, b: functional.layer_norm(x, norm, w, b),
         lambda x, w, b: F.layer_norm(x, norm, w, b)),
        ("rms_norm", [x, w], lambda x, w: functional.rms_norm(x, norm, w), lambda x, w: F.rms_norm(x, norm, w)),
        ("dropout_add_layer_norm", [x, r, w, b],
         lambda x, r, w, b: functional.dropout_add_layer_norm(x, r, norm, w, b, dropout_p=P)[0],
         lambda x, r, w, b: F.layer_norm(r + F.dropout(x, P), norm, w, b)),
        ("dropout_add_rms_norm", [x, r, w],
         lambda x, r, w: functional.dropout_add_rms_norm(x, r, norm, w, dropout_p=P)[0],
         lambda x, r, w: F.rms_norm(r + F.dropout(x, P), norm, w)),
        ("feed_forward", [x, w1, b1, w2, b2], lambda *a: functional.feed_forward(*a, dropout_p=P),
         lambda x, w1, b1, w2, b2: F.linear(F.dropout(F.relu(F.linear(x, w1, b1)), P), w2, b2)),
        ("attention, causal", dense, lambda q, k, v: functional.attention(q, k, v, causal=True),
         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        ("attention, padding", dense, lambda q, k, v: functional.attention(q, k, v, key_lengths=key_lengths),
         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, key_mask)),
        ("packed_attention", heads, lambda q, k, v: functional.packed_attention(q, k, v, layout, dropout_p=P),
         lambda q, k, v: F.scaled_dot_product_attention(padded(q), padded(k), padded(v), key_mask, P)),
        ("embedding", [vocabulary],
         lambda w: functional.embedding(ids, w, table, positions, scale=5.0, dropout_p=P),
         lambda w: F.dropout(F.embedding(ids, w) * 5.0 + table[positions], P)),
        ("rotary", [projected], lambda x: functional.rotary(x[:, :H], positions, cos, sin),
         lambda x: turn(x[:, :H], cos[positions], sin[positions])),
        ("linear_cross_entropy", [x, vocabulary, bias],
         lambda x, w, b: functional.linear_cross_entropy(x, w, target, b, label_smoothing=0.1),
         lambda x, w, b: F.cross_entropy(F.linear(x, w, b), target, label_smoothing=0.1)),
    ]  # fmt: skip


def _op_pairs(
    name: str, leaves: list[Tensor], op: Callable[..., Tensor], torch_op: Callable[..., Tensor]
) -> list[Pair]:
    """Return an op's call, forward alone and with backward, of both sides."""
    plain = [x.detach() for x in leaves]

    def with_backward(op: Callable[..., Tensor]) -> Call:
        grad = torch.ones_like(op(*leaves))
        return lambda: torch.autograd.grad(op(*leaves), leaves, grad)

    return [
        (name, partial(op, *plain), partial(torch_op, *plain)),
        (f"{name}, and backward", with_backward(op), with_backward(torch_op)),
    ]


def _step_pairs() -> list[Pair]:
    """Return training steps of the translation model, 6+6 layers, and of torch.nn.Transformer."""
    pairs = random_pairs(2)
    packed, padded = (collate(pairs, packed=form) for form in (True, False))
    model = TranslationModel(TranslationConfig(VOCABULARY, VOCABULARY, d_model=D, heads=H, feed_forward=64))
    twin = TorchTranslation(model, max(padded.source.shape[1], padded.target_in.shape[1]))
    loss, twin_loss = partial(translation_loss, model, packed, 0.1), partial(twin.loss, padded, 0.1)
    step = training_step(twin, twin_loss, padded)
    return [
        ("model, loss", loss, twin_loss),
        ("model, training step", training_step(model, loss, packed), step),
        ("trainer's step", _trainer_step(model, packed, None), step),
        ("trainer's step, CUDA graphs", _trainer_step(model, packed, null_driver.NullRecorder()), step),
    ]


def _encoder_pairs() -> list[Pair]:
    """Return calls of converted encoders of 6 layers in inference, on a padded batch, and of torch.nn's."""
    x, padding = torch.randn(2, 4, D), torch.tensor([[False] * 4, [False] * 3 + [True]])

    def encode(encoder: torch.nn.Module) -> None:
        with torch.inference_mode():
            encoder(x, src_key_padding_mask=padding)

    pairs: list[Pair] = []
    for name, norm_first in (("pre-norm", True), ("post-norm", False)):
        layer = torch.nn.TransformerEncoderLayer(D, H, 64, batch_first=True, norm_first=norm_first)
        encoder = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=not norm_first).eval()
        converted = copy.deepcopy(encoder)
        fastformer.convert(converted)
        pairs.append((f"encoder, {name}, inference", partial(encode, converted), partial(encode, encoder)))
    return pairs


def _search_pairs() -> list[Pair]:
    """Return greedy searches of 25 tokens for 128 sentences, whose steps replay CUDA graphs, and the same without."""
    config = TranslationConfig(64, 64, d_model=D, heads=H, feed_forward=64)
    model, lengths = TranslationModel(config).eval(), torch.full((128,), 4)
    source = torch.randint(4, 64, (4 * 128,))
    vars(decoding)["recorder"] = lambda device, keeps_memory: null_driver.NullRecorder()

    def search(cuda_graphs: bool) -> Call:
        options = SearchOptions(beam=1, max_ratio=0.0, max_extra=25, min_length=25, cuda_graphs=cuda_graphs)

        def run() -> None:
            with fastformer.backend("reference"):  # computes: a search reads scores
                beam_search(model, source, lengths, options)

        return run

    return [("greedy search, graphs; no graphs", search(True), search(False))]


def _trainer_step(model: TranslationModel, batch: Batch, recorder: Recorder | None) -> Call:
    """Return the trainer's step: the batch to the device, loss, gradients, their norm, clipping and AdamW."""
    arguments = model, partial(translation_loss, label_smoothing=0.1), TrainConfig(steps=1), Processes()
    update = Update(*arguments) if recorder is None else GraphedUpdate(*arguments, recorder)

    def step() -> None:
        _, norm, _ = update.gradients([batch])
        update.apply(norm, 1e-4)

    return step


def _microseconds(*runs: Call) -> list[float]:
    """Return the least CPU time of each call, timed in turns."""
    timers = [timeit.Timer(run, timer=time.process_time) for run in runs]
    for timer in timers:
        timer.timeit(1)  # compiles
    numbers = [max(1, int(_SECONDS / max(timer.timeit(1), 1e-6))) for timer in timers]
    rounds = [[timer.timeit(n) / n for timer, n in zip(timers, numbers, strict=True)] for _ in range(_ROUNDS)]
    return [1e6 * min(times) for times in zip(*rounds, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    options = parser.parse_args(arguments)
    null_driver.install()
    fastformer.set_backend("triton")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pairs = [pair for call in _calls() for pair in _op_pairs(*call)] + _step_pairs()
    pairs += _encoder_pairs() + _search_pairs()
    print(f"{'us a call':<36} {'ours':>8} {'torch':>8} {'ratio':>6}")
    for name, *calls in pairs:
        if options.only in name:
            time_fastformer, time_torch = _microseconds(*calls)
            ratio = time_torch / time_fastformer
            print(f"{name:<36} {time_fastformer:>8.1f} {time_torch:>8.1f} {ratio:>6.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
