"""The weight-transfer engine `instep_single_copy`: the trainer writes into the weights that this engine computes with.

They lie in memory that both map (`memory.py`). A session has the routes of `engine.py`; nothing is loaded in it:

    POST /update_weights {"update_info": {"backend": "single-copy", "digests": [{"NAME": "..."}, ...], "nonces": [...]}}
    POST /update_weights {"update_info": {"backend": "disk", "path": DIR}}

The first compares samples of the parameters as this engine has them with what the trainer has written, rank by rank.
The second compares a whole checkpoint with them, every byte, and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger

from instep_vllm import MEMORY_VARIABLE
from instep_vllm.bucket import WeightMismatch
from instep_vllm.engine import ShmWeightTransferEngine, Update
from instep_vllm.memory import ALIGNMENT, CannotShare, Recorder, Slice, file_memory, sample, write_manifest
from instep_vllm.place import check_memory_folder

logger = init_logger("vllm.instep")


@dataclass
class SingleCopyUpdate(Update):
    """One step of a session; of the backend `single-copy` by rank: digests of weights, and the memory they are in."""

    digests: list[dict[str, str]] = field(default_factory=list)
    nonces: list[str] = field(default_factory=list)


class SingleCopyWeightTransferEngine(ShmWeightTransferEngine):
    update_info_cls = SingleCopyUpdate

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        folder = Path(os.environ.get(MEMORY_VARIABLE, ""))
        check_memory_folder(str(folder))
        self._refuse_what_cannot_be_shared()
        self._rank = int(self.vllm_config.parallel_config.rank)
        with torch.no_grad():
            memory, data = self._move(folder)
            self._slices, shapes = self._record(data)
        for layer in self.model.modules():
            if "cpu_linear" in layer.__dict__:  # it multiplies with a packed copy of the weight
                layer.cpu_linear = nn.functional.linear
        parallel = self.vllm_config.parallel_config
        about = {
            "architecture": self.model_config.hf_config.architectures[0],
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "num_ranks": parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        }
        self._nonce = write_manifest(folder, self._rank, about, memory, self._slices, shapes)
        logger.info("rank %d shares %.1f MB of weights in %s", self._rank, data.numel() / 1e6, memory["path"])

    # ---- at the start --------------------------------------------------------------------------------------------

    def _refuse_what_cannot_be_shared(self) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        reason = ""
        if self.device.type != "cpu":
            reason = f"the weights are on {self.device.type}: only those on a CPU can be shared today"
        elif self.vllm_config.lora_config is not None:
            reason = "LoRA layers keep weights of their own (--enable-lora)"
        elif getattr(self.model_config, "enable_sleep_mode", False):
            reason = "an engine that sleeps takes its memory from the trainer (--enable-sleep-mode)"
        for path, layer in self.model.named_modules():
            method = getattr(layer, "quant_method", None)
            if method is not None and not isinstance(method, plain) and any(True for _ in layer.parameters(False)):
                reason = f"{path} is quantized or holds experts ({type(method).__name__}), which vLLM packs"
        if reason:
            raise CannotShare(f"--weight-sync single-copy: {reason}; use --weight-sync shm")

    def _move(self, folder: Path) -> tuple[dict[str, Any], torch.Tensor]:
        """Give each parameter, as it was before vLLM packed it, a place in one memory; tied ones have one place."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        places: dict[int, int] = {}
        plan: list[tuple[nn.Module, str, torch.Tensor, torch.dtype, int]] = []
        end = 0
        for layer in self.model.modules():
            loaded = get_layerwise_info(layer).restore_metadata[0]  # without a bias, which stays as it is
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
        return memory, data

    def _record(self, data: torch.Tensor) -> tuple[dict[str, list[Slice]], dict[str, tuple[int, ...]]]:
        """Load the checkpoint into the memory; returns its weights' slices, which are compared with it, and shapes."""
        from vllm.model_executor.model_loader import get_model_loader

        recorder = Recorder(data)
        loader = get_model_loader(self.vllm_config.load_config)
        with set_current_vllm_config(self.vllm_config), recorder:
            self.model.load_weights(recorder.seen(loader.get_all_weights(self.model_config, self.model)))
        self._check_record(recorder)
        return recorder.slices, {name: tuple(recorder.sources[name].shape) for name in recorder.slices}

    def _check_record(self, recorder: Recorder) -> None:
        """Each parameter must come from plain copies of the checkpoint's weights, but for padded rows of a vocabulary.

        Raises:
            CannotShare: the error names the parameter or the weight.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        if recorder.unknown:
            offset, shape = recorder.unknown[0]
            raise CannotShare(f"something of shape {shape} at {offset} is no plain copy of a weight of the checkpoint")
        for name, parts in recorder.slices.items():
            for part in parts:
                if not torch.equal(part.view, part.of(recorder.sources[name]).to(part.view.dtype)):
                    raise CannotShare(f"{name} is not what the engine holds after it was loaded: it is transformed")
        covered: dict[int, int] = {}
        starts = [(part.view.data_ptr(), part.view.numel()) for parts in recorder.slices.values() for part in parts]
        for path, layer in self.model.named_modules():
            for name, p in layer.named_parameters(recurse=False):
                begin, stop = p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()
                covered[begin] = sum(n for at, n in starts if begin <= at < stop)
                padded = isinstance(layer, VocabParallelEmbedding) and covered[begin] > 0
                if covered[begin] != p.numel() and not padded:
                    what = f"{covered[begin]} of {p.numel()} elements of {path}.{name} come from the checkpoint"
                    raise CannotShare(f"--weight-sync single-copy: {what}; use --weight-sync shm")

    # ---- in a session --------------------------------------------------------------------------------------------

    def start_weight_update(self) -> None:
        self._active = True
        self._delivered, self._complete = set(), False

    def receive_weights(self, update_info: Update) -> None:
        if self._session is None:
            raise WeightMismatch("no session was announced, or it was refused: POST /init_weight_transfer_engine")
        if isinstance(update_info, SingleCopyUpdate) and update_info.backend == "single-copy":
            self._compare_samples(update_info)
        elif update_info.backend in ("shm", "nccl"):
            first = next(iter(self._slices))
            raise WeightMismatch(
                "this engine shares its memory: it loads no buckets (--weight-sync single-copy)", first
            )
        else:
            super().receive_weights(update_info)

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Compare a whole checkpoint with the memory; nothing is loaded."""
        for name, whole in tensors.items():
            for part in self._slices.get(name, ()):
                if not torch.equal(part.view, part.of(whole).to(part.view.dtype)):
                    raise WeightMismatch(f"{name} of the checkpoint is not what this engine holds", name)
        self._delivered.update(tensors)

    def _check_complete(self, names: Iterable[str] | None) -> None:
        if missing := sorted(set(names or ()) - self._delivered):
            raise WeightMismatch(f"{len(missing)} tensors were not delivered: {missing[:3]}", missing[0])

    def _compare_samples(self, update: SingleCopyUpdate) -> None:
        """Raises WeightMismatch if the trainer has written into other memory, or other values."""
        if len(update.digests) <= self._rank or update.nonces[self._rank] != self._nonce:
            raise WeightMismatch("the trainer is attached to other memory than this engine's")
        told = update.digests[self._rank]
        if missing := sorted(self._slices.keys() - told.keys()):
            raise WeightMismatch(f"{missing[0]} was not written", missing[0])
        live = [(p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in self.model.parameters()]
        for name, parts in self._slices.items():
            if not all(any(begin <= part.view.data_ptr() < end for begin, end in live) for part in parts):
                raise WeightMismatch(f"this engine computes with other memory than what {name} was written to", name)
            if xxhash.xxh3_128_hexdigest(b"".join(sample(part.view) for part in parts)) != told[name]:
                raise WeightMismatch(f"{name} is not what the trainer has written", name)
        self._delivered.update(told)
