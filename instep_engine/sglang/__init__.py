"""instep's additions to stock SGLang, through its own plugins and hooks. The plugin does not import instep.

SGLang calls `register` in its HTTP server and in each scheduler (entry point `sglang.srt.plugins`). It only logs a hook
whose target is missing, so `check` proves at the start that all are in force.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import typing
from typing import Any

from pydantic import TypeAdapter

from instep_engine import MEMORY_VARIABLE
from instep_engine.guard import KEY_VARIABLE
from instep_engine.sglang.drafter import check_request
from instep_engine.sglang_form import MORE_LABEL

SERVER = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"
UPDATERS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATE = f"{UPDATERS}.update_weights_from_tensor"
RESOLVE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_and_resolve_lora"
ADAPTERS = "sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter_from_tensors"
SEEDS = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
SAMPLE = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"
DRAFTS = "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics"
TOKENIZER = "sglang.srt.managers.scheduler.Scheduler.init_tokenizer"
THREADS = "sglang.srt.model_loader.utils.should_async_load"
HASH = "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32"
START = "sglang.srt.entrypoints.engine._set_envs_and_config"
FORKS = "SGLANG_USE_CPU_ENGINE"  # instep sets it for engines on a CPU


def register() -> None:
    if KEY_VARIABLE not in os.environ:  # another user's server, in an environment that happens to have instep
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from instep_engine.sglang.drafter import count
    from instep_engine.sglang.sampling import add_seeds, murmur_hash32, sample
    from instep_engine.sglang.weights import in_threads, load_adapter, update

    HookRegistry.register(SERVER, serve, HookType.BEFORE)
    HookRegistry.register(VALIDATE, validate, HookType.BEFORE)
    HookRegistry.register(GENERATE, expand, HookType.BEFORE)
    HookRegistry.register(RESOLVE, name_adapter, HookType.BEFORE)
    HookRegistry.register(SCHEDULER, check, HookType.BEFORE)
    HookRegistry.register(SCHEDULER, share, HookType.AFTER)
    HookRegistry.register(UPDATE, update, HookType.AROUND)
    HookRegistry.register(ADAPTERS, load_adapter, HookType.AROUND)
    HookRegistry.register(THREADS, in_threads, HookType.AROUND)
    HookRegistry.register(SEEDS, add_seeds, HookType.AFTER)
    HookRegistry.register(SAMPLE, sample, HookType.REPLACE)
    HookRegistry.register(DRAFTS, count, HookType.AFTER)  # for a metric: `check` does without
    HookRegistry.register(TOKENIZER, end_at_special_tokens, HookType.AFTER)
    if os.environ.get(FORKS) == "1":
        HookRegistry.register(HASH, murmur_hash32, HookType.REPLACE)
        HookRegistry.register(START, fork, HookType.AFTER)
        HookRegistry.register(SCHEDULER, attend_to_latents, HookType.BEFORE)


def targets() -> list[str]:
    always = SERVER, VALIDATE, GENERATE, RESOLVE, SCHEDULER, UPDATE, ADAPTERS, THREADS, SEEDS, SAMPLE, TOKENIZER
    return [*always, *((HASH, START) if os.environ.get(FORKS) == "1" else ())]


def check(*_: Any, **__: Any) -> None:
    """Raise RuntimeError if this SGLang lacks the target of a hook."""
    missing = [name for name in targets() if not hasattr(_function(name), "__wrapped__")]
    if missing:
        from sglang.version import __version__

        raise RuntimeError(f"instep: SGLang {__version__} has no {', '.join(missing)}, which the weight sync needs")


def share(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """Share the weights with the trainer (`--weight-sync single-copy`), before the server is ready."""
    if MEMORY_VARIABLE in os.environ:
        from instep_engine.sglang.single_copy import Shared

        Shared.of(scheduler.tp_worker.model_runner.weight_updater)


def _function(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def serve(server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> None:
    """Add instep's routes before the server listens."""
    from sglang.srt.entrypoints import http_server

    from instep_engine.sglang.server import add_routes

    if server_args.tokenizer_worker_num != 1 or server_args.smg_grpc_mode or server_args.grpc_port is not None:
        raise RuntimeError("instep: its keys and control routes need one tokenizer worker, and no gRPC server")
    check()
    tokenizer_manager.instep = add_routes(http_server.app, tokenizer_manager)


