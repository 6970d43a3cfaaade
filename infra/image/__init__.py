"""A Kafka image of what this machine has, for where no image registry can be reached: `python -m infra.image build`.

It keeps the contract of the official apache/kafka image. Two builds of the same parts are the same image, bit by bit.
"""
