#!/bin/bash
# Process 1 of a node: makes the machine look like one of its own, then keeps the node's daemons running.
# Runs in fresh mount, pid, uts and ipc namespaces inside the node's network namespace. Environment, set by
# node.py: NODE, BIN (the binaries), RUN (this run's files), DATA (kept on disk), PKI, LOGS, ADDRESS,
# POD_SUBNETS, LABELS, VOLUMES (a table: folder, where pods' volumes look for it).
set -eu

mount --make-rprivate / # nothing mounted below is seen by the host
hostname "$NODE"

over() { mount --bind "$1" "$2"; }
over "$DATA/containerd" /var/lib/containerd
over "$DATA/kubelet" /var/lib/kubelet
over "$DATA/argosy" /var/lib/argosy
over "$RUN/cni-state" /var/lib/cni
over "$RUN/cni-config" /etc/cni/net.d
over "$RUN/containerd" /run/containerd
over "$RUN/netns" /run/netns
over "$LOGS/pods" /var/log/pods
over "$LOGS/containers" /var/log/containers
while IFS=$'\t' read -r source target; do
	mount --bind "$source" "$target"
	mount -o remount,bind,ro "$target"
done < "$VOLUMES"
mount --make-rshared / # within this node, containers see the mounts of the kubelet

echo 1 > /proc/sys/net/ipv4/ip_forward
# A pod that reaches a neighbour through a Service gets its answer over the bridge: translate there too.
echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables

forever() { # name, command...: a daemon that is started again when it ends, as systemd would
	local name=$1
	shift
	while :; do
		"$@" >> "$LOGS/$name.log" 2>&1 || echo "$name ended with status $?" >> "$LOGS/$name.log"
		sleep 0.5
	done
}

forever containerd containerd --config "$RUN/containerd.toml" &
until [ -S /run/containerd/containerd.sock ]; do sleep 0.05; done
forever kubelet "$BIN/kubelet" --kubeconfig="$PKI/$NODE.kubeconfig" --config="$RUN/kubelet.json" \
	--hostname-override="$NODE" --node-ip="$ADDRESS" --node-labels="$LABELS" &
forever kube-proxy "$BIN/kube-proxy" --kubeconfig="$PKI/proxy.kubeconfig" --hostname-override="$NODE" \
	--proxy-mode=iptables --cluster-cidr="$POD_SUBNETS" --conntrack-max-per-core=0 \
	--conntrack-tcp-timeout-established=0 --conntrack-tcp-timeout-close-wait=0 \
	--metrics-bind-address=127.0.0.1:10249 --healthz-bind-address=127.0.0.1:10256 &
wait
