"""Flags of Atropos' example trainer and of TRL's server, which their users may try in instep."""

from instep.arguments.flag import FlagGroup, later, refused

ATROPOS = "a flag of Atropos' example trainer, whose weight bridges come later"
SERVER = "a flag of a generation server: `instep serve --help` lists those of instep's"

NEIGHBOURS = FlagGroup(
    "Neighbours",
    (
        *later(ATROPOS, "A", "--weight-bridge-mode", "--single-copy", instead="--sync-way"),
        *later(ATROPOS, "A", "--vllm-config-path", "--vllm-restart-interval", "--benchmark"),
        *later(ATROPOS, "A", "--lora-r", "--lora-alpha", "--enable-lora", "--max-lora-rank"),
        *refused(ATROPOS, "A", "--vllm-port", instead="--engine-port"),
        *refused(ATROPOS, "A", "--training-steps", instead="--num-rollout"),
        *refused(ATROPOS, "A", "--batch-size", instead="--rollout-batch-size and --micro-batch-size"),
        *refused(ATROPOS, "A", "--save-path", instead="--save and --save-hf"),
        *refused(ATROPOS, "A", "--trainer-rank", "--world-size", instead="--actor-num-gpus-per-node"),
        *refused(SERVER, "AT", "--model", instead="--hf-checkpoint"),
        *refused(SERVER, "T", "--host", instead="nothing: everything binds to loopback"),
        *refused(SERVER, "AT", "--dtype", instead="--precision and --vllm-dtype"),
        *refused(
            SERVER,
            "AT",
            "--tensor-parallel-size",
            instead="--tensor-model-parallel-size (the trainer's) or --rollout-num-gpus-per-engine",
        ),
        *refused(SERVER, "A", "--pipeline-parallel-size", instead="--pipeline-model-parallel-size"),
        *refused(SERVER, "AT", "--enforce-eager", instead="--vllm-enforce-eager"),
        *refused(SERVER, "T", "--enable-prefix-caching", instead="--vllm-enable-prefix-caching"),
        *refused(SERVER, "T", "--revision", instead="the folder of that revision as --hf-checkpoint"),
        *refused(SERVER, "T", "--log-level", instead="--vllm-uvicorn-log-level or --router-log-level"),
    ),
)
