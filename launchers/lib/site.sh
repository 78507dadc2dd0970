# shellcheck shell=bash
# shellcheck disable=SC2154
# Detects the machine's GPUs and the site's modules. Sourced by setup.sh.

has_nvidia_driver() { [[ -n $(type -P nvidia-smi) || -e /proc/driver/nvidia/version || -e /dev/nvidiactl ]]; }

# Print the kind of a GPU that PyPI's torch does not support: "ROCm", "Intel GPU" or nothing. Integrated graphics
# are ignored.
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
            0x8086:0x03*:*/0000:00:02.0) ;;                                # Intel's integrated graphics
            0x8086:0x03*:*) printf 'Intel GPU' && return ;;
        esac
    done
}

# Print the names of modules that may provide torch, one per line.
torch_modules() {
    local init
    if ! type module &>/dev/null; then
        for init in "${MODULESHOME:-}/init/bash" "${LMOD_PKG:-}/init/bash" /etc/profile.d/lmod.sh \
            /etc/profile.d/modules.sh; do
            if [[ -r $init ]]; then
                set +eu # these files do not support strict mode
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
    printf 'with-env: this machine has a GPU that is not from NVIDIA (%s), and %s has no torch.\n' "$1" "$python"
    if [[ -n $offers ]]; then
        printf 'Load a module that provides torch, then run this command again. From module avail:\n%s\n' "$offers"
    else
        printf 'Load a module that provides torch (module avail lists none), then run this command again.\n'
    fi
    printf 'Or choose the torch that pip installs:\n'
    printf '  EZPZ_LLM_TORCH="torch --index-url ADDRESS_OF_A_%s_BUILD"     EZPZ_LLM_TORCH=%s (CPU only)\n' \
        "$([[ $1 == ROCm ]] && printf ROCM || printf XPU)" "$default_torch"
}
