#!/bin/bash
# Slurm's Epilog, as root on every node of a job. When the user's last job on the node has ended, it tells the user's sidecar to
# drain. The sidecar finishes the staged checkpoints; the epilog does not wait for it.
# All commands run as the user, because the directory belongs to the user, and a link in it may lead anywhere.
set -u
user=${SLURM_JOB_USER:?}
[ "$(id -un)" = "$user" ] && as_user=() || as_user=(runuser -u "$user" --)
timeout -k 5 60 "${as_user[@]}" "$BASH" -s -- "${HEADRACE_RUN_DIR:-/run}/headrace-$user" "${SLURM_JOB_ID:?}" > /dev/null 2>&1 << 'AS_USER'
set -u
cd "$1" && exec 9>> prolog.lock && flock -w 30 9 || exit 0
rm -f "jobs/$2"
[ -n "$(ls -A jobs)" ] && exit 0
pid=$(head -c 20 sidecar.sock.lock)
[ "$(stat -c %u "/proc/$pid")" = "$(id -u)" ] && tr '\0' ' ' < "/proc/$pid/cmdline" | grep -q "sidecar run" && kill -TERM "$pid"
AS_USER
exit 0
