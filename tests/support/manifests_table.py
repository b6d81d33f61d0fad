"""Valid and invalid manifests, with the error that an API server with our CRD gives for the invalid ones.

The fast tests pass them through `argosy_resource.validation`, the end-to-end tests through a real API server
(`kubectl apply --dry-run=server`, which validates strictly). An expected error is a part of the message that both have
in common; None means that the manifest is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Case(NamedTuple):
    name: str
    manifest: str
    error: str | None


def manifest(spec: str, *, name: str = "tiny") -> str:
    """Return a manifest with the given `spec`, as YAML without indentation."""
    body = "\n".join(f"  {line}" for line in spec.strip("\n").splitlines())
    return f"""\
apiVersion: inference.argosy.dev/v1alpha1
kind: InferenceService
metadata:
  name: {name}
spec:
{body}
"""


TINY = "model: {source: 'builtin://tiny'}"
HUB = "source: 'hf://org/name'"

_DIGEST = "0123456789abcdef" * 4

REMOTE_SOURCES: tuple[str, ...] = (
    "hf://Qwen/Qwen3-8B",
    "hf://Qwen/Qwen3-8B@main",
    f"hf://Qwen/Qwen3-8B@{_DIGEST[:40]}",
    "hf://org/name_1.0@refs/pr/7",
    "hf://org/name@v1.0+cpu",
    "s3://models",
    "s3://models/",
    "s3://models/qwen3/8b",
    "s3://models/qwen3/8b/",
    "s3://models//qwen3",
    "s3://my.models/a b/Modèle..v2",
    "gs://models_of_ours/qwen3",
    "oci://registry.example/models/qwen3",
    "oci://registry.example:5000/models/qwen3:v1",
    f"oci://registry.example/models/qwen3:v1@sha256:{_DIGEST}",
    f"oci://localhost/qwen3@sha256:{_DIGEST}",
    "oci://[fd00::1]:5000/a__b/c-d",
    "https://example.com/SHA256SUMS",
    "https://example.com:8443/models/qwen%203/SHA256SUMS",
    "https://[fd00::1]/qwen3/SHA256SUMS",
)
"""Sources that the fetcher parses and manifests may have."""

REFUSED_SOURCES: dict[str, str] = {
    "Qwen/Qwen3-8B": "must begin with hf://",
    "/models/qwen": "a directory is file:///PATH",
    "": "spec.model.source in body should be at least 1 chars long",
    "ftp://example.com/a": "must begin with hf://",
    "HF://org/name": "must begin with hf://",
    " hf://org/name": "must begin with hf://",
    "hf://name": "must be hf://ORG/NAME",
    "hf://org/name:": "must be hf://ORG/NAME",
    "hf://org/name/more": "must be hf://ORG/NAME",
    "hf://org/name@": "must be hf://ORG/NAME",
    "hf://org/name@v1@v2": "must be hf://ORG/NAME",
    "hf://org/name@a b": "must be hf://ORG/NAME",
    "hf://org/name@a..b": "must be hf://ORG/NAME",
    "hf://org/name@a//b": "must be hf://ORG/NAME",
    "hf://org/name@a/": "must be hf://ORG/NAME",
    "hf://org/name@a.lock": "must be hf://ORG/NAME",
    f"hf://org/name@{'a' * 256}": "must be hf://ORG/NAME",
    f"hf://org/{'a' * 97}": "must be hf://ORG/NAME",
    "hf://.org/name": "must be hf://ORG/NAME",
    "s3://": "must be s3://BUCKET",
    "s3://ab": "must be s3://BUCKET",
    "s3://Models/a": "must be s3://BUCKET",
    "s3://a..b/c": "must be s3://BUCKET",
    "s3://models/a//b": "must not contain '.' as a path segment, nor an empty one",
    "s3://models/./a": "must not contain '.' as a path segment",
    "s3://models/a/.": "must not contain '.' as a path segment",
    "s3://models/a/../b": "must not contain '..' as a path segment",
    "gs://models/..": "must not contain '..' as a path segment",
    "gs://-models/a": "must be gs://BUCKET",
    "oci://registry.example": "must be oci://HOST",
    "oci://registry.example/Models": "must be oci://HOST",
    "oci://registry.example/a//b": "must be oci://HOST",
    "oci://user@registry.example/a": "must be oci://HOST",
    "oci://registry.example/a:v1:v2": "must be oci://HOST",
    "oci://registry.example/a@sha256:0123": "must be oci://HOST",
    "https://": "must be https://HOST",
    "https:///SHA256SUMS": "must be https://HOST",
    "https://user:secret@example.com/SHA256SUMS": "credentials are in secretRef",
    "https://example.com:port/SHA256SUMS": "must be https://HOST",
    "https://example.com/SHA256SUMS#part": "must be https://HOST",
    "https://example.com/SHA256SUMS?signature=a": "/PATH/SHA256SUMS, without user, password and query",
    "https://example.com/qwen3.tar.gz": "must be https://HOST[:PORT]/PATH/SHA256SUMS",
    f"https://example.com/qwen3.tar.gz#sha256={_DIGEST}": "must be https://HOST[:PORT]/PATH/SHA256SUMS",
    "hf://org/name\n": "must be hf://ORG/NAME",
    "s3://models/a\nb": "must be s3://BUCKET",
    "s3://models/a\x7fb": "must not contain control characters",
    "http://example.com/a.zip": "must begin with hf://",
}
"""Sources that neither the fetcher nor a manifest accepts, with the manifest's error."""

