#!/usr/bin/env bash
# Two hosts on one machine: two network namespaces joined by a wire, with a deepspeed launcher in each.
#
#   RATE=200mbit launch/two_hosts.sh launch/train_lm.py --stages 2 --deepspeed_config ds_configs/none.json
#
# The arguments go to the deepspeed launcher of both hosts, after its own --hostfile, --node_rank and so on. Needs root.
#
#   RATE      of the link, each direction, as tc writes it: 1gbit, 200mbit; unset: as fast as the machine
#   RTT_MS    there and back, in milliseconds (default 0: a veth pair; else a tun device on each host, and bench/delayed_link.py
#             between them: not every kernel has netem)
#   LOSS      packets lost at random of every 100, each direction (default 0; the same process drops them)
#   JITTER_MS most that a packet is later than RTT_MS / 2, in milliseconds, at random, in their order (default 0)
#   TCP       congestion control (default cubic): one of /proc/sys/net/ipv4/tcp_available_congestion_control
#   SYSCTL    settings of the kernel on both hosts, as "net.ipv4.tcp_slow_start_after_idle=0", between blanks; not every container lets them be set
#   SLOTS     ranks on each host (default 1)
#   CORES     core of host A and core of host B (default "0 1"): the ranks of a host share one
#   COUNTERS  file that gets the bytes that left host A and host B, TCP and IP headers included, in two lines
#   DEEPSPEED the launcher (default deepspeed)
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

fail() {
    echo "two_hosts: $1" >&2
    exit 1
}

(($# > 0)) || fail "no script given; usage: [RATE=200mbit] $0 SCRIPT [ARGUMENTS]"
[[ $(id -u) == 0 ]] || fail "needs root to make network namespaces; run it as root, or with sudo -E"
for tool in ip tc taskset; do
    command -v $tool >/dev/null || fail "$tool is missing; it comes with iproute2 (taskset: util-linux)"
done
read -r core_a core_b <<<"${CORES:-0 1}"

a=ds-a-$$ b=ds-b-$$
folder=$(mktemp -d)
cleanup() {
    trap - EXIT
    trap '' INT TERM  # a second signal, as from a terminal to a whole group, must not end the cleaning up
    for host in $a $b; do
        # Only what runs inside our own namespaces
        ip netns pids $host 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    done
    [[ -n ${relay:-} ]] && kill -9 $relay 2>/dev/null || true
    wait 2>/dev/null || true
    for host in $a $b; do
        ip netns del $host 2>/dev/null || true
    done
    rm -rf "$folder"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

ip netns add $a && ip netns add $b || fail "this kernel or container does not allow network namespaces"
if [[ ${RTT_MS:-0} == 0 && ${LOSS:-0} == 0 && ${JITTER_MS:-0} == 0 ]]; then
    ip -n $a link add wire type veth peer name wire netns $b || fail "this kernel has no veth devices"
else
    [[ -c /dev/net/tun ]] || fail "this kernel has no tun devices: /dev/net/tun is missing"
    python3 "$(dirname "$0")/bench/delayed_link.py" $a $b wire "${RTT_MS:-0}" "${LOSS:-0}" "${JITTER_MS:-0}" &
    relay=$!
    until ip -n $b link show wire >/dev/null 2>&1; do
        kill -0 $relay 2>/dev/null || fail "bench/delayed_link.py has ended"
        sleep 0.1
    done
fi
# What a link passes at once after a pause: 4 ms of it, so that a message that is small for the link takes its time too
burst() {
    awk -v rate="$1" 'BEGIN {
        unit = rate ~ /gbit$/ ? 1e9 : rate ~ /mbit$/ ? 1e6 : rate ~ /kbit$/ ? 1e3 : 1
        bytes = rate * unit / 8 * 0.004
        printf "%d", (bytes < 16384 ? 16384 : bytes > 131072 ? 131072 : bytes)
    }'
}
address() { [[ $1 == "$a" ]] && echo 10.77.0.1 || echo 10.77.0.2; }
for host in $a $b; do
    ip -n $host address add "$(address $host)/30" dev wire
    ip -n $host link set lo up
    ip -n $host link set wire up
    for setting in ${SYSCTL:-}; do
        ip netns exec $host sysctl -qw "$setting" || fail "this kernel or container does not let SYSCTL=$setting be set"
    done
    # The default differs from machine to machine; a kernel without it keeps its own
    ip -n $host route replace 10.77.0.0/30 dev wire congctl "${TCP:-cubic}" || true
    if [[ -n ${RATE:-} ]]; then
        ip netns exec $host tc qdisc add dev wire root tbf rate "$RATE" burst "$(burst "$RATE")" latency 100ms ||
            fail "tc cannot shape the link to RATE=$RATE: is sch_tbf in this kernel, and is the rate written as 200mbit?"
    fi
done

printf 'hostA slots=%s\nhostB slots=%s\n' "${SLOTS:-1}" "${SLOTS:-1}" >"$folder/hosts"
export GLOO_SOCKET_IFNAME=wire OMP_NUM_THREADS=1 DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
start() { # namespace core rank
    ip netns exec $1 taskset -c "$2" "${DEEPSPEED:-deepspeed}" --hostfile "$folder/hosts" --no_ssh --node_rank "$3" \
        --master_addr 10.77.0.1 --master_port 29500 "${@:4}" &
}
hosts=()
start $a "$core_a" 0 "$@"
hosts+=($!)
start $b "$core_b" 1 "$@"
hosts+=($!)
# By their numbers: the wire between them never ends
wait -n "${hosts[@]}" || fail "a host failed"
for host in "${hosts[@]}"; do
    wait "$host" || fail "a host failed"
done

if [[ -n ${COUNTERS:-} ]]; then
    for host in $a $b; do
        ip netns exec $host cat /sys/class/net/wire/statistics/tx_bytes
    done >"$COUNTERS"
fi
