# shellcheck shell=bash
# shellcheck disable=SC2154
# Creates the virtual environment. Sourced by with-env, which sets: here, self, cache, python, venv, wheels.

default_torch=torch==2.13.0
# Measured sizes of a whole set-up with that version on x86-64 Linux.
size_of_cuda="2.8 GB to download, 5.1 GB on disk plus a copy of the download in pip's cache"
size_of_cpu='0.3 GB to download, 1.4 GB on disk'
cpu_index=https://download.pytorch.org/whl/cpu
log=$venv.log
child='' ticker='' scratch=''

source "$here/launchers/lib/site.sh"
source "$here/launchers/lib/wheels.sh"

say() { printf 'with-env: [%3d s] %s\n' "$SECONDS" "$*" >&2; }

fail() {
    printf 'with-env: %s\n' "$@" >&2
    exit 1
}

end_children() {
    local group
    for group in $child $ticker; do kill -- "-$group" 2>/dev/null || true; done
    if [[ -n $scratch ]]; then rm -rf "$scratch"; fi
}

interrupted() { # SIGNAL NUMBER
    say "interrupted by $1; run the same command to continue"
    exit $((128 + $2))
}

watch_signals() {
    trap end_children EXIT
    trap 'interrupted SIGINT 2' INT
    trap 'interrupted SIGTERM 15' TERM
    trap 'interrupted SIGHUP 1' HUP
}

# Run a command with its output in the log, and print its progress. Each job has its own process group, so that an
# interrupt stops pip and its child processes. If with-env is killed, the command keeps running and holds the lock,
# so that the next with-env waits for it instead of working in the same folder.
step() { # WHAT COMMAND…
    local what=$1 first status=0
    shift
    say "$what"
    printf '\n## %s\n## %s\n' "$what" "$*" >>"$log"
    first=$(wc -l <"$log")
    set -m
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    show_progress "$first" 9>&- &
    ticker=$!
    set +m
    wait "$child" || status=$?
    child=
    kill -- "-$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    ticker=
    if ((status)); then step_failed "$what" "$first"; fi
}

# Print a line on each change, and at least one per minute.
show_progress() { # FIRST_LINE
    local now shown='' silent=0
    while sleep 10 && kill -0 $$ 2>/dev/null; do
        now=$("$python" -I "$here/launchers/lib/progress.py" "$log" "$1") || continue
        silent=$((silent + 10))
        if [[ -z $now || $now == "$shown" ]] && ((silent < 60)); then continue; fi
        say "  … ${now:-still running}"
        shown=$now silent=0
    done
}

step_failed() { # WHAT FIRST_LINE
    local text
    text=$(tail -n "+$2" "$log")
    printf 'with-env: failed: %s. The last lines:\n%s\n' "$1" "$(tail -n 12 <<<"$text" | sed 's/^/    /')" >&2
    if [[ -n $wheels && -d $wheels && $text == *"No matching distribution"* ]]; then
        printf 'with-env: %s lacks a wheel. Recreate it on a machine with a network and this Python: %s\n' \
            "$wheels" "launchers/with-env --wheels DIR" >&2
    elif grep -qE 'NewConnectionError|ConnectTimeout|NameResolution|ProxyError|unreachable|name resolution' <<<"$text"; then
        printf 'with-env: %s\n' \
            "there seems to be no network here: the package index is not reachable." \
            "On a machine with a network and the same Python:   launchers/with-env --wheels DIR" \
            "then here:                                         launchers/with-env --wheels DIR CMD …" >&2
    fi
    fail "full log: $log" "fix the cause, then run the same command to start over; no clean-up is necessary"
}

quoted() { printf "'%s'" "$(sed "s/'/'\\\\''/g" <<<"$1")"; } # TEXT: print it as a word for any shell

pip_run() { # SUBCOMMAND ARGS…
    # `doctor --build-ops` builds DeepSpeed's ops. PEP 517: older pips build DeepSpeed with a setuptools that has no
    # bdist_wheel. Few retries: pip's default of five takes minutes without a network.
    DS_BUILD_OPS=0 PIP_USE_PEP517=1 PIP_USER=0 PIP_CACHE_DIR=${PIP_CACHE_DIR:-$cache/pip} \
        PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off "$venv/bin/python" -m pip "$1" \
        --timeout 15 --retries 2 ${source_of_wheels[@]+"${source_of_wheels[@]}"} "${@:2}"
}

