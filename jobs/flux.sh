#!/bin/bash
# A Flux job around one `launch` command. `ezpz-llm submit` fills it in by itself; by hand: copy it, fill in the
# three lines marked (1) to (3), and `flux batch flux.sh`. Nodes and time can be changed here or given to flux batch.

# ---- request
#flux: --job-name=ezpz_llm
#flux: --nodes=2
#flux: --exclusive
#flux: --time-limit=60m
#flux: --output=ezpz_llm-{{id.dec}}.log
# (1) the project that pays; many sites want a queue (--queue=…) here as well:
#flux: --bank=ACCOUNT

# ---- environment
# Flux starts a job in the folder that it was queued in.
# (2) the environment that launch is installed in (modules of the site go above this line):
source "$HOME/ezpz_llm/launchers/activate"

# ---- command
run_dir=$PWD/runs/$FLUX_ENCLOSING_ID
# (3) what to run, and what to add where the job is started again; (): nothing, for a program that cannot go on:
command=(launch --run-dir "$run_dir" python3 -m ezpz_llm.train --ds-config zero1)
go_on=(--resume "$run_dir")
# A job of Flux cannot ask to be queued again: queue several, each after the one before.
again=()

# ---- run (the same for every job)
case $(python3 -m ezpz_llm.submit.state "$run_dir") in
    complete)
        echo "job $FLUX_ENCLOSING_ID: $run_dir is complete, nothing is left to do"
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
