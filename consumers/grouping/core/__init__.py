"""The fold from records of one partition to batches, drops and state. It imports no Kafka client."""