GOOD: dict[str, str] = {
    "smallest": manifest(TINY),
    "replicas": manifest(f"{TINY}\nreplicas: 3"),
    "no replicas": manifest(f"{TINY}\nreplicas: 0"),
    "names": manifest(
        "model: {source: 'builtin://tiny', servedName: org/Tiny-1.0, aliases: [tiny, 'tiny:latest']}"
    ),
    "volume claim": manifest("model: {source: 'pvc://models/qwen3-8b'}"),
    "root of a volume claim": manifest("model: {source: 'pvc://models'}"),
    "file": manifest("model: {source: 'file:///models/qwen3-8b'}"),
    "GGUF file": manifest("model: {source: 'hf://org/name_1.0:UD-Q4_K_XL', widenedSize: 16Gi}"),
    "GGUF file of a bucket": manifest("model: {source: 'gs://models/a/b.gguf', widenedSize: 16Gi}"),
    "GGUF file at a revision": manifest(
        "model: {source: 'hf://org/name:Q4_K_M@refs/pr/7', widenedSize: 16Gi, cache: {sizeLimit: 5Gi}}"
    ),
    "secret of a source": manifest(f"model: {{{HUB}, secretRef: {{name: hf-token}}}}"),
    "Secret whose name is like one of Argosy's": manifest(
        f"{TINY}\npodTemplate: {{spec: {{volumes: [{{name: a, secret: {{secretName: engine-keys}}}}]}}}}"
    ),
    "cache in the pod": manifest(f"model: {{{HUB}, cache: {{}}}}"),
    "cache in the pod, with a limit": manifest(f"model: {{{HUB}, cache: {{type: none, sizeLimit: 60Gi}}}}"),
    "cache in the pod, with a limit only": manifest(f"model: {{{HUB}, cache: {{sizeLimit: 60Gi}}}}"),
    "cache of the node": manifest(f"model: {{{HUB}, cache: {{type: node}}}}"),
    "cache on a claim": manifest(f"model: {{{HUB}, cache: {{type: claim, claimName: models}}}}"),
    "another variable of an engine whose model is fetched": manifest(
        f"model: {{{HUB}}}\nengine: {{env: [{{name: HF_HOME, value: /tmp}}]}}"
    ),
    "endpoint beside a model that is not fetched": manifest(
        f"{TINY}\nengine: {{env: [{{name: HF_ENDPOINT, value: 'https://hub'}}]}}"
    ),
    "credential beside a model that is not fetched": manifest(
        f"{TINY}\nengine: {{env: [{{name: HF_TOKEN, value: hf_a}}]}}"
    ),
    "credential for what another engine fetches by itself": manifest(
        f"model: {{{HUB}}}\nengine: {{type: vllm, image: vllm, env: [{{name: HF_TOKEN, value: hf_a}}]}}"
    ),
    "credential in the overlay for what another engine fetches by itself": manifest(
        f"model: {{{HUB}}}\nengine: {{type: sglang, image: sglang}}\npodTemplate: {{spec: {{containers: "
        "[{name: engine, env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}]}]}}"
    ),
    "mount at /models beside a model on a claim": manifest(
        """
model: {source: 'pvc://models'}
podTemplate: {spec: {containers: [{name: engine, volumeMounts: [{name: a, mountPath: /models}]}]}}
"""
    ),
    "cuda with gpu": manifest(f"{TINY}\nengine: {{device: cuda}}\nresources: {{gpu: {{count: 1}}}}"),
    "auto with gpu": manifest(f"{TINY}\nresources: {{gpu: {{}}}}"),
    "a gpu for each device": manifest(
        f"{TINY}\nparallelism: {{tensor: 4, pipeline: 2, data: 2, expert: false}}\nresources: {{gpu: {{count: 16}}}}"
    ),
    "experts divided among devices": manifest(
        f"{TINY}\nparallelism: {{tensor: 4, pipeline: 2, data: 1, expert: true}}\nresources: {{gpu: {{count: 8}}}}"
    ),
    "experts divided among copies of the model": manifest(f"{TINY}\nparallelism: {{data: 2, expert: true}}"),
    "experts divided among all devices": manifest(
        f"{TINY}\nparallelism: {{tensor: 2, data: 4, expert: true}}\nresources: {{gpu: {{count: 8}}}}"
    ),
    "gpus that follow from the devices": manifest(
        f"{TINY}\nparallelism: {{tensor: 2}}\nresources: {{gpu: {{}}}}"
    ),
    "devices without gpus": manifest(f"{TINY}\nparallelism: {{tensor: 2, expert: false}}"),
    "mig slice": manifest(f"{TINY}\nresources: {{gpu: {{resourceName: nvidia.com/mig-1g.10gb}}}}"),
    "cpu": manifest(f"{TINY}\nengine: {{device: cpu, threads: 1, kvCacheMemory: 64Mi}}"),
    "quantities as strings": manifest(f"{TINY}\nresources: {{cpu: 500m, memory: 1.5Gi}}"),
    "quantities as whole numbers": manifest(
        f"{TINY}\nresources: {{cpu: 4, memory: 17179869184}}\nengine: {{kvCacheMemory: 1000000}}"
    ),
    "whole numbers with a point": manifest(
        f"{TINY}\nreplicas: 2.0\nresources: {{cpu: 4.0}}\nengine: {{gpuMemoryUtilization: 1.0}}"
    ),
    "quantity of zero": manifest(f"{TINY}\nresources: {{cpu: 0}}"),
    "size limit of a cache as a whole number": manifest(
        f"model: {{{HUB}, cache: {{sizeLimit: 60000000000}}}}"
    ),
    "size limit of a volume as a whole number": manifest(
        f"{TINY}\npodTemplate: {{spec: {{volumes: [{{name: scratch, emptyDir: {{sizeLimit: 1000000}}}}]}}}}"
    ),
    "every engine field": manifest(
        TINY
        + """
engine:
  image: registry.example/argosy-engine:1.0@sha256:0123456789abcdef
  device: auto
  dtype: bfloat16
  attentionBackend: torch
  maxModelLen: 4096
  maxNumSeqs: 64
  maxNumBatchedTokens: 2048
  blockSize: 16
  gpuMemoryUtilization: 0.9
  enablePrefixCaching: false
  threads: 2
  env: [{name: A, value: b}, {name: EMPTY}]
  shutdownTimeoutSeconds: 0
"""
    ),
    "arguments of the engine": manifest(
        TINY
        + """
engine:
  args:
  - --max-logprobs=-1
  - --enforce-eager
  - --no-enable-chunked-prefill
  - --watermark=0.05
  - --kv-cache-dtype=fp8
  - --structured-outputs-cache-bytes=64M
  - --max-num-queued-tokens=1000000
  - '--default-chat-template-kwargs={"enable_thinking": false}'
  - --tool-call-parser=hermes
  - --middleware=package.first
  - --middleware=package.second
  - --swap-space=4
"""
    ),
    "vllm": manifest(
        f"model: {{{HUB}, cache: {{sizeLimit: 60Gi}}}}\n"
        + """
engine: {type: vllm, device: cuda, kvCacheMemory: 2Gi, args: [--enable-lora, --max-loras=2, '--speculative-config={}']}
resources: {gpu: {}}
"""
    ),
    "sglang": manifest(
        "model: {source: 'pvc://models/a'}\nengine: {type: sglang, device: cpu, attentionBackend: auto, "
        "args: [--ep-size=2]}"
    ),
    "type of our own engine": manifest(f"{TINY}\nengine: {{type: argosy, threads: 1}}"),
    "upgrade policy": manifest(f"{TINY}\nengine: {{upgradePolicy: Automatic}}"),
    "limit of the CPU as much as its request": manifest(
        f"{TINY}\nresources: {{cpu: 1500m, cpuLimit: '1.5'}}"
    ),
    "limit of the CPU in whole numbers": manifest(f"{TINY}\nresources: {{cpu: 500m, cpuLimit: 1}}"),
    "limit of the CPU only": manifest(f"{TINY}\nresources: {{cpuLimit: 500m}}"),
    "class with system in its name": manifest(f"{TINY}\nplacement: {{priorityClassName: my-system-class}}"),
    "no arguments": manifest(f"{TINY}\nengine: {{args: []}}"),
    "whole number where a number is asked": manifest(f"{TINY}\nengine: {{gpuMemoryUtilization: 1}}"),
    "placement": manifest(
        TINY
        + """
placement:
  nodeSelector: {gpu: h200}
  tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
  priorityClassName: serving
"""
    ),
    "affinity and spreading": manifest(
        TINY
        + """
placement:
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
        - matchExpressions:
          - {key: gpu, operator: In, values: [h100, h200]}
          - {key: cores, operator: Gt, values: ['16']}
          - {key: spot, operator: DoesNotExist}
          matchFields: [{key: metadata.name, operator: NotIn, values: [node-7]}]
      preferredDuringSchedulingIgnoredDuringExecution:
      - {weight: 10, preference: {matchExpressions: [{key: nvlink, operator: Exists}]}}
    podAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 1
        podAffinityTerm:
          topologyKey: topology.kubernetes.io/zone
          labelSelector: {matchLabels: {app: web}}
          namespaces: [web]
          namespaceSelector: {matchExpressions: [{key: team, operator: In, values: [search]}]}
    podAntiAffinity:
      requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: kubernetes.io/hostname}]
  topologySpreadConstraints:
  - {topologyKey: topology.kubernetes.io/zone, matchLabelKeys: [pod-template-hash], minDomains: 2}
  - {topologyKey: kubernetes.io/hostname, maxSkew: 2, whenUnsatisfiable: ScheduleAnyway, nodeTaintsPolicy: Honor}
  runtimeClassName: nvidia
  schedulerName: gang
  serviceAccountName: models
  automountServiceAccountToken: true
"""
    ),
    "no token without an account": manifest(f"{TINY}\nplacement: {{automountServiceAccountToken: false}}"),
    "limits of cpu and shared memory": manifest(
        f"{TINY}\nresources: {{cpu: 4, cpuLimit: 4, memory: 16Gi, sharedMemory: 8Gi}}"
    ),
    "a claim of devices for each replica": manifest(
        f"{TINY}\nengine: {{device: cuda}}\nresources: {{claims: [{{name: gpu, resourceClaimTemplateName: h200, "
        "request: one}]}"
    ),
    "in place": manifest(f"{TINY}\nrollout: {{maxSurge: 0}}"),
    "unavailable only": manifest(f"{TINY}\nrollout: {{maxUnavailable: 2}}"),
    "scaling": manifest(
        f"{TINY}\nscaling: {{maxReplicas: 8, metrics: {{concurrency: 32, ttftP90Seconds: 1.5}}, schedules: "
        "[{name: office, start: '30 8 * * 1-5', end: 0 18 * * 1-5, timeZone: Europe/Berlin, minReplicas: 4}]}"
    ),
    "scaling to zero": manifest(f"{TINY}\nscaling: {{minReplicas: 0, maxReplicas: 1, idleSeconds: 300}}"),
    "rollout": manifest(f"{TINY}\nrollout: {{maxSurge: 1, maxUnavailable: 0, drainSeconds: 0}}"),
    "disruption budget": manifest(f"{TINY}\npodDisruptionBudget: {{maxUnavailable: 25%}}"),
    "disruption budget as a number": manifest(f"{TINY}\npodDisruptionBudget: {{maxUnavailable: 2}}"),
    "policy": manifest(f"{TINY}\nrouter: {{policy: least-load}}"),
    "hedging from a factor on": manifest(f"{TINY}\nrouter: {{hedgeAfter: 1.5}}"),
    "hedging by a whole factor": manifest(f"{TINY}\nrouter: {{hedgeAfter: 1}}"),
    "no hedging": manifest(f"{TINY}\nrouter: {{hedgeAfter: 0}}"),
    "canary": manifest(f"{TINY}\nrouter: {{canary: {{service: tiny-next, weight: 10}}}}"),
    "canary rollout": manifest(
        TINY
        + """
rollout:
  inPlaceAfterSeconds: 600
  canary:
    steps: [{weight: 0, hold: true}, {weight: 10}, {weight: 100, pauseSeconds: 60, replicas: 2}]
    analysis: {maxErrorRate: 0.01, maxTtftP90Ratio: 1.5, minCachedShareRatio: 0.5, minHitRatio: 0.8}
    hold: true
    action: {type: Continue, revision: abc123, step: 1}
"""
    ),
    "canary rollout by time alone": manifest(
        f"{TINY}\nrollout: {{canary: {{steps: [{{weight: 10, pauseSeconds: 60}}]}}}}"
    ),
    "canary with weight zero": manifest(f"{TINY}\nrouter: {{canary: {{service: tiny-next, weight: 0}}}}"),
    "paused": manifest(f"{TINY}\npaused: true"),
    "overlay": manifest(
        TINY
        + """
podTemplate:
  metadata:
    labels: {team: search}
    annotations: {example.com/owner: search@example.com}
  spec:
    imagePullSecrets: [{name: registry}]
    volumes:
    - {name: site, persistentVolumeClaim: {claimName: site, readOnly: true}}
    - {name: scratch, emptyDir: {sizeLimit: 1Gi}}
    - {name: certs, projected: {sources: [{configMap: {name: ca}}, {secret: {name: token}}]}}
    containers:
    - name: engine
      env:
      - {name: PYTHONPATH, value: /site}
      - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}
      volumeMounts:
      - {name: site, mountPath: /site, readOnly: true}
      - {name: scratch, mountPath: /scratch, subPath: a/b}
"""
    ),
    "alias equal to the resource's name beside a served name": manifest(
        "model: {source: 'builtin://tiny', servedName: other, aliases: [tiny]}"
    ),
    "longest name": manifest(TINY, name="a" * 63),
}

