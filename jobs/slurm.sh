#!/bin/bash
# Slurm job that runs one `launch` command. `ezpz-llm submit` fills it in for you. To use it by hand, copy it, edit
# the three lines marked (1) to (3), and run `sbatch slurm.sh`. Nodes and time can also be given to sbatch.

# ---- request
#SBATCH --job-name=ezpz_llm
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --time=1:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# (1) your project; many sites also require a partition, a QOS or the GPUs per node:
#SBATCH --account=ACCOUNT

# ---- environment
cd "$SLURM_SUBMIT_DIR" || exit
# (2) the environment with launch (load modules above this line):
source "$HOME/ezpz_llm/launchers/activate"

# ---- command
run_dir=$PWD/runs/$SLURM_JOB_ID
# (3) the command, and the options with which it resumes when the job is restarted, or () if it cannot resume:
command=(launch --run-dir "$run_dir" python3 -m ezpz_llm.train --ds-config zero1)
go_on=(--resume "$run_dir")
again=(scontrol requeue "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}")

# ---- run (the same for every job)
case $(python3 -m ezpz_llm.submit --state "$run_dir") in
    complete)
        echo "job $SLURM_JOB_ID: $run_dir is complete, nothing is left to do"
        exit 0
        ;;
    resume) command+=("${go_on[@]}") ;;
    restart) mv "$run_dir/metrics.jsonl" "$run_dir/metrics-before-$(date +%s).jsonl" ;;
esac
# launch also receives the scheduler's SIGTERM and stops the ranks; this shell must outlive launch.
trap : TERM
before=$(cat "$run_dir/checkpoints/latest" 2>/dev/null)
"${command[@]}"
code=$?
# Requeue the job if it stopped cleanly before its last step, and made progress.
if ((code == 0 && ${#again[@]})) && [[ $(python3 -m ezpz_llm.submit --state "$run_dir") == resume &&
      $(cat "$run_dir/checkpoints/latest") != "$before" ]]; then
    "${again[@]}"
fi
exit $code
