"""The table of all flags: its sources (slime, vime, Megatron, ...), its defaults and its documentation."""

import ast
import importlib.util
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from instep.arguments.all_flags import find, groups, own_flags, passed_through
from instep.arguments.flag import COUNT, Number, size
from instep.arguments.megatron import megatron_table
from instep.arguments.parse import parse
from scripts.docs.args_stub import stub
from scripts.docs.arguments import flags_markdown
from tests.command_line import argv, make_folder, refusal

ROOT = Path(__file__).parents[2]

# Names that slime's command line has (223 of its core, 6 of its engine layer).
SLIME = """
--actor-num-gpus-per-node --actor-num-nodes --advantage-estimator --allgather-cp --apply-chat-template
--apply-chat-template-kwargs --async-save --balance-by-flops --balance-data --buffer-filter-path
--calculate-per-token-loss --check-weight-update-equal --ci-disable-kl-checker --ci-load-grad-norm
--ci-save-grad-norm --ci-test --ci-train-rollout-logprob-abs-diff-threshold --clip-grad --colocate
--custom-advantage-function-path --custom-config-path --custom-convert-samples-to-train-data-path
--custom-eval-rollout-log-function-path --custom-generate-function-path --custom-loss-function-path
--custom-megatron-before-log-prob-hook-path --custom-megatron-before-train-step-hook-path
--custom-megatron-init-path --custom-model-provider-path --custom-pg-loss-reducer-function-path
--custom-reward-post-process-path --custom-rm-path --custom-rollout-log-function-path --custom-tis-function-path
--custom-update-weight-post-write-path --data-pad-size-multiplier --data-source-path --debug-rollout-only
--debug-train-only --disable-compute-advantages-and-returns --disable-grpo-std-normalization
--disable-rewards-normalization --disable-rollout-global-dataset --disable-wandb-random-suffix
--distributed-backend --distributed-timeout-minutes --dump-details --dynamic-sampling-filter-path
--enable-mtp-training --entropy-coef --eps-clip --eps-clip-c --eps-clip-high --eval-config --eval-function-path
--eval-input-key --eval-interval --eval-label-key --eval-max-context-len --eval-max-prompt-len
--eval-max-response-len --eval-min-new-tokens --eval-prompt-data --eval-reward-key --eval-temperature
--eval-tool-key --eval-top-k --eval-top-p --fetch-trajectory-retry-times --freeze-indexer
--freeze-params-name-list --gamma --get-mismatch-metrics --global-batch-size --group-rm --hf-checkpoint
--http-proxy --input-key --keep-old-actor --kl-coef --kl-loss-coef --kl-loss-type --label-key --lambd --load
--load-debug-rollout-data --load-debug-rollout-data-subsample --load-forge-rollout-data --log-correct-samples
--log-multi-turn --log-passrate --log-probs-chunk-size --log-probs-max-tokens-per-gpu --log-reward-category
--loss-mask-type --loss-type --lr --mask-offpolicy-in-partial-rollout --max-tokens-per-gpu
--megatron-config-path --megatron-deepgemm-forward-layers --megatron-deepgemm-forward-modules
--megatron-deepgemm-moe-forward-layers --megatron-deepgemm-moe-forward-modules --memory-recorder
--memory-snapshot-dir --memory-snapshot-num-steps --metadata-key --micro-batch-size --min-batch-collection-ratio
--model-name --mtp-loss-scaling-factor --mtp-num-layers --multimodal-keys --n-samples-per-eval-prompt
--n-samples-per-prompt --no-save-optim --normalize-advantages --num-critic-only-steps --num-epoch
--num-gpus-per-node --num-rollout --num-steps-per-rollout --offload --offload-rollout --offload-train
--only-train-params-name-list --opd-kl-coef --opd-teacher-ckpt-step --opd-teacher-load --opd-type --opsm-delta
--over-sampling-batch-size --padded-vocab-size --partial-rollout --prefill-num-servers --profile-target
--prompt-data --qwen-gdn-backend --recompute-loss-function --record-memory-history --ref-ckpt-step --ref-load
--ref-update-interval --release-train --reset-optimizer-states --reward-key --rm-type --rm-url
--rollout-all-samples-process-path --rollout-batch-size --rollout-buffer-url --rollout-data-postprocess-path
--rollout-data-transport --rollout-external-engine-addrs --rollout-function-path
--rollout-health-check-first-wait --rollout-health-check-interval --rollout-health-check-timeout
--rollout-max-context-len --rollout-max-prompt-len --rollout-max-response-len --rollout-num-gpus
--rollout-num-gpus-per-engine --rollout-sample-filter-path --rollout-sample-hook-path --rollout-seed
--rollout-shuffle --rollout-skip-special-tokens --rollout-stop --rollout-stop-token-ids --rollout-task-type
--rollout-temperature --rollout-top-k --rollout-top-p --save --save-debug-rollout-data --save-debug-train-data
--save-hf --save-interval --seed --sglang-config --sglang-router-ip --sglang-router-port
--sglang-router-request-timeout-secs --sglang-server-concurrency --skip-eval-before-train --start-rollout-id
--tb-experiment-name --tb-project-name --tis-clip --tis-clip-low --tool-key --train-backend --train-env-vars
--update-weight-buffer-size --update-weight-delta-checksum --update-weight-delta-encoding
--update-weight-disk-dir --update-weight-disk-keep-files --update-weight-local-checkpoint-dir
--update-weight-mode --update-weight-transport --update-weights-interval --use-distributed-post
--use-dynamic-batch-size --use-fault-tolerance --use-kl-loss --use-opd --use-opsm --use-rollout-entropy
--use-rollout-logprobs --use-rollout-routing-replay --use-routing-replay --use-stateless-adam --use-tensorboard
--use-tis --use-unbiased-kl --use-wandb --value-clip --wandb-always-use-train-step --wandb-dir --wandb-group
--wandb-host --wandb-key --wandb-mode --wandb-project --wandb-run-id --wandb-team
"""

