#!/bin/bash
# Four nodes of eight GPUs:  sbatch scripts/slurm.sh experiment=llama33_70b_eagle3 data.path=FOLDER
# Slurm sends SIGTERM before the time is up: the run saves and stops, and the same command continues from there.
#SBATCH --job-name=foredraft
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110  # torchrun would kill the run 30 s after the signal, in the middle of its checkpoint

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
    train/run.py "$@"