def validate(manager: Any, obj: Any, input_ids: Any) -> None:
    """Refuse token ids outside the vocabulary, of which SGLang's scheduler would die. Cap the length of a response.

    SGLang would refuse a request that may exceed the context. instep's other engines let it end there.
    """
    size, params = manager.model_config.vocab_size, obj.sampling_params
    if isinstance(params, dict) and manager.server_args.speculative_algorithm and manager.is_generation:
        check_request(obj)
    if input_ids is None or not len(input_ids):
        return
    if not 0 <= min(input_ids) <= max(input_ids) < size:
        raise ValueError(f"the prompt has a token id outside the vocabulary of {size}")
    room = manager.context_len - manager.num_reserved_tokens - len(input_ids)
    if not isinstance(params, dict):
        return
    seed = params.get("sampling_seed")
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 1 << 63):
        raise ValueError(f"sampling_seed {seed!r} is no whole number from 0 to 2^63 - 1")
    if (params.get("max_new_tokens") or 0) > room > 0:
        obj.sampling_params = {**params, "max_new_tokens": room}  # a batch shares the other one


def name_adapter(manager: Any, obj: Any) -> None:
    """Give a request the trainer's adapter, when no pause holds it any more."""
    if not manager.instep.adapter or obj.lora_path:
        return
    obj.lora_path = manager.instep.adapter
    if not obj.is_single:
        obj.lora_path = [manager.instep.adapter] * (obj.batch_size * getattr(obj, "parallel_sample_num", 1))


def expand(manager: Any, obj: Any, request: Any = None) -> None:
    """Add to a request what sglang-router would have dropped. Make a batch of a request for n responses.

    Response i gets `sampling_seed + i`; SGLang would sample n equal ones. A client cannot send such a batch through
    sglang-router, which takes one set of sampling parameters.
    """
    labels = getattr(obj, "custom_labels", None) or {}  # a request for an embedding has none
    if more := labels.pop(MORE_LABEL, None):
        for name, value in TypeAdapter(dict[str, Any]).validate_json(more).items():
            setattr(obj, name, _field(obj.__class__, name).validate_python(value))
    if isinstance(obj.sampling_params, list):
        return
    params = obj.sampling_params or {}
    n = params.get("n") or 1
    prompt = obj.text if obj.text is not None else obj.input_ids
    if n == 1 or not prompt or (not isinstance(prompt, str) and isinstance(prompt[0], list)):
        return
    seed, rest = params.get("sampling_seed"), {name: value for name, value in params.items() if name != "n"}
    obj.sampling_params = [rest if seed is None else {**rest, "sampling_seed": seed + i} for i in range(n)]
    if obj.text is not None:
        obj.text = [obj.text] * n
    else:
        obj.input_ids = [obj.input_ids] * n


@functools.cache
def _field(request: type, name: str) -> TypeAdapter[Any]:
    """Return what checks a field of a request, as SGLang's route does in a body: its scheduler would die of others."""
    hints = typing.get_type_hints(request)
    if name not in hints:
        raise ValueError(f"custom_labels[{MORE_LABEL!r}]: SGLang has no field {name!r}")
    return TypeAdapter(hints[name])


def end_at_special_tokens(result: Any, scheduler: Any) -> None:
    """Let only special tokens of the tokenizer end a response, of those that the generation config lists.

    A config that was never set says 0, which is an ordinary token of many tokenizers, such as "!".
    """
    config, tokenizer = scheduler.model_config, scheduler.tokenizer
    if config.hf_eos_token_id and tokenizer is not None:
        special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
        config.hf_eos_token_id = config.hf_eos_token_id & special or None


def attend_to_latents(*_: Any, **__: Any) -> None:
    """Let latent attention (DeepSeek) read its own cache in a prompt, too: `torch_native` has no other form of it."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def fork(*_: Any, **__: Any) -> None:
    """Let the server's processes be forked from it on a CPU: each would import SGLang again (12 to 24 s)."""
    import multiprocessing

    multiprocessing.set_start_method("fork", force=True)