requirement() { # NAME: print its requirement from pyproject.toml
    sed -n "s/^[a-z ]*=* *\[*\"\($1>=[^\"]*\)\".*/\1/p" "$here/pyproject.toml" | head -n 1
}

check_python() {
    local version
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "$python does not run"
    case $version in
        2.* | 3.[0-9]) fail "$python is Python $version; 3.10 or newer is required" \
            "load a newer Python module, or set EZPZ_PYTHON=/path/to/python3" ;;
    esac
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot create virtual environments (no ensurepip)" \
            "on Debian and Ubuntu: apt-get install python$version-venv"
    if [[ -z ${CXX:-} && -z $(type -P c++ || type -P g++) ]]; then
        say "warning: no C++ compiler (c++, g++ or \$CXX); DeepSpeed's ops and torch.compile require one"
    fi
}

# With --system-site-packages, the new environment sees the packages of its base Python, but not those of an active
# virtual environment, whose folders are added by a .pth file. Remove the setuptools that Pythons before 3.12 put
# into a new environment: it would shadow the version that a reused torch requires.
make_venv() {
    "$python" -m venv --clear --system-site-packages "$venv"
    "$venv/bin/python" -m pip uninstall --yes --quiet setuptools
    local site
    site=$(site_packages)
    "$python" >"$site/with_env_outer.pth" - <<'END'
import sys
import sysconfig

if sys.prefix != sys.base_prefix:
    for folder in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        print(f"import site; site.addsitedir({folder!r})")
END
    # The folder of a torch on PYTHONPATH may contain older versions of packages that are installed here.
    if [[ -n $(pythonpath_with_torch) ]]; then
        "$python" -c 'import sys; print(f"import sys; sys.path.insert(0, {sys.argv[1]!r})")' "$site" \
            >"$site/with_env_first.pth"
    fi
}

site_packages() { "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

isolate_venv() {
    sed -i 's/^include-system-site-packages = true/include-system-site-packages = false/' "$venv/pyvenv.cfg"
    rm -f "$(site_packages)/with_env_outer.pth"
}

# Set torch_file and torch_version of a torch to reuse, or torch_words, the arguments for pip to install one.
find_torch() {
    local found status=0
    torch_file='' torch_version='' torch_words=()
    if [[ -n ${EZPZ_LLM_TORCH:-} ]]; then
        isolate_venv
        read -ra torch_words <<<"$EZPZ_LLM_TORCH"
        return
    fi
    found=$(ask_torch) || status=$?
    case $status in
        0) { read -r torch_file && read -r torch_version; } <<<"$found" ;;
        3)
            local gpu
            gpu=$(foreign_gpu)
            if [[ -n $gpu ]]; then
                explain_foreign_gpu "$gpu" >&2
                exit 1
            fi
            isolate_venv
            choose_torch
            ;;
        *) fail "${found:-the search for torch failed}" \
            "load a module or a Python with another torch, or install one: EZPZ_LLM_TORCH=$default_torch" ;;
    esac
}

