"""LoRA adapters from a trainer, in memory, for engines started with --enable-lora and INSTEP_LORA=1.

A weight session brings the adapter to every worker (`engine.py`), which keeps its tensors here. vLLM loads an adapter
when a request names it. Each request without an adapter gets the trainer's name here, on any route, and vLLM's own
loader gets these tensors instead of files. So scheduling, CUDA graphs, caches and parallel layers treat it like any
adapter.
"""

from __future__ import annotations

import functools
import inspect
import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from instep_engine import LORA_VARIABLE
from instep_engine.manifest import WeightMismatch
from instep_engine.memory import Recorder
from instep_engine.vllm.async_llm import Loaded

logger = init_logger("vllm.instep")
REQUEST = LoRARequest("instep", 1, "instep: from the trainer, in memory")
PEFT, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"

_held: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None  # `Receiver.tensors`, peft's configuration
_base_stays = False  # the current session has brought an adapter, and no weight of the base


def session_begins() -> None:
    global _base_stays
    _base_stays = False


def install() -> None:
    """Let requests without an adapter name the trainer's, and vLLM's loader find it here. Once in each process."""
    from vllm.lora import model_manager
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.model_executor.layers.fused_moe import config as moe_config
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    if hasattr(InputProcessor.process_inputs, "__wrapped__"):
        return
    process, load = InputProcessor.process_inputs, WorkerLoRAManager._load_adapter
    layers = model_manager.get_supported_lora_modules
    signature = inspect.signature(process)

    @functools.wraps(process)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        if self.lora_config is not None and call.arguments.get("lora_request") is None:
            call.arguments["lora_request"] = Loaded.request or REQUEST
        return process(*call.args, **call.kwargs)

    @functools.wraps(load)
    def load_adapter(self: Any, lora_request: LoRARequest) -> LoRAModel:
        if lora_request.lora_path != REQUEST.lora_path:
            return load(self, lora_request)
        manager = self._adapter_manager
        if _held is None:  # no session has brought one yet: zeros leave the base unchanged
            rank = manager.lora_config.max_lora_rank
            return manager.create_dummy_lora(REQUEST.lora_int_id, rank, self.embedding_modules)
        return _model(manager, *_held)

    @functools.wraps(layers)
    def get_supported_lora_modules(model: torch.nn.Module) -> list[str]:
        # A trainer's adapter has only linear layers: neither token tables nor experts. With an adapter's output layer
        # vLLM would add zeros to all logits, and confuse those of a prompt with the rows that it samples from. On a CPU
        # the engine would crash.
        linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LinearBase)}
        return [name for name in layers(model) if name in linear]

    experts = getattr(moe_config, "FusedMoEConfig", None)
    if (about_experts := getattr(experts, "__post_init__", None)) is not None:

        @functools.wraps(about_experts)
        def as_without_adapters(self: Any) -> None:
            self.is_lora_enabled = False  # otherwise vLLM uses kernels for adapters: slower ones, and none on a CPU
            about_experts(self)

        experts.__post_init__ = as_without_adapters

    if (reset := getattr(LoRAModelRunnerMixin, "reset_lora_state", None)) is not None:  # 0.32 has it, 0.26 does not

        @functools.wraps(reset)
        def reset_lora_state(self: Any) -> None:
            # vLLM forgets all adapters at the end of a session, because the base may have changed.
            global _base_stays
            stays, _base_stays = _base_stays, False
            if not stays:
                reset(self)

        LoRAModelRunnerMixin.reset_lora_state = reset_lora_state

    InputProcessor.process_inputs, WorkerLoRAManager._load_adapter = process_inputs, load_adapter
    model_manager.get_supported_lora_modules = get_supported_lora_modules


class Layout(NamedTuple):
    """The place of a tensor: the number of the piece of memory, its first byte there, dtype and shape."""

    number: int
    start: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass
