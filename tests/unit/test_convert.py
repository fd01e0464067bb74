"""`instep convert` keeps every bit, in bounded memory, and leaves nothing half done."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from instep.checkpoints import convert, hf_export
from instep.checkpoints.dist_checkpoint import read_index
from instep.checkpoints.integrity import write_manifest
from instep.checkpoints.megatron import MegatronCheckpoint
from instep.checkpoints.megatron_writer import _no_scales
from instep.checkpoints.remote_code import load_config
from instep.cli import main
from instep.errors import CheckpointError
from instep.models.config_file import read_config
from instep.models.sizes import shape_of
from instep.weights.spec import TensorSpec
from tests.assets import with_head
from tests.distributed.helpers import RankPool
from tests.distributed.megatron_layouts import MODELS, random_model

FAMILIES = ["untied", "tied", "qwen2", "llama", "moe-mixed", "deepseek", "deepseek-plain"]
FAMILIES += ["qwen3.5", "qwen3.5-moe", "qwen3-next"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        random_model(MODELS[name]).bfloat16().save_pretrained(root / name)
    return root


def to_megatron(hf: Path, save: Path) -> int:
    return main(["convert", "hf-to-megatron", "--hf-checkpoint", str(hf), "--save", str(save)])


def to_hf(load: Path, hf: Path, save: Path) -> int:
    return main(["convert", "megatron-to-hf", "--load", str(load), "--hf-checkpoint", str(hf), "--save", str(save)])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_keeps_every_bit(models, tmp_path, capsys, monkeypatch, name):
    monkeypatch.setattr(hf_export, "MAX_SHARD_BYTES", 50_000)
    assert to_megatron(models / name, tmp_path / "m") == 0
    assert (tmp_path / "m" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert to_hf(tmp_path / "m", models / name, tmp_path / "hf") == 0
    before, after = weights(models / name), weights(tmp_path / "hf")
    assert before.keys() == after.keys() and len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    assert all(torch.equal(before[key].view(torch.int16), after[key].view(torch.int16)) for key in before)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    out = capsys.readouterr().out
    assert "read back with equal digests" in out and f"{len(before)} of Hugging Face's" in out


@pytest.mark.parametrize("scale, own", [(1, False), (2, True)])
def test_an_output_layer_in_a_folder_whose_config_ties_it(models, tmp_path, scale, own):
    """A copy of the embedding is tied, another one is the model's own, as transformers sees it."""
    hf, model = shutil.copytree(models / "tied", tmp_path / "hf"), random_model(MODELS["tied"]).bfloat16()
    model.lm_head.weight.data *= scale
    with_head(hf, model)
    if own:
        (hf / "model.safetensors").rename(hf / "model-1.safetensors")
        rest = weights(hf)
        save_file({"lm_head.weight": rest.pop("lm_head.weight")}, hf / "model-2.safetensors")
        save_file(rest, hf / "model-1.safetensors")
        files = dict.fromkeys(rest, "model-1.safetensors") | {"lm_head.weight": "model-2.safetensors"}
        (hf / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    plain = shape_of(str(models / "tied")).total
    assert shape_of(str(hf)).total == plain + own * model.lm_head.weight.numel()
    head = AutoModelForCausalLM.from_pretrained(hf).lm_head.weight
    config = load_config(str(hf), False)
    assert read_config(hf)["tie_word_embeddings"] == config.tie_word_embeddings == (not own)
    assert to_megatron(hf, tmp_path / "m") == 0 and to_hf(tmp_path / "m", hf, tmp_path / "new") == 0
    new = json.loads((tmp_path / "new" / "config.json").read_text())
    assert new["tie_word_embeddings"] == (not own) and ("lm_head.weight" in weights(tmp_path / "new")) == own
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "new").lm_head.weight, head)


