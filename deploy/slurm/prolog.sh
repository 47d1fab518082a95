#!/bin/bash
# Slurm's Prolog, as root on every node of a job: one sidecar for the job's user, shared by all jobs of that user on the node.
# A prolog that fails drains the node. So the prolog logs errors, and the job then runs without a sidecar.
# Root makes two directories, in directories that only root can write to, and gives them to the user. Everything below them
# is opened, made and run as the user, because a link there may lead anywhere.
set -u
user=${SLURM_JOB_USER:?}
run=${HEADRACE_RUN_DIR:-/run}/headrace-$user
cache=${HEADRACE_CACHE_DIR:-/var/cache}/headrace-$user
[ "$(id -un)" = "$user" ] && as_user=() || as_user=(runuser -u "$user" --)
fail() { logger -t headrace "job ${SLURM_JOB_ID:-?}: $1" 2>/dev/null; exit 0; }

# whether only root can write to the directory $1, and only root can replace a link or directory in its path;
# in a sticky directory only their owners can replace entries
only_roots() {
  namei -l -- "$1" 2>/dev/null | awk '
    NR == 1 { next }  # the path itself
    $2 != "root" || !/^[dl]/ { others = 1 }
    /^d/ { writable = substr($1, 6, 1) == "w" || substr($1, 9, 1) == "w" }
    /^d/ && writable && substr($1, 10, 1) !~ /[tT]/ { others = 1 }
    END { exit NR < 2 || others || writable }'
}

# make the directory $1, private to the user; an existing one is not changed
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
# in its own session, and with no open file of the prolog except the log
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