class Arrived:
    """The arrived part of an adapter.

    Attributes:
        tensors: on the device; B is already multiplied by alpha / rank.
        wholes: their memory, one piece for each piece that they came in; layout: the place of each tensor in it.
        source: the object they came in, if the next adapter may come in it. The same object then has the same form.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    wholes: list[torch.Tensor] = field(default_factory=list)
    layout: dict[str, Layout] = field(default_factory=dict)
    source: dict[str, torch.Tensor] | None = None


@dataclass
class Places:
    """Where vLLM keeps the adapter that it has loaded.

    Another adapter of the same shape is written there. That takes a tenth of the time: vLLM's loader parses hundreds of
    names, packs layers and clears their buffers.

    Attributes:
        adapter: peft's configuration.
        model, slot: vLLM's object of the adapter, and the number of its buffer.
        arrived: the tensors of this object: vLLM fills these buffers from there after it has used them for another one.
        copies: slices of the buffers, and the parts of `arrived` for them.
    """

    adapter: dict[str, Any]
    model: LoRAModel
    slot: int
    arrived: Arrived
    copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]]

    def are_those_of(self, manager: Any, adapter: dict[str, Any], new: Arrived) -> bool:
        """Return whether they are still in use, and fit the adapter that has arrived."""
        return (
            manager.lora_index_to_id[self.slot] == self.model.id
            and manager.get_adapter(self.model.id) is self.model
            and self.adapter == adapter
            and self.arrived.layout == new.layout
            and [whole.shape for whole in self.arrived.wholes] == [whole.shape for whole in new.wholes]
        )

    @torch.no_grad()
    def write(self, wholes: list[torch.Tensor]) -> None:
        for whole, new in zip(self.arrived.wholes, wholes, strict=True):
            whole.copy_(new)
        for buffers, sources in self.copies:
            torch._foreach_copy_(buffers, sources)


class Receiver:
    """A worker's side of a session with an adapter. Nothing that is in use changes before `load`.

    Args:
        shapes: those of the base's weights by name; empty if they are unknown.
    """

    def __init__(self, vllm_config: Any, model: torch.nn.Module, shapes: dict[str, tuple[int, ...]]):
        self._config, self._model, self._shapes = vllm_config, model, shapes | _packed(shapes)
        self._places: Places | None = None
        self._staged: Arrived | None = None  # the last adapter, if its memory is not that of `_places`
        self.clear()

    def clear(self) -> None:
        self._arrived, self._adapter = Arrived(), dict[str, Any]()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that have arrived in this session."""
        return self._arrived.tensors

    def receive(self, tensors: dict[str, torch.Tensor], adapter: dict[str, Any], lasting: bool = False) -> None:
        """Check tensors of the adapter that peft's configuration `adapter` describes, and keep copies of them.

        Args:
            lasting: whether `tensors` are views of memory that is used again, by the same object then.

        Raises:
            WeightMismatch: the engine does not accept adapters; a tensor belongs to no layer, has another rank or
                shape, or is not finite; `adapter` is malformed.
        """
        rank, num = adapter.get("r"), adapter.get("num_tensors")
        if not (type(rank) is type(num) is int and rank > 0 and isinstance(adapter.get("lora_alpha"), int | float)):
            raise WeightMismatch("the adapter's configuration has no rank, alpha or number of tensors")
        lora_config = self._config.lora_config
        if lora_config is None or not os.environ.get(LORA_VARIABLE) or lora_config.max_lora_rank < rank:
            ask = f"start it with {LORA_VARIABLE}=1, --enable-lora and --max-lora-rank (at least {rank})"
            raise WeightMismatch(f"this engine does not accept an adapter of rank {rank}: {ask}")
        if self.tensors and adapter != self._adapter:
            raise WeightMismatch("two buckets belong to different adapters", next(iter(tensors), None))
        self._adapter = adapter
        known, mapper = _layers(self._model.lora_manager), _mapper(self._model)
        places = self._places
        before = places.arrived.tensors if places is not None and places.adapter == adapter else {}
        for name, tensor in tensors.items():
            if name in before and before[name].shape == tensor.shape:
                continue
            layer = name.removeprefix(PEFT).removesuffix(A).removesuffix(B)
            base = self._shapes.get(f"{layer}.weight", ())
            if not (name.startswith(PEFT) and name.endswith((A, B))) or (self._shapes and len(base) != 2):
                raise WeightMismatch(f"{name} belongs to no layer of this model", name)
            if parse_fine_tuned_lora_name(name, mapper)[0].rpartition(".")[2] not in known:
                raise WeightMismatch(f"vLLM has no adapters for {layer} (remove it from --lora-target-modules)", name)
            if base:
                shape = (rank, base[1]) if name.endswith(A) else (base[0], rank)
                if tuple(tensor.shape) != shape:
                    raise WeightMismatch(f"{name}: received shape {tuple(tensor.shape)}, expected {shape}", name)
        first = not self.tensors
        copies = self._again(tensors) if first else {}
        if not copies:
            copies, self._staged = self._copied(tensors), None
        self._arrived.source = tensors if lasting and first else None
        finite = torch.stack(torch._foreach_norm(list(copies.values()))).isfinite().tolist() if copies else []
        if odd := next((name for name, is_finite in zip(copies, finite, strict=True) if not is_finite), None):
            raise WeightMismatch(f"{odd} is not finite", odd)
        scale = PEFTHelper.from_dict(adapter).vllm_lora_scaling_factor
        if scale != 1 and (to_scale := [tensor for name, tensor in copies.items() if name.endswith(B)]):
            torch._foreach_mul_(to_scale, scale)
        self.tensors.update(copies)

    def forget_source(self) -> None:
        """Release the memory that the last adapter came in."""
        self._staged = None
        if self._places is not None:
            self._places.arrived.source = None

    def _again(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies in the staged memory, if these are the same views of the same buckets; else None."""
        staged = self._staged
        if staged is None or staged.source is not tensors:
            return {}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
        for whole, storage in zip(staged.wholes, storages.values(), strict=True):
            whole.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        self._arrived = Arrived({}, list(staged.wholes), dict(staged.layout))
        return staged.tensors

    def _copied(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies on the device. Those of one bucket are copied at once, because there are hundreds."""
        device, numbers, new = self._model.lora_manager.device, dict[int, int](), self._arrived  # by address of memory
        copies: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            if (address := storage.data_ptr()) not in numbers:
                numbers[address] = len(new.wholes)
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                new.wholes.append(whole.to(device, copy=True))
            number, start = numbers[address], tensor.storage_offset() * tensor.element_size()
            new.layout[name] = Layout(number, start, tensor.dtype, tensor.shape)
            flat = new.wholes[number][start : start + tensor.nbytes]
            copies[name] = flat.view(tensor.dtype).view(tensor.shape)
        return copies

    def load(self) -> None:
        """Let requests use the adapter that has arrived.

        Raises:
            WeightMismatch: it is incomplete, or vLLM cannot load it.
        """
        global _base_stays, _held
        if len(self.tensors) != self._adapter["num_tensors"]:
            total = self._adapter["num_tensors"]
            raise WeightMismatch(f"{len(self.tensors)} of {total} tensors of the adapter were delivered")
        partners = {n.removesuffix(A) + B if n.endswith(A) else n.removesuffix(B) + A for n in self.tensors}
        for name in sorted(partners - self.tensors.keys()):
            raise WeightMismatch(f"{name} of the adapter was not delivered", name)
        before, _held = _held, (self.tensors, self._adapter)
        manager: Any = self._model.lora_manager
        try:
            places, self._places = self._places, None  # until it is done
            if places is not None and places.are_those_of(manager, self._adapter, self._arrived):
                places.write(self._arrived.wholes)
                _held = (places.arrived.tensors, self._adapter)
                if self._arrived.source is not None:
                    self._staged = self._arrived
            else:
                places, self._staged = self._load(manager), None
            self._places = places
        except (KeyError, ValueError, AssertionError, RuntimeError) as error:
            _held, self._staged = before, None
            raise WeightMismatch(f"vLLM cannot load this adapter: {error!r}") from error
        self.clear()
        _base_stays = True

    def _load(self, manager: Any) -> Places | None:
        """Let vLLM load the adapter. Return where it is, or None if some of it was not copied unchanged."""
        model = _model(manager, self.tensors, self._adapter)
        manager.remove_adapter(model.id)
        manager.add_adapter(model)
        layers = manager.modules.values()
        stacked = [t for layer in layers for t in (*layer.lora_a_stacked, *layer.lora_b_stacked)]
        recorder = Recorder(stacked)
        recorder.sources = dict(self.tensors)
        with recorder:
            manager.activate_adapter(model.id)
        if recorder.unknown or recorder.slices.keys() != self.tensors.keys():
            return None
        # torch copies a list at once if each pair is contiguous on a GPU, and otherwise one by one: so a list for each
        # kind.
        copies: dict[bool, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name, parts in recorder.slices.items():
            for part in parts:
                source = part.held(self.tensors[name])
                kind = copies.setdefault(part.view.is_contiguous() and source.is_contiguous(), ([], []))
                kind[0].append(part.view)
                kind[1].append(source)
        slot = manager.lora_index_to_id.index(model.id)
        logger.info_once("instep: further adapters of this shape are written where vLLM keeps this one")
        return Places(self._adapter, model, slot, self._arrived, list(copies.values()))


def _packed(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of unpacked weights of GPTQ or AWQ. Packed ones have inputs first; GPTQ packs along these."""
    out = {}
    for layer in [name.removesuffix("qweight") for name in shapes if name.endswith(".qweight")]:
        (rows, columns), num_out = shapes[f"{layer}qweight"], shapes[f"{layer}scales"][1]
        num_in = rows * (num_out // shapes[f"{layer}qzeros"][1]) if columns == num_out else rows
        out[f"{layer}weight"] = (num_out, num_in)
    return out


def _model(manager: Any, tensors: dict[str, torch.Tensor], adapter: dict[str, Any]) -> LoRAModel:
    """Return the adapter as vLLM's object, which refers to `tensors`; its scale is 1, because B has been multiplied."""
    logger.info("instep: an adapter of %d tensors goes through vLLM's own loader", len(tensors))
    return LoRAModel.from_lora_tensors(
        REQUEST.lora_int_id,
        tensors,
        PEFTHelper.from_dict({**adapter, "lora_alpha": adapter["r"], "use_rslora": False}),
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_mapper(manager.model),
        skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
    )


def _mapper(model: Any) -> Any:
    """Return the mapper of adapter names in vLLM's own loader."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    return mapper.get_unstacked_mapper() if hasattr(mapper, "get_unstacked_mapper") else mapper.get_rename_mapper()


def _layers(manager: Any) -> set[str]:
    """Return the last parts of the names of layers that adapters may have."""
    packed = manager.packed_modules_mapping
    return {part for name in manager.supported_lora_modules for part in packed.get(name, [name])}