@pytest.mark.parametrize("name", ["untied", "qwen2", "moe-mixed"])
def test_torch_itself_reads_what_is_written(models, tmp_path, name):
    """Each chunk is what `torch.save` would write: its tensor over a storage of its own."""
    assert to_megatron(models / name, tmp_path / "m") == 0
    folder, before = tmp_path / "m" / "release", weights(models / name)
    about = {key: value for key, value in read_index(folder).state_dict_metadata.items() if hasattr(value, "size")}
    read = {key: torch.full(tuple(value.size), 7, dtype=value.properties.dtype) for key, value in about.items()}
    dcp.load(read, checkpoint_id=folder, no_dist=True)
    config = convert._shape(models / name, False)
    embedding, want = read["embedding.word_embeddings.weight"], before["model.embed_tokens.weight"]
    assert torch.equal(embedding[: len(want)], want) and not embedding[len(want) :].any() and len(embedding) % 128 == 0
    for i in range(config.num_layers):
        parts = [before[f"model.layers.{i}.self_attn.{x}_proj.weight"] for x in "qkv"]
        groups = zip(*(part.chunk(config.num_query_groups) for part in parts), strict=True)
        qkv = torch.cat([part for group in groups for part in group])
        assert torch.equal(read[f"decoder.layers.{i}.self_attention.linear_qkv.weight"], qkv)
        proj = read[f"decoder.layers.{i}.self_attention.linear_proj.weight"]
        assert torch.equal(proj, before[f"model.layers.{i}.self_attn.o_proj.weight"])
        if (dense := f"decoder.layers.{i}.mlp.linear_fc1.weight") in read:
            halves = [before[f"model.layers.{i}.mlp.{x}_proj.weight"] for x in ("gate", "up")]
            assert torch.equal(read[dense], torch.cat(halves))
        else:
            experts = read[f"decoder.layers.{i}.mlp.experts.experts.linear_fc2.weight"]
            downs = [before[f"model.layers.{i}.mlp.experts.{e}.down_proj.weight"] for e in range(len(experts))]
            assert torch.equal(experts, torch.stack(downs))


def test_bits_that_change_on_the_way_leave_no_folder(models, tmp_path, monkeypatch, capsys):
    real = convert.TorchDistWriter.__exit__
    norm = weights(models / "untied")["model.norm.weight"].view(torch.uint8).numpy().tobytes()

    def damaged(self, *error):
        real(self, *error)
        path = next(self.folder.glob("*.distcp"))
        content = bytearray(path.read_bytes())
        content[content.index(norm)] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(convert.TorchDistWriter, "__exit__", damaged)
    assert to_megatron(models / "untied", tmp_path / "m") != 0
    assert "model.norm.weight was read back with different bits" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def killed_at_the_ninth(hf: Path, save: Path) -> None:
    """A conversion that is killed when it has written its ninth tensor."""
    real, done = convert.TorchDistWriter.add, list[int]()

    def add(self, *args):
        done.append(real(self, *args))
        if len(done) == 9 and not any(name.startswith("megatron") for name in sys.modules):
            os.kill(os.getpid(), signal.SIGKILL)
        return done[-1]

    convert.TorchDistWriter.add = add
    to_megatron(hf, save)


