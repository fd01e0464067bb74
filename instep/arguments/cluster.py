"""Where the processes run and how many there are."""

from instep.arguments.flag import ASYNC, COUNT, HARDENING, POSITIVE, Flag, FlagGroup, Number, later, refused, switch

RAY = "messages travel in one way"
OFFLOAD = "comes with the memory work; trainer and engines keep their memory today"

CLUSTER = FlagGroup(
    "Cluster and device",
    (
        Flag("--actor-num-nodes", COUNT, 1, "hosts of the trainer; more than one needs --cluster ray", seeds="VSC"),
        Flag("--actor-num-gpus-per-node", COUNT, 8, "trainer ranks on each host (GPUs, or processes)", seeds="VSC"),
        Flag("--rollout-num-gpus", COUNT, None, "GPUs of all engines; default: those of one engine", seeds="VSC"),
        Flag("--rollout-num-gpus-per-engine", COUNT, 1, "GPUs of one engine", seeds="VSRC"),
        Flag("--num-gpus-per-node", COUNT, 8, "GPUs (or processes) that a host of the Ray cluster has", seeds="C"),
        switch("--colocate", "engines use the trainer's GPUs, --rollout-num-gpus is ignored", "VSC"),
        Flag(
            "--cluster",
            default="local",
            choices=("local", "ray"),
            help="local: one supervised process per rank, on this host; ray: on the hosts of a Ray cluster",
        ),
        Flag(
            "--ray-address",
            default="auto",
            help="HOST:PORT of a Ray cluster; local: a Ray of the run's own; auto: RAY_ADDRESS, else local",
        ),
        Flag("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: cuda where there is a GPU"),
        Flag(
            "--precision",
            default="auto",
            choices=("auto", "fp32", "bf16"),
            help="of weights and activations; auto: fp32 on a CPU, bf16 on a GPU",
        ),
        Flag("--bf16", bool, False, "the same as --precision bf16", seeds="M"),
        Flag("--num-threads", COUNT, None, "CPU threads per process; default: the cores divided among the processes"),
        Flag(
            "--controller-memory-limit",
            POSITIVE,
            help="GB by which the controller, where rewards and other hooks run, may grow during the run; "
            "default: half of the memory that is free at the start",
        ),
        Flag("--run-dir", help="folder of metrics, logs and report; default: runs/<command>"),
        switch(
            "--deterministic-mode",
            "the same bits in every run and after every resume: the engine computes each sample as if it were alone, "
            "rollouts wait for all they have started, torch uses deterministic algorithms; slower",
            "M",
        ),
        Flag("--seed", Number(int, 0), 1234, "of the trainer and, by hashing, of all sampling", seeds="CM"),
        *later(OFFLOAD, "C", "--offload", "--offload-train", "--offload-rollout"),
        *later(RAY, "C", "--train-env-vars", instead="environment variables of the calling shell, which are inherited"),
        *later(RAY, "C", "--rollout-data-transport", "--use-distributed-post"),
        *refused(
            "the trainer's process group is nccl on GPUs and gloo on CPUs",
            "CM",
            "--distributed-backend",
            instead="--device",
        ),
        *refused("every wait has a bound in seconds", "CM", "--distributed-timeout-minutes", instead="--train-timeout"),
        *later(HARDENING, "C", "--release-train"),
        *later(ASYNC, "C", "--update-weights-interval", "--keep-old-actor"),
        *refused(
            "the engines of every run are watched",
            "C",
            "--use-fault-tolerance",
            "--rollout-health-check-interval",
            "--rollout-health-check-timeout",
            "--rollout-health-check-first-wait",
            instead="nothing: one of several engines that dies is started anew, the last one ends the run by name",
        ),
        *refused("read by nobody in slime", "C", "--http-proxy", instead="the environment variable http_proxy"),
    ),
)
