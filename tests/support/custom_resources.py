"""Schemas of the custom kinds that charts have, as far as ours use them; any other key counts as a misspelled name.

They are narrower than those of the operators, which let misspelled keys pass in places, such as metadata of KEDA's
triggers and the configuration of topics.
"""

from collections.abc import Mapping
from typing import Any

import jsonschema

Schema = Mapping[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 1}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
RESOURCES: Schema = {"type": "object"}
MECHANISM: Schema = {"type": "object", "properties": {"type": {"const": "scram-sha-512"}}}
OPERATIONS = [
    "Read",
    "Write",
    "Create",
    "Delete",
    "Alter",
    "Describe",
    "ClusterAction",
    "AlterConfigs",
    "DescribeConfigs",
    "IdempotentWrite",
    "All",
]


def of(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """A table with these keys and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def each(schema: Schema) -> Schema:
    """A list that is not empty."""
    return {"type": "array", "items": schema, "minItems": 1}


SELECTOR = of({"matchLabels": TEXTS})
LISTENER = of(
    {
        "name": {"type": "string", "pattern": "^[a-z0-9]{1,11}$"},
        "port": {"type": "integer", "minimum": 9092},
        "type": {"const": "internal"},
        "tls": {"type": "boolean"},
    },
    {"authentication": MECHANISM, "networkPolicyPeers": each(of({"podSelector": SELECTOR}))},
)
VOLUME = of(
    {
        "id": {"type": "integer"},
        "type": {"const": "persistent-claim"},
        "size": TEXT,
        "deleteClaim": {"type": "boolean"},
        "kraftMetadata": {"const": "shared"},
    },
    {"class": TEXT},
)
ACL = of(
    {
        "resource": of(
            {
                "type": {"enum": ["topic", "group", "cluster", "transactionalId"]},
                "name": TEXT,
                "patternType": {"enum": ["literal", "prefix"]},
            }
        ),
        "operations": each({"enum": OPERATIONS}),
    }
)
SCALE_DOWN = of(
    {
        "stabilizationWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
        "policies": each(of({"type": {"const": "Pods"}, "value": COUNT, "periodSeconds": COUNT})),
    }
)
TRIGGER = of(
    {
        "type": {"const": "prometheus"},
        "metadata": of(
            {
                "serverAddress": {"type": "string", "pattern": "^https?://"},
                "query": TEXT,
                "threshold": {"type": "string", "pattern": "^[0-9]+$"},
                "ignoreNullValues": {"enum": ["true", "false"]},
            }
        ),
    }
)
SPECS: Mapping[tuple[str, str], Schema] = {
    ("kafka.strimzi.io/v1", "Kafka"): of(
        {
            "kafka": of(
                {
                    "version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
                    "listeners": each(LISTENER),
                    "config": {"type": "object"},
                },
                {"authorization": of({"type": {"const": "simple"}})},
            ),
            "entityOperator": of({"topicOperator": of({}), "userOperator": of({})}),
        }
    ),
    ("kafka.strimzi.io/v1", "KafkaNodePool"): of(
        {
            "replicas": COUNT,
            "roles": {"const": ["controller", "broker"]},
            "storage": of({"type": {"const": "jbod"}, "volumes": each(VOLUME)}),
            "resources": RESOURCES,
        }
    ),
    ("kafka.strimzi.io/v1", "KafkaTopic"): of(
        {
            "topicName": TEXT,
            "partitions": COUNT,
            "replicas": COUNT,
            "config": {"type": "object"},
        }
    ),
    ("kafka.strimzi.io/v1", "KafkaUser"): of(
        {"authentication": MECHANISM, "authorization": of({"type": {"const": "simple"}, "acls": each(ACL)})}
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): of(
        {
            "scaleTargetRef": of({"apiVersion": {"const": "apps/v1"}, "kind": {"const": "StatefulSet"}, "name": TEXT}),
            "minReplicaCount": COUNT,
            "maxReplicaCount": COUNT,
            "cooldownPeriod": COUNT,
            "advanced": of({"horizontalPodAutoscalerConfig": of({"behavior": of({"scaleDown": SCALE_DOWN})})}),
            "triggers": each(TRIGGER),
        }
    ),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): of(
        {
            "network": of(
                {
                    "enableDNSHostnames": {"type": "boolean"},
                    "subdomain": TEXT,
                    "publishNotReadyAddresses": {"type": "boolean"},
                }
            ),
            "failurePolicy": of({"maxRestarts": COUNT}),
            # The template is that of a Job, which has a schema of its own.
            "replicatedJobs": each(
                of({"name": TEXT, "replicas": {"const": 1}, "template": of({"spec": {"type": "object"}})})
            ),
        }
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): of(
        {
            "selector": SELECTOR,
            "podMetricsEndpoints": each(of({"port": TEXT, "path": {"const": "/metrics"}, "interval": TEXT})),
        }
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): of(
        {
            "groups": each(
                of(
                    {
                        "name": TEXT,
                        "rules": each(
                            of({"alert": TEXT, "expr": TEXT, "for": TEXT, "labels": TEXTS, "annotations": TEXTS})
                        ),
                    }
                )
            )
        }
    ),
}
"""Schemas of the specs, by version and kind."""


def check_custom(document: Mapping[str, Any]) -> None:
    """Raise ValidationError if an object of a custom kind is not as its operator reads it."""
    spec = SPECS[document["apiVersion"], document["kind"]]
    whole = of({"apiVersion": TEXT, "kind": TEXT, "metadata": {"type": "object"}, "spec": spec})
    jsonschema.validate(document, whole)
