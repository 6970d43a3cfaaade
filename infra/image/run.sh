#!/bin/sh
# What the container runs: settings from KAFKA_* variables, storage formatted where it is new, then the broker.
# The same wrapper does it in the official image, so the variables mean the same.
set -e
: "${CLUSTER_ID:=5L6g3nShT-eMCtK--X86sw}"
: "${KAFKA_HEAP_OPTS:=-Xms96m -Xmx320m}"
export CLUSTER_ID
java="/opt/java/bin/java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Djava.awt.headless=true"
libs="/opt/kafka/libs/*"
# The wrapper refuses storage that is formatted already, after it has rendered the settings: that is a restart.
# shellcheck disable=SC2086
said=$($java -cp "$libs" kafka.docker.KafkaDockerWrapper setup --default-configs-dir /etc/kafka/docker \
  --mounted-configs-dir /mnt/shared/config --final-configs-dir /opt/kafka/config 2>&1) ||
  echo "$said" | grep -i "already formatted" || { echo "$said" && exit 1; }
# shellcheck disable=SC2086
exec $java $KAFKA_HEAP_OPTS -XX:+ExitOnOutOfMemoryError \
  ${KAFKA_LOG4J_OPTS:--Dlog4j2.configurationFile=/opt/kafka/config/log4j2.yaml} ${KAFKA_OPTS:-} \
  -cp "$libs" kafka.Kafka /opt/kafka/config/server.properties
