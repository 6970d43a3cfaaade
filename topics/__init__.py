"""What is on the wire: schemas, the catalogue, codec, Kafka clients, provisioning. Imports no other package here."""
