"""The seconds that `instep plan` predicts, against what was seen on GPUs, and its profile of this machine's CPU."""

import json
from dataclasses import asdict, replace

import pytest

from benchmarks.plan_seconds import H100, rows
from benchmarks.random_model import dimensions
from instep.arguments.parse import parse
from instep.cli import main
from instep.errors import ConfigError
from instep.models.sizes import shape_of
from instep.preflight.plan import card as module
from instep.preflight.plan.card import cached, card_of, layer_flops, read
from instep.preflight.plan.engine import plan_engine
from instep.preflight.plan.memory import plan_engines
from instep.preflight.plan.seconds import predict

WORKLOAD = "--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-prompt-len 128 "
WORKLOAD += "--rollout-max-response-len 512 --use-dynamic-batch-size --max-tokens-per-gpu 32768 --precision bf16 "
WORKLOAD += "--colocate --actor-num-gpus-per-node 1 --rollout-backend vllm "
STAY = "--no-offload-train --no-offload-rollout"


@pytest.fixture
def seconds(tmp_path):
    """`seconds(flags)`: of a step of 256 samples of 128 + 512 tokens with 0.6 B parameters on an H100."""
    config = {"model_type": "qwen3", "max_position_embeddings": 4096, **dimensions("0.6b")}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def of(flags, card=H100, stay=STAY, **how):
        args = parse(f"{WORKLOAD} {stay} --hf-checkpoint {tmp_path} --train-backend hf {flags}".split(), "plan")
        return predict(args, card, **how)

    return of


@pytest.mark.parametrize(
    "flags, phase, low, high",  # seen in runs of which no file is kept; more than one figure: of several hosts
    [
        ("--no-fast-log-probs --weight-sync shm", "generate", 9.3, 10.0),
        ("--weight-sync shm", "generate", 3.5, 3.65),  # vLLM alone, with what is now its fast log-probs
        ("--n-samples-per-prompt 4 --weight-sync shm", "generate", 2.2, 2.4),
        ("--n-samples-per-prompt 2 --weight-sync shm", "generate", 2.0, 2.1),
        ("--no-torch-compile --n-samples-per-prompt 1 --rollout-batch-size 256", "train", 4.9, 4.9),
        ("--weight-sync shm", "sync", 1.6, 1.6),
        ("--weight-sync single-copy", "sync", 0.136, 0.142),
    ],
)
def test_what_was_seen_on_an_h100_is_predicted_within_a_quarter(seconds, flags, phase, low, high):
    found = seconds(flags)[phase]
    assert 0.75 * low <= found <= 1.25 * high, found


def test_the_committed_steps_are_predicted_within_a_quarter():
    compared = [(row.planned[phase] / seen, row.name, phase) for row in rows() for phase, seen in row.seen.items()]
    assert len(compared) == 9 * 3 + 2
    assert not [each for each in compared if not 0.75 <= each[0] <= 1.25]


def test_what_makes_a_step_longer_is_in_the_prediction(seconds):
    plain = seconds("")
    assert set(plain) == {"generate", "train", "sync"}, "one on-policy step without a reference scores nothing before"
    assert seconds("--recompute-granularity full")["train"] > 1.2 * plain["train"]
    scored = seconds("--num-steps-per-rollout 2 --use-kl-loss --kl-loss-coef 0.1")
    assert 0.3 * scored["train"] < scored["log-probs"] < scored["train"], "two passes forward"
    assert seconds("--actor-num-gpus-per-node 2 --rollout-num-gpus 2")["train"] < 0.6 * plain["train"]
    assert seconds("--optimizer-cpu-offload")["train"] > plain["train"] + 0.05
    assert seconds("", mean_response=128)["generate"] < 0.7 * plain["generate"]
    assert seconds("", stay="")["sync"] > plain["sync"] + 0.3
    assert seconds("--weight-sync ipc") == plain, "as `auto` means on GPUs that both use"
    crowded = seconds("--vllm-kv-cache-memory-bytes 5000000000")
    assert crowded["generate"] > 1.5 * plain["generate"], "a cache of 64 requests makes several waves"
    assert set(seconds("--rollout-batch-size 8")) == set(plain)


def test_rates_lie_between_those_that_were_measured():
    card = replace(H100, train={1000: 1e12, 4000: 4e12})
    assert card.rate(card.train, 2000) == pytest.approx(2e12)
    assert card.rate(card.train, 100) == 1e12 and card.rate(card.train, 9000) == 4e12
    assert layer_flops(10, 30, 20, 5, 8) == 2 * (2 * 10 * 20 + 2 * 10 * 5 + 3 * 10 * 30) + 2 * 8 * 20


def test_a_cache_holds_what_its_bytes_allow(tmp_path, seconds):
    flags = f"{WORKLOAD} --hf-checkpoint {tmp_path} --train-backend hf --vllm-kv-cache-memory-bytes 4294967296"
    args = parse(flags.split(), "plan")
    (spec,) = plan_engines(args)
    planned = plan_engine(args, spec, shape_of(str(tmp_path)), 80e9)
    per_token = 2 * 28 * 8 * 128 * 2
    assert planned.tokens == 4294967296 // per_token // 16 * 16 and planned.requests == planned.tokens // 640


def test_a_profile_is_measured_kept_and_read(tmp_path, monkeypatch, seconds, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "WIDTHS", {"cpu": (64,), "cuda": (1024,)})
    monkeypatch.setattr(module, "TOKENS", {"cpu": 512, "cuda": 8192})
    card, path = card_of("here")
    assert path == cached(card.device) and read(path) == card
    assert card.matmul > 1e9 and card.memory > 1e8 and 1e-8 < card.op < 1e-2
    assert all(rate > 1e7 for rates in (card.forward, card.train) for rate in rates.values())
    before = path.stat().st_mtime_ns
    assert card_of("here")[0] == card and path.stat().st_mtime_ns == before, "kept"
    (tmp_path / "h100.json").write_text(json.dumps(asdict(H100)))
    flags = [*f"{WORKLOAD} {STAY}".split(), "--hf-checkpoint", str(tmp_path), "--train-backend", "hf"]
    assert main(["plan", "--card-profile", str(tmp_path / "h100.json"), *flags]) == 0
    assert "a step takes about" in capsys.readouterr().out
    assert main(["plan", "--json", "--card-profile", str(tmp_path / "h100.json"), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == seconds("")
    assert main(["plan", "--mean-response-len", "many"]) == 2 and "instep plan --help" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a profile of a card"):
        card_of(str(tmp_path / "bad.json"))
