# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154
# Creates a folder of wheels on a machine with a network, for set-ups without a network. Sourced by setup.sh.

wheel_kind() { "$python" -c 'import sys, platform; print("Python %d.%d, %s" % (*sys.version_info[:2], platform.machine()))'; }

# Restrict pip to the wheels in the folder given with --wheels.
use_wheels() {
    if [[ -z $wheels ]]; then return; fi
    [[ -f $wheels/made-for.txt ]] || fail "$wheels is not a folder of wheels" \
        "create one on a machine with a network: launchers/with-env --wheels DIR"
    local made_for
    made_for=$(<"$wheels/made-for.txt")
    [[ $made_for == "$(wheel_kind)" ]] || fail "the wheels in $wheels are for $made_for, not $(wheel_kind)" \
        "recreate them with this Python, or set EZPZ_PYTHON to one that matches"
    wheels=$(cd "$wheels" && pwd)
    source_of_wheels=(--no-index --find-links "$wheels")
}

# Download everything that a set-up installs to a folder, except torch if this Python has one to reuse: the machine
# without a network is assumed to have the same one.
make_wheels() { # FOLDER
    source_of_wheels=()
    wheels=
    mkdir -p "$1" "$cache/venvs" || fail "$1 or $cache is not writable"
    local folder
    folder=$(cd "$1" && pwd)
    watch_signals
    scratch=$(mktemp -d "$cache/venvs/wheels.XXXXXX")
    venv=$scratch/venv
    log=$folder/log.txt
    : >"$log"
    check_python
    rm -f "$folder/made-for.txt"
    step "creating a virtual environment for pip" make_venv
    find_torch
    if ((${#torch_words[@]})); then
        step "wheels of ${torch_words[*]} and its dependencies" pip_run wheel -w "$folder" "${torch_words[@]}"
        torch_version=$(find "$folder" -name 'torch-*.whl' -printf '%f\n' | sort -V | tail -n 1 | cut -d- -f2)
    else
        say "no wheel of torch: reusing torch $torch_version of $torch_file"
    fi
    printf 'torch==%s\n' "$torch_version" >"$scratch/constraints.txt"
    step "resolving the other dependencies" list_needed "$folder"
    step "wheels of the other dependencies; DeepSpeed's is built" pip_run wheel --no-deps --find-links "$folder" \
        -w "$folder" -r "$scratch/needed.txt" "$(requirement mpich)"
    step "wheels of the build backend" pip_run wheel -w "$folder" "$(requirement hatchling)" "$(requirement editables)"
    wheel_kind >"$folder/made-for.txt"
    say "$(find "$folder" -name '*.whl' | wc -l) wheels, $(du -sh "$folder" | cut -f1), for $(wheel_kind)." \
        "On the machine without a network: launchers/with-env --wheels $1 CMD …"
}

# Write the packages that pip would install in addition to this Python's, as name==version lines.
list_needed() { # FOLDER
    pip_run install --dry-run --report "$scratch/report.json" --find-links "$1" -c "$scratch/constraints.txt" \
        "${here}[train,test]"
    "$venv/bin/python" - "$scratch/report.json" >"$scratch/needed.txt" <<'END'
import json
import sys

for item in json.load(open(sys.argv[1]))["install"]:
    if item["metadata"]["name"] != "ezpz_llm":
        print(f'{item["metadata"]["name"]}=={item["metadata"]["version"]}')
END
}
