{{- define "perilune.labels" -}}
app.kubernetes.io/name: perilune-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "perilune.image" -}}
{{ .Values.image.repository }}{{ with dig "image" "digest" "" .Values.AsMap }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "perilune.simulatedImage" -}}
{{ dig "simulatedImage" "" .Values.AsMap | default (printf "%s-engine:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion)) }}
{{- end }}

{{- /* Of what belongs to no namespace: an operator of one namespace may have others beside it. */ -}}
{{- define "perilune.clusterName" -}}
perilune-operator{{ with .Values.watchNamespace }}-{{ $.Release.Namespace }}{{ end }}
{{- end }}

{{- /* `helm upgrade --reuse-values` brings the values of the chart before, in which newer ones are missing: none of those
may be required. */ -}}
{{- define "perilune.monitorLabels" -}}
{{ dig "monitors" "labels" (dict) .Values.AsMap | default dict | toYaml }}
{{- end }}

{{- /* The InferencePool that the chart installs a picker for; empty: it installs the operator. */ -}}
{{- define "perilune.picked" -}}
{{ dig "picker" "pool" "" .Values.AsMap }}
{{- end }}

{{- define "perilune.picker" -}}
{{ printf "%s-perilune" (include "perilune.picked" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
