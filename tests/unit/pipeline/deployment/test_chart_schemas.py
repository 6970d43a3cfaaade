"""Custom objects of charts under the schemas that their operators publish."""

from pathlib import Path

import jsonschema
import pytest

from tests.support.charts import PRODUCTION, Release, write_chart
from tests.support.operator_schemas import MODULES, check_published, published_schema


@pytest.mark.long
def test_custom_objects_are_valid_by_the_schemas_of_their_operators(tmp_path: Path) -> None:
    seen = set()
    for document in Release(write_chart(tmp_path), PRODUCTION).objects:
        kind = (document["apiVersion"], document["kind"])
        if kind in MODULES:
            seen.add(kind)
            schema = published_schema(*kind)
            check_published(document, schema)
            with pytest.raises(jsonschema.ValidationError):
                check_published({**document, "spec": {**document["spec"], "misspelled": 1}}, schema)
    assert seen == MODULES.keys()
