{{- define "mindie-mm.labels" -}}
app.kubernetes.io/name: mindie-mm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "mindie-mm.name" -}}
{{ if contains "mindie-mm" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-mindie-mm{{ end }}
{{- end -}}

{{- define "mindie-mm.metadata" -}}
name: {{ include "mindie-mm.name" . }}
labels:
  {{- include "mindie-mm.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "mindie-mm.probe" -}}
port: http
{{- if .Values.tlsSecret }}
scheme: HTTPS
{{- end }}
{{- end -}}
