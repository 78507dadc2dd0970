# shellcheck shell=bash
# shellcheck disable=SC2154
# What the machine and its site offer: GPUs and modules. Sourced by setup.sh.

has_nvidia_driver() { [[ -n $(type -P nvidia-smi) || -e /proc/driver/nvidia/version || -e /dev/nvidiactl ]]; }

# The GPU that PyPI's torch could not use: "ROCm", "Intel GPU" or nothing. Graphics inside a processor do not count.
foreign_gpu() {
    local device vendor class
    if has_nvidia_driver; then return; fi
    if [[ -n ${ROCM_PATH:-} || -n $(compgen -G '/opt/rocm*') || -n $(type -P rocminfo) ]]; then
        printf 'ROCm'
        return
    fi
    if [[ -n $(type -P xpu-smi) ]]; then
        printf 'Intel GPU'
        return
    fi
    for device in /sys/bus/pci/devices/*; do
        [[ -r $device/vendor && -r $device/class ]] || continue
        read -r vendor <"$device/vendor"
        read -r class <"$device/class"
        case $vendor:$class:$device in
            0x1002:0x0380*:* | 0x1002:0x1200*:*) printf 'ROCm' && return ;; # AMD Instinct: no display
            0x8086:0x03*:*/0000:00:02.0) ;;                                # Intel's graphics inside a processor
            0x8086:0x03*:*) printf 'Intel GPU' && return ;;
        esac
    done
}

# Names of modules that sound like a Python with torch, one a line.
torch_modules() {
    local init
    if ! type module &>/dev/null; then
        for init in "${MODULESHOME:-}/init/bash" "${LMOD_PKG:-}/init/bash" /etc/profile.d/lmod.sh \
            /etc/profile.d/modules.sh; do
            if [[ -r $init ]]; then
                set +eu # such files are not written for strict shells
                # shellcheck disable=SC1090
                source "$init" &>/dev/null
                set -eu
                break
            fi
        done
    fi
    type module &>/dev/null || return 0
    (set +eu && module -t avail 2>&1) | grep -iE 'torch|frameworks|conda' || true
}

explain_foreign_gpu() { # KIND
    local offers
    offers=$(torch_modules)
    printf 'with-env: this host has a GPU that is not NVIDIA'"'"'s (%s), and %s has no torch.\n' "$1" "$python"
    if [[ -n $offers ]]; then
        printf 'Load a module that provides one, then run this again. module avail says:\n%s\n' "$offers"
    else
        printf 'Load the module of this site that provides torch (module avail shows none here), then run this again.\n'
    fi
    printf 'Or say what pip shall install:\n'
    printf '  EZPZ_LLM_TORCH="torch --index-url ADDRESS_OF_A_%s_BUILD"     EZPZ_LLM_TORCH=%s (CPU only)\n' \
        "$([[ $1 == ROCm ]] && printf ROCM || printf XPU)" "$default_torch"
}
