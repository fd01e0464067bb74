"""Weights that reach an engine (docs/architecture.md): exact when they are right, refused by name when they are not."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from instep.engines.engine import EngineRefusal
from instep.errors import ConfigError
from instep_engine import PROTOCOL
from instep_engine.manifest import BucketManifest, TensorRecord, digest, dtype_name, tensor_bytes
from tests.engines.conftest import both_heads
from tests.engines.running import TOLERANCE, Engine

pytestmark = both_heads
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47, 90, 91, 92]
NUM_TOKENS = 300
Q0, Q1 = (f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2))
Change = Callable[[BucketManifest, bytearray], BucketManifest]


def perturbed(model: Qwen3ForCausalLM, scale: float = 0.05, seed: int = 1) -> Qwen3ForCausalLM:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
    return other


def bucket(model: Qwen3ForCausalLM, path: Path, version: str, nonce: str) -> tuple[BucketManifest, bytearray]:
    """All parameters in one bucket; a tied head is no parameter of its own."""
    records, data = [], bytearray()
    for name, parameter in model.named_parameters():
        raw = tensor_bytes(parameter)
        shape, dtype = tuple(parameter.shape), dtype_name(parameter.dtype)
        records.append(TensorRecord(name, shape, dtype, len(data), len(raw), digest(raw)))
        data += raw
    return BucketManifest(str(path), version, nonce, tuple(records)), data


def session(
    engine: Engine, model: Qwen3ForCausalLM, path: Path, version: str, change: Change | None = None, nonce: str = ""
) -> EngineRefusal | None:
    """A whole session as the controller drives it; what it was refused with. A refused one leaves the engine paused."""
    nonce, control = nonce or uuid.uuid4().hex, engine.control()
    announced, data = bucket(model, path, version, nonce)
    manifest = change(announced, data) if change else announced
    path.write_bytes(data)
    control.pause("abort", timeout=60)
    try:
        control.start_update(version, nonce, timeout=60)
        control.update({"backend": "shm", "manifest": manifest.to_json()}, timeout=60)
        control.finish_update(version, [t.name for t in announced.tensors], timeout=60)
    except EngineRefusal as refusal:
        return refusal
    control.reset_cache(timeout=60)
    control.resume(timeout=60)
    return None


def disk_session(engine: Engine, folder: Path, version: str) -> None:
    control = engine.control()
    control.pause("abort", timeout=60)
    control.start_update(version, uuid.uuid4().hex, timeout=60)
    control.update({"backend": "disk", "path": str(folder)}, timeout=60)
    control.finish_update(version, [], timeout=60)
    control.reset_cache(timeout=60)
    control.resume(timeout=60)


def log_probs(model: Qwen3ForCausalLM, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        rows = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return [float(rows[i, t]) for i, t in enumerate(tokens[1:])]


def gap(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def original(engine: Engine, tmp_path: Path) -> Iterator[Engine]:
    """The engine, holding its checkpoint's weights again afterwards."""
    yield engine
    assert session(engine, engine.hf, tmp_path / "restore", "default") is None


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A folder that engines take for one of a run."""
    folder = tmp_path / "instep-sync-1"
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_manifest_tells_nothing_about_other_files(original: Engine, tmp_path: Path, kind: str) -> None:
    """The answer is the same whether a digest is right or wrong: no byte of the file can be guessed."""
    secret = tmp_path.parent / "secret"
    size = original.hf.config.hidden_size
    secret.write_bytes(b"1234" * size)
    path, control = secret, original.control()
    if kind == "link":
        (path := tmp_path / "bucket").symlink_to(secret)
    answers = []
    for guess in (b"1234" * size, b"0000" * size):
        record = TensorRecord("model.norm.weight", (size,), "float32", 0, 4 * size, digest(guess))
        manifest = BucketManifest(str(path), "5", "n", (record,))
        control.pause("abort", timeout=60)
        control.start_update("5", "n", timeout=60)
        with pytest.raises(EngineRefusal) as refusal:
            control.update({"backend": "shm", "manifest": manifest.to_json()}, timeout=60)
        answers.append(refusal.value.what)
    assert answers[0] == answers[1] and "cannot be read" in answers[0]
    control.start_update("5", "n", timeout=60)
    with pytest.raises(EngineRefusal, match="is not the folder of a run"):
        control.update({"backend": "disk", "path": str(original.path)}, timeout=60)


def test_new_weights_arrive_exactly(original: Engine, tmp_path: Path) -> None:
    engine, new = original, perturbed(original.hf)
    before = engine.prompt_log_probs(PROMPT)
    assert session(engine, new, tmp_path / "bucket", "7") is None
    after = engine.prompt_log_probs(PROMPT)
    assert gap(before, log_probs(engine.hf, PROMPT)) < TOLERANCE and gap(after, log_probs(new, PROMPT)) < TOLERANCE
    assert gap(before, after) > 1e-3
    if engine.capabilities.version_spans:
        assert engine.ok("/weight_info", method="GET")["weight_version"] == "7"
        assert engine.generate(PROMPT, max_tokens=3, ignore_eos=True)["weight_versions"] == [
            {"version": "7", "start": 0, "end": 3}
        ]
    if engine.capabilities.digests:
        live = engine.ok("/weight_checker", {"action": "checksum"})["checksums"]
        assert live == {r.name: r.digest for r in bucket(new, tmp_path, "", "")[0].tensors}


def test_decoding_uses_the_new_weights_after_each_of_several_updates(original: Engine, tmp_path: Path) -> None:
    """Sampled log-probs, too: a packed copy of one layer that stayed behind would show here."""
    engine = original
    for i in range(3):
        new = perturbed(engine.hf, seed=10 + i)
        assert session(engine, new, tmp_path / "bucket", f"v{i}") is None
        choice = engine.generate(PROMPT, max_tokens=60, ignore_eos=True, logprobs=0, seed=i)
        want = log_probs(new, PROMPT + choice["token_ids"])[len(PROMPT) - 1 :]
        assert gap([c["logprob"] for c in choice["logprobs"]["content"]], want) < TOLERANCE


def test_the_disk_way_gives_the_same_bits(original: Engine, tmp_path: Path) -> None:
    engine, new = original, perturbed(original.hf)
    assert session(engine, new, tmp_path / "bucket", "1") is None
    by_shm = engine.prompt_log_probs(PROMPT), held(engine)
    assert session(engine, engine.hf, tmp_path / "bucket", "2") is None
    assert engine.prompt_log_probs(PROMPT) != by_shm[0]
    golden = tmp_path / "instep-golden-1"
    golden.mkdir(mode=0o700)
    new.save_pretrained(golden / "hf")
    disk_session(engine, golden / "hf", "3")
    assert (engine.prompt_log_probs(PROMPT), held(engine)) == by_shm


def held(engine: Engine) -> Any:
    """The digests of all weights, from an engine that can say them."""
    return engine.ok("/weight_checker", {"action": "checksum"}) if engine.capabilities.digests else None


def test_several_buckets_make_one_session(original: Engine, tmp_path: Path) -> None:
    engine, new, control = original, perturbed(original.hf), original.control()
    manifest, data = bucket(new, tmp_path / "bucket", "4", "n")
    (tmp_path / "bucket").write_bytes(data)
    engine.ok("/pause")
    control.start_update("4", "n", timeout=10)
    for part in (manifest.tensors[:5], manifest.tensors[5:]):  # in the middle of a layer
        control.update({"backend": "shm", "manifest": replace(manifest, tensors=part).to_json()}, timeout=10)
        (tmp_path / "bucket").unlink()  # what was read stays readable
        (tmp_path / "bucket").write_bytes(data)
    control.finish_update("4", [t.name for t in manifest.tensors], timeout=10)
    engine.ok("/resume")
    assert gap(engine.prompt_log_probs(PROMPT), log_probs(new, PROMPT)) < TOLERANCE


@pytest.mark.parametrize("clear_cache", [True, False])
def test_new_weights_under_a_frozen_request(original: Engine, tmp_path: Path, clear_cache: bool) -> None:
    """Before the switch the log-probs are the old model's; after it the new one's, with its own keys and values."""
    engine, new, control = original, perturbed(original.hf), original.control()
    if not engine.capabilities.version_spans:
        with pytest.raises(ConfigError, match="does not say in JSON which weights made a token"):
            engine.capabilities.check_pause("keep", arrays=False)
        return
    manifest, data = bucket(new, tmp_path / "bucket", "9", "n")
    (tmp_path / "bucket").write_bytes(data)
    for wait in (0.2, 0.1, 0.4, 0.05, 1.0):  # until the pause falls midway
        future = engine.submit(PROMPT, ignore_eos=True, logprobs=0, seed=1, max_tokens=NUM_TOKENS)
        time.sleep(wait)
        engine.ok(f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}")
        control.start_update("9", "n", timeout=10)
        control.update({"backend": "shm", "manifest": manifest.to_json()}, timeout=10)
        control.finish_update("9", [t.name for t in manifest.tensors], timeout=10)
        engine.ok("/resume")
        choice = future.result(timeout=60)
        spans = choice["weight_versions"]
        if len(spans) == 2:
            break
        assert session(engine, engine.hf, tmp_path / "again", "default") is None
    switch = spans[0]["end"]
    assert [s["version"] for s in spans] == ["default", "9"] and spans[1]["end"] == NUM_TOKENS
    tokens = PROMPT + choice["token_ids"]
    got = [c["logprob"] for c in choice["logprobs"]["content"]]
    old, fresh = (log_probs(m, tokens)[len(PROMPT) - 1 :] for m in (engine.hf, new))
    assert gap(got[:switch], old[:switch]) < 2 * TOLERANCE
    after = gap(got[switch:], fresh[switch:])
    assert after < 2 * TOLERANCE if clear_cache else after > 1e-3


def drop(manifest: BucketManifest, data: bytearray) -> BucketManifest:
    return replace(manifest, tensors=tuple(t for t in manifest.tensors if t.name != Q1))


def swap(manifest: BucketManifest, data: bytearray) -> BucketManifest:
    a, b = (next(t for t in manifest.tensors if t.name == name) for name in (Q0, Q1))
    spans = [slice(t.offset, t.offset + t.nbytes) for t in (a, b)]
    data[spans[0]], data[spans[1]] = data[spans[1]], data[spans[0]]
    return manifest


def flip(manifest: BucketManifest, data: bytearray) -> BucketManifest:
    data[next(t.offset for t in manifest.tensors if t.name == Q1)] ^= 1  # the lowest bit of a float32's mantissa
    return manifest


def edit(**fields: Any) -> Change:
    def change(manifest: BucketManifest, data: bytearray) -> BucketManifest:
        tensors = [replace(t, **fields) if t.name == Q1 else t for t in manifest.tensors]
        return replace(manifest, tensors=tuple(tensors))

    return change


def cut(manifest: BucketManifest, data: bytearray) -> BucketManifest:
    del data[-4:]
    return manifest


def vanish(manifest: BucketManifest, data: bytearray) -> BucketManifest:
    return replace(manifest, path=manifest.path + "-elsewhere")


FIRST = "model.embed_tokens.weight"
CORRUPTIONS: list[tuple[str, Change, str | None]] = [
    ("dropped tensor", drop, Q1),
    ("two tensors swapped", swap, Q0),
    ("one bit flipped", flip, Q1),
    ("another shape", edit(shape=(32, 128)), Q1),
    ("another dtype", edit(dtype="bfloat16"), Q1),
    ("unknown tensor", edit(name="model.extra.weight"), "model.extra.weight"),
    ("file cut short", cut, None),
    ("file gone", vanish, FIRST),
    ("another session's nonce", lambda m, _: replace(m, nonce="old"), FIRST),
    ("another version", lambda m, _: replace(m, version="old"), FIRST),
]


@pytest.mark.parametrize(("change", "tensor"), [c[1:] for c in CORRUPTIONS], ids=[c[0] for c in CORRUPTIONS])
def test_corrupt_weights_are_refused_by_name(
    original: Engine, tmp_path: Path, change: Change, tensor: str | None
) -> None:
    engine, new = original, perturbed(original.hf)
    refusal = session(engine, new, tmp_path / "bucket", "5", change)
    assert refusal is not None and (tensor is None or refusal.tensor == tensor), refusal
    if engine.capabilities.version_spans:
        assert engine.ok("/weight_info", method="GET")["weight_version"] == "default"
    assert serves_nothing(engine)
    assert session(engine, new, tmp_path / "bucket", "6") is None
    assert gap(engine.prompt_log_probs(PROMPT), log_probs(new, PROMPT)) < TOLERANCE


def serves_nothing(engine: Engine) -> bool:
    """After a refused session: it says so itself, or waits, because nobody resumes it."""
    if not engine.capabilities.serves_nothing_unproven:
        return engine.ok("/is_paused", method="GET") == {"is_paused": True}
    engine.ok("/resume")
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    status, reply = engine.call("/inference/v1/generate", body)
    return status == 503 and "weight update failed" in reply["error"]["message"]


def test_a_weight_that_nobody_announced_is_missed(original: Engine, tmp_path: Path) -> None:
    """The engine knows its own layers: a trainer that leaves one out, and says so, is refused all the same."""
    engine, control = original, original.control()
    manifest, data = bucket(engine.hf, tmp_path / "bucket", "5", "n")
    (tmp_path / "bucket").write_bytes(data)
    for name in (Q1, "model.norm.weight"):
        rest = tuple(t for t in manifest.tensors if t.name != name)
        engine.ok("/pause")
        control.start_update("5", "n", timeout=10)
        control.update({"backend": "shm", "manifest": replace(manifest, tensors=rest).to_json()}, timeout=10)
        with pytest.raises(EngineRefusal) as caught:
            control.finish_update("5", [t.name for t in rest], timeout=10)
        fused = {Q1: "model.layers.1.self_attn.qkv_proj", "model.norm.weight": "model.norm"}
        assert caught.value.tensor == (name if engine.kind == "embedded" else fused[name])


def test_old_bytes_under_a_new_manifest_are_refused(original: Engine, tmp_path: Path) -> None:
    """An old bucket replayed at a tiny step: the weights differ by about 1e-6, the digests do."""
    engine, new = original, perturbed(original.hf, scale=1e-6)
    old = bucket(engine.hf, tmp_path, "", "")[1]

    def replay(manifest: BucketManifest, data: bytearray) -> BucketManifest:
        data[:] = old
        return manifest

    refusal = session(engine, new, tmp_path / "bucket", "5", replay)
    assert refusal is not None and refusal.tensor == FIRST


def test_a_tied_head_is_not_taken_twice(original: Engine, tmp_path: Path) -> None:
    engine = original

    def add_head(manifest: BucketManifest, data: bytearray) -> BucketManifest:
        embedding = manifest.tensors[0]
        return replace(manifest, tensors=(*manifest.tensors, replace(embedding, name="lm_head.weight")))

    refusal = session(engine, engine.hf, tmp_path / "bucket", "5", add_head)
    assert refusal is not None and refusal.tensor == "lm_head.weight"
    reason = "no tensor of this model" if engine.hf.config.tie_word_embeddings else "came twice"
    assert reason in refusal.what


def test_calls_out_of_order_are_refused(original: Engine, tmp_path: Path) -> None:
    engine, control = original, original.control()
    update = {"backend": "shm", "manifest": bucket(engine.hf, tmp_path, "5", "n")[0].to_json()}
    for call in (
        lambda: control.update(update, timeout=10),
        lambda: control.finish_update("5", [], timeout=10),
    ):
        with pytest.raises(EngineRefusal):
            call()
    engine.ok("/pause")
    for info in ({"backend": "carrier pigeon"}, {"backend": "shm"}, {}):
        control.start_update("5", "n", timeout=10)
        with pytest.raises(EngineRefusal):
            control.update(info, timeout=10)
    engine.ok("/resume")
    before = engine.prompt_log_probs(PROMPT)  # nothing was written, so it serves on
    assert gap(before, log_probs(engine.hf, PROMPT)) < TOLERANCE


def test_a_session_that_was_left_gives_way_to_the_next(original: Engine, tmp_path: Path) -> None:
    """A controller that died in the middle of one."""
    engine, new, control = original, perturbed(original.hf), original.control()
    manifest, data = bucket(new, tmp_path / "bucket", "5", "n")
    (tmp_path / "bucket").write_bytes(data)
    engine.ok("/pause?mode=keep")
    control.start_update("5", "n", timeout=10)
    part = replace(manifest, tensors=manifest.tensors[:3])
    control.update({"backend": "shm", "manifest": part.to_json()}, timeout=10)
    if engine.capabilities.serves_nothing_unproven:
        generate = {"token_ids": PROMPT, "sampling_params": {}}
        frozen = engine.pool.submit(engine.call, "/inference/v1/generate", generate)
        engine.ok("/resume")
        assert frozen.result(timeout=10)[0] == 503
        assert engine.call("/inference/v1/generate", generate)[0] == 503
    assert session(engine, new, tmp_path / "bucket", "6") is None
    assert gap(engine.prompt_log_probs(PROMPT), log_probs(new, PROMPT)) < TOLERANCE


def test_a_folder_without_a_checkpoint_is_refused(original: Engine, tmp_path: Path) -> None:
    engine, control = original, original.control()
    engine.ok("/pause")
    control.start_update("5", "n", timeout=10)
    with pytest.raises(EngineRefusal, match="no checkpoint in"):
        control.update({"backend": "disk", "path": str(tmp_path / "nowhere")}, timeout=10)


def test_another_protocol_is_refused(engine: Engine) -> None:
    if engine.kind != "vllm":
        pytest.skip("the embedded engine is of one version with instep")
    body = {"init_info": {"protocol": PROTOCOL + 1, "version": "5", "nonce": "n"}}
    with pytest.raises(EngineRefusal, match=f"speaks protocol {PROTOCOL + 1}, this plugin {PROTOCOL}"):
        engine.control().post("/init_weight_transfer_engine", body, timeout=10)
