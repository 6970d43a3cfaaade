"""Images of a broker and of every role, built from files of this machine: `python -m rollstream.infra.image build`.

No registry is needed. The broker's image keeps the contract of the official apache/kafka image. Builds from the same
inputs are identical, bit for bit.
"""
