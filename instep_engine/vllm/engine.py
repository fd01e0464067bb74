"""The weight-transfer engine `instep_shm`, one per worker: buckets from shared memory or a stream, or a checkpoint.

A session uses vLLM's own routes:

    POST /init_weight_transfer_engine {"init_info": {"protocol": 4, "version": "3", "nonce": "..."}}
    POST /start_weight_update
    POST /update_weights {"update_info": {"backend": "shm", "manifest": {...}}}    once per bucket; or "disk", "path",
                                                                    or "nccl" or "ipc", "invitation", "seconds"
                          "restart" with path and manifest of the checkpoint that the engine was started on
                          an adapter of the same base: "lora", with its configuration in the manifest; "lora_disk";
                          "lora_ipc", with its configuration in the invitation
                          "memory", with the nonces of all memory that a trainer is about to write into
    POST /update_weights {"update_info": {"backend": "complete", "names": [...]}}   refuses if something is missing
    POST /finish_weight_update {"weight_version": "3"}

An adapter is used from "complete" on. The engine may generate until then.

Each of several workers (TP, PP) reads and checks all weights and loads its own shard. If one worker refuses, all
refuse: they exchange their results, and the last one raises. (vLLM's executor reads its workers' answers in order and
stops at the first failure. It would take later answers for those to the next call.) A refusal ends the session.
Complete layers keep their new weights, other layers their old ones. So instep keeps the engine paused until a later
session has succeeded.

vLLM regards a session as active on the workers that did not raise. So a session that is announced while one is active
is refused with ACTIVE, and POST /finish_weight_update ends the active one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger

from instep_engine import PROTOCOL
from instep_engine.bucket import checkpoint_shapes
from instep_engine.direct import DirectLoader, kept
from instep_engine.lease import LOADED
from instep_engine.manifest import WeightMismatch
from instep_engine.receiving import Receiving
from instep_engine.vllm.cpu_packing import CpuPacking
from instep_engine.vllm.drafter import WithDrafter
from instep_engine.vllm.lora import Receiver, session_begins

logger = init_logger("vllm.instep")
ACTIVE = "a session is active: POST /finish_weight_update ends it"


class ShmWeightTransferEngine(Receiving, WeightTransferEngine[WeightTransferInitInfo, WeightTransferUpdateInfo]):
    init_info_cls, update_info_cls = WeightTransferInitInfo, WeightTransferUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any):
        WeightTransferEngine.__init__(self, *args, **kwargs)
        Receiving.__init__(self, self.device)
        self._complete = self._active = self._started = False
        self._wrote = False  # this session has loaded weights
        self._packing = CpuPacking(self.model) if self.device.type == "cpu" else None
        self.shapes = checkpoint_shapes(Path(self.model_config.model))
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        head = next((weight for name, weight in weights.items() if name.endswith("lm_head.weight")), None)
        self._tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        self._tied |= sum(weight is head for weight in weights.values()) > 1  # vLLM ties equal copies anyway
        if self._tied:
            self.shapes.pop("lm_head.weight", None)  # some checkpoints hold it twice
        self._reloading = False
        self._adapter = Receiver(self.vllm_config, self.model, self.shapes)
        self._direct = DirectLoader(self.model) if loads_directly(self.model, self.vllm_config, self.device) else None
        self.keeps = self._direct is None  # vLLM's reload keeps tensors until their layer is complete

    def follow(self, drafter: torch.nn.Module) -> None:
        """Load the weights of the drafter, too, from now on."""
        self.model = WithDrafter(self.model, drafter, self.model_config.hf_text_config.num_hidden_layers)
        self._default_model = self.model  # vLLM returns to it after each session
        self._packing = CpuPacking(self.model) if self.device.type == "cpu" else None
        self._direct = DirectLoader(self.model) if loads_directly(self.model, self.vllm_config, self.device) else None
        self.keeps = self._direct is None

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return init_dict  # checked below, where the workers agree on a failure

    def init_transfer_engine(self, init_info: Any) -> None:
        failure = None
        try:
            if (protocol := init_info["protocol"]) != PROTOCOL:
                failure = f"instep speaks protocol {protocol}, this plugin {PROTOCOL}: install the one of this instep"
            elif self._active:
                failure = ACTIVE
            else:
                self.session = init_info["version"], init_info["nonce"]
        except (KeyError, TypeError) as error:
            failure = f"the session is malformed: {error!r}"
        self._agree(failure)

    def start_weight_update(self) -> None:
        self._active = True
        self.delivered, self._complete, self._started, self._wrote = set(), False, False, False
        self._adapter.clear()
        session_begins()
        if self._direct is not None:
            self._direct.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        failure = None
        try:
            with set_current_vllm_config(self.vllm_config):
                self.receive_weights(update_info)
            torch.accelerator.synchronize()
        except Exception as error:  # the error goes to vLLM's workers
            logger.exception("an update was refused")
            failure = str(error) if isinstance(error, WeightMismatch) else f"WeightMismatch[]: {error!r}"
        try:
            self._agree(failure, self._wrote)
        except RuntimeError:
            self._active = False  # vLLM, too, will see that this worker raised
            raise

    def _agree(self, failure: str | None, wrote: bool = False) -> None:
        """End the session on all workers if any has failed, and raise on the last one.

        Args:
            wrote: whether this worker has loaded weights of the session.
        """
        failures = [(failure, wrote)]
        for group in (get_tp_group(), get_pp_group()):
            if group.world_size > 1:
                gathered: list[Any] = [None] * group.world_size
                torch.distributed.all_gather_object(gathered, failures, group=group.cpu_group)
                failures = [f for part in gathered for f in part]
        first = next((f for f, _ in failures if f is not None), None)
        if first is None:
            return
        if first != ACTIVE:
            self.session = None
        self._forget_partial_layers()
        self._end_reload()  # incomplete layers keep their old weights
        if get_tp_group().is_last_rank and get_pp_group().is_last_rank:
            raise RuntimeError(first + (LOADED if any(wrote for _, wrote in failures) else ""))

    def receive_weights(self, info: Mapping[str, Any]) -> None:
        if self.session is None:
            raise WeightMismatch("no session was announced, or it was refused: POST /init_weight_transfer_engine")
        if info["backend"] != "complete":
            return super().receive_weights(info)
        self._check_complete(info["names"])
        if self._adapter.tensors:
            self._wrote = True
            self._adapter.load()
        self._complete = True

    def finish_weight_update(self) -> None:
        if not self._complete:  # refused, or left by a controller that died; instep completes its own
            logger.warning("an incomplete session ends")
            self._forget_partial_layers()
        self._end_reload()
        self.session, self._active = None, False

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Abstract in vLLM 0.26 and absent later; instep's trainer does not use vLLM."""
        raise NotImplementedError

    # ---- checks --------------------------------------------------------------------------------------------------

    def compare_start(self, path: str, tensors: dict[str, torch.Tensor]) -> None:
        """Check that it is the checkpoint that vLLM has loaded itself."""
        if os.path.realpath(path) != os.path.realpath(self.model_config.model):
            raise WeightMismatch(f"this engine was started on {self.model_config.model}, not on {path}")
        self._started = True

    def _check_complete(self, names: Iterable[str] | None) -> None:
        """Raise WeightMismatch unless all `names` and every weight of this worker's model have arrived."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        if missing := sorted(set(names or ()) - self.delivered):
            raise WeightMismatch(f"{len(missing)} tensors were not delivered: {missing[:3]}", missing[0])
        if self._adapter.tensors or self._started:  # the base does not change
            return
        if not self.delivered:
            raise WeightMismatch("no tensor was delivered")
        if self._direct is not None:
            self._direct.check_complete(lambda layer: isinstance(layer, VocabParallelEmbedding))
            return
        for path, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            wanted = sum(p.numel() for p in layer.parameters(recurse=False))
            if not info.can_load() or info.load_numel >= wanted:  # loaded, or only buffers to load
                continue
            padded = isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0  # to a multiple of 64 rows
            untouched = kept(path) and info.load_numel <= 0  # vLLM puts its weights back
            if not padded and not untouched and not (self._tied and isinstance(layer, ParallelLMHead)):
                some = f"{info.load_numel} of {wanted} elements"
                raise WeightMismatch(f"{path} was not delivered whole ({some})", path)

    # ---- loading -------------------------------------------------------------------------------------------------

    def load_adapter(self, tensors: dict[str, torch.Tensor], config: dict[str, Any], lasting: bool) -> None:
        self._adapter.receive(tensors, config, lasting)

    def leave_stream(self) -> None:
        self._adapter.forget_source()
        super().leave_stream()

    def load(self, tensors: dict[str, torch.Tensor], exact: bool) -> Iterable[str]:
        """Load a bucket, or all of a checkpoint that this model has."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if exact:
            self.check_names(tensors)
        else:
            tensors = {name: t for name, t in tensors.items() if not self.shapes or name in self.shapes}
        self._wrote = True
        try:
            if self._direct is not None:
                self._direct.load(tensors)
            else:
                if not self._reloading:
                    if self._packing is not None:
                        self._packing.undo()
                    initialize_layerwise_reload(self.model)
                    self._reloading = True
                self.model.load_weights((name, tensor) for name, tensor in tensors.items())
        except (KeyError, ValueError, AssertionError, RuntimeError) as error:
            first = next(iter(tensors), None)
            raise WeightMismatch(f"the model cannot load these weights: {error!r}", first) from error
        return tensors

    def _forget_partial_layers(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.load_numel, info.loaded_weights = 0, []

    def _end_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self._reloading:
            return
        self._reloading = False
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model, self.model_config)
        if self._packing is not None:
            self._packing.redo()


def loads_directly(model: nn.Module, vllm_config: Any, device: torch.device) -> bool:
    """Return whether vLLM keeps each weight of this model as in the checkpoint (`DirectLoader`).

    Its own reload makes each layer again, processes it, and copies it over the old one, which takes seconds.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if device.type != "cuda" or vllm_config.lora_config is not None or vllm_config.quant_config is not None:
        return False
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        processes = getattr(layer, "process_weights_after_loading", None) is not None
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return False
        if processes and (type(layer) is not Attention or any(True for _ in layer.parameters(False))):
            return False
    return True
