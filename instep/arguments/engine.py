"""Engines and the weight sync: kind and topology of the engines (a file of groups), and who may send requests."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from typing import Literal

from instep.algorithms.catalog import OFFLINE, ONLINE
from instep.arguments.concern import Given, Problem, Settings
from instep.arguments.flag import read_flags
from instep.engines.backend_choice import named_kind
from instep.engines.dialect import dialect_of
from instep.engines.keys import given_key
from instep.engines.kind import AUTO, all_kinds, kind_names
from instep.engines.topology import entries, file_of, num_tokens, parse, read, served_models
from instep.weights.way import AUTO as AUTO_WAY
from instep.weights.way import WAYS

ENGINE = read_flags(__file__, kinds=(AUTO, *kind_names()), ways=(AUTO_WAY, *WAYS))

_Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_DTYPES: dict[str, _Dtype] = {"auto": "auto", "float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
_DTYPES |= {"float": "float32", "half": "float16"}  # SGLang's other names
_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[\w.-]*\w)?", re.ASCII)


def read_topology(args: Settings) -> Iterator[Problem]:
    """Set `args.vllm_topology` from the file of groups. If it is wrong, rules that read it are skipped."""
    args.vllm_topology = None
    if args.vllm_config is None:
        return
    args.vllm_topology = read(args.vllm_config, where := file_of(args))
    size, dialect = args.rollout_num_gpus_per_engine, dialect_of(args)
    _, errors = parse(args.vllm_topology, where, size, args.hf_checkpoint, dialect)
    for error in errors:
        yield Problem(error.what, error.where, error.remedy)


def rollout_backend(args: Settings, given: Given) -> str:
    """Return the backend. `auto` becomes the kind of engine that a given flag belongs to, if there is one."""
    meant = (kind.name for kind in all_kinds() if named_kind(args) is None and kind.meant_by(args))
    return next(meant, args.rollout_backend)


def vllm_max_model_len(args: Settings, given: Given) -> int | None:
    """Return the most tokens of a sequence by the flag of the engine, vLLM's or SGLang's."""
    words = args.sglang_overrides.get("context_length")
    return num_tokens(words[-1], dialect_of(args).units) if words else args.vllm_max_model_len


def vllm_dtype(args: Settings, given: Given) -> Literal["auto", "float32", "bfloat16", "float16"]:
    """Return the dtype by the flag of the engine, vLLM's or SGLang's, under vLLM's name."""
    return _DTYPES.get(args.sglang_overrides.get("dtype", [""])[-1], args.vllm_dtype)


def port(args: Settings, given: Given) -> int | None:
    """Return the port of `instep serve`, by default that of vLLM."""
    return args.port or (8000 if args.command == "serve" else None)


def half_precision(args: Settings, given: set[str]) -> Iterator[Problem]:
    flag = f"{dialect_of(args).flag('dtype')} float16"
    if args.vllm_dtype == "float16" and args.command != "serve":
        what = "float16 gradients need a loss scale; the trainer has no loss scale, and engines use its dtype"
        yield Problem(what, flag, "use bfloat16 or float32")
    elif args.vllm_dtype == "float16" and args.rollout_backend == "embedded":
        what = "the embedded engine computes in float32 or bfloat16"
        yield Problem(what, flag, "use one of these dtypes, or --rollout-backend vllm")


