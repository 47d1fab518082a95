#!/bin/bash
# Slurm's Epilog, as root on every node of a job: when the user's last job on the node is over, his sidecar is told to drain.
# It finishes what was staged, on its own time; the epilog does not wait for it.
set -u
user=${SLURM_JOB_USER:?}
run=${MILLRACE_RUN_DIR:-/run}/millrace-$user
exec 9> "$run/prolog.lock" || exit 0
flock -w 30 9 || exit 0
rm -f "$run/jobs/${SLURM_JOB_ID:?}"
[ -n "$(ls -A "$run/jobs" 2>/dev/null)" ] && exit 0
pid=$(cat "$run/sidecar.sock.lock" 2>/dev/null)
[ -n "$pid" ] && [ "$(stat -c %U "/proc/$pid" 2>/dev/null)" = "$user" ] \
  && tr '\0' ' ' < "/proc/$pid/cmdline" | grep -q "sidecar run" && kill -TERM "$pid"
exit 0
