#!/bin/bash
# A Slurm job around one `launch` command. `ezpz-llm submit` fills it in by itself; by hand: copy it, fill in the
# three lines marked (1) to (3), and `sbatch slurm.sh`. The nodes and the time can be changed here or given to sbatch.

# ---- request
#SBATCH --job-name=ezpz_llm
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --time=1:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# (1) the project that pays; many sites want a partition, a QOS or the GPUs of a node here as well:
#SBATCH --account=ACCOUNT

# ---- environment
cd "$SLURM_SUBMIT_DIR" || exit
# (2) the environment that launch is installed in (modules of the site go above this line):
source "$HOME/ezpz_llm/launchers/activate"

# ---- command
run_dir=$PWD/runs/$SLURM_JOB_ID
# (3) what to run, and what to add where the job is started again; (): nothing, for a program that cannot go on:
command=(launch --run-dir "$run_dir" python3 -m ezpz_llm.train --ds-config zero1)
go_on=(--resume "$run_dir")
again=(scontrol requeue "$SLURM_JOB_ID")

# ---- run (the same for every job)
case $(python3 -m ezpz_llm.submit.state "$run_dir") in
    complete)
        echo "job $SLURM_JOB_ID: $run_dir is complete, nothing is left to do"
        exit 0
        ;;
    resume) command+=("${go_on[@]}") ;;
    restart) mv "$run_dir/metrics.jsonl" "$run_dir/metrics-before-$(date +%s).jsonl" ;;
esac
# The scheduler's SIGTERM reaches launch too, which ends the ranks in order: this shell only has to outlive it.
trap : TERM
before=$(cat "$run_dir/checkpoints/latest" 2>/dev/null)
"${command[@]}"
code=$?
# It ended in order before its last step, and further than it was: it asks to be queued again, where that is possible.
if ((code == 0 && ${#again[@]})) && [[ $(python3 -m ezpz_llm.submit.state "$run_dir") == resume &&
      $(cat "$run_dir/checkpoints/latest") != "$before" ]]; then
    "${again[@]}"
fi
exit $code
