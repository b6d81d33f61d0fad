"""The page of environment variables. Their names are held against the sources by tests/test_docs_reference.py."""

from __future__ import annotations

from docs_reference.markdown import code, page, section, table

VARIABLES = {
    "Engine (`argosy serve`)": {
        "ARGOSY_API_KEY": "Bearer keys that are accepted in addition to those of `--api-key`, separated by commas.",
        "VLLM_API_KEY": "The same, by vLLM's name.",
        "ARGOSY_ADMIN_API_KEY": "Keys for the administrative routes in addition to those of `--admin-api-key`, "
        "separated by commas.",
        "ARGOSY_INTERNAL_KEYS_FILE": "File with the keys of routers, one per line, which the operator mounts from the "
        "service's Secret. It is read again within a second of a change, and a key counts for ten more minutes when "
        "it has left the file. With it `ARGOSY_API_KEY` does not count.",
        "ARGOSY_WARM_UP_FROM": "URL of the other replicas, as `--warm-up-from`. The operator sets it to the service's; "
        "an empty value in `spec.engine.env` switches the warm-up off.",
        "ARGOSY_NODE_KEY": "Key by which the nodes of an engine with `--nnodes` recognise each other, 16 bytes or "
        "more, if `--node-key-file` is not given. While it is replaced, the new key and the one before, each in a "
        "line: two nodes need one in common.",
        "ARGOSY_MASTER_ADDR, ARGOSY_NODE_RANK, ARGOSY_NODE_TEMPLATE_HASH": "Set by the operator in the pods of a "
        "replica with `spec.parallelism.nodes`, for the arguments there and for itself; programs do not read them.",
        "ARGOSY_NATIVE": "`0` makes a CPU engine compute with torch instead of the C++ kernels, and a GPU engine start "
        "its kernels by Triton's launcher; `debug` builds the CPU kernels with their assertions.",
        "CXX": "C++ compiler that builds the CPU kernels at first use; otherwise `g++`, then `c++`.",
        "XDG_CACHE_HOME": "Folder under which the built kernels and fetched models are kept (`~/.cache`).",
        "CUDA_VISIBLE_DEVICES": "GPUs that the engine may use; an empty value hides all of them.",
        "RAY_ADDRESS": "Ray cluster whose nodes run the workers with `--distributed-executor-backend ray`, as "
        "HOST:PORT or `auto`; without it a private Ray is started on this machine.",
        "OMP_WAIT_POLICY": "Set to `PASSIVE` unless given, so that the idle threads of torch do not spin.",
    },
    "Models (`argosy serve`, `argosy doctor`, `argosy models`, `LLM`)": {
        "ARGOSY_MODELS_DIR": "Directory in which fetched models are kept, if `--download-dir` is not given "
        "(`$HF_HOME/argosy` if `HF_HOME` is set, else `argosy/models` in the user's cache).",
        "ARGOSY_MIN_FREE": "How much of the disk `argosy models pull` leaves, if `--min-free` is not given (`64M`; in "
        "pods that fetch to their node's disk `15%`, which the chart's `modelFetch.env` can change).",
        "ARGOSY_CACHE_MIN_AGE": "How long a model must not have been used before `argosy models pull --make-room` or "
        "`prune --tree` removes it (`1h`).",
        "ARGOSY_LOCK_IDLE": "How long a process that fetches a model may make no progress before `argosy models pull`, "
        "which waits for it, says who it is (`10m`).",
        "ARGOSY_OFFLINE, HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE": "`1` forbids requests: only models in the store, or "
        "complete in Hugging Face's own cache, are served.",
        "ARGOSY_CREDENTIALS_DIR": "Directory with one file per credential, named like the variables below, such as a "
        "mounted Secret. Its files win over the environment.",
        "ARGOSY_HTTPS_HOST": "Host, as HOST[:PORT], that ARGOSY_HTTPS_TOKEN is sent to.",
        "ARGOSY_HTTPS_TOKEN": "Bearer token for models at `https://`; sent to ARGOSY_HTTPS_HOST only.",
        "ARGOSY_OCI_PLAIN_HTTP": "Registries that are asked without TLS, as HOST[:PORT], separated by commas.",
        "HF_TOKEN, HF_ENDPOINT, HF_HOME": "Token, address and directory of a Hugging Face hub, as its own tools read "
        "them. [Models](../models.md#credentials) lists the credentials of every source.",
    },
    "Router (`argosy router`)": {
        "ARGOSY_ROUTER_API_KEY": "One client key (a comma is part of it), used if no `--api-key` is given. `argosy up` "
        "hands it to the router that it starts.",
        "ARGOSY_REPLICA_KEY": "Bearer key of the engines given by `--replica` or `--replica-dns`; the same as "
        "`--replica-key`.",
        "ARGOSY_FLEET_KEY": "Fleet key, from which the internal keys of services, the key of the admin port and the "
        "key between routers and `argosy batch` are derived. The operator and `argosy batch` read the same variable.",
        "ARGOSY_FLEET_KEY_DIR": "Mounted Secret with the fleet key in its file `key` and, during a rotation, the one "
        "before in `previous`, instead of `ARGOSY_FLEET_KEY`. Router, operator and `argosy batch` read it again within "
        "a second of a change ([rotating keys](../access.md#rotating-keys)).",
        "POD_NAME": "Name of the router's own pod (the host name, if it is not set).",
        "POD_NAMESPACE": "The router's namespace, where no service account tells it. The operator requires this "
        "variable: it is the namespace of operator, routers and fleet document.",
        "OTEL_TRACES_SAMPLER, OTEL_BSP_*": "Sampling and batching of spans with `--otlp-traces-endpoint`, as "
        "OpenTelemetry defines them.",
    },
    "Files and batches (`argosy batch`)": {
        "ARGOSY_FLEET_KEY, ARGOSY_FLEET_KEY_DIR": "As for the router; one of them is required.",
        "AWS_*, GOOGLE_*": "Credentials and the endpoint of a bucket, as Amazon's and Google's tools read them "
        "([storage](../batch.md#storage)).",
        "SSL_CERT_FILE, SSL_CERT_DIR": "Authorities for the certificates of the router and of a bucket, instead of "
        "the system's: a PEM file, and a directory that `openssl rehash` has made.",
    },
    "Operator (`argosy operator`)": {
        "ARGOSY_ENGINE_IMAGE": "Image of services that name none; required.",
        "ARGOSY_FLEET_KEY_SECRET": "Secret of the operator's namespace whose field `key` is the fleet key. The "
        "operator creates it if it does not exist. Without this variable `ARGOSY_FLEET_KEY` is required.",
        "ARGOSY_ROUTER_KEYS_SECRET": "Secret of the operator's namespace whose field `api-keys` holds the client keys. "
        "The operator creates it if it does not exist.",
        "ARGOSY_VLLM_IMAGE, ARGOSY_SGLANG_IMAGE": "Images of services of engine type vllm and sglang that name none.",
        "ARGOSY_ENGINE_UPGRADE_POLICY": "What another `ARGOSY_ENGINE_IMAGE` does to services that name no image: "
        "`OnSpecChange` (the default; nothing until their own next change) or `Automatic` (it is rolled out).",
        "ARGOSY_MAX_CONCURRENT_ROLLOUTS": "How many services the operator's own changes are rolled out to at once: a "
        "number, or a percentage of those of which a replica is ready (`5%` by default), rounded down; at least one.",
        "ARGOSY_RESERVED_SECRETS": "Further Secrets of the operator's namespace that no service may name, separated by "
        "commas.",
        "ARGOSY_RESERVED_CLAIMS": "PersistentVolumeClaims of the operator's namespace that no service may name, "
        "separated by commas.",
        "ARGOSY_ENGINE_SERVICE_ACCOUNTS": "ServiceAccounts that services may name, separated by commas; `*` is every "
        "one.",
        "ARGOSY_MODEL_NAMES": "Patterns of the model names that services of each namespace may claim, as a JSON object "
        "of lists; `*` for the namespaces that it does not list.",
        "ARGOSY_IMAGE_PULL_POLICY": "Pull policy of engine images: `Always`, `IfNotPresent` (the default) or `Never`.",
        "ARGOSY_IMAGE_PULL_SECRETS": "Names of registry Secrets in each service's namespace, separated by commas.",
        "ARGOSY_ROUTER_URL": "URL at which clients reach the router, shown in `status.url`. Empty: no router is "
        "expected, and services are ready without one.",
        "ARGOSY_MODEL_FETCH_ENV": "Variables of the containers that fetch models, as a JSON object: a proxy, a mirror.",
        "ARGOSY_NODE_CACHE_PATH": "Directory of the nodes whose folder `models` is the node cache. Empty: there is "
        "none, and services with `cache: {type: node}` get the reason `NodeCacheDisabled`.",
        "ARGOSY_NODE_CACHE_SELECTOR": "Labels of the nodes that have the node cache, as a JSON object; all if empty.",
        "ARGOSY_IMAGE_VOLUMES": "`1` mounts models of `oci://` as image volumes instead of fetching them.",
        "ARGOSY_WATCH_NAMESPACES": "Namespaces to serve, separated by commas; all if empty.",
        "ARGOSY_ARBITRARY_UIDS": "`1` leaves the user of pods to the cluster, as OpenShift requires.",
        "ARGOSY_LEASE": "Lease in the operator's namespace without which it writes nothing; it then needs `POD_NAME`, "
        "as the name of the holder. If it is not set, the operator always writes, and no other one may run.",
        "KUBECONFIG": "Cluster to use when the operator runs outside of one; the router reads it as well.",
    },
    "Command line": {
        "ARGOSY_STATE_DIR": "State directory of the local fleet, if `--state-dir` is not given (`.argosy`).",
        "OPENAI_API_KEY": "Key for `argosy chat`, if neither `--api-key` nor `ARGOSY_ROUTER_API_KEY` is given.",
        "ARGOSY_ROUTER_ADMIN_KEY": "Key of the router's admin port, for `argosy route` and `argosy dashboard`; "
        "without it they derive it from `ARGOSY_FLEET_KEY`.",
    },
}
"""Program -> variable -> meaning."""

_INTRODUCTION = """\
Flags win over environment variables, those over a configuration file, and the file over the defaults.
In a cluster the chart and the operator set
what is needed; `spec.engine.env` of a service adds variables to its engine."""


def environment_page() -> str:
    sections = [
        section(
            program, table(("variable", "meaning"), ((code(name), text) for name, text in variables.items()))
        )
        for program, variables in VARIABLES.items()
    ]
    return page("Environment variables", _INTRODUCTION, sections)
