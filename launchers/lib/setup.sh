# Making the environment; sourced by with-env, which sets root, here, cache, python, venv, stamp and wheels.

default_torch=torch==2.13.0
log=$venv.log

say() {
    printf '[with-env %3d s] %s\n' "$SECONDS" "$*"
}

# step WHAT COMMAND…: run COMMAND with its output in the log and a sign of life; explain a failure and stop.
step() {
    local what=$1 job shown
    shift
    say "$what"
    { printf '\n==> %s\n' "$what"; printf '%q ' "$@"; echo; } >>"$log"
    "$@" >>"$log" 2>&1 9>&- </dev/null &
    job=$!
    trap 'kill "$job" 2>/dev/null; wait "$job" 2>/dev/null; say "interrupted: run the same command again to go on"; exit 130' INT TERM
    shown=$SECONDS
    while kill -0 "$job" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS - shown >= 15)); then
            say "… still: $what"
            shown=$SECONDS
        fi
    done
    trap - INT TERM
    wait "$job" || fail "$what"
}

fail() {
    say "failed: $1; the last lines of $log:"
    tail -n 12 -- "$log" | sed 's/^/    /'
    if grep -qE 'NewConnectionError|Temporary failure in name resolution|Network is unreachable|ConnectTimeout|Connection refused' "$log"; then
        cat <<EOT
This machine cannot reach a package index. On one that can (a login node), in the same checkout, type
    ./launchers/with-env --wheels DIR
and here, with DIR copied or on a shared file system,
    ./launchers/with-env --wheels DIR COMMAND…
EOT
    fi
    say "nothing is broken for good: run the same command again once the cause is mended"
    exit 1
}

pip() {
    local from=()
    [[ -z $wheels ]] || from=(--no-index --find-links "$wheels")
    "$venv/bin/python" -m pip "$1" --disable-pip-version-check --no-input --retries 2 --timeout 20 "${from[@]}" "${@:2}"
}

check_python() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "with-env: $python is $("$python" --version 2>&1), and Python 3.10 or newer is needed; load a newer one, or"
        echo "name it with EZPZ_PYTHON"
        exit 2
    }
    "$python" -c 'import venv, ensurepip' 2>/dev/null || {
        echo "with-env: $python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
        exit 2
    }
    command -v c++ >/dev/null || command -v g++ >/dev/null ||
        say "no C++ compiler found: everything runs but DeepSpeed's offload ops and torch.compile"
}

# The site-packages that hold the torch $python imports; nothing where it has none. A new environment sees its base
# Python's packages, not those of another environment that happens to be active.
torch_site() {
    "$python" -c 'import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null || true
}

make_venv() {
    local site=$1 own
    "$python" -m venv --clear ${site:+--system-site-packages} "$venv" || return
    if [[ -n $site ]]; then
        own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
        printf '%s\n' "$site" >"$own/zz_torch_of_the_site.pth"
    fi
}

torch_version() {
    "$venv/bin/python" -c 'import torch; print(torch.__version__)'
}

install_torch() {
    if [[ -n $(torch_site) ]]; then
        say "using the torch that $python has: $(torch_version) (it is not changed)"
    else
        refuse_foreign_gpu
        step "installing ${EZPZ_LLM_TORCH:-$default_torch} (the largest part)" \
            pip install "${EZPZ_LLM_TORCH:-$default_torch}"
    fi
    echo "torch==$(torch_version)" >"$venv/constraints.txt"
}

# A torch from the package index computes on NVIDIA GPUs and CPUs only.
refuse_foreign_gpu() {
    local kind= list=
    [[ -z ${EZPZ_LLM_TORCH:-} ]] || return 0
    if command -v nvidia-smi >/dev/null; then return 0; fi
    if [[ -d /opt/rocm ]] || command -v rocminfo >/dev/null; then kind="AMD (ROCm)"; fi
    if command -v xpu-smi >/dev/null || command -v sycl-ls >/dev/null; then kind="Intel"; fi
    [[ -n $kind ]] || return 0
    [[ -z ${MODULESHOME:-} || ! -f $MODULESHOME/init/bash ]] || list=$(
        set +eu
        source "$MODULESHOME/init/bash"
        module -t avail 2>&1 | grep -iE 'torch|framework|conda|miniforge' | sed 's/^/    module load /'
    ) || true
    echo "with-env: this host has $kind GPUs and $python has no torch; the one from the package index would not use them."
    echo "Load the site's own build and run this again${list:+; the site offers}"
    [[ -z $list ]] || echo "$list"
    echo "or say what to install: EZPZ_LLM_TORCH='torch==…' (with PIP_EXTRA_INDEX_URL for the vendor's index)."
    exit 2
}

has_launcher() {
    command -v mpiexec >/dev/null || command -v srun >/dev/null || [[ -n ${CRAYPE_VERSION:-}${CRAY_MPICH_DIR:-} ]] ||
        [[ -d /opt/cray/pe ]]
}

# The mpich wheel goes into a folder of its own. Its libmpi is named to mpi4py by its own mpiexec only: under a
# site's mpiexec, mpi4py finds the site's library.
install_mpich() {
    step "installing the mpich wheel (no mpiexec, srun or Cray environment here)" \
        pip install --prefix "$venv/mpich" --no-deps 'mpich>=4.2'
    local name
    mkdir -p "$venv/mpi/bin"
    for name in mpiexec mpirun; do
        cat >"$venv/mpi/bin/$name" <<EOT
#!/bin/sh
MPI4PY_LIBMPI='$venv/mpich/lib/libmpi.so.12'
export MPI4PY_LIBMPI
exec '$venv/mpich/bin/mpiexec' "\$@"
EOT
        chmod 755 "$venv/mpi/bin/$name"
    done
}

set_up() {
    mkdir -p "$cache/venvs"
    exec 9>"$venv.lock"
    flock -n 9 || { say "another set-up of this environment is running: waiting for it"; flock 9; }
    if [[ $stamp -nt $root/pyproject.toml && $stamp -nt $here/lib/setup.sh ]]; then return; fi
    : >"$log"
    check_python
    if [[ -f $stamp ]]; then
        say "pyproject.toml has changed: bringing the environment up to date"
        rm -- "$stamp"
    else
        say "making the environment in $venv (once; about a minute)"
        step "making a virtual environment with $("$python" --version 2>&1)" make_venv "$(torch_site)"
        step "bringing pip up to date" pip install --upgrade pip
        install_torch
    fi
    # DeepSpeed's C++ ops are built when asked for (ezpz-llm doctor --build-ops), never here.
    export DS_BUILD_OPS=0
    step "installing deepspeed, the project and its test tools" \
        pip install -c "$venv/constraints.txt" -e "$root[test]"
    has_launcher || install_mpich
    step "trying it out" "$venv/bin/python" -c 'import torch, mpi4py, tiktoken, plotext, ezpz_llm'
    touch "$stamp"
    say "ready: $venv"
    exec 9>&-
}
