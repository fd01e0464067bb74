"""Which flags of ranks, engines and their places go together."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from instep.algorithms.catalog import OFFLINE, algorithm_of
from instep.arguments.algorithm.critic_rules import ADD_CRITIC, NO_CRITIC
from instep.arguments.args import Args
from instep.arguments.parser import Problem
from instep.cluster.engine_plan import plan_engines
from instep.cluster.placement import make_plan, num_critic_gpus
from instep.errors import ConfigError


def parallel(args: Args, given: set[str]) -> Iterator[Problem]:
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if args.world_size % model:
        yield Problem(
            f"TP {args.tensor_model_parallel_size} x PP {args.pipeline_model_parallel_size} = {model} does not divide "
            f"{args.world_size} trainer ranks",
            "--actor-num-gpus-per-node",
            f"use a multiple of {model}",
        )
    if args.train_backend == "hf" and model > 1:
        yield Problem(
            "the hf backend shards with FSDP2 only",
            "--tensor-model-parallel-size and --pipeline-model-parallel-size",
            "use --train-backend megatron",
        )
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        yield Problem("needs tensor parallelism", "--sequence-parallel", "leave it out, or raise TP")
    if args.recompute_granularity == "full" and args.recompute_method is None and args.train_backend == "megatron":
        yield Problem("full recomputation needs a method", "--recompute-method", "use uniform")
    if args.use_distributed_optimizer and args.train_backend == "hf":
        yield Problem("FSDP2 spreads the optimizer anyway", "--use-distributed-optimizer", "leave it out")
    if args.megatron_overrides and args.train_backend == "hf":
        names = ", ".join(sorted(args.megatron_overrides))
        yield Problem(f"{names}: only megatron-core has it", "--train-backend hf", "leave it out")
    cores = os.cpu_count() or 1
    most = 2 * cores  # ranks that share a core are slow, but work
    ranks = args.world_size + num_critic_gpus(args)
    if args.device == "cpu" and args.cluster == "local" and ranks > most:
        yield Problem(
            f"{ranks} trainer ranks on {cores} CPU cores",
            "--actor-num-gpus-per-node",
            f"use at most {most}; 1 is usual on a CPU",
        )


def engines(args: Args, given: set[str]) -> Iterator[Problem]:
    if args.command in OFFLINE:
        return
    if args.rollout_backend == "embedded" and args.rollout_num_gpus_per_engine > 1 and args.vllm_topology is None:
        what = f"{args.rollout_num_gpus_per_engine} GPUs, but the embedded engine uses one"
        yield Problem(what, "--rollout-num-gpus-per-engine", "use 1, or --rollout-backend vllm")
    addresses = args.rollout_external_engine_addrs or ()
    for address in sorted({a for a in addresses if addresses.count(a) > 1}):
        yield Problem(f"{address} stands there twice", "--rollout-external-engine-addrs", "name each engine once")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdigit():
            what = f"'{address}' is no HOST:PORT"
            yield Problem(what, "--rollout-external-engine-addrs", "write it like 127.0.0.1:8000")
        elif args.sync_way == "shm" and host not in ("127.0.0.1", "localhost") and args.command == "train":
            remedy = "use --sync-way disk (through --run-dir, a folder that both hosts see)"
            yield Problem(f"shared memory does not reach {address}", "--rollout-external-engine-addrs", remedy)
    if args.rollout_external_engine_addrs and args.colocate:
        yield Problem("engines that run already have GPUs of their own", "--colocate", "leave it out")


def placement(args: Args, given: set[str]) -> Iterator[Problem]:
    """Where everything goes."""
    for name in ("critic_num_nodes", "critic_num_gpus_per_node"):
        if name in given and not algorithm_of(args).has_critic:
            yield Problem(NO_CRITIC, "--" + name.replace("_", "-"), ADD_CRITIC)
    local = args.command != "plan" and args.cluster == "local"
    if local and args.actor_num_nodes > 1:
        yield Problem("the local cluster is one host", "--actor-num-nodes", "use --cluster ray, or 1")
    for name in ("ray_address", "num_gpus_per_node"):
        if local and name in given:
            yield Problem("has no effect without --cluster ray", "--" + name.replace("_", "-"), "give both")
    if args.command != "plan" and not local and importlib.util.find_spec("ray") is None:
        remedy = "pip install 'instep[ray]' on every host, or leave --cluster out on one host"
        yield Problem("Ray is not installed here", "--cluster ray", remedy)
    try:
        plan, planned = make_plan(args), plan_engines(args)
    except ConfigError as error:
        yield Problem(error.what, error.where, error.remedy)
        return
    homes = {plan.actor[0].node} if plan.actor else set()
    away = [engine for engine in planned if engine.update_weights and {s.node for s in engine.slots} - homes]
    if homes and away and args.command == "train" and args.sync_way == "shm":
        yield Problem(
            f"{away[0].name} is planned on another host than rank 0 of the trainer (see `instep plan`), and shared "
            "memory does not reach it",
            "--sync-way shm with --cluster ray",
            "use --sync-way disk (through --run-dir, a folder that all hosts share), or --colocate; nccl comes later",
        )
