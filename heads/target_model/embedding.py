"""How a target's first layer gets the rows of its embedding: unchanged, or scaled (Gemma)."""

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from foredraft.heads.target_model.model import Target


def embedding_scale(target: "Target") -> float | None:
    """Return the factor between rows of the target's embedding and what its first layer gets; None if these differ in
    another way, such as by a norm."""
    if target.is_collective:  # one process alone may ask, and a forward would wait for the others
        embedding = target.model.get_input_embeddings()
        plain = type(embedding).forward is nn.Embedding.forward
        return 1.0 if plain else float(embedding.embed_scale) if hasattr(embedding, "embed_scale") else None
    few = torch.arange(min(8, target.vocab_size), device=target.device)
    given, rows = target.embed(few), target.embeddings[few]
    if torch.equal(given, rows):
        return 1.0
    given, rows = given.float(), rows.float()
    scale = (given * rows).sum() / (rows * rows).sum()
    return scale.item() if torch.allclose(given, scale * rows, rtol=1e-2, atol=1e-6) else None
