{{- /* Helpers take (dict "root" $ "name" NAME), where NAME is a key of run.pods, or the root itself. */ -}}

{{- define "rollstream.runLabels" -}}
app.kubernetes.io/name: rollstream
app.kubernetes.io/instance: {{ .root.Values.run.name }}
{{- end }}

{{- define "rollstream.labels" -}}
{{ include "rollstream.runLabels" . }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- /* Metadata of an object, which is named like its role unless `object` says more. */ -}}
{{- define "rollstream.metadata" -}}
name: {{ .root.Values.run.name }}-{{ .object | default .name }}
labels:
  {{- include "rollstream.labels" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- /* Metadata of an object of Strimzi. */ -}}
{{- define "rollstream.kafkaMetadata" -}}
name: {{ .root.Values.run.name }}-{{ .name }}
labels:
  strimzi.io/cluster: {{ .root.Values.run.name }}-kafka
  rollstream/run: {{ .root.Values.run.name }}
{{- end }}

{{- /* "true" if the release runs the brokers, else empty. */ -}}
{{- define "rollstream.ownBrokers" -}}
{{- if and .Values.brokers.enabled .Values.run.ownBrokers }}true{{ end }}
{{- end }}

{{- /* "true" if each role has a user on brokers of the release, else empty. */ -}}
{{- define "rollstream.users" -}}
{{- if and (include "rollstream.ownBrokers" .) .Values.brokers.security }}true{{ end }}
{{- end }}

{{- define "rollstream.bootstrapServers" -}}
{{- if include "rollstream.ownBrokers" . -}}
{{ .Values.run.name }}-kafka-kafka-bootstrap:{{ ternary 9093 9092 .Values.brokers.security }}
{{- else -}}
{{ .Values.brokers.bootstrapServers | default .Values.run.bootstrapServers | required "brokers.enabled is false: name your brokers in brokers.bootstrapServers" }}
{{- end }}
{{- end }}

{{- define "rollstream.secretName" -}}
{{ .Values.secretName | default (printf "%s-secrets" .Values.run.name) }}
{{- end }}

{{- /* Values of a pod: those of its role over the defaults, as YAML. */ -}}
{{- define "rollstream.values" -}}
{{- $defaults := pick .root.Values "resources" "nodeSelector" "tolerations" "affinity" | deepCopy }}
{{- mergeOverwrite $defaults (index .root.Values.roles .name | default dict | deepCopy) | toYaml }}
{{- end }}

{{- /* Number of processes of a role, which is a value if the role can be scaled. */ -}}
{{- define "rollstream.replicas" -}}
{{- $pod := index .root.Values.run.pods .name }}
{{- $values := index .root.Values.roles .name | default dict }}
{{- if hasKey $values "replicas" }}
{{- if gt (int $values.replicas) (int $pod.most) }}
{{- fail (printf "roles.%s.replicas is %d, but the settings of the run allow %d at most" .name (int $values.replicas) (int $pod.most)) }}
{{- end }}
{{- int $values.replicas }}
{{- else }}
{{- int $pod.replicas }}
{{- end }}
{{- end }}

{{- /* Variables that only the pods of a role have: secrets, its user, and the address of the first learner process. */ -}}
{{- define "rollstream.env" -}}
{{- $run := .root.Values.run }}
{{- $pod := index $run.pods .name }}
{{- range $variable, $key := $pod.secretVariables }}
- name: {{ $variable | quote }}
  valueFrom:
    secretKeyRef: {name: {{ include "rollstream.secretName" $.root }}, key: {{ $key | quote }}}
{{- end }}
{{- with .coordinator }}
- name: ROLLSTREAM_LEARNER__COORDINATOR
  value: {{ . | quote }}
{{- end }}
{{- if include "rollstream.users" .root }}
{{- $user := printf "%s-%s" $run.name ($pod.user | default .name) }}
- name: ROLLSTREAM_KAFKA__CLIENT__SASL_USERNAME
  value: {{ $user }}
- name: ROLLSTREAM_KAFKA__CLIENT__SASL_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ $user }}, key: password}
{{- end }}
{{- end }}

{{- /* What the containers of a pod share. */ -}}
{{- define "rollstream.container" -}}
{{- $root := .root }}
{{- $run := $root.Values.run }}
{{- $pod := index $run.pods .name }}
{{- $values := include "rollstream.values" . | fromYaml -}}
image: {{ coalesce $values.image $pod.image $root.Values.image $run.image | quote }}
imagePullPolicy: {{ $root.Values.imagePullPolicy }}
workingDir: {{ $root.Values.workingDir | quote }}
envFrom:
  - configMapRef: {name: {{ $run.name }}-settings}
  {{- with concat $root.Values.extraEnvFrom ($values.extraEnvFrom | default list) }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with include "rollstream.env" . | trim }}
