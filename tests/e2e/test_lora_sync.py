"""The way `lora`: an adapter reaches engines exactly, also real vLLM, and what is wrong with one is named.

A worker and an engine are processes; corruption happens between them, as in `test_sync_proof.py`.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.controller.role import RoleTrainer
from instep.controller.sync.session import Session
from instep.controller.sync.weight_sync import WeightSync
from instep.engines.engine import Engine
from instep.engines.http import get_json
from instep.errors import SyncError
from instep.training import lr_schedule
from tests.assets import make_checkpoint
from tests.distributed.helpers import started_workers
from tests.e2e.commands import grpo_arguments, on_vllm, sync_folder
from tests.e2e.test_sync_proof import tamper, train_once

A = "base_model.model.model.layers.0.self_attn.{}_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")
KINDS = ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)]
MEGATRON = ["embedded megatron", pytest.param("vllm megatron", marks=pytest.mark.vllm)]
SLOW = [pytest.mark.vllm, pytest.mark.slow]
# Tensor parallel; and with base and adapter in one product, as on a GPU.
TWO = [pytest.param(name, marks=SLOW) for name in ("vllm of two", "vllm of two, joined")]
TWO_RANKS = "--train-backend megatron --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2".split()
TWO_RANKS += ["--sequence-parallel", "--use-distributed-optimizer"]
ONE_PRODUCT = ["--vllm-additional-config", '{"instep_adapter": 1}']


@pytest.fixture(scope="module", params=[*KINDS, *TWO])
def stack(request, tiny, tmp_path_factory):
    """Workers with an adapter (one of hf, or two of megatron, TP), and one engine that began with the same base."""
    folder = tmp_path_factory.mktemp("stack")
    kind, _, form = request.param.partition(" ")
    two, megatron = form.partition("of two")[1] and form, form == "megatron"
    more = on_vllm(2 if two else 1) if kind == "vllm" else []
    more += ["--rollout-num-gpus-per-engine", "2"] if two else []
    more += TWO_RANKS if megatron else []
    more += ONE_PRODUCT if "joined" in two else []
    words = ["--lora-rank", "4", "--lora-alpha", "6", "--weight-sync", "lora", *more, "--engine-start-timeout", "300"]
    model = make_checkpoint(folder / "hf", head_dim=32)
    args = parse(grpo_arguments(tiny, folder, "--hf-checkpoint", str(model), *words)[1:], "train")
    args = args.replace(device="cpu", precision="fp32", rollout_backend=kind)
    workers = started_workers(args, "actor", args.world_size, folder / "logs")
    engine = start_engine(args, plan_engines(args)[0], num_threads=1, log_dir=folder / "logs")
    try:
        requests = [(args, r, args.world_size, str(folder / "rendezvous"), 1) for r in range(args.world_size)]
        layout = workers.call("setup", per_rank=requests, timeout=300)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 1))
        actor.load_weights(model)
        engine.wait_ready(300)
        yield args, actor, engine
    finally:
        workers.close()
        engine.stop()


@pytest.fixture
def sync(stack, tmp_path):
    args, actor, engine = stack
    syncs = WeightSync(args, actor, args.weight_sync, sync_folder(args), vocab_size=50, max_len=128)
    syncs.engine_scores = lambda: syncs.proof.engine_scores(engine, Session(args, actor, [engine], 0, tmp_path))
    yield syncs
    syncs.close()


def whole_loads(args) -> int:
    """How many adapters vLLM's own loader has taken, which takes long."""
    log = Path(args.hf_checkpoint).parent / "logs" / "engine-0.log"
    return log.read_text().count("goes through vLLM's own loader")


