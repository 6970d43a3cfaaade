#!/bin/sh
# The container's program: renders settings from KAFKA_* variables, formats new storage, then runs the broker.
# The official image uses the same wrapper, so the variables have the same meaning.
set -e
: "${CLUSTER_ID:=5L6g3nShT-eMCtK--X86sw}"
: "${KAFKA_HEAP_OPTS:=-Xms96m -Xmx320m}"
export CLUSTER_ID
java="/opt/java/bin/java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Djava.awt.headless=true"
libs="/opt/kafka/libs/*"
# After a restart the wrapper renders the settings, then refuses the storage because it is formatted already.
# shellcheck disable=SC2086
output=$($java -cp "$libs" kafka.docker.KafkaDockerWrapper setup --default-configs-dir /etc/kafka/docker \
  --mounted-configs-dir /mnt/shared/config --final-configs-dir /opt/kafka/config 2>&1) ||
  echo "$output" | grep -i "already formatted" || { echo "$output" && exit 1; }
# shellcheck disable=SC2086
exec $java $KAFKA_HEAP_OPTS -XX:+ExitOnOutOfMemoryError \
  ${KAFKA_LOG4J_OPTS:--Dlog4j2.configurationFile=/opt/kafka/config/log4j2.yaml} ${KAFKA_OPTS:-} \
  -cp "$libs" kafka.Kafka /opt/kafka/config/server.properties
