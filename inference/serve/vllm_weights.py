"""Weights of a draft head from a file into a running vLLM (0.32 or newer). Its workers load this file as an extension
(`--worker-extension-cls`), in an environment of their own: it knows vLLM alone.

vLLM's own ways to hand over weights, NCCL and CUDA IPC, want a GPU that trainer and server share.
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
class Nothing(WeightTransferInitInfo):
    pass


@dataclass
class Folder(WeightTransferUpdateInfo):
    path: str  # of the exported head


class FromFolder(WeightTransferEngine):
    init_info_cls, update_info_cls = Nothing, Folder

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Folder) -> None:
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
    """For the name alone: a class is what vLLM imports."""
