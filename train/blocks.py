"""Learn in blocks: a step starts drafts at only some positions, and learns all depths of each (DFlash, arXiv:2602.06036).

A depth counts by `depth_decay`^(d - 1), or by what it adds to the accepted length (D-PACE). A block's hidden states,
teacher and weights lie in its own order, (blocks, depth, ...), never on the grid of all label positions.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.heads.base import BlockHead, DraftHead, PackedBatch, draft_loss_mask
from foredraft.heads.target_model import Target
from foredraft.inference.sampling import GOLDEN, mix, shift, wrap
from foredraft.train.gradients import PartialGradients
from foredraft.train.losses import Prediction, to_float32
from foredraft.train.module import DistillationModel, Loss, Outcome


class Drafts(NamedTuple):
    """Hold some blocks, and what they should have drafted."""

    hidden: Tensor  # (blocks, depth, width)
    correction: Tensor  # (blocks, depth, correction)
    base: Tensor  # (blocks, depth, draft vocab): the logits before their correction
    logits: Tensor  # and after it
    teacher: Tensor  # (blocks, depth, draft vocab): the target's logits
    tokens: Tensor  # (blocks, depth): the text's tokens as draft ids, -1 for those that have none
    bonus: Tensor  # (blocks,): the bonus tokens


class BlockDistillation(DistillationModel):
    head: BlockHead

    def __init__(
        self,
        head: DraftHead,
        target: Target,
        loss: Loss,
        depth_decay: float = 0.8,
        anchors: float = 0.25,
        d_pace: bool = False,
        confidence_weight: float = 1.0,
        base_weight: float = 0.0,
        selector_weight: float = 1.0,
    ):
        """Set the weights of the losses. anchors: share of a row's positions at which drafts start in a step. d_pace: weigh
        depths by D-PACE, not by `depth_decay`. confidence_weight: of the loss of a head's own rating. base_weight: share, at
        the start, of the loss of the logits before correction; it falls to 0. selector_weight: of the loss of a head's
        choice among candidates, in addition to that of the logits before it."""
        super().__init__(head, target, loss, depth_decay)
        if not isinstance(head, BlockHead):
            raise ValueError(
                f"this objective is for heads that draft in blocks, and {head.kind} does not: use the objective of its yaml"
            )
        if not 0 < anchors <= 1 or not 0 <= base_weight <= 1:
            raise ValueError(f"objective.anchors={anchors} and objective.base_weight={base_weight} are shares, up to 1")
        self.anchors, self.d_pace = anchors, d_pace
        self.confidence_weight, self.base_weight = confidence_weight, base_weight
        self.selector_weight = selector_weight

    def choose_anchors(self, text: PackedBatch, step: int) -> Tensor:
        """Choose some of the positions at which a draft of any depth counts, others in every step. They depend only on the
        row and the step, so that a step is the same however it is spread over batches and processes."""
        length = text.tokens.shape[1]
        useful = torch.zeros_like(text.loss_mask)
        for depth in range(1, self.head.depth + 1):  # the draft at label position p began at p + 1 - d
            useful |= draft_loss_mask(text, depth).roll(1 - depth, dims=1)
        places = torch.arange(1, length + 1, device=text.tokens.device)
        row = (mix(text.tokens + 1) * places).sum(1, keepdim=True) + wrap((step + 1) * GOLDEN)
        order = shift(mix(places * wrap(GOLDEN) ^ mix(row)), 1)
        best = torch.where(useful, order, -1).topk(max(1, round(self.anchors * length)), dim=1)
        return torch.where(best.values < 0, -1, best.indices).sort(1).values

    def drafts(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> Tensor:
        return self.head.draft_blocks(aux_hidden_states, embeddings, text)

    def compute_loss(self, text: PackedBatch, aux_hidden_states: Tensor, last: Tensor) -> Outcome:
        head, (batch, length) = self.head, text.tokens.shape
        states = self.drafts(aux_hidden_states, self.target.embed(text.tokens), text).flatten(0, 1)
        begins = text.starts_of_drafts()
        depths = torch.arange(1, head.depth + 1, device=last.device)
        # Of every draft: its label position p; the target at p + 1 is its teacher, and p + 2 is the token that it names.
        positions = begins[..., None] + depths - 1
        rows = length * torch.arange(batch, device=last.device)[:, None, None]
        places = (positions.clamp(min=0, max=length - 1) + rows).flatten(0, 1)
        real = ((begins >= 0)[..., None] & (positions < length)).flatten(0, 1)
        counted = self.loss_masks(text)[depths - 1, places] & real  # (blocks, depth)
        blocks = self.active_positions(counted.T)
        places, counted = places[blocks], counted[blocks]
        teachers = last.roll(-1, dims=1).flatten(0, 1)
        tokens = self.draft_tokens(text.tokens.roll(-2, dims=1).flatten())
        bonus = text.tokens.roll(-1, dims=1).flatten()[places[:, 0]]
        counts = counted.sum(0)
        weights = torch.ones(head.depth, device=depths.device) if self.d_pace else self.depth_decay ** (depths - 1)
        items = self.items(counts)
        scale = torch.stack([torch.ones_like(weights) / items * weights, torch.zeros_like(weights)])
        learned, sums = PartialGradients(head, [states], self.recompute), []
        size = max(1, self.chunk // head.depth)
        for start in reversed(range(0, max(1, len(blocks)), size)):  # at least once: every weight must have a gradient
            part = slice(start, start + size)
            labels = teachers[places[part]], tokens[places[part]], bonus[part], counted[part]
            sums.append(learned.part(partial(self.block_loss, *labels), 0, blocks[part], scale))
        losses, hits = reduce(torch.add, reversed(sums))
        return Outcome(learned.attach((weights * losses / items).sum()), hits, counts)

    def draft_tokens(self, tokens: Tensor) -> Tensor:
        """Return ids in the draft vocabulary, -1 for tokens that are not in it."""
        ids, beyond = self.head.draft_ids, tokens >= self.target.vocab_size
        if ids is None:
            return tokens.masked_fill(beyond, -1)
        draft_of = ids.new_full((self.target.vocab_size,), -1)
        draft_of = draft_of.index_copy(0, ids, torch.arange(len(ids), device=ids.device))
        return draft_of[tokens.masked_fill(beyond, 0)].masked_fill(beyond, -1)

    def block_loss(self, last: Tensor, tokens: Tensor, bonus: Tensor, counted: Tensor, states: Tensor) -> Tensor:
        """Return per depth the sum of losses and number of hits, (2, depth), of states (blocks, depth, ...)."""
        head, (teacher, best, draftable) = self.head, self.teacher(last)
        hidden, correction = states.split([head.width, head.correction], dim=-1)
        base = head.base_logits(hidden)
        draft = self.corrected(base, hidden, correction)
        flat = Prediction(teacher.logits.flatten(0, 1), teacher.hidden.flatten(0, 1), tokens.flatten())

        def compare(logits: Tensor) -> Tensor:
            return self.loss(Prediction(logits.flatten(0, 1), hidden.flatten(0, 1)), flat).view(counted.shape)

        loss = self.draft_loss(Drafts(hidden, correction, base, draft, teacher.logits, tokens, bonus), compare)
        if head.confident and self.confidence_weight:
            loss = loss + self.confidence_weight * rating_loss(correction[..., -1], draft, teacher.logits)
        if self.d_pace:
            loss = loss * d_pace_weights(draft, tokens, counted)
        hits = (head.to_target_ids(draft.max(-1).indices) == best) & counted
        return torch.stack([torch.where(counted & draftable, loss, 0.0).sum(0), hits.sum(0).to(loss.dtype)])

    def corrected(self, base: Tensor, hidden: Tensor, correction: Tensor) -> Tensor:
        """Return logits (blocks, depth, draft vocab) from those before their correction."""
        if not self.head.correction:
            return base
        parts = zip(base.unbind(1), hidden.unbind(1), correction.unbind(1), strict=True)
        return torch.stack([self.head.correct(*part, depth) for depth, part in enumerate(parts, start=1)], dim=1)

    def draft_loss(self, drafts: Drafts, compare: Callable[[Tensor], Tensor]) -> Tensor:
        """Return (blocks, depth): how far each draft is from what it should be. compare: of logits with the teacher's."""
        share = self.base_weight * (1 - self.progress)
        if self.head.candidates:
            loss = compare(drafts.base) + self.selector_weight * self.selector_loss(drafts)
        else:
            loss = compare(drafts.logits)
        return (1 - share) * loss + share * compare(drafts.base) if share > 0 else loss

    def selector_loss(self, drafts: Drafts) -> Tensor:
        """Return per draft the loss among its candidates; 0 if the target's own token is not among them (DFlash-2)."""
        scores, ids = self.head.select(drafts.base, drafts.correction)
        named = ids == drafts.tokens[..., None]
        places = torch.where(named.any(-1), named.int().argmax(-1), -1)
        of_target, ours = drafts.teacher.gather(-1, ids).flatten(0, 1), scores.flatten(0, 1)
        loss = self.loss(Prediction(ours, ours), Prediction(of_target, of_target, places.flatten()))
        among = (ids == drafts.teacher.argmax(-1, keepdim=True)).any(-1)
        return torch.where(among, loss.view(places.shape), 0.0)


