"""Drop-in multi-head attention: torch.nn.MultiheadAttention's `forward`, and calls for packed and cached sequences.

Decoders that cache keys and values call its steps, `project` and `attend`.

Letters: B batch, H heads, T queries, S keys, D model width (embed_dim), K head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import _mha_shape_check  # type: ignore[attr-defined]

from fastformer import functional
from fastformer.functional.attention.reference import are_harmless, is_finite, scores_to_weights, weighted_sum
from fastformer.functional.attention.rules import dead_rows, merge_masks
from fastformer.functional.dropout import drop
from fastformer.host.devices import check_tensors, check_types
from fastformer.modes import compiling
from fastformer.nn.inspection import has_own_hooks
from fastformer.nn.modules import are_few_on_cpu, drop_in, mask_of_fused_ops
from fastformer.nn.packed_input import Masks, causal_mask
from fastformer.nn.projections import OUT_PROJECTIONS, Projections, check_attn_mask, op_masks
from fastformer.nn.rotary import Positions
from fastformer.packing import Layout, offsets_of, pack, unpack

_OPTIONS = {"_kv_heads", "window", "softcap", "rotary", "position_bias", "sinks"}


@drop_in
class MultiheadAttention(Projections):
    """torch.nn.MultiheadAttention on `fastformer.functional.attention` (Vaswani et al. 2017, section 3.2.2).

    Constructor, parameters, masks and exceptions are torch's: in masks, True = ignore. `is_causal` needs no mask. A
    query that may attend to nothing gives the output bias alone (attention 0, gradient 0), where torch gives NaN.

    Additional keywords, those of `AttentionOptions`, change the formula; without them it is torch's.
    """

    runs_packed = True  # packed sequences may bypass `forward`; read of the class itself, not inherited

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query to key and value; arguments, results and exceptions are those of torch.nn's class.

        `is_causal` states that attn_mask is the causal mask, which may then be omitted, unlike in torch. Without
        `need_weights`, no `[T, S]` matrix is stored.
        """
        if key is value and are_few_on_cpu(query):
            masks = Masks(attn_mask, key_padding_mask, is_causal)
            outputs = self._attend_by_torchs_ops(query, key, masks, need_weights, average_attn_weights)
            if outputs is not None:
                return outputs
        check_tensors(("query", "key", "value"), query, (key, value))
        check_types(("key_padding_mask", "attn_mask"), key_padding_mask, attn_mask, optional=True)
        arguments = query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights
        if query.is_nested or key.is_nested:  # torch's encoder hands them to layers of other classes, in inference
            if self.has_extra_options:
                raise ValueError("query and key must not be nested where attention has options that torch's lacks")
            return super().forward(*arguments)
        # torch's own checks, so that a mistake raises torch's error.
        batched: bool = _mha_shape_check(query, key, value, key_padding_mask, attn_mask, self.num_heads)
        if is_causal and key_padding_mask is None and not need_weights:
            attn_mask = None  # torch ignores it then, whatever its sizes
        if not batched:
            same = key is query, value is key
            query = query.unsqueeze(0)
            key = query if same[0] else key.unsqueeze(0)
            value = key if same[1] else value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        time, rows = (1, 0) if self.batch_first or not batched else (0, 1)
        batch, length, keys = query.shape[rows], query.shape[time], key.shape[time]
        if not self._fits(query, key, value, key_padding_mask, attn_mask, rows, time):
            super().forward(*arguments)  # raises
            raise RuntimeError("query, key, value and the masks must be of shapes and dtypes that fit together")

        q, k, v = self.project(query, key, value, *self._positions(length, keys, time, query.device))  # [.., .., H, K]
        q, k, v = (x.permute(rows, 2, time, 3) for x in (q, k, v))  # [B, H, T, K]
        k, v, extra = self._extend(k, v)
        # torch uses the hint only without key padding. Here kernels skip later keys with padding too, except where
        # torch computes a gradient of the mask.
        learns = attn_mask is not None and attn_mask.requires_grad and key_padding_mask is not None
        causal = is_causal and not need_weights and not extra and not learns
        if is_causal and attn_mask is None and not causal:
            attn_mask = causal_mask(length, keys, query.device)
        attn_mask = None if causal else attn_mask
        mask, key_mask = op_masks(attn_mask, key_padding_mask, (batch, self.num_heads), extra, q.dtype)
        rules = self.rules(max(length, keys), q.device)
        weights = None
        if need_weights:
            out, weights = functional.attention_with_weights(q, k, v, mask, key_mask=key_mask, causal=causal, **rules)
            if average_attn_weights:
                weights = weights.mean(1)
            if not batched:
                weights = weights.squeeze(0)
        else:
            out = functional.attention(q, k, v, mask, key_mask=key_mask, causal=causal, **rules)
        out = out.permute((0, 2, 1, 3) if rows == 0 else (2, 0, 1, 3)).flatten(2)  # query's layout
        out = self.project_out(out)
        return (out if batched else out.squeeze(0)), weights

    def merge_masks(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Any:
        """Merge masks as torch does, for torch's fast path; raise if that path ignores options of this module."""
        if self.has_extra_options:
            raise RuntimeError(
                "torch.nn's layer takes an inference fast path that ignores fastformer's attention options: call "
                "fastformer.convert(layer) or torch.backends.mha.set_fastpath_enabled(False)"
            )
        return super().merge_masks(attn_mask, key_padding_mask, query)

    def packed(
        self,
        query: Tensor,
        layout: Layout,
        memory: Tensor | None = None,
        memory_layout: Layout | None = None,
        causal: bool = False,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend within packed sequences: `[T, D]` -> `[T, D]`; to the same tokens, or to memory `[S, D]`.

        Args:
            query, layout: the tokens of all sequences, and their layout.
            memory, memory_layout: the tokens that keys and values are projected from; query if None.
            causal: whether token t of a sequence attends only to its keys s <= t.
            attn_mask: as in forward, over the columns of the padded batches that the layouts describe. Scores are then
                padded, projections are not.

        Raises:
            ValueError: the module has `add_bias_kv` or `add_zero_attn`; causal and attn_mask are both given; or the
                module counts positions, and a layout has gaps or, with a memory, padding on the left.
        """
        check_tensors(("query", "layout"), query, (offsets_of("layout", layout),))
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn must be False for packed sequences")
        if causal and attn_mask is not None:
            raise ValueError("causal must be False with attn_mask, which defines the keys of each query")
        if query.shape[-1] != self.embed_dim:
            raise AssertionError(f"query must have embedding size {self.embed_dim}, not {query.shape[-1]}")
        memory = query if memory is None else memory
        key_layout = layout if memory_layout is None else memory_layout
        if attn_mask is not None:
            check_attn_mask(attn_mask, self.num_heads, layout, key_layout)
        self.check_layouts(layout, key_layout)
        positions = Positions(layout.positions, layout.max_length)
        key_positions = positions if key_layout is layout else Positions(key_layout.positions, key_layout.max_length)
        q, k, v = self.project(query, memory, memory, positions, key_positions)
        if attn_mask is None:
            rules = self.rules(max(layout.max_length, key_layout.max_length), q.device)
            out = functional.packed_attention(q, k, v, layout, key_layout, causal=causal, **rules)
        else:
            rules = self.rules(max(layout.columns, key_layout.columns), q.device)
            mask, _ = op_masks(attn_mask, None, (layout.batch, self.num_heads), 0, q.dtype)
            q, k, v = (unpack(x, y).transpose(1, 2) for x, y in ((q, layout), (k, key_layout), (v, key_layout)))
            key_mask = key_layout.cached("mask", key_layout.mask)
            out = functional.attention(q, k, v, mask, key_mask=key_mask, **rules)
            out = pack(out.transpose(1, 2), layout)
        return self.project_out(out.flatten(-2))

    def check_layouts(self, layout: Layout, key_layout: Layout) -> None:
        """Raise ValueError, as `packed`, if the module counts positions and packing changes distances of tokens."""
        if not self.counts_positions:
            return
        limit = "where attention counts positions"
        if key_layout is not layout:
            limit = "where attention to a memory counts positions"
        if layout.has_gaps or key_layout.has_gaps:
            raise ValueError(f"layout must have no padding between tokens of a sequence {limit}")
        if key_layout is not layout and not (layout.starts_rows and key_layout.starts_rows):
            raise ValueError(f"layout and memory_layout must have no padding on the left {limit}")

    @property
    def has_extra_options(self) -> bool:
        """Whether the module has an option that torch's attention lacks, from its constructor or set later."""
        if self._kv_heads is not None or self.softcap is not None or self.rotary is not None:
            return True
        return self.by_distance or self.has_sinks

    def _attend_by_torchs_ops(
        self, query: Tensor, key: Tensor, masks: Masks, weights: bool, average: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Attend by torch's ops alone, for few tokens on a CPU; return None if fastformer's op is needed.

        torch's ops spread NaN and inf of padding, and may give NaN for a query that sees no key. In inference the
        output shows it, and fastformer's op computes it again. In training gradients alone may be NaN, so the masks and
        keys are read before.
        """
        (mask, padding, stated), D = masks, self.embed_dim
        time, rows = (1, 0) if self.batch_first else (0, 1)
        if type(key) is not Tensor or not key.is_cpu or key.is_nested or not query.dim() == key.dim() == 3:
            return None
        if not self.is_torchs_formula() or not query.shape[2] == key.shape[2] == D:
            return None
        trains = self.training or torch.is_grad_enabled()
        causal = bool(stated) and padding is None and not weights
        if key is query and not trains and not causal:
            outputs = self._run_fused_op(query, masks, weights, average)
            if outputs is not None:
                return outputs
        if key.shape[rows] != query.shape[rows] or not key.shape[time]:
            return None
        if causal:
            mask = None  # torch ignores it then, whatever its sizes
        elif stated and mask is None:
            mask = causal_mask(query.shape[time], key.shape[time], query.device)
        both_masks = [m for m in (mask, padding) if m is not None]
        if any(type(m) is not Tensor or not m.is_cpu or m.dtype not in (torch.bool, query.dtype) for m in both_masks):
            return None
        if trains and any(m.requires_grad for m in both_masks):
            return None
        if both_masks and not self._fits(query, key, key, padding, mask, rows, time):
            return None
        q, k, v = (x.permute(rows, 2, time, 3) for x in self.project(query, key, key))
        if both_masks:
            mask, key_mask = op_masks(mask, padding, (len(q), self.num_heads), 0, q.dtype)
            mask = merge_masks(mask, None if key_mask is None else key_mask[:, None, None])
        if trains and mask is not None:
            states_padding = padding is not None or query.shape[time] == 1  # see `blank_padding`
            if dead_rows(mask).any() or (states_padding and not are_harmless(k, v)):
                return None
        applied, dropout_p = None, self.dropout if self.training else 0.0
        if weights or dropout_p:  # on a CPU SDPA has no fused path with dropout
            if causal:
                mask = ~causal_mask(q.shape[2], k.shape[2], q.device)
            applied = drop(scores_to_weights(q, k, mask, None), dropout_p)
            out = weighted_sum(applied, v)
            applied = (applied.mean(1) if average else applied).to(q.dtype) if weights else None
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        if mask is not None and not trains and not is_finite(out):
            return None
        out = out.permute((0, 2, 1, 3) if rows == 0 else (2, 0, 1, 3)).flatten(2)
        return F.linear(out, self.out_proj.weight, self.out_proj.bias), applied

    def _run_fused_op(
        self, x: Tensor, masks: Masks, weights: bool, average: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Attend from x `[B, L, D]` to itself by torch's op for inference; return None if that cannot compute it."""
        H, out_proj, in_bias = self.num_heads, self.out_proj, self.in_proj_bias
        if not self.batch_first or H % 2 or in_bias is None or out_proj.bias is None:
            return None
        fused = mask_of_fused_ops(x, H, masks)
        if fused is None:
            return None
        parameters = self.in_proj_weight, in_bias, out_proj.weight, out_proj.bias
        outputs: tuple[Tensor, Tensor | None] = torch._native_multi_head_attention(
            x, x, x, self.embed_dim, H, *parameters, fused[0], weights, average, fused[1]
        )
        return outputs if fused[0] is None or is_finite(outputs[0]) else None

    def is_torchs_formula(self) -> bool:
        """Return whether torch's own `forward` computes what this module does, from parameters of torch's class."""
        state = self.__dict__
        parameters, modules = state["_parameters"], state["_modules"]
        out_proj = modules["out_proj"]
        if len(modules) > 1 or state["_buffers"] or "sinks" in parameters or not _OPTIONS.isdisjoint(state):
            return False
        if state["add_zero_attn"] or self.bias_k is not None:
            return False
        whole = type(parameters.get("in_proj_weight")) is type(out_proj._parameters.get("weight")) is nn.Parameter
        return whole and type(out_proj) in OUT_PROJECTIONS and not has_own_hooks(out_proj)

    @property
    def has_sinks(self) -> bool:
        """Whether the module has sinks: as a parameter, a buffer, a tensor, or an attribute of the class."""
        in_instance = "sinks" in self._parameters or "sinks" in self._buffers or "sinks" in self.__dict__
        return in_instance or hasattr(type(self), "sinks") or (compiling() and hasattr(self, "sinks"))

    @property
    def by_distance(self) -> bool:
        """Whether scores depend on the distance between query and key."""
        return self.window is not None or self._distances is not None

    @property
    def counts_positions(self) -> bool:
        """Whether the output depends on the distances between tokens, not only on their order."""
        return self.rotary is not None or self.by_distance

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_lengths: Tensor | None = None,
        query_lengths: Tensor | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from q `[B, T, H, K]` to cached keys and values `[B, Hkv, S, K]`: `[B, T, D]`.

        Args:
            causal: the last query sees all keys, each query before it one key less. Must be True with `by_distance`.
            key_lengths, query_lengths, mask: as of the op.
        """
        rules = self.rules(max(q.shape[1], k.shape[2]), q.device)  # padding may make q longer than k
        if causal:
            rules |= {"causal": True, "alignment": "bottom_right", "query_lengths": query_lengths}
        out = functional.attention(q.transpose(1, 2), k, v, mask, key_lengths=key_lengths, **rules)
        return self.project_out(out.transpose(1, 2).flatten(2))

    def rules(self, longest: int, device: torch.device) -> dict[str, Any]:
        """Return the arguments of the op except masks and lengths; longest: of the sequences of queries and keys."""
        rules: dict[str, Any] = {"dropout_p": self.dropout if self.training else 0.0}
        if self.has_extra_options:
            bias = self._distances
            # By `getattr`, because pruning and parametrisation store a parameter elsewhere.
            rules |= {"window": self.window, "softcap": self.softcap, "sinks": getattr(self, "sinks", None)}
            if bias is not None:  # the modules need at least one position
                bias = bias(max(longest, 1)).to(device)
            rules["distance_bias"] = bias
        return rules

    @property
    def _distances(self) -> Any:
        """The position bias: a module, or a function that replaced it."""
        return self._modules.get("position_bias", self.__dict__.get("position_bias"))
