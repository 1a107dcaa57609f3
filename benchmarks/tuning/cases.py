"""What `benchmarks.tuning` sweeps: kernels on inputs, where each one's tile is chosen, and how far from it to look.

Kernels are called through their launchers, without autograd, on bf16 unless the shape says otherwise. A launcher looks
the function that chooses its tile up in its module each time, so that putting another in its place is all it takes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastformer_kernels.attention import backward as attention_backward
from fastformer_kernels.attention import decode as attention_decode
from fastformer_kernels.attention import forward as attention
from fastformer_kernels.attention import tiles as attention_tiles
from fastformer_kernels.attention.arguments import Arguments
from fastformer_kernels.embedding import kernels as embedding
from fastformer_kernels.feed_forward import kernels as feed_forward
from fastformer_kernels.linear_cross_entropy import kernels as linear_cross_entropy
from fastformer_kernels.norms import dropout_add_norm, layer_norm, rms_norm
from fastformer_kernels.rotary import kernels as rotary

Config = dict[str, int]
Kernel = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Axis:
    """A number of a configuration, between two limits; a step doubles or halves it, or adds or takes off 1."""

    name: str
    low: int
    high: int
    adds: bool = False

    def steps(self, value: int) -> tuple[int, int]:
        """The next lower and the next higher value, within the limits."""
        lower, higher = (value - 1, value + 1) if self.adds else (value // 2, value * 2)
        return max(lower, self.low), min(higher, self.high)


WARPS = Axis("num_warps", 1, 32)
STAGES = Axis("num_stages", 1, 5, adds=True)


def neighbours(chosen: Mapping[str, int], axes: Sequence[Axis]) -> list[Config]:
    """The configurations around one.

    One axis a step away; a block and the warps both doubled or both halved, which leaves a thread its share; two
    blocks traded against each other, which leaves the tile its size.
    """
    moves: list[dict[str, int]] = []
    steps = {axis.name: axis.steps(chosen[axis.name]) for axis in axes if axis.name in chosen}
    moves += [{name: value} for name, pair in steps.items() for value in pair]
    blocks = [name for name in steps if name.startswith("BLOCK")]
    if "num_warps" in steps:
        moves += [{block: steps[block][i], "num_warps": steps["num_warps"][i]} for block in blocks for i in (0, 1)]
    for one in blocks:
        moves += [{one: steps[one][1], other: steps[other][0]} for other in blocks if other != one]
    configs: list[Config] = []
    for move in moves:
        config = {**chosen, **move}
        if all(chosen[name] != value for name, value in move.items()) and config not in configs:
            configs.append(config)
    return configs


@dataclass(frozen=True)
class Site:
    """The function of a module that chooses, and how to read what it returns and to make that of a configuration."""

    module: ModuleType
    function: str
    read: Callable[[Any], Config] = dict
    write: Callable[[Any, Config, tuple[Any, ...]], Any] = lambda chosen, config, arguments: {**chosen, **config}

    @contextmanager
    def replaced(self, config: Config) -> Iterator[list[Config]]:
        """Let the function choose `config` inside the block; gives the list of what it chose by itself."""
        original = getattr(self.module, self.function)
        seen: list[Config] = []

        def choose(*arguments: Any) -> Any:
            chosen = original(*arguments)
            seen.append(self.read(chosen))
            return self.write(chosen, config, arguments) if config else chosen

        setattr(self.module, self.function, choose)
        try:
            yield seen
        finally:
            setattr(self.module, self.function, original)


def _write_grid(chosen: Any, config: Config, arguments: tuple[Any, ...]) -> Any:
    (_, parts), _ = chosen
    tile = {name: value for name, value in config.items() if name != "programs"}
    return (min(-(-arguments[0].shape[0] // config["BLOCK_M"]), config["programs"]), parts), tile


def _grid(module: ModuleType) -> Site:
    return Site(module, "backward_tile", lambda chosen: {"programs": chosen[0][0], **chosen[1]}, _write_grid)


def _number(module: ModuleType, function: str, name: str) -> Site:
    return Site(module, function, lambda chosen: {name: chosen}, lambda chosen, config, arguments: config[name])


@dataclass(frozen=True)
class TunedKernel:
    """A kernel on inputs of one shape. Without a site, the configurations are arguments of the call, chosen first."""

    kernel: str
    shape: str
    prepare: Callable[[torch.device], Kernel]  # makes the inputs; the call that it returns may be repeated
    site: Site | None = None
    axes: tuple[Axis, ...] = ()
    options: tuple[Config, ...] = ()

    def chosen(self, call: Kernel) -> Config:
        """The configuration that the package takes."""
        if self.site is None:
            return self.options[0]
        with self.site.replaced({}) as seen:
            call()
        return seen[0]

    def key(self, call: Kernel) -> str:
        """The `Call.key` by which an attention kernel's tile is chosen; empty for other kernels."""
        if self.site is None or self.site.module is not attention_tiles:
            return ""
        with mock.patch.object(attention_tiles, "choose", wraps=attention_tiles.choose) as choose:
            call()
        return str(choose.call_args.args[0].key)

    def others(self, chosen: Config) -> list[Config]:
        """The configurations to compare it with."""
        return list(self.options[1:]) if self.site is None else neighbours(chosen, self.axes)

    def run(self, call: Kernel, config: Config) -> Sequence[Tensor]:
        """Run the kernel in a configuration."""
        if self.site is None:
            return call(**config)
        with self.site.replaced(config):
            return call()


