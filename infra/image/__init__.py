"""A Kafka image built from files of this machine, without a registry: `python -m rollstream.infra.image build`.

It keeps the contract of the official apache/kafka image. Builds from the same inputs are equal bit by bit.
"""
