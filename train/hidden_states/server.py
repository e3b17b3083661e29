"""Train on hidden states from a serving engine (hidden_states=server), which runs the target on its own devices while
the head learns.

Every document of a packed row is a prompt. The DataLoader is the queue: each of its workers asks for one row after the
other, `dataloader_num_workers * dataloader_prefetch_factor` batches wait at most, and they come in the order of the
training, whenever their answers came. An engine that dies is waited for (train/hidden_states/engine.py).

The trainer needs only the target's ends: the final norm, since an engine gives the last state before it, and an lm_head that
must make of that state what the engine writes (train/hidden_states/probe.py).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from foredraft.heads.target_model import Target
from foredraft.heads.target_model.documents import spans
from foredraft.train.data.packing import Packed
from foredraft.train.hidden_states.engine import Client
from foredraft.train.hidden_states.probe import (
    check_writes_alike,
    final_norm,
    named_columns,
    on_host,
    probe_text,
)

PREFIXES = (8, 16, 32, 64)  # tokens of a text whose next one engine and lm_head are asked for
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
    load_full_target: bool = True,
) -> "ServedRows":
    """Return the rows with the hidden states that the engine at `url`, or engines at several in turn, give for their
    documents.

    run: the directory of the run. timeout: seconds for one answer. patience: seconds that all engines may be gone.
    load_full_target: used where the target is loaded (train/run.py). Raises EngineError, a ValueError, for one
    that does not answer, gives other layers, or serves another model.
    """
    if packed.store.reader is not None:
        raise ValueError(
            "hidden_states=server asks an engine with tokens alone, and the data have images: take online or offline"
        )
    client = Client(url, run, timeout, patience)
    norm, wanted = final_norm(target), [*layers, target.num_layers]
    tokens = probe_text(packed)
    for one in client.urls:
        given = client.states(tokens, [one])
        columns = named_columns(one, target, given, wanted)
        for count in PREFIXES:
            given = client.states(tokens[:count], [one])
            check_writes_alike(one, target, norm(given.tensor[-1:, columns[-1]].to(target.device)), given.written)
        client.columns[one] = columns
    client.delete_stale_files()
    return ServedRows(packed, client, on_host(norm), [layer == target.num_layers for layer in layers])


def engine_states(target: Target, client: Client) -> Callable[[Tensor, Sequence[int]], Tensor]:
    """Return what replaces `Target.remote_hidden_states`: what heads ask of a target before they learn."""
    norm, url, last = final_norm(target), client.urls[0], target.num_layers

    @torch.no_grad()
    def read(tokens: Tensor, layers: Sequence[int]) -> Tensor:
        assert len(tokens) == 1, "one text"
        given = client.states(tokens[0].tolist(), [url])
        columns = named_columns(url, target, given, layers)
        client.delete_stale_files()
        states = given.tensor.to(target.device, target.dtype)
        parts = [norm(states[:, c]) if layer == last else states[:, c] for c, layer in zip(columns, layers)]
        return torch.cat(parts, -1)[None]

    return read


class ServedRows(Dataset):
    """Read packed rows with `features` and `last` as in online.py, in the engine's precision."""

    def __init__(self, packed: Packed, client: Client, norm: nn.Module, normed: list[bool]):
        """Set the source. normed: for each layer, whether it is the last."""
        self.packed, self.client, self.norm, self.normed = packed, client, norm, normed

    def __len__(self) -> int:
        return len(self.packed)

    @torch.no_grad()
    def __getitem__(self, row: int) -> dict[str, Tensor]:
        text = dict(self.packed[row])
        found = spans([text["documents"].tolist()])
        prompts = [text["tokens"][span.start : span.stop].tolist() for span in found]
        turn = row % len(self.client.urls)
        urls = self.client.urls[turn:] + self.client.urls[:turn]
        with self.client.asking(), ThreadPoolExecutor(AT_ONCE) as pool:
            parts = list(pool.map(lambda prompt: self.client.states(prompt, urls).tensor, prompts))
        states = parts[0].new_zeros(len(text["tokens"]), *parts[0].shape[1:])  # 0 for padding
        for span, part in zip(found, parts, strict=True):
            states[span.start : span.stop] = part
        last = self.norm(states[:, -1]).to(states.dtype)
        aux_hidden_states = [last if normed else states[:, i] for i, normed in enumerate(self.normed)]
        return text | {"features": torch.cat(aux_hidden_states, dim=-1), "last": last}
