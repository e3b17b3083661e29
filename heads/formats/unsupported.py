"""Published drafters that cannot be loaded here, refused by name from their config.json alone, before any download."""

from pathlib import Path
from typing import Any

# Parts of an architecture's or a model type's name, in lower case -> what it is.
DRAFTERS = {
    "dflare": "a DFlare block drafter",
    "mlp_speculator": "an MLP speculator (IBM's accelerators)",
    "mlpspeculator": "an MLP speculator (IBM's accelerators)",
    "mtp": "a multi-token-prediction layer, which belongs to its target's own checkpoint",
    "eaglespeculator": "EAGLE-1 in the first layout (0.1) of the speculators package",
}
KNOWN = "Heads that load here: Medusa, Hydra, EAGLE-1/2/3, P-EAGLE, DFlash, DFlash-2, JetSpec, DSpark and Domino"


def check_supported_drafter(config: dict[str, Any], where: str | Path) -> None:
    """Raise ValueError, saying what it is, for a drafter of a kind that is not implemented here."""
    layer = config.get("transformer_layer_config") or config
    names = [*(config.get("architectures") or []), config.get("model_type"), config.get("speculators_model_type")]
    for name in (str(name).lower() for name in names if name not in (None, "Eagle3Speculator", "PEagleSpeculator")):
        found = next((what for part, what in DRAFTERS.items() if part in name), None)
        if found:
            raise ValueError(f"the head in {where} is {found}, which cannot be drafted with here yet. {KNOWN}")
    if layer.get("kv_lora_rank") or layer.get("q_lora_rank"):
        raise ValueError(
            f"the head in {where} has a layer of multi-head latent attention (kv_lora_rank={layer.get('kv_lora_rank')}), "
            "which cannot be drafted with here yet: choose a head with a Llama layer"
        )
