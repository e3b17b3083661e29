"""What a training run will need, before it starts:  python scripts/plan.py target=ORG/NAME head=eagle3 gpus=8

Nothing is loaded but the target's config. The head is built, learns from one batch and takes one step of its optimizer on
fake tensors (shapes without numbers), while every byte and every product is counted: so memory and work are those of the
code that trains, for any head. The target's share is arithmetic on its config, said beside each line.
"""

import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from heads import adapter
from heads.base import Text
from heads.spread import TOGETHER
from heads.target import Reading, Target, resolve_dtype
from train.entry import CONF, entry
from train.losses import soft
from train.trainer import Lesson

GIB = 2**30
BITS = {"4bit": 4.5, "8bit": 8.0, "mxfp4": 4.25}  # per weight, with the scales that lie beside it
RESERVE = 1.5  # GiB per GPU for the driver's context, NCCL's buffers and the allocator's gaps
SHARDS = {  # of a head's weights, gradients and optimizer state: which lie in pieces, one per process?
    "single": (False, False, False),
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
    "fsdp": (True, True, True),
}


class Live(TorchDispatchMode):
    """Counts the bytes of tensors made inside, while they live: `peak` is the most at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.note(tensor.untyped_storage())
        return out

    def note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.seen:
            size = storage.nbytes()
            self.seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


class PaperTarget(Target):
    """A target that is only a config: it says what shape its answers would have."""

    def read(
        self, tokens: Tensor, *args: Any, layers: Sequence[int] = (), keep_logits: Any = 0, **kwargs: Any
    ) -> Reading:
        rows, length = tokens.shape
        kept = keep_logits if isinstance(keep_logits, int) and keep_logits else length
        made: dict[str, Any] = {"dtype": self.dtype, "device": tokens.device}
        return Reading(
            torch.empty(rows, kept, self.vocab_size, **made),
            torch.empty(rows, length, len(layers) * self.hidden_size, **made),
        )

    def check_logits(self) -> None:
        """There are no numbers to compare."""


class PaperLesson(Lesson):
    """Learns from every slot: which of them count is in the data, and the most is what must fit."""

    def rows(self, counted: Tensor) -> Tensor:
        return torch.arange(counted.shape[1], device=counted.device)

    def read(self, text: Text) -> tuple[Tensor, Tensor]:
        width = self.target.hidden_size
        features = self.target.read(
            text.tokens, layers=[*self.head.layers, self.target.num_layers], keep_logits=1
        ).features
        return features[..., :-width], features[..., -width:]


class Head(NamedTuple):
    """Of one step of one process, all but `flops` in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    flops: int
    layers: list[int]  # that it reads


class Body(NamedTuple):
    """Of the target."""

    weights: float  # bytes, without its ends
    ends: float  # bytes of embedding and lm_head
    working: float  # bytes, while it reads a batch
    flops: float  # per batch
    parameters: int
    active: float  # parameters that one token meets, without embeddings and lm_head


def read_config(target: str) -> Any:
    """Raises ValueError that says what to give instead."""
    path = Path(target)
    if path.suffix == ".json" and not path.is_file():
        raise ValueError(f"target={target} does not exist: give a config.json, a directory that holds one, or a Hub id")
    try:
        return AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"target={target}: {reason}; a saved config.json, or one of scripts/targets, will do"
        ) from error


def study_head(cfg: DictConfig, target: Target) -> Head:
    """Build the head, learn from one batch, step. Under FakeTensorMode."""
    more = {"counts": torch.ones(target.vocab_size, dtype=torch.int64)} if "draft_vocab_size" in cfg.head else {}
    head = instantiate(cfg.head, target=target, **more)
    lesson = PaperLesson(head, target, soft)
    parameters = [p for p in lesson.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)  # counted apart from activations
    shape = cfg.rows, cfg.length
    positions = torch.arange(cfg.length).expand(shape)
    text = Text(torch.zeros(shape, dtype=torch.int64), torch.ones(shape).bool(), torch.zeros(shape).long(), positions)
    with FlopCounterMode(display=False) as flops, Live() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=cfg.bf16):
            loss = lesson(*text).loss
        loss.backward()
    ids = head.draft_ids
    vocabularies = {target.vocab_size} | (set() if ids is None else {len(ids)})
    optimizer = instantiate(cfg.optimizer)(lesson, vocabularies, 1e-4, (0.9, 0.95))
    optimizer.step()
    state = sum(t.nbytes for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor))
    held = sum(tensor.nbytes for tensor in [*head.parameters(), *head.buffers()])
    gradients = sum(parameter.nbytes for parameter in parameters)
    added = sum(parameter.nbytes for parameter in adapter.layers(target).parameters())
    if added == 0:
        return Head(held, gradients, state, live.peak, flops.get_total_flops(), head.layers)
    # Gradients of an adapter pass through all of the target, which keeps what every layer made of the batch for them; and
    # it reads the batch once more without the adapter. AdamW has two moments of each weight.
    with Live() as kept:
        reading = Target.read(target, text.tokens, layers=[target.num_layers], keep_logits=1)
        between = kept.now - reading.features.nbytes
    work = flops.get_total_flops() + 4 * text.tokens.numel() * sum(p.numel() for p in target.model.parameters())
    return Head(held + added, gradients + added, state + 2 * added, live.peak + between, work, head.layers)


