#!/usr/bin/env bash
# A Ray cluster for one command: run the same line on every host, with another --rank on each.
#
#   scripts/ray_run.sh --rank RANK --num-nodes N --head HOST:PORT [--address IP] [--num-gpus G] [--num-cpus C]
#                      [--wait SECONDS] -- instep train --cluster ray ...
#
# Rank 0 runs on HOST: it starts Ray's head there, then the command with RAY_ADDRESS set, and exits with its code. The
# other ranks join within --wait seconds (300) and leave when the head has gone. Each ends its own Ray, and no other.
# RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN on all hosts keep other users out (docs/cluster.md).
set -euo pipefail

fail() {
    printf 'ray_run: %s\n' "$@" >&2
    exit 2
}

rank='' num_nodes='' head='' address='' wait_seconds=300 resources=()
while (($#)) && [[ $1 != -- ]]; do
    (($# > 1)) || fail "$1 needs a value"
    case $1 in
    --rank) rank=$2 ;;
    --num-nodes) num_nodes=$2 ;;
    --head) head=$2 ;;
    --address) address=$2 ;;
    --wait) wait_seconds=$2 ;;
    --num-gpus | --num-cpus) resources+=("$1" "$2") ;;
    *) fail "unknown option '$1'" "remedy: the head of this file lists them; the command comes after --" ;;
    esac
    shift 2
done
shift || true
number='^[0-9]+$'
[[ $rank =~ $number && $num_nodes =~ $number && $wait_seconds =~ $number ]] || fail "--rank, --num-nodes and --wait are numbers"
((rank < num_nodes)) || fail "--rank $rank is not below --num-nodes $num_nodes"
[[ $head =~ ^[^:]+:[0-9]+$ ]] || fail "--head '$head' is no HOST:PORT"
((rank > 0 || $# > 0)) || fail "no command" "remedy: give it after --"
command -v ray >/dev/null || fail "no 'ray' here" "remedy: instep install ray, and activate its environment"
host=${head%:*} port=${head##*:}

answers() { timeout 5 bash -c "exec 3<>/dev/tcp/$host/$port" 2>/dev/null; }
export RAY_worker_niceness=0 # Ray's 15 would be that of ranks and engines, too
# `ray start --block` keeps a node's processes in its own process group (setsid); the end of this script ends them.
node_pid=''
with_parent=() # should this script be killed, they end as well
! command -v setpriv >/dev/null || with_parent=(setpriv --pdeathsig TERM)
start_node() {
    local options=(--block --disable-usage-stats --log-color false --dashboard-agent-listen-port 0)
    [[ -z $address ]] || options+=(--node-ip-address "$address")
    RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 ${with_parent[@]+"${with_parent[@]}"} \
        setsid ray start "${options[@]}" ${resources[@]+"${resources[@]}"} "$@" >&2 &
    node_pid=$!
}
command_pid=''
finish() {
    trap - EXIT
    local pid
    for pid in $command_pid $node_pid; do
        kill -TERM "$pid" 2>/dev/null || true
        for _ in {1..100}; do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        [[ $pid == "$node_pid" ]] || kill -KILL "$pid" 2>/dev/null || true
    done
    [[ -z $node_pid ]] || kill -KILL -- "-$node_pid" 2>/dev/null || true
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

if ((rank == 0)); then
    ! answers || fail "port $port of $host is taken" "remedy: name another with --head"
    if [[ $host =~ ^[0-9.]+$ ]]; then : "${address:=$host}"; fi # of a name Ray knows better which address others reach
    start_node --head --port "$port" --include-dashboard false
fi
deadline=$((SECONDS + wait_seconds))
until answers; do
    ((SECONDS < deadline)) || fail "no Ray answers at $head after $wait_seconds s" "remedy: is rank 0 running there? raise --wait"
    [[ -z $node_pid ]] || kill -0 "$node_pid" 2>/dev/null || fail "Ray did not start" "remedy: see its messages above"
    sleep 1
done
if ((rank == 0)); then
    RAY_ADDRESS=$head ${with_parent[@]+"${with_parent[@]}"} "$@" & # in the background, so that a signal to this script is not kept waiting
    command_pid=$!
    code=0
    wait "$command_pid" || code=$?
    command_pid=''
    exit "$code"
fi
start_node --address "$head"
misses=0
while ((misses < 3)) && kill -0 "$node_pid" 2>/dev/null; do
    sleep 2
    if answers; then misses=0; else misses=$((misses + 1)); fi
done
((misses >= 3)) || fail "this node's Ray has ended before the head did" "remedy: see its messages above"