# Names that the documents of vime, slime, Atropos and TRL show.
SEEDS = """
--actor-num-gpus-per-node --actor-num-nodes --advantage-estimator --apply-chat-template --balance-abs-threshold
--batch-size --benchmark --calculate-per-token-loss --ckpt-format --ckpt-step --colocate --context-length
--context-parallel-size --critic-load --critic-lr --critic-lr-warmup-iters --critic-num-gpus-per-node
--critic-num-nodes --critic-save --custom-generate-function-path --custom-megatron-before-log-prob-hook-path
--custom-megatron-before-train-step-hook-path --custom-megatron-init-path --custom-rm-path --data-parallel-size
--disable-bias-linear --dp-size --dtype --enable-deepep-moe --enable-dp-attention --enable-ep-moe
--enable-expert-parallel --enable-lora --enable-prefix-caching --enforce-eager --env.tokenizer_name
--env.use_wandb --eps-clip --eval-function-path --expert-model-parallel-size --expert-tensor-parallel-size
--ffn-hidden-size --gpu-memory-utilization --group-query-attention --hf-checkpoint --hidden-size --host
--input-key --kl-coef --kv-channels --label-key --load --log-level --lora-alpha --lora-r --lr --max-lora-rank
--max-model-len --max-positional-embedding --megatron-config-path --mem-fraction-static --model --model-name
--model-path --n-samples-per-prompt --norm-epsilon --normalization --normalize-advantages --num-attention-heads
--num-critic-only-steps --num-layers --num-query-groups --openai.api_key --openai.base_url --openai.model_name
--openai.server_type --pipeline-model-parallel-size --pipeline-parallel-size --port --prefill-num-servers
--qk-layernorm --recompute-granularity --recompute-method --recompute-num-layers --ref-load --revision
--rollout-function-path --rollout-num-gpus --rollout-num-gpus-per-engine --rotary-base
--router-balance-abs-threshold --router-policy --router-request-timeout-secs --save --save-path --seq-length
--sequence-parallel --sglang-context-length --sglang-dp-size --sglang-enable-deepep-moe
--sglang-enable-dp-attention --sglang-enable-ep-moe --sglang-mem-fraction-static --sglang-router-ip
--sglang-router-port --sglang-tp-size --single-copy --slurm --swiglu --tensor-model-parallel-size
--tensor-parallel-size --tp-size --train-backend --trainer-rank --training-steps
--use-rotary-position-embeddings --use-tis --use-wandb --value-clip --vllm-config --vllm-config-path
--vllm-data-parallel-size --vllm-enable-expert-parallel --vllm-gpu-memory-utilization --vllm-max-model-len
--vllm-port --vllm-restart-interval --vllm-router-ip --vllm-router-port --vocab-size
--weight-bridge-mode --world-size
"""