def study_target(cfg: DictConfig, target: Target) -> Body:
    """Arithmetic on the config; working memory is that of one layer, since no gradient state is kept."""
    config, model = target.config, target.model
    ends = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}
    body = {name: p.numel() for name, p in model.named_parameters() if id(p) not in ends}
    edge = sum(p.numel() for p in model.parameters() if id(p) in ends)
    facts = config.to_dict()
    experts = facts.get("num_local_experts") or facts.get("num_experts") or 1
    share = (facts.get("num_experts_per_tok") or 1) / experts
    mixed = sum(count for name, count in body.items() if ".experts." in name)
    dense = sum(body.values()) - mixed
    size = target.dtype.itemsize
    bits = BITS[cfg.target.quantization] if cfg.target.quantization else 8.0 * size
    packed = mixed if cfg.target.quantization == "mxfp4" else mixed + dense
    weights = packed * bits / 8 + (mixed + dense - packed) * size
    tokens = cfg.rows * cfg.length
    head_dim = facts.get("head_dim") or config.hidden_size // config.num_attention_heads
    active = dense + mixed * share
    attention = 2 * cfg.length * config.num_attention_heads * head_dim * config.num_hidden_layers  # causal: half of 4
    # One layer at its widest (the two halves of the MLP and their product), the residual stream, and the mask.
    wide = 3 * facts.get("intermediate_size", 4 * config.hidden_size) * (facts.get("num_experts_per_tok") or 1)
    working = tokens * (wide + 4 * config.hidden_size) * size + cfg.rows * cfg.length**2 * (1 + size)
    return Body(weights, edge * size, working, tokens * (2 * active + attention), sum(body.values()) + edge, active)


def lines(cfg: DictConfig, head: Head, body: Body, layers: int, target: Target) -> dict[str, tuple[float, str]]:
    """GiB per GPU and how each came to be."""
    pieces = SHARDS[cfg.engine.name]
    n = cfg.gpus

    def part(size: int, cut: bool, what: str) -> tuple[float, str]:
        return size / GIB / (n if cut else 1), what + (f", one of {n} shards" if cut and n > 1 else "")

    bits = (
        f"{BITS[cfg.target.quantization]} bits per weight"
        if cfg.target.quantization
        else str(target.dtype).removeprefix("torch.")
    )
    spread = cfg.target.spread if n > 1 else None
    rows = cfg.rows * (n if spread == "tensor" else 1)  # a slice of a layer reads the rows of all
    captured = rows * cfg.length * (layers + 1) * target.hidden_size * 2
    held = {
        "fsdp": ((body.weights + body.ends) / n, f"one of {n} pieces on every GPU"),
        "tensor": (body.weights / n + body.ends, f"one of {n} slices on every GPU, embedding and lm_head whole"),
    }.get(str(spread), (body.weights + body.ends, "whole on every GPU"))
    found = {
        "target weights": (
            held[0] / GIB,
            f"{body.parameters / 1e9:.2f}B parameters in {bits}, {held[1]}",
        ),
        "target at work": (
            body.working * rows / cfg.rows / GIB,
            f"one layer on {rows} x {cfg.length} tokens, its mask",
        ),
        "features": (captured / GIB, f"{layers} layers and the last, {rows} x {cfg.length} x {target.hidden_size}"),
        "head weights": part(head.weights, pieces[0], "float32"),
        "gradients": part(head.gradients, pieces[1], "float32"),
        "optimizer state": part(head.optimizer, pieces[2], cfg.optimizer._target_.rpartition(".")[2]),
        "activations": (head.activations / GIB, "counted in one forward and backward"),
        "reserve": (RESERVE, "driver, NCCL, gaps"),
    }
    if pieces[0] and n > 1:
        found["gathered weights"] = (
            head.weights / GIB * (0.5 if cfg.bf16 else 1),
            "whole while a batch is learnt from",
        )
    if spread == "fsdp":
        gathered = 2 * body.weights / target.num_layers + body.ends
        found["gathered target"] = (gathered / GIB, "a layer at work and the next one, embedding and lm_head")
    return found