# Choose the torch to install, and print its size before the download. Of several builds of a version, pip takes the
# one whose label sorts last, whatever the machine has: without an NVIDIA driver, request the CPU build.
choose_torch() {
    local offered build
    torch_words=("$default_torch")
    step "asking pip for $default_torch" list_builds
    offered=$(<"$venv/offered.txt")
    build=$(tail -n 1 <<<"$offered")
    if ! has_nvidia_driver && grep -q '+cpu$' <<<"$offered"; then
        build=${default_torch#torch==}+cpu
        torch_words=("torch==$build")
    fi
    if [[ $build == *+cpu ]]; then
        say "torch $build, for CPUs: $size_of_cpu"
        if has_nvidia_driver; then
            say "warning: this machine has an NVIDIA GPU, but pip's settings offer a CPU build. For PyPI's build:"
            say "    export EZPZ_LLM_TORCH=torch===${default_torch#torch==}"
        fi
    elif [[ $build == *+cu* || $build@$(uname -sm) == "${default_torch#torch==}@Linux x86_64" ]]; then
        say "torch $build, with CUDA: $size_of_cuda ($(free_space) free)"
        if ! has_nvidia_driver; then
            say "no NVIDIA driver. Without a GPU, the CPU build is enough: $size_of_cpu. To install it:"
            say "    export EZPZ_LLM_TORCH='$default_torch --index-url $cpu_index'"
        fi
    fi
}

free_space() { df -Ph "$venv" | awk 'NR == 2 { print $4 "B" }'; }

# List the builds of the default version that pip finds for this Python, one per line; pip would take the last.
list_builds() {
    local found
    found=$(pip_run index versions torch)
    printf '%s\n' "$found"
    sed -n 's/^Available versions: //p' <<<"$found" | tr -s ' ,' '\n' |
        grep -xE "${default_torch#torch==}(\+.*)?" | sort -V >"$venv/offered.txt" ||
        { printf 'ERROR: No matching distribution found for %s\n' "$default_torch" && return 1; }
}

ask_torch() {
    local floor
    floor=$(requirement torch)
    "$venv/bin/python" "$here/launchers/lib/find_torch.py" "${floor#*>=}" 2>>"$log"
}

install_torch() {
    if ((${#torch_words[@]})); then
        PYTHONPATH='' step "installing ${torch_words[*]}" pip_run install "${torch_words[@]}"
    else
        say "using torch $torch_version of $torch_file"
    fi
    local found
    found=$(ask_torch) || fail "torch was installed but does not work: $found" "full log: $log"
    { read -r torch_file && read -r torch_version; } <<<"$found"
    printf 'torch==%s\n' "$torch_version" >"$venv/constraints.txt"
    list_companions >>"$venv/constraints.txt"
}

# Print constraints for packages that depend on the build of torch: pip must not replace a module's versions.
list_companions() {
    "$venv/bin/python" - <<'END'
from importlib.metadata import PackageNotFoundError, version

for name in ("triton", "pytorch-triton", "pytorch-triton-xpu", "pytorch-triton-rocm", "torchvision", "torchaudio",
             "intel-extension-for-pytorch", "oneccl-bind-pt"):
    try:
        print(f"{name}=={version(name)}")
    except PackageNotFoundError:
        pass
END
}

install_package() { pip_run install -c "$venv/constraints.txt" -e "${here}[train,test]"; }

# Replace the package in a copied environment. Its build backend is there, so nothing is downloaded.
install_package_alone() { pip_run install --no-deps --no-build-isolation -e "$here"; }

try_out() {
    local found
    found=$(DS_ACCELERATOR=cpu "$venv/bin/python" -c '
import deepspeed, mpi4py, plotext, tiktoken, torch
import ezpz_llm.cli
print(torch.__file__)')
    found=${found##*$'\n'}
    printf 'torch: %s\n' "$found"
    [[ $found == "$torch_file" ]] # not shadowed by a torch that pip installed
}

# Always install MPICH, even if the machine has an MPI now: launch chooses an mpiexec when it runs. MPICH is outside
# the environment's bin and lib folders, so that its mpiexec does not precede a site's on PATH and mpi4py does not
# find its library first. Our mpiexec passes its library to its ranks. Without mpiexec, mpi4py searches the linker's
# folders first, then ours (MPI4PY_LIBMPI is a list whose first entry is empty).
install_mpich() {
    local name
    pip_run install --ignore-installed --no-deps --prefix "$venv/mpich" "$(requirement mpich)"
    mkdir -p "$venv/mpi"
    for name in mpiexec mpirun; do
        cat >"$venv/mpi/$name" <<END
#!/bin/sh
export MPI4PY_LIBMPI=$(quoted "$venv/mpich/lib/libmpi.so.12")
unset MPI4PY_MPIABI
exec $(quoted "$venv/mpich/bin/$name") "\$@"
END
        chmod +x "$venv/mpi/$name"
    done
}

# Print a checksum of the files whose age is_ready compares with the stamp.
fingerprint() { cat "$here/pyproject.toml" "$self" "$here/launchers/lib/setup.sh" | sha256sum; }

# Print a complete environment of another checkout for which all inputs are equal.
find_equal() {
    local other
    for other in "$cache"/venvs/*/inputs; do
        other=${other%/inputs}
        if [[ $other != "$venv" && $(head -n 1 "$other/stamp" 2>/dev/null) == "$(fingerprint)" ]] &&
            environment_inputs | cmp -s - "$other/inputs"; then
            printf '%s' "$other"
            return
        fi
    done
}

# Copy an environment as hard links, which use no disk space. Files with its path in them become files of their own.
copy_environment() { # OTHER
    rm -rf "$venv"
    cp -al "$1" "$venv"
    rm "$venv/stamp"
    "$python" - "$1" "$venv" <<'END'
import itertools
import os
import shutil
import sys
from pathlib import Path

# The names differ, and not the folder, which shells may have to quote.
old, new = (os.fsencode(os.path.basename(path)) for path in sys.argv[1:])
venv = Path(sys.argv[2])
folders = (venv, venv / "bin", venv / "mpi", venv / "mpich/bin", *venv.glob("lib/python*/site-packages"))
for path in itertools.chain.from_iterable(folder.glob("*") for folder in folders):
    if path.is_file() and not path.is_symlink() and old in (content := path.read_bytes()) and b"\0" not in content:
        copy = path.with_name(f"{path.name}.new")
        copy.write_bytes(content.replace(old, new))
        shutil.copymode(path, copy)
        copy.replace(path)
END
}

# Remove the records of packages that an interrupted pip left incomplete: it writes INSTALLER after the last file.
remove_incomplete() {
    local record
    for record in "$(site_packages)"/*.dist-info; do
        if [[ -d $record && ! -e $record/INSTALLER ]]; then rm -rf "$record"; fi
    done
}

take_lock() {
    local status=0
    exec 9>"$venv.lock"
    flock -n -E 75 9 2>/dev/null || status=$?
    if ((status == 75)); then
        say "waiting for another set-up of this environment to finish"
        flock 9
    elif ((status)); then
        say "warning: this file system does not support locks; do not start a second with-env during the set-up"
    fi
}

# Set recorded to the fingerprint of a complete environment, or to nothing. Return 1 if it needs an update.
is_recorded() {
    recorded=
    if [[ -x $venv/bin/python ]] && torch_is_there; then read -r recorded <"$venv/stamp"; fi
    [[ $recorded == "$(fingerprint)" ]]
}

set_up() {
    local recorded
    source_of_wheels=()
    # The files may be newer, but unchanged. A lock needs a writable cache, which a complete environment does not.
    if is_recorded; then
        touch "$venv/stamp" 2>/dev/null || true
        return
    fi
    if ! mkdir -p "$cache/venvs" 2>/dev/null || [[ ! -w $cache/venvs ]]; then
        fail "the environment in $cache is not complete and up to date, and the folder is not writable" \
            "run the same command where it is writable, or set EZPZ_LLM_CACHE to another folder"
    fi
    watch_signals
    take_lock
    if ! is_ready && ! is_recorded; then
        use_wheels
        make_environment "$recorded"
    fi
    exec 9>&-
    trap - EXIT INT TERM HUP
}

make_environment() { # RECORDED: fingerprint of a complete environment to update, or empty to create one
    local equal=''
    : >"$log"
    check_python
    if [[ -n $1 ]]; then
        say "updating $venv"
    elif [[ ! -e $venv/stamp && -e $venv/constraints.txt ]]; then # which install_torch wrote at its end
        say "continuing the set-up of $venv (log: $log)"
        remove_incomplete
    else
        say "setting up $venv (once; log: $log)"
        rm -f "$venv/stamp"
        equal=$(find_equal)
        if [[ -n $equal ]]; then
            step "copying $equal as hard links" copy_environment "$equal"
        else
            step "creating the virtual environment with $python" make_venv
        fi
    fi
    find_torch
    if [[ -n $1 || ! -x $venv/mpi/mpirun ]]; then
        step "installing MPICH, used if there is no other MPI" install_mpich
    fi
    install_torch
    if [[ -n $equal ]]; then
        step "installing ezpz_llm" install_package_alone
    else
        step "installing DeepSpeed, ezpz_llm and their dependencies" install_package
    fi
    step "testing the environment" try_out
    environment_inputs >"$venv/inputs"
    printf '%s\n%s\n' "$(fingerprint)" "$torch_file" >"$venv/stamp.new"
    mv "$venv/stamp.new" "$venv/stamp"
    say "ready"
}
