"""The keys and choices of earlier versions. A command line that has one ends with a sentence that names the new spelling."""

from collections.abc import Collection

# "KEY=VALUE" is a choice or a value, "KEY" a key with all keys below it. An entry applies where the old spelling is unknown
# and the new one is known, so that a key can keep a name in one program that it lost in another. Several new spellings:
# the first known one.
RENAMED: dict[str, str | tuple[str, ...]] = {
    "target=embedded": "target=test_model",
    "experiment": "recipe",
    "recipe=embedded": "preset=test_model",
    "recipe=embedded_log": "preset=test_model_log",
    "recipe=hf": "preset=gpu",
    "recipe=hours": "preset=cpu",
    "recipe=shape": "preset=gpu",
    "data=hub": "data=conversations",
    "data=jsonl": "data=conversations",
    "data=parquet": "data=conversations",
    "head.alpha": "head.lora_alpha",
    "head.depth": ("head.ttt_steps", "head.num_heads", "head.num_depths"),
    "head.layers": "head.target_layer_ids",
    "head.lora_rank": "head.lora_r",
    "head.num_layers": "head.num_hidden_layers",
    "head.rank": "head.lora_r",
    "max_rows": "max_num_seqs",
}


def new_choice(key: str, value: object) -> str | None:
    """Return a sentence about the new spelling of KEY=VALUE if the table has it."""
    new = RENAMED.get(f"{key}={value}")
    return f"{key}={value} is {new} now" if new else None


def new_key(key: str, known: Collection[str]) -> str | None:
    """Return a sentence about the new name of an unknown key, or of the part of it that was renamed."""
    if key in known:
        return None
    parts = key.split(".")
    for old in (".".join(parts[:count]) for count in range(len(parts), 0, -1)):
        spellings = RENAMED.get(old, ())
        for new in (spellings,) if isinstance(spellings, str) else spellings:
            if old not in known and new in known:
                return f"{old} is {new} now" if old == key else f"{key} is {new}{key.removeprefix(old)} now"
    return None
