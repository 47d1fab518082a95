{{- define "headrace.image" -}}
{{- if not .Values.image.digest -}}
{{- fail "image.digest is not set. Give the digest that `docker push` prints: --set image.digest=sha256:..." -}}
{{- end -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- end -}}

{{- define "headrace.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: headrace
{{- end -}}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace-sidecar
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* the labels of the training pods, which the NetworkPolicy selects */}}
{{- define "headrace.trainer" -}}
app.kubernetes.io/name: headrace-train
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "headrace.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "headrace.settings" -}}
{{- range $name, $value := .Values.settings }}
- {name: HEADRACE_SIDECAR_{{ upper $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end -}}

{{/* the cache's directories as the setting cache_dir: /cache/0=64GiB,/cache/1=2TiB */}}
{{- define "headrace.cacheDir" -}}
{{- $tiers := list -}}
{{- range $n, $tier := .Values.cache.tiers -}}
{{- $tiers = append $tiers (printf "/cache/%d/headrace=%s" $n $tier.size) -}}
{{- end -}}
{{- join "," $tiers -}}
{{- end -}}

{{- define "headrace.check" -}}
{{- if and .Values.buddies.enabled (not .Values.localTier.enabled) -}}
{{- fail "buddies.enabled needs localTier.enabled: buddies copy the steps of the local tier" -}}
{{- end -}}
{{- if and .Values.buddies.enabled (lt (len .Values.buddies.nodes) 2) -}}
{{- fail "buddies.nodes needs two nodes at least: each sends its steps to the next" -}}
{{- end -}}
{{- if and .Values.buddies.enabled .Values.buddies.certManager.enabled (not .Values.buddies.certManager.issuerRef.name) -}}
{{- fail "buddies.certManager.issuerRef.name is not set: name an Issuer of cert-manager that has a CA" -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled (not .Values.metrics.enabled) -}}
{{- fail "podMonitor.enabled needs metrics.enabled: the daemon's status page listens on loopback only" -}}
{{- end -}}
{{- end -}}
