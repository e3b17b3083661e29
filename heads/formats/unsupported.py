"""Published drafters that are not supported, refused by name from their config.json before any download."""

from pathlib import Path
from typing import Any

# Parts of an architecture's or a model type's name, in lower case -> what it is, and the remedy.
DRAFTERS = {
    "dflare": ("a DFlare block drafter", "train head=dflash for its target"),
    "lilicorr": ("a LiLiCorr block drafter", "train head=dflash for its target"),
    "mlp_speculator": ("an MLP speculator (IBM's accelerators)", "train head=hydra for its target"),
    "mlpspeculator": ("an MLP speculator (IBM's accelerators)", "train head=hydra for its target"),
    "mtp": ("a multi-token-prediction layer", "train head=mtp, which starts from the layer in its target's checkpoint"),
    "medusamodel": ("Medusa in the layout that vLLM read up to 0.32", "use the head that it was converted from"),
    "eaglespeculator": (
        "EAGLE-1 in the first layout (0.1) of the speculators package",
        "use the head that it was converted from",
    ),
}
KNOWN = "Medusa, Hydra, EAGLE-1/2/3, P-EAGLE, DFlash, DFlash-2, JetSpec, DSpark, Domino and xPress"


def check_supported_drafter(config: dict[str, Any], where: str | Path) -> None:
    """Raise ValueError, with the kind, for a drafter that is not supported."""
    names = [*(config.get("architectures") or []), config.get("model_type"), config.get("speculators_model_type")]
    own = config.get("foredraft") or {}
    if str(own.get("class")).endswith("medusa2:Medusa2Head"):
        raise ValueError(
            f"the head in {where} is a Medusa-2 head with an adapter that changes the target's text. It was removed: train "
            "head=medusa for its target"
        )
    for name in (str(name).lower() for name in names if name not in (None, "Eagle3Speculator", "PEagleSpeculator")):
        unsupported = next((words for part, words in DRAFTERS.items() if part in name), None)
        if unsupported:
            what, remedy = unsupported
            raise ValueError(
                f"the head in {where} is {what}, which is not supported: {remedy}, or choose another ({KNOWN})"
            )
