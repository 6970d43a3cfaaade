"""What is on the wire: schemas, the catalogue of topics, codec, Kafka clients, provisioning. Imports no other package."""