@pytest.mark.parametrize("stack", [*KINDS, *TWO, *MEGATRON], indirect=True)
def test_the_adapter_alone_travels_and_each_step_of_it_is_proven(stack, sync):
    args, actor, engine = stack
    begun = sync.run([engine])
    assert begun.num_tensors == 2 * 7 * 2 and begun.num_bytes < 100_000  # A and B of 7 layers in 2 blocks
    scores, loads = [sync.engine_scores()], whole_loads(args)
    for lr in (1e-2, 1e-3):
        train_once(actor.workers, lr)
        result = sync.run([engine])
        scores.append(sync.engine_scores())
        assert result.proven.last.largest <= 1e-5 * max(1.0, *map(abs, scores[-1])), result
    assert scores[0] != scores[1] != scores[2]
    if args.rollout_backend == "vllm":
        log = (Path(args.hf_checkpoint).parent / "logs" / "engine-0.log").read_text()
        assert "adapters of this shape are written where" in log
        assert loads == whole_loads(args) > 0  # vLLM has kept the first one over the ends of sessions
        joined = "base and adapter in one product in 8 of 8 layers" in log
        assert joined == ("additional_config" in args.vllm_overrides)
    sync.run([engine], "lora_disk")  # the golden way: the same adapter as a folder, by the engine's own loader
    assert sync.engine_scores() == scores[2]


def test_an_adapter_in_buckets_that_both_have_open_is_the_same(stack, sync, monkeypatch):
    """As on GPUs that trainer and engines share. No engine pauses before all of the adapter is there."""
    args, actor, engine = stack
    update, paused = Engine.update, []

    def watched(self, info, *, timeout):
        paused.append((info["backend"], get_json(f"{self.url}/is_paused", 10.0)["is_paused"]))
        update(self, info, timeout=timeout)
        paused.append((info["backend"], get_json(f"{self.url}/is_paused", 10.0)["is_paused"]))

    monkeypatch.setattr(Engine, "update", watched)
    loads = []
    for lr in (1e-2, 1e-3, 1e-2, 1e-3):
        train_once(actor.workers, lr)
        result = sync.run([engine], "lora_ipc")
        loads.append(whole_loads(args))
        assert result.num_tensors == 28 and result.proven.last.rms <= result.proven.tolerance
        assert result.seconds_of["paused"] > result.seconds_of["load"]  # which counts as of the pause
    assert paused == [("lora_ipc", False)] * 8 and len(set(loads)) == 1
    monkeypatch.undo()
    scores = sync.engine_scores()
    whole = sync._args
    for size in (20_000, 20_000, 1 << 30):  # several buckets, and again one
        sync._args = whole.replace(update_weight_buffer_size=size)
        sync.run([engine], "lora_ipc")
        assert sync.engine_scores() == scores
    for way in ("lora", "lora_disk"):
        sync.run([engine], way)
        assert sync.engine_scores() == scores


@pytest.mark.parametrize("stack", ["embedded", pytest.param("vllm", marks=SLOW), *TWO], indirect=True)
def test_merged_weights_give_the_same_scores(stack, sync, tiny, tmp_path):
    """An engine that gets the merged weights by way of a checkpoint scores as one with base and adapter."""
    args, actor, engine = stack
    train_once(actor.workers, 1e-2)
    sync.run([engine])
    adapted = sync.engine_scores()
    actor.export_hf(tmp_path / "merged")
    merged_args = args.replace(hf_checkpoint=str(tmp_path / "merged"), weight_sync="disk")
    other = start_engine(merged_args, plan_engines(merged_args)[0], num_threads=1, log_dir=tmp_path)
    try:
        other.wait_ready(300)
        merged = sync.proof.engine_scores(other, Session(args, actor, [other], 0, tmp_path))
    finally:
        other.stop()
    assert max(abs(a - b) for a, b in zip(adapted, merged, strict=True)) <= 1e-5 * max(1.0, *map(abs, merged))


