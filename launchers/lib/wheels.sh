# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154
# A folder of wheels: made where there is a network, used where there is none. Sourced by setup.sh.

wheel_kind() { "$python" -c 'import sys, platform; print("Python %d.%d, %s" % (*sys.version_info[:2], platform.machine()))'; }

# Lets pip take wheels from the folder that was named, and from nowhere else.
use_wheels() {
    if [[ -z $wheels ]]; then return; fi
    [[ -f $wheels/made-for.txt ]] || fail "$wheels is no folder of wheels" \
        "make one on a machine with a network: launchers/with-env --wheels DIR"
    local made
    made=$(<"$wheels/made-for.txt")
    [[ $made == "$(wheel_kind)" ]] || fail "the wheels in $wheels are for $made; here is $(wheel_kind)" \
        "make them again with that Python, or choose it with EZPZ_PYTHON"
    wheels=$(cd "$wheels" && pwd)
    source_of_wheels=(--no-index --find-links "$wheels")
}

# Fills a folder with all that a set-up installs. torch is left out where this Python's own is reused: the machine
# without a network is taken to have the same.
make_wheels() { # FOLDER
    source_of_wheels=()
    wheels=
    mkdir -p "$1" "$cache/venvs" || fail "$1 or $cache cannot be written"
    local folder
    folder=$(cd "$1" && pwd)
    watch_signals
    scratch=$(mktemp -d "$cache/venvs/wheels.XXXXXX")
    venv=$scratch/venv
    log=$folder/log.txt
    : >"$log"
    check_python
    rm -f "$folder/made-for.txt"
    step "making a virtual environment for pip" make_venv
    find_torch
    if ((${#torch_words[@]})); then
        step "wheels of ${torch_words[*]} and what it needs" pip_run wheel -w "$folder" "${torch_words[@]}"
        torch_version=$(find "$folder" -name 'torch-*.whl' -printf '%f\n' | sort -V | tail -n 1 | cut -d- -f2)
    else
        say "torch $torch_version of $torch_file is reused: no wheel of it"
    fi
    printf 'torch==%s\n' "$torch_version" >"$scratch/constraints.txt"
    step "finding out what else is needed" list_needed "$folder"
    step "wheels of that; DeepSpeed's is built" pip_run wheel --no-deps --find-links "$folder" -w "$folder" \
        -r "$scratch/needed.txt" "$(requirement mpich)"
    step "wheels of the build back end" pip_run wheel -w "$folder" "$(requirement hatchling)" "$(requirement editables)"
    wheel_kind >"$folder/made-for.txt"
    say "$(find "$folder" -name '*.whl' | wc -l) wheels, $(du -sh "$folder" | cut -f1), for $(wheel_kind)." \
        "There: launchers/with-env --wheels $1 CMD …"
}

# What pip would install beside this Python's own packages, as name==version lines.
list_needed() { # FOLDER
    pip_run install --dry-run --report "$scratch/report.json" --find-links "$1" -c "$scratch/constraints.txt" \
        "${here}[test]"
    "$venv/bin/python" - "$scratch/report.json" >"$scratch/needed.txt" <<'END'
import json
import sys

for item in json.load(open(sys.argv[1]))["install"]:
    if item["metadata"]["name"] != "ezpz_llm":
        print(f'{item["metadata"]["name"]}=={item["metadata"]["version"]}')
END
}