env:
  {{- . | nindent 2 }}
{{- end }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: files, mountPath: /var/lib/rollstream}
  - {name: tmp, mountPath: /tmp}
  {{- if $run.file }}
  - {name: config, mountPath: /etc/rollstream, readOnly: true}
  {{- end }}
  {{- if $pod.secretFiles }}
  - {name: secrets, mountPath: /run/secrets, readOnly: true}
  {{- end }}
  {{- if include "rollstream.users" $root }}
  - {name: kafka-ca, mountPath: /etc/kafka-ca, readOnly: true}
  {{- end }}
  {{- with $root.Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- /* Template of the pods of a role or a command. With `coordinator`, pods of a learner of several processes. */ -}}
{{- define "rollstream.pod" -}}
{{- $root := .root }}
{{- $run := $root.Values.run }}
{{- $pod := index $run.pods .name }}
{{- $values := include "rollstream.values" . | fromYaml }}
{{- $config := ternary (list "--config" "/etc/rollstream/run.toml") list (not (empty $run.file)) -}}
metadata:
  labels:
    {{- include "rollstream.labels" . | nindent 4 }}
  annotations:
    # Pods are replaced when settings change.
    checksum/settings: {{ include (print $root.Template.BasePath "/settings.yaml") $root | sha256sum | trunc 12 | quote }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add $run.stopTimeoutSeconds 10 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  nodeSelector: {{ toJson $values.nodeSelector }}
  tolerations: {{ toJson $values.tolerations }}
  affinity: {{ toJson $values.affinity }}
  {{- if has $pod.kind (list "JobSet" "CronJob") }}
  restartPolicy: Never
  {{- else if eq $pod.kind "Job" }}
  restartPolicy: OnFailure
  {{- if $pod.service }}
  subdomain: {{ $run.name }}-{{ .name }}
  {{- end }}
  {{- end }}
  {{- if $pod.service }}
  initContainers:
    - name: wait
      command: [rollstream]
      args:
        {{- $waits := list "deploy" "wait" .name "--wait" "600" }}
        {{- range $pod.after }}
        {{- $waits = concat $waits (list "--ready" (printf "%s-%s:%d" $run.name . (int $run.servicePort))) }}
        {{- end }}
        {{- concat $waits $config | toYaml | nindent 8 }}
      resources: {{ toJson $root.Values.wait.resources }}
      {{- include "rollstream.container" . | nindent 6 }}
  {{- end }}
  containers:
    - name: rollstream
      {{- if $pod.args }}
      command: [rollstream]
      args: {{ concat $pod.args $config | toJson }}
      {{- else }}
      # Waits for `kubectl exec`. The first process of a container gets only signals for which it has a handler.
      command: [python, -c, "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit()); signal.pause()"]
      args: []
      {{- end }}
      resources: {{ toJson $values.resources }}
      {{- if $pod.probes }}
      ports:
        - {name: service, containerPort: {{ int $run.servicePort }}}
        {{- if and $pod.http (eq (first $pod.http) (last $pod.http)) }}
        - {name: http, containerPort: {{ first $pod.http | int }}}
        {{- end }}
      # Until twice the time after which a process gives up by itself, so that its own error ends it first
      startupProbe:
        httpGet: {path: /readyz, port: service}
        periodSeconds: 5
        timeoutSeconds: 10
        failureThreshold: {{ div (add (mul 2 $run.readyTimeoutSeconds) 4) 5 }}
      livenessProbe:
        httpGet: {path: /livez, port: service}
        periodSeconds: 15
        timeoutSeconds: 10
        failureThreshold: 4
      readinessProbe:
        httpGet: {path: /readyz, port: service}
        periodSeconds: 15
        timeoutSeconds: 10
        failureThreshold: 2
      {{- end }}
      {{- include "rollstream.container" . | nindent 6 }}
  volumes:
    - name: files
      {{- if $pod.accessMode }}
      persistentVolumeClaim: {claimName: {{ $run.name }}-{{ .name }}}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: tmp
      emptyDir: {}
    {{- if $run.file }}
    - name: config
      configMap: {name: {{ $run.name }}-config}
    {{- end }}
    {{- with $pod.secretFiles }}
    - name: secrets
      secret:
        secretName: {{ include "rollstream.secretName" $root }}
        items:
          {{- range . }}
          - {key: {{ . }}, path: {{ . }}}
          {{- end }}
    {{- end }}
    {{- if include "rollstream.users" $root }}
    # Strimzi's own authority; its private key is in another Secret.
    - name: kafka-ca
      secret:
        secretName: {{ $run.name }}-kafka-cluster-ca-cert
        items: [{key: ca.crt, path: ca.crt}]
    {{- end }}
    {{- with $root.Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
