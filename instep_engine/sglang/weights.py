"""The weight sessions in a scheduler of SGLang: each tensor-parallel rank reads, checks and loads what a trainer sends.

Calls come through SGLang's `update_weights_from_tensor` with the load format FORMAT. JSON takes the place of tensors
(`server.py` sends it):

    {"call": "start", "protocol": 4, "version": "3", "nonce": "..."}
    {"call": "update", "info": {"backend": "shm", ...}}                 as in `vllm/engine.py`
    {"call": "update", "info": {"backend": "complete", "names": [...]}} refuses if something is missing
    {"call": "finish"}

SGLang answers with the verdict of rank 0 alone. So the ranks exchange theirs, and all return the first refusal. For
weights from files they do so before any of them loads. A refusal ends the session, and the server stays paused until a
later session has succeeded.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from instep_engine import PROTOCOL
from instep_engine.bucket import checkpoint_shapes
from instep_engine.direct import DirectLoader
from instep_engine.lease import LOADED
from instep_engine.manifest import WeightMismatch
from instep_engine.receiving import Receiving
from instep_engine.sglang.drafter import WithDrafters, own_drafters

FORMAT = "instep"
PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
STREAMS = ("nccl", "ipc", "lora_ipc")
ADAPTER = "instep@"  # begins the names of a trainer's adapters, one for each version
JOINED = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")  # SGLang's DeepSeek concatenates them before it loads them
PEFT, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
logger = logging.getLogger("instep")


def update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Answer a call of a session; other load formats go on to SGLang (around `update_weights_from_tensor`)."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    if request.load_format != FORMAT:
        return original(manager, request)
    asked = json.loads(request.serialized_named_tensors[0])
    failure = Weights.of(manager.tp_worker.model_runner.weight_updater, own_drafters(manager)).answer(asked)
    if failure is None and request.weight_version is not None:
        if (note := getattr(manager, "record_weight_version_after_update", None)) is not None:  # from 0.5.19
            note(request.weight_version)
    return UpdateWeightsFromTensorReqOutput(success=failure is None, message=failure or "Success")


def load_adapter(
    original: Callable[..., Any], manager: Any, ref: Any, tensors: Any, config: Any, added_tokens: Any = None
) -> Any:
    """Load the adapter of the last session under the name that the server has chosen; others go on to SGLang.

    Around `LoRAManager.load_lora_adapter_from_tensors`.
    """
    if ref.lora_name.startswith(ADAPTER):
        tensors, config = Weights.adapter
    return original(manager, ref, tensors, config, added_tokens)


def in_threads(original: Callable[..., bool], weight: torch.Tensor) -> bool:
    """Return whether SGLang copies a weight in another thread, where no copy is recorded (around
    `should_async_load`)."""
    return not Weights.loads and original(weight)


def why_not(model: torch.nn.Module) -> str:
    """Return why SGLang computes with other weights than the checkpoint's, which a plain copy would not renew."""
    for path, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and type(method).__name__ not in PLAIN:
            return f"{path} is quantized, or packed ({type(method).__name__})"
        if getattr(layer, "use_intel_amx_backend", False):
            return f"{path} is packed for AMX"
    return ""


class Refused(Exception):
    """Another rank has refused the update."""


