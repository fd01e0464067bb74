"""LoRA: an adapter is trained; the model does not change."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from instep.algorithms.catalog import ONLINE
from instep.arguments.concern import Given, Problem, Settings
from instep.arguments.flag import read_flags
from instep.arguments.model import known_config
from instep.engines.backend_choice import named_kind
from instep.engines.dialect import dialect_of
from instep.engines.flags import passed_on
from instep.engines.kind import served_dtype
from instep.models.images import has_language_model
from instep.models.shape import EXPERTS, KV_B
from instep.weights.way import RESTART, SINGLE_COPY

LORA = read_flags(__file__)


def lora_alpha(args: Settings, given: Given) -> int | None:
    return args.lora_alpha if args.lora_alpha is not None or not args.lora_rank else 2 * args.lora_rank


RESOLVERS = (lora_alpha,)


def quantization(args: Settings) -> str:
    """Return the quantization of the base in the engines; "" if there is no quantization."""
    words = passed_on(args).get("quantization", [])
    return words[-1] if len(words) > 1 else ""


def companions(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that flags about an adapter are given only with an adapter."""
    if args.lora_rank:
        return
    if args.weight_sync == "lora" and not args.debug_rollout_only:
        yield Problem("there is no adapter", "--weight-sync lora", "give --lora-rank, or another --weight-sync")
    if args.save_hf_as == "adapter":
        yield Problem("there is no adapter", "--save-hf-as adapter", "give --lora-rank")


def adapter(args: Settings, given: set[str]) -> Iterator[Problem]:
    if not args.lora_rank:
        return
    if args.moe_router_bias_update_rate:
        what, where = "moves biases of the base, which no adapter has", "--moe-router-bias-update-rate with --lora-rank"
        yield Problem(what, where, "leave it out")
    if args.lora_dropout:
        what = "the trainer must compute the engine's distribution, and the engine has no dropout"
        yield Problem(what, f"--lora-dropout {args.lora_dropout}", "leave it out")
    if args.weight_sync == SINGLE_COPY:
        what = "the engine would need an adapter that is not in its memory"
        yield Problem(what, "--weight-sync single-copy with --lora-rank", "use --weight-sync lora")
    if args.save_hf_as == "adapter" and args.save_hf is None:
        yield Problem("there is no folder to save to", "--save-hf-as adapter", "give --save-hf")


def adapter_way(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check `--weight-sync lora`: it sends only the adapter, so engines need the same base and room for the adapter."""
    if args.weight_sync != "lora" or not args.lora_rank:
        return
    if args.ref_load is not None and args.ref_load != args.hf_checkpoint:
        what = f"the adapter's base is --ref-load {args.ref_load}, but engines load {args.hf_checkpoint}"
        yield Problem(what, "--weight-sync lora", "name the base as --hf-checkpoint, or use --weight-sync shm")
    if EXPERTS in (args.lora_target_modules or ()):
        what, where = "engines take no adapters of experts", f"--lora-target-modules {EXPERTS} with --weight-sync lora"
        yield Problem(what, where, "use --weight-sync shm, which sends merged weights")
    on_vllm = args.rollout_backend == "vllm" or (args.rollout_backend == "auto" and args.device == "cuda")
    if on_vllm and args.command in ONLINE and any(n.endswith(KV_B) for n in args.lora_target_modules or ()):
        what = f"vLLM computes latent attention with the loaded weight of {KV_B}, without an adapter"
        yield Problem(what, f"--lora-target-modules {KV_B}", "leave it out, or use --weight-sync shm")
    elsewhere = on_vllm or args.rollout_backend == "sglang"
    if elsewhere and args.command in ONLINE and has_language_model(known_config(args)):
        what = "an adapter names the layers of the language model alone, but the engine loads it with layers for images"
        yield Problem(what, "--weight-sync lora", "use --weight-sync shm, which sends merged weights")
    words = passed_on(args)
    largest = words.get("max_lora_rank", ["", ""])[-1]
    if largest.isdigit() and int(largest) < args.lora_rank:
        what = f"{largest} is below --lora-rank {args.lora_rank}"
        yield Problem(what, dialect_of(args).flag("max_lora_rank"), "leave it out: --weight-sync lora sets it")
    if words.get("enable_lora", [""])[0].startswith("--no-"):
        yield Problem("is needed by --weight-sync lora", "--vllm-no-enable-lora", "leave it out")


def quantized(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that engines do not quantize trained weights: these would differ from the trainer's. Adapters may train."""
    how = quantization(args)
    if how and args.command in ONLINE and not (args.lora_rank and args.weight_sync == "lora"):
        what = f"an engine with weights in {how} does not hold the trained weights"
        remedy = "train an adapter (--lora-rank with --weight-sync lora), or leave it out"
        yield Problem(what, f"{dialect_of(args).flag('quantization')} {how}", remedy)


def quantized_base(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check a quantized checkpoint: an engine that keeps it quantized cannot load other weights while it runs."""
    kind, trains = named_kind(args), args.command in ONLINE and not (args.debug_train_only or args.debug_rollout_only)
    if not trains or kind is None or kind.dequantizes or not known_config(args).get("quantization_config"):
        return
    where = f"--hf-checkpoint {args.hf_checkpoint}"
    if args.weight_sync not in ("lora", RESTART):
        folder = Path(args.hf_checkpoint)
        words = ["instep", "convert", "fp8-to-bf16", "--hf-checkpoint", str(folder), "--save", f"{folder.name}-bf16"]
        what = f"{kind.title} keeps this checkpoint quantized, and cannot load the trained weights"
        remedy = "train an adapter (--lora-rank with --weight-sync lora); or use --weight-sync restart, which starts "
        remedy += f"engines on full weights; or convert the checkpoint first: `{shlex.join(words)}`"
        yield Problem(what, f"{where} with --weight-sync {args.weight_sync}", remedy)
    elif served_dtype(args) == "float32":
        yield Problem(f"{kind.title} computes with quantized weights only in 16 bits", where, "use --precision bf16")


RULES = (companions, adapter, adapter_way, quantized, quantized_base)