def topology(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check the flags of the engines, their number, their models and their router."""
    if args.command in OFFLINE:
        return
    if (kind := named_kind(args)) is not None:
        for error in kind.refusals(args):
            yield Problem(error.what, error.where, error.remedy)
    dialect = dialect_of(args)
    file_flag, router = dialect.file_flag, dialect.flag("router_ip")
    if args.vllm_config is not None and args.prefill_num_servers is not None:
        what = "the file says which engines prefill"
        yield Problem(what, f"{file_flag} and --prefill-num-servers", "give one of the two")
    elif args.prefill_num_servers is not None and args.prefill_num_servers >= args.rollout_num_engines:
        what = f"{args.prefill_num_servers} of {args.rollout_num_engines} engines prefill: no engine is left to decode"
        yield Problem(what, "--prefill-num-servers", "raise --rollout-num-gpus, or lower it")
    if args.rollout_external_engine_addrs and (args.vllm_config or args.prefill_num_servers):
        flag = file_flag if args.vllm_config else "--prefill-num-servers"
        yield Problem("no engine is started", f"{flag} and --rollout-external-engine-addrs", "give one of the two")
    if (args.vllm_router_ip is None) != (args.vllm_router_port is None):
        yield Problem("only one is given", f"{router} and {router.replace('ip', 'port')}", "give both")
    if args.command == "serve" and "port" in given and args.vllm_router_ip is not None:
        yield Problem("requests go to your router", f"--port and {router}", "give one of the two")
    disaggregated = [model for model in served_models(args) if model.disaggregated]
    if args.vllm_router_ip is not None and disaggregated:
        what = "a router takes prefill and decode engines only when it starts"
        yield Problem(what, router, "leave it out: instep starts it")
    if args.pause_mode == "keep" and disaggregated:
        what = "a KV cache on its way from a prefill to a decode engine would be of the old weights after a sync"
        yield Problem(what, "--pause-mode keep with prefill and decode engines", "use abort or wait")
    if args.ref_served_model is not None and args.command in ONLINE:
        yield from _served_reference(args)
    if args.sglang_enable_ep_moe:
        what = "is read as --sglang-ep-size with the tensor parallelism of each engine: SGLang has it no longer"
        yield Problem(what, "--sglang-enable-ep-moe", refused=False)
    if args.vllm_topology is None:
        return
    models = entries(args)
    if args.vllm_router_ip is not None and len(models) > 1:
        what = f"each of the {len(models)} models needs its own router"
        yield Problem(what, f"{router} with {file_flag}", "leave it out: instep starts them")
    if not args.colocate and "rollout_num_gpus" in given and args.rollout_num_gpus != args.topology_num_gpus:
        what = f"{args.rollout_num_gpus}, but the groups of {args.vllm_config} take {args.topology_num_gpus}"
        yield Problem(what, "--rollout-num-gpus", "leave it out: the file decides")
    for where, model in models:
        path = model.get("model_path")
        if not args.planned and path is not None and not os.path.isfile(os.path.join(path, "config.json")):
            what = f"{path} is not a Hugging Face folder: it has no config.json"
            yield Problem(what, f"{where}.model_path", "give the folder of a checkpoint")
    trains = args.command in ONLINE and not args.debug_rollout_only
    if trains and not any(model.get("update_weights", True) for _, model in models):
        what = "no model gets the trainer's weights"
        yield Problem(what, file_of(args), "set update_weights: true for one model")


def api_keys(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check the given API key, whether any server or request uses it, and `--allowed-hosts`."""
    for host in args.allowed_hosts or ():
        if not _HOST_NAME.fullmatch(host) and not _is_address(host):
            what = f"{host!r} is neither a name nor an address of a host"
            yield Problem(what, "--allowed-hosts", "leave out scheme, port and path: rl.example.org 10.0.0.7")
    if args.allowed_hosts and args.rollout_external_engine_addrs and not args.no_api_key:
        what = "no server of this run checks host names: it did not start its engines"
        yield Problem(what, "--allowed-hosts", "start them with INSTEP_ALLOWED_HOSTS in their environment")
    foreign = args.vllm_router_ip or args.rollout_external_engine_addrs or args.opd_teacher_url
    unread = args.no_api_key if args.command == "serve" else not foreign
    if args.api_key_file is None and unread:
        return
    if args.command == "serve" and args.no_api_key:
        yield Problem("no request needs the key", "--api-key-file and --no-api-key", "give one of the two")
    elif args.command != "serve" and not foreign:
        what = "a run makes the key of its own engines, and no external engine, router or teacher is named"
        yield Problem(what, "--api-key-file", "leave it out (docs/security.md says how hooks get the run's key)")
    else:
        given_key(args)


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _served_reference(args: Settings) -> Iterator[Problem]:
    """Check that the reference is a served model whose weights do not change."""
    found = {model.name: model for model in served_models(args)} if args.vllm_topology is not None else {}
    flag, model = f"--ref-served-model {args.ref_served_model}", found.get(args.ref_served_model or "")
    if args.debug_train_only or args.debug_rollout_only:
        yield Problem("this run has no engine or no trainer", flag, "leave it out")
    elif model is None:
        frozen = [name for name, model in found.items() if not model.update_weights]
        names = f"name one of {', '.join(frozen)}" if frozen else "add one with update_weights: false"
        yield Problem("no such model is served", flag, f"{names} ({dialect_of(args).file_flag})")
    elif model.update_weights:
        yield Problem("gets the trainer's weights, so it cannot be the reference", flag, "set update_weights: false")


RESOLVERS = (port, vllm_max_model_len, vllm_dtype, rollout_backend)
RULES = (half_precision, topology, api_keys)