class Weights(Receiving):
    """The sessions of one model in this process, and of its drafters. These get their weights as a whole or not at all.

    Attributes:
        adapter: the tensors and the configuration of the current session's adapter.
        loads: whether this process is loading weights of a session.
    """

    keeps = loads = False
    adapter: tuple[dict[str, torch.Tensor], dict[str, Any]] = ({}, {})
    _made: dict[int, Weights] = {}

    def __init__(self, updater: Any, drafters: Sequence[torch.nn.Module] = ()):
        device = torch.device(updater.device, updater.gpu_id) if updater.device == "cuda" else torch.device("cpu")
        super().__init__(device)
        self._path, model = updater.model_config.model_path, updater.get_model()
        self.shapes = checkpoint_shapes(Path(self._path))
        weights = dict(model.named_parameters(remove_duplicate=False))
        head, words = weights.get("lm_head.weight"), weights.get("model.embed_tokens.weight")
        if head is not None and head is words:
            self.shapes.pop("lm_head.weight", None)  # some checkpoints hold it twice
        # From loaded weights: latent attention decodes with parts of kv_b_proj.
        self._derive = [m.post_load_weights for m in (model, *drafters) if hasattr(m, "post_load_weights")]
        model = WithDrafters(model, drafters) if drafters else model
        self._reason, self._loader = why_not(model), DirectLoader(model)
        self._started = self._agreed = self._from_files = False
        self._waiting: dict[str, torch.Tensor] = {}  # those of JOINED whose other half is in a later bucket

    @classmethod
    def of(cls, updater: Any, drafters: Sequence[torch.nn.Module] = ()) -> Weights:
        """Return those of a model; the first call makes them."""
        if (key := id(updater.get_model())) not in cls._made:
            cls._made[key] = cls(updater, drafters)
        return cls._made[key]

    def answer(self, asked: Mapping[str, Any]) -> str | None:
        """Answer a call; return why the ranks refuse it, or None."""
        failure, self._agreed = None, False
        info = asked.get("info") or {}
        try:
            if asked["call"] == "start":
                self._start(asked)
            elif asked["call"] == "finish":
                self.session, Weights.adapter = None, ({}, {})
            else:
                self.receive_weights(info)
        except Refused:
            pass  # the other rank says why
        except Exception as error:  # the error goes to the trainer
            logger.exception("a call of a weight session was refused")
            failure = str(error) if isinstance(error, WeightMismatch) else f"WeightMismatch[]: {error!r}"
        first = failure
        if asked["call"] == "update" and info.get("backend") not in STREAMS and not self._agreed:
            first = self._agree(first)  # the one before loading
        first = self._agree(first)
        if first is not None:
            self.session = None
        return first

    def _agree(self, failure: str | None) -> str | None:
        """Return the first failure of any rank."""
        from sglang.srt.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        failures: list[Any] = [failure] * group.world_size
        if group.world_size > 1:
            torch.distributed.all_gather_object(failures, failure, group=group.cpu_group)
        return next((f for f in failures if f is not None), None)

    def _start(self, asked: Mapping[str, Any]) -> None:
        if (protocol := asked["protocol"]) != PROTOCOL:
            raise WeightMismatch(f"instep speaks protocol {protocol}, this plugin {PROTOCOL}")
        if self._reason:
            raise WeightMismatch(f"SGLang's weights of this model are not those of the checkpoint: {self._reason}")
        self.session = asked["version"], asked["nonce"]
        self.delivered, self._started, Weights.adapter = set(), False, ({}, {})
        self._waiting = {}
        self._loader.begin()

    def receive_weights(self, info: Mapping[str, Any]) -> None:
        if self.session is None:
            raise WeightMismatch("no session was announced, or it was refused")
        if info["backend"] == "complete":
            self._check_complete(info["names"])
        else:
            self._from_files = info["backend"] not in STREAMS
            super().receive_weights(info)
            if self._at.type == "cuda":
                torch.cuda.synchronize(self._at)

    def load(self, tensors: dict[str, torch.Tensor], exact: bool) -> Iterable[str]:
        """Load a bucket, or all of a checkpoint that this model has, after all ranks have accepted it."""
        if exact:
            self.check_names(tensors)
            if wrong := next((name for name, t in tensors.items() if not t.is_floating_point()), None):
                raise WeightMismatch(f"{wrong}: received {tensors[wrong].dtype}, no floating-point weight", wrong)
        else:
            tensors = {name: t for name, t in tensors.items() if not self.shapes or name in self.shapes}
        if self._from_files:
            self._agreed = True
            if (failure := self._agree(None)) is not None:
                raise Refused(failure)
        Weights.loads = True
        try:
            self._loader.load(self._whole(tensors))
        except (KeyError, ValueError, AssertionError, RuntimeError) as error:
            first = next(iter(tensors), None)
            raise WeightMismatch(f"the model cannot load these weights: {error!r}{LOADED}", first) from error
        finally:
            Weights.loads = False
        return tensors

    def _whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights that have arrived, without those whose other half has not."""
        here, self._waiting = {**self._waiting, **tensors}, {}
        for half, other in (JOINED, JOINED[::-1]):
            for name in [name for name in here if name.endswith(half)]:
                partner = name.removesuffix(half) + other
                if partner in self.shapes and partner not in here and partner not in self._waiting:
                    self._waiting[name] = here.pop(name).clone()
        return here

    def load_adapter(self, tensors: dict[str, torch.Tensor], config: dict[str, Any], lasting: bool) -> None:
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        if twice := sorted(kept.keys() & Weights.adapter[0].keys()):
            raise WeightMismatch(f"{twice[0]} came twice", twice[0])
        Weights.adapter = ({**Weights.adapter[0], **kept}, config)

    def compare_start(self, path: str, tensors: dict[str, torch.Tensor]) -> None:
        """Check that it is the checkpoint that SGLang has loaded itself."""
        if os.path.realpath(path) != os.path.realpath(self._path):
            raise WeightMismatch(f"this engine was started on {self._path}, not on {path}")
        self._started = True

    def _check_complete(self, names: Iterable[str] | None) -> None:
        """Raise WeightMismatch unless all `names` and every weight of this rank's model have arrived."""
        from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

        if missing := sorted(set(names or ()) - self.delivered):
            raise WeightMismatch(f"{len(missing)} tensors were not delivered: {missing[:3]}", missing[0])
        if Weights.adapter[0]:
            self._check_pairs(*Weights.adapter)
            return
        if self._started:
            return
        if not self.delivered:
            raise WeightMismatch("no tensor was delivered")
        self._loader.check_complete(lambda layer: isinstance(layer, VocabParallelEmbedding))
        for derive in self._derive:
            derive()

    def _check_pairs(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        """Check an adapter's pairs: SGLang ignores a half one, and a layer that it lacks."""
        for name, tensor in tensors.items():
            ending, other = (A, B) if name.endswith(A) else (B, A)
            layer = name.removesuffix(ending)
            partner, base = tensors.get(layer + other), self.shapes.get(layer.removeprefix(PEFT) + ".weight")
            if partner is None:
                raise WeightMismatch(f"{name} came without its {other[1:7]}", name)
            if self.shapes and base is None:
                raise WeightMismatch(f"{name} belongs to no layer of this model", name)
            if not tensor.is_floating_point() or tensor.dtype != partner.dtype:
                raise WeightMismatch(f"{name} is {tensor.dtype}, its partner {partner.dtype}", name)
            if not tensor.isfinite().all():
                raise WeightMismatch(f"{name} is not finite", name)
            if base is None:
                continue
            wanted = (config["r"], base[1]) if ending == A else (base[0], config["r"])
            if tuple(tensor.shape) != wanted:
                raise WeightMismatch(f"{name}: received shape {tuple(tensor.shape)}, expected {wanted}", name)
