"""What `benchmarks/gpu_grpo.py` asks for and keeps of a run; its committed rows have the floors of what they ran."""

from __future__ import annotations

import copy
import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import gpu_grpo
from benchmarks.gpu_grpo import ON_TWO, add_rooflines, flags, measure_fitting, of_instep, of_verl, phases_of
from benchmarks.random_model import dimensions
from instep.arguments.parse import parse
from instep.preflight.plan.memory import plan_memory

FILES = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("gpu-grpo-*.json"))


# 0.6 B with 512 tokens lies beside its engine, the others take turns with it.
@pytest.mark.parametrize(
    "size, new_tokens, tokens",
    [("0.6b", 512, 16384), ("0.6b", 1024, 32768), ("1.7b", 512, 16384), ("1.7b", 1024, 16384)],
)
@pytest.mark.parametrize("name", ["instep-hf", "instep-megatron"])
def test_the_plan_fills_micro_batches_of_an_h100(tmp_path, size, tokens, name, new_tokens):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **dimensions(size)}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n')
    options = Namespace(size=size, new_tokens=new_tokens, samples=256, steps=3, lengths="even", device="cuda", more="")
    words = [*flags(options, name, tmp_path, tmp_path / "run").split(), "--gpu-memory-gb", "79.65"]
    args = parse(words, "train")
    assert (args.use_dynamic_batch_size, args.max_tokens_per_gpu) == (True, tokens)
    assert args.offload_train == args.offload_rollout == ((size, new_tokens) != ("0.6b", 512))
    assert all(kind.fits for kind in plan_memory(args))


def test_idle_ratios_are_kept_and_what_was_not_early_is_zero(tmp_path):
    step = {"train/loss": 1.0, "perf/rollout_seconds": 3.0, "perf/train_seconds": 2.0, "perf/trainer_idle_ratio": 0.6}
    rows = [{**step, "time": 10.0 + 6 * n, "perf/engine_idle_ratio": 0.2 + 0.2 * n} for n in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = of_instep(tmp_path, began=1.0)
    assert found["parts"]["perf/trainer_idle_ratio"] == 0.6 and found["parts"]["perf/engine_idle_ratio"] == 0.5
    assert found["parts"]["perf/early_log_probs_seconds"] == found["parts"]["perf/early_train_seconds"] == 0.0


def test_the_phases_of_a_step_add_up_to_it():
    seconds = {"rollout": 3.5, "reward": 0.25, "log_probs": 0.5, "train": 2.0, "sync": 0.75}
    phases = phases_of(6.5, {f"perf/{name}_seconds": value for name, value in seconds.items()})
    assert phases == {"generate": 3.25, "reward": 0.25, "log_probs": 0.5, "train": 1.5, "sync": 0.75, "idle": 0.25}


def test_trl_is_tuned_to_the_largest_pass_that_fits(tmp_path, monkeypatch):
    asked = []

    def measure(*words):
        asked.append(words[4:])
        return {"step_s": 1.0} if words[4:] == ("8",) else {"error": ["torch.OutOfMemoryError: CUDA out of memory"]}

    monkeypatch.setattr(gpu_grpo, "measure", measure)
    assert measure_fitting(Namespace(), "trl-tuned", tmp_path, tmp_path) == {"step_s": 1.0, "per_device_batch": 8}
    assert "error" in measure_fitting(Namespace(), "trl", tmp_path, tmp_path)
    assert asked == [("16",), ("8",), ()]


def test_the_phases_of_verl_add_up_to_the_time_between_its_rows(tmp_path):
    parts = {"generate": 3.0, "log_probs": 0.0, "advantages": 0.25, "train": 2.0, "sync": 1.0, "verl_step": 6.25}
    steps = [{"seconds": s, **parts, "metrics": {"perf/x": 1.0, "actor/lr": 1.0}} for s in (90.0, 6.5, 7.0, 6.75)]
    content = {"versions": {"verl": "0.9.1"}, "settings": ["a=1"], "steps": steps}
    (tmp_path / "verl.json").write_text(json.dumps(content))
    found = of_verl(tmp_path / "verl")
    assert found["step_s"] == 6.75 == sum(found["phases"].values()) and found["verl_step_s"] == 6.25
    assert found["steps_s"] == [6.5, 7.0, 6.75] and found["metrics"] == {"perf/x": 1.0}


@pytest.mark.parametrize("name", ON_TWO)
def test_two_gpus_are_planned(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **dimensions("0.6b")}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n')
    options = Namespace(size="0.6b", new_tokens=512, samples=256, steps=3, lengths="even", device="cuda", more="")
    args = parse([*flags(options, name, tmp_path, tmp_path / "run").split(), "--gpu-memory-gb", "79.65"], "train")
    kinds = plan_memory(args)
    assert sum(kind.count for kind in kinds) == 2 and all(kind.fits for kind in kinds)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_rows_have_their_floors(path):
    committed = json.loads(path.read_text())
    again = copy.deepcopy(committed)
    for row in again["rows"]:
        row.pop("roofline", None)
    add_rooflines(again)
    assert again == committed
    even = committed["workload"].get("lengths") != "mixed"
    assert all(("roofline" in row) == ("parts" in row and even) for row in committed["rows"])
    assert all(phase["factor"] > 1 for row in committed["rows"] for phase in row.get("roofline", {}).values())


def test_a_floor_is_of_tokens_and_seconds():
    (path,) = [path for path in FILES if path.stem == "gpu-grpo-h100-tuned"]
    row, _ = json.loads(path.read_text())["rows"]
    for phase, found in row["roofline"].items():
        rate = row["parts"][f"perf/{phase}_tokens_per_second"]
        assert found["tokens_per_second"] == pytest.approx(found["factor"] * rate, rel=0.01)
