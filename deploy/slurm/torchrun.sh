#!/bin/bash
# Runs torchrun as a task of srun, passes the request to save on to the trainers, and exits with their code:
#   srun --kill-on-bad-exit=1 --ntasks-per-node=1 torchrun.sh --nnodes=$SLURM_NNODES --nproc-per-node=8 … train.py
# torchrun itself exits with 1 for every failed trainer, and SIGUSR1 would end it. Slurm signals all processes of a step, so
# torchrun starts with SIGUSR1 ignored. A trainer handles it once `on_preemption` was called; until then it ignores it.
# The trainers' reports say whether the state is committed: 99 if that of every trainer says so, else 98.
set -u
reports=$(mktemp -d) || exit 1
trap 'rm -rf -- "$reports"' EXIT
(trap '' USR1; export HEADRACE_PREEMPTION_REPORT="$reports/report"; exec ${TORCHRUN:-torchrun} "$@") &
torchrun=$!
trap 'pkill -USR1 -P "$torchrun"' USR1
while :; do  # a signal interrupts `wait`, which then returns more than 128
  wait "$torchrun"
  code=$?
  kill -0 "$torchrun" 2> /dev/null || break
done
[ "$code" -eq 0 ] || [ -z "$(ls -A "$reports")" ] && exit "$code"
for report in "$reports"/*; do
  grep -q '"committed": *true' "$report" || exit 98
done
exit 99