# Defaults of slime, for those of its flags that act here and have one.
SLIME_DEFAULTS = """
--actor-num-nodes=1 --actor-num-gpus-per-node=8 --rollout-num-gpus-per-engine=1 --rollout-temperature=1.0
--rollout-top-p=1.0 --rollout-top-k=-1 --rollout-skip-special-tokens=False --rollout-shuffle=False
--rollout-seed=42 --partial-rollout=False --mask-offpolicy-in-partial-rollout=False
--rollout-sample-hook-path=[] --disable-rollout-global-dataset=True --apply-chat-template=False
--apply-chat-template-kwargs={} --input-key=input --metadata-key=metadata --tool-key=tools --micro-batch-size=1
--balance-data=False --use-dynamic-batch-size=False --skip-eval-before-train=False --n-samples-per-eval-prompt=1
--no-save-optim=False --seed=1234 --clip-grad=1.0 --calculate-per-token-loss=False --lr=1e-06 --eps-clip=0.2
--kl-coef=0.0 --loss-type=policy_loss --kl-loss-type=k1 --advantage-estimator=grpo --use-kl-loss=False
--kl-loss-coef=0.0 --use-unbiased-kl=False --entropy-coef=0.0 --normalize-advantages=False
--disable-grpo-std-normalization=True --disable-rewards-normalization=True --use-rollout-logprobs=False
--use-tis=False --tis-clip=2.0 --tis-clip-low=0 --use-opsm=False --opsm-delta=0.0001
--use-wandb=False
--use-tensorboard=False --group-rm=False --loss-mask-type=qwen
--train-backend=megatron
"""


def test_every_flag_of_slime_and_of_the_seeds_is_in_the_table():
    assert len(SLIME.split()) == 229
    assert len(SEEDS.split()) > 120
    assert [name for name in SLIME.split() if name not in own_flags()] == []
    assert [name for name in SEEDS.split() if find(name) is None] == []


def test_defaults_are_slimes():
    assert len(SLIME_DEFAULTS.split()) > 40
    for pair in SLIME_DEFAULTS.split():
        name, default = pair.split("=")
        ours = own_flags()[name].default
        assert str(ours) == default or float(ours) == float(default), name
    assert own_flags()["--n-samples-per-prompt"].default == 8  # slime's 1 makes GRPO train on nothing


def test_records_are_well_formed():
    names = [name for group in groups() for flag in group.flags for name in (flag.name, *flag.aliases)]
    assert len(names) == len(set(names))
    attributes = [flag.attribute for group in groups() for flag in group.flags]
    assert len(attributes) == len(set(attributes))
    for group in groups():
        for flag in group.flags:
            assert flag.help if flag.status == "acts" else flag.note, flag.name
            assert set(flag.whose) <= set("VRSCATM"), flag.name
            if flag.choices and flag.default is not None:
                assert flag.default in flag.choices, flag.name


def test_every_number_has_a_range_and_a_default_within_it():
    """Both ends are finite, a value beyond either is refused with the range, and the document prints it."""
    acting = {f.name: f for f in (*own_flags().values(), *passed_through().values()) if f.status == "acts"}
    ranges = {name: COUNT if flag.type is size else flag.type for name, flag in acting.items()}
    numbers = {name: number for name, number in ranges.items() if isinstance(number, Number)}
    untyped = [f.name for f in acting.values() if isinstance(f.default, int | float) and not f.is_switch]
    assert len(numbers) > 110 and set(untyped) <= set(numbers)
    documented = flags_markdown()
    for name, number in numbers.items():
        assert -math.inf < number.low <= number.high < math.inf, name
        default = acting[name].default
        for value in () if default is None else default if isinstance(default, list) else (default,):
            number.check(value)
        beyond = [number.low - 1, number.high * 1.5 + 1] + [number.low] * number.above
        for value in (str(number.kind(v)) for v in beyond):
            with pytest.raises(ValueError, match="must be (above|at least) .* and at most|whole number"):
                acting[name].convert(value)
        row = next(line for line in documented.splitlines() if line.startswith(f"| `{name}`"))
        assert number.range in row, name


