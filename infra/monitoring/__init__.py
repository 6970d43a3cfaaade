"""A dashboard of Grafana and alert rules of Prometheus, made from the catalogue of metrics."""
