#!/bin/bash
# Written by: ezpz-llm submit --site vista --nodes 4 --time 1:00:00 --account proj --queue gh --run-dir runs/a --dry-run -- launch python3 -m ezpz_llm.train --ds-config zero3
# You can edit this script and submit it yourself.

# ---- request
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --exclusive
#SBATCH --time=1:00:00
#SBATCH --output=/home/user/work/runs/a/logs/job-%j.log
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --account=proj
#SBATCH --partition=gh
#SBATCH --ntasks-per-node=1

# ---- environment
cd /home/user/work || exit
export EZPZ_LLM_CACHE=/home/user/cache
export EZPZ_LLM_SITE=vista
export PATH=(as submitted):$PATH
export PATH=/home/user/env/bin:$PATH
# Job's end time in epoch seconds, minus a reserve; launch prefers the scheduler's end time.
export EZPZ_LLM_ENDS_AT=$(($(date +%s) + 3540))

# ---- command
run_dir=/home/user/work/runs/a${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}
command=(launch --run-dir "$run_dir" python3 -m ezpz_llm.train --ds-config zero3)
go_on=(--resume "$run_dir")
again=()

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

# queue      gh (--queue)
# ranks      4 (one per node: no slots and at most one device)
# queued by  sbatch --parsable /home/user/work/runs/a/job.sh
