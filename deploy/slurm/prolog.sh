#!/bin/bash
# Slurm's Prolog, as root on every node of a job: one sidecar for the job's user, shared by all jobs of that user on the node.
# A prolog that fails drains the node, so trouble here is logged and the job runs without a sidecar, as it can.
# Root makes two directories, in directories that only root can write to, and gives them to the user. Everything below them is
# the user's: it is opened, made and run as the user, since a link there may lead anywhere.
set -u
user=${SLURM_JOB_USER:?}
run=${HEADRACE_RUN_DIR:-/run}/headrace-$user
cache=${HEADRACE_CACHE_DIR:-/var/cache}/headrace-$user
[ "$(id -un)" = "$user" ] && as_user=() || as_user=(runuser -u "$user" --)
fail() { logger -t headrace "job ${SLURM_JOB_ID:-?}: $1" 2>/dev/null; exit 0; }

# whether no one but root can put anything into the directory $1, or anything else in place of a link or directory on the way to it;
# in a sticky directory entries are their owners' own
only_roots() {
  namei -l -- "$1" 2>/dev/null | awk '
    NR == 1 { next }  # the path itself
    $2 != "root" || !/^[dl]/ { others = 1 }
    /^d/ { writable = substr($1, 6, 1) == "w" || substr($1, 9, 1) == "w" }
    /^d/ && writable && substr($1, 10, 1) !~ /[tT]/ { others = 1 }
    END { exit NR < 2 || others || writable }'
}

# the directory $1, private to the user; one that exists is left as it is
private() {
  local above there
  above=$(dirname -- "$1") there=$above
  until [ -e "$there" ] || [ -L "$there" ]; do there=$(dirname -- "$there"); done
  only_roots "$there" && mkdir -p -- "$above" 2>/dev/null
  if ! only_roots "$above"; then
    "${as_user[@]}" mkdir -p -m 0700 -- "$1" 2>/dev/null
  elif mkdir -m 0700 -- "$1" 2>/dev/null; then
    chown -h -- "$user:" "$1"
  fi
  [ -d "$1" ] && [ ! -L "$1" ] && [ "$(stat -c %U -- "$1")" = "$user" ]
}

private "$run" && private "$cache" || fail "no directories for $user"
timeout -k 5 120 "${as_user[@]}" "$BASH" -s -- \
  "$run" "$cache" "${HEADRACE_BIN:-/opt/headrace/bin/headrace}" "${SLURM_JOB_ID:?}" > /dev/null 2>&1 << 'AS_USER'
set -u
umask 077
run=$1 headrace=$3
cd "$run" && chmod 0700 . && mkdir -p jobs && : > "jobs/$4" && exec 9> prolog.lock && flock -w 30 9 || exit 1
status() { "$headrace" sidecar status --socket "$run/sidecar.sock" > /dev/null 2>&1 < /dev/null; }
status && exit 0
mv -f sidecar.log sidecar.log.old 2> /dev/null
# in a session of its own, with nothing of the prolog's but its log
HEADRACE_SIDECAR_CACHE_DIR=$2 setsid "$headrace" sidecar run --socket "$run/sidecar.sock" \
  ${HEADRACE_SLURM_OPTIONS:-} < /dev/null > sidecar.log 2>&1 9>&- &
for _ in $(seq 100); do
  kill -0 $! 2> /dev/null || break
  status && exit 0
  sleep 0.1
done
exit 1
AS_USER
[ $? = 0 ] || fail "the sidecar of $user did not start; see $run/sidecar.log"
exit 0
