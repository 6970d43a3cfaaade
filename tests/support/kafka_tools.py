"""Commands of Kafka's own distribution, as pages show them, run by the class behind each script."""

import os
import shlex
import subprocess
from pathlib import Path

from rollstream.infra.broker.java_runtime import find_jars, find_java, packaged_java
from tests.support.maven_files import maven_file

CLASSES = {
    "kafka-console-consumer.sh": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "kafka-consumer-groups.sh": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "kafka-get-offsets.sh": "org.apache.kafka.tools.GetOffsetShell",
    "kafka-reassign-partitions.sh": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
    "kafka-transactions.sh": "org.apache.kafka.tools.TransactionsCommand",
}
_TOOLS = "org.apache.kafka:kafka-tools:4.2.1:jar", "28142ee12baf9e7d46e4784c612aed7a8565e80462616b0ddfb4e2f8d7837e53"


def output_of(line: str, directory: Path | None = None) -> str:
    """Output of a command in a working directory; it must exit with 0."""
    script, *words = shlex.split(line)
    java = find_java(os.environ, packaged_java()).runtime
    assert java is not None
    jars = find_jars(os.environ, java).jars
    assert jars is not None
    path = f"{maven_file(*_TOOLS)}:{jars.classpath}"
    done = subprocess.run(
        [str(java.executable), "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", path, CLASSES[script], *words],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=directory,
    )
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    return done.stdout
