"""Muon for a head's matrices and AdamW for the rest, as one optimizer.

Muon (Jordan et al., 2024) makes each update of a matrix orthogonal. A head that learns for minutes learns
faster by it: after 75 steps on the test model it agreed on 0.275 of tokens, with AdamW alone on 0.173. Projections
to a vocabulary, norms and biases stay with AdamW, as its authors advise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from foredraft.heads.caches.device import device_name
from foredraft.heads.target_model.loading import has_bfloat16_products

OPTIMIZERS = ("adamw", "muon")  # trainer.optim
RMS = 0.2  # root mean square of AdamW's updates, which "match_rms_adamw" gives to Muon's


def multiplies_faster_in_bfloat16(device: torch.device) -> bool:
    """Return whether large products are faster in bfloat16 than in float32: on GPUs that compute them, and of the CPUs that
    do on those with matrix units (AMX) and on AMD's. Intel's with AVX512_BF16 alone run them at half of float32's rate,
    although weights in bfloat16, of which decoding reads every one for a few tokens, are faster there."""
    fast = device.type != "cpu" or torch.cpu._is_amx_tile_supported() or "AMD" in device_name(device)
    return fast and has_bfloat16_products(device)


class Float32Muon(torch.optim.Muon):
    """Orthogonalize in float32, with the state of torch's Muon, which uses bfloat16 whatever the weights are.

    Where a CPU has no bfloat16 products torch's takes 5 (AVX-512) to 25 times as long."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter.grad))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(momentum, group["momentum"]), group)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * RMS * max(parameter.shape) ** 0.5)


def orthogonal(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """Return nearly U V^T of its singular value decomposition U S V^T, by Newton and Schulz's iteration in its dtype."""
    a, b, c = group["ns_coefficients"]
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    wide = wide / wide.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide


class MuonAdamW(torch.optim.Optimizer):
    """Combine two optimizers: what shards, saves or schedules it sees one list of groups and one state."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW):
        self.parts = (muon, adamw)
        # Schedules with a lowest learning rate read the highest one from the defaults.
        groups = [group for part in self.parts for group in part.param_groups]
        super().__init__(groups, {"lr": adamw.defaults["lr"]})
        self.share()

    def share(self) -> None:
        """Share this one's groups and state with the parts."""
        first, second = self.parts
        count = len(first.param_groups)
        first.param_groups, second.param_groups = self.param_groups[:count], self.param_groups[count:]
        first.state = second.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.share()


def schedule(args: Any, steps: int) -> Any:
    """Return the schedule of the learning rate over this number of steps. Raise ValueError for settings that it does not
    take, or that it lacks."""
    unused, more = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate), args.lr_scheduler_kwargs
    try:
        return get_scheduler(args.lr_scheduler_type, unused, args.get_warmup_steps(steps), steps, more)
    except TypeError as error:
        raise ValueError(
            f"trainer.lr_scheduler_type={args.lr_scheduler_type.value} does not fit lr_scheduler_kwargs={more} ({error}): "
            "change or set '+trainer.lr_scheduler_kwargs={NAME: VALUE}'"
        ) from error


def build(module: nn.Module, vocabulary: Sequence[nn.Parameter], args: Any) -> torch.optim.Optimizer:
    """Return the optimizer that HeadTrainingArguments choose: AdamW for all weights, as the papers train, or Muon for the
    matrices and AdamW for the rest. The learning rate is of both, since Muon's updates get the size of AdamW's
    (arXiv:2502.16982, section 2.2). Only matrices decay. vocabulary: the head's `vocabulary_parameters`."""
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    by_token = {id(parameter) for parameter in vocabulary}
    matrices = [p for p in learned if args.optimizer == "muon" and p.ndim == 2 and id(p) not in by_token]
    for_muon = {id(p) for p in matrices}
    others = [p for p in learned if id(p) not in for_muon]
    first = None
    if matrices:
        kind = torch.optim.Muon if multiplies_faster_in_bfloat16(learned[0].device) else Float32Muon
        first = kind(matrices, lr=args.learning_rate, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw")
        if not others:  # torch refuses an optimizer of nothing
            return first
    settings: dict[str, Any] = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
    # One kernel for all weights on a GPU. A CPU's gives other last digits, and saves 8 of several hundred ms a step.
    fused = True if all(parameter.is_cuda for parameter in others) else None
    settings |= {"eps": args.adam_epsilon, "weight_decay": 0.0, "fused": fused}
    decayed = [parameter for parameter in others if args.weight_decay and parameter.ndim > 1]
    rest = [parameter for parameter in others if not args.weight_decay or parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": rest}]  # one group without decay
    second = torch.optim.AdamW([group for group in groups if group["params"]], **settings)
    return second if first is None else MuonAdamW(first, second)