FAR = """
--sync-timeout=1e10 --heartbeat-timeout=1e7 --seed=100000000000000000000 --seed=4294967295 --rollout-seed=4294967295
--lr=1e20 --critic-lr=2 --rollout-temperature=1e9 --rollout-temperature=0.001 --adam-eps=1e9 --adam-eps=1e-300
--n-samples-per-prompt=100000000000000000000 --rollout-batch-size=100000000000000000000 --rollout-num-gpus=1000000
--vllm-max-model-len=9999G --weight-decay=1e9 --entropy-coef=1e9 --vllm-max-num-batched-tokens=99999999999999999999
"""


@pytest.mark.parametrize("word", FAR.split())
def test_a_number_that_is_far_out_is_refused_at_once(tmp_path, monkeypatch, word):
    make_folder(tmp_path, monkeypatch)
    start = time.process_time()
    text = refusal(word)
    assert word.partition("=")[0] in text and "must be" in text and time.process_time() - start < 2


def test_bytes_that_are_no_text_are_refused(tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    assert "'\\udcff' is not UTF-8 text\n  where:  --rollout-stop" in refusal("--rollout-stop \udcff")


def test_instead_names_flags_that_exist():
    for flag in [*own_flags().values(), *megatron_table()]:
        for word in flag.instead.replace(",", " ").split():
            if word.startswith("--"):
                assert find(word) is not None, (flag.name, word)


def test_megatron_table_is_the_whole_command_line():
    table = megatron_table()
    assert len(table) == 651
    by_name = {flag.name: flag for flag in table}
    assert by_name["--adam-beta2"].default == 0.999
    assert by_name["--recompute-granularity"].choices == ("full", "selective")
    assert by_name["--no-rope-fusion"].constant is False
    assert by_name["--tokenizer-type"].status == "refused"
    assert by_name["--moe-permute-fusion"].status == "accepted"


def test_flags_that_pass_through_are_fields_of_megatron_core():
    spec = importlib.util.find_spec("megatron.core") if importlib.util.find_spec("megatron") else None
    if spec is None or spec.origin is None:
        pytest.skip("megatron-core is not installed")
    fields = set()
    for name in ("model_parallel_config", "transformer/transformer_config", "optimizer/optimizer_config") + (
        "distributed/distributed_data_parallel_config",
    ):  # read, not imported: that takes a quarter of a minute
        tree = ast.parse((Path(spec.origin).parent / f"{name}.py").read_text())
        fields |= {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and node.simple}
    acting = {flag.attribute for flag in passed_through().values() if flag.status == "acts"}
    assert len(acting) >= 7
    assert acting <= fields


def test_docs_are_made_from_the_table():
    assert (ROOT / "docs/arguments.md").read_text() == flags_markdown(), (
        "python scripts/docs/arguments.py > docs/arguments.md"
    )


def test_types_are_made_from_the_table(tmp_path, monkeypatch):
    path = ROOT / "instep/arguments/settings.pyi"
    assert path.read_text() == stub(), "python scripts/docs/args_stub.py"
    make_folder(tmp_path, monkeypatch)
    declared = re.findall(r"^    (\w+): ", stub().partition("class HookSettings")[0], re.M)
    assert sorted(vars(parse(argv()))) == sorted(declared)  # each in one concern


@pytest.mark.slow
def test_mypy_knows_the_attributes_of_arguments(tmp_path):
    """Hooks' arguments, too; what they have only in a run is never None there."""
    (tmp_path / "code.py").write_text(
        "from instep.arguments.args import Args, HookArgs\n"
        "def f(args: Args, view: HookArgs) -> int:\n"
        "    args.no_such_flag\n"
        "    view.no_such_flag\n"
        "    port: int = args.vllm_router_port\n"
        "    return args.n_samples_per_prompt + view.vllm_router_port + view.num_rollout\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "code.py")]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout
    assert [line.split(":")[1] for line in text.splitlines() if ": error: " in line] == ["3", "4", "5"], text
