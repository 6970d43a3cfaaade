"""Who reads the log: grouping, the batch reader, the learner and the weights."""