@pytest.mark.vllm
@pytest.mark.parametrize("stack", ["vllm"], indirect=True)
def test_requests_of_every_route_and_name_reach_the_adapter(stack, sync, tiny):
    args, actor, engine = stack
    prompt, paths = [5, 6, 7, 8, 9, 10], ("/inference/v1/generate", "/v1/completions")

    def greedy(path: str) -> list[float]:
        common: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "logprobs": 0}
        if path == paths[0]:
            answer = engine.post(path, {"token_ids": prompt, "sampling_params": common}, timeout=60)
            return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]
        answer = engine.post(path, {"model": args.hf_checkpoint, "prompt": prompt, **common}, timeout=60)
        return answer["choices"][0]["logprobs"]["token_logprobs"]

    greedy(paths[0])  # before the first session, or after one: no adapter is needed for an answer

    def chat() -> list[float]:
        """By the name that agents know: the folder of --hf-checkpoint."""
        messages = [{"role": "user", "content": "1+2=?"}]
        body = {
            "model": args.hf_checkpoint,
            "messages": messages,
            "max_tokens": 4,
            "temperature": 0.0,
            "logprobs": True,
        }
        answer = engine.post("/v1/chat/completions", body, timeout=60)
        return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]

    sync.run([engine])
    before, said = [greedy(path) for path in paths], chat()
    train_once(actor.workers, 1e-2)
    sync.run([engine])
    after = [greedy(path) for path in paths]
    assert before[0] != after[0] and said != chat()
    for found in (before, after):
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=1e-5, atol=1e-5)


@pytest.mark.vllm
@pytest.mark.parametrize("stack", ["vllm"], indirect=True)
def test_the_probe_is_scored_among_requests_of_a_rollout(stack, sync):
    """vLLM's output layer with an adapter would take the probe's logits for those of the rows that are sampled."""
    _, actor, engine = stack
    sync.run([engine])
    alone = sync.engine_scores()
    words = {"max_tokens": 100, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": [5, 6, 7, 8], "sampling_params": words}
    scored = threading.Event()

    def client() -> list[int]:
        """The lengths of answers, one request after the other until the probes have been scored."""
        lengths = []
        while not scored.is_set():
            (answer,) = engine.post("/inference/v1/generate", body, timeout=120)["choices"]
            lengths.append(len(answer["token_ids"]))
        return lengths

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client) for _ in range(8)]
        try:
            found = [sync.engine_scores() for _ in range(3)]
        finally:
            scored.set()
        assert all(set(running.result()) == {100} for running in clients)
    for scores in found:
        torch.testing.assert_close(torch.tensor(scores), torch.tensor(alone), rtol=1e-5, atol=1e-5)


# ---- faults ----------------------------------------------------------------------------------------------------------


