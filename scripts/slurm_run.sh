#!/usr/bin/env bash
# Several hosts under Slurm: one Ray node per host, the command on the first one.
#
#   sbatch --nodes 2 --gpus-per-node 8 scripts/slurm_run.sh instep train --cluster ray --run-dir /shared/runs/one ...
#
# Environment: INSTEP_RAY_PORT, Ray's port on the first host (default: one drawn from the job's id).
#              INSTEP_RAY_WAIT, seconds until all hosts must have joined (300).
# The command's exit code is the job's. The folder that it is submitted from must be on all hosts.
#SBATCH --job-name instep
#SBATCH --ntasks-per-node 1
#SBATCH --exclusive
set -euo pipefail

if (($# == 0)) || [[ -z ${SLURM_JOB_ID:-} ]]; then
    echo "usage: sbatch --nodes N --gpus-per-node G scripts/slurm_run.sh COMMAND ..." >&2
    exit 2
fi
cd "${SLURM_SUBMIT_DIR:-.}"
script=scripts/ray_run.sh # sbatch runs a copy of this file from elsewhere
[[ -x $script ]] || script=$(dirname "${BASH_SOURCE[0]}")/ray_run.sh
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head=$first:${INSTEP_RAY_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
gpus=()
[[ -z ${SLURM_GPUS_ON_NODE:-} ]] || gpus=(--num-gpus "$SLURM_GPUS_ON_NODE")
# Only who has the token can use this Ray; srun hands the environment on to all hosts.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
# shellcheck disable=SC2016  # each host's shell expands it
# --wait ends the other hosts, should they not have noticed by themselves that the first one is done.
exec srun --nodes "$SLURM_NNODES" --ntasks "$SLURM_NNODES" --ntasks-per-node 1 --kill-on-bad-exit=1 --wait=60 \
    bash -c 'script=$1 num_nodes=$2 head=$3; shift 3; exec "$script" --rank "$SLURM_PROCID" --num-nodes "$num_nodes" --head "$head" "$@"' \
    ray_run "$script" "$SLURM_NNODES" "$head" --wait "${INSTEP_RAY_WAIT:-300}" ${gpus[@]+"${gpus[@]}"} -- "$@"
