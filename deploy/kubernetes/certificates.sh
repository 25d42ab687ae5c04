#!/bin/sh
# Makes the Secrets of TLS (components/tls) with an authority of their own: pserver-tls, etcd-tls.
# For trials, and where nothing else issues certificates. They end after DAYS (365); run it again before, then restart the Pods.
#
#   deploy/kubernetes/certificates.sh [NAMESPACE]     needs openssl and kubectl
#
# The authority (ca.crt, ca.key) stays in the folder KEEP, NAMESPACE-ca by default, for ten years. Keep it: pservers that run trust
# no other, so a restart with certificates of a new authority would cut the cluster in two.
set -eu
namespace=${1:-backstay}
days=${DAYS:-365}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 077
keep=${KEEP:-$namespace-ca}
mkdir -p "$keep"
if [ ! -f "$keep/ca.key" ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=backstay $namespace" \
    -keyout "$keep/ca.key" -out "$keep/ca.crt" 2>"$work/openssl.log" || { cat "$work/openssl.log" >&2; exit 1; }
fi

secret() { # NAME COMMON_NAME ALTERNATIVE_NAMES
  printf 'subjectAltName=%s\nkeyUsage=digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\n' "$3" >"$work/extensions"
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$2" \
    -keyout "$work/tls.key" -out "$work/request" 2>"$work/openssl.log" || { cat "$work/openssl.log" >&2; exit 1; }
  openssl x509 -req -in "$work/request" -CA "$keep/ca.crt" -CAkey "$keep/ca.key" -CAcreateserial -CAserial "$work/serial" \
    -days "$days" -extfile "$work/extensions" -out "$work/tls.crt" 2>"$work/openssl.log" || { cat "$work/openssl.log" >&2; exit 1; }
  kubectl --namespace "$namespace" create secret generic "$1" --dry-run=client --output yaml \
    --from-file=tls.crt="$work/tls.crt" --from-file=tls.key="$work/tls.key" --from-file=ca.crt="$keep/ca.crt" | kubectl apply -f -
}

# Each node's own name, the Service's names, and a command in the Pod itself.
secret pserver-tls pserver \
  "DNS:*.pserver-nodes.$namespace.svc,DNS:pserver,DNS:pserver.$namespace,DNS:pserver.$namespace.svc,DNS:localhost,IP:127.0.0.1"
secret etcd-tls etcd "DNS:etcd,DNS:etcd-0.etcd,DNS:etcd-1.etcd,DNS:etcd-2.etcd,DNS:localhost,IP:127.0.0.1"
