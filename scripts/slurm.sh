#!/bin/bash
# Four nodes of eight GPUs:  sbatch scripts/slurm.sh recipe=llama33_70b_eagle3 data.path=FOLDER output_dir=FOLDER
#
# Two minutes before the time is up Slurm signals this script. It has the run save and stop, and puts the job back into the
# queue, where the same command continues. The signal is USR1 and not TERM, which scancel sends: a canceled job stays away.
# A job that Slurm preempts or that loses a node is queued again by Slurm itself. output_dir is on a disk of all nodes.
#SBATCH --job-name=foredraft
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110  # torchrun would kill the run 30 s after the signal, in the middle of its checkpoint
# Since Slurm 22.05 srun does not inherit --cpus-per-task: all processes of a node would share one core.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:$((10000 + SLURM_JOB_ID % 20000))" \
    train/run.py "$@" &
run=$!  # in the background, because bash runs a trap only between commands, or in `wait`

time_is_up() {
    kill -TERM "$run" || true
    if ! wait "$run"; then  # a run that is done would be trained once more
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit 0
}
trap time_is_up USR1
wait "$run"
