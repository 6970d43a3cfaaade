"""The Grafana dashboard and the Prometheus alert rules, which use the metrics of the catalogue."""
