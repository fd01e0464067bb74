"""Flags of Atropos' example trainer and of TRL's server, which their users may try in instep."""

from instep.arguments.flag import SECONDS, WAYS_HERE, Family, Flag, FlagGroup, http_address, refused

ATROPOS = "a flag of Atropos' example trainer, which `instep atropos-train` takes"
SERVER = "a flag of a generation server; `instep vllm-serve` takes those of TRL's as they are"

_NEIGHBOURS = FlagGroup(
    "Neighbours",
    (
        Flag(
            "--atropos-url",
            http_address,
            "http://localhost:8000",
            "address of the Atropos API whose environments feed the run (docs/neighbours/atropos.md)",
            whose="A",
        ),
        Flag("--atropos-timeout", SECONDS, 600.0, "longest wait for a batch of that API, or for it to come back"),
        *refused(
            f"{ATROPOS}, whose weight bridges are ways of a sync here",
            "A",
            *("--weight-bridge-mode", "--single-copy"),
            instead="--weight-sync single-copy (shared_vllm), --weight-sync lora (lora_only) or --weight-sync shm",
        ),
        *refused(
            f"{ATROPOS}; a sync reaches the engines that run, without a restart",
            "A",
            "--vllm-restart-interval",
            instead=WAYS_HERE,
        ),
        *refused(f"{ATROPOS}; every run writes perf/* into metrics.jsonl", "A", "--benchmark"),
        *refused(ATROPOS, "A", "--vllm-port", instead="--engine-port"),
        *refused(ATROPOS, "A", "--training-steps", instead="--num-rollout"),
        *refused(ATROPOS, "A", "--batch-size", instead="--rollout-batch-size and --micro-batch-size"),
        *refused(ATROPOS, "A", "--save-path", instead="--save and --save-hf"),
        *refused(ATROPOS, "A", "--trainer-rank", "--world-size", instead="--actor-num-gpus-per-node"),
        *refused(SERVER, "AT", "--model", instead="--hf-checkpoint"),
        *refused(SERVER, "T", "--host", instead="leave it out: everything binds to loopback"),
        *refused(SERVER, "AT", "--dtype", instead="--precision bf16 or --precision fp32"),
        *refused(
            "of an engine; the trainer's is --tensor-model-parallel-size",
            "AT",
            "--tensor-parallel-size",
            instead="--rollout-num-gpus-per-engine",
        ),
        *refused(
            "of an engine; the trainer's is --pipeline-model-parallel-size",
            "A",
            "--pipeline-parallel-size",
            instead="--vllm-pipeline-parallel-size",
        ),
        *refused(SERVER, "AT", "--enforce-eager", instead="--vllm-enforce-eager"),
        *refused(SERVER, "T", "--enable-prefix-caching", instead="--vllm-enable-prefix-caching"),
        *refused(SERVER, "T", "--revision", instead="the folder of that revision as --hf-checkpoint"),
        *refused(SERVER, "T", "--log-level", instead="--vllm-uvicorn-log-level or --router-log-level"),
    ),
)

GROUPS = (_NEIGHBOURS,)

_ENVIRONMENT = "a flag of an Atropos environment"
_THERE = "the environment's own command line (docs/neighbours/atropos.md)"
FAMILIES = (
    Family("--openai.", _ENVIRONMENT, _THERE),
    Family("--env.", _ENVIRONMENT, _THERE),
    Family("--slurm", _ENVIRONMENT, "--cluster ray (docs/cluster.md)"),
)
