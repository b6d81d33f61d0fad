{{- define "argosy.image" -}}
{{- $image := index . 0 -}}{{- $root := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "argosy.labels" -}}
app.kubernetes.io/name: argosy
app.kubernetes.io/component: {{ index . 0 }}
app.kubernetes.io/instance: {{ (index . 1).Release.Name | quote }}
app.kubernetes.io/version: {{ (index . 1).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 1).Release.Service }}
helm.sh/chart: {{ (index . 1).Chart.Name }}-{{ (index . 1).Chart.Version }}
{{- end -}}

{{- define "argosy.selector" -}}
app.kubernetes.io/name: argosy
app.kubernetes.io/component: {{ index . 0 }}
app.kubernetes.io/instance: {{ (index . 1).Release.Name | quote }}
{{- end -}}

{{/* Labels and annotations of pods: those of the selector, and those of a component's values. */}}
{{- define "argosy.podMetadata" -}}
{{- $values := index (index . 1).Values (index . 0) -}}
labels:
  {{- include "argosy.selector" . | nindent 2 }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The restricted Pod Security profile. */}}
{{- define "argosy.podSecurity" -}}
runAsNonRoot: true
{{- if not .Values.arbitraryUids }}
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "argosy.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
runAsNonRoot: true
{{- end -}}

{{/* Whether files, batches and responses are kept, by `argosy batch`. */}}
{{- define "argosy.hasBatch" -}}
{{- if or .Values.batch.storage.volume .Values.batch.storage.bucket }}true{{ end -}}
{{- end -}}

{{/* Values of releases whose routers kept files and batches themselves. Ignored they would lose the storage. */}}
{{- define "argosy.refuseMovedValues" -}}
{{- range $name, $value := .Values.router.storage -}}
{{- if $value -}}
{{- fail (printf "router.storage.%s has become batch.storage.%s: files, batches and responses are kept by a program of their own, argosy-batch. Move router.storage to batch.storage; a cloud's identity for the bucket moves from router.serviceAccount.annotations to batch.serviceAccount.annotations, and a proxy to it from router.env to batch.env." $name $name) -}}
{{- end -}}
{{- end -}}
{{- range .Values.router.extraArgs -}}
{{- if regexMatch "^--(storage|max-file-bytes|batch-max-)" . -}}
{{- fail (printf "router.extraArgs has %s, a flag of argosy batch: move it to batch.extraArgs. How long responses are kept is --response-ttl of the routers." .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "argosy.fleetKeySecret" -}}
{{ .Values.fleetKey.existingSecret | default "argosy-fleet-key" }}
{{- end -}}

{{/* Keys from values are part of the release, so their Secret has another name than the one the operator creates. */}}
{{- define "argosy.routerKeysSecret" -}}
{{- if .Values.router.existingKeysSecret -}}
{{ .Values.router.existingKeysSecret }}
{{- else if .Values.router.apiKeys -}}
argosy-router-given-keys
{{- else -}}
argosy-router-keys
{{- end -}}
{{- end -}}

{{/* Secrets of the release that no service of its namespace may name. */}}
{{- define "argosy.reservedSecrets" -}}
{{- $names := list (include "argosy.fleetKeySecret" .) (include "argosy.routerKeysSecret" .) -}}
{{- $names = concat $names (list .Values.router.tlsSecret .Values.router.ingress.tlsSecret .Values.batch.storage.credentialsSecret) -}}
{{- join "," (compact $names | uniq) -}}
{{- end -}}

{{/* Whether the operator creates a key for clients. */}}
{{- define "argosy.makesRouterKeys" -}}
{{- if and .Values.router.requireKeys (not .Values.router.existingKeysSecret) (not .Values.router.apiKeys) }}true{{ end -}}
{{- end -}}

{{- define "argosy.imagePullSecrets" -}}
{{- $names := list -}}
{{- range concat ((.Values.global).imagePullSecrets | default list) .Values.imagePullSecrets -}}
{{- if kindIs "map" . }}{{ $names = append $names .name }}{{ else }}{{ $names = append $names . }}{{ end -}}
{{- end -}}
{{- join "," ($names | uniq) -}}
{{- end -}}

{{- define "argosy.podImagePullSecrets" -}}
{{- with include "argosy.imagePullSecrets" . }}
imagePullSecrets:
{{- range splitList "," . }}
- name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A list of names and values as a JSON object. */}}
{{- define "argosy.asObject" -}}
{{- $object := dict -}}
{{- range . }}{{ $object = set $object .name .value }}{{ end -}}
{{- toJson $object -}}
{{- end -}}

{{/* Address of the routers. Its second argument is the namespace: in variables that of the pod, $(POD_NAMESPACE), so that
     Kustomize can move the objects to another one. */}}
{{- define "argosy.routerUrl" -}}
{{- $namespace := index . 1 -}}{{- with index . 0 -}}
{{- $standard := ternary 443 80 (not (empty .Values.router.tlsSecret)) -}}
{{ ternary "https" "http" (not (empty .Values.router.tlsSecret)) }}://argosy-router.{{ $namespace }}.svc
{{- if ne (int .Values.router.service.port) $standard }}:{{ .Values.router.service.port }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* Rules of the operator in the namespaces it serves. Secrets are written and never read. */}}
{{- define "argosy.operatorRules" -}}
- apiGroups: [inference.argosy.dev]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [inference.argosy.dev]
  resources: [inferenceservices/status]
  verbs: [patch]
- apiGroups: [inference.argosy.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# An autoscaler of a service with spec.scaling decides instead of the operator, and one of its Deployment is named in the
# status. Without the rule neither is noticed.
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{- define "argosy.operatorClusterRules" -}}
# Model names that begin with the name of a namespace are its services' alone, also before it has any. Without the rule
# they are from its first service on.
- apiGroups: [""]
  resources: [namespaces]
  verbs: [list, watch]
{{- end -}}

{{- define "argosy.routerRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
{{- end -}}
