"""The flags of engines and of the weight sync."""

from instep.arguments.flag import (
    BATCH,
    GPUS,
    NON_NEGATIVE,
    PORT,
    Flag,
    FlagGroup,
    Number,
    path_flag,
    refused,
    size,
    switch,
)
from instep.engines.kind import AUTO, kind_names
from instep.weights.way import AUTO as AUTO_WAY
from instep.weights.way import WAYS

PREFIX = "engine flags carry a prefix"

ENGINE = FlagGroup(
    "Engine and weight sync",
    (
        Flag(
            "--rollout-backend",
            default=AUTO,
            choices=(AUTO, *kind_names()),
            help="auto: vLLM beside a GPU, the embedded engine on a CPU",
        ),
        Flag("--engine-port", PORT, None, "port of the first engine, the others follow; default: free ports"),
        Flag(
            "--port",
            PORT,
            None,
            "where `instep serve` answers, on loopback; further models follow; default: 8000",
            whose="AT",
        ),
        Flag("--vllm-max-model-len", size, None, "most tokens of prompt + response in an engine", whose="V"),
        Flag("--vllm-max-num-seqs", BATCH, None, "most requests at a time in an engine"),
        Flag(
            "--vllm-dtype",
            default="auto",
            choices=("auto", "float32", "bfloat16", "float16"),
            help="of the engine's weights; auto: the trainer's; float16 acts in `instep serve` with vLLM alone",
        ),
        Flag(
            "--weight-sync",
            default=AUTO_WAY,
            choices=(AUTO_WAY, *WAYS),
            help="how weights reach the engines (docs/weight-sync.md); auto: ipc where they share the trainer's GPUs, "
            "nccl where they have GPUs of their own, else shm on one host, else disk; single-copy: both use one memory",
            aliases=("--sync-way",),
        ),
        Flag(
            "--pause-mode",
            default=AUTO,
            choices=(AUTO, "abort", "keep", "wait"),
            help="what becomes of responses that are under way when the weights change: they end with what they have "
            "and are continued, stay in the engine and go on, or end first; auto: keep with --max-staleness where the "
            "engines say which weights made a token, else abort",
        ),
        Flag(
            "--sync-tolerance",
            NON_NEGATIVE,
            None,
            "largest difference between trainer and engine that a sync accepts (root mean square over the tokens of "
            "its proof, relative to their log-probs); default: three times what rounding explains",
        ),
        Flag(
            "--on-gap",
            default="stop",
            choices=("stop", "warn"),
            help="when the log-probs of tokens that the current weights have made differ between engine and trainer by "
            "more, in the mean, than ten times what the last sync's proof has measured (1e-3 to 0.5 nats): end the run "
            "before the step, or train on",
        ),
        Flag(
            "--update-weight-buffer-size",
            Number(int, 1, 2**40),
            512 * 1024**2,
            "bytes of one bucket of weights",
            whose="C",
        ),
        path_flag(
            "--vllm-config",
            "YAML of models, groups of engines and their GPUs (docs/engines_topologies.md); instead of "
            "--rollout-num-gpus and --prefill-num-servers",
            "V",
        ),
        Flag(
            "--vllm-router-ip",
            help="a vllm-router of yours, with --vllm-router-port; default: one is started",
            whose="V",
        ),
        Flag("--vllm-router-port", Number(int, 1, 65535), help="its port", whose="V"),
        Flag(
            "--prefill-num-servers",
            GPUS,
            None,
            "so many of the engines prefill only, the others decode only",
            whose="VC",
        ),
        Flag(
            "--rollout-external-engine-addrs",
            help="HOST:PORT of engines that run already, each a vLLM with instep's plugin; none are started",
            nargs="+",
            whose="C",
        ),
        switch(
            "--no-fast-log-probs",
            "vLLM answers by its own route, scheduler and sampler alone, which is slower (docs/engines.md)",
        ),
        path_flag(
            "--vllm-config-path",
            "the vllm_bridge_config.json by which a vLLM of --rollout-external-engine-addrs shares its weights "
            "(--weight-sync single-copy); default: that in $LOGDIR, in the current folder or in /tmp/atropos_bridge",
            "A",
        ),
        switch("--no-api-key", "anybody on the host may generate; control routes ask for a key all the same"),
        Flag(
            "--allowed-hosts",
            help="further names of this host by which clients may call engines and the port of `instep serve`, such as "
            "that of a proxy; default: the variable INSTEP_ALLOWED_HOSTS, else local names alone",
            nargs="+",
        ),
        path_flag(
            "--api-key-file",
            "file (mode 600) with the key that `instep serve` asks for, or of engines, routers and a teacher that "
            "are not the run's; default: the variable INSTEP_API_KEY, else a random one (and none for the latter)",
        ),
        *refused(PREFIX, "S", "--context-length", "--max-model-len", instead="--vllm-max-model-len"),
        *refused(PREFIX, "V", "--enable-expert-parallel", instead="--vllm-enable-expert-parallel"),
        *refused(PREFIX, "VT", "--data-parallel-size", instead="--vllm-data-parallel-size"),
        *refused(PREFIX, "V", "--balance-abs-threshold", instead="--router-balance-abs-threshold"),
        *refused(PREFIX, "S", "--mem-fraction-static", instead="--vllm-gpu-memory-utilization"),
        *refused(PREFIX, "AT", "--gpu-memory-utilization", instead="--vllm-gpu-memory-utilization"),
        *refused(PREFIX, "S", "--dp-size", "--enable-dp-attention", instead="--vllm-data-parallel-size"),
        *refused(PREFIX, "S", "--enable-ep-moe", instead="--vllm-enable-expert-parallel"),
        *refused(PREFIX, "S", "--enable-deepep-moe", instead="--vllm-all2all-backend"),
        *refused("an engine's size has a flag", "S", "--tp-size", instead="--rollout-num-gpus-per-engine"),
        *refused("an engine serves the trained model", "S", "--model-path", instead="--hf-checkpoint"),
    ),
)