def remedies(cfg: DictConfig) -> list[list[str]]:
    """What could be changed where it does not fit, the cheapest first."""
    rows = [[f"accumulation={cfg.accumulation * cfg.rows}", "rows=1"]] if cfg.rows > 1 else []
    engine = [["engine=fsdp"]] if cfg.gpus > 1 and not SHARDS[cfg.engine.name][0] else []
    smaller = [] if cfg.target.quantization or cfg.target.spread else [["target.quantization=4bit"]]
    if smaller and cfg.gpus > 1:
        smaller.insert(0, ["target.spread=fsdp"])
    shorter = [[f"length={cfg.length // part}"] for part in (2, 4)]
    return [*rows, *engine, *smaller, *shorter, *[a + b for a in smaller for b in engine + shorter]]


def plan(cfg: DictConfig) -> dict[str, Any]:
    """gib: {line: (GiB per GPU, how)}; total; tokens_per_second and hours; disk (bytes of features)."""
    if cfg.target.quantization and cfg.target.quantization not in BITS:
        raise ValueError(f"target.quantization={cfg.target.quantization} is not one of {', '.join(BITS)}")
    if cfg.target.spread not in (None, *TOGETHER):
        raise ValueError(f"target.spread={cfg.target.spread}: a plan knows {', '.join(TOGETHER)}, or null")
    if cfg.head._target_.startswith("heads.draft_model."):
        raise ValueError("head=draft_model is a model of its own, and a plan counts heads: plan one of those")
    config = read_config(cfg.target.path)
    dtype = torch.bfloat16 if cfg.target.dtype == "auto" else resolve_dtype(cfg.target.dtype)
    # Fake tensors cannot be moved, and have nowhere to go.
    with FakeTensorMode(), patch.object(nn.Module, "to", lambda self, *args, **kwargs: self):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        target = PaperTarget(model, name=cfg.target.path)
        head = study_head(cfg, target)
        layers = len(head.layers)
        body = study_target(cfg, target)
    found = lines(cfg, head, body, layers, target)
    flops = (body.flops + head.flops * cfg.supervised) / (cfg.rows * cfg.length)
    rate = cfg.gpus * cfg.gpu_tflops * 1e12 * cfg.efficiency / flops
    return {
        "gib": found,
        "total": sum(size for size, _ in found.values()),
        "flops_per_token": (body.flops / (cfg.rows * cfg.length), head.flops / (cfg.rows * cfg.length)),
        "tokens_per_second": rate,
        "hours": cfg.tokens / rate / 3600,
        "disk": cfg.tokens * (layers + 1) * target.hidden_size * 2,
        "head_parameters": head.gradients // 4,
    }


def fitting(cfg: DictConfig) -> tuple[list[str], float] | None:
    """The first remedy with which it fits, and the GiB it then takes."""
    for change in remedies(cfg):
        changed = cast(
            DictConfig,
            OmegaConf.merge(cfg, OmegaConf.from_dotlist([one.replace("engine=", "engine.name=") for one in change])),
        )
        total = plan(changed)["total"]
        if total <= cfg.gpu_gib:
            return change, total
    return None


def spelled_out(argument: str) -> str:
    """target=ORG/NAME as target.path=ORG/NAME: what conf/target does not name is a target."""
    key, _, value = argument.partition("=")
    chosen = key == "target" and not (CONF / "target" / f"{value}.yaml").is_file()
    return f"target.path={value}" if chosen else argument


@entry("plan")
def main(cfg: DictConfig) -> None:
    found = plan(cfg)
    print(f"{cfg.head._target_.split('.')[1]} ({found['head_parameters'] / 1e6:.0f}M parameters) for {cfg.target.path}")
    print(f"on {cfg.gpus} GPUs of {cfg.gpu_gib} GiB, engine={cfg.engine.name}; GiB on each:")
    for name, (size, how) in found["gib"].items():
        print(f"  {name:17}{size:8.2f}  {how}")
    print(f"  {'sum':17}{found['total']:8.2f}  of {cfg.gpu_gib}")
    body, head = found["flops_per_token"]
    print(
        f"{body / 1e9:.1f} GFLOP per token in the target's forward, {head / 1e9:.1f} in the head (forward, backward, both "
        f"vocabularies' logits)\n{found['tokens_per_second']:,.0f} tokens/s = {cfg.gpus} x {cfg.gpu_tflops:g} TFLOP/s x "
        f"{cfg.efficiency} / {(body + head * cfg.supervised) / 1e9:.1f} GFLOP: {found['hours']:.1f} hours for "
        f"{cfg.tokens:,} tokens\n{found['disk'] / 1e12:.2f} TB, should their features be kept on disk in bfloat16"
    )
    if found["total"] > cfg.gpu_gib:
        largest = max(found["gib"], key=lambda name: found["gib"][name][0])
        print(f"warning: this does not fit; most of it is {largest}")
        better = fitting(cfg)
        print(
            f"         {' '.join(better[0])} needs {better[1]:.1f} GiB"
            if better
            else "         nothing tried here makes it fit: take more GPUs, or larger ones"
        )


if __name__ == "__main__":
    sys.argv[1:] = [spelled_out(argument) for argument in sys.argv[1:]]
    main()
