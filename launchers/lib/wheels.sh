# Filling a folder with wheels for a machine without a network; sourced by with-env.

source "$here/lib/setup.sh"

collect_wheels() {
    local folder=$wheels builder tools=(pip hatchling editables 'mpich>=4.2') torch=()
    wheels=
    mkdir -p "$folder"
    builder=$(mktemp -d)
    trap 'rm -rf -- "$builder"' EXIT
    venv=$builder/venv log=$builder/log
    {
        check_python
        say "collecting wheels for $("$python" --version 2>&1) in $folder"
        step "making a virtual environment" make_venv "$(torch_site)"
        step "bringing pip up to date" pip install --upgrade pip
        export DS_BUILD_OPS=0
        if [[ -n $(torch_site) ]]; then
            say "torch $(torch_version) comes from $python, and must there too: it is not collected"
            echo "torch==$(torch_version)" >"$builder/constraints.txt"
        else
            step "collecting ${EZPZ_LLM_TORCH:-$default_torch}" \
                pip wheel -w "$folder" "${EZPZ_LLM_TORCH:-$default_torch}"
            torch=("${EZPZ_LLM_TORCH:-$default_torch}")
            : >"$builder/constraints.txt"
        fi
        step "collecting everything else (deepspeed is built)" \
            pip wheel -w "$folder" --find-links "$folder" -c "$builder/constraints.txt" "${torch[@]}" "$root[test]" "${tools[@]}"
        # The project itself is installed from the checkout.
        rm -f -- "$folder"/ezpz_llm-*.whl
        say "$(find "$folder" -name '*.whl' | wc -l) wheels in $folder; there: ./launchers/with-env --wheels $folder COMMAND…"
    } >&2
}
