#!/bin/bash
# A training run on two machines of a Slurm cluster. Submit it with the flags of the trainer:
#
#     sbatch docs/scale/slurm.sh --model PATH --reward_model PATH --data_path prompts.jsonl --out_dir SHARED_DISK
#
# Three minutes before the time limit the run saves and ends. Submit the same line again, and it goes on. Edit:
# time, machines and GPUs; SCRIPT for stages 1 and 2.
#SBATCH --job-name=ppo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=4:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
SCRIPT=${SCRIPT:-trainer/train_ppo.py}
GPUS=${SLURM_GPUS_ON_NODE:-1} # processes of a machine: one for each GPU
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
WAIT="--shutdown_timeout 170" # torch 2.11 lacks it: its torchrun waits 30 seconds for the last batch, then kills
[[ $(torchrun --help) == *shutdown_timeout* ]] || WAIT=""

srun torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "$GPUS" \
    --rdzv_backend c10d --rdzv_endpoint "$HOST:${PORT:-29500}" --rdzv_id "$SLURM_JOB_ID" $WAIT \
    "$SCRIPT" --run_name "${NAME:-ppo}" --resume auto "$@"
