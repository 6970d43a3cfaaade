"""A Helm chart of a run: its workloads, brokers, users, policies and monitoring, made from the run's description."""
