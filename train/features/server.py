"""features=server: the target runs in a serving engine, on devices of its own, and gives its hidden states while the head
learns from them.

Every document of a packed row is a prompt. The DataLoader is the queue: each of its workers asks for one row after the
other, `dataloader_num_workers * dataloader_prefetch_factor` batches wait at most, and they come in the order of the
training, whenever their answers came. An engine that dies is waited for (train/features/engine.py).

The trainer's own target says which layers an engine gives, and whether they are its own (train/features/probe.py). The final
norm is applied here, since an engine gives the last state before it.
"""

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from foredraft.heads.target import Target
from foredraft.heads.target.documents import spans
from foredraft.train.data.packing import Packed
from foredraft.train.features.engine import Client
from foredraft.train.features.probe import final_norm, find_columns, make_probe, on_host
from foredraft.train.runtime import distributed

AT_ONCE = 16  # documents of a row that are asked for together


def server(
    packed: Packed,
    target: Target,
    layers: list[int],
    batch: int,
    url: str | list[str],
    run: str,
    timeout: float = 120.0,
    patience: float = 600.0,
) -> "ServedRows":
    """The rows with what the engine at `url`, or those at several in turn, makes of their documents.

    run: the directory of the run. timeout: seconds for one answer. patience: seconds that all engines may be gone.
    Raises EngineError, a ValueError, for one that does not answer, gives other layers, or serves another model.
    """
    urls = list(dict.fromkeys(one.rstrip("/") for one in ([url] if isinstance(url, str) else url)))
    if not urls or not all(re.match("https?://", one) for one in urls) or timeout <= 0 or patience < 0:
        raise ValueError(
            f"features.url={url}, timeout={timeout}, patience={patience}: one or more of http://HOST:PORT/v1, and seconds"
        )
    name = f"{os.path.abspath(run)} {distributed.rank()}"
    client = Client(f"foredraft-{hashlib.sha256(name.encode()).hexdigest()[:16]}", timeout, patience)
    norm = final_norm(target)
    probe = make_probe(packed, target, norm)
    for one in urls:
        client.columns[one] = find_columns(one, client.states(probe.tokens, [one]), probe, [*layers, target.num_layers])
    client.sweep()
    return ServedRows(packed, client, urls, on_host(norm), [layer == target.num_layers for layer in layers])


class ServedRows(Dataset):
    """Packed rows with `features` and `last` as features/online.py gives them, in the engine's precision."""

    def __init__(self, packed: Packed, client: Client, urls: list[str], norm: nn.Module, normed: list[bool]):
        """normed: of each layer of the features, is it the last?"""
        self.packed, self.client, self.urls, self.norm, self.normed = packed, client, urls, norm, normed

    def __len__(self) -> int:
        return len(self.packed)

    @torch.no_grad()
    def __getitem__(self, row: int) -> dict[str, Tensor]:
        text = dict(self.packed[row])
        found = spans([text["documents"].tolist()])
        prompts = [text["tokens"][span.start : span.stop].tolist() for span in found]
        turn = row % len(self.urls)
        urls = self.urls[turn:] + self.urls[:turn]
        with self.client.asking(), ThreadPoolExecutor(AT_ONCE) as pool:
            parts = list(pool.map(lambda prompt: self.client.states(prompt, urls), prompts))
        states = parts[0].new_zeros(len(text["tokens"]), *parts[0].shape[1:])  # 0 for padding
        for span, part in zip(found, parts, strict=True):
            states[span.start : span.stop] = part
        last = self.norm(states[:, -1]).to(states.dtype)
        aux_hidden_states = [last if normed else states[:, i] for i, normed in enumerate(self.normed)]
        return text | {"features": torch.cat(aux_hidden_states, dim=-1), "last": last}
