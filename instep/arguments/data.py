"""Prompts, batches and how long a run is."""

from instep.arguments.flag import COUNT, INDEX, Flag, Group, hook, json_object, later, negation, refused, switch

DATA = Group(
    "Data and batches",
    (
        Flag("--prompt-data", help="jsonl or parquet file; FILE@[a:b] takes rows a to b", seeds="C"),
        Flag("--input-key", default="input", help="column of the prompt (a string or a list of messages)", seeds="VSC"),
        Flag("--label-key", help="column of the label", seeds="VSC"),
        Flag("--metadata-key", default="metadata", help="column of the metadata", seeds="VSC"),
        Flag("--tool-key", default="tools", help="column of the tools", seeds="C"),
        switch("--apply-chat-template", "render messages with the tokenizer's chat template", "VSC"),
        Flag("--apply-chat-template-kwargs", json_object, {}, "more arguments of the chat template", seeds="C"),
        switch("--rollout-shuffle", "shuffle the prompts in each epoch", "C"),
        Flag("--rollout-seed", INDEX, 42, "of the shuffle and of the sampling seeds", seeds="C"),
        switch("--skip-bad-rows", "skip and count rows that cannot be used, instead of stopping"),
        negation("--disable-rollout-global-dataset", "rollout_global_dataset", "no built-in data set", "C"),
        Flag("--data-source-path", hook, None, "class(args) that hands out prompts; default: instep's own", seeds="C"),
        Flag("--num-rollout", INDEX, None, "rounds of rollout and training; 0 only evaluates", seeds="C"),
        Flag("--num-epoch", COUNT, None, "instead of --num-rollout: passes over the prompts", seeds="C"),
        Flag("--rollout-batch-size", COUNT, None, "prompts per rollout", seeds="C"),
        Flag("--n-samples-per-prompt", COUNT, 8, "responses per prompt (slime: 1)", seeds="VSC"),
        Flag(
            "--global-batch-size",
            COUNT,
            None,
            "samples per optimizer step; default: all samples of a rollout / --num-steps-per-rollout",
            seeds="CM",
        ),
        Flag("--num-steps-per-rollout", COUNT, None, "optimizer steps per rollout", seeds="C"),
        Flag("--micro-batch-size", COUNT, 1, "samples per micro-batch, unless --use-dynamic-batch-size", seeds="CM"),
        switch("--use-dynamic-batch-size", "fill micro-batches up to --max-tokens-per-gpu", "C"),
        Flag("--max-tokens-per-gpu", COUNT, None, "tokens per micro-batch with --use-dynamic-batch-size", seeds="C"),
        switch("--balance-data", "give each data-parallel rank about the same number of tokens", "C"),
        Flag(
            "--loss-mask-type",
            default="qwen",
            choices=("qwen", "qwen3", "qwen3_5", "distill_qwen"),
            help="how sft finds the assistant's turns in the chat template",
            seeds="C",
        ),
        *later("images and audio come later", "C", "--multimodal-keys"),
        *later("packing by FLOPs comes later", "C", "--balance-by-flops", instead="--balance-data"),
        *refused("read by nobody in slime", "C", "--log-probs-max-tokens-per-gpu", instead="--max-tokens-per-gpu"),
        *refused("read by nobody in slime", "C", "--min-batch-collection-ratio"),
        *refused(
            "belongs to an example of slime, not to its core",
            "C",
            "--rollout-buffer-url",
            "--fetch-trajectory-retry-times",
            "--rollout-task-type",
            instead="--data-source-path with a data source of your own",
        ),
        *refused("micro-batches are packed without that padding", "C", "--data-pad-size-multiplier"),
        *refused(
            "a file merged after validation would bypass it", "C", "--custom-config-path", instead="the flags themselves"
        ),
    ),
)
