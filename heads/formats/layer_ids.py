"""The hidden states that an EAGLE-3 head fuses. Two numberings are in use, under one name:

    hidden states   0 is the embedding, k the output of the k-th layer: vLLM, speculators, ours; [2, n/2, n-3] by default
    layer outputs   counted from 0, one less than the above: SpecForge, ModelOpt, AngelSlim; [1, n/2-1, n-4] by default.
                    DeepSpec has five under another name

An off-by-one costs a tenth to several tokens of acceptance length and nobody notices, so it is inferred from evidence and
reported. SGLang reads ids in eagle_config as layer outputs. It reads them as hidden states for targets with DeepSeek's
layers if the first is not 1 (its #25454), and for a GPT-OSS if the last is its number of layers (its #32334).
"""

from foredraft.heads.formats.base import HeadFiles
from foredraft.heads.target_model import Target

IDS = "eagle_aux_hidden_state_layer_ids"
OUTPUTS = "target_layer_ids"  # DeepSpec's name for outputs of layers
BY_FIRST_ID = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa")  # model types


def resolve_layer_ids(files: HeadFiles, target: Target) -> list[int]:
    """Return the fused layers as ids of `hidden_states`. Raises ValueError if they are ambiguous or do not fit."""
    n, inside = target.num_layers, files.config.get("eagle_config") or {}
    top, eagle = read_ids(files, IDS, files.config.get(IDS)), read_ids(files, f"eagle_config.{IDS}", inside.get(IDS))
    recorded = read_ids(files, "foredraft.layers", files.config.get("foredraft", {}).get("layers"))
    if recorded is not None:
        ids = recorded
    elif top is not None and eagle is not None:
        if top not in (as_sglang_reads(eagle, target), [k + 1 for k in eagle]):
            raise files.error(
                f"{IDS}={top} (ids of hidden_states) and eagle_config.{IDS}={eagle} do not name the same layers: the second "
                f"should be {for_sglang(top, target)}"
            )
        ids = top
    elif top is None and eagle is None:
        outputs = read_ids(files, OUTPUTS, files.config.get(OUTPUTS))
        ids = [2, n // 2, n - 3] if outputs is None else [k + 1 for k in outputs]
        if outputs is None:
            if sorted(set(ids)) != ids:
                raise files.error(
                    f"config.json has no {IDS}, and a target of {n} layers is too shallow for the paper's three"
                )
            files.notes.append(
                f"config.json has no {IDS}, so hidden states {ids} are read, the usual three of {n} layers"
            )
    else:
        ids = infer_layer_ids(files, target, top if top is not None else eagle or [], in_eagle_config=top is None)
    if sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] <= n:
        raise files.error(f"it takes hidden states {ids} (0 is the embedding), which must ascend within 0..{n}")
    note_last(files, ids, n)
    return ids


def note_last(files: HeadFiles, ids: list[int], n: int) -> None:
    """Note that a head of another program reads the last of n hidden states, which has no norm in engines."""
    if ids[-1] == n and not files.trained_here:
        files.notes.append(
            f"hidden state {n} is read after the target's last norm, as transformers gives it, and engines give it before: "
            "few drafts may be right"
        )


def read_ids(files: HeadFiles, name: str, value: object) -> list[int] | None:
    if value is None or (isinstance(value, list) and value and all(type(k) is int for k in value)):
        return value
    raise files.error(f"config.json has {name}={value!r}, which is not a list of layers")


def infer_layer_ids(files: HeadFiles, target: Target, ids: list[int], in_eagle_config: bool) -> list[int]:
    """Return ids that are in one place as ids of hidden_states. Raises ValueError with the remedy if in doubt."""
    n, gpt_oss = target.num_layers, target.config.model_type == "gpt_oss"
    outputs, states = [k + 1 for k in ids], ids
    if ids == [1, n // 2 - 1, n - 4]:
        files.notes.append(f"{IDS}={ids} are read as outputs of layers counted from 0, the usual three of {n} layers")
        return outputs
    if ids == [2, n // 2, n - 3] or not in_eagle_config:
        return states  # at the top level of config.json, vLLM and speculators define them so
    if ids[-1] == n and ids[0] != 1:
        files.notes.append(f"eagle_config.{IDS}={ids} are read as ids of hidden_states, since the last one is {n}")
        return states
    if ids[0] == 1 and ids[-1] < n and not gpt_oss:
        files.notes.append(f"eagle_config.{IDS}={ids} are read as outputs of layers counted from 0, as in SGLang")
        return outputs
    if ids[0] == 2 and ids[-1] <= n and target.config.model_type in BY_FIRST_ID:
        files.notes.append(f"eagle_config.{IDS}={ids} are read as ids of hidden_states, as in SGLang")
        return states
    raise files.error(
        f"eagle_config.{IDS}={ids} may count outputs of layers from 0 or hidden_states, where 0 is the embedding: add "
        f'"foredraft": {{"layers": {outputs}}} to its config.json for the first, {{"layers": {states}}} for the second '
        "(the one with the higher acceptance length is right)"
    )


def as_sglang_reads(ids: list[int], target: Target) -> list[int]:
    """Return the hidden states that SGLang reads for these ids in eagle_config."""
    kind = target.config.model_type
    states = ids[0] != 1 if kind in BY_FIRST_ID else kind == "gpt_oss" and ids[-1] == target.num_layers
    return ids if states else [k + 1 for k in ids]


def for_sglang(layers: list[int], target: Target) -> list[int]:
    """Return the ids in eagle_config for which SGLang reads hidden states `layers`. These are outputs of layers if both
    would work, since earlier versions support nothing else, and if neither does (`layers` that start with 1, DeepSeek)."""
    outputs = [k - 1 for k in layers]
    fits = as_sglang_reads(layers, target) == layers and as_sglang_reads(outputs, target) != layers
    return layers if fits else outputs