BAD: dict[str, tuple[str, str]] = {
    "image with a line's end, as of a block": (
        manifest(f"{TINY}\nengine:\n  image: |\n    registry.example/engine:1"),
        "spec.engine.image in body should match",
    ),
    "label with a line's end": (
        manifest(f'{TINY}\npodTemplate: {{metadata: {{labels: {{a: "b\\n"}}}}}}'),
        "in body should match",
    ),
    "no model": (manifest("replicas: 1"), "spec.model: Required value"),
    "no source": (manifest("model: {servedName: x}"), "spec.model.source: Required value"),
    "unknown builtin": (manifest("model: {source: 'builtin://huge'}"), "must be builtin://tiny"),
    "relative file": (manifest("model: {source: 'file://models'}"), "must be file:///ABSOLUTE/PATH"),
    "claim without a name": (manifest("model: {source: 'pvc:///models'}"), "must be pvc://CLAIM"),
    "secret of a model on a claim": (
        manifest("model: {source: 'pvc://models', secretRef: {name: a}}"),
        "secretRef is for models that are fetched",
    ),
    "secret without a name": (
        manifest(f"model: {{{HUB}, secretRef: {{}}}}"),
        "spec.model.secretRef.name: Required value",
    ),
    "secret by a path": (
        manifest(f"model: {{{HUB}, secretRef: {{name: ../a}}}}"),
        'spec.model.secretRef.name: Invalid value: "../a"',
    ),
    "secret with a name too long for a directory": (
        manifest(f"model: {{{HUB}, secretRef: {{name: {'a' * 248}}}}}"),
        "spec.model.secretRef.name: Too long: may not be more than 247 bytes",
    ),
    "cache of a built-in model": (
        manifest("model: {source: 'builtin://tiny', cache: {type: node}}"),
        "cache is for models that are fetched",
    ),
    "unknown cache": (
        manifest(f"model: {{{HUB}, cache: {{type: host}}}}"),
        'spec.model.cache.type: Unsupported value: "host"',
    ),
    "cache on a claim without a name": (
        manifest(f"model: {{{HUB}, cache: {{type: claim}}}}"),
        "claimName belongs to type claim: set both, or neither",
    ),
    "claim of another cache": (
        manifest(f"model: {{{HUB}, cache: {{claimName: models}}}}"),
        "claimName belongs to type claim: set both, or neither",
    ),
    "limit of another cache": (
        manifest(f"model: {{{HUB}, cache: {{type: node, sizeLimit: 60Gi}}}}"),
        "sizeLimit is for type none only",
    ),
    "endpoint of a source in the engine": (
        manifest(f"model: {{{HUB}}}\nengine: {{env: [{{name: HF_ENDPOINT, value: 'https://hub'}}]}}"),
        "belong in the Secret of spec.model.secretRef",
    ),
    "endpoint of a source in the overlay": (
        manifest(
            "model: {source: 's3://models/a'}\npodTemplate: {spec: {containers: [{name: engine, env: "
            "[{name: AWS_ENDPOINT_URL_S3, value: 'https://s3'}]}]}}"
        ),
        "belong in the Secret of spec.model.secretRef",
    ),
    "credential of a source in the engine": (
        manifest(f"model: {{{HUB}}}\nengine: {{env: [{{name: HF_TOKEN, value: hf_a}}]}}"),
        "belong in the Secret of spec.model.secretRef",
    ),
    "credential of a source in the overlay": (
        manifest(
            "model: {source: 's3://models/a'}\npodTemplate: {spec: {containers: [{name: engine, env: "
            "[{name: AWS_SECRET_ACCESS_KEY, valueFrom: {secretKeyRef: {name: s3, key: secret}}}]}]}}"
        ),
        "belong in the Secret of spec.model.secretRef",
    ),
    "mount below the fetched models": (
        manifest(
            f"""
model: {{{HUB}}}
podTemplate: {{spec: {{containers: [{{name: engine, volumeMounts: [{{name: a, mountPath: /models/a}}]}}]}}}}
"""
        ),
        "/models is where fetched models are mounted; mount the volume elsewhere",
    ),
    **{
        f"Secret with keys of Argosy, {where}": (
            manifest(text.replace("SECRET", name)),
            "are those of Secrets with keys of Argosy, which no service may name",
        )
        for name, where, text in (
            (
                "other-engine-key",
                "as a volume",
                f"{TINY}\npodTemplate: {{spec: {{volumes: [{{name: a, secret: {{secretName: SECRET}}}}]}}}}",
            ),
            (
                "argosy-fleet-key",
                "projected",
                f"{TINY}\npodTemplate: {{spec: {{volumes: [{{name: a, projected: {{sources: "
                "[{secret: {name: SECRET}}]}}]}}",
            ),
            (
                "argosy-router-keys",
                "as a variable",
                f"{TINY}\npodTemplate: {{spec: {{containers: [{{name: engine, env: [{{name: A, valueFrom: "
                "{secretKeyRef: {name: SECRET, key: api-keys}}}]}]}}",
            ),
            ("argosy-router-given-keys", "as credentials", f"model: {{{HUB}, secretRef: {{name: SECRET}}}}"),
            (
                "tiny-engine-key",
                "for images",
                f"{TINY}\npodTemplate: {{spec: {{imagePullSecrets: [{{name: SECRET}}]}}}}",
            ),
        )
    },
    "mount of a volume of the operator": (
        manifest(
            f"{TINY}\npodTemplate: {{spec: {{containers: [{{name: engine, volumeMounts: "
            "[{name: argosy-models, mountPath: /cache}]}]}}"
        ),
        "names that begin with 'argosy-' are the operator's own",
    ),
    "requests of an engine that has its model": (
        manifest(f"{TINY}\nengine: {{env: [{{name: ARGOSY_OFFLINE, value: '0'}}]}}"),
        "is set by the operator",
    ),
    "path that climbs": (
        manifest("model: {source: 'pvc://models/../other'}"),
        "must not contain '..' as a path segment",
    ),
    "unknown field": (manifest(f"{TINY}\nreplica: 2"), 'unknown field "spec.replica"'),
    "unknown nested field": (
        manifest(f"{TINY}\nengine: {{devise: cpu}}"),
        'unknown field "spec.engine.devise"',
    ),
    "unknown device": (
        manifest(f"{TINY}\nengine: {{device: tpu}}"),
        'spec.engine.device: Unsupported value: "tpu"',
    ),
    "replicas of the wrong type": (
        manifest(f"{TINY}\nreplicas: two"),
        'spec.replicas in body must be of type integer: "string"',
    ),
    "negative replicas": (
        manifest(f"{TINY}\nreplicas: -1"),
        "spec.replicas in body should be greater than or equal to 0",
    ),
    "too many replicas": (
        manifest(f"{TINY}\nreplicas: 1001"),
        "spec.replicas in body should be less than or equal to 1000",
    ),
    "cuda without gpu": (
        manifest(f"{TINY}\nengine: {{device: cuda}}"),
        "device cuda needs spec.resources.gpu",
    ),
    "cpu with gpu": (
        manifest(f"{TINY}\nengine: {{device: cpu}}\nresources: {{gpu: {{count: 1}}}}"),
        "device cpu would leave the GPUs of spec.resources.gpu idle",
    ),
    "no gpus": (
        manifest(f"{TINY}\nresources: {{gpu: {{count: 0}}}}"),
        "spec.resources.gpu.count in body should be greater than or equal to 1",
    ),
    "more gpus than a replica can use": (
        manifest(f"{TINY}\nresources: {{gpu: {{count: 8}}}}"),
        "must be 1, the number of devices in spec.parallelism (tensor * pipeline * data), not 8; leave it out",
    ),
    "fewer gpus than its devices": (
        manifest(f"{TINY}\nparallelism: {{tensor: 4}}\nresources: {{gpu: {{count: 2}}}}"),
        "must be 4, the number of devices in spec.parallelism (tensor * pipeline * data), not 2; leave it out",
    ),
    "more devices than a node has": (
        manifest(f"{TINY}\nparallelism: {{tensor: 17}}"),
        "spec.parallelism.tensor in body should be less than or equal to 16",
    ),
    "more devices than a node has together": (
        manifest(f"{TINY}\nparallelism: {{tensor: 4, pipeline: 2, data: 4}}"),
        "is the number of devices of one replica, at most 16",
    ),
    "experts on one device": (
        manifest(f"{TINY}\nparallelism: {{expert: true}}"),
        "expert divides the experts among the devices of tensor and data; set one of them to 2 or more",
    ),
    "experts divided among stages": (
        manifest(f"{TINY}\nparallelism: {{tensor: 1, pipeline: 2, data: 1, expert: true}}"),
        "expert divides the experts among the devices of tensor and data; set one of them to 2 or more",
    ),
    "unknown engine": (
        manifest(f"{TINY}\nengine: {{type: llamacpp}}"),
        'spec.engine.type: Unsupported value: "llamacpp"',
    ),
    "our model on another engine": (
        manifest(f"{TINY}\nengine: {{type: vllm}}"),
        "the model that ships with Argosy needs engine.type argosy",
    ),
    "shared cache of another engine": (
        manifest(f"model: {{{HUB}, cache: {{type: node}}}}\nengine: {{type: sglang}}"),
        "only engines of type argosy hold a model of a shared cache while they use it",
    ),
    "threads of another engine": (
        manifest(f"model: {{{HUB}}}\nengine: {{type: vllm, threads: 2}}"),
        "attentionBackend and threads are for type argosy",
    ),
    "attention of another engine": (
        manifest(f"model: {{{HUB}}}\nengine: {{type: sglang, attentionBackend: triton}}"),
        "attentionBackend and threads are for type argosy",
    ),
    "vllm told to compute on a cpu": (
        manifest(f"model: {{{HUB}}}\nengine: {{type: vllm, device: cpu}}"),
        "vLLM computes on the device that its image is built for",
    ),
    "cache size of sglang": (
        manifest(f"model: {{{HUB}}}\nengine: {{type: sglang, kvCacheMemory: 1Gi}}"),
        "SGLang has no such setting; use gpuMemoryUtilization",
    ),
    "experts of sglang": (
        manifest(f"model: {{{HUB}}}\nengine: {{type: sglang}}\nparallelism: {{tensor: 2, expert: true}}"),
        "SGLang's experts are divided by --ep-size in engine.args",
    ),
    "key of vllm": (
        manifest(f"model: {{{HUB}}}\nengine: {{type: vllm, args: [--api-key=none]}}"),
        "--api-key of vllm and short forms cannot be set here: an engine has the key of its service's Secret",
    ),
    "field of sglang as an argument": (
        manifest(f"model: {{{HUB}}}\nengine: {{type: sglang, args: [--context-length=4096]}}"),
        '["--context-length=4096"] cannot be set here: use spec.engine.maxModelLen',
    ),
    "short form of a field's flag of vllm": (
        manifest(f"model: {{{HUB}}}\nengine: {{type: vllm, args: [--tensor-parallel=2, --enable-lora]}}"),
        '["--tensor-parallel=2"] cannot be set here: use spec.parallelism.tensor',
    ),
    "port of sglang": (
        manifest(f"model: {{{HUB}}}\nengine: {{type: sglang, args: [--port=1, --host=a]}}"),
        '["--port=1", "--host=a"] cannot be set here: engines listen where routers and probes call them',
    ),
    "short flag of vllm": (
        manifest(f"model: {{{HUB}}}\nengine: {{type: vllm, args: [-O3]}}"),
        "must be one flag with two dashes",
    ),
    "limit of the CPU below its request": (
        manifest(f"{TINY}\nresources: {{cpu: 2, cpuLimit: 1500m}}"),
        "must be at least as much as cpu, which is reserved; raise it, or leave it out for no limit",
    ),
    "limit of the CPU below its request, by a suffix": (
        manifest(f"{TINY}\nresources: {{cpu: '0.5', cpuLimit: 499m}}"),
        "must be at least as much as cpu",
    ),
    "class of the cluster's own components": (
        manifest(f"{TINY}\nplacement: {{priorityClassName: system-node-critical}}"),
        "must not be a class of the cluster's own components (system-...)",
    ),
    "argument without a dash": (
        manifest(f"{TINY}\nengine: {{args: [max-logprobs=5]}}"),
        'spec.engine.args[0]: Invalid value: "max-logprobs=5": must be one flag with two dashes',
    ),
    "short flag": (manifest(f"{TINY}\nengine: {{args: [-tp=2]}}"), "must be one flag with two dashes"),
    "flag and value in one argument": (
        manifest(f"{TINY}\nengine: {{args: ['--max-logprobs 5']}}"),
        "must be one flag with two dashes, and its value behind '='",
    ),
    "flag and value in two arguments": (
        manifest(f"{TINY}\nengine: {{args: [--max-logprobs, '5']}}"),
        "must be one flag with two dashes",
    ),
    "argument of two lines": (
        manifest(f'{TINY}\nengine: {{args: ["--chat-template=a\\nb"]}}'),
        "must be one flag with two dashes",
    ),
    "unknown flag": (
        manifest(f"{TINY}\nengine: {{args: [--enforce-eager, --max-logprob=5]}}"),
        'spec.engine.args: Invalid value: the engine does not have the flag ["--max-logprob=5"]; `argosy serve',
    ),
    "flag of a feature that there is not": (
        manifest(f"{TINY}\nengine: {{args: [--enable-lora]}}"),
        'the engine does not support ["--enable-lora"]; docs/reference/engine-flags.md says why',
    ),
    "flag with a field of its own": (
        manifest(f"{TINY}\nengine: {{args: [--max-model-len=4096]}}"),
        "spec.engine.args: Invalid value: --max-model-len is set by spec.engine.maxModelLen",
    ),
    "switch with a field of its own": (
        manifest(f"{TINY}\nengine: {{args: [--no-enable-prefix-caching]}}"),
        "--enable-prefix-caching is set by spec.engine.enablePrefixCaching",
    ),
    "address of the engine": (
        manifest(f"{TINY}\nengine: {{args: [--port=9000]}}"),
        "--enable-ssl-refresh cannot be set here: engines listen where routers and probes call them",
    ),
    "key of the engine": (
        manifest(f"{TINY}\nengine: {{args: [--api-key=none]}}"),
        "--api-key, --api-keys-file, --admin-api-key cannot be set here: an engine has the key",
    ),
    "switch with a value": (
        manifest(f"{TINY}\nengine: {{args: [--enforce-eager=true]}}"),
        'a switch takes no value, as in ["--enforce-eager=true"]; write --flag or --no-flag',
    ),
    "flag without a value": (
        manifest(f"{TINY}\nengine: {{args: [--max-logprobs]}}"),
        '["--max-logprobs"] must have a whole number behind',
    ),
    "number of another type": (
        manifest(f"{TINY}\nengine: {{args: [--max-logprobs=many]}}"),
        '["--max-logprobs=many"] must have a whole number behind',
    ),
    "unknown choice": (
        manifest(f"{TINY}\nengine: {{args: [--kv-cache-dtype=int4]}}"),
        "--kv-cache-dtype must be one of auto, fp8",
    ),
    "shorter sequences than the engine takes": (
        manifest(f"{TINY}\nengine: {{maxModelLen: 8}}"),
        "spec.engine.maxModelLen in body should be greater than or equal to 16",
    ),
    "more sequences than the engine takes": (
        manifest(f"{TINY}\nengine: {{maxNumSeqs: 65536}}"),
        "spec.engine.maxNumSeqs in body should be less than or equal to 4096",
    ),
    "larger blocks than the engine takes": (
        manifest(f"{TINY}\nengine: {{blockSize: 1024}}"),
        "spec.engine.blockSize in body should be less than or equal to 256",
    ),
    "fewer tokens in a step than the engine takes": (
        manifest(f"{TINY}\nengine: {{maxNumBatchedTokens: 8}}"),
        "spec.engine.maxNumBatchedTokens in body should be greater than or equal to 16",
    ),
    "smaller cache than the engine takes": (
        manifest(f"{TINY}\nengine: {{kvCacheMemory: 1k}}"),
        "must be a number of bytes between 1M and 63Ti: a whole number, perhaps with k, Ki, M, Mi, G, Gi, T or Ti, "
        "such as 2Gi",
    ),
    "gpu without a domain": (
        manifest(f"{TINY}\nresources: {{gpu: {{resourceName: gpu}}}}"),
        "must be an extended resource with its domain, such as nvidia.com/gpu",
    ),
    "memory given twice": (
        manifest(f"{TINY}\nengine: {{kvCacheMemory: 1Gi, gpuMemoryUtilization: 0.5}}"),
        "set kvCacheMemory (bytes) or gpuMemoryUtilization (a share), not both",
    ),
    "gpu share on a cpu": (
        manifest(f"{TINY}\nengine: {{device: cpu, gpuMemoryUtilization: 0.5}}"),
        "gpuMemoryUtilization has no meaning with device cpu",
    ),
    "memory in words": (
        manifest(f"{TINY}\nresources: {{memory: 16 gigabytes}}"),
        "must be a quantity: a number, perhaps followed by m, k, Ki, M, Mi, G, Gi, T or Ti, such as 500m or 16Gi",
    ),
    "negative quantity": (
        manifest(f"{TINY}\nresources: {{cpu: -1}}"),
        "spec.resources.cpu in body should be greater than or equal to 0",
    ),
    "negative quantity as a string": (
        manifest(f"{TINY}\nresources: {{cpu: '-1'}}"),
        'spec.resources.cpu: Invalid value: "-1": must be a quantity',
    ),
    "quantity beyond all machines": (
        manifest(f"{TINY}\nresources: {{memory: 1000000000000000001}}"),
        "spec.resources.memory in body should be less than or equal to 1000000000000000000",
    ),
    "quantity of too many digits": (
        manifest(f"{TINY}\nresources: {{memory: '{'1' * 33}'}}"),
        "spec.resources.memory: Too long: may not be more than 32 bytes",
    ),
    "fraction of a cpu without quotes": (
        manifest(f"{TINY}\nresources: {{cpu: 0.5}}"),
        'spec.resources.cpu in body must be of type integer,string: "number"',
    ),
    "quantity that is a boolean": (
        manifest(f"{TINY}\nresources: {{cpu: true}}"),
        'spec.resources.cpu in body must be of type integer,string: "boolean"',
    ),
    "empty quantity": (
        manifest(f"{TINY}\nresources: {{memory: ''}}"),
        'spec.resources.memory: Invalid value: "": must be a quantity',
    ),
    "smaller cache in digits than the engine takes": (
        manifest(f"{TINY}\nengine: {{kvCacheMemory: 999999}}"),
        "spec.engine.kvCacheMemory in body should be greater than or equal to 1000000",
    ),
    "larger cache in digits than the engine takes": (
        manifest(f"{TINY}\nengine: {{kvCacheMemory: 69269232549889}}"),
        "spec.engine.kvCacheMemory in body should be less than or equal to 69269232549888",
    ),
    "size limit of a volume in words": (
        manifest(f"{TINY}\npodTemplate: {{spec: {{volumes: [{{name: a, emptyDir: {{sizeLimit: 2GB}}}}]}}}}"),
        "spec.podTemplate.spec.volumes[0].emptyDir.sizeLimit in body should match '^[0-9]+",
    ),
    "cache in a unit that there is not": (
        manifest(f"{TINY}\nengine: {{kvCacheMemory: 2GB}}"),
        "must be a number of bytes between 1M and 63Ti",
    ),
    "fraction of bytes": (
        manifest(f"{TINY}\nengine: {{kvCacheMemory: 1.5Gi}}"),
        "must be a number of bytes between 1M and 63Ti: a whole number, perhaps with k, Ki, M, Mi, G, Gi, T or Ti, "
        "such as 2Gi",
    ),
    "more than all memory": (
        manifest(f"{TINY}\nengine: {{gpuMemoryUtilization: 1.5}}"),
        "spec.engine.gpuMemoryUtilization in body should be less than or equal to 1",
    ),
    "node label among no values": (
        manifest(
            f"{TINY}\nplacement: {{affinity: {{nodeAffinity: {{requiredDuringSchedulingIgnoredDuringExecution: "
            "{nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: In}]}]}}}}"
        ),
        "In and NotIn need values, Gt and Lt exactly one, Exists and DoesNotExist none",
    ),
    "node label above two values": (
        manifest(
            f"{TINY}\nplacement: {{affinity: {{nodeAffinity: {{preferredDuringSchedulingIgnoredDuringExecution: "
            "[{weight: 1, preference: {matchExpressions: [{key: cores, operator: Gt, values: ['1', '2']}]}}]}}}"
        ),
        "In and NotIn need values, Gt and Lt exactly one, Exists and DoesNotExist none",
    ),
    "existing label of a value": (
        manifest(
            f"{TINY}\nplacement: {{affinity: {{podAffinity: {{requiredDuringSchedulingIgnoredDuringExecution: "
            "[{topologyKey: zone, labelSelector: {matchExpressions: [{key: a, operator: Exists, values: [b]}]}}]}}}"
        ),
        "In and NotIn need values, Exists and DoesNotExist none",
    ),
    "preference beyond all weights": (
        manifest(
            f"{TINY}\nplacement: {{affinity: {{podAntiAffinity: {{preferredDuringSchedulingIgnoredDuringExecution: "
            "[{weight: 101, podAffinityTerm: {topologyKey: zone}}]}}}"
        ),
        "weight in body should be less than or equal to 100",
    ),
    "domains twice": (
        manifest(
            f"{TINY}\nplacement: {{topologySpreadConstraints: [{{topologyKey: zone}}, {{topologyKey: zone}}]}}"
        ),
        "spec.placement.topologySpreadConstraints[1]: Duplicate value",
    ),
    "least domains of a preference": (
        manifest(
            f"{TINY}\nplacement: {{topologySpreadConstraints: [{{topologyKey: zone, minDomains: 2, "
            "whenUnsatisfiable: ScheduleAnyway}]}"
        ),
        "minDomains needs whenUnsatisfiable DoNotSchedule",
    ),
    "token of no account": (
        manifest(f"{TINY}\nplacement: {{automountServiceAccountToken: true}}"),
        "a token is mounted for a named account only; set serviceAccountName",
    ),
    "claim of nothing": (
        manifest(f"{TINY}\nresources: {{claims: [{{name: gpu}}]}}"),
        "name exactly one of resourceClaimName",
    ),
    "claim twice": (
        manifest(
            f"{TINY}\nresources: {{claims: [{{name: a, resourceClaimName: x}}, {{name: a, resourceClaimName: y}}]}}"
        ),
        "spec.resources.claims[1]: Duplicate value",
    ),
    "shared memory in words": (
        manifest(f"{TINY}\nresources: {{sharedMemory: half}}"),
        "spec.resources.sharedMemory: Invalid value",
    ),
    "scaling by nothing": (
        manifest(f"{TINY}\nscaling: {{maxReplicas: 8}}"),
        "without metrics or schedules",
    ),
    "scaling without a target": (
        manifest(f"{TINY}\nscaling: {{maxReplicas: 8, metrics: {{}}}}"),
        "set a target for at least one metric",
    ),
    "scaling bounds": (
        manifest(f"{TINY}\nscaling: {{minReplicas: 3, maxReplicas: 2, metrics: {{concurrency: 1}}}}"),
        "minReplicas must not exceed maxReplicas",
    ),
    "schedule beyond the bounds": (
        manifest(
            f"{TINY}\nscaling: {{maxReplicas: 2, schedules: "
            "[{name: a, start: 0 8 * * *, end: 0 9 * * *, minReplicas: 3}]}"
        ),
        "the minReplicas of a schedule must not exceed maxReplicas",
    ),
    "schedule that never is": (
        manifest(
            f"{TINY}\nscaling: {{maxReplicas: 2, schedules: "
            "[{name: a, start: 0 24 * * *, end: 0 9 * * *, minReplicas: 2}]}"
        ),
        "must be a cron schedule",
    ),
    "idle without zero": (
        manifest(f"{TINY}\nscaling: {{maxReplicas: 2, idleSeconds: 60, metrics: {{concurrency: 1}}}}"),
        "idleSeconds is for services that scale to zero",
    ),
    "disruption budget of more than all": (
        manifest(f"{TINY}\npodDisruptionBudget: {{maxUnavailable: 101%}}"),
        "must be a number, 0 to 1000, or a percentage between 0% and 100%, such as 10%",
    ),
    "disruption budget of a number as text": (
        manifest(f"{TINY}\npodDisruptionBudget: {{maxUnavailable: '3'}}"),
        "must be a number, 0 to 1000, or a percentage between 0% and 100%, such as 10%",
    ),
    "disruption budget of more replicas than a service has": (
        manifest(f"{TINY}\npodDisruptionBudget: {{maxUnavailable: 1001}}"),
        "spec.podDisruptionBudget.maxUnavailable in body should be less than or equal to 1000",
    ),
    "rollout that cannot move": (
        manifest(f"{TINY}\nrollout: {{maxSurge: 0, maxUnavailable: 0}}"),
        "maxSurge and maxUnavailable must not both be 0",
    ),
    "hedging before the expected time": (
        manifest(f"{TINY}\nrouter: {{hedgeAfter: 0.5}}"),
        "must be 0 (never) or between 1 and 100",
    ),
    "unknown policy": (
        manifest(f"{TINY}\nrouter: {{policy: fastest}}"),
        'spec.router.policy: Unsupported value: "fastest"',
    ),
    "canary rollout without a step": (
        manifest(f"{TINY}\nrollout: {{canary: {{steps: []}}}}"),
        "spec.rollout.canary.steps",
    ),
    "canary rollout that nothing stops": (
        manifest(f"{TINY}\nrollout: {{canary: {{steps: [{{weight: 10}}]}}}}"),
        "nothing would stop a bad canary",
    ),
    "canary rollout without requests": (
        manifest(
            f"{TINY}\nrollout: {{canary: {{steps: [{{weight: 0}}], analysis: {{maxErrorRate: 0.01}}}}}}"
        ),
        "the canary gets no requests to analyse",
    ),
    "canary analysis without a bound": (
        manifest(f"{TINY}\nrollout: {{canary: {{steps: [{{weight: 1}}], analysis: {{minRequests: 5}}}}}}"),
        "set at least one bound",
    ),
    "canary action without its step": (
        manifest(
            f"{TINY}\nrollout: {{canary: {{steps: [{{weight: 1, hold: true}}], "
            "action: {type: Continue, revision: abc}}}"
        ),
        "step belongs to type Continue",
    ),
    "canary action with a step too many": (
        manifest(
            f"{TINY}\nrollout: {{canary: {{steps: [{{weight: 1, hold: true}}], "
            "action: {type: Promote, revision: abc, step: 1}}}"
        ),
        "step belongs to type Continue",
    ),
    "canary without a weight": (
        manifest(f"{TINY}\nrouter: {{canary: {{service: next}}}}"),
        "spec.router.canary.weight: Required value",
    ),
    "canary of more than everything": (
        manifest(f"{TINY}\nrouter: {{canary: {{service: next, weight: 101}}}}"),
        "spec.router.canary.weight: Invalid value: 101",
    ),
    "canary of another namespace": (
        manifest(f"{TINY}\nrouter: {{canary: {{service: team/next, weight: 1}}}}"),
        'spec.router.canary.service: Invalid value: "team/next"',
    ),
    "its own canary": (
        manifest(f"{TINY}\nrouter: {{canary: {{service: tiny, weight: 1}}}}"),
        "the canary must be another InferenceService",
    ),
    "canary by a wrong name": (
        manifest(f"{TINY}\nrouter: {{canary: {{service: next, weigth: 1}}}}"),
        'unknown field "spec.router.canary.weigth"',
    ),
    "alias twice": (
        manifest("model: {source: 'builtin://tiny', aliases: [a, a]}"),
        'spec.model.aliases[1]: Duplicate value: "a"',
    ),
    "alias is the served name": (
        manifest("model: {source: 'builtin://tiny', servedName: a, aliases: [a]}"),
        "aliases must not repeat servedName",
    ),
    "GGUF file without room to widen it": (
        manifest("model: {source: 'hf://org/name:Q4_K_M@main'}"),
        "a GGUF file is widened on the node's disk before it is loaded: set widenedSize",
    ),
    "room to widen what is no GGUF file": (
        manifest("model: {source: 'hf://org/name@main', widenedSize: 16Gi}"),
        "widenedSize is for GGUF files (hf://ORG/NAME:QUANT, s3://BUCKET/FILE.gguf) only; leave it out",
    ),
    "GGUF file of a bucket without room to widen it": (
        manifest("model: {source: 's3://models/a/b-Q4_K_M.gguf'}"),
        "a GGUF file is widened on the node's disk before it is loaded: set widenedSize",
    ),
    "GGUF file for another engine": (
        manifest("model: {source: 'hf://org/name:Q4_K_M', widenedSize: 16Gi}\nengine: {type: vllm}"),
        "GGUF files need engine.type argosy; name the repository that the file was made from",
    ),
    "quantisation of a GGUF file with a space": (
        manifest("model: {source: 'hf://org/name:Q4 K', widenedSize: 16Gi}"),
        "must be hf://ORG/NAME",
    ),
    "alias is the resource's name": (
        manifest("model: {source: 'builtin://tiny', aliases: [tiny]}"),
        "aliases must not repeat the resource's name",
    ),
    "adapters": (
        manifest("model: {source: 'builtin://tiny', adapters: [{name: a, source: 'hf://org/adapter'}]}"),
        "adapters are not served yet; merge the adapter into the model, and serve it as a service of its own",
    ),
    "alias with a space": (
        manifest("model: {source: 'builtin://tiny', aliases: ['a b']}"),
        "must be a model name: a letter or digit, then letters, digits and . _ : / -, such as org/model-8b",
    ),
    "name that begins with a digit": (
        manifest(TINY, name="7b"),
        "the resource's name must be a DNS label",
    ),
    "name with a dot": (manifest(TINY, name="qwen3.8b"), "the resource's name must be a DNS label"),
    "name too long for a label": (manifest(TINY, name="a" * 64), "the resource's name must be a DNS label"),
    "variable of the operator": (
        manifest(f"{TINY}\nengine: {{env: [{{name: ARGOSY_API_KEY, value: x}}]}}"),
        "is set by the operator",
    ),
    "variable twice": (
        manifest(f"{TINY}\nengine: {{env: [{{name: A, value: x}}, {{name: A, value: y}}]}}"),
        "spec.engine.env[1]: Duplicate value",
    ),
    "host path": (
        manifest(f"{TINY}\npodTemplate: {{spec: {{volumes: [{{name: host, hostPath: {{path: /}}}}]}}}}"),
        'unknown field "spec.podTemplate.spec.volumes[0].hostPath"',
    ),
    "volume of no kind": (
        manifest(f"{TINY}\npodTemplate: {{spec: {{volumes: [{{name: nothing}}]}}}}"),
        "name exactly one of configMap, secret, emptyDir, persistentVolumeClaim and projected",
    ),
    "volume of two kinds": (
        manifest(
            f"{TINY}\npodTemplate: {{spec: {{volumes: [{{name: two, emptyDir: {{}}, configMap: {{name: a}}}}]}}}}"
        ),
        "name exactly one of configMap, secret, emptyDir, persistentVolumeClaim and projected",
    ),
    "volume of the operator": (
        manifest(f"{TINY}\npodTemplate: {{spec: {{volumes: [{{name: argosy-tmp, emptyDir: {{}}}}]}}}}"),
        "names that begin with 'argosy-' are the operator's own",
    ),
    "service account token": (
        manifest(
            f"{TINY}\npodTemplate: {{spec: {{volumes: [{{name: t, projected: {{sources: "
            "[{serviceAccountToken: {path: t}}]}}]}}"
        ),
        'unknown field "spec.podTemplate.spec.volumes[0].projected.sources[0].serviceAccountToken"',
    ),
    "service account": (
        manifest(f"{TINY}\npodTemplate: {{spec: {{serviceAccountName: admin}}}}"),
        'unknown field "spec.podTemplate.spec.serviceAccountName"',
    ),
    "host network": (
        manifest(f"{TINY}\npodTemplate: {{spec: {{hostNetwork: true}}}}"),
        'unknown field "spec.podTemplate.spec.hostNetwork"',
    ),
    "privileged": (
        manifest(
            f"{TINY}\npodTemplate: {{spec: {{containers: [{{name: engine, securityContext: "
            "{privileged: true}}]}}"
        ),
        'unknown field "spec.podTemplate.spec.containers[0].securityContext"',
    ),
    "sidecar": (
        manifest(f"{TINY}\npodTemplate: {{spec: {{containers: [{{name: sidecar}}]}}}}"),
        'spec.podTemplate.spec.containers[0].name: Unsupported value: "sidecar"',
    ),
    "init container": (
        manifest(f"{TINY}\npodTemplate: {{spec: {{initContainers: []}}}}"),
        'unknown field "spec.podTemplate.spec.initContainers"',
    ),
    "mount over the operator's": (
        manifest(
            f"{TINY}\npodTemplate: {{spec: {{containers: [{{name: engine, volumeMounts: "
            "[{name: a, mountPath: /tmp}]}]}}"
        ),
        "is used by the operator",
    ),
    "label of the operator": (
        manifest(f"{TINY}\npodTemplate: {{metadata: {{labels: {{inference.argosy.dev/service: other}}}}}}"),
        "keys below inference.argosy.dev/ and app.kubernetes.io/ are the operator's own",
    ),
    "annotation that is a security setting": (
        manifest(
            f"{TINY}\npodTemplate: {{metadata: {{annotations: "
            "{container.apparmor.security.beta.kubernetes.io/engine: unconfined}}}"
        ),
        "profiles of AppArmor and seccomp are the runtime's defaults",
    ),
    "variable from two sources": (
        manifest(
            f"{TINY}\npodTemplate: {{spec: {{containers: [{{name: engine, env: [{{name: A, value: b, valueFrom: "
            "{secretKeyRef: {name: a, key: b}}}]}]}}"
        ),
        "set value or valueFrom, not both",
    ),
}


def _from_source(source: str) -> str:
    return manifest(f"model: {{source: {json.dumps(source)}}}")


TABLE: dict[str, tuple[Case, ...]] = {
    "sources": tuple(Case(f"source {source}", _from_source(source), None) for source in REMOTE_SOURCES),
    "refused sources": tuple(
        Case(f"source {source!r}", _from_source(source), error) for source, error in REFUSED_SOURCES.items()
    ),
    "good": tuple(Case(name, text, None) for name, text in GOOD.items()),
    "bad": tuple(Case(name, text, error) for name, (text, error) in BAD.items()),
}


def wrongly_answered(cases: Iterable[Case], messages: Mapping[str, str | None]) -> dict[str, tuple[str, str]]:
    """Compare the message that each manifest got, None where it was accepted, with the expected one.

    Returns:
        Name of each case that was answered otherwise -> the expected and the given message, empty if accepted.
    """
    return {
        case.name: (case.error or "", messages[case.name] or "")
        for case in cases
        if (case.error is None) != (messages[case.name] is None)
        or (case.error or "") not in (messages[case.name] or "")
    }