def test_a_killed_conversion_leaves_nothing_that_looks_complete(models, tmp_path):
    with pytest.raises(AssertionError, match="rank 0 died without an answer"), RankPool(1, group=False) as process:
        process.run(killed_at_the_ninth, models / "untied", tmp_path / "m")
    left = list(tmp_path.iterdir())
    assert len(left) == 1 and left[0].name.startswith(".instep-export-") and list(left[0].rglob("*.distcp"))
    assert to_megatron(models / "untied", tmp_path / "m") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["m"]  # what was left is removed


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def growth(call: Callable[[], int]) -> int:
    """By how many bytes memory that is no file's grows at most in a call that succeeds."""
    peak, done = [before := anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert call() == 0
    finally:
        done.set()
        watcher.join()
    return peak[0] - before


def test_the_state_without_content_is_pickled_once():
    """There are as many as weights."""
    assert _no_scales() is _no_scales()


def test_memory_holds_a_few_tensors_not_the_model(models, tmp_path):
    """There and back; beside files that are mapped, which the kernel drops at need.

    The largest tensor has 39 MiB: malloc keeps what it has freed of up to 32 MiB, and anybody's guess is how much.
    """
    config = json.loads((models / "untied" / "config.json").read_text())
    config["layer_types"] *= 10
    wide = {**config, "vocab_size": 20000, "hidden_size": 512, "num_hidden_layers": 20, "intermediate_size": 2048}
    shutil.copytree(models / "untied", tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(wide))
    entries = convert.weight_entries(convert._shape(tmp_path / "hf", False))
    shapes = {name: size for entry in entries for name, size in zip(entry.names, entry.shapes, strict=True)}
    tensors = {name: torch.randn(size) for name, size in shapes.items()}
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    total, largest = sum(t.nbytes for t in tensors.values()), max(t.nbytes for t in tensors.values())
    del tensors
    assert growth(lambda: to_megatron(tmp_path / "hf", tmp_path / "m")) < 5 * largest + 16 * 2**20 < 0.7 * total
    assert growth(lambda: to_hf(tmp_path / "m", tmp_path / "hf", tmp_path / "h")) < 5 * largest + 16 * 2**20


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda folder: os.truncate(folder / "__0_0.distcp", 1000), "__0_0.distcp is cut off"),
        (lambda folder: (folder / "metadata.json").unlink(), "without metadata.json: of --train-backend hf, or torch"),
        (lambda folder: (folder / "metadata.json").write_text("{"), "metadata.json does not name a format"),
        (lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "of the format zarr"),
        (lambda folder: (folder / ".metadata").unlink(), "neither .metadata"),
    ],
)
def test_a_damaged_checkpoint_or_another_layout_is_named(models, tmp_path, damage, what):
    assert to_megatron(models / "untied", tmp_path / "m") == 0
    damage(tmp_path / "m" / "release")
    with pytest.raises(CheckpointError) as caught:
        MegatronCheckpoint(tmp_path / "m" / "release", convert._shape(models / "untied", False))
    assert what in caught.value.what and caught.value.remedy


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ("tied", "output_layer.weight is not a tensor"),
        ("qwen2", "linear_qkv.bias is missing"),
        ("moe-mixed", "decoder.layers.2.input_layernorm.weight is missing"),
    ],
)
def test_the_checkpoint_of_another_model_is_named(models, tmp_path, other, what):
    assert to_megatron(models / "untied", tmp_path / "m") == 0
    with pytest.raises(CheckpointError) as caught:
        MegatronCheckpoint(tmp_path / "m" / "release", convert._shape(models / other, False))
    assert what in caught.value.what and "--hf-checkpoint" in caught.value.remedy


