#!/usr/bin/env bash
# Train on two nodes of four GPUs each under SLURM; the words after the file's name are those of muown-train:
#
#     sbatch examples/slurm_two_nodes.sh model=500m optim=muown name=two-nodes
#
# This is the shortest job there is, to be adapted. Submitted again, it continues from the last checkpoint.
# slurm/train.sbatch also stops before the time limit, requeues itself, and knows the networks of some clusters.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4          # a task for each GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
set -euo pipefail

if [ -f .venv/bin/activate ]; then
    source .venv/bin/activate
fi
MASTER_ADDR=$(hostname)              # this script runs on the first node
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
# A task that is lost ends the others by itself; --wait ends what still runs ten minutes after.
# shellcheck disable=SC2016          # each task expands its own variables
srun --wait=600 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
    exec python -m muown_train "$@"' bash "$@"
