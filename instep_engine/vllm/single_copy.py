"""The weight-transfer engine `instep_single_copy`: the trainer writes into the weights that this engine computes with.

They are in memory that both map (`memory.py`). A session has the routes of `engine.py`; nothing is loaded in it:

    POST /update_weights {"update_info": {"backend": "memory", "memory": ["NONCE", ...]}}   before the first write
    POST /update_weights {"update_info": {"backend": "single-copy", "digests": {"NONCE": {"NAME": "..."}, ...}}}
    POST /update_weights {"update_info": {"backend": "disk", "path": DIR}}

The first asks each worker whether its memory is among those that the trainer would write into. The second compares
samples of each worker's parameters with the values that the trainer has written into the memory of that nonce. The
third compares every byte of a whole checkpoint with them, and writes nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger

from instep_engine import MEMORY_VARIABLE
from instep_engine.in_place import InPlace
from instep_engine.memory import (
    ALIGNMENT,
    CannotShare,
    Memory,
    Recorder,
    Sample,
    Slice,
    check_record,
    cuda_memories,
    file_memory,
    write_manifest,
)
from instep_engine.place import check_memory_folder
from instep_engine.vllm.bridge import Bridge
from instep_engine.vllm.engine import ShmWeightTransferEngine

logger = init_logger("vllm.instep")


class SingleCopyWeightTransferEngine(InPlace, ShmWeightTransferEngine):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._refuse_what_cannot_be_shared()
        self._rank = int(self.vllm_config.parallel_config.rank)
        self._bridge: Bridge | None = None  # of rank 0, unless a run has started this engine
        folder = self._folder()
        with torch.no_grad():
            memories = [self._move(folder)] if self.device.type == "cpu" else []
            self.slices, shapes = self._record()
            memories = memories or cuda_memories(self.model.parameters(), self.device)
        self.sample = Sample(self.slices)
        for layer in self.model.modules():
            if "cpu_linear" in layer.__dict__:  # it multiplies with a packed copy of the weight
                layer.cpu_linear = nn.functional.linear
        parallel = self.vllm_config.parallel_config
        about = {
            "architecture": self.model_config.hf_config.architectures[0],
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "num_ranks": parallel.tensor_parallel_size,
        }
        meet = get_world_group().barrier
        self.nonce = write_manifest(folder, self._rank, about, memories, self.slices, shapes, meet)
        size = sum(memory.end - memory.begin for memory in memories)
        logger.info("rank %d shares %.1f MB of weights on %s (%s)", self._rank, size / 1e6, self.device, folder)
        if self._bridge is not None:
            tensor_parallel, named = parallel.tensor_parallel_size, dict(self.model.named_parameters())
            self._bridge.write(self.model_config.model, self.nonce, tensor_parallel, named.items(), memories)
            if self.device.type == "cuda":
                logger.info("Exported %d IPC handles for single-copy mode", len(memories))
            logger.info("Exported %d params to %s, where trainers find them", len(named), self._bridge.path)

    # ---- at the start --------------------------------------------------------------------------------------------

    def _folder(self) -> Path:
        """Return the folder of the run that started this engine; without one a new folder, the same for all workers."""
        if folder := os.environ.get(MEMORY_VARIABLE):
            check_memory_folder(folder)
            return Path(folder)
        if self._rank == 0:
            self._bridge = Bridge()
        return Path(get_world_group().broadcast_object(str(self._bridge.folder) if self._bridge else None))

    def shutdown(self) -> None:
        if self._bridge is not None:
            self._bridge.remove()

    def _refuse_what_cannot_be_shared(self) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        reason = ""
        if self.device.type not in ("cpu", "cuda"):
            reason = f"the weights are on {self.device.type}: only those on a CPU or a CUDA device can be shared"
        elif self.vllm_config.lora_config is not None:
            reason = "LoRA layers keep separate weights (--enable-lora)"
        elif getattr(self.model_config, "enable_sleep_mode", False):
            reason = "an engine that sleeps takes its memory from the trainer (--enable-sleep-mode)"
        elif self.vllm_config.parallel_config.pipeline_parallel_size > 1:
            reason = "each stage of a pipeline has a part of the weights (--pipeline-parallel-size)"
        elif self.model_config.use_mla:
            reason = "latent attention computes with copies of its weights"
        for path, layer in self.model.named_modules():
            method = getattr(layer, "quant_method", None)
            if method is not None and not isinstance(method, plain) and any(True for _ in layer.parameters(False)):
                reason = f"{path} is quantized or holds experts ({type(method).__name__}), which vLLM packs"
        if reason:
            raise CannotShare(f"--weight-sync single-copy: {reason}; use --weight-sync shm")

    def _move(self, folder: Path) -> Memory:
        """Give each parameter, in its form before vLLM's packing, a place in one memory; tied ones have one place."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        places: dict[int, int] = {}
        plan: list[tuple[nn.Module, str, torch.Tensor, torch.dtype, int]] = []
        end = 0
        for layer in self.model.modules():
            loaded = get_layerwise_info(layer).restore_metadata[0]  # without a bias, which is not changed
            for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
                like = loaded.get(name, parameter)
                dtype = loaded["weight"].dtype if name == "bias" and "weight" in loaded else like.dtype
                if id(parameter) not in places:
                    places[id(parameter)] = end = -(-end // ALIGNMENT) * ALIGNMENT
                    end += like.numel() * dtype.itemsize
                plan.append((layer, name, like, dtype, places[id(parameter)]))
        memory, data = file_memory(folder, self._rank, end)
        made: dict[int, nn.Parameter] = {}
        for layer, name, like, dtype, offset in plan:
            if offset not in made:
                flat = data[offset : offset + like.numel() * dtype.itemsize].view(dtype)
                new = nn.Parameter(flat.view(like.shape), requires_grad=False)
                new.__class__ = nn.Parameter if type(like) is torch.Tensor else type(like)
                new.__dict__.update(like.__dict__)
                made[offset] = restore_layer_refs(new, layer)
            layer._parameters[name] = made[offset]
        return memory

    def _record(self) -> tuple[dict[str, list[Slice]], dict[str, tuple[int, ...]]]:
        """Load the checkpoint once more. Return its weights' slices, which are compared with it, and shapes."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        from vllm.model_executor.model_loader import get_model_loader

        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead) and getattr(layer, "bias", None) is not None:
                layer._register_bias = lambda: None  # vLLM 0.32's loader of Phi would make a new one
        recorder = Recorder(self.model.parameters())
        loader = get_model_loader(self.vllm_config.load_config)
        with set_current_vllm_config(self.vllm_config), recorder:
            self.model.load_weights(recorder.seen(loader.get_all_weights(self.model_config, self.model)))
        check_record(recorder, self.model, VocabParallelEmbedding)
        return recorder.slices, {name: tuple(recorder.sources[name].shape) for name in recorder.slices}

    # ---- in a session --------------------------------------------------------------------------------------------

    def start_weight_update(self) -> None:
        self._active = True
        self.delivered, self._complete = set(), False