def rating_loss(rating: Tensor, draft: Tensor, teacher: Tensor) -> Tensor:
    """Return the cross-entropy of ratings, logits (blocks, depth), with chances of acceptance (DSpark, arXiv:2607.05147)."""
    with torch.no_grad():
        accepted = torch.minimum(to_float32(draft).softmax(-1), to_float32(teacher).softmax(-1)).sum(-1)
    return F.binary_cross_entropy_with_logits(to_float32(rating), accepted, reduction="none")


@torch.no_grad()
def d_pace_weights(draft: Tensor, tokens: Tensor, counted: Tensor) -> Tensor:
    """Return (blocks, depth): what drafts add to the accepted length, chances smoothed by a half (arXiv:2605.18810)."""
    chances = to_float32(draft).softmax(-1).gather(-1, tokens.clamp(min=0)[..., None])[..., 0] * (tokens >= 0)
    reached = torch.where(counted, 0.5 * chances + 0.5, 1.0).cumprod(1) * counted
    return reached.flip(1).cumsum(1).flip(1)


class SelfFedDistillation(BlockDistillation):
    """Compute xPress's losses (arXiv:2608.02438, as in `speculators`): behind the text's tokens, behind the head's own
    drafts, as engines refine a block, and of the logits before their correction, which would be forgotten without that
    loss."""

    def __init__(
        self, *args: Any, rounds: int = 3, rounds_weight: float = 0.3, before_weight: float = 0.6, **kwargs: Any
    ):
        """Set rounds and weights. rounds: times that a block is drafted behind the drafts of the time before. The weights are
        of the mean of their losses, and of the loss before the correction."""
        super().__init__(*args, **kwargs)
        if not self.head.correction or self.head.candidates:
            raise ValueError(
                f"this objective is for heads that add to logits what earlier tokens say (xpress, dspark, domino), and "
                f"{self.head.kind} does not: use the objective of its yaml"
            )
        if rounds < 1:
            raise ValueError(f"objective.rounds={rounds} must be at least 1; objective.rounds_weight=0 leaves them out")
        self.rounds, self.rounds_weight, self.before_weight = rounds, rounds_weight, before_weight

    def draft_loss(self, drafts: Drafts, compare: Callable[[Tensor], Tensor]) -> Tensor:
        loss = compare(drafts.logits) + self.before_weight * compare(drafts.base)
        if not self.rounds_weight:
            return loss
        logits, fed = drafts.base, torch.zeros_like(loss)
        for _ in range(self.rounds):
            named = self.head.to_target_ids(logits.max(-1).indices)
            before = torch.cat([drafts.bonus[:, None], named[:, :-1]], dim=1)
            states = self.head.condition_on_text(drafts.hidden, before)
            logits = self.corrected(drafts.base, drafts.hidden, states[..., self.head.width :])
            fed = fed + compare(logits)
        return loss + self.rounds_weight / self.rounds * fed