def test_what_cannot_be_converted_is_said_before_anything_is_written(models, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    for call, args, said in [
        (to_megatron, (models / "untied", tmp_path / "full"), "mine.txt"),
        (to_megatron, (empty, tmp_path / "m"), "config.json"),
        (to_hf, (empty, models / "untied", tmp_path / "m"), "latest_checkpointed_iteration.txt"),
        (to_hf, (tmp_path / "nowhere", models / "untied", tmp_path / "m"), "latest_checkpointed_iteration.txt"),
        (lambda: main(["convert", "sideways"]), (), "hf-to-megatron"),
    ]:
        assert call(*args) == 2  # type: ignore[operator]
        error = capsys.readouterr().err
        assert said in error and "remedy:" in error
    assert not (tmp_path / "m").exists()


def test_what_is_read_is_never_replaced(models, tmp_path, capsys):
    """Though instep may have written it, as a conversion or as a run's last export."""
    hf, m = tmp_path / "hf", tmp_path / "m"
    assert to_megatron(models / "untied", m) == 0 and to_hf(m, models / "untied", hf) == 0
    (tmp_path / "link").symlink_to(m)
    run = shutil.copytree(models / "untied", tmp_path / "run" / "hf")
    write_manifest(run, "export")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    for call, args, said in [
        (to_hf, (m, models / "untied", m), "is"),
        (to_hf, (m, models / "untied", tmp_path / "link"), "is"),
        (to_hf, (m, models / "untied", m / "hf"), "is inside"),
        (to_hf, (m, hf, hf), "is"),
        (to_megatron, (hf, hf), "is"),
        (to_megatron, (hf, tmp_path), "contains"),
        (to_megatron, (hf, hf / "m"), "is inside"),
        (to_megatron, (hf, run), "holds more than a conversion"),
    ]:
        assert call(*args) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert said in error and "--save" in error and "remedy:" in error
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == files
    assert to_hf(m, models / "untied", hf) == 0  # an earlier conversion is replaced


def test_every_type_of_safetensors_is_written(tmp_path):
    floats = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
    kinds = [*floats, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    tensors = {str(kind): torch.tensor([[0.0, 1.0, 3.0]]).to(kind) for kind in kinds}
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    hf_export.write_weights(specs, tensors.values(), tmp_path)
    read = weights(tmp_path)
    assert all(read[n].dtype == t.dtype and torch.equal(read[n].float(), t.float()) for n, t in tensors.items())


def test_a_bit_that_changed_since_it_was_saved_is_no_source(models, tmp_path, capsys):
    assert to_megatron(models / "untied", tmp_path / "m") == 0
    write_manifest(release := tmp_path / "m" / "release")  # a run's checkpoint, with digests
    path, norm = release / "__0_0.distcp", weights(models / "untied")["model.norm.weight"].view(torch.uint8)
    content = bytearray(path.read_bytes())
    content[content.index(norm.numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert to_hf(tmp_path / "m", models / "untied", tmp_path / "hf") != 0
    assert "has different content than was written" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "hf").exists()


def test_a_folder_that_is_quantized_otherwise_gives_its_configuration_alone(models, tmp_path, capsys):
    hf = shutil.copytree(models / "untied", tmp_path / "fp8")
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    assert to_megatron(models / "untied", tmp_path / "m") == 0 and to_hf(tmp_path / "m", hf, tmp_path / "hf") == 0
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    assert to_megatron(hf, tmp_path / "m2") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "quantized (awq, None bits, gemm)" in error and "convert this one to bfloat16 first" in error


@pytest.mark.parametrize(
    "garbage", [b"", b"\0", b"cos\nsystem\n", b"\x80\x02]q\0.", b"(lp0\n.", b"PK\3\4", b"\x80\2N."]
)
def test_a_chunk_that_is_no_tensor_is_one_error(models, tmp_path, garbage):
    assert to_megatron(models / "untied", tmp_path / "m") == 0
    path = tmp_path / "m" / "release" / "__0_0.distcp"
    path.write_bytes(garbage.ljust(100, b"\0") + bytes(path.stat().st_size - 100))
    checkpoint = MegatronCheckpoint(path.parent, convert._shape(models / "untied", False))
    with pytest.raises(CheckpointError, match="__0_0.distcp holds no tensor at byte 0") as caught:
        checkpoint.tensors(checkpoint.entries[0])
    assert "restore its files" in caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "what", "remedy"),
    [
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM", "needs no conversion"),
        ({"attention_bias": True}, "attention_bias=true", "--train-backend hf needs no conversion"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "config.json cannot be read", "config.json of the model"),
        ({"hidden_size": "big"}, "config.json cannot be read", "config.json of the model"),
    ],
)
def test_a_model_that_megatron_does_not_know_is_one_error(models, tmp_path, capsys, changes, what, remedy):
    hf = shutil.copytree(models / "untied", tmp_path / "hf")
    (hf / "config.json").write_text(json.dumps(json.loads((hf / "config.json").read_text()) | changes))
    assert to_megatron(hf, tmp_path / "m") == 2 and not (tmp_path / "m").exists()
    error = capsys.readouterr().err
    assert what in error and remedy in error.split("remedy:")[1] and error.count("remedy:") == 1


def test_wrong_folders_and_iterations_are_said(models, tmp_path, capsys):
    assert to_megatron(models / "untied", tmp_path / "m") == 0
    words = ["convert", "megatron-to-hf", "--load", str(tmp_path / "m"), "--save", str(tmp_path / "hf")]
    assert main([*words, "--hf-checkpoint", str(models / "untied"), "--ckpt-step=-1"]) == 2
    assert "'-1' is not an iteration" in capsys.readouterr().err
    assert main([*words, "--hf-checkpoint", "/nonexistent"]) == 2
    assert "/nonexistent is not a folder" in capsys.readouterr().err
