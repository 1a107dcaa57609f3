"""Drop-in stacks of layers: torch.nn.TransformerEncoder, TransformerDecoder and Transformer on our layers.

Besides torch's `forward` the encoder and the decoder have `packed`, for sequences without padding. `adopt` turns any
torch module that we have a version of into ours, around the very same parameters.

Letters: B batch, T targets, S sources, D model width.
"""

import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.layers import TransformerDecoderLayer, TransformerEncoderLayer, adopt_part, take_over
from fastformer.modules import has_hooks, share
from fastformer.packing import Layout, layout_from_mask, pack, unpack


def adopt(module: nn.Module) -> nn.Module:
    """Return our version of a torch.nn module around the same parameters, or `module` itself where we have none.

    Only torch's own classes are recognised, not subclasses, whose `forward` may differ.
    """
    ours = {
        nn.TransformerEncoderLayer: TransformerEncoderLayer,
        nn.TransformerDecoderLayer: TransformerDecoderLayer,
        nn.TransformerEncoder: TransformerEncoder,
        nn.TransformerDecoder: TransformerDecoder,
        nn.Transformer: Transformer,
    }.get(type(module))
    return ours.adopt(module) if ours is not None else adopt_part(module)  # type: ignore[attr-defined]


class TransformerEncoder(nn.TransformerEncoder):
    """torch.nn.TransformerEncoder on our layers; a layer of torch's becomes one of ours.

    Args:
        encoder_layer: copied num_layers times.
        num_layers: of the stack.
        norm: applied at the end, or None.
        enable_nested_tensor: as in torch: in inference, post-norm and batch first, a batch with a bool
            src_key_padding_mask and no other mask runs without its padding, whose rows come out as 0. (torch's fast
            path also changes numbers, such as those of tanh-GELU; this does not.) A mask with gaps or padding on the
            left runs as it is.
        mask_check: changes nothing; the mask is always checked.
    """

    def __init__(
        self,
        encoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        layer = adopt(encoder_layer)
        super().__init__(layer, num_layers, norm, enable_nested_tensor=False, mask_check=mask_check)  # type: ignore[arg-type]
        self.enable_nested_tensor = enable_nested_tensor

    @classmethod
    def adopt(cls, module: nn.Module) -> Self:
        """Return a stack of this class around the parameters of `module`."""
        stack = share(cls, module)
        stack.use_nested_tensor = False
        take_over(stack, adopt)
        return stack

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Run every layer, then the norm; arguments as in the layer, is_causal None = not stated."""
        if mask is None and not is_causal and self._skips_padding(src, src_key_padding_mask):
            assert src_key_padding_mask is not None
            layout = layout_from_mask(src_key_padding_mask)
            if layout is not None:
                padded = unpack(self.packed(pack(src, layout), layout), layout)
                return F.pad(padded, (0, 0, 0, src.shape[1] - padded.shape[1]))
        output = src
        for layer in self.layers:
            output = layer(output, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
        return output if self.norm is None else self.norm(output)

    def _skips_padding(self, src: Tensor, padding: Tensor | None) -> bool:
        """Whether torch's own stack would skip the padding of such a batch, in inference."""
        return (
            padding is not None
            and self.enable_nested_tensor
            and not self.training
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and src.dim() == 3
            and padding.dtype == torch.bool
            and padding.shape == src.shape[:2]
            and all(
                isinstance(layer, TransformerEncoderLayer)
                and not layer._overridden
                and not has_hooks(layer)
                and not has_hooks(layer.self_attn)
                and not layer.norm_first
                and layer.self_attn.batch_first
                for layer in self.layers
            )
        )

    def packed(self, tokens: Tensor, layout: Layout, causal: bool = False) -> Tensor:
        """Encode packed sequences: `[S, D]` -> `[S, D]`."""
        for layer in self.layers:
            tokens = layer.packed(tokens, layout, causal)
        return tokens if self.norm is None else self.norm(tokens)


class TransformerDecoder(nn.TransformerDecoder):
    """torch.nn.TransformerDecoder on our layers; a layer of torch's becomes one of ours."""

    def __init__(self, decoder_layer: nn.Module, num_layers: int, norm: nn.Module | None = None) -> None:
        super().__init__(adopt(decoder_layer), num_layers, norm)  # type: ignore[arg-type]

    @classmethod
    def adopt(cls, module: nn.Module) -> Self:
        """Return a stack of this class around the parameters of `module`."""
        stack = share(cls, module)
        take_over(stack, adopt)
        return stack

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
    ) -> Tensor:
        """Run every layer, then the norm; arguments as in the layer, tgt_is_causal None = not stated."""
        output = tgt
        for layer in self.layers:
            output = layer(
                output,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=bool(tgt_is_causal),
                memory_is_causal=memory_is_causal,
            )
        return output if self.norm is None else self.norm(output)

    def packed(self, tokens: Tensor, layout: Layout, memory: Tensor, memory_layout: Layout) -> Tensor:
        """Decode packed sequences causally: `[T, D]` with memory `[S, D]` -> `[T, D]`."""
        for layer in self.layers:
            tokens = layer.packed(tokens, layout, memory, memory_layout)
        return tokens if self.norm is None else self.norm(tokens)


class Transformer(nn.Transformer):
    """torch.nn.Transformer on our stacks; custom encoders and decoders are used as they are."""

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: Any | None = None,
        custom_decoder: Any | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        with warnings.catch_warnings():
            # torch says that its nested-tensor path will not be used; ours has none.
            warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
            super().__init__(
                d_model,
                nhead,
                num_encoder_layers,
                num_decoder_layers,
                dim_feedforward,
                dropout,
                activation,
                custom_encoder,
                custom_decoder,
                layer_norm_eps,
                batch_first,
                norm_first,
                bias,
                device,
                dtype,
            )
        if custom_encoder is None:
            self.encoder = adopt(self.encoder)
        if custom_decoder is None:
            self.decoder = adopt(self.decoder)

    @classmethod
    def adopt(cls, module: nn.Module) -> Self:
        """Return a Transformer of this class around the parameters of `module`."""
        transformer = share(cls, module)
        take_over(transformer, adopt)
        return transformer
