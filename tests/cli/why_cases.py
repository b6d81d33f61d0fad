"""Services of a cluster whose chain stops at one link each: the objects, and what `argosy why` says of them."""

from __future__ import annotations

from why_objects import (
    CREATING,
    EXITED,
    NO_NAME_SERVER,
    NOT_LOADED,
    NOT_READY,
    Object,
    condition,
    failed_fetch,
    fetching,
    pod,
    scaled,
    service,
    unscheduled,
)

CASES: dict[str, tuple[Object, list[Object], str, str, list[str]]] = {
    "no operator": (service(seen=-1), [], "operator", "failed", ["never seen", "watchNamespaces"]),
    "an operator that stands still": (service(seen=2), [], "operator", "failed", ["generation 2, not 3"]),
    "a field that is wrong": (
        service(condition("Stalled", "True", "InvalidSpec", "spec.replicas: too many")),
        [],
        "accepted",
        "failed",
        ["spec.replicas: too many", "correct the field"],
    ),
    "a value that the API server refuses": (
        service(
            condition(
                "Degraded", "True", "ApiError", "PATCH deployments/qwen-engine: 422: less than cpu limit"
            ),
            condition("WorkloadReady", "False", "Starting", "0/2 updated replicas ready"),
        ),
        [],
        "accepted",
        "failed",
        ["ApiError: PATCH", "less than cpu limit", "correct the field of spec"],
    ),
    "a name that is taken": (
        service(condition("Degraded", "True", "NameConflict", "'qwen' belongs to the older other/qwen")),
        [pod()],
        "accepted",
        "failed",
        ["other/qwen", "spec.model.servedName or spec.model.aliases"],
    ),
    "paused": (
        service(condition("Ready", "False", "Paused", "the spec was changed"), paused=True),
        [],
        "accepted",
        "failed",
        ["spec.paused to false"],
    ),
    "stopped": (
        service(condition("Ready", "True", "Stopped"), replicas=0),
        [],
        "pods",
        "stopped",
        ["stopped pods", "spec.replicas is 0: requests get 503", "kubectl scale isvc qwen --replicas=1"],
    ),
    "stopped, its last replica still ends": (
        service(condition("Ready", "False", "RollingOut"), replicas=0),
        [],
        "pods",
        "stopped",
        ["spec.replicas is 0"],
    ),
    "scaled to zero": (
        service(condition("Ready", "True", "ScaledToZero"), replicas=0),
        [],
        "ready",
        "failed",
        [],
    ),
    "scaled to zero, with an edit that no replica has tried": (
        scaled(0, condition("Ready", "Unknown", "Untried", "no replica has served with the last change")),
        [],
        "ready",
        "waiting",
        ["no replica has served with the last change", "send a request"],
    ),
    "a quota": (
        service(condition("WorkloadReady", "False", "FailedCreate", "exceeded quota")),
        [],
        "pods",
        "failed",
        ["exceeded quota", "quota or Pod Security"],
    ),
    "no node": (
        service(NOT_READY),
        [unscheduled("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")],
        "node",
        "failed",
        ["pod qwen-0", "Insufficient nvidia.com/gpu", "add a node that fits"],
    ),
    "a cordoned node": (
        service(NOT_READY),
        [unscheduled("0/1 nodes are available: 1 node(s) were unschedulable.")],
        "node",
        "failed",
        ["kubectl uncordon a node that fits, add one"],
    ),
    "no claim": (
        service(NOT_READY),
        [unscheduled('persistentvolumeclaim "models" not found')],
        "node",
        "failed",
        ['"models" not found', "claimName"],
    ),
    "no volume yet": (
        service(NOT_READY),
        [pod(conditions={**NOT_LOADED, "PodReadyToStartContainers": "False"}, engine=CREATING)],
        "volumes",
        "waiting",
        ["not mounted yet"],
    ),
    "a fetch that goes on": (
        service(NOT_READY),
        [fetching("43 % 12.1/28.0 GiB, eta 70 s")],
        "model",
        "waiting",
        ["43 % 12.1/28.0 GiB, eta 70 s", "what to do: wait while it goes on", "qwen-0 -c fetch-model`"],
    ),
    "a fetch whose source gives no answer": (
        service(NOT_READY),
        [
            fetching(
                f"resolving the revision: waiting for hf://org/model (attempt 5 in 8.0 s): {NO_NAME_SERVER}"
            )
        ],
        "model",
        "waiting",
        ["cluster's DNS", "NetworkPolicies", "HF_ENDPOINT", "modelFetch.env", "a pvc:// source", "by itself"],
    ),
    "a fetch that gave up on its source": (
        service(NOT_READY),
        [failed_fetch(f"hf://org/model: gave up after 9 failures in a row: {NO_NAME_SERVER}")],
        "model",
        "failed",
        ["cluster's DNS", "NetworkPolicies", "HF_ENDPOINT", "modelFetch.env", "a pvc:// source", "by itself"],
    ),
    "a store that is locked": (
        service(NOT_READY),
        [fetching("waits for pod other", "StoreLocked")],
        "model",
        "failed",
        ["waits for pod other", "delete the one that stands still"],
    ),
    "a fetch that failed": (
        service(NOT_READY),
        [failed_fetch("401: no token")],
        "model",
        "failed",
        ["container fetch-model", "exit code 1", "401: no token", "tried again by itself"],
    ),
    "no image": (
        service(NOT_READY),
        [
            pod(
                conditions=NOT_LOADED,
                engine={
                    "ready": False,
                    "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
                },
            )
        ],
        "engine",
        "failed",
        ["container engine", "ImagePullBackOff: not found", "correct engine.image of the Helm chart"],
    ),
    "an engine that exits": (
        service(NOT_READY),
        [
            pod(
                conditions=NOT_LOADED,
                engine={
                    "ready": False,
                    "restartCount": 4,
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
                    "lastState": {"terminated": EXITED},
                },
            )
        ],
        "engine",
        "failed",
        ["exit code 2", "--max-model-len is too large", "4 restarts", "the last line of the log"],
    ),
    "too little memory": (
        service(NOT_READY),
        [
            pod(
                conditions=NOT_LOADED,
                engine={
                    "ready": False,
                    "state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
                },
            )
        ],
        "engine",
        "failed",
        ["OOMKilled, exit code 137", "spec.resources.memory"],
    ),
    "evicted": (
        service(NOT_READY),
        [pod(conditions=NOT_LOADED, phase="Failed", reason="Evicted", message="The node was low on disk")],
        "engine",
        "failed",
        ["low on disk", "sizeLimit"],
    ),
    "a load": (
        service(NOT_READY),
        [pod(conditions=NOT_LOADED, engine={"ready": False, "state": {"running": {"startedAt": "T1"}}})],
        "loaded",
        "waiting",
        ["loads the model since T1", "the last line of the log"],
    ),
    "no router": (
        service(NOT_READY, condition("Routable", "Unknown", "NoRouter", "no router answers")),
        [pod(conditions={"inference.argosy.dev/routable": "False"})],
        "routable",
        "failed",
        ["no router answers", "router.replicas"],
    ),
    "a rollout": (
        service(condition("Ready", "False", "RollingOut", "1 old replicas still serve")),
        [pod()],
        "ready",
        "waiting",
        ["1 old replicas still serve"],
    ),
    "all is well": (
        service(condition("Ready", "True", "ReplicasRoutable")),
        [pod()],
        "ready",
        "done",
        ["2/2 replicas routable", "http://router/v1", "'qwen'"],
    ),
    "served, and degraded": (
        service(
            condition("Ready", "True", "ReplicasRoutable"),
            condition("Degraded", "True", "CanaryNotFound", "there is no InferenceService 'next'"),
        ),
        [pod()],
        "ready",
        "done",
        ["note: CanaryNotFound", "'next'"],
    ),
    "arguments that the engine refuses": (
        service(condition("Stalled", "True", "InvalidEngineArgs", "--max-logprobs must be at least -1")),
        [],
        "accepted",
        "failed",
        ["--max-logprobs must be", "correct the flag"],
    ),
    "an account that is not listed": (
        service(condition("Stalled", "True", "ServiceAccountNotAllowed", "serviceAccountName is 'x'")),
        [],
        "accepted",
        "failed",
        ["serviceAccountName is 'x'", "engine.serviceAccounts"],
    ),
    "a Secret with keys of Argosy": (
        service(
            condition(
                "Stalled", "True", "ObjectReserved", "the Secret b-engine-key: has keys or data of Argosy"
            )
        ),
        [],
        "accepted",
        "failed",
        ["the Secret b-engine-key", "remove what the message names"],
    ),
    "idle at zero": (
        scaled(
            0, condition("Ready", "True", "ScaledToZero", "the next one is held until a replica has started")
        ),
        [],
        "ready",
        "done",
        ["the next one is held"],
    ),
    "paused at zero": (
        scaled(0, condition("Ready", "False", "Paused", "no replica starts while paused"), paused=True),
        [],
        "accepted",
        "failed",
        ["no replica starts", "spec.paused to false"],
    ),
    "a scaled service whose spec.replicas is 0": (
        scaled(3, NOT_READY, replicas=0),
        [],
        "pods",
        "waiting",
        ["3 replicas wanted", "none exist yet"],
    ),
    "scaled to zero and not there yet": (
        scaled(0, condition("Ready", "False", "RollingOut", "1 replica ends")),
        [],
        "ready",
        "waiting",
        ["0 replicas wanted", "1 replica ends"],
    ),
    "scaled by two": (
        scaled(2, NOT_READY, condition("Degraded", "True", "ScaledTwice", "an-hpa writes spec.replicas")),
        [unscheduled("0/2 nodes are available")],
        "node",
        "failed",
        ["note: ScaledTwice: an-hpa writes", "remove one of the two"],
    ),
    "a time zone that does not exist": (
        scaled(
            2,
            condition("Ready", "True", "ReplicasRoutable"),
            condition("Degraded", "True", "UnknownTimeZone", "schedules in Mars are ignored"),
        ),
        [pod()],
        "ready",
        "done",
        ["note: UnknownTimeZone", "correct spec.scaling.schedules"],
    ),
    "router unreachable": (
        scaled(
            2,
            condition("Ready", "True", "ReplicasRoutable"),
            condition(
                "Degraded", "True", "RouterUnreachable", "router r-1 runs and has not answered the operator"
            ),
        ),
        [pod()],
        "ready",
        "done",
        ["note: RouterUnreachable", "port 8081 of that pod"],
    ),
    "autoscaler of the deployment": (
        scaled(
            2,
            condition("Ready", "True", "ReplicasRoutable"),
            condition(
                "Degraded", "True", "DeploymentScaled", "HorizontalPodAutoscaler hpa scales the Deployment"
            ),
        ),
        [pod()],
        "ready",
        "done",
        ["note: DeploymentScaled", "scaleTargetRef be the InferenceService"],
    ),
}
CASES["scaled to zero"] = (*CASES["scaled to zero"][:2], "pods", "stopped", ["--replicas=1"])
