"""What would be compiled over many lengths, found without a GPU; a program, as the interpreter must be off.

python tests/kernels/facts/compilation_facts.py

prints as JSON: kernel -> configuration -> where its variants came up; launches of forms.

Ops and models run on CPU tensors, so that addresses are those of real allocations and slices. Triton binds and
specialises what is launched as it does for an H200; its compiler is replaced by a note. A configuration is what a
launcher asks for: dtypes, constants, warps and stages. Its variants differ in what Triton makes of sizes, strides and
addresses, and each takes seconds to compile.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor

import fastformer
from benchmarks.harness.lengths import VOCABULARY, random_pairs
from benchmarks.host import null_driver
from fastformer import functional
from fastformer.apps.text import collate
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, translation_loss
from fastformer.packing import Layout
from tests.support.fused_calls import CALLS, V, leaves, tensors

# Multiples of 16 and others, and all that tiles depend on.
LENGTHS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 31, 32, 33, 47, 48, 63, 64, 65, 80, 96, 127, 128, 129, 160, 255, 256, 500)
LENGTHS += (511, 512)
DTYPES = (torch.bfloat16, torch.float32)
H, K = 2, 64


class NotCompiled:
    """Takes the place of a compiled kernel, and counts its launches."""

    function = packed_metadata = None
    launches = 0

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *_: object) -> None:
        NotCompiled.launches += 1


def configuration(kernel: Any, signature: dict[str, str], constants: dict[Any, Any], options: Any) -> str:
    """Write down what the launcher asked for: whatever Triton reads off sizes, strides and addresses is left out."""
    asked = [f"{p.name}={constants[(p.num,)]}" for p in kernel.params if p.is_constexpr]
    asked += [f"{p.name}:{signature[p.name]}" for p in kernel.params if p.name.endswith("_ptr")]
    return " ".join(asked + [f"{name}={getattr(options, name)}" for name in ("num_warps", "num_stages", "maxnreg")])


def differentiate(outputs: Any, inputs: list[Tensor]) -> None:
    actual = tensors(outputs)
    torch.autograd.grad(actual, inputs, [torch.ones_like(x) for x in actual], allow_unused=True)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def op(name: str, n: int, dtype: torch.dtype) -> None:
    inputs = leaves(name, n, "cpu", dtype)
    call = CALLS[name]
    differentiate(call.call(call.extra(n, "cpu"), 0.1 if call.dropout else 0.0, *inputs), inputs)


def projected(n: int, dtype: torch.dtype) -> None:
    """Queries, keys and values of one projection, padded, with a window."""
    x = random(2, n, 3, H, K, dtype=dtype)
    q, k, v = x.transpose(1, 3).unbind(2)
    key_lengths = torch.tensor([n, 1 + n // 2])
    differentiate(functional.attention(q, k, v, causal=True, key_lengths=key_lengths, window=(7, None)), [x])


def crossed(n: int, dtype: torch.dtype) -> None:
    """As many queries as keys are not, keys with gaps, two query heads a key head."""
    q, k, v = random(3, 40, 4, K, dtype=dtype), random(3, n, H, K, dtype=dtype), random(3, n, H, K, dtype=dtype)
    key_mask = torch.rand(3, n + 1)[:, 1:] < 0.8
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    differentiate(functional.attention(*heads, key_mask=key_mask, softcap=30.0, dropout_p=0.1), [q, k, v])


def masked(n: int, dtype: torch.dtype) -> None:
    """A mask to add that learns, part of a larger one, and the weights."""
    q, k, v = (random(2, H, n, K, dtype=dtype) for _ in range(3))
    mask = random(n + 3, n + 5, dtype=torch.float32)
    differentiate(functional.attention_with_weights(q, k, v, mask[:n, :n]), [q, k, v, mask])


def allowed(n: int, dtype: torch.dtype) -> None:
    """A bool mask a head."""
    q, k, v = (random(2, H, n, K, dtype=dtype) for _ in range(3))
    differentiate(functional.attention(q, k, v, torch.rand(H, n, n) < 0.9), [q, k, v])


def packed(n: int, dtype: torch.dtype) -> None:
    """Queries, keys and values of one projection, packed."""
    x = random(n, 3, H, K, dtype=dtype)
    layout = Layout.from_lengths([n - n // 3, n // 3])
    differentiate(functional.packed_attention(*x.unbind(1), layout, causal=True, dropout_p=0.1), [x])


def decoded(n: int, dtype: torch.dtype) -> None:
    """One query, and the filled part of a cache."""
    cache = torch.randn(2, 3, H, 600, K, dtype=dtype)
    q = torch.randn(3, 1, H, K, dtype=dtype).transpose(1, 2)
    functional.attention(q, cache[0, :, :, : n + 1], cache[1, :, :, : n + 1])
    functional.attention(q, *cache, key_lengths=torch.full((3,), n))


def rows(n: int, dtype: torch.dtype) -> None:
    """Norms of a part of each sequence and of one row, whose strides tell of the number of tokens, or of nothing."""
    N = 40
    x, w, b = random(3, n, N, dtype=dtype), random(N, dtype=dtype), random(N, dtype=dtype)
    for part in (x[:, 0], x[:1, 0], x[0], x[:, : n // 2 + 1]):
        differentiate(functional.layer_norm(part, N, w, b), [x, w, b])
        differentiate(functional.rms_norm(part, N, w), [x, w])
        differentiate(functional.dropout_add_layer_norm(part, part, N, w, b, dropout_p=0.1), [x, w, b])
        differentiate(functional.dropout_add_rms_norm(part, part, N, w, dropout_p=0.1), [x, w])


def sliced(n: int, dtype: torch.dtype) -> None:
    """Ids, positions and targets that begin in the middle of 16 bytes."""
    ids = torch.arange(n + 1)[1:] % 40
    w, table, x = (random(rows, K, dtype=dtype) for rows in (V, V, n))
    differentiate(functional.embedding(ids, w, table, ids, dropout_p=0.1), [w, table])
    differentiate(functional.linear_cross_entropy(x, w, ids, label_smoothing=0.1), [x, w])


def turned(n: int, dtype: torch.dtype) -> None:
    """Queries and keys of one projection, dense and packed, and of a step."""
    x, (cos, sin) = random(2, n, 4, K, dtype=dtype), torch.randn(2, 600, K // 2)
    differentiate(functional.rotary(x[:, :, :3], torch.arange(n + 1)[1:], cos, sin), [x])
    differentiate(functional.rotary(x[0, :, :3], torch.arange(n + 1)[1:], cos, sin), [x])
    functional.rotary(x[:, -1:, :3], torch.full((2, 1), n), cos, sin)


def trained(n: int, dtype: torch.dtype, model: TranslationModel) -> None:
    """A training step of a translation model: packed by autocast in 16 bits, padded in fp32."""
    bf16 = dtype == torch.bfloat16
    batch = collate(random_pairs(1 + n % 9, seed=n), packed=bf16)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = translation_loss(model, batch, 0.1)
    loss.backward()


def main() -> None:
    """Print the facts."""
    import triton

    null_driver.install()
    fastformer.set_backend("triton")
    kernels: dict[str, dict[str, list[str]]] = {}
    launches: dict[str, int] = {}
    where = ""

    def note(self: Any, key: str, signature: Any, device: int, constants: Any, options: Any, *_: object) -> NotCompiled:
        text = configuration(self, signature, constants, options)
        kernels.setdefault(self.__name__, {}).setdefault(text, []).append(where)
        return NotCompiled()

    triton.JITFunction._do_compile = note
    config = TranslationConfig(
        VOCABULARY, VOCABULARY, d_model=H * K, heads=H, feed_forward=96, encoder_layers=1, decoder_layers=1, dropout=0.1
    )
    model = TranslationModel(config)
    forms: dict[str, Callable[[int, torch.dtype], None]] = {name: partial(op, name) for name in CALLS}
    forms |= {run.__name__: run for run in (projected, crossed, masked, allowed, packed, decoded, rows, sliced, turned)}
    forms["trained"] = partial(trained, model=model)
    for name, run in forms.items():
        before = NotCompiled.launches
        for dtype in DTYPES:
            for n in LENGTHS:
                where = f"{name} {n}"
                run(n, dtype)
        launches[name] = NotCompiled.launches - before
    print(json.dumps({"kernels": kernels, "launches": launches}))


if __name__ == "__main__":
    main()
