"""Weights through the log: the publisher of policy versions and the follower that never shows a torn one."""
