"""Load a draft head's weights from a file into a running vLLM (0.32 or newer). Its workers import this file as an extension
(`--worker-extension-cls`) in their own environment, so it may import only vLLM and its dependencies.

vLLM's built-in weight transfer, by NCCL or CUDA IPC, needs a GPU that trainer and server share.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class EmptyInitInfo(WeightTransferInitInfo):
    pass


@dataclass
class HeadPath(WeightTransferUpdateInfo):
    path: str  # directory of the exported head


class FromFolder(WeightTransferEngine):
    init_info_cls, update_info_cls = EmptyInitInfo, HeadPath

    def init_transfer_engine(self, init_info: EmptyInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: HeadPath) -> None:
        weights = dict[str, torch.Tensor]()
        for file in sorted(Path(update_info.path).glob("*.safetensors")):
            weights |= load_file(file)
        self.model.load_weights(weights.items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine("foredraft", FromFolder)


class Extension:
    """Provide a name: vLLM imports extensions by a class."""
