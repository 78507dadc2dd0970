#!/bin/bash
# A cluster of N nodes on one Linux machine, for tests (root; no systemd). Every node has its own host name, address,
# network, processes, /dev/shm, boot id, sshd and slurmd. All of it lives in ONE outer namespace without a route to
# anywhere: any number of clusters run side by side, and the end of one process is the end of a cluster.
#
#   simcluster.sh up DIR                start, with the settings below; returns once all nodes are idle
#   simcluster.sh exec DIR -- CMD...    run CMD on the login node, in this directory
#   simcluster.sh on NODE DIR -- CMD... run CMD on a node, in this directory
#   simcluster.sh kill-node NODE DIR    switch a node's power off
#   simcluster.sh boot-node NODE DIR    and on again
#   simcluster.sh down DIR
#
# SIM_NODES=4   nodes                     SIM_PREFIX=n      host names: n1 n2 …
# SIM_SLOTS=2   CPUs a node, for Slurm    SIM_NET=10.77.0   first three parts of the addresses; .254 is the login node
# SIM_GPUS=0    pretended GPUs a node     SIM_NODE_TMP=0    1: each node has a disk (tmpfs) of its own at /local
# SIM_SLURM=1   0: no Slurm               SIM_SSHD=1        0: no ssh
# SIM_LIFELINE=   a file descriptor: the cluster ends when nobody holds its other end open any longer
set -u
SELF=$(readlink -f "$0")
PATH=$PATH:/usr/sbin:/sbin   # where daemons are, whatever the user's PATH
: "${SIM_MPI:=pmi2}" "${SIM_NODES:=4}" "${SIM_SLOTS:=2}" "${SIM_GPUS:=0}" "${SIM_PREFIX:=n}" "${SIM_NET:=10.77.0}"
: "${SIM_SLURM:=1}" "${SIM_SSHD:=1}" "${SIM_NODE_TMP:=0}" "${SIM_LIFELINE:=}"
export SIM_NODES SIM_SLOTS SIM_GPUS SIM_PREFIX SIM_NET SIM_SLURM SIM_SSHD SIM_NODE_TMP
export -n SIM_LIFELINE

die() { echo "simcluster: $*" >&2; exit 1; }
child_of() { local child=; read -r child _ <"/proc/$1/task/$1/children"; [ -n "$child" ] && echo "$child"; } # PID
is_alive() { [ -e "$1/head.pid" ] && grep -qzF "$1" "/proc/$(cat "$1/head.pid")/cmdline" 2>/dev/null; } # DIR