def records(manifest: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    return [next(t for t in manifest["tensors"] if t["name"] == name) for name in names]


def with_names_swapped(manifest):
    tensors = [dict(t) for t in manifest["tensors"]]
    k, v = records({"tensors": tensors}, B.format("k"), B.format("v"))
    k["name"], v["name"] = v["name"], k["name"]
    return {**manifest, "tensors": tensors}


def with_bytes(manifest, change):
    """The manifest of a bucket in which `change` has edited a tensor, with the digest of what it holds now."""
    from instep_engine.manifest import tensor_bytes, tensor_digest

    (record,) = records(manifest, B.format("q"))
    path, place = Path(manifest["path"]), slice(record["offset"], record["offset"] + record["nbytes"])
    data = bytearray(path.read_bytes())
    tensor = torch.frombuffer(data[place], dtype=getattr(torch, record["dtype"])).view(record["shape"]).clone()
    tensor = change(tensor).contiguous()
    data[place] = tensor_bytes(tensor)
    path.write_bytes(data)
    own = {**record, "digest": tensor_digest(tensor), "shape": list(tensor.shape)}
    return {**manifest, "tensors": [own if t["name"] == own["name"] else t for t in manifest["tensors"]]}


def with_nan(tensor):
    tensor[1, 1] = float("nan")
    return tensor


def flipped(manifest):
    (record,) = records(manifest, A.format("v"))
    with open(manifest["path"], "r+b") as file:
        file.seek(record["offset"])
        byte = file.read(1)[0]
        file.seek(record["offset"])
        file.write(bytes([byte ^ 1]))
    return manifest


def without(manifest, name):
    return {**manifest, "tensors": [t for t in manifest["tensors"] if t["name"] != name]}


FAULTS = {
    "one flipped bit": (flipped, "v_proj.lora_A"),
    "not a number": (lambda m: with_bytes(m, with_nan), "q_proj.lora_B.weight is not finite"),
    "transposed": (lambda m: with_bytes(m, lambda t: t.T), "q_proj.lora_B"),
    "a tensor is missing": (lambda m: without(m, B.format("o")), "o_proj.lora_B"),
    "a layer of another model": (
        lambda m: {**m, "tensors": [{**t, "name": t["name"].replace("layers.1", "layers.7")} for t in m["tensors"]]},
        r"layers\.7\.\S+ belongs to no layer",
    ),
    "another rank": (lambda m: {**m, "config": {**m["config"], "r": 8}}, "lora_A.* expected"),
    "another alpha": (
        lambda m: {**m, "config": {**m["config"], "lora_alpha": 3}} if "config" in m else m,
        "another alpha",
    ),
    "names swapped": (lambda m: with_names_swapped(m) if "config" in m else m, "is not what was sent"),
    "half of the adapter": (lambda m: {**m, "config": {**m["config"], "num_tensors": 56}}, "28 of 56 tensors"),
    "an old session": (lambda m: {**m, "nonce": "0000"}, "version and nonce"),
}


# `test_planted.py` has the others on the same way, without a session after them.
FAST = ("one flipped bit", "a layer of another model", "half of the adapter")


@pytest.mark.parametrize("fault", [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in FAULTS])
def test_a_wrong_adapter_is_named_and_the_next_good_one_is_proven(stack, sync, monkeypatch, fault):
    _, actor, engine = stack
    train_once(actor.workers, 1e-2)
    change, words = FAULTS[fault]
    with monkeypatch.context() as patch:
        tamper(patch, change)
        with pytest.raises(SyncError, match=words) as caught:
            sync.run([engine])
    assert engine.url in str(caught.value)
    assert sync.run([engine]).proven.last.largest <= 1e-4


def test_an_engine_that_ignores_the_adapter_is_caught(stack, sync, monkeypatch):
    _, actor, engine = stack
    sync.run([engine])
    train_once(actor.workers, 1e-6)
    post = Engine.post

    def deaf(self, path, body=None, **kwargs):
        quiet = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")
        return {} if path in quiet else post(self, path, body, **kwargs)

    monkeypatch.setattr(Engine, "post", deaf)
    with pytest.raises(SyncError, match="not one of its probe scores did|differ from the trainer's"):
        sync.run([engine])


@pytest.mark.parametrize("stack", ["embedded"], indirect=True)
def test_an_engine_with_another_base_is_named(stack, sync, tmp_path):
    args, actor, _ = stack
    other = args.replace(hf_checkpoint=str(make_checkpoint(tmp_path / "other", seed=7, head_dim=32)))
    engine = start_engine(other, plan_engines(other)[0], num_threads=1, log_dir=tmp_path)
    try:
        engine.wait_ready(120)
        with pytest.raises(SyncError, match="Its base is not --hf-checkpoint") as caught:
            sync.run([engine])
    finally:
        engine.stop()
    assert engine.url in str(caught.value)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("stack", ["vllm"], indirect=True)
def test_a_vllm_that_takes_no_adapters_says_how_to_start_it(stack, sync, tmp_path):
    args, actor, _ = stack
    plain = args.replace(weight_sync="shm")
    engine = start_engine(plain, plan_engines(plain)[0], num_threads=1, log_dir=tmp_path)
    try:
        engine.wait_ready(300)
        with pytest.raises(
            SyncError, match="does not accept an adapter of rank 4: start it with INSTEP_LORA=1, --enable-lora"
        ):
            sync.run([engine])
        merged = sync.run([engine], "shm")  # merged weights do reach it
        assert merged.proven.last.largest <= 1e-5 * 10
    finally:
        engine.stop()


def test_the_exported_adapter_is_what_the_engine_holds(stack, sync, tmp_path):
    args, actor, engine = stack
    train_once(actor.workers, 1e-2)
    result = sync.run([engine])
    RoleTrainer.export_hf(actor, tmp_path / "merged")
    actor.workers.call("export_hf", tmp_path / "adapter", True, timeout=60)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6, args.hf_checkpoint)
    assert result.num_tensors == 28