def _randn(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype)


def _seed(device: torch.device) -> Tensor:
    return torch.tensor([7], device=device)


_INTERPRETED = torch.float16  # Triton's interpreter multiplies matrices of bf16 as if they were integers
_TILE = (Axis("BLOCK_T", 16, 256), Axis("BLOCK_S", 16, 256), Axis("num_warps", 4, 16), STAGES)


def _attention_cases(B: int, H: int, L: int, K: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[TunedKernel]:
    arguments = Arguments(queries=L, keys=L, scale=K**-0.5, right=0)  # causal, no padding, no mask, no dropout

    def forward(device: torch.device) -> Kernel:
        q, k, v = (_randn(device, B, H, L, K, dtype=dtype) for _ in range(3))
        return lambda: attention.forward(q, k, v, *arguments)

    def backward(device: torch.device, wants_q: bool, wants_keys: bool, fast: bool = False) -> Kernel:
        q, k, v, dout = (_randn(device, B, H, L, K, dtype=dtype) for _ in range(4))
        out, lse = attention.forward(q, k, v, *arguments)
        inputs = (dout, q, k, v, out, lse, None, None, wants_q, wants_keys)

        def call(fast: int = fast) -> list[Tensor]:
            gradients = attention_backward.backward(*inputs, bool(fast), *arguments)
            return [x for x in gradients if x.numel()]

        return call

    shape = f"{B} x {H} x {L:,} x {K}, causal" + (", fp32" if dtype == torch.float32 else "")
    tile = Site(attention_tiles, "choose")
    yield TunedKernel("attention forward", shape, forward, tile, _TILE)
    yield TunedKernel("attention backward, keys", shape, lambda device: backward(device, False, True), tile, _TILE)
    yield TunedKernel("attention backward, queries", shape, lambda device: backward(device, True, False), tile, _TILE)
    if K <= 128 and dtype != torch.float32:  # wider, there is no fast mode
        fast = TunedKernel(
            "attention backward, fast", shape, lambda device: backward(device, True, True, True), tile, _TILE
        )
        both = (Config(fast=0), Config(fast=1))
        yield fast
        yield TunedKernel("attention backward", shape, lambda device: backward(device, True, True), options=both)


def _decode_cases(tiny: bool) -> Iterator[TunedKernel]:
    sizes = [(1, 8, 512, 64), (1, 8, 8192, 64), (64, 8, 512, 64), (512, 8, 128, 64)]
    dtype = _INTERPRETED if tiny else torch.bfloat16
    for B, H, S, K in [(1, 2, 40, 16)] if tiny else sizes:

        def prepare(device: torch.device, B: int = B, H: int = H, S: int = S, K: int = K) -> Kernel:
            q, k, v = (_randn(device, B, H, rows, K, dtype=dtype) for rows in (1, S, S))
            arguments = Arguments(queries=1, keys=S, scale=K**-0.5)

            def call(split: int = 1) -> list[Tensor]:
                decode = attention_decode.decode
                return [decode(q, k, v, *arguments) if split else attention.forward(q, k, v, *arguments)[0]]

            return call

        shape = f"{B} x {H} x {S:,} x {K}"
        yield TunedKernel("decode", shape, prepare, options=(Config(split=1), Config(split=0)))
        tile = Site(attention_tiles, "choose")
        yield TunedKernel("decode", shape, prepare, tile, (Axis("BLOCK_S", 16, 256), WARPS, STAGES))
        yield TunedKernel(
            "decode", shape, prepare, _number(attention_decode, "_shares", "shares"), (Axis("shares", 1, 512),)
        )


def _norm_cases(tiny: bool) -> Iterator[TunedKernel]:
    forward_axes = (Axis("BLOCK_M", 1, 128), WARPS)
    limits = (Axis("programs", 1, 4096), Axis("maxnreg", 32, 255), Axis("STAGES", 1, 5, adds=True))
    backward_axes = (Axis("BLOCK_M", 1, 128), WARPS, *limits)
    for M, N in [(6, 40)] if tiny else [(16384, 512), (8192, 1024), (32768, 4096)]:

        def norm(device: torch.device, M: int = M, N: int = N) -> Kernel:
            x, w, b = _randn(device, M, N), _randn(device, N), _randn(device, N)
            return lambda: layer_norm.forward(x, w, b, 1e-5, x.dtype)

        def norm_backward(device: torch.device, M: int = M, N: int = N) -> Kernel:
            x, dy, w, b = _randn(device, M, N), _randn(device, M, N), _randn(device, N), _randn(device, N)
            _, mean, rstd = layer_norm.forward(x, w, b, 1e-5, x.dtype)
            return lambda: layer_norm.backward(dy, x, w, mean, rstd, x.dtype, x.dtype, x.dtype)

        def rms(device: torch.device, M: int = M, N: int = N) -> Kernel:
            x, dy, w = _randn(device, M, N), _randn(device, M, N), _randn(device, N)
            _, rstd = rms_norm.forward(x, w, 1e-5, x.dtype)
            return lambda: rms_norm.backward(dy, x, w, rstd, x.dtype, x.dtype)

        def add(device: torch.device, M: int = M, N: int = N) -> Kernel:
            x, residual, w, b = _randn(device, M, N), _randn(device, M, N), _randn(device, N), _randn(device, N)
            seed = _seed(device)
            return lambda: dropout_add_norm.forward(x, residual, w, b, seed, 1e-5, 0.1, True, x.dtype)

        def add_backward(device: torch.device, M: int = M, N: int = N) -> Kernel:
            s, dy, ds, w, seed = *(_randn(device, M, N) for _ in range(3)), _randn(device, N), _seed(device)
            _, mean, rstd = layer_norm.forward(s, w, None, 1e-5, s.dtype)
            dtype, backward = s.dtype, dropout_add_norm.backward
            return lambda: backward(dy, ds, s, w, mean, rstd, seed, 0.1, dtype, dtype, dtype, dtype)

        shape = f"{M:,} x {N:,}"
        added = "dropout + residual + layer norm"
        yield TunedKernel("layer norm forward", shape, norm, Site(layer_norm, "forward_tile"), forward_axes)
        yield TunedKernel("layer norm backward", shape, norm_backward, _grid(layer_norm), backward_axes)
        yield TunedKernel(f"{added} forward", shape, add, Site(dropout_add_norm, "forward_tile"), forward_axes)
        yield TunedKernel(f"{added} backward", shape, add_backward, _grid(dropout_add_norm), backward_axes)
        if N <= 512:
            yield TunedKernel("RMS norm backward", shape, rms, _grid(rms_norm), backward_axes)


def _feed_forward_cases(tiny: bool) -> Iterator[TunedKernel]:
    axes = (Axis("BLOCK_M", 1, 256), Axis("BLOCK_F", 8, 1024), WARPS)
    tile, programs = Site(feed_forward, "tile"), _number(feed_forward, "_row_programs", "programs")
    for M, F in [(6, 24)] if tiny else [(16384, 2048)]:
        for activation in ("gelu", "swiglu"):
            wide = 2 * F if activation == "swiglu" else F

            def forward(device: torch.device, M: int = M, wide: int = wide, activation: str = activation) -> Kernel:
                h, seed = _randn(device, M, wide), _seed(device)
                return lambda: [feed_forward.activate(h, seed, activation, 0.1)]

            def backward(
                device: torch.device, M: int = M, F: int = F, wide: int = wide, activation: str = activation
            ) -> Kernel:
                da, h, seed = _randn(device, M, F), _randn(device, M, wide), _seed(device)
                return lambda: feed_forward.activate_backward(da, h, seed, activation, 0.1, True, True)

            shape = f"{M:,} x {wide:,}"
            yield TunedKernel(f"{activation} forward", shape, forward, tile, axes)
            yield TunedKernel(f"{activation} backward", shape, backward, tile, axes)
            yield TunedKernel(f"{activation} backward", shape, backward, programs, (Axis("programs", 1, 4096),))

        def relu(device: torch.device, M: int = M, F: int = F) -> Kernel:
            da, a = _randn(device, M, F), _randn(device, M, F).relu_()
            return lambda: feed_forward.relu_backward(da, a, 0.1, True)

        yield TunedKernel("relu backward", f"{M:,} x {F:,}", relu, tile, axes)


def _loss_cases(tiny: bool) -> Iterator[TunedKernel]:
    rows = _number(linear_cross_entropy, "chunk_rows", "rows")
    tile, axes = Site(linear_cross_entropy, "_config"), (Axis("BLOCK", 256, 16384), WARPS, STAGES)
    # With D = 16 the matrix products cost little beside the kernel, whose tile is asked about.
    sizes = [(4096, 16, 32000, tile, axes), (16384, 512, 32000, rows, (Axis("rows", 128, 16384),))]
    tiny_sizes = [(10, 16, 300, site, limits) for *_, site, limits in sizes]
    for M, D, V, site, limits in tiny_sizes if tiny else sizes:

        def prepare(device: torch.device, M: int = M, D: int = D, V: int = V) -> Kernel:
            x, w = _randn(device, M, D), _randn(device, V, D, scale=D**-0.5)
            target = torch.arange(M, device=device) % V
            return lambda: linear_cross_entropy.forward(x, w, None, target, -100, 0.1, [True, True, False])

        yield TunedKernel("linear + cross entropy", f"{M:,} x {D} x {V:,}", prepare, site, limits)


def _embedding_cases(tiny: bool) -> Iterator[TunedKernel]:
    M, N, V, P = (10, 24, 16, 5) if tiny else (16384, 512, 32000, 128)

    def forward(device: torch.device) -> Kernel:
        ids, positions = torch.arange(M, device=device) * 7 % V, torch.arange(M, device=device) % P
        w, table, seed = _randn(device, V, N), _randn(device, P, N), _seed(device)
        return lambda: [embedding.embedding(ids, w, positions, table, seed, N**0.5, 0.1)]

    def backward(device: torch.device) -> Kernel:
        dout, seed = _randn(device, M, N), _seed(device)
        return lambda: [embedding.scaled_gradient(dout, seed, N**0.5, 0.1)]

    axes = (Axis("BLOCK_M", 1, 128), Axis("BLOCK_N", 16, 4096), WARPS)
    for name, prepare in (("embedding", forward), ("embedding's gradient", backward)):
        yield TunedKernel(name, f"{M:,} x {N}", prepare, Site(embedding, "tile"), axes)


def _rotary_cases(tiny: bool) -> Iterator[TunedKernel]:
    M, heads, K, P = (10, 8, 16, 5) if tiny else (16384, 40, 64, 2048)

    def prepare(device: torch.device) -> Kernel:
        x, positions = _randn(device, M, heads + 8, K)[:, :heads], torch.arange(M, device=device) % P
        cos, sin = (torch.randn(P, K // 2, device=device) for _ in range(2))
        return lambda: [rotary.rotary(x, positions, cos, sin, False, 1.0)]

    axes = (Axis("BLOCK_M", 1, 128), Axis("BLOCK_H", 1, 8), WARPS)
    yield TunedKernel("rotary", f"{M:,} x {heads} x {K}", prepare, Site(rotary, "tile"), axes)


def find_cases(tiny: bool = False) -> list[TunedKernel]:
    """All cases, what is worth most first; `tiny` for the interpreter."""
    makers = (_norm_cases, _loss_cases, _feed_forward_cases, _embedding_cases, _rotary_cases, _decode_cases)
    rest = [case for maker in makers for case in maker(tiny)]
    if tiny:
        return [*_attention_cases(1, 2, 20, 16, _INTERPRETED), *rest]
    return [
        *_attention_cases(8, 12, 2048, 64),
        *_attention_cases(8, 12, 2048, 128),
        *rest,
        *_attention_cases(128, 8, 64, 64),
        *_attention_cases(2, 8, 1024, 256),
        *_attention_cases(8, 8, 512, 64, torch.float32),
    ]