write_files() { # DIR
  local D=$1 i gres=
  { echo "127.0.0.1 localhost"; echo "$SIM_NET.254 login login.sim"
    for i in $(seq "$SIM_NODES"); do echo "$SIM_NET.$i $SIM_PREFIX$i $SIM_PREFIX$i.sim"; done; } >"$D/hosts"
  if [ "$SIM_GPUS" -gt 0 ]; then
    gres="Gres=gpu:$SIM_GPUS"
    # Slurm wants files that exist and differ; any character device will do.
    echo "Name=gpu File=$D/dev/nvidia[0-$((SIM_GPUS - 1))]" >"$D/etc/gres.conf"
    for i in $(seq 0 $((SIM_GPUS - 1))); do mknod -m 666 "$D/dev/nvidia$i" c 1 3; done
  fi
  # Short timeouts, so that deaths are noticed within a test's patience; CPUs above the real ones are believed.
  cat >"$D/etc/slurm.conf" <<END
ClusterName=sim
SlurmctldHost=login($SIM_NET.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=cred_expire=6
MailProg=/bin/true
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd-%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=$SIM_MPI
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=5
InactiveLimit=0
KillWait=3
WaitTime=5
MinJobAge=300
BatchStartTimeout=10
MessageTimeout=5
TCPTimeout=2
SchedulerParameters=bf_interval=2
SchedulerType=sched/backfill
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc=$D/log/jobcomp.txt
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
${gres:+GresTypes=gpu}
NodeName=$SIM_PREFIX[1-$SIM_NODES] CPUs=$SIM_SLOTS RealMemory=4000 State=UNKNOWN $gres
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 DefaultTime=10 State=UP
PartitionName=regular Nodes=ALL MaxTime=1440 State=UP
END
  cat >"$D/ssh/ssh_config" <<END
Host *
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  IdentityFile /etc/ssh/id_sim
  BatchMode yes
  ConnectTimeout 5
END
  cat >"$D/ssh/sshd_config" <<END
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/id_sim.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
PidFile none
UseDNS no
MaxStartups 100
AcceptEnv *
END
  if [ "$SIM_SSHD" = 1 ]; then
    ssh-keygen -q -t ed25519 -N '' -f "$D/ssh/host_key"
    ssh-keygen -q -t ed25519 -N '' -f "$D/ssh/id_sim"
  fi
  if [ "$SIM_SLURM" = 1 ]; then
    head -c 128 /dev/urandom >"$D/munge/munge.key"
    chown -R munge: "$D/munge"; chmod 400 "$D/munge/munge.key"; chmod 755 "$D/munge"
  fi
}

case "${1:-}" in
up)
  D=$(readlink -f "${2:?DIR}")
  [ "$(id -u)" = 0 ] || die "needs root"
  is_alive "$D" && die "already up in $D"
  [ -z "$(ls -A "$D" 2>/dev/null)" ] || [ -e "$D/settings" ] || die "$D is not empty and was not made by simcluster"
  rm -rf "$D"; mkdir -p "$D"/{etc,ssh,state,spool,run,log,munge,dev,nodes}; chmod 755 "$D"
  export -p | grep '^declare -x SIM_' >"$D/settings"   # the other commands read it back
  write_files "$D"
  setsid unshare --net --mount --uts --pid --fork --kill-child --mount-proc bash "$SELF" _head "$D" "$SIM_LIFELINE" \
    </dev/null >"$D/log/head.log" 2>&1 &
  U=$!
  trap 'kill -KILL "$U" 2>/dev/null; rm -f "$D/head.pid"' EXIT   # no half a cluster, whatever comes
  for _ in $(seq 600); do
    [ -e "$D/ready" ] && break
    kill -0 $U 2>/dev/null || { cat "$D/log/head.log" >&2; die "the login node has ended"; }
    sleep 0.05
  done
  [ -e "$D/ready" ] || { tail -n 20 "$D"/log/* >&2; die "not ready within 30 s"; }
  child_of $U >"$D/head.pid"
  trap - EXIT
  cat "$D/ready";;
_head) # the first process of the outer namespaces
  D=$2 lifeline=$3
  trap 'exit 0' TERM
  if [ -n "$lifeline" ]; then
    (cat <&"$lifeline" >/dev/null; kill -TERM 1) &
    exec {lifeline}<&-
  fi
  hostname login; ip link set lo up
  mkdir -p /etc/slurm /run/munge /run/sshd
  mount --bind "$D/hosts" /etc/hosts
  mount --bind "$D/etc" /etc/slurm; mount --bind "$D/munge" /run/munge; mount --bind "$D/ssh" /etc/ssh
  mount -t tmpfs -o mode=1777 tmpfs /dev/shm
  ip link add br0 type bridge; ip addr add "$SIM_NET.254/24" dev br0; ip link set br0 up
  unset SLURM_CONF
  if [ "$SIM_SLURM" = 1 ]; then
    runuser -u munge -- munged --key-file=/run/munge/munge.key --pid-file=/run/munge/munged.pid \
      --log-file=/run/munge/munged.log --seed-file=/run/munge/munged.seed --force
    slurmctld -c || exit 1
  fi
  boots=()
  for i in $(seq "$SIM_NODES"); do bash "$SELF" _boot "$D" "$i" & boots+=($!); done
  for boot in "${boots[@]}"; do wait "$boot" || exit 1; done
  if [ "$SIM_SLURM" = 1 ]; then
    for _ in $(seq 200); do
      [ "$(sinfo -h -t idle -p debug -o %D 2>/dev/null)" = "$SIM_NODES" ] && break; sleep 0.1
    done
    sinfo >"$D/ready.tmp"
  else echo up >"$D/ready.tmp"; fi
  mv "$D/ready.tmp" "$D/ready"
  sleep infinity & wait $!;;
_boot) # in the login node's namespaces: make node i
  D=$2 i=$3; N=$SIM_PREFIX$i
  rm -f "$D/nodes/$N.up"
  setsid unshare --net --mount --uts --ipc --pid --fork --kill-child --mount-proc bash "$SELF" _node "$D" "$i" \
    </dev/null >>"$D/log/node-$N.log" 2>&1 &
  U=$! P=
  for _ in $(seq 500); do P=$(child_of $U) && break; sleep 0.02; done
  [ -n "$P" ] || die "node $N has not begun"
  echo "$P" >"$D/nodes/$N.pid"
  ip link del "v$N" 2>/dev/null
  # A node that is switched on again has the hardware address that the others remember.
  ip link add "v$N" type veth peer name eth0 address "$(printf 02:00:00:00:%02x:%02x $((i / 256)) $((i % 256)))" netns "$P"
  ip link set "v$N" master br0 up
  for _ in $(seq 400); do [ -e "$D/nodes/$N.up" ] && break; sleep 0.05; done
  [ -e "$D/nodes/$N.up" ] || die "node $N did not come up"
  [ "$SIM_SSHD" = 1 ] || exit 0
  for _ in $(seq 40); do timeout 1 bash -c ": </dev/tcp/$N/22" 2>/dev/null && exit 0; sleep 0.05; done
  die "node $N does not answer on ssh's port";;
_node) # the first process of a node
  D=$2 i=$3; N=$SIM_PREFIX$i
  trap 'exit 0' TERM
  hostname "$N"; ip link set lo up
  for _ in $(seq 500); do ip link show eth0 >/dev/null 2>&1 && break; sleep 0.02; done
  ip addr add "$SIM_NET.$i/24" dev eth0; ip link set eth0 up
  mkdir -p "$D/spool/$N"
  # UCX, NCCL, libfabric and others take an equal boot id for "the same machine", and then try shared memory.
  mount -t tmpfs -o mode=1777 tmpfs /dev/shm
  cat /proc/sys/kernel/random/uuid >"$D/run/boot_id.$N"
  mount --bind "$D/run/boot_id.$N" /proc/sys/kernel/random/boot_id
  [ "$SIM_NODE_TMP" = 1 ] && { mkdir -p /local; mount -t tmpfs tmpfs /local; }
  [ "$SIM_SSHD" = 1 ] && /usr/sbin/sshd -f /etc/ssh/sshd_config
  [ "$SIM_SLURM" = 1 ] && slurmd -N "$N"
  # By its namespace a node's processes are recognised from outside.
  readlink /proc/self/ns/uts >"$D/run/uts.$N"; mv "$D/run/uts.$N" "$D/nodes/$N.up"
  sleep infinity & wait $!;;
exec|on|kill-node|boot-node)
  V=$1 N=; shift
  [ "$V" = exec ] || { N=${1:?NODE}; shift; }
  D=$(readlink -f "${1:?DIR}"); shift
  [ "${1:-}" = "--" ] && shift
  is_alive "$D" || die "no cluster is up in $D"
  . "$D/settings"
  enter=(nsenter -t "$(cat "$D/head.pid")" -n -u -m -p)
  case $V in
    exec) exec "${enter[@]}" --wd="$PWD" -- "$@";;
    on) exec "${enter[@]}" -- nsenter -t "$(cat "$D/nodes/$N.pid")" -n -u -i -m -p -- env -C "$PWD" -- "$@";;
    kill-node) exec "${enter[@]}" -- bash -c 'kill -KILL "$0"' "$(cat "$D/nodes/$N.pid")";;
    boot-node) exec "${enter[@]}" -- bash "$SELF" _boot "$D" "${N#"$SIM_PREFIX"}";;
  esac;;
down)
  D=$(readlink -f "${2:?DIR}")
  is_alive "$D" || { rm -f "$D/head.pid" "$D/ready"; exit 0; }
  P=$(cat "$D/head.pid")
  kill -KILL "$P"
  for _ in $(seq 200); do [ -e "/proc/$P" ] || break; sleep 0.05; done
  rm -f "$D/head.pid" "$D/ready";;
*) sed -n '2,/^set -u/{/^set -u/d;s/^# \?//;p}' "$SELF"; exit 2;;
esac
