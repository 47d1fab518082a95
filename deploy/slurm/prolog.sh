#!/bin/bash
# Slurm's Prolog, as root on every node of a job: one sidecar for the job's user, shared by all his jobs on the node.
# A prolog that fails drains the node, so trouble here is logged and the job runs without a sidecar, as it can.
set -u
user=${SLURM_JOB_USER:?}
run=${MILLRACE_RUN_DIR:-/run}/millrace-$user
cache=${MILLRACE_CACHE_DIR:-/var/cache}/millrace-$user
millrace=${MILLRACE_BIN:-/opt/millrace/bin/millrace}
as_user() { if [ "$(id -un)" = "$user" ]; then "$@"; else runuser -u "$user" -- "$@"; fi; }
fail() { logger -t millrace "job ${SLURM_JOB_ID:-?}: $1" 2>/dev/null; exit 0; }

install -d -m 0700 -o "$user" "$run" "$run/jobs" "$cache" || fail "no directories for $user"
: > "$run/jobs/${SLURM_JOB_ID:?}"
exec 9> "$run/prolog.lock"
flock -w 30 9 || fail "another prolog holds $run"
as_user "$millrace" sidecar status --socket "$run/sidecar.sock" > /dev/null 2>&1 && exit 0
# in a session of its own, with nothing of the prolog's but its log
MILLRACE_SIDECAR_CACHE_DIR=$cache as_user setsid "$millrace" sidecar run --socket "$run/sidecar.sock" \
  ${MILLRACE_SLURM_OPTIONS:-} < /dev/null >> "$run/sidecar.log" 2>&1 9>&- &
for _ in $(seq 100); do
  kill -0 $! 2> /dev/null || break
  as_user "$millrace" sidecar status --socket "$run/sidecar.sock" > /dev/null 2>&1 && exit 0
  sleep 0.1
done
fail "the sidecar of $user did not start; see $run/sidecar.log"
