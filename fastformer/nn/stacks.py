"""Drop-in stacks of layers: torch.nn.TransformerEncoder and TransformerDecoder on fastformer's layers.

Letters: B batch, T targets, S sources, D model width.
"""

from typing import Any

from torch import Tensor, nn

from fastformer.host.devices import check_types
from fastformer.nn.cache import KVCache, make_cache, without_gaps
from fastformer.nn.inspection import inspect_stack
from fastformer.nn.layer_stack import Stack
from fastformer.nn.modules import drop_in, take_over_children
from fastformer.nn.packed_input import Masks, PackedInput, pack_input, pack_nested
from fastformer.packing import Layout


@drop_in
class TransformerEncoder(Stack, nn.TransformerEncoder):
    """torch.nn.TransformerEncoder on fastformer's layers: copies of a torch.nn layer and the norm are converted.

    A batch with a src_key_padding_mask runs without its padding (`padding_free`), and its padded rows are 0. Outputs
    of real tokens are torch's. A mask may have padding anywhere; one of 0 and -inf counts as bool. Arguments are those
    of torch's class; enable_nested_tensor and mask_check change nothing.
    """

    mask_keywords = (("src_mask", "src_key_padding_mask", "is_causal"),)

    def __init__(
        self,
        encoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor=False, mask_check=mask_check)  # type: ignore[arg-type]
        self.enable_nested_tensor = enable_nested_tensor
        take_over_children(self)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        padding_free: bool | None = None,
        need_weights: bool = False,
    ) -> Any:
        """Run every layer, then the norm; arguments are torch's, and these.

        Args:
            src: may also be a nested tensor; the output is then nested, with layout torch.jagged.
            is_causal: states that mask is the causal mask, which may then be omitted; None: not stated.
            padding_free: overrides the attribute for this call.
            need_weights: whether the weights of all layers and heads, `[layers, B, H, S, S]`, are also returned; the
                batch then runs padded. Raises RuntimeError if a layer or its attention has hooks or another class.
        """
        check_types(("src",), src)
        check_types(("mask", "src_key_padding_mask"), mask, src_key_padding_mask, optional=True)
        masks = (Masks(mask, src_key_padding_mask, is_causal),)
        return self.run(src, None, masks, padding_free, need_weights)

    def packed(self, tokens: Tensor, layout: Layout, causal: bool = False, mask: Tensor | None = None) -> Tensor:
        """Encode packed sequences, one after another as layout says: `[S, D]` -> `[S, D]`.

        causal: whether a token attends only to itself and earlier tokens of its sequence. mask: as in forward, over
        layout.columns. The stack is called on a padded batch if it, a layer or attention has hooks or another class.
        """
        return self._packed(tokens, layout, causal, mask)

    def new_cache(self, rows: int, *, longest: int | None = None, capacity: int | None = None) -> KVCache:
        """Make an empty cache for `step`, with which a causal encoder reads `rows` sequences from left to right.

        Args:
            rows: number of rows R of the cache.
            longest: the most tokens that a row may read, and the largest capacity.
            capacity: a fixed capacity in tokens, at fixed addresses, as CUDA graphs need (`StaticKVCache`), in place of
                `longest`.

        Raises:
            RuntimeError: a layer or attention has hooks or another class, or a module may look at several positions.
        """
        return make_cache(self, rows, longest=longest, capacity=capacity)


@drop_in
class TransformerDecoder(Stack, nn.TransformerDecoder):
    """torch.nn.TransformerDecoder on fastformer's layers: copies of a torch.nn layer and the norm are converted.

    A batch with a key padding mask runs without that padding (`padding_free`); its padded rows are 0.
    """

    mask_keywords = (
        ("tgt_mask", "tgt_key_padding_mask", "tgt_is_causal"),
        ("memory_mask", "memory_key_padding_mask", "memory_is_causal"),
    )

    def __init__(self, decoder_layer: nn.Module, num_layers: int, norm: nn.Module | None = None) -> None:
        super().__init__(decoder_layer, num_layers, norm)  # type: ignore[arg-type]
        for layer in self.layers:
            if "activation" in layer._modules:  # torch's copies of a decoder layer hide it behind ReLU
                layer.__dict__.pop("activation", None)
        take_over_children(self)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        padding_free: bool | None = None,
        need_weights: bool = False,
    ) -> Any:
        """Run every layer, then the norm; arguments are torch's, and those of the encoder's `forward`.

        With need_weights, returns the output, the weights of self-attention `[layers, B, H, T, T]`, and those of
        attention to the memory `[layers, B, H, T, S]`.
        """
        check_types(("tgt",), tgt)
        masks = (
            Masks(tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            Masks(memory_mask, memory_key_padding_mask, memory_is_causal),
        )
        return self.run(tgt, memory, masks, padding_free, need_weights)

    def packed(
        self,
        tokens: Tensor,
        layout: Layout,
        memory: Tensor,
        memory_layout: Layout,
        causal: bool = True,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """Decode packed sequences: `[T, D]` with memory `[S, D]` -> `[T, D]`; arguments as in the encoder.

        memory: the encoder's outputs of all sources, one after another.
        """
        return self._packed(tokens, layout, causal, tgt_mask, memory, memory_layout, memory_mask)

    def new_cache(
        self,
        memory: Tensor,
        memory_key_padding_mask: Tensor | None = None,
        *,
        memory_layout: Layout | None = None,
        hypotheses: int = 1,
        longest: int | None = None,
        capacity: int | None = None,
    ) -> KVCache:
        """Make a cache for `step`: it holds the keys and values of the memory, and no token yet.

        Args:
            memory: the encoder's output, `[B, S, D]`, `[S, B, D]` where the layers are not batch_first, nested, or
                packed `[S, D]` with its layout.
            memory_key_padding_mask: `[B, S]`, True or -inf = ignore.
            memory_layout: of packed memory.
            hypotheses: N, the rows that share a sentence's memory: rows b * N to b * N + N - 1 are those of sentence b.
            longest, capacity: as in the encoder.

        Raises:
            RuntimeError: as in the encoder.
        """
        check_types(("memory_key_padding_mask",), memory_key_padding_mask, optional=True)
        if memory_layout is None:
            side: PackedInput | None
            if memory.is_nested:
                (side,) = pack_nested("memory", [memory], [Masks(None, memory_key_padding_mask)])
            else:
                side = pack_input(memory, memory_key_padding_mask, inspect_stack(self).batch_first)
            if side is None or not side.batched:
                raise ValueError(
                    "memory must be a padded batch, with a mask [B, S] of bool or of 0 and -inf, if any, whose values "
                    "are known: not under torch.compile or torch.jit.trace"
                )
            memory, memory_layout = side.tokens, side.layout
        elif memory_key_padding_mask is not None:
            raise ValueError("memory_key_padding_mask must be None with memory_layout: packed memory has no padding")
        packed_memory, rows = (memory, without_gaps(memory_layout, memory.device)), memory_layout.batch * hypotheses
        return make_cache(self, rows, packed_memory, hypotheses, longest=longest, capacity=capacity)
