"""Drop-in torch.nn.Transformer, whose encoder passes packed outputs to the decoder.

Letters: B batch, T targets, S sources, D model width.
"""

from collections.abc import Callable
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.host.devices import check_types
from fastformer.nn.cache import KVCache
from fastformer.nn.inspection import has_hooks, has_own_hooks
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.modules import drop_in, make_norm
from fastformer.nn.options import LayerOptions, check_options
from fastformer.nn.packed_input import Masks, same_mask
from fastformer.nn.stacks import TransformerDecoder, TransformerEncoder
from fastformer.packing import Layout


@drop_in
class Transformer(nn.Transformer):
    """torch.nn.Transformer on fastformer's stacks; custom encoders and decoders are used unchanged."""

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
        **options: Unpack[LayerOptions],
    ) -> None:
        if options and custom_encoder is not None and custom_decoder is not None:
            raise ValueError(f"{', '.join(options)} must not be given with both custom_encoder and custom_decoder")
        check_options(options, LayerOptions)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        sizes: Any = d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias
        norms = [make_norm(options.get("norm", "layer"), d_model, layer_norm_eps, bias, factory) for _ in range(2)]
        if custom_encoder is None:
            encoder_layer = TransformerEncoderLayer(*sizes, **factory, **options)
            custom_encoder = TransformerEncoder(encoder_layer, num_encoder_layers, norms[0])
        if custom_decoder is None:
            decoder_layer = TransformerDecoderLayer(*sizes, **factory, **options)
            custom_decoder = TransformerDecoder(decoder_layer, num_decoder_layers, norms[1])
        stacks: Any = {"custom_encoder": custom_encoder, "custom_decoder": custom_decoder}
        super().__init__(d_model, nhead, batch_first=batch_first, **stacks, **factory)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Encode src `[S, B, D]`, decode tgt `[T, B, D]` with it (`[B, …]` if batch_first): `[T, B, D]`.

        Masks are torch's, True = ignore. If memory_key_padding_mask equals src_key_padding_mask, the decoder gets the
        encoder's output packed, without padding. Otherwise the decoder may attend to padded sources; their rows have
        the values that torch computes, not 0.
        """
        check_types(("src", "tgt"), src, tgt)
        if not (src.is_nested or tgt.is_nested):
            self._check(src, tgt)
        same = same_mask(src_key_padding_mask, memory_key_padding_mask)
        own = Masks(src_mask, src_key_padding_mask, src_is_causal)
        if same and self._runs_stacks_directly():
            memory = self.encoder.run(src, None, (own,), keep_packed=True)
            masks = (
                Masks(tgt_mask, tgt_key_padding_mask, tgt_is_causal),
                Masks(memory_mask, memory_key_padding_mask, memory_is_causal),
            )
            return self.decoder.run(tgt, memory, masks)  # type: ignore[no-any-return]
        return self.decoder(  # type: ignore[no-any-return]
            tgt,
            self._encode_padded(src, same, own),
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=tgt_is_causal,
            memory_is_causal=memory_is_causal,
        )

    def compile(self, **options: Any) -> None:
        """Compile the encoder and the decoder in place; options: those of `TransformerEncoder.compile`."""
        self.encoder.compile(**options)
        self.decoder.compile(**options)

    def new_cache(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        *,
        hypotheses: int = 1,
        longest: int | None = None,
        capacity: int | None = None,
    ) -> KVCache:
        """Encode src and make a cache for `step`; arguments as of `forward` and of the decoder's `new_cache`."""
        same = same_mask(src_key_padding_mask, memory_key_padding_mask)
        with torch.no_grad():
            memory = self._encode_padded(src, same, Masks(src_mask, src_key_padding_mask, src_is_causal))
        return self._own_decoder().new_cache(
            memory, memory_key_padding_mask, hypotheses=hypotheses, longest=longest, capacity=capacity
        )

    def step(self, tgt: Tensor, cache: KVCache, lengths: Tensor | Layout | None = None) -> Tensor:
        """Decode the next tokens of each row, as the decoder's `step`."""
        return self._own_decoder().step(tgt, cache, lengths)

    def _own_decoder(self) -> TransformerDecoder:
        if has_own_hooks(self):
            raise RuntimeError(f"the {type(self).__name__} has hooks, which decoding with a cache does not call")
        if not isinstance(self.decoder, TransformerDecoder):
            raise TypeError(f"decoder must be a fastformer.TransformerDecoder, not a {type(self.decoder).__name__}")
        return self.decoder

    def _runs_stacks_directly(self) -> bool:
        """Return whether both stacks are fastformer's and without hooks, so that nothing observes their calls."""
        are_fastformers = type(self.encoder) is TransformerEncoder and type(self.decoder) is TransformerDecoder
        return are_fastformers and not has_hooks((self.encoder, self.decoder))

    def _encode_padded(self, src: Tensor, same: bool, masks: Masks) -> Tensor:
        """Call the encoder; unless `same`, the decoder may see padded rows, so they have torch's values, not 0."""
        mask, padding, is_causal = masks
        is_fastformers = getattr(type(self.encoder), "forward", None) is TransformerEncoder.forward
        options = {} if same or not is_fastformers else {"padding_free": False}
        return self.encoder(src, mask=mask, src_key_padding_mask=padding, is_causal=is_causal, **options)  # type: ignore[no-any-return]

    def _check(self, src: Tensor, tgt: Tensor) -> None:
        """Raise what torch raises for inputs that do not fit together."""
        rows = 0 if self.batch_first else 1
        if src.dim() == 3 and src.shape[rows] != tgt.shape[rows]:
            raise RuntimeError(f"src and tgt must have the same batch, not {src.shape[rows]} and {tgt.shape[rows]}")
        for name, x in (("src", src), ("tgt", tgt)):
            if x.shape[-1] != self.d_model:
                raise RuntimeError(f"{name} must have d_model ({self.d_model}) features, not {x.shape[-1]}")
