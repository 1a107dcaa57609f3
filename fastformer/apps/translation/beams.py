"""The hypotheses of a search, as tensors on the model's device.

`Beams.advance` reads no value on the host. So the host's work does not grow with the batch, and a CUDA graph can
contain the step.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, C candidates a sentence, L tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.apps.models.sampling import choose_ids
from fastformer.apps.translation.model import TranslationConfig
from fastformer.host.devices import send, widest_dtype
from fastformer.modes import readable

if TYPE_CHECKING:
    from fastformer.apps.translation.search import SearchOptions

RUNNING, DONE, DIVERGED = 0, 1, 2


@dataclass(frozen=True)
class Hypothesis:
    """One translation: ids without bos and eos; log probability in nats, and the score that ranked it.

    The log probability is the model's own, summed over the tokens (eos included, unless the length limit cut it off).
    It is not renormalised over the tokens that the options allow.
    """

    ids: list[int]
    log_probability: float
    score: float


class Beams:
    """N unfinished and N finished hypotheses of each sentence, the latter with a score of -inf where there are fewer.

    Rows without a continuation, such as those of a sentence that is done, have log probability -inf. Tensors keep their
    addresses until `keep` or `reserve`.

    Args:
        limits: int64 `[B]` on the CPU, at least 1: the most tokens of each sentence, eos included.
        hypotheses: N.
        config: of the model.
        options: of the search.
        device: of the model.
        capacity: L at first, the number of tokens that a hypothesis can hold.

    Attributes:
        ids: int64 `[R]`, the last token of each row, which the model reads next.
        parents: int64 `[R]`, the row that each row continues, one of the same sentence.
        status: int64 `[B]`: RUNNING, DONE, or DIVERGED if scores are NaN.
    """

    def __init__(
        self,
        limits: Tensor,
        hypotheses: int,
        config: TranslationConfig,
        options: "SearchOptions",
        device: torch.device,
        capacity: int,
    ) -> None:
        self.hypotheses, self.config, self.options = hypotheses, config, options
        B, N = limits.numel(), hypotheses
        (self._limits,) = send(device, limits)
        self._length = self._limits.new_zeros(1)  # tokens of each unfinished hypothesis
        self.ids = self._limits.new_full((B * N,), config.bos_id)
        self.parents = self._limits.new_zeros(B * N)
        self.status = self._limits.new_full((B,), RUNNING)
        # At first all N are the same, so only one may bring candidates.
        self._totals = torch.full((B, N), -math.inf, dtype=torch.float32, device=device)
        self._totals[:, 0] = 0.0
        self._finished_totals = torch.zeros_like(self._totals)
        self._scores = torch.full((B, N), -math.inf, dtype=widest_dtype(device), device=device)
        self._finished_lengths = self._limits.new_zeros(B, N)
        self._prefixes = self._limits.new_zeros(B, N, 0)
        self._finished = self._prefixes if N == 1 else torch.zeros_like(self._prefixes)
        self.reserve(capacity)

    def reserve(self, capacity: int) -> None:
        """Let hypotheses hold `capacity` tokens, at least as many as before."""
        self.capacity = capacity
        penalty = self.options.length_penalty if self.hypotheses > 1 else 0.0
        divisors = [length**penalty for length in range(1, self.capacity + 1)]
        (self._divisors,) = send(self.ids.device, torch.tensor(divisors, dtype=self._scores.dtype, device="cpu"))
        self._replace(lambda x: F.pad(x, (0, self.capacity - x.shape[2])), "_prefixes", "_finished")

    def advance(self, logits: Tensor, draws: Sequence[float] = ()) -> None:
        """Continue each hypothesis by a token.

        Args:
            logits: `[R, V]`, of the token after `ids`.
            draws: with `options.sample`, a random number for each sentence.
        """
        log_p = logits.float().log_softmax(-1)
        self._forbid(log_p)
        values, places = self._candidates(log_p, draws)  # [B, C], the most probable first
        if self.hypotheses == 1:
            self._continue_one(values, places)
        else:
            self._continue(values, places // logits.shape[1], places % logits.shape[1])
        self._length += 1

    def _continue_one(self, totals: Tensor, tokens: Tensor) -> None:
        """Continue the only hypothesis of each sentence, or end it: `_continue` in a third of the operations."""
        eos, running = self.config.eos_id, self.status[:, None] == RUNNING
        possible = (totals > -math.inf) & running
        ends = tokens == eos
        at_limit = (self._limits == self._length + 1)[:, None]
        finishes, continues = possible & (ends | at_limit), possible & ~ends
        if not readable(finishes) or bool(finishes.any()):
            for finished, new in (
                (self._scores, totals),
                (self._finished_totals, totals),
                (self._finished_lengths, self._length + 1 - ends.long()),
            ):
                finished.copy_(torch.where(finishes, new, finished))
        self._prefixes.index_copy_(2, self._length, tokens[..., None])
        self._totals.copy_(torch.where(continues, totals, -math.inf))
        self.ids.copy_(torch.where(continues, tokens, eos)[:, 0])
        self._set_status(running, totals, (at_limit | ~continues)[:, 0])

    def _continue(self, values: Tensor, parents: Tensor, tokens: Tensor) -> None:
        """Continue or end hypotheses by the candidates `[B, C]`: their log probability, prefix, and token."""
        N, running = self.hypotheses, self.status[:, None] == RUNNING
        possible = (values > -math.inf) & running
        ends = tokens == self.config.eos_id
        # Candidates among the best N that end compete with those that ended before; the best N others continue.
        ended, continues = possible & ends, possible & ~ends
        ended[:, N:] = False
        prefixes = _of_each(self._prefixes, parents)  # [B, C, L]
        prefixes.index_copy_(2, self._length, tokens[..., None])
        divisor = self._divisors.index_select(0, self._length)
        at_limit = self._limits == self._length + 1
        finishes = ended | (continues & at_limit[:, None])
        if not readable(finishes) or bool(finishes.any()):
            scores = torch.where(finishes, values / divisor, -math.inf)
            scores, best = torch.cat([self._scores, scores], 1).sort(dim=1, descending=True, stable=True)
            self._scores.copy_(scores[:, :N])
            for finished, new in (
                (self._finished_totals, values),
                (self._finished_lengths, self._length + 1 - ends.long()),
                (self._finished, prefixes),
            ):
                finished.copy_(_of_each(torch.cat([finished, new], 1), best[:, :N]))
        order = (~continues).byte().sort(dim=1, stable=True).indices[:, :N]
        missing = ~continues.gather(1, order)
        self._totals.copy_(values.gather(1, order).masked_fill_(missing, -math.inf))
        self._prefixes.copy_(_of_each(prefixes, order))
        self.ids.copy_(tokens.gather(1, order).masked_fill_(missing, self.config.eos_id).flatten())
        first_rows = torch.arange(0, self.parents.numel(), N, device=parents.device)[:, None]
        self.parents.copy_((parents.gather(1, order) + first_rows).flatten())
        # Done, too, if nothing continues. With fewer than N finished hypotheses the worst score is -inf.
        self._set_status(running, values, at_limit | (self._totals[:, 0] / divisor <= self._scores[:, -1]))

    def _set_status(self, running: Tensor, values: Tensor, done: Tensor) -> None:
        """Update the status of sentences that run `[B, 1]`, by the log probability of candidates `[B, C]`."""
        status = torch.where(values[:, 0].isnan(), DIVERGED, done.long())
        self.status.copy_(torch.where(running[:, 0], status, self.status))

    def _candidates(self, log_p: Tensor, draws: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return candidates from log p `[R, V]`: their log probability, and prefix * V + token, `[B, C]`.

        A sentence has one candidate, drawn or the best; with a beam it has the 2N most probable, so that N continue
        even if N of them end.
        """
        N, V = self.hypotheses, log_p.shape[1]
        totals = self._totals.view(-1, 1)
        if self.options.sample:
            places = choose_ids(log_p, self.options, draws)[:, None].clamp_(min=0)
            is_nan = log_p.isnan().any(1, keepdim=True)  # then id 0, which may be forbidden, stands for any
            return totals + log_p.gather(1, places).masked_fill_(is_nan, math.nan), places
        if N == 1:
            best, places = log_p.max(-1, keepdim=True)
            return totals + best, places
        return (totals + log_p).view(-1, N * V).topk(min(2 * N, N * V), -1)

    def _forbid(self, log_p: Tensor) -> None:
        """Set the log p `[R, V]` of tokens that may not follow the prefixes to -inf, in place.

        Padding and bos are always forbidden, eos up to the minimum length unless no other token is allowed.
        """
        c, options = self.config, self.options
        for i in {c.pad_id, c.bos_id} - {c.eos_id}:  # a list would be copied to the device: a wait
            log_p[:, i] = -math.inf
        if 0 < options.no_repeat_ngram <= self.capacity:
            log_p.masked_fill_(self._repeats(log_p, options.no_repeat_ngram), -math.inf)
        if options.min_length:
            eos = log_p[:, c.eos_id].clone()
            log_p[:, c.eos_id] = -math.inf
            early = (self._length < options.min_length) & (log_p.amax(-1) > -math.inf)
            log_p[:, c.eos_id] = torch.where(early, -math.inf, eos)

    def _repeats(self, log_p: Tensor, size: int) -> Tensor:
        """Return which tokens would repeat an n-gram of this size, bool `[R, V]`."""
        prefixes = self._prefixes.flatten(0, 1)
        ngrams = prefixes.unfold(1, size, 1)  # [R, L - size + 1, size]
        before = torch.arange(1 - size, 0, device=prefixes.device) + self._length  # of the next token
        last = prefixes.index_select(1, before.clamp_(min=0))
        ends = torch.arange(size, self.capacity + 1, device=prefixes.device)
        repeated = (ngrams[..., :-1] == last[:, None]).all(-1) & (ends <= self._length)
        repeated &= (self.status == RUNNING).repeat_interleave(self.hypotheses)[:, None]  # others may say anything
        return torch.zeros_like(log_p).scatter_add_(1, ngrams[..., -1], repeated.to(log_p.dtype)) > 0

    def hypotheses_of(self, sentences: Tensor) -> list[list[Hypothesis]]:
        """Return the finished hypotheses of these sentences, int64, the best `n_best` of each; waits for the device."""
        (chosen,) = send(self.ids.device, sentences)
        tensors = self._finished, self._finished_lengths, self._finished_totals, self._scores
        columns = [x.index_select(0, chosen)[:, : self.options.n_best].tolist() for x in tensors]
        return [
            [
                Hypothesis(prefix[:length], total, score)
                for prefix, length, total, score in zip(*rows, strict=True)
                if score > -math.inf
            ]
            for rows in zip(*columns, strict=True)
        ]

    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences only, int64, ascending."""
        (chosen,) = send(self.ids.device, sentences)
        self.ids = self.ids.view(-1, self.hypotheses).index_select(0, chosen).flatten()
        self.parents = torch.zeros_like(self.ids)
        finished = "_finished", "_finished_lengths", "_finished_totals", "_scores"
        self._replace(lambda x: x.index_select(0, chosen), "status", "_limits", "_totals", "_prefixes", *finished)

    def _replace(self, function: Callable[[Tensor], Tensor], *names: str) -> None:
        """Replace attributes by functions of them."""
        for name in names:
            setattr(self, name, function(getattr(self, name)))
        if self.hypotheses == 1:  # the same tensor, as what follows a finished hypothesis does not matter
            self._finished = self._prefixes


def _of_each(x: Tensor, indices: Tensor) -> Tensor:
    """Return elements `[B, N]` of the second dimension of x, `[B, C]` or `[B, C, L]`."""
    return x.gather(1, indices if x.dim() == 2 else indices[..., None].expand(-1, -1, x.shape[2]))
