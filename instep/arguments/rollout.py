"""Generation: sampling, lengths, filters and hooks."""

from instep.arguments.flag import ALGORITHMS, COUNT, FRACTION, INDEX, INT, VLLM, Flag, Group, Number, hook, later, switch

ROLLOUT = Group(
    "Rollout",
    (
        Flag("--rollout-temperature", Number(float, 0, above=True), 1.0, "sampling temperature", seeds="C"),
        Flag("--rollout-top-p", Number(float, 0, 1, above=True), 1.0, "nucleus sampling", seeds="C"),
        Flag("--rollout-top-k", INT, -1, "top-k sampling; -1: off", seeds="C"),
        Flag("--rollout-max-response-len", COUNT, None, "most tokens of a response", seeds="C"),
        Flag("--rollout-max-prompt-len", COUNT, None, "longer prompts are left out, and counted", seeds="C"),
        Flag("--rollout-max-context-len", COUNT, None, "most tokens of prompt + response", seeds="C"),
        Flag("--rollout-stop", help="stop strings", nargs="+", seeds="C"),
        Flag("--rollout-stop-token-ids", INDEX, None, "stop token ids", nargs="+", seeds="C"),
        switch("--rollout-skip-special-tokens", "leave special tokens out of the response's text", "C"),
        Flag("--over-sampling-batch-size", COUNT, None, "prompts asked for at a time; default: one batch", seeds="C"),
        Flag("--dynamic-sampling-filter-path", hook, None, "f(args, group) -> keep this group?", seeds="C"),
        switch("--partial-rollout", "keep unfinished groups and continue them in the next rollout", "C"),
        switch("--mask-offpolicy-in-partial-rollout", "train only on the tokens since a group was continued", "C"),
        Flag(
            "--rollout-function-path",
            hook,
            "instep.rollout.vllm_rollout.generate_rollout",
            "f(args, rollout_id, data_source, evaluation=False): a whole rollout",
            seeds="VSC",
        ),
        Flag(
            "--custom-generate-function-path",
            hook,
            None,
            "async f(args, sample, sampling_params): one sample",
            seeds="VSC",
        ),
        Flag(
            "--rollout-sample-hook-path",
            hook,
            [],
            "f(args, sample), after generation and before the reward; may be given several times",
            append=True,
            seeds="C",
        ),
        Flag("--buffer-filter-path", hook, None, "f(args, rollout_id, buffer, n): groups from the buffer", seeds="C"),
        Flag("--rollout-sample-filter-path", hook, None, "f(args, groups): marks samples remove_sample", seeds="C"),
        Flag(
            "--rollout-all-samples-process-path",
            hook,
            None,
            "f(args, all_groups, data_source): sees dropped groups, too",
            seeds="C",
        ),
        *later(
            ALGORITHMS,
            "C",
            "--custom-convert-samples-to-train-data-path",
            instead="sample.train_metadata and fields of your own, which reach the trainer",
        ),
        Flag(
            "--custom-rollout-log-function-path",
            hook,
            None,
            "f(rollout_id, args, samples, extra_metrics, rollout_time); True: log nothing else",
            seeds="C",
        ),
        Flag(
            "--custom-eval-rollout-log-function-path",
            hook,
            None,
            "f(rollout_id, args, data, extra_metrics); True: log nothing else",
            seeds="C",
        ),
        *later("hooks inside the trainer come later", "C", "--rollout-data-postprocess-path"),
        *later(VLLM, "C", "--rollout-external-engine-addrs"),
    ),
)

EVAL = Group(
    "Evaluation",
    (
        Flag("--eval-interval", COUNT, None, "evaluate every so many rollouts, and before the first", seeds="CM"),
        Flag(
            "--eval-prompt-data", help="NAME FILE [NAME FILE ...]; one FILE alone takes its name", nargs="+", seeds="C"
        ),
        Flag("--eval-config", help="YAML of data sets with settings of their own (instead of the former)", seeds="C"),
        Flag("--eval-function-path", hook, None, "default: --rollout-function-path", seeds="VSC"),
        switch("--skip-eval-before-train", "no evaluation before the first rollout", "C"),
        Flag("--n-samples-per-eval-prompt", COUNT, 1, "responses per prompt", seeds="C"),
        Flag("--eval-input-key", help="default: --input-key", seeds="C"),
        Flag("--eval-label-key", help="default: --label-key", seeds="C"),
        Flag("--eval-tool-key", help="default: --tool-key", seeds="C"),
        Flag("--eval-temperature", Number(float, 0), None, "0: greedy; default: --rollout-temperature", seeds="C"),
        Flag("--eval-top-p", FRACTION, None, "default: --rollout-top-p", seeds="C"),
        Flag("--eval-top-k", INT, None, "default: --rollout-top-k", seeds="C"),
        Flag("--eval-max-response-len", COUNT, None, "default: --rollout-max-response-len", seeds="C"),
        Flag("--eval-max-prompt-len", COUNT, None, "default: --rollout-max-prompt-len", seeds="C"),
        Flag("--eval-max-context-len", COUNT, None, "default: --rollout-max-context-len", seeds="C"),
        Flag("--eval-min-new-tokens", INDEX, None, "fewest tokens of a response", seeds="C"),
    ),
)
