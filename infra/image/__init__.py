"""Images of a broker and of every role, built from files of this machine: `python -m rollstream.infra.image build`.

They need no registry. That of the broker keeps the contract of the official apache/kafka image. Builds from the same
inputs are equal bit by bit.
"""
